"""The coordinator's side of the step protocol: what is committed, who is in, and when the next epoch begins.

`CoordinatorMachine.handle` takes one event and returns effects. What a record says is true before anybody is told: an
epoch is recorded before members are halted for it, and a step before they apply it. So whoever takes over after a
crash reads the record, starts a later epoch, and goes on with the open step.

In each phase the coordinator has told its members one word (`Halt`, `Form`, `Commit` or `Proceed`) and waits for their
answers; ticks without news let it say the word again to those who have not answered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from share_compute.protocol.doubts import UNBELIEVED, Accusations, Doubts
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
from share_compute.protocol.roster import Roster, Worker

# -- events --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Assemble:
    """Begin an epoch with these members: at the start, when somebody wants in or out, or when nothing moves.

    Who wants out is among them: it reports what it has, and the plan leaves it out.
    """

    workers: frozenset[Worker]
    waits: bool = False
    """Whether a step under way is committed first, so that nothing of it is done twice."""


@dataclass(frozen=True, slots=True)
class Lost:
    """A member is dead, or has been silent for too long."""

    worker: Worker


@dataclass(frozen=True, slots=True)
class Continue:
    """Take the steps up to this one, then pause. A step that members were told to begin is taken in any case."""

    until: int


@dataclass(frozen=True, slots=True)
class Recorded:
    """What `Record` asked for is durable; this is what the record says now."""

    epoch: int
    committed: int
    """Last committed step. A coordinator that was replaced may have committed one more before its epoch was over."""
    scale: float = 1.0
    """Of that step."""
    generation: int = 0
    """Of that step."""


@dataclass(frozen=True, slots=True)
class Superseded:
    """The record refused: another coordinator has begun an epoch. This one is over."""


@dataclass(frozen=True, slots=True)
class Planned:
    """The answer to `Plan`: the next epoch's roster; what its members lack is with them."""

    form: Form


@dataclass(frozen=True, slots=True)
class Unplanned:
    """The answer to `Plan`: these members cannot hold the job. They stay halted until `Assemble` brings others."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Some time went by: say again what nobody has answered."""


Order = Assemble | Lost | Continue | Recorded | Superseded | Planned | Unplanned | Tick
Event = Order | ToCoordinator

# -- effects -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Record:
    """Write down, in one transaction, that the epoch has begun, or that the step is committed in it.

    An epoch must be later than the record's, a step must be in the record's epoch: else the answer is `Superseded`.
    """

    epoch: int
    step: int | None = None
    scale: float = 1.0
    generation: int = 0
    """Of the step, as `Form` says it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Find a roster for these members, bring to them what they lack, and answer `Planned` or `Unplanned`.

    A later `Record` of an epoch ends it: nobody waits for the answer any more.
    """

    epoch: int
    committed: int
    scale: float
    """Of the committed step; whoever replays a buddy's log needs it."""
    reports: Mapping[Worker, Report]
    without: frozenset[Worker] = frozenset()
    """Members that are there, and that the roster must leave out: others may load what they hold."""


@dataclass(frozen=True, slots=True)
class Tell:
    """Tell a member."""

    worker: Worker
    message: ToMember


@dataclass(frozen=True, slots=True)
class Committed:
    """A step is committed: its figures may be told to the world."""

    step: int
    prepared: Mapping[Worker, Prepared]


@dataclass(frozen=True, slots=True)
class Suspect:
    """A machine made numbers that are not finite: it is left out, and another one computes its cells."""

    worker: Worker
    step: int
    what: str
    accuser: Worker | None = None
    """As `Blame` has it."""


@dataclass(frozen=True, slots=True)
class Blame:
    """A machine made wrong numbers; what follows depends on who says so."""

    worker: Worker
    step: int
    what: str
    """What it made, for people."""
    is_grave: bool = False
    """Whether no second offence is waited for: its numbers looked right, and were not."""
    accuser: Worker | None = None
    """The member on whose word alone it rests; None where the coordinator knows it, or the machine says it of itself.
    See `quarantines`."""


@dataclass(frozen=True, slots=True)
class Expel:
    """A member is out, and its process is to be ended: nothing that it holds counts."""

    worker: Worker
    why: str = ""
    """Reason, where the member is not blamed."""


@dataclass(frozen=True, slots=True)
class StartOver:
    """All of the open step is computed again, since its numbers are in doubt."""

    step: int
    workers: frozenset[Worker] = frozenset()
    """Members that hold different gradients; none where numbers are not finite."""


@dataclass(frozen=True, slots=True)
class Diverged:
    """The open step's numbers are not finite, and no machine is to blame. The job cannot go on."""

    step: int
    by: frozenset[Worker] = frozenset()
    """Machines that found the same; none where members computed the step twice and none found the cell."""
    is_alone: bool = False
    """Whether there was no other machine that could compute the cell."""


@dataclass(frozen=True, slots=True)
class Disputed:
    """Members hold different gradients, also when they compute them again. The job cannot go on."""

    step: int
    workers: frozenset[Worker]


