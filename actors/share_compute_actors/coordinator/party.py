"""Members as who leads them holds them: asked together, watched; the one place where Ray's errors become ours."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import ObjectLostError, RayActorError, RayError, RayTaskError

from share_compute.errors import ContributorLost, ShareComputeError, StaleEpoch, Unavailable
from share_compute.protocol.roster import Worker
from share_compute_actors.coordinator.coordinator import Cancelled
from share_compute_actors.coordinator.pulse import Pulse
from share_compute_actors.member.rows import library_lost

_GLANCE_S = 0.2


class MembersLost(Exception):
    """Members died or fell silent."""

    def __init__(self, workers: Collection[Worker]) -> None:
        super().__init__(", ".join(sorted(workers)))
        self.workers = frozenset(workers)


class Party(ABC):
    """Living members that one actor leads.

    Args:
        cancelled: set when all is to end.
    """

    def __init__(self, cancelled: threading.Event) -> None:
        self._cancelled = cancelled
        self._actors: dict[Worker, Any] = {}
        self.pulse = Pulse()

    @property
    def workers(self) -> frozenset[Worker]:
        """All that are not known to be lost."""
        return frozenset(self._actors)

    @abstractmethod
    def name(self, worker: Worker) -> str:
        """Return the name of a member's machine."""

    def remove(self, workers: Collection[Worker]) -> None:
        """Have nothing to do with these any more; what is left of them is ended."""
        for worker in workers:
            actor = self._actors.pop(worker, None)
            if actor is not None:
                ray.kill(actor)
        self.pulse.forget_all_but(self._actors)

    def handle(self, worker: Worker) -> Any:
        """Return the actor of a member."""
        return self._actors[worker]

    def ask(self, workers: Collection[Worker], method: str, *arguments: Any) -> dict[Worker, Any]:
        """Call a method of some members and wait for all answers."""
        return self.gather(
            {worker: getattr(self._actors[worker], method).remote(*arguments) for worker in workers}
        )

    def gather(self, calls: Mapping[Worker, Any], *, goes_on: bool = False) -> dict[Worker, Any]:
        """Wait for the answers to calls.

        Args:
            calls: by member.
            goes_on: whether the loss of some members lets the others go on; else the first loss ends the wait.

        Raises:
            Cancelled: the submitter cancelled the job.
            MembersLost: members died or fell silent; if others may go on, all did.
            ShareComputeError: what a member raised on purpose.
        """
        waiting = {ref: worker for worker, ref in calls.items()}
        answers: dict[Worker, Any] = {}
        while waiting:
            ready, _ = ray.wait(list(waiting), num_returns=1, timeout=_GLANCE_S)
            lost: set[Worker] = set()
            for ref in ready:
                worker = waiting.pop(ref)
                try:
                    answers[worker] = ray.get(ref)
                except RayError as failure:
                    lost |= self._explain(worker, failure)
            if self._cancelled.is_set():
                raise Cancelled
            lost |= self.feel_pulse()
            if lost and not goes_on:
                raise MembersLost(lost)
            waiting = {ref: worker for ref, worker in waiting.items() if worker not in lost}
        if calls and not answers:
            raise MembersLost(calls)
        return answers

    def wait(self, refs: Sequence[Any]) -> None:
        """Wait until all of these calls, to whomever, are answered.

        Raises:
            Cancelled: the submitter cancelled the job.
            MembersLost: members died or fell silent meanwhile.
        """
        while len(ray.wait(list(refs), num_returns=len(refs), timeout=_GLANCE_S)[0]) < len(refs):
            if self._cancelled.is_set():
                raise Cancelled
            if lost := self.feel_pulse():
                raise MembersLost(lost)

    def feel_pulse(self) -> frozenset[Worker]:
        """Ask everybody for a sign of life now and then; return who is lost, and is removed."""
        lost = self.pulse.feel(self._actors)
        self.remove(lost)
        return lost

    def _explain(self, worker: Worker, failure: RayError) -> set[Worker]:
        """Return who is lost, or raise what else a failed call means."""
        cause = failure.cause if isinstance(failure, RayTaskError) else None
        if isinstance(cause, RayActorError):
            # What a member asks while it works is the library, or a member whose loss is noticed by its own silence.
            raise library_lost() from failure
        if isinstance(cause, StaleEpoch):
            raise cause from failure
        if isinstance(cause, ShareComputeError):
            if not isinstance(cause, Unavailable):
                cause.machine = cause.machine or self.name(worker)
            raise cause from failure
        if isinstance(failure, (RayActorError, ObjectLostError)):  # the latter: with what it answered
            self.remove([worker])
            return {worker}
        if cause is not None:
            raise ShareComputeError(
                f"{type(cause).__name__} on {self.name(worker)}: {cause}",
                machine=self.name(worker),
                mend="look at the job's log; if the cause is not yours, report it",
            ) from failure
        raise ContributorLost(
            f"{self.name(worker)} does not answer: {failure}",
            machine=self.name(worker),
            mend="resume the job",
        ) from failure
