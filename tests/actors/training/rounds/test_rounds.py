"""Branches that train apart and merge in rounds, on real Ray nodes."""

from __future__ import annotations

import os
import signal
import sqlite3
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from tests.platform.compression.codecs import SPECS
from tests.ray_nodes import Attempt, processes_on

from share_compute.lifecycle.attempt_events import AttemptEvent, Offer, RoundMerged
from share_compute.models.storage.weights import WeightFolder
from share_compute.specification.compression import CODECS
from share_compute.topology import Link, Topology
from share_compute_actors.group.naming import workers_of
from share_compute_actors.training.rounds.messages import BranchReport
from share_compute_actors.training.step_log import StepLog

pytestmark = pytest.mark.slow

LLAMA = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
}  # fmt: skip

MANY_STEPS = 40
"""Steps of jobs in which a test does something: they must not end before it is done."""


@pytest.fixture(scope="session")
def licence(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("corpus") / "licence.txt"
    target.write_text((Path(__file__).parents[4] / "LICENSE").read_text() * 5)
    return target


def job(
    corpus: Path, synchronization: dict[str, Any] | None = None, *, stages: int = 1, **training: Any
) -> dict[str, Any]:
    rounds = {"kind": "local", "branches": 2, "every": 4, **(synchronization or {})}
    return {
        "model": {"config": LLAMA},
        "data": {"files": [str(corpus)]},
        "tokenizer": {"vocab_size": 300},
        "training": {
            "steps": 10,
            "batch_size": 4,
            "microbatches": 2,
            "sequence_length": 32,
            "synchronization": rounds,
            **training,
        },
        "parallelism": {"stages": stages, "members_per_stage": 1},
    }


def part(topology: Topology, *names: str) -> Topology:
    return Topology(tuple(topology[name] for name in names), topology.links)


def two_sites(topology: Topology) -> Topology:
    """Return the four machines with slow links between the first two and the last two."""
    sites = {name: place // 2 for place, name in enumerate(("c0", "c1", "c2", "c3"))}
    links = tuple(
        Link(one, other, *((1e-4, 1e9) if sites[one] == sites[other] else (0.05, 2.5e6)))
        for one, other in permutations(sites, 2)
    )
    return Topology(topology.contributors, links)


def require_success(events: list[AttemptEvent]) -> None:
    assert events[-1].type == "ended"
    assert events[-1].outcome == "succeeded", events[-1].reason


def rounds_of(events: list[AttemptEvent]) -> list[RoundMerged]:
    return [event for event in events if isinstance(event, RoundMerged)]


def islands_of(events: list[AttemptEvent]) -> set[tuple[str, ...]]:
    """Return the machines of each branch in each round."""
    return {branch.machines for event in rounds_of(events) for branch in event.branches}


def validations_of(events: list[AttemptEvent]) -> dict[int, float]:
    return {event.step: event.loss for event in events if event.type == "validated"}


def model(folder: Path) -> dict[str, torch.Tensor]:
    weights = WeightFolder(folder / "artifacts" / "model")
    return {name: weights.read(name) for name in weights.names()}


def digest(folder: Path) -> str:
    return WeightFolder(folder / "artifacts" / "model").digest()


@pytest.mark.real_path
def test_branches_on_one_island_equal_branches_on_two(
    attempt: Attempt, topology: Topology, licence: Path, tmp_path: Path
) -> None:
    """Two islands of two stages, and one island with both branches: the same bits."""
    document = job(licence, {"preset": "diloco", "every": 4}, stages=2, compression={"name": "int8"})
    apart = attempt(document, folder=tmp_path / "apart", machines=two_sites(topology))
    require_success(apart)
    together = attempt(document, folder=tmp_path / "together", machines=part(topology, "c0", "c1"))
    require_success(together)
    assert digest(tmp_path / "apart") == digest(tmp_path / "together")
    merged = rounds_of(apart)
    assert [(event.round, event.step) for event in merged] == [(1, 4), (2, 8), (3, 10)]
    for event in merged:
        assert [branch.number for branch in event.branches] == [0, 1]
        assert not set(event.branches[0].machines) & set(event.branches[1].machines)
        assert event.branches[0].sent_bytes < 0.6 * event.weight_bytes
    steps = [event for event in apart if event.type == "step"]
    assert [event.step for event in steps] == list(range(1, 11))
    assert steps[0].samples == 8
    plans = [event.plan for event in apart if event.type == "planned"]
    assert plans[-1].machines == {"c0", "c1", "c2", "c3"}
    (final,) = (event for event in apart if event.type == "validated" and event.split == "validation")
    assert final.step == 10


@pytest.mark.thorough
def test_compressed_boundaries_have_the_same_bits_on_all_islands(
    attempt: Attempt, topology: Topology, nodes: list[Any], licence: Path, tmp_path: Path
) -> None:
    """Islands of two stages, one of which is lost, and islands of one machine, which round inside: the same bits."""

    def trained(name: str, boundaries: dict[str, Any], stages: int, **options: Any) -> list[AttemptEvent]:
        document = job(
            licence,
            {"inner_state": "reset"},
            stages=stages,
            boundary_compression=boundaries,
            steps=MANY_STEPS,
        )
        events = attempt(document, folder=tmp_path / name, **options)
        require_success(events)
        return events

    events = trained(
        "stages", {"name": "int8"}, 2, machines=two_sites(topology), on_event=kill_member(nodes, 3)
    )
    notes = [event.message for event in events if event.type == "note"]
    assert any(note.startswith("branch 1 is started again on machine-0 and machine-1") for note in notes)
    compressed = [note for note in notes if "compressed" in note]
    assert compressed == ["activations and gradients are compressed before layer 3 (int8)"]
    pair = part(topology, "c0", "c1")
    trained("whole", {"name": "fixed", "int8": [3]}, 1, machines=pair)
    trained("plain", {"name": "none"}, 1, machines=pair)
    assert digest(tmp_path / "stages") == digest(tmp_path / "whole") != digest(tmp_path / "plain")


def test_rounds_of_one_step_equal_all_reduce_over_the_whole_batch(
    attempt: Attempt, topology: Topology, licence: Path, tmp_path: Path
) -> None:
    plain = {"optimizer": {"name": "sgd", "learning_rate": 0.05}, "max_gradient_norm": None, "steps": 5}
    for name, policy in (
        ("rounds", {"every": 1}),
        ("server", {"kind": "parameter_server", "every": 1, "staleness": 0}),
    ):
        document = job(licence, policy, **plain)
        require_success(attempt(document, folder=tmp_path / name, machines=part(topology, "c0", "c1")))
    assert digest(tmp_path / "rounds") == digest(tmp_path / "server")
    whole = job(licence, **plain)
    whole["training"] |= {"batch_size": 8, "microbatches": 4}
    del whole["training"]["synchronization"]
    require_success(attempt(whole, folder=tmp_path / "whole", machines=part(topology, "c0")))
    expected, found = model(tmp_path / "whole"), model(tmp_path / "rounds")
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-6)


OWN_WEIGHTS: dict[str, dict[str, Any]] = {
    "elastic": {"kind": "elastic", "rate": 0.3},
    "gossip": {"kind": "gossip", "graph": "random_pairs"},
}
"""Policies whose branches keep weights of their own."""


@pytest.mark.parametrize("name", ["elastic", pytest.param("gossip", marks=pytest.mark.thorough)])
def test_branches_with_weights_of_their_own_survive_all_losses_with_the_same_bits(
    attempt: Attempt, topology: Topology, nodes: list[Any], licence: Path, tmp_path: Path, name: str
) -> None:
    """The coordinators die, and then an island."""
    policy = {**OWN_WEIGHTS[name], "inner_state": "reset"}
    document = job(licence, policy, compression={"name": "int8", "error_feedback": None})
    machines = part(topology, "c0", "c1")
    undisturbed = attempt(document, folder=tmp_path / "undisturbed", machines=machines)
    require_success(undisturbed)
    distances = [event.consensus_distance for event in rounds_of(undisturbed)]
    assert len(distances) == 3
    assert all(distance is not None and distance > 1e-5 for distance in distances[:2])
    assert distances[2] == pytest.approx(0.0, abs=1e-6)
    result = model(tmp_path / "undisturbed")
    merged = WeightFolder(tmp_path / "undisturbed" / "rounds" / "versions" / "00000003")
    for tensor_name in merged.names():
        torch.testing.assert_close(result[tensor_name], merged.read(tensor_name), rtol=0, atol=1e-6)

    def die(event: AttemptEvent, coordinator: Any) -> None:
        if event.type == "step" and event.step == 6:
            ray.kill(coordinator)

    folder = tmp_path / "killed"
    attempt(document, folder=folder, machines=machines, on_event=die)
    second = attempt(document, folder=folder, machines=machines, number=2, known=6)
    require_success(second)
    assert digest(tmp_path / "undisturbed") == digest(folder)

    events = attempt(document, folder=tmp_path / "lost", machines=machines, on_event=kill_member(nodes, 1))
    require_success(events)
    assert digest(tmp_path / "undisturbed") == digest(tmp_path / "lost")


def test_validations_and_samples_use_the_merged_weights(
    attempt: Attempt, topology: Topology, licence: Path, tmp_path: Path
) -> None:
    """The centre hardly moves, while the weights of the branches do."""
    document = job(
        licence,
        {"kind": "elastic", "rate": 0.001, "every": 5},
        steps=20,
        optimizer={"name": "adamw", "learning_rate": 0.01},
        validate_every=10,
        samples={"every": 10, "prompts": ["the"], "max_tokens": 4},
    )
    events = attempt(document, folder=tmp_path, machines=part(topology, "c0", "c1"))
    require_success(events)
    losses = [event.loss for event in events if event.type == "step"]
    validated = {event.step: event.loss for event in events if event.type == "validated"}
    assert losses[-1] < 0.9 * losses[0]
    for step in (10, 20):
        assert validated[step] == pytest.approx(losses[0], rel=0.02)
    assert len([event for event in events if event.type == "sampled"]) == 2


@pytest.mark.parametrize("staleness", [pytest.param(1, marks=pytest.mark.thorough), "unbounded"])
def test_a_parameter_server_gets_each_push_once_though_an_island_is_lost(
    attempt: Attempt, topology: Topology, nodes: list[Any], licence: Path, tmp_path: Path, staleness: Any
) -> None:
    policy = {"kind": "parameter_server", "every": 3, "staleness": staleness}
    document = job(licence, policy, steps=12, optimizer={"name": "adamw", "learning_rate": 0.003})
    machines = part(topology, "c0", "c1")
    events = attempt(document, folder=tmp_path, machines=machines, on_event=kill_member(nodes, 1))
    require_success(events)
    with closing(StepLog(tmp_path, 1)) as log:
        records = log.merges()
    assert [record.version for record in records] == list(range(1, len(records) + 1))
    pushes = [run for record in records for run in record.runs]
    assert Counter(run.branch for run in pushes) == {0: 4, 1: 4}
    assert len(set(pushes)) == len(pushes)
    assert rounds_of(events)[-1].step == 12
    losses = [event.loss for event in events if event.type == "step"]
    assert losses[-1] < losses[0]


POLICIES: dict[str, dict[str, Any]] = {
    "local": {"kind": "local", "preset": "diloco"},
    **OWN_WEIGHTS,
    "synchronous parameter_server": {"kind": "parameter_server", "staleness": 0},
    "parameter_server": {"kind": "parameter_server", "staleness": 1},
    "asynchronous parameter_server": {"kind": "parameter_server", "staleness": "unbounded"},
    "parameter_server in ranges": {"kind": "parameter_server", "staleness": 1, "servers": 2},
}
PLACES = {
    "a stage of two": {"stages": 1, "members_per_stage": 2},
    "two stages": {"stages": 2, "members_per_stage": 1},
    "two islands": {"stages": 1, "members_per_stage": 1},
}


@pytest.mark.thorough
@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_trains_with_every_codec(
    attempt: Attempt, topology: Topology, licence: Path, tmp_path: Path, name: str, places: str
) -> None:
    """Two stages also compress what they exchange. The formats of top-k have tests of their own."""
    boundaries = {"name": "int8" if places == "two stages" else "none"}
    for codec in CODECS:
        document = job(
            licence,
            {**POLICIES[name], "every": 1},
            steps=3,
            compression=SPECS[codec],
            boundary_compression=boundaries,
        )
        document["parallelism"] = PLACES[places]
        folder = tmp_path / codec
        events = attempt(document, folder=folder, machines=part(topology, "c0", "c1"))
        require_success(events)
        assert all(torch.isfinite(tensor).all() for tensor in model(folder).values())
        assert {branch.number for event in rounds_of(events) for branch in event.branches} == {0, 1}


def kill_member(nodes: list[Any], index: int) -> Callable[[AttemptEvent, Any], None]:
    """Return a listener that kills the members on a node in the middle of the second round."""
    killed: list[int] = []

    def listen(event: AttemptEvent, _coordinator: Any) -> None:
        if event.type == "step" and event.step == 6 and not killed:
            for process in processes_on(nodes[index], "Member"):
                killed.append(process.pid)
                os.kill(process.pid, signal.SIGKILL)

    return listen


@pytest.mark.parametrize(
    "lost", [0, pytest.param(1, marks=pytest.mark.thorough)], ids=["first-branch", "second-branch"]
)
def test_a_branch_whose_island_is_lost_continues_on_another_with_the_same_bits(
    attempt: Attempt, topology: Topology, nodes: list[Any], licence: Path, tmp_path: Path, lost: int
) -> None:
    compression = {"name": "int8", "error_feedback": None}
    # The merged weights from which the first branch continues were written before the validation of their step.
    document = job(
        licence, {"inner_state": "reset"}, compression=compression, validate_every=4, steps=MANY_STEPS
    )
    machines = part(topology, "c0", "c1")
    undisturbed = attempt(document, folder=tmp_path / "undisturbed", machines=machines)
    require_success(undisturbed)
    events = attempt(document, folder=tmp_path / "lost", machines=machines, on_event=kill_member(nodes, lost))
    require_success(events)
    assert any(
        event.type == "note" and f"branch {lost} is started again" in event.message for event in events
    )
    assert [event.round for event in rounds_of(events)] == list(range(1, MANY_STEPS // 4 + 1))
    assert digest(tmp_path / "undisturbed") == digest(tmp_path / "lost")
    assert validations_of(events) == validations_of(undisturbed)


@pytest.mark.thorough  # the same deaths, for training that continues during merges
def test_a_job_whose_coordinators_die_continues_with_its_members(
    attempt: Attempt, topology: Topology, licence: Path, tmp_path: Path
) -> None:
    document = job(licence, {"preset": "diloco", "every": 4}, compression={"name": "int4"})
    machines = part(topology, "c0", "c1")
    require_success(attempt(document, folder=tmp_path / "undisturbed", machines=machines))

    def die(event: AttemptEvent, coordinator: Any) -> None:
        if event.type == "step" and event.step == 6:
            ray.kill(coordinator)

    folder = tmp_path / "killed"
    first = attempt(document, folder=folder, machines=machines, on_event=die)
    assert first[-1].type != "ended"
    second = attempt(document, folder=folder, machines=machines, number=2, known=6)
    require_success(second)
    assert [event.round for event in rounds_of(second)] == [2, 3]
    assert digest(tmp_path / "undisturbed") == digest(folder)


@pytest.mark.parametrize(
    "is_stored", [True, pytest.param(False, marks=pytest.mark.thorough)], ids=["after", "before"]
)
def test_a_synchronizer_that_dies_before_or_after_its_commit_merges_once(
    attempt: Attempt, topology: Topology, nodes: list[Any], licence: Path, tmp_path: Path, is_stored: bool
) -> None:
    """Before the commit, the new version is on disk, but it has no record: power fails, so members end as well."""
    document = job(licence, {"inner_state": "reset"}, compression={"name": "int8", "error_feedback": None})
    machines = part(topology, "c0", "c1")
    require_success(attempt(document, folder=tmp_path / "undisturbed", machines=machines))

    def die(event: AttemptEvent, coordinator: Any) -> None:
        if event.type == "round" and event.round == 2:
            ray.kill(coordinator)
            for node in () if is_stored else nodes[:2]:
                for process in processes_on(node, "Member"):
                    os.kill(process.pid, signal.SIGKILL)

    folder = tmp_path / "killed"
    attempt(document, folder=folder, machines=machines, on_event=die)
    if not is_stored:
        with closing(sqlite3.connect(folder / "steps.sqlite3")) as base, base:
            base.execute("DELETE FROM merges WHERE version >= 2")
    second = attempt(document, folder=folder, machines=machines, number=2, known=4)
    require_success(second)
    assert [event.round for event in rounds_of(second)] == ([3] if is_stored else [2, 3])
    assert digest(tmp_path / "undisturbed") == digest(folder)


def test_reports_that_cannot_be_are_ignored_and_a_damaged_contribution_runs_again(
    attempt: Attempt, topology: Topology, licence: Path, tmp_path: Path
) -> None:
    document = job(licence, {"inner_state": "reset"}, compression={"name": "int8", "error_feedback": None})
    machines = part(topology, "c0", "c1")
    require_success(attempt(document, folder=tmp_path / "undisturbed", machines=machines))
    cut = tmp_path / "cut"
    cut.mkdir()
    (cut / "model.safetensors").write_bytes(b"\x40\x00\x00\x00\x00\x00\x00\x00{")
    told: list[AttemptEvent] = []

    def tell(event: AttemptEvent, coordinator: Any) -> None:
        if event.type == "step" and not told:
            told.append(event)
            facts = {
                "branch": 1,
                "start": 1,
                "round": 1,
                "folder": cut,
                "samples": 16,
                "loss": 1.0,
                "seconds": 1.0,
            }
            for wrong in ({"branch": 7}, {"start": 9}, {"round": 99}, {}):
                report = BranchReport.model_validate({**facts, **wrong})
                coordinator.contributed.remote(report.model_dump_json())

    events = attempt(document, folder=tmp_path / "told", machines=machines, on_event=tell)
    require_success(events)
    again = [
        event.message for event in events if event.type == "note" and "is started again" in event.message
    ]
    assert len(again) == 1
    assert "the contribution of branch 1 to round 1 is damaged" in again[0]
    assert [event.round for event in rounds_of(events)] == [1, 2, 3]
    assert digest(tmp_path / "undisturbed") == digest(tmp_path / "told")


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["local", "elastic"])
def test_tied_weights_are_merged_once(
    attempt: Attempt, topology: Topology, licence: Path, tmp_path: Path, name: str
) -> None:
    """The first and the last stage hold the same embedding, with the same residual, on each island."""
    for folder, machines in (("apart", two_sites(topology)), ("together", part(topology, "c0", "c1"))):
        document = job(
            licence,
            {**POLICIES[name], "every": 2},
            stages=2,
            steps=4,
            compression={"name": "topk", "density": 0.1, "chunk": 100},
        )
        document["model"] = {"config": {**LLAMA, "tie_word_embeddings": True}}
        require_success(attempt(document, folder=tmp_path / folder, machines=machines))
        merged = WeightFolder(tmp_path / folder / "rounds" / "versions" / "00000002")
        result = model(tmp_path / folder)
        assert "lm_head.weight" not in result
        for tensor_name in merged.names():
            torch.testing.assert_close(result[tensor_name], merged.read(tensor_name), rtol=0, atol=1e-6)
    assert digest(tmp_path / "apart") == digest(tmp_path / "together")


def test_more_branches_than_samples_are_refused(
    attempt: Attempt, topology: Topology, licence: Path, tmp_path: Path
) -> None:
    short = tmp_path / "short.txt"
    short.write_text(licence.read_text()[:1500])
    document = job(short, {"branches": 64, "every": 2})
    events = attempt(document, folder=tmp_path / "job", machines=part(topology, "c0"))
    assert events[-1].type == "ended"
    assert events[-1].outcome == "failed"
    assert "training.synchronization.branches 64 is more than the" in events[-1].reason


@pytest.mark.parametrize("kind", ["local", pytest.param("parameter_server", marks=pytest.mark.thorough)])
def test_a_quorum_does_not_wait_for_a_slow_branch(
    attempt: Attempt, topology: Topology, nodes: list[Any], licence: Path, tmp_path: Path, kind: str
) -> None:
    document = job(licence, {"kind": kind, "quorum": 1, "grace_s": 0.0, "every": 2}, steps=MANY_STEPS)
    stopped: list[int] = []

    def stop(event: AttemptEvent, _coordinator: Any) -> None:
        if event.type == "step" and event.step == 3 and not stopped:
            for process in processes_on(nodes[1], "Member"):
                stopped.append(process.pid)
                os.kill(process.pid, signal.SIGSTOP)

    try:
        events = attempt(document, folder=tmp_path, machines=part(topology, "c0", "c1"), on_event=stop)
    finally:
        for pid in stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    require_success(events)
    merged = rounds_of(events)
    assert [event.round for event in merged] == list(range(1, MANY_STEPS // 2 + 1))
    assert any(event.missing == (1,) for event in merged)


@pytest.mark.parametrize("moment", ["contributing", pytest.param("merging", marks=pytest.mark.thorough)])
def test_a_member_that_dies_at_the_end_of_a_round_changes_no_bit(
    attempt: Attempt, topology: Topology, nodes: list[Any], licence: Path, tmp_path: Path, moment: str
) -> None:
    """Another member of its stage has the same state, also if only one of them has merged."""
    document = job(licence, {"preset": "diloco", "every": 4}, compression={"name": "topk", "density": 0.1})
    document["parallelism"] = {"stages": 1, "members_per_stage": 2}
    machines = two_sites(topology)
    require_success(attempt(document, folder=tmp_path / "undisturbed", machines=machines))
    killed: list[int] = []

    def kill(event: AttemptEvent, _coordinator: Any) -> None:
        is_due = (
            event.type == "step" and event.step == 4 if moment == "contributing" else event.type == "round"
        )
        if is_due and not killed:
            for index in (1, 3):
                for process in processes_on(nodes[index], "Member"):
                    killed.append(process.pid)
                    os.kill(process.pid, signal.SIGKILL)

    events = attempt(document, folder=tmp_path / "killed", machines=machines, on_event=kill)
    require_success(events)
    assert killed  # the second branch may not have begun when the first one ends its round
    assert [event.round for event in rounds_of(events)] == [1, 2, 3]
    assert digest(tmp_path / "undisturbed") == digest(tmp_path / "killed")


STREAMING = {"preset": "diloco", "every": 4, "overlap": 3, "fragments": 2}


def test_training_goes_on_while_a_round_is_merged(
    attempt: Attempt, topology: Topology, nodes: list[Any], licence: Path, tmp_path: Path
) -> None:
    """Coordinators die during the overlap, and a member of each island dies as well: the same bits."""
    document = job(licence, STREAMING, steps=MANY_STEPS + 1, compression={"name": "int8"})
    document["parallelism"] = {"stages": 1, "members_per_stage": 2}
    machines = two_sites(topology)
    undisturbed = attempt(document, folder=tmp_path / "undisturbed", machines=machines)
    require_success(undisturbed)
    ends = [*range(4, MANY_STEPS + 1, 4), MANY_STEPS + 1]
    assert [(event.round, event.step) for event in rounds_of(undisturbed)] == list(enumerate(ends, start=1))
    assert rounds_of(undisturbed)[0].branches[0].sent_bytes < 0.2 * rounds_of(undisturbed)[0].weight_bytes

    def die(event: AttemptEvent, coordinator: Any) -> None:
        if event.type == "step" and event.step == 6:
            ray.kill(coordinator)

    killed: list[int] = []

    def kill(event: AttemptEvent, _coordinator: Any) -> None:
        if event.type == "step" and event.step == 9 and not killed:
            for index in (1, 3):
                for process in processes_on(nodes[index], "Member"):
                    killed.append(process.pid)
                    os.kill(process.pid, signal.SIGKILL)

    folder = tmp_path / "killed"
    attempt(document, folder=folder, machines=machines, on_event=die)
    second = attempt(document, folder=folder, machines=machines, number=2, known=6, on_event=kill)
    require_success(second)
    assert killed
    assert digest(tmp_path / "undisturbed") == digest(folder)


@pytest.mark.parametrize(
    ("policy", "others"),
    [
        pytest.param({"preset": "diloco", "every": 4}, ("c2", "c3"), marks=pytest.mark.thorough),
        (STREAMING, ("c2",)),
    ],
    ids=["local", "streaming"],
)
def test_a_suspended_job_continues_in_the_middle_of_a_round_on_any_number_of_islands(
    attempt: Attempt,
    topology: Topology,
    licence: Path,
    tmp_path: Path,
    policy: dict[str, Any],
    others: tuple[str, ...],
) -> None:
    """Checkpoints of branches have the optimizer's state and the error of the codec."""
    document = job(licence, policy, steps=MANY_STEPS, compression={"name": "topk", "density": 0.1})
    machines = part(topology, "c0", "c1")
    undisturbed = attempt(document, folder=tmp_path / "undisturbed", machines=machines)
    require_success(undisturbed)

    def suspend(event: AttemptEvent, coordinator: Any) -> None:
        if event.type == "step" and event.step == 6:
            ray.get(coordinator.suspend.remote())

    folder = tmp_path / "suspended"
    first = attempt(document, folder=folder, machines=machines, on_event=suspend)
    assert first[-1].type == "ended"
    assert first[-1].reason.startswith("suspended in round")
    second = attempt(document, folder=folder, machines=part(topology, *others), number=2)
    require_success(second)
    assert islands_of(undisturbed) == {("c0",), ("c1",)}
    assert islands_of(second) == {(machine,) for machine in others}
    assert rounds_of(second)[-1].round == MANY_STEPS // 4
    assert digest(tmp_path / "undisturbed") == digest(folder)


@pytest.mark.parametrize(
    "policy",
    [
        {"preset": "diloco", "every": 4},
        pytest.param({"kind": "elastic", "rate": 0.3, "every": 4}, marks=pytest.mark.thorough),
    ],
    ids=["local", "elastic"],
)
def test_a_branch_moves_to_a_machine_that_joins_with_the_same_bits(
    attempt: Attempt, topology: Topology, licence: Path, tmp_path: Path, policy: dict[str, Any]
) -> None:
    """The optimizer's state and the error of the codec move with the branch."""
    document = job(licence, policy, steps=MANY_STEPS, compression={"name": "topk", "density": 0.1})
    require_success(attempt(document, folder=tmp_path / "stays", machines=part(topology, "c0")))
    both = part(topology, "c0", "c1")

    def join(event: AttemptEvent, coordinator: Any) -> None:
        if event.type == "round" and event.round == 1:
            ray.get(coordinator.offer.remote(Offer(topology=both).model_dump_json()))
        if event.type == "replan-proposed":
            assert event.plan.machines == {"c0", "c1"}
            offer = Offer(topology=both, answers=event.step)
            ray.get(coordinator.offer.remote(offer.model_dump_json()))

    events = attempt(document, folder=tmp_path / "moves", machines=part(topology, "c0"), on_event=join)
    require_success(events)
    notes = [event.message for event in events if event.type == "note"]
    assert any("continues on machine-1" in note for note in notes), notes
    first, *_, last = rounds_of(events)
    assert {machine for branch in first.branches for machine in branch.machines} == {"c0"}
    assert {machine for branch in last.branches for machine in branch.machines} == {"c0", "c1"}
    assert digest(tmp_path / "stays") == digest(tmp_path / "moves")


def test_a_cancelled_job_ends_all_branches(
    attempt: Attempt, topology: Topology, licence: Path, tmp_path: Path
) -> None:
    def cancel(event: AttemptEvent, coordinator: Any) -> None:
        if event.type == "round":
            ray.get(coordinator.cancel.remote())

    machines = part(topology, "c0", "c1")
    events = attempt(job(licence), folder=tmp_path, machines=machines, on_event=cancel)
    assert events[-1].type == "ended"
    assert events[-1].outcome == "cancelled"
    assert workers_of("job-test") == workers_of("job-test/1") == {}
