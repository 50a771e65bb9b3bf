"""Detects when each layer of a job is on two machines, so that the loss of any one machine costs no step."""

from __future__ import annotations

from collections.abc import Callable

from share_compute.lifecycle.attempt_events import Protection
from share_compute.protocol.membership import Membership
from share_compute_actors.training.membership.training_group import Poll, TrainingGroup


class ProtectionWatch:
    """Polls backup members until all copies of an epoch are complete; reports this, and the later loss of a copy.

    Args:
        group: the members.
        report: receives a `Protection` event for each change.
    """

    def __init__(self, group: TrainingGroup, report: Callable[[Protection], None]) -> None:
        self._group = group
        self._report = report
        self._membership: Membership | None = None
        """Membership of the epoch whose copies are being watched.

        None before the first epoch, once all copies are complete, after a copy is lost, and if a member that alone
        holds some state has no backup."""
        self._poll = Poll(group)
        self.is_protected = False
        """Whether each layer is on two machines."""

    def reform(self, membership: Membership) -> None:
        """Start to watch the copies of an epoch, unless a member that alone holds some state has no backup.

        This reports nothing, because the `Reformed` event of the epoch implies that the job is not protected yet.
        """
        is_alone = (worker not in membership.backups for worker in membership.sole_holders)
        self._membership, self.is_protected = None if any(is_alone) else membership, False
        self._poll = Poll(self._group)

    def lose_copy(self, step: int) -> None:
        """Record that a copy is lost. If the job was protected, report the loss of protection.

        Args:
            step: number of the last committed step.
        """
        self._membership = None
        if self.is_protected:
            self.is_protected = False
            self._report(Protection(step=step, is_protected=False))

    def poll(self, step: int) -> None:
        """Poll the backup members, and report when all copies are complete; never waits.

        Args:
            step: number of the last committed step.
        """
        if self._membership is None or not self._group.workers.issuperset(self._membership.workers):
            return  # a member is lost, so another epoch begins soon
        holders = set(self._membership.backups.values())
        if self._poll.is_unanimous(lambda: self._group.query_whole_copies(holders)):
            self._membership, self.is_protected = None, True
            self._report(Protection(step=step, is_protected=True))
