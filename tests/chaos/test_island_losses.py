"""The only island of a branch is killed in each phase of a round, on real Ray nodes: the weights have the same bits."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.actors.training.rounds.test_rounds import digest, job, part, require_success, rounds_of
from tests.conftest import SHORTEST_POLL_S
from tests.ray_nodes import Attempt, processes_on

from share_compute.lifecycle.attempt_events import AttemptEvent, RoundMerged
from share_compute.protocol.failures import FailureKind, InjectedFailure
from share_compute.protocol.points import Point
from share_compute.topology import Topology

pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.thorough]

RATE = 12_000.0
"""Limit in bytes per second of a machine whose exchange shall last; a contribution has 220 kB."""
ROUND = 2
"""Round in which the island of the second branch is killed, on machine c1."""


@pytest.fixture(scope="session")
def licence(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("corpus") / "licence.txt"
    target.write_text((Path(__file__).parents[2] / "LICENSE").read_text() * 5)
    return target


@contextmanager
def killing(node: Any, when: Callable[[], bool]) -> Iterator[list[bool]]:
    """Kill the members on a node as soon as a condition holds; yield a list that then has whether it still holds."""
    killed: list[bool] = []
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(SHORTEST_POLL_S / 5):
            if when():
                for process in processes_on(node, "Member"):
                    os.kill(process.pid, signal.SIGKILL)
                killed.append(when())
                return

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield killed
    finally:
        is_over.set()
        thread.join()


def limited(topology: Topology, name: str, **rates: float) -> Topology:
    """Return the first two machines, one of which has limited rates."""
    machines = {each: topology[each] for each in ("c0", "c1")}
    machines[name] = replace(machines[name], **rates)
    return Topology(tuple(machines.values()), topology.links)


@pytest.mark.parametrize("phase", ["computing", "sending", "waiting", "receiving"])
def test_an_island_that_is_killed_in_any_phase_of_a_round_changes_no_bit(
    attempt: Attempt, topology: Topology, nodes: list[Any], licence: Path, tmp_path: Path, phase: str
) -> None:
    """The branch begins its round again on the other island.

    Limited rates make the other phases long: the island of the second branch sends or receives slowly, or waits for the
    slow contribution of the first branch.
    """
    document = job(licence, {"inner_state": "reset"})
    require_success(attempt(document, folder=tmp_path / "calm", machines=part(topology, "c0", "c1")))
    folder = tmp_path / "killed"
    rounds: list[int] = []
    own = folder / "branches" / "0001" / "contributions" / f"{ROUND:08}"
    other = folder / "contributions" / own.name
    merged = folder / "rounds" / "versions" / own.name
    machines = part(topology, "c0", "c1")
    failures: list[InjectedFailure] = []

    def when() -> bool:
        match phase:
            case "sending":
                return own.with_name(f".{own.name}.partial").is_dir()
            case "waiting":
                return own.is_dir() and not other.is_dir() and not merged.is_dir()
            case "receiving":
                return rounds[-1:] == [ROUND]
        return False

    match phase:
        case "computing":
            failures = [InjectedFailure(FailureKind.kill, Point.cell_starting, worker="c1", step=6)]
        case "sending":
            machines = limited(topology, "c1", upload_bytes_per_s=RATE)
        case "waiting":
            machines = limited(topology, "c0", upload_bytes_per_s=RATE)
        case "receiving":
            machines = limited(topology, "c1", download_bytes_per_s=RATE)

    def listen(event: AttemptEvent, _coordinator: Any) -> None:
        if isinstance(event, RoundMerged):
            rounds.append(event.round)

    with killing(nodes[1], when) as killed:
        events = attempt(document, folder=folder, machines=machines, failures=failures, on_event=listen)
    require_success(events)
    assert killed == ([] if phase == "computing" else [True])
    notes = [event.message for event in events if event.type == "note"]
    assert any(note.startswith("branch 1 is started again on machine-0") for note in notes), notes
    assert [event.round for event in rounds_of(events)] == [1, 2, 3]
    assert digest(tmp_path / "calm") == digest(folder)
