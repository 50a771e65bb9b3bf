"""Ranks of a member compute layers together as one process does, and a lost rank ends the member."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tests.ray_nodes import Attempt, processes_on, title
from torch import Tensor
from torch.nn.functional import cross_entropy

from share_compute.errors import ContributorLost, UserError
from share_compute.lifecycle.attempt_events import AttemptEvent
from share_compute.models.blueprint import Blueprint
from share_compute.models.factory import build_stage
from share_compute.models.objective import Objective
from share_compute.models.stage import Stage
from share_compute.models.storage.weights import WeightFolder
from share_compute.shards import Shard
from share_compute.specification.placement.operators import OperatorsSpec
from share_compute.topology import Topology
from share_compute_actors.group.ranks.processes import RankDevices
from share_compute_actors.machine.cores import share_cores
from share_compute_actors.training.member.ranks import Ranks

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ranks")]

CPU = torch.device("cpu")
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8}
LLAMA = {"model_type": "llama", "vocab_size": 64, "num_key_value_heads": 4, **SIZES}
VIT = {"model_type": "vit", "image_size": 32, "patch_size": 8, "num_labels": 4, **SIZES}
EXPERTS = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "head_dim": 16,
}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
CLASSES = Objective(task="image_classification", classes=4)
MODELS = {
    "llama": Blueprint(config=LLAMA),
    "recomputed": Blueprint(config=LLAMA, activation_checkpointing=True),
    "frozen": Blueprint(config=LLAMA, freeze=("model.embed_tokens.*", "model.layers.0.*", "*norm*")),
    "six-heads": Blueprint(
        config={**LLAMA, "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}
    ),
    "qwen3_moe": Blueprint(config=EXPERTS),
    "vit": Blueprint(config=VIT, objective=CLASSES, sample_shape=(3, 32, 32)),
    "declared": Blueprint.model_validate(
        {
            "layers": [
                {"type": "linear", "options": {"in_features": 64, "out_features": 64}},
                {"type": "relu"},
                {"type": "dropout", "options": {"p": 0.5}},
                {"type": "linear", "options": {"in_features": 64, "out_features": 4}},
            ],
            "objective": {"task": "image_classification", "classes": 4},
        }
    ),
}
BATCH, LENGTH, STEPS = 4, 16, 4


def stage_of(blueprint: Blueprint, device: torch.device = CPU) -> Stage:
    layers = blueprint.num_declared if blueprint.config is None else SIZES["num_hidden_layers"]
    return build_stage(blueprint, Shard("model", 0, layers, layers), device)


def batch_of(blueprint: Blueprint, step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    if blueprint.objective.task == "language_model":
        ids = torch.randint(0, 64, (2, BATCH, LENGTH), generator=draw)
        return ids[0], ids[1].flatten()
    samples = torch.randn(BATCH, *blueprint.sample_shape, generator=draw)
    return samples, torch.randint(0, 4, (BATCH,), generator=draw)


def loss_of(stage: Stage, blueprint: Blueprint, step: int) -> Tensor:
    inputs, targets = batch_of(blueprint, step)
    stage.module.train()
    stage.prepare_cell(1, step, 0)
    outputs = stage.forward(inputs)
    return cross_entropy(outputs.reshape(-1, outputs.shape[-1]), targets)


def test_a_model_with_dropout_is_refused() -> None:
    blueprint = Blueprint(config={**LLAMA, "attention_dropout": 0.1})
    ranks = Ranks(2, 2, 120)
    with pytest.raises(UserError, match=r"parallelism.tensor: no layer .* draws random numbers") as refused:
        ranks.divide(stage_of(blueprint), blueprint, BATCH, LENGTH)
    assert refused.value.hint
    ranks.close()


def test_a_given_strategy_that_ranks_cannot_have_is_refused() -> None:
    blueprint = MODELS["six-heads"]
    ranks = Ranks(2, 2, 120, operators=OperatorsSpec(strategies={"self_attn.scaled*": "heads"}))
    with pytest.raises(UserError, match=r"^parallelism.operators.strategies: .* cannot divide 3 evenly"):
        ranks.divide(stage_of(blueprint), blueprint, BATCH, LENGTH)
    ranks.close()


def test_a_lost_rank_ends_the_member() -> None:
    blueprint, lost = MODELS["llama"], list[ContributorLost]()
    before = set(psutil.Process().children())
    ranks = Ranks(4, 4, 120, lost.append)
    stage = stage_of(blueprint)
    ranks.divide(stage, blueprint, BATCH, LENGTH)
    stage.initialize(3)
    loss = loss_of(stage, blueprint, 1)
    children = sorted(set(psutil.Process().children()) - before, key=lambda child: child.pid)
    children[1].send_signal(signal.SIGKILL)
    with pytest.raises(ContributorLost, match="rank 2 was ended by signal 9"):
        loss.backward()
    assert [each.message for each in lost] == [
        "rank 2 was ended by signal 9: a member with parallelism.tensor 4 cannot compute without it"
    ]
    assert not any(child.is_running() for child in children)
    with pytest.raises(ContributorLost, match="another rank was lost before"):
        loss_of(stage, blueprint, 1)


def test_ranks_compute_on_parts_of_the_cpu() -> None:
    """Their gradients have the bits of ranks that share the whole CPU, with as many threads each."""
    blueprint, gradients, threads = MODELS["llama"], [], torch.get_num_threads()
    for lent in (2, 1):
        with closing(Ranks(2, 2, 120, devices=RankDevices.of("cpu", lent))) as ranks:
            stage = stage_of(blueprint)
            ranks.divide(stage, blueprint, BATCH, LENGTH)
            stage.initialize(3)
            with ranks.together():
                assert torch.get_num_threads() == 1
            if lent == 2:
                assert torch.get_num_threads() == 1, "the rest of the CPU belongs to the other rank"
                cores = [sorted(os.sched_getaffinity(each)) for each in ranks.process_ids]
                assert cores == [sorted(share_cores(2)[1]) or sorted(os.sched_getaffinity(0))]
            torch.set_num_threads(1)
            loss_of(stage, blueprint, 1).backward()
            gradients.append([each.grad for each in stage.parameters().values()])
    torch.set_num_threads(threads)
    assert all(map(torch.equal, *gradients))


def test_given_strategies_are_kept() -> None:
    blueprint = MODELS["llama"]
    given = OperatorsSpec(
        search="sharding_propagation", strategies={"mlp.up_proj": "row", "self_attn.*_proj": "batch"}
    )
    ranks = Ranks(2, 2, 120, operators=given)
    alone, together = stage_of(blueprint), stage_of(blueprint)
    divided = ranks.divide(together, blueprint, BATCH, LENGTH)
    for plan in divided.plans.values():
        found = {each.name: each.strategy for each in plan.operators}
        assert found["mlp.up_proj"] == "row"
        assert {found[f"self_attn.{name}_proj"] for name in "qkvo"} == {"batch"}
    for stage in (alone, together):
        stage.initialize(3)
    losses = [loss_of(stage, blueprint, 1) for stage in (alone, together)]
    assert losses[1].item() == pytest.approx(losses[0].item(), abs=1e-5)
    for loss in losses:
        loss.backward()
    gradients = together.trained()
    for name, parameter in alone.trained().items():
        torch.testing.assert_close(gradients[name].grad, parameter.grad, atol=2e-5, rtol=0)
    ranks.close()


@pytest.mark.parametrize("count", [2, 4])
def test_ranks_divide_experts_without_dropping_tokens(count: int) -> None:
    given = OperatorsSpec(strategies={"mlp.experts": "expert"})
    with closing(Ranks(count, count, 120, operators=given)) as ranks:
        for is_even in (True, False):
            blueprint = Blueprint(config={**MIXTRAL, "num_experts_per_tok": 2 if is_even else 1})
            alone, together = stage_of(blueprint), stage_of(blueprint)
            divided = ranks.divide(together, blueprint, BATCH, LENGTH)
            for plan in divided.plans.values():
                (experts,) = [each for each in plan.operators if each.name == "mlp.experts"]
                assert set(experts.parameters.values()) == {"Shard(0)"}
            losses = []
            for stage in (alone, together):
                stage.initialize(3)
                for name, parameter in stage.trained().items():
                    if not is_even and name.endswith("gate.weight"):
                        # With equal scores, each token goes to the same expert.
                        torch.nn.init.zeros_(parameter)
                losses.append(loss_of(stage, blueprint, 1))
                losses[-1].backward()
            assert losses[1].item() == pytest.approx(losses[0].item(), abs=1e-5)
            unused = 0
            for name, parameter in alone.trained().items():
                found = together.trained()[name].grad
                assert found is not None, name
                torch.testing.assert_close(found, parameter.grad, atol=1e-5, rtol=0)
                unused += "experts" in name and sum(not rows.any() for rows in found)
            # In both layers, 3 of 4 experts get no token, and each has two parameters.
            assert unused == (0 if is_even else 12)


def test_experts_that_ranks_cannot_divide_are_refused() -> None:
    blueprint = Blueprint(config={**MIXTRAL, "num_local_experts": 5})
    ranks = Ranks(2, 2, 120, operators=OperatorsSpec(strategies={"mlp.experts": "expert"}))
    with pytest.raises(UserError, match=r"strategies: mlp.experts cannot have .* cannot divide 5 evenly"):
        ranks.divide(stage_of(blueprint), blueprint, BATCH, LENGTH)
    ranks.close()


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    found = Ranks(request.param, request.param, 120)
    yield found
    found.close()


@pytest.mark.parametrize("model", MODELS)
def test_ranks_train_as_one_process(ranks: Ranks, model: str) -> None:
    blueprint = MODELS[model]
    alone, together = stage_of(blueprint), stage_of(blueprint)
    divided = ranks.divide(together, blueprint, BATCH, LENGTH)
    assert f"{ranks.count} ranks divide layers 0" in divided.words
    optimizers = []
    for stage in (alone, together):
        stage.initialize(3)
        optimizers.append(torch.optim.AdamW(list(stage.trained().values()), lr=1e-3))
    for step in range(STEPS):
        loss_of(together, blueprint, step)  # a forward pass without a backward pass
        losses = [loss_of(stage, blueprint, step) for stage in (alone, together)]
        assert losses[1].item() == pytest.approx(losses[0].item(), abs=1e-5)
        for optimizer, loss in zip(optimizers, losses, strict=True):
            optimizer.zero_grad()
            loss.backward()
            loss_of(together, blueprint, step).backward()  # gradients accumulate
            if optimizer is optimizers[0]:
                for parameter in together.trained().values():
                    parameter.grad = None
        for name, parameter in alone.trained().items():
            own = together.trained()[name].grad
            assert own is not None, name
            assert parameter.grad is not None, name
            assert (own - 2 * parameter.grad).abs().max() < 2e-5, name
            own.div_(2)
        for optimizer in optimizers:
            optimizer.step()
    for stage in (alone, together):
        stage.module.eval()
    inputs, _ = batch_of(blueprint, STEPS)
    with torch.no_grad():
        for samples in (inputs, inputs[:1]):  # the second one has another shape than the plan
            assert torch.allclose(alone.forward(samples), together.forward(samples), atol=1e-4)


def test_layers_that_draw_random_numbers_are_computed_by_the_first_rank(ranks: Ranks) -> None:
    divided = ranks.divide(stage_of(MODELS["declared"]), MODELS["declared"], BATCH, LENGTH)
    assert "draws random numbers" in divided.whole[2]
    assert "the first rank computes alone" in divided.words


@pytest.mark.exact
def test_the_same_ranks_compute_the_same_bits(ranks: Ranks) -> None:
    blueprint, found = MODELS["llama"], []
    for _ in range(2):
        stage = stage_of(blueprint)
        ranks.divide(stage, blueprint, BATCH, LENGTH)
        stage.initialize(3)
        loss_of(stage, blueprint, 1).backward()
        found.append([each.grad for each in stage.parameters().values()])
    assert all(map(torch.equal, *found))


def job(corpus: Path, steps: int = 6, **parallelism: Any) -> dict[str, Any]:
    return {
        "model": {"config": {**LLAMA, "num_hidden_layers": 4, "vocab_size": 300}},
        "data": {"files": [str(corpus)]},
        "tokenizer": {"vocab_size": 300},
        "training": {
            "steps": steps,
            "batch_size": 8,
            "microbatches": 4,
            "sequence_length": 32,
            "optimizer": {"learning_rate": 0.01},
        },
        "parallelism": {"stages": 2, "members_per_stage": 1, **parallelism},
    }


def losses_of(events: list[AttemptEvent]) -> dict[int, float]:
    assert events[-1].type == "ended"
    assert events[-1].outcome == "succeeded", events[-1].reason
    return {event.step: event.loss for event in events if event.type == "step"}


def test_a_job_recovers_from_the_loss_of_a_rank(
    attempt: Attempt, topology: Topology, tmp_path: Path, nodes: list[Any]
) -> None:
    """In the second run, each machine lends two devices, and each rank has one of them."""
    devices = tuple(
        replace(machine, devices=machine.devices * 2, ranks=2) for machine in topology.contributors
    )
    corpus = tmp_path / "licence.txt"
    corpus.write_text((Path(__file__).parents[4] / "LICENSE").read_text() * 4)
    digests, ended = [], list[int]()

    is_protected = False

    def end_a_rank(event: AttemptEvent, _: Any) -> None:
        nonlocal is_protected
        if event.type == "protection":
            is_protected = event.is_protected
        if event.type == "step" and event.step >= 2 and is_protected and not ended:
            member = next(process for node in nodes for process in processes_on(node, "Member"))
            (rank,) = (child for child in member.children() if "ranks" in title(child))
            ended.append(rank.pid)
            os.kill(rank.pid, signal.SIGKILL)

    runs: dict[str, Callable[[AttemptEvent, Any], None]] = {
        "calm": lambda _event, _coordinator: None,
        "killed": end_a_rank,
    }
    losses = {}
    for number, (name, on_event) in enumerate(runs.items(), start=1):
        folder = tmp_path / name
        events = attempt(
            job(corpus, 100, tensor=2),
            number=number,
            folder=folder,
            on_event=on_event,
            machines=Topology(devices, topology.links) if name == "killed" else topology,
        )
        losses[name] = losses_of(events)
        digests.append(WeightFolder(folder / "artifacts" / "model").digest())
        notes = [event.message for event in events if event.type == "note"]
        assert any("rank 1 was ended by signal 9" in note for note in notes) is bool(ended)
    assert ended
    assert digests[0] == digests[1]
    assert losses["calm"] == losses["killed"]
    alone = losses_of(attempt(job(corpus, 100), number=3, folder=tmp_path / "alone"))
    for step in range(1, 7):  # later, rounding adds up
        assert losses["calm"][step] == pytest.approx(alone[step], abs=1e-5)


def test_a_job_trains_divided_experts(attempt: Attempt, tmp_path: Path) -> None:
    corpus = tmp_path / "licence.txt"
    corpus.write_text((Path(__file__).parents[4] / "LICENSE").read_text() * 4)
    losses = []
    for number, parallelism in enumerate(
        ({}, {"tensor": 2, "operators": {"strategies": {"mlp.experts": "expert"}}}), start=1
    ):
        given = {**job(corpus, **parallelism), "model": {"config": {**EXPERTS, "vocab_size": 300}}}
        losses.append(losses_of(attempt(given, number=number, folder=tmp_path / str(number))))
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    assert losses[1][6] < losses[1][1]
