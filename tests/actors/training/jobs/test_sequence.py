"""Members of a stage compute slices of sequences: as one member does, whatever failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.actors.training.member.sharing import LinkedGroup
from tests.actors.transport.gloo_links import links
from tests.ray_nodes import Attempt
from torch import Tensor

from share_compute.lifecycle.attempt_events import AttemptEvent
from share_compute.models.blueprint import Blueprint
from share_compute.models.factory import build_stage
from share_compute.models.storage.weights import WeightFolder
from share_compute.protocol.failures import FailureKind, InjectedFailure
from share_compute.protocol.membership import Membership, fresh
from share_compute.protocol.messages import Report
from share_compute.protocol.points import Point
from share_compute.protocol.tree import SummationTree
from share_compute.shards import Shard
from share_compute.specification import TrainingSpec
from share_compute_actors.training.member.runner import Runner
from share_compute_actors.training.member.slice_runner import SliceRunner
from share_compute_actors.training.membership.epochs import computed_again
from share_compute_actors.transport.collective.algorithms import GlooLinks, start_turn

LLAMA = {
    "model_type": "llama", "vocab_size": 64, "num_key_value_heads": 2, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip
PARTS, BATCH, LENGTH = 2, 2, 16


class RingGroup(LinkedGroup):
    """`LinkedGroup` with the operations of a member that has slices."""

    def __init__(self, linked: GlooLinks) -> None:
        super().__init__(linked)
        self._linked = linked

    def turn_ring(
        self, given: Mapping[int, Sequence[Tensor]], holders: Sequence[int]
    ) -> dict[int, list[Tensor]]:
        run, found = start_turn(self._linked, given, holders)
        run()
        return found


def texts(part: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 64, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(part))
    return ids[:, :-1], ids[:, 1:]


def runner_of(kind: type[Runner], slices: int, *, recomputes: bool) -> Runner:
    stage = build_stage(
        Blueprint(config=LLAMA, activation_checkpointing=recomputes), Shard("m", 0, 2, 2), torch.device("cpu")
    )
    stage.initialize(3)
    if slices > 1:
        stage.cut_sequences()
    training = TrainingSpec.model_validate({"batch_size": BATCH * PARTS, "microbatches": PARTS})
    return kind(stage, training, SummationTree((PARTS,) * slices))


def whole(*, recomputes: bool) -> tuple[list[Tensor], float]:
    runner = runner_of(Runner, 1, recomputes=recomputes)
    for part in range(PARTS):
        inputs, targets = texts(part)
        runner.forward(1, part, inputs)
        runner.backward(part, targets)
    return runner.gradients.parts(0), sum(runner.losses().values())


def by_members(holders: Sequence[int], *, recomputes: bool) -> tuple[list[Tensor], float]:
    """Return the sums of gradients of each slice, and the loss, computed by the members that hold the slices."""
    slices, members = len(holders), max(holders) + 1
    runners = [runner_of(SliceRunner, slices, recomputes=recomputes) for _ in range(members)]
    found = links(members) if members > 1 else [None]

    def train(rank: int) -> list[tuple[int, Tensor]]:
        runner, linked = runners[rank], found[rank]
        assert isinstance(runner, SliceRunner)
        group: Any = None if linked is None else RingGroup(linked)
        runner.join(group, rank)
        own = [index for index, holder in enumerate(holders) if holder == rank]
        for part in range(PARTS):
            inputs, targets = (each.chunk(slices, 1) for each in texts(part))
            ids = {index * PARTS + part: index for index in own}
            runner.join_ring(holders)
            runner.forward_slices(1, {each: inputs[index] for each, index in ids.items()})
            runner.join_ring(holders)
            runner.backward_slices({each: targets[index] for each, index in ids.items()})
        return list(
            zip([node.start for node in runner.gradients.held], runner.gradients.parts(0), strict=True)
        )

    with ThreadPoolExecutor(members) as pool:
        held = sorted(each for own in pool.map(train, range(members)) for each in own)
    losses: dict[int, float] = {}
    for runner in runners:
        losses |= runner.losses()
    return [part for _, part in held], sum(losses.values())


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("slices", [2, 4])
def test_members_train_as_one(slices: int, recomputes: bool) -> None:
    (expected,), loss = whole(recomputes=recomputes)
    apart, found = by_members(range(slices), recomputes=recomputes)
    assert found == pytest.approx(loss, abs=1e-4)
    torch.testing.assert_close(sum(apart), expected, atol=1e-5, rtol=0)


@pytest.mark.exact
@pytest.mark.parametrize("holders", [(0, 0, 1, 1), (0, 1, 1, 2)])
def test_slices_of_lost_members_have_the_same_bits(holders: tuple[int, ...]) -> None:
    apart, loss = by_members(range(4), recomputes=False)
    left, found = by_members(holders, recomputes=False)
    assert found == loss
    whole_sum = (apart[0] + apart[1]) + (apart[2] + apart[3])
    if len(left) == 2:  # members have added their runs, as the tree does
        assert torch.equal(left[0] + left[1], whole_sum)
    else:
        assert torch.equal((left[0] + left[1]) + (left[2] + left[3]), whole_sum)


def test_all_slices_of_an_open_step_count_as_computed_again() -> None:
    owners = (("a", "a", "b", "b"),)
    before = Membership(1, ((0, 1),), (("a", "b"),), owners, step=1, tasks=fresh(owners), slices=2)
    left = (("a",) * 4,)
    after = replace(before, epoch=2, stages=(("a",),), owners=left, tasks=fresh(left))
    empty = Report(2, "a", applied=0, step=1)
    assert computed_again(before, after, [replace(empty, activations=frozenset({0}))]) == 4
    assert computed_again(before, after, [empty]) == 0


def job(corpus: Path, steps: int = 4, **parallelism: Any) -> dict[str, Any]:
    return {
        "model": {"config": {**LLAMA, "vocab_size": 300}},
        "data": {"files": [str(corpus)]},
        "tokenizer": {"vocab_size": 300},
        "training": {
            "steps": steps,
            "batch_size": 4,
            "microbatches": 2,
            "sequence_length": 32,
            "optimizer": {"learning_rate": 0.01},
        },
        "parallelism": {"stages": 2, **parallelism},
    }


def losses_of(events: list[AttemptEvent]) -> dict[int, float]:
    assert events[-1].type == "ended"
    assert events[-1].outcome == "succeeded", events[-1].reason
    return {event.step: event.loss for event in events if event.type == "step"}


@pytest.mark.slow
def test_a_job_recovers_from_the_loss_of_a_slice(attempt: Attempt, tmp_path: Path) -> None:
    corpus = tmp_path / "licence.txt"
    corpus.write_text((Path(__file__).parents[4] / "LICENSE").read_text() * 4)
    failures = [
        InjectedFailure(FailureKind.kill, Point.cell_done, worker="c1", step=2),
        InjectedFailure(FailureKind.kill, Point.apply_done, worker="c2", step=3),
    ]
    alone = losses_of(attempt(job(corpus, members_per_stage=1), number=1, folder=tmp_path / "alone"))
    found = {}
    for number, (name, injected) in enumerate({"calm": [], "killed": failures}.items(), start=2):
        folder = tmp_path / name
        events = attempt(job(corpus, sequence=2), number=number, folder=folder, failures=injected)
        found[name] = losses_of(events), WeightFolder(folder / "artifacts" / "model").digest()
        lost = {worker for event in events if event.type == "reformed" for worker in event.lost}
        assert lost == {failure.worker for failure in injected}
    assert found["killed"] == found["calm"]
    assert found["calm"][0] == pytest.approx(alone, abs=1e-5)
