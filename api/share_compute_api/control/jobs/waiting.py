"""Decides which queued jobs may start on which machines, and explains why a job must wait."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from share_compute.backoff import backoff_s
from share_compute.lifecycle.branch_ids import owner_of
from share_compute.lifecycle.states import ContributorState
from share_compute.quantities import listed
from share_compute.store import ContributorRecord, JobRecord
from share_compute_api.control import ARRIVING, AWAY
from share_compute_api.control.jobs.allotting import Nodes, nodes_of
from share_compute_api.control.jobs.retry_policy import may_wait
from share_compute_api.control.patience import Patience


@dataclass(frozen=True, slots=True)
class _PutOff:
    """Limits on the next start of a queued job: an earliest time, and machines on which the job did not fit."""

    attempt: int
    until: float = -math.inf
    tried: Nodes = frozenset()
    """Machines on which the job did not fit."""


class Waiting:
    """Stores, between passes over the queue, the reasons why queued jobs wait.

    Args:
        patience: time limits; ``arrival_s`` limits how long a job that could start waits for more machines.
        clock: returns the time in seconds.
    """

    def __init__(self, patience: Patience, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience = patience
        self._clock = clock
        self._start = clock()
        self._since: dict[str, float] = {}
        """Job id -> start of the job's wait for machines that are about to join, in seconds.

        Without the wait, the job could have started at that time.
        """
        self._put_off: dict[str, _PutOff] = {}
        """Job id -> limits on its next start. Removed when the job starts."""

    def tried(self, job: JobRecord, machines: Iterable[ContributorRecord]) -> None:
        """Record that the job does not fit on these machines, so that it is not tried on a subset of them."""
        self._put_off[job.id] = _PutOff(job.attempt, tried=nodes_of(machines))

    def pause(self, job: JobRecord) -> None:
        """Pause a job after a lost attempt. The pause doubles with each consecutive attempt that commits no step."""
        pause_s = backoff_s(self._patience.retry_s, max(job.fruitless_attempts - 1, 0))
        self._put_off[job.id] = _PutOff(job.attempt, until=self._clock() + pause_s)

    def began(self, job: JobRecord) -> None:
        """Remove the limits on a job's next start, because the job has started."""
        self._put_off.pop(job.id, None)

    def pauses(self, job: JobRecord) -> bool:
        """Return whether a job is in its pause after a lost attempt."""
        return self._clock() < self._of(job).until

    def cannot_hold(self, job: JobRecord, machines: Iterable[ContributorRecord], *, others_run: bool) -> bool:
        """Return whether the job's last attempt did not fit on these machines, but may fit on others later."""
        return may_wait(job, others_run=others_run) and nodes_of(machines) <= self._of(job).tried

    def _of(self, job: JobRecord) -> _PutOff:
        put_off = self._put_off.get(job.id)
        # If the attempt number differs, a user may have resumed the job, so the limits do not apply.
        return put_off if put_off is not None and put_off.attempt == job.attempt else _PutOff(job.attempt)

    def states(self) -> list[ContributorState]:
        """Return the states of the contributors that `supply` needs to see."""
        states = [*ARRIVING, ContributorState.ready, ContributorState.draining]
        return [*states, ContributorState.lost] if self._are_returning() else states

    def _are_returning(self) -> bool:
        return self._clock() - self._start < self._patience.return_s

    def supply(
        self,
        present: Sequence[ContributorRecord],
        queued: Sequence[JobRecord],
        members: Mapping[str, Collection[str]],
        *,
        anything_runs: bool,
    ) -> Supply:
        """Return the machines that can be given to jobs now.

        Args:
            present: the contributors in `states`.
            queued: the jobs that wait.
            members: for each contributor, the jobs, branches and replicas that have members there.
            anything_runs: whether a running job may release machines later.
        """
        names = {job.id for job in queued}
        self._since = {job_id: since for job_id, since in self._since.items() if job_id in names}
        ready = [machine for machine in present if machine.state is ContributorState.ready]
        free = [machine for machine in ready if not machine.is_leased]
        away = [
            machine
            for machine in present
            if machine.state is ContributorState.lost and machine.reason == AWAY and self._are_returning()
        ]
        coming = [*away, *(machine for machine in present if machine.state in ARRIVING)]
        owners = {machine: {owner_of(each) for each in ids} for machine, ids in members.items()}
        held = {machine.id: jobs for machine in free if (jobs := owners.get(machine.id))}
        living = Counter(job_id for jobs in owners.values() for job_id in jobs)
        busy = [machine for machine in ready if machine.is_leased]
        return Supply(self, free, busy, coming, anything_runs, held, living)

    def is_patient(self, job: JobRecord) -> bool:
        """Return whether a job that could start still waits for machines that are about to join.

        The wait starts with the first call for the job.
        """
        return self._clock() - self._since.setdefault(job.id, self._clock()) < self._patience.arrival_s


