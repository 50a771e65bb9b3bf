"""The coordinator's loop: passes messages to the protocol's state machine, and executes its effects."""

from __future__ import annotations

import math
import queue
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
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
from share_compute.lifecycle.attempt_events import AttemptEvent, LinkCut, Note
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
    MembershipPlanned,
    Pause,
    PlanMembership,
    Recorded,
    SendToMember,
    StartOver,
    Suspect,
    Tick,
    WriteStepLog,
)
from share_compute.protocol.doubts import UNBELIEVED
from share_compute.protocol.membership import Membership, Worker
from share_compute.protocol.messages import Broken, Prepared, ToCoordinator
from share_compute.quantities import bytes_text
from share_compute.specification import TrainingSpec
from share_compute.training.loss_scale import NotFinite
from share_compute_actors.group.exceptions import Cancelled, MembersLost
from share_compute_actors.messages import StepFigures
from share_compute_actors.training.coordinator import verdict
from share_compute_actors.training.coordinator.connections import InboxItem
from share_compute_actors.training.coordinator.progress import Listener
from share_compute_actors.training.member.schemas import unpack_said
from share_compute_actors.training.membership.changes import Changes
from share_compute_actors.training.membership.cuts import LinksCut, require_links
from share_compute_actors.training.membership.epochs import machines_lost
from share_compute_actors.training.membership.linking import MemberLinks
from share_compute_actors.training.membership.membership_planner import MembershipPlanner
from share_compute_actors.training.membership.training_group import TrainingGroup
from share_compute_actors.training.step_log import Standing, StepFacts, StepLog, superseded
from share_compute_actors.wire import Undeclared

_POLL_S = 0.2
_TICK_S = 0.5
"""Minimum time between two ticks of the state machine, in seconds."""
_CUT_TICKS = 3
"""Number of consecutive ticks without a new answer from any member before members first test their links."""
_QUIET_S = 120.0
"""Initial limit for the time without a new answer from any member, in seconds. After this time, a new epoch begins."""
_QUIET_STEPS = 5
_EPOCHS_IN_VAIN = 5

Result = TypeVar("Result")


