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

from share_compute.protocol.messages import (
    Applied,
    Broken,
    Commit,
    Form,
    Formed,
    Halt,
    Prepared,
    Proceed,
    Report,
    ToCoordinator,
    ToMember,
)
from share_compute.protocol.roster import Worker

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
class Pause:
    """All members have applied the last step that was asked for. Said again after an epoch that begins meanwhile."""

    step: int


Effect = Record | Plan | Tell | Committed | Pause
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
_WAITS_FOR_MEMBERS: frozenset[Phase] = frozenset({"halting", "forming", "stepping", "pausing"})


class CoordinatorMachine:
    """One job's coordinator.

    Args:
        epoch: last epoch that the record knows.
        committed: last committed step.
        decide: given what all members prepared, returns what the gradient is multiplied by.
        patience: ticks without news after which an epoch is taken to be stuck, and the next begins. A coordinator whose
            members follow another one finds out by this.
    """

    def __init__(
        self,
        epoch: int,
        committed: int,
        decide: Callable[[Mapping[Worker, Prepared]], float] = lambda _: 1.0,
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

    @property
    def phase(self) -> Phase:
        """What it is doing."""
        return self._phase

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
            self.committed, self._scale = recorded.committed, recorded.scale
            return self._say(Halt(self.epoch, self.committed, self._scale), "halting")
        if self._phase != "recording step" or recorded.committed != self.committed + 1:
            return []
        self.committed = recorded.committed
        effects: list[Effect] = [Committed(self.committed, dict(self._prepared))]
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
        return self._say(replace(planned.form, pauses=self.until <= self.committed), "forming")

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
                reports = {worker: self._reports[worker] for worker in sorted(self.workers)}
                return [Plan(self.epoch, self.committed, self._scale, reports)]
            case "forming":
                assert isinstance(self._word, Form)
                if self._word.pauses:
                    return self._rest()
                self._phase = "stepping"
                self._answered = set(self._prepared)
                return self._if_all_answered()
            case "stepping":
                self._phase = "recording step"
                self._scale = self._decide(self._prepared)
                return [Record(self.epoch, self.committed + 1, self._scale)]
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
