"""The coordinator's side of the step protocol: a state machine that commits steps and begins epochs.

`CoordinatorMachine.handle` takes one event and returns effects. An epoch is recorded in the step log before members are
halted for it. A step is recorded before members apply it.

- Member: a process of the job on one machine.
- Epoch: a period in which the members and their layers stay the same. It is not a pass over the data.
- Open step: the first step that is not committed.
- Generation: a number that grows each time that the open step is restarted because its numbers are in doubt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from share_compute.protocol.doubts import UNBELIEVED, Accusations, Doubts
from share_compute.protocol.membership import Membership, Worker
from share_compute.protocol.messages import (
    Applied,
    Broken,
    Commit,
    Form,
    Formed,
    Halt,
    Prepared,
    Proceed,
    Rejected,
    Report,
    ToCoordinator,
    ToMember,
)

# -- events --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Assemble:
    """Begin an epoch with these members, for example at the start, or when a member joins or leaves.

    Include members that are to leave, since other members may need their results.
    """

    workers: frozenset[Worker]
    waits: bool = False
    """Whether the epoch waits until a step in progress is committed or cannot be completed."""


@dataclass(frozen=True, slots=True)
class Lost:
    """A member is dead, or has been unresponsive for too long."""

    worker: Worker


@dataclass(frozen=True, slots=True)
class Continue:
    """Run the steps up to ``until``, then pause. A step that members were already asked to begin is still run."""

    until: int


@dataclass(frozen=True, slots=True)
class Recorded:
    """The answer to `WriteStepLog`: the record is stored, and the step log now has this state."""

    epoch: int
    committed: int
    """Last committed step, possibly committed by an earlier coordinator."""
    scale: float = 1.0
    """Factor by which the gradient of the last committed step is multiplied."""
    generation: int = 0
    """Generation of the last committed step."""
    rate: float | None = None
    """Learning rate of the last committed step, as in `Commit`."""


@dataclass(frozen=True, slots=True)
class Superseded:
    """The step log refused a `WriteStepLog`, because another coordinator has replaced this one."""


@dataclass(frozen=True, slots=True)
class MembershipPlanned:
    """The answer to `PlanMembership`: the next epoch's membership. Its members have loaded their weights."""

    form: Form


@dataclass(frozen=True, slots=True)
class MembershipInfeasible:
    """The answer to `PlanMembership` if the members that sent reports cannot hold the whole model."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Tick:
    """A unit of time has passed."""


Order = Assemble | Lost | Continue | Recorded | Superseded | MembershipPlanned | MembershipInfeasible | Tick
Event = Order | ToCoordinator

# -- effects -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WriteStepLog:
    """Record in one transaction that the epoch has begun (``step`` is None), or that ``step`` is committed.

    A new epoch must be later than the epoch in the step log. A step must belong to the epoch in the step log, and
    follow the last committed step. Otherwise the answer is `Superseded`, and nothing is recorded.
    """

    epoch: int
    step: int | None = None
    scale: float = 1.0
    generation: int = 0
    """Generation of the step; see `Form.generation`."""


@dataclass(frozen=True, slots=True)
class PlanMembership:
    """Find a membership for the members in ``reports``, and send them the weights that they lack.

    The answer is `MembershipPlanned` or `MembershipInfeasible`. An answer after a later epoch has begun is ignored.
    """

    epoch: int
    committed: int
    scale: float
    """Factor by which the gradient of step ``committed`` is multiplied."""
    reports: Mapping[Worker, Report]
    without: frozenset[Worker] = frozenset()
    """Members in ``reports`` that must be left out of the membership. Members may still load weights from them."""


@dataclass(frozen=True, slots=True)
class SendToMember:
    """Send a message to a member."""

    worker: Worker
    message: ToMember


@dataclass(frozen=True, slots=True)
class Committed:
    """A step is committed: its loss and gradient norm may be published."""

    step: int
    prepared: Mapping[Worker, Prepared]


@dataclass(frozen=True, slots=True)
class Suspect:
    """A member's numbers are not finite. The step is restarted without this member, to find the cause."""

    worker: Worker
    step: int
    what: str
    accuser: Worker | None = None
    """Member whose claim is the only evidence; None if there is other evidence."""


