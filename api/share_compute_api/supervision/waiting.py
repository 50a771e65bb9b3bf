"""Which queued job may begin on which machines, and in words why another one waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from share_compute.jobs.states import ContributorState
from share_compute.store import ContributorRecord, JobRecord
from share_compute_api.supervision import AWAY
from share_compute_api.supervision.patience import Patience

_ARRIVING = (ContributorState.joining, ContributorState.probing)


class Waiting:
    """Remembers between two looks what jobs wait for.

    Args:
        patience: how long a job waits for machines that it could use but does not need.
        clock: tells seconds.
    """

    def __init__(self, patience: Patience, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience = patience
        self._clock = clock
        self._start = clock()
        self._since: dict[str, float] = {}
        """When a job was first seen that could begin, but not with all machines that are about to come."""
        self._too_few: dict[tuple[str, int], frozenset[str]] = {}
        """By job and attempt: contributors that were offered and could not hold it."""

    def too_few(self, job: JobRecord, machines: Iterable[ContributorRecord]) -> None:
        """Remember that these machines cannot hold the job, so that it is not offered just them again."""
        self._too_few[job.id, job.attempt] = frozenset(machine.id for machine in machines)

    def states(self) -> list[ContributorState]:
        """Return the states of the contributors that matter now."""
        states = [*_ARRIVING, ContributorState.ready]
        return [*states, ContributorState.lost] if self._are_returning() else states

    def _are_returning(self) -> bool:
        return self._clock() - self._start < self._patience.return_s

    def look(
        self, present: Sequence[ContributorRecord], queued: Sequence[JobRecord], *, anything_runs: bool
    ) -> Offer:
        """Return what can be given away now.

        Args:
            present: the contributors in `states`.
            queued: the jobs that wait.
            anything_runs: whether a job may still give machines back.
        """
        waiting = {(job.id, job.attempt) for job in queued}
        known = self._too_few.items() if anything_runs else ()
        self._too_few = {key: offered for key, offered in known if key in waiting}
        names = {job.id for job in queued}
        self._since = {job_id: since for job_id, since in self._since.items() if job_id in names}
        ready = [machine for machine in present if machine.state is ContributorState.ready]
        free = [machine for machine in ready if machine.job_id is None]
        away = [
            machine
            for machine in present
            if machine.state is ContributorState.lost and machine.reason == AWAY and self._are_returning()
        ]
        coming = len(away) + sum(machine.state in _ARRIVING for machine in present)
        return Offer(self, free, busy=len(ready) - len(free), coming=coming)

    def is_patient(self, job: JobRecord) -> bool:
        """Whether a job that could begin still waits for machines that are about to come."""
        return self._clock() - self._since.setdefault(job.id, self._clock()) < self._patience.arrival_s

    def cannot_hold(self, job: JobRecord, machines: Sequence[ContributorRecord]) -> bool:
        """Whether just these machines were tried with this job already."""
        return self._too_few.get((job.id, job.attempt)) == frozenset(machine.id for machine in machines)


@dataclass(slots=True)
class Offer:
    """The machines that queued jobs can be given at one moment."""

    waiting: Waiting
    free: list[ContributorRecord]
    busy: int
    """Ready, but leased to a job."""
    coming: int
    """Joining, being measured, or on the way back after a restart."""

    def take(self) -> list[ContributorRecord]:
        """Give all that is free to one job; its plan gives back what it does not use."""
        taken, self.free = self.free, []
        self.busy += len(taken)
        return taken

    def why_not(self, job: JobRecord) -> str | None:
        """Say why a job cannot begin now; None when it can."""
        parallelism = job.spec.parallelism
        needed = parallelism.machines_needed
        if len(self.free) < needed:
            others = f" ({self.busy} more {_work(self.busy)} for other jobs)" if self.busy else ""
            have = "none is" if not self.free else f"{len(self.free)} {_be(len(self.free))}"
            return f"waiting for contributors: needs {needed}, {have} ready{others}{_continues(job)}"
        if self.waiting.cannot_hold(job, self.free):
            return job.reason  # it says already what is missing
        if parallelism.pools is None and self.coming and self.waiting.is_patient(job):
            return (
                f"waiting for contributors: {len(self.free)} {_be(len(self.free))} ready, "
                f"{self.coming} {_be(self.coming)} about to be{_continues(job)}"
            )
        return None


def _continues(job: JobRecord) -> str:
    return "" if job.checkpoint_step is None else f"; continues from step {job.checkpoint_step}"


def _be(number: int) -> str:
    return "is" if number == 1 else "are"


def _work(number: int) -> str:
    return "works" if number == 1 else "work"
