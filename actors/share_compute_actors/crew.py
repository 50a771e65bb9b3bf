"""The crew: the members of one epoch, as the coordinator holds them. The one place where Ray's errors become ours."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from share_compute.errors import ContributorLost, ShareComputeError, Unavailable
from share_compute.jobs.events import Assignment
from share_compute.planning.plan import Plan
from share_compute_actors.channel import Keys
from share_compute_actors.collective import Meeting
from share_compute_actors.coordinator import Cancelled
from share_compute_actors.library import LibraryFacts
from share_compute_actors.member import Member
from share_compute_actors.messages import MemberId, MemberSetup, Peer, Rendezvous

DEADLINE_S = 900.0
"""Longest wait of one member for another, whatever the reason; a dead or silent machine is noticed much sooner."""
_FORMING_S = 60.0
_SIGN_OF_LIFE_S = 4.0
_SILENCE_S = 30.0
"""A member that gives no sign of life for so long is lost: longer than anything that holds Python's lock."""
_PULSE_S = 5.0
_GLANCE_S = 0.5


class Crew:
    """All members of one plan.

    Args:
        assignment: the attempt.
        plan: who holds what.
        facts: what the library said.
        library: the library actor.
        cancelled: set when the submitter cancels.
        tied_name: parameter that the first and the last pool share.
    """

    def __init__(
        self,
        assignment: Assignment,
        plan: Plan,
        facts: LibraryFacts,
        library: Any,
        cancelled: threading.Event,
        tied_name: str | None,
    ) -> None:
        self._tied_name = tied_name
        self._assignment = assignment
        self._plan = plan
        self._facts = facts
        self._library = library
        self._cancelled = cancelled
        self.names = {
            MemberId(pool, place): member.name
            for pool, planned in enumerate(plan.pools)
            for place, member in enumerate(planned.members)
        }
        self._actors: dict[MemberId, Any] = {}
        self._meeting: Meeting | None = None
        self._pulse: dict[Any, MemberId] = {}
        self._pulse_asked = 0.0

    # -- coming and going ----------------------------------------------------------------------------------------

    def assemble(self, note: Callable[[str], None]) -> None:
        """Start all members, load their shards, connect them.

        Raises:
            ContributorLost: a machine died meanwhile.
            PlanInfeasible: a shard does not fit after all.
        """
        for me in self.names:
            self._actors[me] = self._start(me)
        note("members are loading their shards")
        sizes = self.ask("load", self._library, self._facts.has_weights)
        for me, size in sizes.items():
            note(f"{self.names[me]} holds {size / 2**20:.1f} MiB of weights")
        keys = {me: Keys.issue() for me in self.names}
        admitted = tuple(pair.public for pair in keys.values())
        peers: dict[MemberId, Peer] = self.gather(
            {me: self._actors[me].listen.remote(keys[me], admitted) for me in self.names}
        )
        self._connect(list(peers.values()), note)
        self._form()

    def _start(self, me: MemberId) -> Any:
        planned = self._plan.pools[me.pool].members[me.member]
        machine = self._assignment.topology[planned.contributor_id]
        spec = self._assignment.spec
        setup = MemberSetup(
            job=f"{self._assignment.job_id}/{self._assignment.attempt}",
            epoch=self._assignment.epoch,
            me=me,
            name=machine.name,
            address=machine.address,
            blueprint=self._facts.blueprint,
            shard=self._plan.shard(me.pool),
            training=spec.training,
            microbatches=planned.microbatches,
            shares=self._plan.shares,
            threads=machine.cpu_threads,
            device=machine.device.kind,
            deadline_s=DEADLINE_S,
            first_step=self._facts.first_step,
            tied=self._tied_name if len(self._plan.pools) > 1 else None,
        )
        return Member.options(  # type: ignore[attr-defined]
            scheduling_strategy=NodeAffinitySchedulingStrategy(machine.node_id, soft=False),
        ).remote(setup)

    def _connect(self, peers: Sequence[Peer], note: Callable[[str], None]) -> None:
        wanted = self._assignment.spec.parallelism.channel
        silent: dict[MemberId, list[MemberId]] = self.ask("connect", peers)
        by_calls: dict[MemberId, dict[MemberId, Any]] = {}
        for me, sources in silent.items():
            for source in self.names if wanted == "ray" else sources:
                if source != me:
                    by_calls.setdefault(source, {})[me] = self._actors[me]
        if by_calls and wanted == "direct":
            lost = sorted({self.names[source] for source in by_calls})
            raise ContributorLost(
                f"no direct link from {', '.join(lost)}",
                machine=lost[0],
                mend="open the ports between these machines, or use parallelism.channel: auto",
            )
        if by_calls:
            links = sum(len(targets) for targets in by_calls.values())
            note(f"{links} links go by Ray calls" + ("" if wanted == "ray" else ": no direct way"))
        self.gather({me: self._actors[me].use_calls.remote(targets) for me, targets in by_calls.items()})

    def _form(self) -> None:
        if any(size > 1 for size in self._plan.pool_sizes):
            self._meeting = Meeting(ray.util.get_node_ip_address(), _FORMING_S)
        refs = {}
        for me, actor in self._actors.items():
            planned = self._plan.pools[me.pool].members[me.member]
            meeting = None
            if self._meeting is not None and len(self._plan.pools[me.pool].members) > 1:
                meeting = Rendezvous(
                    group=f"{self._assignment.job_id}/{self._assignment.attempt}/{self._assignment.epoch}/{me.pool}",
                    host=self._meeting.host,
                    port=self._meeting.port,
                    timeout_s=DEADLINE_S,
                    address=self._assignment.topology[planned.contributor_id].address,
                )
            refs[me] = actor.form.remote(meeting)
        self.gather(refs)

    def dismiss(self) -> None:
        """End all members; what they compute is of no use to anybody any more."""
        for actor in self._actors.values():
            ray.kill(actor)
        self._actors.clear()

    # -- asking --------------------------------------------------------------------------------------------------

    def call(self, method: str, *arguments: Any) -> dict[MemberId, Any]:
        """Call a method of every member and return at once; `gather` waits for the answers."""
        return {me: getattr(actor, method).remote(*arguments) for me, actor in self._actors.items()}

    def ask(self, method: str, *arguments: Any) -> dict[MemberId, Any]:
        """Call a method of every member and wait for all answers."""
        return self.gather(self.call(method, *arguments))

    def ask_first(self, method: str, *arguments: Any) -> dict[MemberId, Any]:
        """Call a method of the first member of each pool and wait for the answers."""
        return self.gather(
            {
                me: getattr(actor, method).remote(*arguments)
                for me, actor in self._actors.items()
                if me.member == 0
            }
        )

    def gather(self, calls: dict[MemberId, Any]) -> dict[MemberId, Any]:
        """Wait for the answers to `call`; the first failure ends the wait.

        Raises:
            Cancelled: the submitter cancelled the job.
            ContributorLost: a member died or fell silent.
            ShareComputeError: what a member raised on purpose.
        """
        waiting = {ref: me for me, ref in calls.items()}
        answers: dict[MemberId, Any] = {}
        while waiting:
            ready, _ = ray.wait(list(waiting), num_returns=1, timeout=_GLANCE_S)
            for ref in ready:
                me = waiting.pop(ref)
                try:
                    answers[me] = ray.get(ref)
                except RayError as failure:
                    raise self._explain(me, failure) from failure
            if self._cancelled.is_set():
                raise Cancelled
            if not ready:
                self._feel_pulse()
        return answers

    def _feel_pulse(self) -> None:
        """Ask everybody for a sign of life now and then; who owes one for too long is lost."""
        now = time.monotonic()
        if self._pulse:
            _, owing = ray.wait(list(self._pulse), num_returns=len(self._pulse), timeout=0)
            if owing and now - self._pulse_asked > _SILENCE_S:
                raise self._lost([self._pulse[ref] for ref in owing])
            if owing or now - self._pulse_asked < _PULSE_S:
                return
        self._pulse = {actor.status.remote(): me for me, actor in self._actors.items()}
        self._pulse_asked = now

    def _lost(self, members: Sequence[MemberId]) -> ContributorLost:
        names = ", ".join(sorted({self.names[member] for member in members}))
        return ContributorLost(
            f"lost machine {names}: its part of the model is gone with it",
            machine=names,
            mend="resume the job: it continues from its last checkpoint on the machines that are there",
        )

    def _explain(self, me: MemberId, failure: RayError) -> ShareComputeError:
        """Find out which machine is at fault: the one that failed first may only have waited for it."""
        cause = failure.cause if isinstance(failure, RayTaskError) else None
        if isinstance(cause, RayActorError):
            # What a member asks while it works is the library.
            return library_lost()
        if isinstance(cause, ShareComputeError) and not isinstance(cause, ContributorLost):
            if not isinstance(cause, Unavailable):
                cause.machine = cause.machine or self.names[me]
            return cause
        dead = self._silent_members()
        if isinstance(failure, RayActorError) and me not in dead:
            dead.insert(0, me)
        if dead:
            return self._lost(dead)
        if isinstance(cause, ContributorLost):
            return cause
        if cause is not None:
            return ShareComputeError(
                f"{type(cause).__name__} on {self.names[me]}: {cause}",
                machine=self.names[me],
                mend="look at the job's log; if the cause is not yours, report it",
            )
        return ContributorLost(
            f"{self.names[me]} does not answer: {failure}", machine=self.names[me], mend="resume the job"
        )

    def _silent_members(self) -> list[MemberId]:
        asked = {me: actor.status.remote() for me, actor in self._actors.items()}
        until = time.monotonic() + _SIGN_OF_LIFE_S
        return [me for me, ref in asked.items() if not _answers(ref, max(0.0, until - time.monotonic()))]


def library_lost() -> Unavailable:
    """Return the error for a library actor that died."""
    return Unavailable(
        "the library process on the server died",
        mend="look for lack of memory on the server, then resume the job",
    )


def _answers(ref: Any, timeout_s: float) -> bool:
    try:
        ray.get(ref, timeout=timeout_s)
    except (RayError, GetTimeoutError):
        return False
    return True