@dataclass(frozen=True, slots=True)
class Blame:
    """A member computed or sent wrong numbers, or rejected a tensor of a process that is not in the epoch."""

    worker: Worker
    step: int
    what: str
    """Human-readable description of the offence."""
    is_grave: bool = False
    """Whether this offence alone puts the member's machine in quarantine. If not, see `quarantines`."""
    accuser: Worker | None = None
    """Member whose claim is the only evidence of the offence; None if there is other evidence."""


@dataclass(frozen=True, slots=True)
class Expel:
    """Exclude a member and end its process."""

    worker: Worker
    why: str = ""
    """Reason; empty if a `Blame` of the member gives the reason."""


@dataclass(frozen=True, slots=True)
class StartOver:
    """Compute the open step again, because some of its numbers may be wrong."""

    step: int
    workers: frozenset[Worker] = frozenset()
    """Members that hold different gradients; empty if the cause is numbers that are not finite."""


@dataclass(frozen=True, slots=True)
class Diverged:
    """The open step's numbers are not finite, and no machine is known to be the cause. The job cannot continue."""

    step: int
    by: frozenset[Worker] = frozenset()
    """Members whose results are not finite; empty if only the loss or the gradient norm of the step is not finite."""
    is_alone: bool = False
    """Whether there was no other member that could recompute the numbers as a check."""


@dataclass(frozen=True, slots=True)
class Disputed:
    """Members hold different gradients even after computing them a second time. The job cannot continue."""

    step: int
    workers: frozenset[Worker]


@dataclass(frozen=True, slots=True)
class Pause:
    """All members pause after the last requested step. This is repeated if an epoch begins during the pause."""

    step: int


Effect = (
    WriteStepLog
    | PlanMembership
    | SendToMember
    | Committed
    | Suspect
    | Blame
    | Expel
    | StartOver
    | Diverged
    | Disputed
    | Pause
)
Phase = Literal[
    "idle",
    "recording epoch",
    "halting",
    "planning",
    "forming",
    "stepping",
    "recording step",
    "pausing",
    "paused",
    "over",
]
_MOST_NAME = 80
"""Maximum number of characters of an unknown member's name in the text of a `Blame`."""
_WAITS_FOR_MEMBERS: frozenset[Phase] = frozenset({"halting", "forming", "stepping", "pausing"})


