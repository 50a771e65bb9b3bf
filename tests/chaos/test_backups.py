"""The only member of a stage dies, and no state is lost: another machine has a backup copy of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tests.chaos.test_recovery import Calm, job, train
from tests.ray_nodes import Attempt, processes_on

from share_compute.lifecycle.attempt_events import AttemptEvent, Reformed
from share_compute.protocol.failures import FailureKind, InjectedFailure
from share_compute.protocol.points import Point
from share_compute.topology import Topology

pytestmark = [pytest.mark.slow, pytest.mark.chaos]

STEPS = 40
STEP = 30
"""At which something goes wrong: the copies are whole by then, and their gradients were used up once."""

_calm: list[Calm] = []


@pytest.fixture
def calm(attempt: Attempt, topology: Topology, tmp_path_factory: pytest.TempPathFactory) -> Calm:
    if not _calm:
        folder = tmp_path_factory.mktemp("calm")
        document = job(2, 1, steps=STEPS)
        document["parallelism"]["backups"] = False
        weights, curve, _ = train(attempt, folder, document, machines=Topology(topology.contributors[:2]))
        _calm.append(Calm(folder, weights, curve))
    return _calm[0]


@pytest.mark.parametrize(
    ("point", "worker"),
    [
        (Point.cell_done, "c0"),
        (
            Point.prepared_sending,
            "c1",
        ),  # the first stage reports that it is prepared, and then becomes the last one
        pytest.param(Point.log_sending, "c1", marks=pytest.mark.thorough),
        pytest.param(Point.log_received, "c0", marks=pytest.mark.thorough),
        pytest.param(Point.commit_received, "c1", marks=pytest.mark.thorough),
        pytest.param(Point.apply_done, "c0", marks=pytest.mark.thorough),
    ],
    ids=lambda value: value.name if isinstance(value, Point) else value,
)
def test_the_only_member_of_a_stage_is_killed(
    attempt: Attempt, topology: Topology, tmp_path: Path, calm: Calm, point: Point, worker: str
) -> None:
    failures = [InjectedFailure(FailureKind.kill, point, worker=worker, step=STEP)]
    machines = Topology(topology.contributors[:2])
    weights, curve, events = train(attempt, tmp_path, job(2, 1, steps=STEPS), failures, machines=machines)
    changes = [event for event in events if isinstance(event, Reformed)]
    assert [change.lost for change in changes] == [(worker,)]
    assert curve == calm.losses
    assert weights == calm.digest


def test_a_stage_without_parameters_is_lost(attempt: Attempt, topology: Topology, tmp_path: Path) -> None:
    document = job(3, 1, steps=STEPS, checkpoint_every=None)
    layers = document["model"]["layers"]
    document["model"]["layers"] = [layers[0], {"type": "relu"}, layers[-1]]
    machines = Topology(topology.contributors[:3])
    calm_weights, calm_curve, _ = train(attempt, tmp_path / "calm", document, machines=machines)
    death = InjectedFailure(FailureKind.kill, Point.cell_done, worker="c1", step=STEP)
    weights, curve, events = train(attempt, tmp_path / "lost", document, [death], machines=machines)
    (change,) = (event for event in events if isinstance(event, Reformed))
    assert change.lost == ("c1",)
    assert len({member.name for stage in change.plan.stages for member in stage.members}) == 2
    assert curve == calm_curve
    assert weights == calm_weights


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(FailureKind.drop, marks=pytest.mark.thorough),
        pytest.param(FailureKind.duplicate, marks=pytest.mark.thorough),
        FailureKind.corrupt,
    ],
    ids=lambda kind: kind.name,
)
def test_a_gradient_on_its_way_to_a_backup_meets_failures(
    attempt: Attempt, topology: Topology, tmp_path: Path, calm: Calm, kind: FailureKind
) -> None:
    failures = [
        InjectedFailure(kind, Point.log_sending, worker="c1", step=STEP - 3),
        InjectedFailure(FailureKind.kill, Point.log_sending, worker="c1", step=STEP),
    ]
    machines = Topology(topology.contributors[:2])
    weights, curve, _ = train(attempt, tmp_path, job(2, 1, steps=STEPS), failures, machines=machines)
    assert curve == calm.losses
    assert weights == calm.digest


@pytest.mark.thorough
def test_a_copy_that_its_disk_damages_is_begun_anew_while_training_goes_on(
    attempt: Attempt, topology: Topology, tmp_path: Path, nodes: list[Any]
) -> None:
    steps = 600
    # The steps must last longer than it takes to begin another copy.
    pauses = [
        InjectedFailure(FailureKind.stop, Point.cell_starting, worker="c0", step=step, duration_s=0.5)
        for step in range(STEP + 10, steps - 50, 10)
    ]
    document = job(2, 1, steps=steps, validate_every=steps, checkpoint_every=steps)
    machines = Topology(topology.contributors[:2])
    weights, curve, _ = train(attempt, tmp_path / "calm", document, machines=machines)

    def damage(event: AttemptEvent, _: Any) -> None:
        if event.type != "step" or event.step != STEP:
            return
        (member,) = processes_on(nodes[0], "Member")
        files = [file for file in Path(f"/proc/{member.pid}/fd").iterdir() if _is_of_a_copy(file)]
        assert files
        for file in files:
            with file.open("r+b") as opened:
                opened.seek(opened.seek(0, os.SEEK_END) // 2)
                opened.write(b"\xff" * 64)

    failures = [*pauses, InjectedFailure(FailureKind.kill, Point.cell_done, worker="c1", step=steps - 2)]
    found, losses, events = train(
        attempt, tmp_path / "damaged", document, failures, machines=machines, on_event=damage
    )
    said = [event.message for event in events if event.type == "note"]
    assert any("machine-0: no backup copy of another machine's shard" in message for message in said)
    anew, after_death = (event for event in events if isinstance(event, Reformed))
    assert "they are copied again" in anew.sentence
    assert not anew.lost
    assert after_death.lost == ("c1",)
    assert losses == curve
    assert found == weights


def _is_of_a_copy(file: Path) -> bool:
    """Whether the file has no name and is not empty, as the file of a copy."""
    return file.readlink().name.startswith("#") and file.stat().st_size > 0
