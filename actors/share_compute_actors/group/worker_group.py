"""Actor group: calls members in parallel, watches their heartbeats, and translates the errors that Ray raises."""

from __future__ import annotations

import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import ray
from ray.exceptions import ActorUnavailableError, ObjectLostError, RayActorError, RayError

from share_compute.errors import ContributorLost, ShareComputeError, StaleEpoch, Unavailable, WrongTensor
from share_compute.protocol.membership import Worker
from share_compute.topology import Topology
from share_compute_actors.group.answering import answered
from share_compute_actors.group.exceptions import Cancelled, MembersLost
from share_compute_actors.group.failure_detector import FailureDetector
from share_compute_actors.group.own_link import OwnLink
from share_compute_actors.machine.reach import Place
from share_compute_actors.unpickling import is_refusal
from share_compute_actors.wire import Packs, Undeclared, undeclared

_POLL_S = 0.2
_KEY_BYTES = 16

Answer = TypeVar("Answer")


class WorkerGroup(ABC):
    """The members that a job's coordinator or a deployment's server leads. Lost members are removed from the group.

    Args:
        topology: the machines on which members may run.
        cancelled: event that is set when the job is cancelled or the replica is stopped.
        heartbeat: schema of a heartbeat.
        note: called with each message for the user.
    """

    def __init__(
        self,
        topology: Topology,
        cancelled: threading.Event,
        heartbeat: Packs[Any],
        note: Callable[[str], None],
    ) -> None:
        self.topology = topology
        """The machines on which members may run, and machines that were offered earlier."""
        self._cancelled = cancelled
        self._own_link = OwnLink(cancelled, note)
        self._actors: dict[Worker, Any] = {}
        self._keys: dict[Worker, bytes] = {}
        self.detector = FailureDetector(heartbeat, self.name)

    @property
    def workers(self) -> frozenset[Worker]:
        """All members that are not known to be lost."""
        return frozenset(self._actors)

    def offer(self, topology: Topology) -> None:
        """Replace the machines for members; earlier machines stay known, because members may still run on them."""
        known = {machine.id for machine in topology.contributors}
        former = (machine for machine in self.topology.contributors if machine.id not in known)
        self.topology = Topology((*topology.contributors, *former), topology.links)

    def name(self, worker: Worker) -> str:
        """Return the name of a member's machine."""
        return self.topology[worker].name

    def address(self, worker: Worker) -> str:
        """Return the IP address of a member's machine."""
        return self.topology[worker].address

    @abstractmethod
    def cut_off(self, workers: frozenset[Worker]) -> frozenset[Worker]:
        """Handle members that did not reconnect after this host was cut off; return the members that are lost."""

    def remove(self, workers: Collection[Worker]) -> None:
        """Remove members from the group and kill their actors."""
        for worker in workers:
            actor = self._actors.pop(worker, None)
            if actor is not None:
                self._keys.pop(worker, None)
                ray.kill(actor)
        self.detector.keep_only(self._actors)

    def handle(self, worker: Worker) -> Any:
        """Return the Ray handle of a member's actor."""
        return self._actors[worker]

    def issue_key(self, worker: Worker) -> bytes:
        """Return a new secret that the member must send with each message; it replaces the member's previous secret."""
        key = self._keys[worker] = secrets.token_bytes(_KEY_BYTES)
        return key

    def is_from(self, worker: Any, key: Any) -> bool:
        """Return whether a key is the last one that `issue_key` returned for this member."""
        known = self._keys.get(worker) if isinstance(worker, str) else None
        return known is not None and isinstance(key, bytes) and secrets.compare_digest(known, key)

    def accuse(self, worker: Worker, fault: str) -> None:
        """Count a member as lost, because it sent invalid data.

        Raises:
            MembersLost: always.
        """
        self.detector.accuse(worker, undeclared(self.name(worker), fault))
        raise MembersLost(self.check_members())

    def ask(
        self, schema: Packs[Answer], workers: Collection[Worker], method: str, *arguments: Any
    ) -> dict[Worker, Answer]:
        """Call a method of some members and wait for all answers; see `gather`."""
        return self.gather(
            schema, {worker: getattr(self._actors[worker], method).remote(*arguments) for worker in workers}
        )

    def gather(
        self, schema: Packs[Answer], calls: Mapping[Worker, Any], *, skips_lost: bool = False
    ) -> dict[Worker, Answer]:
        """Return the answers to calls, by member. A member whose answer does not match the schema counts as lost.

        Args:
            schema: schema of an answer.
            calls: pending Ray calls, by member.
            skips_lost: whether to keep waiting for the remaining members when some are lost.

        Raises:
            Cancelled: the job was cancelled, or the replica was stopped.
            MembersLost: members died, became unresponsive or sent invalid data; with ``skips_lost``, only if no member
                answered.
            ShareComputeError: a member's method raised this error.
            ContributorLost: Ray reports another failure of a call.
        """
        waiting = {ref: worker for worker, ref in calls.items()}
        answers: dict[Worker, Answer] = {}
        while waiting:
            ready, _ = ray.wait(list(waiting), num_returns=1, timeout=_POLL_S)
            lost: set[Worker] = set()
            for ref in ready:
                worker = waiting.pop(ref)
                try:
                    answers[worker] = answered(schema, ref, self.name(worker))
                except (RayError, ShareComputeError) as failure:
                    lost |= self._explain(worker, failure)
            if self._cancelled.is_set():
                raise Cancelled
            lost |= self.check_members()
            if lost and not skips_lost:
                raise MembersLost(lost)
            waiting = {ref: worker for ref, worker in waiting.items() if worker not in lost}
        if calls and not answers:
            raise MembersLost(calls)
        return answers

    def wait(self, refs: Sequence[Any]) -> None:
        """Wait until all of these calls are answered; calls to actors other than members are allowed.

        Raises:
            Cancelled: the job was cancelled, or the replica was stopped.
            MembersLost: members died, became unresponsive or sent invalid data.
        """
        while len(ray.wait(list(refs), num_returns=len(refs), timeout=_POLL_S)[0]) < len(refs):
            if self._cancelled.is_set():
                raise Cancelled
            if lost := self.check_members():
                raise MembersLost(lost)

    @property
    def was_cut(self) -> bool:
        """Whether a network cut of this host ended at most 10 s ago."""
        return self._own_link.was_cut

    def nodes(self) -> Mapping[str, Place]:
        """Return the address and port of each living Ray node, by node id; see `OwnLink.nodes`."""
        return self._own_link.nodes()

    def check_members(self) -> frozenset[Worker]:
        """Request heartbeats when they are due; remove and return the members that are lost.

        If this host itself is cut off from the network, wait until it is connected again, for ten minutes at most.

        Raises:
            Cancelled: the job was cancelled, or the replica was stopped.
        """
        lost = self.detector.poll(self._actors)
        if unresponsive := self.detector.unresponsive:
            if self._own_link.has_failed(
                {self.address(worker) for worker in unresponsive},
                {self.address(worker) for worker in self._actors},
            ):
                self._own_link.wait()
                self.detector.restart(self._actors)
                return frozenset()
            if returning := lost & self.detector.returning:
                lost = lost - returning | self.cut_off(returning)
        self.remove(lost)
        return lost

    def _explain(self, worker: Worker, failure: RayError | ShareComputeError) -> set[Worker]:
        """Remove and return the members that a failed call shows to be lost; raise an error for other causes."""
        if isinstance(failure, Undeclared) or is_refusal(failure):
            self.detector.accuse(worker, failure)
            return set()  # the next `check_members` reports the member as lost
        if isinstance(failure, WrongTensor):
            failure.details["accuser"] = worker
        if isinstance(failure, ShareComputeError):
            if not isinstance(failure, (Unavailable, StaleEpoch)):
                failure.machine = failure.machine or self.name(worker)
            raise failure
        if isinstance(failure, ActorUnavailableError) and self._own_link.was_cut:
            lost = self.cut_off(frozenset({worker}))
            self.remove(lost)
            return set(lost)
        # An answer that Ray keeps at the member's node is lost together with the node (`ObjectLostError`).
        if isinstance(failure, (RayActorError, ObjectLostError)):
            self.remove([worker])
            return {worker}
        raise ContributorLost(
            f"{self.name(worker)} does not answer: {failure}",
            machine=self.name(worker),
            hint="resume the job",
        ) from failure
