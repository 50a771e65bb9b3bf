"""The crew: a job's members, as the coordinator holds them. The one place where Ray's errors become ours."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from share_compute.errors import ContributorLost, ShareComputeError, StaleEpoch, Unavailable
from share_compute.jobs.events import Assignment
from share_compute.planning.plan import Plan
from share_compute.protocol.messages import ToMember
from share_compute.protocol.roster import Roster, Worker
from share_compute.topology import Topology
from share_compute_actors.channel import Keys
from share_compute_actors.collective import Meeting
from share_compute_actors.coordinator import Cancelled
from share_compute_actors.library import LibraryFacts
from share_compute_actors.member import Member
from share_compute_actors.messages import MemberSetup, MemberStatus, Peer, Rendezvous, Sources
from share_compute_actors.rows import library_lost
from share_compute_actors.testing import require_carried_out

DEADLINE_S = 900.0
"""Longest wait of one member for another, whatever the reason; a dead or silent machine is noticed much sooner."""
_FORMING_S = 60.0
_GLANCE_S = 0.2
_PULSE_S = 0.5
"""Time between two questions for a sign of life."""
_SILENCE_S = 2.0
"""A member that owes a sign of life for so long is lost."""
_PATIENT_SILENCE_S = 30.0
"""The same while members load: that may hold Python's lock for long."""
_LATE_S = 0.5
"""When this process itself was held up for so long, silence says nothing."""


class MembersLost(Exception):
    """Members died or fell silent."""

    def __init__(self, workers: Collection[Worker]) -> None:
        super().__init__(", ".join(sorted(workers)))
        self.workers = frozenset(workers)


