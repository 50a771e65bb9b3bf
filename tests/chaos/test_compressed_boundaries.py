"""With compression between stages, lost members and other plans change no bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.chaos.test_recovery import Calm, digest, job, losses, train
from tests.ray_nodes import Attempt

from share_compute.lifecycle.attempt_events import AttemptEvent
from share_compute.protocol.failures import FailureKind, InjectedFailure
from share_compute.protocol.points import Point
from share_compute.topology import Topology

pytestmark = [pytest.mark.slow, pytest.mark.chaos]

STEPS = 30
KILLED_AT = 20
"""Backup copies are whole by then."""

_calm: list[Calm] = []


def compressed(stages: int, members: int, name: str, *, steps: int = STEPS, **options: Any) -> dict[str, Any]:
    boundaries = {"name": name, **options}
    return job(stages, members, steps=steps, boundary_compression=boundaries, checkpoint_every=10)


def notes(events: list[AttemptEvent]) -> list[str]:
    return [event.message for event in events if event.type == "note"]


@pytest.fixture
def calm(attempt: Attempt, topology: Topology, tmp_path_factory: pytest.TempPathFactory) -> Calm:
    """Return the results of two stages without losses; the model is cut before layer 3."""
    if not _calm:
        folder = tmp_path_factory.mktemp("calm")
        machines = Topology(topology.contributors[:2])
        weights, curve, events = train(attempt, folder, compressed(2, 1, "int8"), machines=machines)
        assert "activations and gradients are compressed before layer 3 (int8)" in notes(events)
        _calm.append(Calm(folder, weights, curve))
    return _calm[0]


def test_the_loss_is_close_to_that_without_compression(
    attempt: Attempt, topology: Topology, tmp_path: Path, calm: Calm
) -> None:
    machines = Topology(topology.contributors[:2])
    weights, curve, _ = train(attempt, tmp_path, compressed(2, 1, "none"), machines=machines)
    assert weights != calm.digest
    for (step, plain), (_, loss) in zip(curve, calm.losses, strict=True):
        assert loss == pytest.approx(plain, rel=0.01), f"step {step}"
    assert calm.losses[-1][1] < 0.8 * calm.losses[0][1]


@pytest.mark.parametrize(
    ("point", "worker"),
    [
        (Point.cell_done, "c0"),
        pytest.param(Point.tensor_sending, "c0", marks=pytest.mark.thorough),
        pytest.param(Point.prepared_sending, "c1", marks=pytest.mark.thorough),
    ],
    ids=lambda value: value.name if isinstance(value, Point) else value,
)
def test_the_last_member_computes_the_same_bits_without_the_boundary(
    attempt: Attempt, topology: Topology, tmp_path: Path, calm: Calm, point: Point, worker: str
) -> None:
    failures = [InjectedFailure(FailureKind.kill, point, worker=worker, step=KILLED_AT)]
    machines = Topology(topology.contributors[:2])
    weights, curve, events = train(attempt, tmp_path, compressed(2, 1, "int8"), failures, machines=machines)
    (change,) = (event for event in events if event.type == "reformed")
    assert (change.lost, len(change.plan.stages)) == ((worker,), 1)
    assert curve == calm.losses
    assert weights == calm.digest


def test_members_of_both_stages_are_killed(attempt: Attempt, tmp_path: Path) -> None:
    document = compressed(2, 2, "int8", steps=5)
    calm_weights, calm_curve, _ = train(attempt, tmp_path / "calm", document)
    failures = [
        InjectedFailure(FailureKind.kill, Point.tensor_sending, worker="c2", step=3),
        InjectedFailure(FailureKind.kill, Point.cell_done, worker="c0", step=4),
    ]
    weights, curve, events = train(attempt, tmp_path / "lost", document, failures)
    reformed = [event for event in events if event.type == "reformed"]
    assert {worker for event in reformed for worker in event.lost} == {"c0", "c2"}
    assert curve == calm_curve
    assert weights == calm_weights


def test_a_resumed_job_rounds_where_its_first_plan_was_cut(
    attempt: Attempt, topology: Topology, tmp_path: Path, calm: Calm
) -> None:
    for stages in (3, 1):
        machines = Topology(topology.contributors[:stages])
        weights, curve, events = train(
            attempt,
            tmp_path / str(stages),
            compressed(stages, 1, "int8"),
            checkpoint=calm.folder / "checkpoints" / "step-00000010",
            known=10,
            machines=machines,
        )
        assert "activations and gradients are compressed before layer 3 (int8)" in notes(events)
        assert curve == calm.losses[10:]
        assert weights == calm.digest


def test_fixed_boundaries_give_the_same_bits_on_any_number_of_machines(
    attempt: Attempt, topology: Topology, tmp_path: Path, calm: Calm
) -> None:
    found = {
        train(
            attempt,
            tmp_path / str(stages),
            compressed(stages, 1, "fixed", steps=5, bf16=[1], int8=[2, 4]),
            machines=Topology(topology.contributors[:stages]),
        )[0]
        for stages in (1, 3, 4)
    }
    assert len(found) == 1
    weights, _, _ = train(
        attempt,
        tmp_path / "as-planned",
        compressed(1, 1, "fixed", int8=[3]),
        machines=Topology(topology.contributors[:1]),
    )
    assert weights == calm.digest


def test_a_damaged_payload_is_rejected_and_changes_nothing(
    attempt: Attempt, topology: Topology, tmp_path: Path, calm: Calm
) -> None:
    failures = [
        InjectedFailure(kind, Point.tensor_sending, worker="c0", step=step)
        for kind, step in ((FailureKind.corrupt, 4), (FailureKind.drop, 8))
    ]
    machines = Topology(topology.contributors[:2])
    weights, curve, _ = train(attempt, tmp_path, compressed(2, 1, "int8"), failures, machines=machines)
    assert curve == calm.losses
    assert weights == calm.digest


def test_another_coordinator_knows_where_to_round(
    attempt: Attempt, topology: Topology, tmp_path: Path, calm: Calm
) -> None:
    """The coordinator dies, and later a member. Then the plan has no boundary, but values are rounded as before."""
    failures = [
        InjectedFailure(FailureKind.kill, Point.prepared_received, step=3),
        InjectedFailure(FailureKind.kill, Point.cell_done, worker="c0", step=KILLED_AT),
    ]
    machines = Topology(topology.contributors[:2])
    document = compressed(2, 1, "int8")
    before = attempt(document, folder=tmp_path, failures=failures, machines=machines)
    after = attempt(document, folder=tmp_path, number=2, known=2, machines=machines)
    assert after[-1].outcome == "succeeded", after[-1].reason
    assert any(note.startswith("continues at step 3 with the members of attempt 1") for note in notes(after))
    (change,) = (event for event in after if event.type == "reformed")
    assert (change.lost, len(change.plan.stages)) == (("c0",), 1)
    assert losses(before) + losses(after) == calm.losses
    assert digest(tmp_path) == calm.digest


@pytest.mark.thorough
def test_a_member_that_sends_damaged_payloads_is_left_out(
    attempt: Attempt, topology: Topology, tmp_path: Path, calm: Calm
) -> None:
    failures = [InjectedFailure(FailureKind.poison, Point.tensor_sending, worker="c0", step=KILLED_AT)]
    machines = Topology(topology.contributors[:2])
    weights, curve, events = train(attempt, tmp_path, compressed(2, 1, "int8"), failures, machines=machines)
    (offence,) = (event for event in events if event.type == "offended")
    assert (offence.machine, offence.step) == ("c0", KILLED_AT)
    assert "a compressed tensor is damaged" in offence.what
    assert curve == calm.losses
    assert weights == calm.digest