class Conductor:
    """Leads the members of one job through its steps and epochs, as the protocol's state machine decides.

    Args:
        group: members of the job.
        step_log: the step log.
        planner: plans each epoch.
        listener: receives the progress.
        inbox: messages from members.
        training: training section of the job's specification.
        changes: changes to members and plan, which take effect at the next pause.
        report: receives events.
    """

    def __init__(
        self,
        group: TrainingGroup,
        step_log: StepLog,
        planner: MembershipPlanner,
        listener: Listener,
        inbox: queue.SimpleQueue[InboxItem],
        training: TrainingSpec,
        changes: Changes,
        report: Callable[[AttemptEvent], None],
    ) -> None:
        self._group = group
        self._step_log = step_log
        self._planner = planner
        self._listener = listener
        self._inbox = inbox
        self._training = training
        self._changes = changes
        self._report = report
        self._links = MemberLinks(group, self._note)
        standing = step_log.read()
        self._machine = CoordinatorMachine(
            standing.epoch, standing.committed, self._decide, math.ceil(_QUIET_S / _TICK_S)
        )
        self._membership: Membership | None = None
        self._formed: Membership | None = None
        """Membership of the last epoch in which all members were ready to compute."""
        self._lost: set[Worker] = set()
        self._stopped_s: float | None = None
        """Time when the steps were interrupted; None while they are not interrupted."""
        self._figures: dict[Worker, StepFigures] = {}
        self._verdict: verdict.Verdict | None = None
        """The last result of `verdict.judge`."""
        self._not_finite: NotFinite | None = None
        """The last error of `verdict.judge`, perhaps from an earlier step; None if there was none."""
        self._facts: StepFacts | None = None
        """Facts about the step that is being committed, or was committed last."""
        self._is_paused = False
        self._cut: LinksCut | None = None
        """Error for cut links, which `_form` raises unless a member is lost first; None if no links are cut."""
        self._ticked_s = time.monotonic()
        self._committed_s = time.monotonic()
        self._quiet_s = _QUIET_S
        """Limit for the time without a new answer, in seconds, before `_count_epochs` doubles it."""
        self._epochs_in_vain = 0
        """Number of epochs since a step was last committed or restarted, or a member was last lost or suspected."""

    def assemble(self) -> None:
        """Begin the first epoch, with all members, and wait until they pause."""
        self._is_paused = False
        self._handle(Assemble(self._group.workers))
        self._run()

    def steps(self, until: int) -> int:
        """Run the steps up to `until`, and pause; return the number of the last committed step.

        Pause at an earlier step if changes are due (see `change`), or after `pause_early`.

        Raises:
            Cancelled: the submitter cancelled the job.
            ContributorLost: all holders of some part of the model are lost.
            LinksCut: members that must communicate cannot reach each other.
            NotFinite: numbers computed in a step are not finite; the step is not committed.
            ShareComputeError: a member reported this error, or the job cannot continue for another reason.
        """
        self._is_paused = False
        self._handle(Continue(until))
        self._run()
        return self._machine.committed

    def pause_early(self) -> None:
        """Pause after the step that is being computed, so that `steps` returns; do nothing if no step is computed."""
        is_stepping = self._membership is not None and self._machine.phase == "stepping"
        if is_stepping and self._machine.until > self._machine.committed:
            self._handle(Continue(self._machine.committed))

    def at_pause(self, work: Callable[[], Result]) -> Result:
        """Run `work`, and return its result; call this only while training is paused.

        After `MembersLost`, `StaleEpoch` or `WrongTensor`, form a new epoch if it is needed and possible, and
        run `work` again.
        """
        while True:
            try:
                return work()
            except MembersLost as loss:
                self._lose(loss.workers)
            except StaleEpoch:
                self._handle(Assemble(self._group.workers))
            except WrongTensor as failure:
                for event in self._without_sender(failure):
                    self._handle(event)
            self._is_paused = self._machine.phase == "paused"  # still paused if no epoch began
            self._run()

    def change(self) -> None:
        """Form an epoch with the changes that are due, and pause again; do nothing if no change is due.

        Call this only while training is paused.

        Raises:
            PlanInfeasible: the other members cannot hold the shard of a member that leaves.
            ShareComputeError: as `steps` does.
        """
        if not self._changes.are_due(self.membership):
            return
        self._changes.parting = self._changes.leaving
        self._stopped_s = time.monotonic()
        self._is_paused = False
        try:
            self._handle(Assemble(self._group.workers))
            self._run()
        finally:
            self._changes.parting = frozenset()

    @property
    def membership(self) -> Membership:
        """Membership of the current epoch."""
        assert self._membership is not None
        return self._membership

    # -- the loop ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_paused:
            self._work()

    def _work(self) -> None:
        """Wait up to `_POLL_S` seconds for a message and process it; then check the requests, the members and ticks."""
        try:
            item = self._inbox.get(timeout=_POLL_S)
        except queue.Empty:
            pass
        else:
            self._open(*item)
        if self._changes.requests.cancelled.is_set():
            raise Cancelled
        self._lose(self._group.check_members())
        for repeated in self._group.repeated_messages():
            self._open(*repeated)
        if not self._group.workers:
            raise machines_lost(self._group.topology, self._lost)
        self._pause_if_due()
        if time.monotonic() - self._ticked_s > _TICK_S:
            self._ticked_s = time.monotonic()
            self._handle(Tick())
            self._detect_cuts()
            self._listener.ticked()

    def _detect_cuts(self) -> None:
        """Check the links between members after 3, 6, 12, ... ticks without a new answer from any member.

        A cut link may leave its TCP connection open, so that no error shows the cut.
        """
        quiet, rest = divmod(self._machine.quiet_ticks, _CUT_TICKS)
        if self._membership is None or rest or quiet.bit_count() != 1:
            return
        try:
            require_links(self._group, self._membership)
        except MembersLost as loss:
            self._lose(loss.workers)
        except LinksCut as cut:
            try:
                self._leave_out_an_end(cut, self._membership)
            except MembersLost as loss:
                self._lose(loss.workers)

    def _leave_out_an_end(self, cut: LinksCut, membership: Membership) -> None:
        """Continue without a member that is at one end of every cut link; if impossible, let `_form` raise ``cut``."""
        can_lose_one = (
            self._machine.phase == "stepping"
            and self._changes.protection.is_protected
            and self._group.workers.issuperset(membership.everybody)
            and self._group.have_whole_copies(
                membership.backups.values()
            )  # a copy may be lost after it was reported as complete
        )
        end = self._planner.dispensable(cut.pairs) if can_lose_one else None
        if end is None:
            self._cut = cut  # `_form` raises this error, unless a member is lost first
            self._handle(Assemble(self._group.workers))
            return
        self._report_cut(cut)
        self._changes.why = f"{cut.message}; {self._group.name(end)} is left out"
        self._group.remove([end])
        self._lose(frozenset({end}))

    def _report_cut(self, cut: LinksCut) -> None:
        for pair in cut.pairs:
            self._report(LinkCut(machines=pair, sentence=cut.message))

    def _pause_if_due(self) -> None:
        if self._membership is not None and self._changes.are_due(self._membership):
            self.pause_early()

    def _open(self, worker: Any, key: Any, data: Any) -> None:
        """Read a message if its key is the sender's key; otherwise drop it."""
        if self._group.is_from(worker, key):
            self._unpack(worker, data)

    def _unpack(self, worker: Worker, data: Any) -> None:
        """Read a message from a member; count the sender as lost if the message is malformed."""
        try:
            message, figures = unpack_said(data, worker, self._group.name(worker), self._group.microbatches)
        except Undeclared as failure:
            self._group.detector.accuse(worker, failure)
        else:
            self._receive(worker, message, figures)

    def _receive(
        self, worker: Worker, message: ToCoordinator | ShareComputeError, figures: StepFigures | None
    ) -> None:
        if isinstance(message, (ContributorLost, StaleEpoch, Broken)):
            self._group.detector.shorten_limit()
        if isinstance(message, (ContributorLost, StaleEpoch)):
            if message.details.get("ends_member"):
                self._note(f"{self._group.name(worker)}: {message.message}")
            # Otherwise the sender waited for another member, and the failure detector checks whether that member is
            # lost.
            return
        if isinstance(message, NoCopy):
            if self._membership is not None and self._membership.backups.get(message.owner) == worker:
                # If the copy was lost in an older epoch, the member has begun a new copy since then.
                is_current = message.epoch == self._membership.epoch
                self._changes.recopying.lost(
                    worker, lacks_space=message.lacks_space, is_restarted=not is_current
                )
                if is_current:
                    self._changes.protection.lose_copy(self._machine.committed)
            self._note(f"{self._group.name(worker)}: {message.message}")
        elif isinstance(message, ShareComputeError):
            if worker in self._group.workers:
                if isinstance(message, OutOfMemory) and len(self._group.workers) > 1:
                    self._do_without(worker, message)
                    return
                if not isinstance(message, Unavailable):
                    message.machine = message.machine or self._group.name(worker)
                raise message
        else:
            self._take(worker, message, figures)

    def _take(self, worker: Worker, message: ToCoordinator, figures: StepFigures | None) -> None:
        if figures is not None:
            known = self._figures.setdefault(worker, figures)
            # reset, because a member that moved to the last stage may report this again
            if figures.targets > known.targets:
                self._figures[worker] = replace(known, targets=figures.targets)
        if isinstance(message, Broken) and message.epoch == self._machine.epoch:
            self._changes.is_broken = True
        self._handle(message)

    def _do_without(self, worker: Worker, failure: OutOfMemory) -> None:
        """Continue without a machine that has less memory than it lends; it may join again with a lower limit."""
        name = self._group.name(worker)
        self._note(f"{name} ran out of memory at {bytes_text(failure.taken_bytes)}: it is given less")
        self._changes.shrink(worker, failure.taken_bytes)
        self._group.remove([worker])
        self._lose(frozenset([worker]))

    def _lose(self, workers: frozenset[Worker]) -> None:
        for loss in self._report_lost(workers):
            self._handle(loss)
        if self._membership is not None and not workers.isdisjoint(
            set(self._membership.everybody) - set(self._membership.workers)
        ):
            # A catch-up replica outside all stages is lost, so a new epoch must begin without it.
            self._handle(Assemble(self._group.workers))

    def _report_lost(self, workers: frozenset[Worker]) -> list[Event]:
        for worker in sorted(workers):
            fault = self._group.detector.take_fault(worker)
            self._note(f"lost machine {self._group.name(worker)}" + (f": {fault}" if fault else ""))
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
        if self._machine.phase in ("stepping", "paused") and self._formed is not self._membership:
            self._report_reformed()

    def _report_reformed(self) -> None:
        """Remove members that the new epoch does not use. Report the epoch unless it is the first."""
        before, self._formed = self._formed, self._membership
        # Remove these members before the report, because other jobs may use their machines after it.
        self._changes.end_others(self.membership)
        if before is not None:
            stopped_s = time.monotonic() - (self._stopped_s or time.monotonic())
            self._listener.reformed(before, self.membership, frozenset(self._lost), stopped_s)
        self._lost.clear()
        self._stopped_s = None
        self._changes.why = ""
        self._changes.is_broken = False

    def _carry_out(self, effect: Effect) -> list[Event]:
        match effect:
            case WriteStepLog(epoch=epoch, step=None):
                self._stop()
                self._count_epochs()
                return [_recorded(self._step_log.begin_epoch(epoch))]
            case WriteStepLog(epoch=epoch, step=int(step), scale=scale, generation=generation):
                assert self._verdict is not None
                self._facts = self._listener.account(step, self._verdict, self._figures)
                return [_recorded(self._step_log.commit(epoch, step, scale, self._facts, generation))]
            case SendToMember(worker=worker, message=message):
                self._group.send(worker, message)
            case PlanMembership():
                return self._form(effect)
            case Committed():
                figures, self._figures = self._figures, {}
                assert self._facts is not None
                self._listener.committed(self._facts, figures)
                self._expect_the_next()
            case Pause():
                self._is_paused = True
            case _:
                return self._on_doubt(effect)
        return []

    def _on_doubt(self, effect: Effect) -> list[Event]:
        """Handle an effect that concerns wrong, disputed or non-finite numbers."""
        match effect:
            case Suspect():
                self._suspect(effect)
            case Blame():
                self._blame(effect)
            case Expel():
                if effect.why:
                    self._note(f"{self._group.name(effect.worker)} is left out: {effect.why}")
                self._group.remove([effect.worker])
                return self._report_lost(frozenset({effect.worker}))
            case StartOver():
                self._start_over(effect)
            case Diverged():
                raise verdict.diverged(effect, self._not_finite, self._group.name)
            case Disputed():
                raise verdict.disputed(effect.workers, effect.step, self._group.name)
        return []

    def _suspect(self, suspect: Suspect) -> None:
        name = self._group.name(suspect.worker)
        self._note(
            f"step {suspect.step} restarts without {name}, to see whether other machines make the same: "
            f"{suspect.what}"
        )
        self._changes.suspect(suspect.worker)
        self._changes.why = f"{name} is left out, since it made numbers that are not finite"
        self._epochs_in_vain = 0

    def _blame(self, blame: Blame) -> None:
        """Write a machine's offence to the step log, and report it; remove the machine's member if it is a suspect."""
        worker, step, what, accuser = blame.worker, blame.step, blame.what, blame.accuser
        is_over = self._step_log.offend(worker, step, what, is_grave=blame.is_grave, accuser=accuser)
        self._changes.blame(worker)
        if is_over:
            self._changes.quarantine(worker)
        self._report(verdict.offence(blame, self._group.name, is_over=is_over))

    def _start_over(self, effect: StartOver) -> None:
        why = verdict.again(effect, self._group.name)
        self._note(why)
        self._changes.why = why
        self._epochs_in_vain = 0

    def _without_sender(self, failure: WrongTensor) -> list[Event]:
        """Remove the sender of a wrong tensor, or its accuser; raise ``failure`` if either member is already gone."""
        worker, accuser = failure.worker, failure.accuser
        if not {worker, accuser} <= self._group.workers:
            raise failure
        loser = self._machine.accusations.loser(worker, accuser)
        if loser == worker:
            witness = None if accuser == worker else accuser
            self._blame(Blame(worker, self._machine.committed + 1, failure.what, accuser=witness))
        expel = Expel(loser, "" if loser == worker else f"{UNBELIEVED}: {failure.what}")
        return [*self._on_doubt(expel), Assemble(self._group.workers)]

    def _note(self, message: str) -> None:
        self._report(Note(message=message))

    def _form(self, effect: PlanMembership) -> list[Event]:  # noqa: PLR0911 - a return for each failure
        cut, self._cut = self._cut, None
        if (
            cut is not None
            and self._membership is not None
            and self._group.workers.issuperset(self._membership.workers)
        ):
            self._report_cut(cut)
            raise cut
        try:
            form = self._planner.form(effect)
        except MembersLost as loss:
            return self._without(loss)
        except WrongTensor as failure:
            return self._without_sender(failure)
        except StaleEpoch as failure:
            return self._restart(failure)
        except (ContributorLost, PlanInfeasible) as failure:
            if not effect.without:
                raise
            alone = Diverged(effect.committed + 1, effect.without, is_alone=True)
            raise verdict.diverged(alone, self._not_finite, self._group.name) from failure
        self._membership = form.membership
        try:
            self._links.make(form.membership, self._planner.solution.plan)
        except MembersLost as loss:
            return self._without(loss)
        except LinksCut as found:
            self._report_cut(found)
            raise
        except WrongTensor as failure:
            return self._without_sender(failure)
        except (ContributorLost, StaleEpoch) as failure:
            return self._restart(failure)
        return [MembershipPlanned(form)]

    def _without(self, loss: MembersLost) -> list[Event]:
        """Begin another epoch without the lost members."""
        return [*self._report_lost(loss.workers), Assemble(self._group.workers)]

    def _restart(self, failure: ShareComputeError) -> list[Event]:
        if self._epochs_in_vain >= _EPOCHS_IN_VAIN:
            raise Unavailable(
                f"members could not be linked {_EPOCHS_IN_VAIN} times: {failure.message}",
                hint="look at the network between the job's machines, then resume it",
            ) from failure
        self._note(f"members could not connect, and connect again: {failure.message}")
        return [Assemble(self._group.workers)]

    def _count_epochs(self) -> None:
        """Count the epochs that began since the last progress (see `_epochs_in_vain`).

        Each such epoch after the first doubles the limit for the time without a new answer.

        Raises:
            Unavailable: too many epochs began without progress.
        """
        self._epochs_in_vain += 1
        if self._epochs_in_vain > 1:
            self._machine.patience *= 2
        if self._epochs_in_vain > _EPOCHS_IN_VAIN:
            raise Unavailable(
                f"members restarted step {self._machine.committed + 1} {_EPOCHS_IN_VAIN} times, although none was lost",
                hint="look into the job's log for what failed, and at the network between its machines",
                step=self._machine.committed + 1,
            )

    def _expect_the_next(self) -> None:
        """Reset the limit for the time without a new answer after a commit; a long step raises the limit."""
        now = time.monotonic()
        self._quiet_s = max(self._quiet_s, _QUIET_STEPS * (now - self._committed_s))
        self._machine.patience = math.ceil(self._quiet_s / _TICK_S)
        self._committed_s = now
        self._epochs_in_vain = 0
        self._group.detector.reset_limit()

    def _decide(self, prepared: Mapping[Worker, Prepared]) -> float | None:
        """Judge the open step; return the factor for its gradient, or None if its numbers are not finite."""
        try:
            self._verdict = verdict.judge(prepared, self._training, self._machine.committed + 1)
        except NotFinite as failure:
            self._not_finite = failure
            return None
        return self._verdict.factor


def _recorded(standing: Standing | None) -> Recorded:
    """Return the event that reports a write to the step log.

    Raises:
        StaleEpoch: the step log refused the write.
    """
    if standing is None:
        raise superseded()
    return Recorded(*standing)