@dataclass(frozen=True, slots=True)
class Pause:
    """All members have applied the last step that was asked for. Said again after an epoch that begins meanwhile."""

    step: int


Effect = Record | Plan | Tell | Committed | Suspect | Blame | Expel | StartOver | Diverged | Disputed | Pause
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
"""Characters that are shown of a member's name which another one made up."""
_WAITS_FOR_MEMBERS: frozenset[Phase] = frozenset({"halting", "forming", "stepping", "pausing"})


class CoordinatorMachine:
    """One job's coordinator.

    Args:
        epoch: last epoch that the record knows.
        committed: last committed step.
        decide: given what all members prepared, returns what the gradient is multiplied by; None where its numbers are
            not finite.
        patience: ticks without news after which an epoch is taken to be stuck, and the next begins. A coordinator whose
            members follow another one finds out by this.
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
        """Members of the epoch that are not lost."""
        self._scale = 1.0
        self._decide = decide
        self.patience = patience
        self._phase: Phase = "idle"
        self._next: set[Worker] | None = None
        """Members of an epoch that begins once the open step is committed."""
        self._word: ToMember | None = None
        """Last thing that all members were told."""
        self._answered: set[Worker] = set()
        self._reports: dict[Worker, Report] = {}
        self._prepared: dict[Worker, Prepared] = {}
        self._quiet_ticks = 0
        self._roster: Roster | None = None
        """Of the last epoch that members were told of."""
        self._doubts = Doubts()
        """About the open step."""
        self.accusations = Accusations()
        """Of members against others, in all steps."""

    @property
    def phase(self) -> Phase:
        """What it is doing."""
        return self._phase

    @property
    def quiet_ticks(self) -> int:
        """Ticks since members gave the last news that is waited for."""
        return self._quiet_ticks

    @property
    def prepared(self) -> Mapping[Worker, Prepared]:
        """What members said of the open step."""
        return self._prepared

    def handle(self, event: Event) -> list[Effect]:  # noqa: PLR0911 - a return for each event
        """Take in one event and return what must be done."""
        if self._phase == "over":
            return []
        if isinstance(event, ToCoordinator):
            return self._on_heard(event)
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
            case Planned() | Unplanned():
                return self._on_planned(event)
            case Tick():
                return self._on_tick()

    # -- who is in ---------------------------------------------------------------------------------------------------

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
        """Begin the next epoch, unless something is being written: then it begins when that is done."""
        if self._phase == "recording step":
            self._next = set(self.workers) if self._next is None else self._next
            return []
        if self._next is not None:
            self.workers, self._next = self._next, None
        if self._phase == "recording epoch":
            return []  # nobody was told of this one yet, so it serves
        if not self.workers:
            self._phase = "idle"
            return []
        self.epoch += 1
        self._reports.clear()
        self._prepared.clear()
        self._phase = "recording epoch"
        return [Record(self.epoch)]

    def _on_recorded(self, recorded: Recorded) -> list[Effect]:
        if recorded.epoch != self.epoch:
            return []
        if self._phase == "recording epoch":
            if recorded.committed != self.committed:
                self._doubts = Doubts()
            self.committed, self._scale = recorded.committed, recorded.scale
            return self._say(Halt(self.epoch, self.committed, self._scale, recorded.generation), "halting")
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
        commit = Commit(self.epoch, self.committed, self._scale, pauses)
        return effects + self._say(commit, "pausing" if pauses else "stepping")

    def _on_planned(self, planned: Planned | Unplanned) -> list[Effect]:
        epoch = planned.epoch if isinstance(planned, Unplanned) else planned.form.epoch
        if self._phase != "planning" or epoch != self.epoch:
            return []
        if isinstance(planned, Unplanned):
            self._phase = "idle"
            return []
        roster = planned.form.roster
        if roster.step != self.committed + 1 or not self.workers.issuperset(roster.workers):
            raise ValueError(
                f"planned step {roster.step} for {roster.workers}; there are {sorted(self.workers)}"
            )
        self.workers = set(roster.workers)
        self._roster = roster
        pauses, generation = self.until <= self.committed, self._doubts.generation
        return self._say(replace(planned.form, pauses=pauses, generation=generation), "forming")

    # -- what members say --------------------------------------------------------------------------------------------

    def _on_heard(self, message: ToCoordinator) -> list[Effect]:
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
            case Broken() if self._phase in ("forming", "stepping"):
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
                assert isinstance(self._word, Form)
                if self._word.pauses:
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
        """All members pause: let them, or go on when more steps are asked for."""
        if self.until <= self.committed:
            self._phase = "paused"
            return [Pause(self.committed)]
        return self._say(Proceed(self.epoch, self.committed + 1), "stepping")

    def _plan(self) -> Plan:
        """Ask for the next roster. What is of an earlier generation of the open step does not count."""
        reports = {worker: self._reports[worker] for worker in sorted(self.workers)}
        open_step = self.committed + 1
        generations = (report.generation for report in reports.values() if report.step == open_step)
        self._doubts.generation = max(self._doubts.generation, *generations, 0)
        if self._doubts.answers and any(map(self._has_answer, reports.values())):
            self._doubts.generation += (
                1  # others would copy its sum, and agree with it without one of their own
            )
        for worker, report in reports.items():
            if report.generation != self._doubts.generation:
                reports[worker] = Report(report.epoch, worker, report.applied)
        suspects = frozenset(() if self._doubts.suspect is None else (self._doubts.suspect,))
        return Plan(self.epoch, self.committed, self._scale, reports, suspects & self.workers)

    def _has_answer(self, report: Report) -> bool:
        """Return whether a member holds the reduced gradient of the open step, as it was computed last."""
        is_of_step = (report.step, report.generation) == (self.committed + 1, self._doubts.generation)
        return is_of_step and report.is_reduced

    # -- numbers that cannot be used ---------------------------------------------------------------------------------

    def _on_rejected(self, rejected: Rejected) -> list[Effect]:  # noqa: PLR0911 - a return for each verdict
        """A bad tensor counts as the loss of the machine that made it, unless any machine would make it."""
        source, accuser, step = rejected.source, rejected.worker, self.committed + 1
        assert self._roster is not None
        if source not in self._roster.everybody:
            what = f"it rejected a tensor of {source[:_MOST_NAME]!r}, which has no part in this epoch"
            return [Blame(accuser, step, what), *self._expel(frozenset({accuser}))]
        if not rejected.is_certain:
            if rejected.label.cargo == "tied" and not self._doubts.generation:
                return self._start_over(step)  # a sum of the whole stage: any of its members may be the cause
            suspect = self._doubts.suspect
            if suspect is not None and suspect != source:
                return [Diverged(step, frozenset({suspect, source}))]
            if suspect == source or len(self.workers) == 1:  # no other machine can hold its part
                return [Diverged(step, frozenset({source}), is_alone=True)]
        if self.accusations.loser(source, accuser) != source:
            return self._expel(frozenset({accuser}), f"{UNBELIEVED}: {rejected.what}")
        witness = None if accuser == source else accuser
        if rejected.is_certain:
            return [Blame(source, step, rejected.what, accuser=witness), *self._expel(frozenset({source}))]
        self._doubts.suspect, self._doubts.what, self._doubts.accuser = source, rejected.what, witness
        # Its numbers may be in sums already, its own and those of others.
        self._doubts.generation += 1
        return [Suspect(source, step, rejected.what, witness), *self._change()]

    def _expel(self, workers: frozenset[Worker], why: str = "") -> list[Effect]:
        """Go on without members whose numbers or words are wrong."""
        effects: list[Effect] = [Expel(worker, why) for worker in sorted(workers)]
        self.workers -= workers
        if self._next is not None:
            self._next -= workers
        return effects + self._change()

    def _judge(self) -> list[Effect]:
        """All members are prepared: commit the step if its numbers can be used."""
        assert self._roster is not None
        step = self.committed + 1
        deviating, disputed = self._doubts.deviating(self._roster, self._prepared)
        if deviating:
            self._doubts.answers.clear()
            self._doubts.generation += 1
            what = "its sum of the gradients is not that of the others"
            blames: list[Effect] = [Blame(worker, step, what, is_grave=True) for worker in sorted(deviating)]
            return blames + self._expel(deviating)
        if disputed:
            if self._doubts.answers:
                return [Disputed(step, disputed)]
            self._doubts.take_answers(self._roster, self._prepared, disputed)
            return self._start_over(step, disputed)
        scale = self._decide(self._prepared)
        if scale is None:
            if self._doubts.generation:
                return [Diverged(step, is_alone=len(self.workers) == 1)]
            return self._start_over(step)
        self._phase, self._scale = "recording step", scale
        return [Record(self.epoch, step, scale, self._doubts.generation)]

    def _start_over(self, step: int, workers: frozenset[Worker] = frozenset()) -> list[Effect]:
        self._doubts.generation += 1
        return [StartOver(step, workers), *self._change()]

    # -- telling -----------------------------------------------------------------------------------------------------

    def _say(self, word: ToMember, phase: Phase) -> list[Effect]:
        self._word, self._phase = word, phase
        self._answered = set()
        self._quiet_ticks = 0
        return self._tell(self.workers) or self._if_all_answered()

    def _tell(self, workers: Iterable[Worker]) -> list[Effect]:
        assert self._word is not None
        return [Tell(worker, self._word) for worker in sorted(workers)]

    def _on_tick(self) -> list[Effect]:
        if self._phase not in _WAITS_FOR_MEMBERS:
            return []
        self._quiet_ticks += 1
        if self._quiet_ticks > self.patience:
            return self._change()
        # Not at the first tick, which may follow at once on what was said; then ever less often: a step takes its time.
        is_due = self._quiet_ticks > 1 and self._quiet_ticks.bit_count() == 1
        return self._tell(self.workers - self._answered) if is_due else []