class Crew:
    """All living members of one job.

    Args:
        assignment: the attempt, its number of microbatches settled.
        facts: what the library said.
        library: the library actor.
        coordinator: actor that members talk to.
        cancelled: set when the submitter cancels.
        runs: of the job's `SummationTree`.
        tied_name: parameter that the first and the last pool share.
    """

    def __init__(
        self,
        assignment: Assignment,
        facts: LibraryFacts,
        library: Any,
        coordinator: Any,
        cancelled: threading.Event,
        runs: tuple[int, ...],
        tied_name: str | None,
    ) -> None:
        require_carried_out(assignment.failures)
        self._assignment = assignment
        self._facts = facts
        self._library = library
        self._coordinator = coordinator
        self._cancelled = cancelled
        self._runs = runs
        self._tied_name = tied_name
        self._actors: dict[Worker, Any] = {}
        self._meeting: Meeting | None = None
        self._pulse: dict[Any, Worker] = {}
        self._pulse_asked_s = self._looked_s = time.monotonic()
        self._is_patient = True
        """While members load, which may hold Python's lock for long, they may be silent for longer."""

    @property
    def workers(self) -> frozenset[Worker]:
        """All that are not known to be lost."""
        return frozenset(self._actors)

    def name(self, worker: Worker) -> str:
        """Return the name of a member's machine."""
        return self._assignment.topology[worker].name

    @property
    def topology(self) -> Topology:
        """The machines that members may run on."""
        return self._assignment.topology

    @property
    def is_tied(self) -> bool:
        """Whether the first and the last pool share a parameter."""
        return self._tied_name is not None

    # -- coming and going --------------------------------------------------------------------------------------------

    def _start(self, worker: Worker, applied: int) -> None:
        """Start a member on its contributor.

        Args:
            worker: the contributor's id.
            applied: last step whose update the weights that it will load have.
        """
        machine = self._assignment.topology[worker]
        setup = MemberSetup(
            job=f"{self._assignment.job_id}/{self._assignment.attempt}",
            worker=worker,
            name=machine.name,
            address=machine.address,
            blueprint=self._facts.blueprint,
            training=self._assignment.spec.training,
            runs=self._runs,
            threads=machine.cpu_threads,
            device=machine.device.kind,
            deadline_s=DEADLINE_S,
            applied=applied,
            tied=self._tied_name,
            failures=self._assignment.failures,
        )
        self._actors[worker] = Member.options(  # type: ignore[attr-defined]
            scheduling_strategy=NodeAffinitySchedulingStrategy(machine.node_id, soft=False),
        ).remote(setup, self._coordinator)

    def load(self, plan: Plan, note: Callable[[str], None]) -> None:
        """Start all members of a plan, and let them load their shards from the library or the seed.

        Those that die meanwhile are left out.

        Raises:
            MembersLost: all died.
            PlanInfeasible: a shard does not fit after all.
        """
        shards = {
            member.contributor_id: plan.shard(place)
            for place, pool in enumerate(plan.pools)
            for member in pool.members
        }
        applied = self._facts.first_step - 1
        for worker in shards:
            self._start(worker, applied)
        note("members are loading their shards")
        sources = Sources((self._library,)) if self._facts.has_weights else None
        sizes = self.gather(
            {
                worker: self._actors[worker].load.remote(self._library, shard, sources)
                for worker, shard in shards.items()
            },
            goes_on=True,
        )
        for worker, size in sizes.items():
            note(f"{self.name(worker)} holds {size / 2**20:.1f} MiB of weights")
        adopted = self.gather(
            {worker: self._actors[worker].adopt.remote(0, applied) for worker in self.workers & sizes.keys()},
            goes_on=True,
        )
        for worker in sorted(shards.keys() - adopted.keys()):
            note(f"lost machine {self.name(worker)} while it loaded")
        self._is_patient = False

    def connect(self, roster: Roster, note: Callable[[str], None]) -> None:
        """Link all members of an epoch: channels between all, a group in each pool.

        Raises:
            MembersLost: machines died meanwhile.
            ContributorLost: there is no direct link where one is wanted.
        """
        workers = roster.workers
        if gone := set(workers) - self.workers:
            raise MembersLost(gone)
        keys = {worker: Keys.issue() for worker in workers}
        admitted = tuple(pair.public for pair in keys.values())
        peers: dict[Worker, Peer] = self.gather(
            {
                worker: self._actors[worker].listen.remote(roster.epoch, keys[worker], admitted)
                for worker in workers
            }
        )
        self.introduce(list(peers.values()), note)
        self._form(roster)

    def introduce(self, peers: Sequence[Peer], note: Callable[[str], None]) -> None:
        """Link all members of an epoch to each other: directly, or by Ray calls where there is no direct way."""
        workers = [peer.worker for peer in peers]
        silent: dict[Worker, list[Worker]] = self.ask(workers, "connect", peers)
        self._use_calls(silent, note)

    def _use_calls(self, silent: Mapping[Worker, Sequence[Worker]], note: Callable[[str], None]) -> None:
        wanted = self._assignment.spec.parallelism.channel
        by_calls: dict[Worker, dict[Worker, Any]] = {}
        for worker, sources in silent.items():
            for source in silent if wanted == "ray" else sources:
                if source != worker:
                    by_calls.setdefault(source, {})[worker] = self._actors[worker]
        if by_calls and wanted == "direct":
            lost = sorted({self.name(source) for source in by_calls})
            raise ContributorLost(
                f"no direct link from {', '.join(lost)}",
                machine=lost[0],
                mend="open the ports between these machines, or use parallelism.channel: auto",
            )
        if by_calls:
            links = sum(len(targets) for targets in by_calls.values())
            note(f"{links} links go by Ray calls" + ("" if wanted == "ray" else ": no direct way"))
        self.gather(
            {worker: self._actors[worker].use_calls.remote(targets) for worker, targets in by_calls.items()}
        )

    def _form(self, roster: Roster) -> None:
        if self._meeting is None and any(len(pool) > 1 for pool in roster.pools):
            self._meeting = Meeting(ray.util.get_node_ip_address(), _FORMING_S)
        calls = {}
        for place, pool in enumerate(roster.pools):
            for rank, worker in enumerate(pool):
                meeting = None
                if self._meeting is not None and len(pool) > 1:
                    meeting = Rendezvous(
                        group=f"{self._assignment.job_id}/{self._assignment.attempt}/{roster.epoch}/{place}",
                        host=self._meeting.host,
                        port=self._meeting.port,
                        timeout_s=DEADLINE_S,
                        address=self._assignment.topology[worker].address,
                    )
                calls[worker] = self._actors[worker].form.remote(roster.epoch, meeting, rank, len(pool))
        self.gather(calls)

    def remove(self, workers: Collection[Worker]) -> None:
        """Have nothing to do with these any more; what is left of them is ended."""
        for worker in workers:
            actor = self._actors.pop(worker, None)
            if actor is not None:
                ray.kill(actor)
        self._pulse = {ref: worker for ref, worker in self._pulse.items() if worker in self._actors}

    def dismiss(self) -> None:
        """End all members; what they compute is of no use to anybody any more."""
        self.remove(tuple(self._actors))

    # -- talking -----------------------------------------------------------------------------------------------------

    def tell(self, worker: Worker, message: ToMember) -> None:
        """Tell a member; nobody waits for an answer."""
        actor = self._actors.get(worker)
        if actor is not None:
            actor.hear.remote(message)

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

    def feel_pulse(self) -> frozenset[Worker]:
        """Ask everybody for a sign of life now and then; return who is dead, or owes one for too long."""
        now = time.monotonic()
        late_s, self._looked_s = now - self._looked_s, now
        if late_s > _LATE_S:
            self._pulse_asked_s += late_s
        lost = set()
        if self._pulse:
            ready, owing = ray.wait(list(self._pulse), num_returns=len(self._pulse), timeout=0)
            lost = {self._pulse[ref] for ref in ready if not _answers(ref)}
            limit_s = _PATIENT_SILENCE_S if self._is_patient else _SILENCE_S
            if owing and now - self._pulse_asked_s > limit_s:
                lost |= {self._pulse[ref] for ref in owing}
            if lost:
                self.remove(lost)
                return frozenset(lost)
            if owing or now - self._pulse_asked_s < _PULSE_S:
                return frozenset()
        self._pulse = {actor.status.remote(): worker for worker, actor in self._actors.items()}
        self._pulse_asked_s = now
        return frozenset()

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
        if isinstance(failure, RayActorError):
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


def _answers(ref: Any) -> bool:
    try:
        status: MemberStatus = ray.get(ref)
    except RayError:
        return False
    return bool(status.worker)
