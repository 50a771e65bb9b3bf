"""Merges of ranges of the weights on machines of the job, on real Ray nodes."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import ray
from tests.actors.training.rounds.test_rounds import MANY_STEPS, digest, job, part, require_success, rounds_of
from tests.ray_nodes import Attempt, processes_on

from share_compute.lifecycle.attempt_events import AttemptEvent
from share_compute.topology import Topology
from share_compute_actors.group.naming import workers_of
from share_compute_actors.training.step_log import StepLog

pytestmark = pytest.mark.slow

DILOCO = {"preset": "diloco", "every": 4}
RANGES = {**DILOCO, "servers": 2}
"""On three machines, machine-0 and machine-1 have the servers of the two ranges, and machine-2 their backups."""
INT4 = {"name": "int4"}
"""With error feedback in both directions."""


@pytest.fixture(scope="session")
def licence(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("corpus") / "licence.txt"
    target.write_text((Path(__file__).parents[4] / "LICENSE").read_text() * 5)
    return target


@pytest.fixture
def machines(topology: Topology) -> Topology:
    return part(topology, "c0", "c1", "c2")


def notes(events: list[AttemptEvent]) -> list[str]:
    return [event.message for event in events if event.type == "note"]


def kill_ranges(
    nodes: list[Any], *indices: int, when: Callable[[AttemptEvent], bool]
) -> Callable[[AttemptEvent, Any], None]:
    """Return a listener that kills the processes with ranges on some nodes once."""
    killed: list[int] = []

    def listen(event: AttemptEvent, _coordinator: Any) -> None:
        if when(event) and not killed:
            for index in indices:
                for process in processes_on(nodes[index], "RangeServer"):
                    killed.append(process.pid)
                    os.kill(process.pid, signal.SIGKILL)
            assert killed

    return listen


def after_merge(event: AttemptEvent) -> bool:
    return event.type == "round" and event.round == 1


def while_contributing(event: AttemptEvent) -> bool:
    return event.type == "step" and event.step == 4


def require_bits_of_one_server(
    attempt: Attempt, document: dict[str, Any], machines: Topology, folder: Path
) -> None:
    """Check that the result in ``folder / "ranges"`` is that of the same job without ranges."""
    alone = dict(document["training"]["synchronization"])
    del alone["servers"]
    training = {**document["training"], "synchronization": alone}
    require_success(attempt({**document, "training": training}, folder=folder / "alone", machines=machines))
    assert digest(folder / "alone") == digest(folder / "ranges")


def test_ranges_have_the_bits_of_one_server_though_a_server_is_lost(
    attempt: Attempt, machines: Topology, nodes: list[Any], licence: Path, tmp_path: Path
) -> None:
    document = job(licence, RANGES, compression=INT4, steps=MANY_STEPS)
    listen = kill_ranges(nodes, 0, when=after_merge)
    events = attempt(document, folder=tmp_path / "ranges", machines=machines, on_event=listen)
    require_success(events)
    assert [event.round for event in rounds_of(events)] == list(range(1, MANY_STEPS // 4 + 1))
    moved = "range 0 of the weights is now on machine-2: machine-0 was lost"
    assert moved in notes(events), notes(events)
    assert workers_of("job-test/ranges") == {}
    require_bits_of_one_server(attempt, document, machines, tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("lost", [1, 2], ids=["server", "backups"])
def test_a_machine_that_is_lost_before_the_commit_changes_no_bit(
    attempt: Attempt, machines: Topology, nodes: list[Any], licence: Path, tmp_path: Path, lost: int
) -> None:
    document = job(licence, RANGES, compression=INT4)
    listen = kill_ranges(nodes, lost, when=while_contributing)
    require_success(attempt(document, folder=tmp_path / "ranges", machines=machines, on_event=listen))
    require_bits_of_one_server(attempt, document, machines, tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("when", [after_merge, while_contributing])
def test_a_range_that_loses_both_machines_continues_with_the_weights_on_the_server(
    attempt: Attempt,
    topology: Topology,
    nodes: list[Any],
    licence: Path,
    tmp_path: Path,
    when: Callable[[AttemptEvent], bool],
) -> None:
    """Without an outer optimizer and without error feedback, no state is lost, so the bits stay the same."""
    compression = {"name": "int8", "error_feedback": None}
    document = job(licence, {"every": 4, "servers": 2}, compression=compression)
    machines = part(topology, "c0", "c1", "c2", "c3")
    listen = kill_ranges(nodes, 0, 1, 2, 3, when=when)
    events = attempt(document, folder=tmp_path / "ranges", machines=machines, on_event=listen)
    require_success(events)
    require_bits_of_one_server(attempt, document, machines, tmp_path)


@pytest.mark.thorough
def test_the_loss_of_the_outer_state_is_reported(
    attempt: Attempt, machines: Topology, nodes: list[Any], licence: Path, tmp_path: Path
) -> None:
    document = job(licence, RANGES, compression=INT4, steps=MANY_STEPS)
    listen = kill_ranges(nodes, 0, 2, when=after_merge)
    events = attempt(document, folder=tmp_path, machines=machines, on_event=listen)
    require_success(events)
    assert any("without the state of the outer optimizer" in note for note in notes(events)), notes(events)


@pytest.mark.thorough
def test_a_suspended_job_continues_its_ranges_on_other_machines(
    attempt: Attempt, topology: Topology, machines: Topology, licence: Path, tmp_path: Path
) -> None:
    document = job(licence, RANGES, compression=INT4, steps=MANY_STEPS)

    def suspend(event: AttemptEvent, coordinator: Any) -> None:
        if event.type == "step" and event.step == 6:
            ray.get(coordinator.suspend.remote())

    folder = tmp_path / "ranges"
    first = attempt(document, folder=folder, machines=machines, on_event=suspend)
    assert first[-1].reason.startswith("suspended in round")
    second = attempt(document, folder=folder, machines=part(topology, "c2", "c3"), number=2)
    require_success(second)
    assert not any("outer optimizer" in note for note in notes(second))
    require_bits_of_one_server(attempt, document, machines, tmp_path)


@pytest.mark.thorough
def test_another_coordinator_continues_with_the_same_ranges(
    attempt: Attempt, machines: Topology, licence: Path, tmp_path: Path
) -> None:
    document = job(licence, RANGES, compression=INT4)

    def die(event: AttemptEvent, coordinator: Any) -> None:
        if event.type == "step" and event.step == 6:
            ray.kill(coordinator)

    folder = tmp_path / "ranges"
    attempt(document, folder=folder, machines=machines, on_event=die)
    assert workers_of("job-test/ranges")
    second = attempt(document, folder=folder, machines=machines, number=2, known=6)
    require_success(second)
    require_bits_of_one_server(attempt, document, machines, tmp_path)


@pytest.mark.thorough
def test_a_parameter_server_in_ranges_gets_each_push_once_though_machines_are_lost(
    attempt: Attempt, machines: Topology, nodes: list[Any], licence: Path, tmp_path: Path
) -> None:
    policy = {"kind": "parameter_server", "every": 3, "staleness": "unbounded", "servers": 2}
    document = job(licence, policy, steps=12, optimizer={"name": "adamw", "learning_rate": 0.003})
    listen = kill_ranges(nodes, 1, when=lambda event: event.type == "round" and event.round == 3)
    events = attempt(document, folder=tmp_path, machines=machines, on_event=listen)
    require_success(events)
    with closing(StepLog(tmp_path, 1)) as log:
        records = log.merges()
    pushes = [run for record in records for run in record.runs]
    assert Counter(run.branch for run in pushes) == {0: 4, 1: 4}
    assert len(set(pushes)) == len(pushes)
