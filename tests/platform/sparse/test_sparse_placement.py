"""When ranges are settled, and steps of a run that continues."""

from __future__ import annotations

from share_compute.sparse.placement import (
    BackupWhole,
    GiveRole,
    RangeGone,
    ReplicaPlacement,
    ServersOffered,
)
from share_compute.sparse.progress import RunProgress, StepProgress, WorkerProgress


def test_two_machines_are_settled_only_when_the_backup_is_whole() -> None:
    placement = ReplicaPlacement(1)
    effects = placement.handle(ServersOffered(("a", "b")))
    [role] = [effect for effect in effects if isinstance(effect, GiveRole)]
    assert (role.server, role.backup) == ("a", "b")
    assert not placement.is_settled, "the backup is still filled, and the server has the only whole copy"
    placement.handle(BackupWhole(0, role.term))
    assert placement.is_settled
    effects = placement.handle(ServersOffered(("b",)))
    assert not any(isinstance(effect, RangeGone) for effect in effects)
    assert placement.servers == ("b",)
    assert placement.is_settled, "no machine is left for a backup"


def test_steps_continue_after_a_checkpoint() -> None:
    progress = RunProgress([8, 8], 4)
    progress.seen(0, WorkerProgress(8, 0, 0.0))
    progress.seen(1, WorkerProgress(4, 10, 5.0))
    assert progress.next_step() is None, "it was reported before"
    progress.seen(1, WorkerProgress(6, 20, 10.0))
    assert progress.next_step() == StepProgress(6, 20, 0.5)
    progress.seen(1, WorkerProgress(8, 40, 20.0))
    assert progress.next_step() == StepProgress(8, 20, 0.5)