class CoordinatorMachine:
    """State machine of one job's coordinator.

    Args:
        epoch: last epoch in the step log.
        committed: last committed step.
        decide: function from the `Prepared` messages of all members to the factor by which the gradient is multiplied.
            It returns None if numbers in the messages are not finite.
        patience: maximum number of ticks without a new answer, while the coordinator waits for members. After more
            ticks, the next epoch begins.
    """

    def __init__(
        self,
        epoch: int,
        committed: int,
        decide: Callable[[Mapping[Worker, Prepared]], float | None] = lambda _: 1.0,
        patience: int = 1000,
    ) -> None:
        self.epoch = epoch
        self.committed = committed
        self.until = committed
        """Step after which members pause."""
        self.workers: set[Worker] = set()
        """Members of the epoch that are not lost or excluded."""
        self._scale = 1.0
        self._decide = decide
        self.patience = patience
        self._phase: Phase = "idle"
        self._next: set[Worker] | None = None
        """Members of an epoch that was requested and has not begun; None if there is none."""
        self._message: ToMember | None = None
        """Last message that was sent to all members."""
        self._answered: set[Worker] = set()
        self._reports: dict[Worker, Report] = {}
        self._prepared: dict[Worker, Prepared] = {}
        self._quiet_ticks = 0
        self._membership: Membership | None = None
        """Membership in the last `Form` that was sent."""
        self._doubts = Doubts()
        """Doubts about the numbers of the open step."""
        self.accusations = Accusations()
        """Accusations by members against other members, in all steps."""

    @property
    def phase(self) -> Phase:
        """Current phase of the protocol."""
        return self._phase

    @property
    def quiet_ticks(self) -> int:
        """Number of ticks without a new answer, while the coordinator waits for members."""
        return self._quiet_ticks

    @property
    def prepared(self) -> Mapping[Worker, Prepared]:
        """`Prepared` messages for the open step, by member."""
        return self._prepared

    def handle(self, event: Event) -> list[Effect]:  # noqa: PLR0911 - a return for each event
        """Process one event and return the effects to carry out."""
        if self._phase == "over":
            return []
        if isinstance(event, ToCoordinator):
            return self._on_message(event)
        match event:
            case Assemble():
                return self._on_assemble(event)
            case Lost():
                return self._on_lost(event.worker)
            case Continue():
                self.until = event.until
                return self._rest() if self._phase == "paused" else []
            case Recorded():
                return self._on_recorded(event)
            case Superseded():
                self._phase = "over"
                return []
            case MembershipPlanned() | MembershipInfeasible():
                return self._on_planned(event)
            case Tick():
                return self._on_tick()

    # -- membership --------------------------------------------------------------------------------------------------

    def _on_assemble(self, assemble: Assemble) -> list[Effect]:
        self._next = set(assemble.workers)
        if assemble.waits and self._phase in ("forming", "stepping"):
            return []
        return self._change()

    def _on_lost(self, worker: Worker) -> list[Effect]:
        if self._next is not None:
            self._next.discard(worker)
        if worker not in self.workers:
            return []
        self.workers.discard(worker)
        if self._phase == "idle":
            return []
        if self._phase == "halting":
            return self._if_all_answered()
        return self._change()

    def _change(self) -> list[Effect]:
        """Begin the next epoch, or become idle if no member is left.

        If a step is being recorded, the epoch begins when the record is stored.
        """
        if self._phase == "recording step":
            self._next = set(self.workers) if self._next is None else self._next
            return []
        if self._next is not None:
            self.workers, self._next = self._next, None
        if self._phase == "recording epoch":
            return []  # no member knows the epoch that is being recorded, so it is reused
        if not self.workers:
            self._phase = "idle"
            return []
        self.epoch += 1
        self._reports.clear()
        self._prepared.clear()
        self._phase = "recording epoch"
        return [WriteStepLog(self.epoch)]

    def _on_recorded(self, recorded: Recorded) -> list[Effect]:
        if recorded.epoch != self.epoch:
            return []
        if self._phase == "recording epoch":
            if recorded.committed != self.committed:
                self._doubts = Doubts()
            self.committed, self._scale = recorded.committed, recorded.scale
            return self._broadcast(
                Halt(self.epoch, self.committed, self._scale, recorded.generation, recorded.rate), "halting"
            )
        if self._phase != "recording step" or recorded.committed != self.committed + 1:
            return []
        self.committed = recorded.committed
        effects: list[Effect] = [Committed(self.committed, dict(self._prepared))]
        doubts, self._doubts = self._doubts, Doubts()
        if doubts.suspect is not None:
            effects.append(Blame(doubts.suspect, self.committed, doubts.what, accuser=doubts.accuser))
        self._prepared.clear()
        self._phase = "stepping"
        if self._next is not None:
            return effects + self._change()
        pauses = self.until <= self.committed
        commit = Commit(self.epoch, self.committed, self._scale, pauses, recorded.rate)
        return effects + self._broadcast(commit, "pausing" if pauses else "stepping")

    def _on_planned(self, planned: MembershipPlanned | MembershipInfeasible) -> list[Effect]:
        epoch = planned.epoch if isinstance(planned, MembershipInfeasible) else planned.form.epoch
        if self._phase != "planning" or epoch != self.epoch:
            return []
        if isinstance(planned, MembershipInfeasible):
            self._phase = "idle"
            return []
        membership = planned.form.membership
        if membership.step != self.committed + 1 or not self.workers.issuperset(membership.workers):
            raise ValueError(
                f"planned step {membership.step} for {membership.workers}; there are {sorted(self.workers)}"
            )
        self.workers = set(membership.workers)
        self._membership = membership
        pauses, generation = self.until <= self.committed, self._doubts.generation
        return self._broadcast(replace(planned.form, pauses=pauses, generation=generation), "forming")

    # -- messages of members -----------------------------------------------------------------------------------------

    def _on_message(self, message: ToCoordinator) -> list[Effect]:
        if message.epoch != self.epoch or message.worker not in self.workers:
            return []
        match message:
            case Report() if self._phase == "halting":
                self._reports[message.worker] = message
            case Formed() if self._phase == "forming":
                pass
            case Prepared() if message.step == self.committed + 1 and self._phase in ("forming", "stepping"):
                self._prepared[message.worker] = message
            case Applied() if message.step == self.committed and self._phase == "pausing":
                pass
            case Broken() if self._phase in ("forming", "stepping", "pausing"):
                return self._change()
            case Rejected() if self._phase in ("forming", "stepping"):
                return self._on_rejected(message)
            case _:
                return []
        if message.worker not in self._answered:
            self._quiet_ticks = 0
        self._answered.add(message.worker)
        return self._if_all_answered()

    def _if_all_answered(self) -> list[Effect]:  # noqa: PLR0911 - a return for each phase
        if not self._answered >= self.workers:
            return []
        if not self.workers:
            return self._change()
        match self._phase:
            case "halting":
                self._phase = "planning"
                return [self._plan()]
            case "forming":
                assert isinstance(self._message, Form)
                if self._message.pauses:
                    return self._rest()
                self._phase = "stepping"
                self._answered = set(self._prepared)
                return self._if_all_answered()
            case "stepping":
                return self._judge()
            case "pausing":
                return self._rest()
            case _:
                return []

    def _rest(self) -> list[Effect]:
        """Pause, or begin the next step if it was requested meanwhile. All members have paused."""
        if self.until <= self.committed:
            self._phase = "paused"
            return [Pause(self.committed)]
        return self._broadcast(Proceed(self.epoch, self.committed + 1), "stepping")

    def _plan(self) -> PlanMembership:
        """Update the generation from the reports, and return the request for the next membership.

        Reports of another generation keep only ``applied``, since their results do not count.
        """
        reports = {worker: self._reports[worker] for worker in sorted(self.workers)}
        open_step = self.committed + 1
        generations = (report.generation for report in reports.values() if report.step == open_step)
        self._doubts.generation = max(self._doubts.generation, *generations, 0)
        if self._doubts.answers and any(map(self._has_answer, reports.values())):
            # In the same generation, members would copy a disputed sum instead of recomputing it.
            self._doubts.generation += 1
        for worker, report in reports.items():
            if report.generation != self._doubts.generation:
                reports[worker] = Report(report.epoch, worker, report.applied)
        suspects = frozenset(() if self._doubts.suspect is None else (self._doubts.suspect,))
        return PlanMembership(self.epoch, self.committed, self._scale, reports, suspects & self.workers)

    def _has_answer(self, report: Report) -> bool:
        """Return whether a member holds the reduced gradient of the open step's latest generation."""
        is_of_step = (report.step, report.generation) == (self.committed + 1, self._doubts.generation)
        return is_of_step and report.is_reduced

    # -- unusable numbers --------------------------------------------------------------------------------------------

    def _on_rejected(self, rejected: Rejected) -> list[Effect]:  # noqa: PLR0911 - a return for each verdict
        """Exclude the source or the accuser of a tensor, restart the step, or report that the job diverged."""
        source, accuser, step = rejected.source, rejected.worker, self.committed + 1
        assert self._membership is not None
        if source not in self._membership.everybody:
            what = f"it rejected a tensor of {source[:_MOST_NAME]!r}, which has no part in this epoch"
            return [Blame(accuser, step, what), *self._expel(frozenset({accuser}))]
        if not rejected.is_certain:
            if rejected.label.cargo == "tied" and not self._doubts.generation:
                # A tied gradient is summed over a whole stage, so its sender may not be the cause. Recompute the step
                # before suspecting a member.
                return self._start_over(step)
            suspect = self._doubts.suspect
            if suspect is not None and suspect != source:
                return [Diverged(step, frozenset({suspect, source}))]
            if suspect == source or len(self.workers) == 1:  # no other machine can compute the cell
                return [Diverged(step, frozenset({source}), is_alone=True)]
        if self.accusations.loser(source, accuser) != source:
            return self._expel(frozenset({accuser}), f"{UNBELIEVED}: {rejected.what}")
        witness = None if accuser == source else accuser
        if rejected.is_certain:
            return [Blame(source, step, rejected.what, accuser=witness), *self._expel(frozenset({source}))]
        self._doubts.suspect, self._doubts.what, self._doubts.accuser = source, rejected.what, witness
        # The suspect's numbers may already be in sums of gradients, also at other members.
        self._doubts.generation += 1
        return [Suspect(source, step, rejected.what, witness), *self._change()]

    def _expel(self, workers: frozenset[Worker], why: str = "") -> list[Effect]:
        """Exclude members whose numbers or accusations are wrong, and begin an epoch without them."""
        effects: list[Effect] = [Expel(worker, why) for worker in sorted(workers)]
        self.workers -= workers
        if self._next is not None:
            self._next -= workers
        return effects + self._change()

    def _judge(self) -> list[Effect]:
        """Record the step, unless gradients are wrong, disputed or not finite."""
        assert self._membership is not None
        step = self.committed + 1
        deviating, disputed = self._doubts.deviating(self._membership, self._prepared)
        if deviating:
            self._doubts.answers.clear()
            self._doubts.generation += 1
            what = "its sum of the gradients is not that of the others"
            blames: list[Effect] = [Blame(worker, step, what, is_grave=True) for worker in sorted(deviating)]
            return blames + self._expel(deviating)
        if disputed:
            if self._doubts.answers:
                return [Disputed(step, disputed)]
            self._doubts.take_answers(self._membership, self._prepared, disputed)
            return self._start_over(step, disputed)
        scale = self._decide(self._prepared)
        if scale is None:
            if self._doubts.generation:
                return [Diverged(step, is_alone=len(self.workers) == 1)]
            return self._start_over(step)
        self._phase, self._scale = "recording step", scale
        return [WriteStepLog(self.epoch, step, scale, self._doubts.generation)]

    def _start_over(self, step: int, workers: frozenset[Worker] = frozenset()) -> list[Effect]:
        self._doubts.generation += 1
        return [StartOver(step, workers), *self._change()]

    # -- sending -----------------------------------------------------------------------------------------------------

    def _broadcast(self, message: ToMember, phase: Phase) -> list[Effect]:
        self._message, self._phase = message, phase
        self._answered = set()
        self._quiet_ticks = 0
        return self._send_to(self.workers) or self._if_all_answered()

    def _send_to(self, workers: Iterable[Worker]) -> list[Effect]:
        assert self._message is not None
        return [SendToMember(worker, self._message) for worker in sorted(workers)]

    def _on_tick(self) -> list[Effect]:
        if self._phase not in _WAITS_FOR_MEMBERS:
            return []
        self._quiet_ticks += 1
        if self._quiet_ticks > self.patience:
            return self._change()
        # Repeat the message at ticks 2, 4, 8, ... The first tick may directly follow the message.
        is_due = self._quiet_ticks > 1 and self._quiet_ticks.bit_count() == 1
        return self._send_to(self.workers - self._answered) if is_due else []
