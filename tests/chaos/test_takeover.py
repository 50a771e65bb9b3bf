"""A coordinator is killed at any point: the next attempt continues with its members, and no step is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.exceptions import RayActorError
from tests.chaos.test_recovery import Calm, calm, digest, job, losses, train  # noqa: F401 - a fixture
from tests.conftest import descendants, wait_for
from tests.ray_nodes import Attempt

from share_compute.lifecycle.attempt_events import AttemptEvent
from share_compute.protocol.failures import FailureKind, InjectedFailure
from share_compute.protocol.points import Point
from share_compute.topology import Topology
from share_compute_actors.group.answering import answered
from share_compute_actors.group.naming import (
    end_members,
    machines_with_members,
    members_of,
)
from share_compute_actors.training.member.schemas import STATUS

pytestmark = [pytest.mark.slow, pytest.mark.chaos]

JOB = "job-test"


@pytest.fixture(autouse=True)
def nobody_is_left() -> Iterator[None]:
    yield
    assert end_members(JOB) == 0, "members outlived their job"
    assert not any(JOB in jobs for jobs in machines_with_members().values())


def kill(point: Point, step: int, worker: str | None = None) -> InjectedFailure:
    return InjectedFailure(FailureKind.kill, point, worker=worker, step=step)


def of(worker: str) -> Any:
    """Return the member on a machine."""
    return next(
        one for one in members_of(JOB) if answered(STATUS, one.status.remote(), "a member").worker == worker
    )


def end(member: Any) -> None:
    """Kill a member, and wait until its process has ended."""
    ray.kill(member)
    with suppress(RayActorError):
        while True:
            ray.get(member.status.remote())


def last(events: Sequence[AttemptEvent], kind: str) -> Any:
    return next((event for event in reversed(events) if event.type == kind), None)


def goes_on(
    attempt: Attempt,
    folder: Path,
    before: list[AttemptEvent],
    number: int = 2,
    document: dict[str, Any] | None = None,
    **options: Any,
) -> list[AttemptEvent]:
    """Make the next attempt, as the supervisor does after one that reported these events."""
    step, saved = last(before, "step"), last(before, "checkpoint")
    return attempt(
        document or job(2, 2),
        folder=folder,
        number=number,
        known=0 if step is None else step.step,
        checkpoint=None if saved is None else saved.path,
        **options,
    )


def notes(events: Sequence[AttemptEvent]) -> list[str]:
    return [event.message for event in events if event.type == "note"]


@pytest.mark.parametrize(
    ("point", "first"),
    [
        (Point.prepared_received, 3),  # in the middle of step 3
        # Just after step 3 is committed.
        pytest.param(Point.step_recorded, 4, marks=pytest.mark.thorough),
        # Step 2 is committed, but no member was notified.
        pytest.param(Point.commit_sending, 3, marks=pytest.mark.thorough),
        # After step 2, before its validation and checkpoint.
        pytest.param(Point.pausing, 3, marks=pytest.mark.thorough),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_the_coordinator_dies_and_its_members_go_on(
    attempt: Attempt,
    tmp_path: Path,
    calm: Calm,  # noqa: F811
    point: Point,
    first: int,
) -> None:
    before = attempt(job(2, 2), folder=tmp_path, failures=[kill(point, 3)])
    assert last(before, "ended") is None, notes(before)
    assert len(members_of(JOB)) == 4
    assert machines_with_members() == {f"c{number}": {JOB} for number in range(4)}
    after = goes_on(attempt, tmp_path, before)
    assert after[-1].outcome == "succeeded", after[-1].reason
    assert last(after, "started").first_step == first
    assert any(
        note.startswith(f"continues at step {first} with the members of attempt 1") for note in notes(after)
    )
    assert not any("loading" in note for note in notes(after))
    assert losses(before) + losses(after) == calm.losses
    assert digest(tmp_path) == calm.digest
    validated = {
        event.step for event in [*before, *after] if event.type == "validated" and event.split == "validation"
    }
    assert validated == {2, 4, 5}


@pytest.mark.thorough
def test_a_member_died_with_the_coordinator(attempt: Attempt, tmp_path: Path, calm: Calm) -> None:  # noqa: F811
    before = attempt(job(2, 2), folder=tmp_path, failures=[kill(Point.prepared_received, 3)])
    end(of("c2"))
    after = goes_on(attempt, tmp_path, before)
    assert after[-1].outcome == "succeeded", after[-1].reason
    (note,) = [note for note in notes(after) if note.startswith("continues at step 3")]
    assert note.endswith("attempt 1: machine-0, machine-1 and machine-3")
    assert [len(stage.members) for stage in last(after, "planned").plan.stages] == [2, 1]
    assert losses(before) + losses(after) == calm.losses
    assert digest(tmp_path) == calm.digest


def test_a_whole_stage_died_with_the_coordinator(attempt: Attempt, tmp_path: Path, calm: Calm) -> None:  # noqa: F811
    before = attempt(job(2, 2), folder=tmp_path, failures=[kill(Point.prepared_received, 5)])
    end(of("c2"))
    end(of("c3"))
    after = goes_on(attempt, tmp_path, before)
    assert after[-1].outcome == "succeeded", after[-1].reason
    first = last(before, "checkpoint").step + 1  # the checkpoint of step 4 may have been incomplete
    assert last(after, "started").first_step == first
    assert "members are loading their shards" in notes(after)
    assert losses(before) + losses(after)[5 - first :] == calm.losses
    assert digest(tmp_path) == calm.digest


@pytest.mark.thorough
def test_the_coordinator_dies_while_layers_move(attempt: Attempt, topology: Topology, tmp_path: Path) -> None:
    machines = Topology(topology.contributors[:2])
    whole, stays = job(2, 1), Topology(topology.contributors[:1])
    calm_weights, calm_curve, _ = train(attempt, tmp_path / "calm", whole, machines=machines)
    folder = tmp_path / "moved"
    folder.mkdir()
    # The member has its new shard, and stops before it reports that.
    stops = [
        InjectedFailure(FailureKind.stop, Point.weights_loaded, worker="c0", step=step, duration_s=60.0)
        for step in range(2, 6)
    ]

    def leave(event: AttemptEvent, coordinator: Any) -> None:
        if event.type == "step" and event.step == 1:
            coordinator.drain.remote("c1")
            threading.Thread(target=kill_the_coordinator, daemon=True).start()

    def kill_the_coordinator() -> None:
        while not (
            still := [one for one in descendants("ray::Mem") if one.status() == psutil.STATUS_STOPPED]
        ):
            pass
        for process in descendants("ray::Coord"):
            process.kill()
            process.wait()
        still[0].resume()

    before = attempt(whole, folder=folder, machines=machines, failures=stops, on_event=leave)
    assert last(before, "ended") is None, notes(before)
    after = goes_on(attempt, folder, before, document=whole, machines=stays)
    assert after[-1].outcome == "succeeded", after[-1].reason
    assert not any("loading" in note for note in notes(after)), notes(after)
    assert losses(before) + losses(after) == calm_curve
    assert digest(folder) == calm_weights


def test_of_two_coordinators_the_older_one_ends(attempt: Attempt, tmp_path: Path, calm: Calm) -> None:  # noqa: F811
    younger: list[AttemptEvent] = []

    def stopped() -> list[psutil.Process]:
        found = []
        for process in descendants("ray::Coord"):
            with suppress(psutil.NoSuchProcess):
                if process.status() == psutil.STATUS_STOPPED:
                    found.append(process)
        return found

    def wake_the_older(event: AttemptEvent, _: Any) -> None:
        if event.type == "started":
            for process in stopped():
                process.resume()

    def go_on() -> None:
        # Wait, because a coordinator that still computes would be replaced before it stops.
        wait_for(stopped, "a coordinator that stands still")
        younger.extend(attempt(job(2, 2), folder=tmp_path, number=2, on_event=wake_the_older))

    second = threading.Thread(target=go_on)

    def start_the_other(event: AttemptEvent, _: Any) -> None:
        if event.type == "started":
            second.start()

    # It stops before it commits step 3, resumes, and finds that another coordinator has claimed the step log.
    stop = InjectedFailure(FailureKind.stop, Point.step_recording, step=3, duration_s=60.0)
    older = attempt(job(2, 2), folder=tmp_path, failures=[stop], on_event=start_the_other)
    second.join()
    assert older[-1].outcome == "failed", (older[-3:], younger[-3:])
    assert older[-1].error["code"] == "stale-epoch"
    assert younger[-1].outcome == "succeeded", younger[-1].reason
    assert losses(younger) == calm.losses  # steps that the older one committed are reported, too
    assert digest(tmp_path) == calm.digest


def test_the_shard_store_dies(attempt: Attempt, tmp_path: Path, calm: Calm) -> None:  # noqa: F811
    stores: list[psutil.Process] = []

    def kill_it(event: AttemptEvent, _: Any) -> None:
        if event.type == "planned":
            stores.extend(descendants("ray::ShardStore"))
        if event.type == "started":
            for process in stores:
                process.kill()

    before = attempt(job(2, 2), folder=tmp_path, on_event=kill_it)
    assert stores
    assert before[-1].error["code"] == "shard-store-lost"
    time.sleep(
        1.0
    )  # the members' reports are overdue, so the next coordinator hears them with the first heartbeats
    after = goes_on(attempt, tmp_path, before)
    assert after[-1].outcome == "succeeded", after[-1].reason
    assert not any("loading" in note for note in notes(after))
    assert losses(before) + losses(after) == calm.losses
    assert digest(tmp_path) == calm.digest