@dataclass(slots=True)
class Supply:
    """The machines that queued jobs can get at one moment.

    A machine that still holds members of a job is reserved for that job until the members are taken over or ended,
    because the members occupy memory.
    """

    waiting: Waiting
    free: list[ContributorRecord]
    """Machines that are ready and not leased."""
    busy: list[ContributorRecord]
    """Machines that are ready, but leased to a job or a deployment."""
    coming: list[ContributorRecord]
    """Machines that are joining, being measured, or expected back after a restart of the server."""
    anything_runs: bool
    """Whether a running job may release machines later."""
    held: Mapping[str, Collection[str]]
    """Id of a free contributor -> jobs that have members on it."""
    living: Mapping[str, int]
    """Job id -> number of machines on which the job has members."""

    def take(self, job: JobRecord) -> list[ContributorRecord]:
        """Remove and return all machines that a job can get; the job later releases machines outside its plan."""
        taken = self._free_for(job)
        ids = {machine.id for machine in taken}
        self.free = [machine for machine in self.free if machine.id not in ids]
        self.busy += taken
        return taken

    def spare(self, queued: Iterable[JobRecord]) -> list[ContributorRecord]:
        """Return the free machines that hold no members.

        Return an empty list if a queued job could start on the free machines, now or after more machines have joined.
        """
        if any(self._may_do_for(job) for job in queued):
            return []
        return [machine for machine in self.free if machine.id not in self.held]

    def _free_for(self, job: JobRecord) -> list[ContributorRecord]:
        return [machine for machine in self.free if not self._is_kept(machine, job) and job.may_use(machine)]

    def _coming_for(self, job: JobRecord) -> int:
        """Return the number of machines about to be ready that the job may use."""
        return sum(map(job.may_use, self.coming))

    def _is_kept(self, machine: ContributorRecord, job: JobRecord) -> bool:
        """Return whether a machine has members of jobs other than ``job``."""
        return any(other != job.id for other in self.held.get(machine.id, ()))

    def _may_do_for(self, job: JobRecord) -> bool:
        coming = self._coming_for(job)
        if len(self._free_for(job)) + coming < job.machines_needed:
            return False
        return coming > 0 or not self._cannot_hold(job)

    def _cannot_hold(self, job: JobRecord) -> bool:
        return self.waiting.cannot_hold(job, self._free_for(job), others_run=self.anything_runs)

    def why_not(self, job: JobRecord) -> str | None:
        """Return the reason why a job cannot start now; None when it can start."""
        if self.waiting.pauses(job):
            return job.reason  # the reason already says what happened
        needed, free = job.machines_needed, len(self._free_for(job))
        if free < needed and job.pinned_machines is not None:
            lacking = sorted(job.pinned_machines.difference(machine.name for machine in self._free_for(job)))
            return f"waiting for contributors: the pinned plan needs {listed(lacking)}, not ready or not free"
        if free < needed:
            others, words = self._others(job), job.selection.words
            if words:
                others += f"; waits for {words}"
            return f"waiting for contributors: needs {needed}, {_ready(free)}{others}{self._continues(job)}"
        if self._cannot_hold(job):
            return job.reason  # the reason already says what is missing
        may_gain = job.gains_from_more or self._lacks_members(job)
        coming = self._coming_for(job)
        if may_gain and coming and self.waiting.is_patient(job):
            return (
                f"waiting for contributors: {_ready(free)}, "
                f"{coming} {'is' if coming == 1 else 'are'} about to be{self._continues(job)}"
            )
        return None

    def _lacks_members(self, job: JobRecord) -> bool:
        """Return whether the job has members on machines that are not free.

        Such a member may have the only copy of its state, so the job waits a while for machines that are about to join.
        """
        here = sum(job.id in jobs for jobs in self.held.values())
        return here < self.living.get(job.id, 0)

    def _others(self, job: JobRecord) -> str:
        """Describe the machines that the job cannot get now: leased ones, and those with members of other jobs."""
        busy = sum(map(job.selection.allows, self.busy))
        kept = sum(self._is_kept(machine, job) and job.may_use(machine) for machine in self.free)
        others = [f"{busy} more {'works' if busy == 1 else 'work'} for other jobs"] if busy else []
        if kept:
            others.append(
                "1 more holds members of another job"
                if kept == 1
                else f"{kept} more hold members of other jobs"
            )
        return f" ({', '.join(others)})" if others else ""

    def _continues(self, job: JobRecord) -> str:
        """Describe the state that a job will continue from."""
        living, step = self.living.get(job.id, 0), job.checkpoint_step
        if not living:
            return "" if step is None else f"; continues from its checkpoint of step {step}"
        where = "1 machine" if living == 1 else f"{living} machines"
        otherwise = "" if step is None else f", else from its checkpoint of step {step}"
        return f"; continues from its members' state on {where}{otherwise}"


def _ready(number: int) -> str:
    return f"{number} {'is' if number == 1 else 'are'} ready" if number else "none is ready"
