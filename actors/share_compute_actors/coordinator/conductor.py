"""The coordinator's loop: it drives the protocol's machine with what members say, and carries out what it wants."""

from __future__ import annotations

import math
import queue
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from share_compute.errors import (
    ContributorLost,
    NoCopy,
    OutOfMemory,
    PlanInfeasible,
    ShareComputeError,
    StaleEpoch,
    Unavailable,
    WrongTensor,
)
from share_compute.jobs.events import Offended
from share_compute.planning.words import bytes_text, listed
from share_compute.protocol.coordinator import (
    Assemble,
    Blame,
    Committed,
    Continue,
    CoordinatorMachine,
    Disputed,
    Diverged,
    Effect,
    Event,
    Expel,
    Lost,
    Pause,
    Plan,
    Planned,
    Record,
    Recorded,
    StartOver,
    Suspect,
    Tell,
    Tick,
)
from share_compute.protocol.doubts import UNBELIEVED
from share_compute.protocol.failures import Failure
from share_compute.protocol.messages import Broken, Form, Prepared, ToCoordinator
from share_compute.protocol.points import HEARD, SENDING, Point
from share_compute.protocol.roster import Roster, Worker
from share_compute.specification import TrainingSpec
from share_compute.training.loss_scale import NotFinite, not_finite
from share_compute_actors.coordinator.changes import Changes
from share_compute_actors.coordinator.coordinator import Cancelled, Wishes
from share_compute_actors.coordinator.crew import Crew, MembersLost
from share_compute_actors.coordinator.cuts import LinksCut, require_links
from share_compute_actors.coordinator.linking import Links
from share_compute_actors.coordinator.record import Standing, StepFacts, StepRecord, superseded
from share_compute_actors.coordinator.rosters import machines_lost
from share_compute_actors.coordinator.verdict import Verdict, disputed, judge
from share_compute_actors.member.schemas import unpack_said
from share_compute_actors.messages import StepFigures
from share_compute_actors.testing import Injector
from share_compute_actors.wire import Undeclared

_GLANCE_S = 0.2
_TICK_S = 0.5
"""A word that nobody answers is said again after two of these, then ever less often."""
_CUT_TICKS = 6
_QUIET_S = 120.0
"""Time without news after which members begin a new epoch, and go on where they are; longer where steps take long, and
each time twice as long: five times are an hour."""
_QUIET_STEPS = 5
_EPOCHS_IN_VAIN = 5

Result = TypeVar("Result")
Heard = tuple[Any, Any, Any]
"""An unchecked message: the name of the member that claims to send it, that member's key, the content."""


@dataclass(frozen=True, slots=True)
class Listener:
    """Hears what a conductor tells."""

    account: Callable[[int, Verdict, Mapping[Worker, StepFigures]], StepFacts]
    """Takes a step that all prepared, what is found of it, and their figures; returns what its commit writes down."""
    committed: Callable[[StepFacts, Mapping[Worker, StepFigures]], None]
    """Takes each committed step, and the figures of its members."""
    reformed: Callable[[Roster, Roster, frozenset[Worker], float], None]
    """Takes the epoch before, the new one, who was lost, and for how many seconds nothing was computed."""
    note: Callable[[str], None]
    """Takes lines for the job's log."""
    offended: Callable[[Offended], None] = lambda _offence: None
    """Takes what is certain of a machine that made wrong numbers."""
    ticked: Callable[[], None] = lambda: None
    """Is called now and then while members compute."""


class Conductor:
    """Drives one job's steps.

    Args:
        crew: its members.
        record: what is durable.
        plan: finds the roster of an epoch for the members that reported, and brings to them what they lack.
        listener: hears what happens.
        inbox: what members say.
        training: how the job trains.
        wishes: what the control plane asks.
        changes: what is to change at the next pause.
    """

    def __init__(
        self,
        crew: Crew,
        record: StepRecord,
        plan: Callable[[Plan], Form],
        listener: Listener,
        inbox: queue.SimpleQueue[Heard],
        training: TrainingSpec,
        wishes: Wishes,
        changes: Changes,
    ) -> None:
        self._crew = crew
        self._record = record
        self._plan = plan
        self._listener = listener
        self._inbox = inbox
        self._training = training
        self._wishes = wishes
        self._changes = changes
        self._links = Links(crew, listener.note)
        self._injector = Injector(crew.failures, None)
        standing = record.read()
        self._machine = CoordinatorMachine(
            standing.epoch, standing.committed, self._decide, math.ceil(_QUIET_S / _TICK_S)
        )
        self._roster: Roster | None = None
        self._formed: Roster | None = None
        """Of the last epoch in which all members were told to compute."""
        self._lost: set[Worker] = set()
        self._stopped_s: float | None = None
        """When members were last known to compute, if they do not now."""
        self._figures: dict[Worker, StepFigures] = {}
        self._verdict: Verdict | None = None
        """What was found of the last step that all prepared."""
        self._not_finite: NotFinite | None = None
        """The findings in the last step whose numbers were not finite."""
        self._facts: StepFacts | None = None
        """Of the last step that was to be committed."""
        self._is_paused = False
        self._cut: LinksCut | None = None
        """Found in the epoch that is over."""
        self._ticked_s = time.monotonic()
        self._committed_s = time.monotonic()
        self._quiet_s = _QUIET_S
        """For how long there may be no news of a step."""
        self._epochs_in_vain = 0
        """Begun since a step was committed or a member lost."""

    def assemble(self) -> None:
        """Begin the first epoch with all of the crew."""
        self._is_paused = False
        self._handle(Assemble(self._crew.workers))
        self._run()

    def steps(self, until: int) -> int:
        """Take the steps up to this one; return the last one, which all members have applied.

        That is an earlier one when something is to change (see `change`), or after `pause_early`.

        Raises:
            Cancelled: the submitter cancelled the job.
            ContributorLost: all who held some part of the model are lost.
            NotFinite: the numbers of a step are no numbers; all members hold it open.
            ShareComputeError: what a member raised on purpose.
        """
        self._is_paused = False
        self._handle(Continue(until))
        self._run()
        return self._machine.committed

    def pause_early(self) -> None:
        """Pause after the step that is being computed, so that `steps` returns; does nothing between epochs."""
        is_stepping = self._roster is not None and self._machine.phase == "stepping"
        if is_stepping and self._machine.until > self._machine.committed:
            self._handle(Continue(self._machine.committed))

    def at_pause(self, work: Callable[[], Result]) -> Result:
        """Do something with all members while no step is computed; again, when some are lost meanwhile."""
        while True:
            try:
                return work()
            except MembersLost as loss:
                self._lose(loss.workers)
            except StaleEpoch:
                self._handle(Assemble(self._crew.workers))
            except WrongTensor as failure:
                for event in self._without_sender(failure):
                    self._handle(event)
            self._is_paused = self._machine.phase == "paused"  # who was lost had no part in the epoch
            self._run()

    def change(self) -> None:
        """Carry out what is to change, unless an epoch that began meanwhile did so; only at a pause.

        Raises:
            ContributorLost: nobody else can hold what one of those that leave holds.
        """
        if not self._changes.are_due(self.roster):
            return
        self._changes.parting = self._changes.leaving
        self._stopped_s = time.monotonic()
        self._is_paused = False
        try:
            self._handle(Assemble(self._crew.workers))
            self._run()
        finally:
            self._changes.parting = frozenset()

    @property
    def roster(self) -> Roster:
        """Members of the epoch."""
        assert self._roster is not None
        return self._roster

    # -- the loop ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_paused:
            try:
                heard = self._inbox.get(timeout=_GLANCE_S)
            except queue.Empty:
                pass
            else:
                self._open(*heard)
            if self._wishes.cancelled.is_set():
                raise Cancelled
            self._lose(self._crew.feel_pulse())
            for worker, sign in self._crew.pulse.take_fresh().items():
                for repeated in sign.unacknowledged:
                    self._unpack(worker, repeated.encode())
            if not self._crew.workers:
                raise machines_lost(self._crew.topology, self._lost)
            self._pause_if_due()
            if time.monotonic() - self._ticked_s > _TICK_S:
                self._ticked_s = time.monotonic()
                self._handle(Tick())
                self._look_for_cuts()
                self._listener.ticked()
            self._injector.mishaps.flush()

    def _look_for_cuts(self) -> None:
        """After 3 s without news, then after twice as long each time, see whether members reach each other.

        A cut leaves TCP connections open: nothing else tells that the tensors of a step will not come.
        """
        quiet, rest = divmod(self._machine.quiet_ticks, _CUT_TICKS)
        if self._roster is None or rest or quiet.bit_count() != 1:
            return
        try:
            require_links(self._crew, self._roster)
        except MembersLost as loss:
            self._lose(loss.workers)
        except LinksCut as cut:
            self._cut = cut  # once members are halted, all have applied the last committed step
            self._handle(Assemble(self._crew.workers))

    def _pause_if_due(self) -> None:
        if self._roster is not None and self._changes.are_due(self._roster):
            self.pause_early()

    def _open(self, worker: Any, key: Any, data: Any) -> None:
        """Take in what came as from a member; one that says what it should not is lost."""
        if self._crew.is_from(worker, key):
            self._unpack(worker, data)

    def _unpack(self, worker: Worker, data: Any) -> None:
        try:
            message, figures = unpack_said(data, worker, self._crew.name(worker), self._crew.microbatches)
        except Undeclared as failure:
            self._crew.pulse.accuse(worker, failure)
        else:
            self._hear(worker, message, figures)

    def _hear(
        self, worker: Worker, message: ToCoordinator | ShareComputeError, figures: StepFigures | None
    ) -> None:
        if isinstance(message, (ContributorLost, StaleEpoch, Broken)):
            self._crew.pulse.worry()
        if isinstance(message, (ContributorLost, StaleEpoch)):
            return  # it waited for somebody whose silence is noticed here
        if isinstance(message, NoCopy):
            if self._roster is not None and self._roster.buddies.get(message.owner) == worker:
                is_current = message.epoch == self._roster.epoch  # else another was begun since
                self._changes.recopying.lost(
                    worker, lacks_room=message.lacks_room, is_begun_anew=not is_current
                )
                if is_current:
                    self._changes.protection.lose_copy(self._machine.committed)
            self._listener.note(f"{self._crew.name(worker)}: {message.message}")
        elif isinstance(message, ShareComputeError):
            if worker in self._crew.workers:
                if isinstance(message, OutOfMemory) and len(self._crew.workers) > 1:
                    self._do_without(worker, message)
                    return
                if not isinstance(message, Unavailable):
                    message.machine = message.machine or self._crew.name(worker)
                raise message
        else:
            self._take(worker, message, figures)

    def _take(self, worker: Worker, message: ToCoordinator, figures: StepFigures | None) -> None:
        if figures is not None:
            known = self._figures.setdefault(worker, figures)
            if (
                figures.targets > known.targets
            ):  # who says something again may have become the last pool in between
                self._figures[worker] = replace(known, targets=figures.targets)
        self._passes(HEARD[type(message)])
        if isinstance(message, Broken) and message.epoch == self._machine.epoch:
            self._changes.is_broken = True
        self._handle(message)

    def _do_without(self, worker: Worker, failure: OutOfMemory) -> None:
        """Go on without a machine that has less memory than it lends; with what it has, it may join again."""
        name = self._crew.name(worker)
        self._listener.note(f"{name} ran out of memory at {bytes_text(failure.room_bytes)}: it is given less")
        self._changes.shrink(worker, failure.room_bytes)
        self._crew.remove([worker])
        self._lose(frozenset([worker]))

    def _lose(self, workers: frozenset[Worker]) -> None:
        for loss in self._say_lost(workers):
            self._handle(loss)
        if self._roster is not None and not workers.isdisjoint(
            set(self._roster.everybody) - set(self._roster.workers)
        ):
            # A member waits until a machine that was to join has its gradient: the protocol knows nothing of that one.
            self._handle(Assemble(self._crew.workers))

    def _say_lost(self, workers: frozenset[Worker]) -> list[Event]:
        for worker in sorted(workers):
            fault = self._crew.pulse.take_fault(worker)
            self._listener.note(f"lost machine {self._crew.name(worker)}" + (f": {fault}" if fault else ""))
            self._figures.pop(worker, None)
            self._lost.add(worker)
            self._changes.lost(worker)
        if workers:
            self._epochs_in_vain = 0
            self._stop()
        return [Lost(worker) for worker in sorted(workers)]

    def _stop(self) -> None:
        if self._stopped_s is None:
            self._stopped_s = time.monotonic()

    def _handle(self, event: Event) -> None:
        waiting = deque(self._machine.handle(event))
        while waiting:
            for answer in self._carry_out(waiting.popleft()):
                waiting.extend(self._machine.handle(answer))
        if self._machine.phase in ("stepping", "paused") and self._formed is not self._roster:
            self._tell_reformed()

    def _tell_reformed(self) -> None:
        """The members of a new epoch compute: say so, unless it is the first."""
        before, self._formed = self._formed, self._roster
        self._changes.end_others(self.roster)  # before it is told, since others may use their machines then
        if before is not None:
            stopped_s = time.monotonic() - (self._stopped_s or time.monotonic())
            self._listener.reformed(before, self.roster, frozenset(self._lost), stopped_s)
        self._lost.clear()
        self._stopped_s = None
        self._changes.why = ""
        self._changes.is_broken = False

    def _carry_out(self, effect: Effect) -> list[Event]:
        match effect:
            case Record(epoch=epoch, step=None):
                self._stop()
                self._count_epochs()
                self._passes(Point.epoch_recording)
                recorded = _recorded(self._record.begin_epoch(epoch))
                self._passes(Point.epoch_recorded)
                return [recorded]
            case Record(epoch=epoch, step=int(step), scale=scale, generation=generation):
                self._passes(Point.step_recording)
                assert self._verdict is not None
                self._facts = self._listener.account(step, self._verdict, self._figures)
                recorded = _recorded(self._record.commit(epoch, step, scale, self._facts, generation))
                self._passes(Point.step_recorded)
                return [recorded]
            case Tell(worker=worker, message=message):
                failures = self._passes(SENDING[type(message)])
                self._injector.mishaps.send(worker, lambda: self._crew.tell(worker, message), failures)
            case Plan():
                self._passes(Point.planning)
                answer = self._form(effect)
                self._passes(Point.planned)
                return answer
            case Committed():
                figures, self._figures = self._figures, {}
                assert self._facts is not None
                self._listener.committed(self._facts, figures)
                self._expect_the_next()
            case Pause():
                self._passes(Point.pausing)
                self._is_paused = True
            case _:
                return self._on_doubt(effect)
        return []

    def _on_doubt(self, effect: Effect) -> list[Event]:
        """Carry out what follows from numbers that cannot be used."""
        match effect:
            case Suspect():
                self._suspect(effect)
            case Blame():
                self._blame(effect)
            case Expel():
                if effect.why:
                    self._listener.note(f"{self._crew.name(effect.worker)} is left out: {effect.why}")
                self._crew.remove([effect.worker])
                return self._say_lost(frozenset({effect.worker}))
            case StartOver():
                self._start_over(effect)
            case Diverged():
                raise self._diverged(effect)
            case Disputed():
                raise disputed(effect.workers, effect.step, self._crew.name)
        return []

    def _suspect(self, suspect: Suspect) -> None:
        name = self._crew.name(suspect.worker)
        self._listener.note(
            f"step {suspect.step} begins anew without {name}, to see whether other machines make the same: "
            f"{suspect.what}"
        )
        self._changes.suspect(suspect.worker)
        self._changes.why = f"{name} is left out, since it made numbers that are not finite"
        self._epochs_in_vain = 0

    def _blame(self, blame: Blame) -> None:
        """Write down that a machine made wrong numbers, and tell of it."""
        worker, step, what, accuser = blame.worker, blame.step, blame.what, blame.accuser
        name = self._crew.name(worker)
        is_over = self._record.offend(worker, step, what, is_grave=blame.is_grave, accuser=accuser)
        self._changes.blame(worker)
        if is_over:
            self._changes.quarantine(worker)
        source = "" if accuser is None else f", as {self._crew.name(accuser)} reports"
        sentence = f"{name} made wrong numbers in step {step}{source}: {what}. "
        sentence += "They were not used; the step goes on without it"
        if is_over:
            sentence += f". {name} is quarantined"
        self._listener.offended(
            Offended(
                machine=worker,
                step=step,
                what=what,
                quarantined=is_over,
                accuser=accuser,
                sentence=sentence,
            )
        )

    def _start_over(self, effect: StartOver) -> None:
        if effect.workers:
            names = listed(sorted(map(self._crew.name, effect.workers)))
            why = f"the gradients on {names} differ, so step {effect.step} is computed again"
        else:
            why = f"numbers of step {effect.step} are not finite, so it is computed again and each cell is checked"
        self._listener.note(why)
        self._changes.why = why
        self._epochs_in_vain = 0

    def _diverged(self, effect: Diverged) -> NotFinite:
        """Return the error for numbers that no machine is to blame for."""
        failure = self._not_finite or not_finite("gradient", effect.step)
        if effect.is_alone:
            failure.witnesses = "; no other machine could compute it again to tell the machine from the model"
        elif effect.by:
            failure.witnesses = f"; {listed(sorted(map(self._crew.name, effect.by)))} found the same"
        failure.message += failure.witnesses
        return failure

    def _without_sender(self, failure: WrongTensor) -> list[Event]:
        """Go on without a machine that sent a wrong tensor while no step was computed."""
        worker, accuser = failure.worker, failure.accuser
        if not {worker, accuser} <= self._crew.workers:
            raise failure
        loser = self._machine.accusations.loser(worker, accuser)
        if loser == worker:
            witness = None if accuser == worker else accuser
            self._blame(Blame(worker, self._machine.committed + 1, failure.what, accuser=witness))
        expel = Expel(loser, "" if loser == worker else f"{UNBELIEVED}: {failure.what}")
        return [*self._on_doubt(expel), Assemble(self._crew.workers)]

    def _passes(self, point: Point) -> list[Failure]:
        return self._injector.passes(point, self._machine.committed + 1)

    def _form(self, effect: Plan) -> list[Event]:  # noqa: PLR0911 - a return for each failure
        cut, self._cut = self._cut, None
        if (
            cut is not None
            and self._roster is not None
            and self._crew.workers.issuperset(self._roster.workers)
        ):
            raise cut
        try:
            form = self._plan(effect)
        except MembersLost as loss:
            return self._without(loss)
        except WrongTensor as failure:
            return self._without_sender(failure)
        except StaleEpoch as failure:
            return self._begin_anew(failure)
        except (ContributorLost, PlanInfeasible) as failure:
            if not effect.without:
                raise
            step = effect.committed + 1
            raise self._diverged(Diverged(step, effect.without, is_alone=True)) from failure
        self._roster = form.roster
        try:
            self._links.make(form.roster)
        except MembersLost as loss:
            return self._without(loss)
        except LinksCut:
            raise
        except WrongTensor as failure:
            return self._without_sender(failure)
        except (ContributorLost, StaleEpoch) as failure:
            return self._begin_anew(failure)
        return [Planned(form)]

    def _without(self, loss: MembersLost) -> list[Event]:
        """Begin another epoch without some; also when the protocol never knew of them."""
        return [*self._say_lost(loss.workers), Assemble(self._crew.workers)]

    def _begin_anew(self, failure: ShareComputeError) -> list[Event]:
        if self._epochs_in_vain >= _EPOCHS_IN_VAIN:
            raise Unavailable(
                f"members could not be linked {_EPOCHS_IN_VAIN} times: {failure.message}",
                mend="look at the network between the job's machines, then resume it",
            ) from failure
        self._listener.note(f"members could not be linked, and are linked anew: {failure.message}")
        return [Assemble(self._crew.workers)]

    def _count_epochs(self) -> None:
        """Count an epoch that begins; when nothing comes of one after the other, something else is wrong.

        Perhaps a step just takes that long: each is given twice the time of the one before it.
        """
        self._epochs_in_vain += 1
        if self._epochs_in_vain > 1:
            self._machine.patience *= 2
        if self._epochs_in_vain > _EPOCHS_IN_VAIN:
            raise Unavailable(
                f"members began step {self._machine.committed + 1} anew {_EPOCHS_IN_VAIN} times, without a loss",
                mend="look into the job's log for what failed, and at the network between its machines",
                step=self._machine.committed + 1,
            )

    def _expect_the_next(self) -> None:
        """A step is committed: from how long it took, see for how long the next may give no news."""
        now = time.monotonic()
        self._quiet_s = max(self._quiet_s, _QUIET_STEPS * (now - self._committed_s))
        self._machine.patience = math.ceil(self._quiet_s / _TICK_S)
        self._committed_s = now
        self._epochs_in_vain = 0
        self._crew.pulse.calm()

    def _decide(self, prepared: Mapping[Worker, Prepared]) -> float | None:
        """Return what the gradient of the open step is multiplied by; None where it is not finite."""
        try:
            self._verdict = judge(prepared, self._training, self._machine.committed + 1)
        except NotFinite as failure:
            self._not_finite = failure
            return None
        return self._verdict.factor


def _recorded(standing: Standing | None) -> Recorded:
    """Return what a record says; of two coordinators of a job only the younger may write.

    Raises:
        StaleEpoch: it refused.
    """
    if standing is None:
        raise superseded()
    return Recorded(standing.epoch, standing.committed, standing.scale, standing.generation)
