"""A member's side of the step protocol: a state machine that turns events into effects.

`MemberMachine.handle` takes one event (a message, or the result of an effect) and returns effects. A driver carries
out the effects. It answers each `Compute`, `Reduce`, `Apply` and `Gather` by an event. Only one of these effects runs
at a time. If a reduction cannot complete, for example because a member was lost, the driver must answer `ReduceFailed`,
`GatherFailed` for an exchange of weights, and `ComputeFailed` for cells of slices of sequences, which the members of a
stage compute together.

With `Membership.shares_optimizer`, a member updates only the weights of its share. So it receives the other weights of
its stage after each update. It also receives them at the beginning of each epoch, because a loss may have ended the
last exchange.

A cell is the forward or the backward of one microbatch in one stage. The open step is the first step that is not
committed. A backup and a catch-up replica are members that hold a copy of this member's state.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from share_compute.protocol.cells import delivery, needed, remaining
from share_compute.protocol.member_events import (
    Apply,
    Arrived,
    Compute,
    Computed,
    ComputeFailed,
    Discard,
    Effect,
    Event,
    Gather,
    Gathered,
    GatherFailed,
    Loaded,
    Log,
    Logged,
    Misfit,
    Missed,
    Reduce,
    Reduced,
    ReduceFailed,
    RetransmissionTimeout,
    Send,
    SendToCoordinator,
    Updated,
)
from share_compute.protocol.membership import Membership, Task, Worker
from share_compute.protocol.messages import (
    Applied,
    Broken,
    Cargo,
    Commit,
    Form,
    Formed,
    Halt,
    Prepared,
    Proceed,
    Rejected,
    Report,
    TensorLabel,
)
from share_compute.protocol.schedule import Action

Phase = Literal[
    "computing", "reducing", "broken", "tying", "logging", "prepared", "applying", "gathering", "paused"
]


@dataclass
class _Step:
    """Progress of a member in one step."""

    number: int
    generation: int = 0
    summed: set[int] = field(default_factory=set)
    forwarded: set[int] = field(default_factory=set)
    activations: set[int] = field(default_factory=set)
    gradients: set[int] = field(default_factory=set)
    arrived: set[TensorLabel] = field(default_factory=set)
    is_reduced: bool = False
    is_complete: bool = False
    """Whether the member holds all gradients for the update."""


class MemberMachine:
    """State machine of one member of a job, over all epochs.

    Args:
        worker: name of the member.
        applied: last step whose update the weights contain; -1 for a member without weights.
    """

    def __init__(self, worker: Worker, applied: int) -> None:
        self.worker = worker
        self.epoch = 0
        self.applied = applied
        self.membership: Membership | None = None
        """Membership of the current epoch; None while the member is halted."""
        self._step = _Step(applied + 1)
        self._rejected: dict[TensorLabel, Rejected] = {}
        """Rejections of tensors in this epoch, which are repeated until another epoch begins."""
        self._early: list[TensorLabel] = []
        """Tensors that arrived before this member began the epoch or the step that they belong to."""
        self._waiting: list[Action] = []
        self._logged: set[int] = set()
        """Indices in `Membership.copy_holders` of the members that acknowledged the gradient of the open step."""
        self._phase: Phase = "computing"
        self._running: Compute | Reduce | Apply | Gather | None = None
        self._halt: Halt | None = None
        self._pauses = False
        self._is_forming = False
        """Whether `Formed` is due after the exchange of weights."""

    @property
    def generation(self) -> int:
        """Generation of the open step; see `Form.generation`."""
        return self._step.generation

    @property
    def is_complete(self) -> bool:
        """Whether the member holds everything that the update of the open step needs."""
        return self._step.is_complete

    # -- events ------------------------------------------------------------------------------------------------------

    def handle(self, event: Event) -> list[Effect]:  # noqa: PLR0911 - a return for each event
        """Process one event and return the effects to carry out."""
        match event:
            case Halt():
                return self._on_halt(event)
            case Loaded():
                return self._on_loaded(event)
            case Form():
                return self._on_form(event)
            case Computed():
                return self._on_computed(event)
            case ComputeFailed():
                return self._on_compute_failed()
            case Reduced() | ReduceFailed():
                return self._on_reduction_ended(event)
            case Updated():
                return self._on_updated(event)
            case Gathered() | GatherFailed():
                return self._on_gather_ended(event)
            case _:
                return self._on_message(event)

    def _on_message(  # noqa: PLR0911 - a return for each event
        self, event: Commit | Proceed | Arrived | Misfit | Missed | Logged | RetransmissionTimeout
    ) -> list[Effect]:
        """Process an event that needs a membership. A halted member only stores tensors and rejections of its epoch."""
        if isinstance(event, Arrived) and event.epoch == self.epoch and self.membership is None:
            self._early.append(event.label)
        if isinstance(event, Misfit) and event.epoch == self.epoch and self.membership is None:
            self._reject(event.source, event.label, event.what, is_certain=event.is_certain)
        if self.membership is None or (
            not isinstance(event, RetransmissionTimeout) and event.epoch != self.epoch
        ):
            return []
        match event:
            case Commit():
                return self._on_commit(event)
            case Proceed():
                return self._on_proceed(event)
            case Arrived():
                return self._on_arrived(event.label)
            case Misfit():
                return self._reject(event.source, event.label, event.what, is_certain=event.is_certain)
            case Missed():
                return [SendToCoordinator(Broken(self.epoch, self.worker))]
            case Logged():
                return self._on_logged(event)
            case RetransmissionTimeout():
                again: list[Effect] = [SendToCoordinator(rejected) for rejected in self._rejected.values()]
                return again + (self._log() if self._phase == "logging" else [])

    def _on_halt(self, halt: Halt) -> list[Effect]:
        if halt.epoch < self.epoch or (halt.epoch == self.epoch and self._halt is None):
            return []  # the epoch is over, or has already begun
        if halt.epoch > self.epoch:
            self._early.clear()
            self._rejected.clear()
        self.epoch = halt.epoch
        self.membership = None
        self._halt = halt
        return self._settle()

    def _settle(self) -> list[Effect]:
        """Apply the open step if it is committed and complete; otherwise report to the coordinator.

        Do nothing while an effect is running. The end of the effect calls this method again.
        """
        halt = self._halt
        assert halt is not None
        if self._running is not None:
            return []
        is_committed = (halt.committed, halt.generation) == (self._step.number, self._step.generation)
        if is_committed and self._step.is_complete:
            return self._start(Apply(self._step.number, halt.scale, halt.rate))
        return [SendToCoordinator(self._report())]

    def _report(self) -> Report:
        step = self._step
        return Report(
            epoch=self.epoch,
            worker=self.worker,
            applied=self.applied,
            step=step.number,
            summed=frozenset(step.summed),
            forwarded=frozenset(step.forwarded),
            activations=frozenset(step.activations),
            gradients=frozenset(step.gradients),
            is_reduced=step.is_reduced,
            generation=step.generation,
        )

    def _on_loaded(self, loaded: Loaded) -> list[Effect]:
        if loaded.epoch != self.epoch or self._halt is None or self._running is not None:
            return []
        self.applied = loaded.applied
        self._step = _Step(loaded.applied + 1)
        return [Discard()]

    def _on_form(self, form: Form) -> list[Effect]:
        if form.epoch != self.epoch:
            return []
        if self.membership is not None:
            return self._repeat_formed()
        if self._running is not None or form.membership.step != self.applied + 1:
            return []  # an effect is running, or weights are missing; the coordinator will send `Form` again
        self._halt = None
        self.membership = form.membership
        self._is_forming = form.membership.has_shares(self._stage)
        effects: list[Effect] = [] if self._is_forming else [self._formed()]
        is_stale = self._step.generation != form.generation
        if is_stale or not form.keeps_step or self.worker in form.membership.forgets:
            effects.append(Discard())
            self._step = _Step(form.membership.step, form.generation)
        # The gradient sum of a tied parameter is kept from earlier epochs. Other tensors are sent again if needed.
        self._step.arrived = {label for label in self._step.arrived if label.cargo == "tied"}
        self._take_early()
        for resend in form.membership.resends:
            if resend.holder == self.worker:
                label = TensorLabel(form.membership.step, resend.cargo, resend.microbatch, resend.stage)
                effects.append(Send(label, resend.target))
        effects += [SendToCoordinator(rejected) for rejected in self._rejected.values()]
        self._pauses = form.pauses
        return effects + (self._gather() if self._is_forming else self._begin())

    def _formed(self) -> SendToCoordinator:
        return SendToCoordinator(Formed(self.epoch, self.worker))

    def _repeat_formed(self) -> list[Effect]:
        """Answer a repeated `Form`: `Prepared` if the step is prepared, otherwise `Formed` if it is due."""
        if self._phase == "prepared":
            return self._prepare()
        return [] if self._is_forming else [self._formed()]

    def _on_commit(self, commit: Commit) -> list[Effect]:
        if commit.step == self._step.number and self._phase == "prepared":
            self._phase = "applying"
            self._pauses = commit.pauses
            return self._start(Apply(commit.step, commit.scale, commit.rate))
        return self._answer() if commit.step == self.applied else []

    def _on_proceed(self, proceed: Proceed) -> list[Effect]:
        if proceed.step != self._step.number:
            return []
        if self._phase != "paused":
            return self._answer()
        self._pauses = False
        return self._begin()

    def _answer(self) -> list[Effect]:
        """Send the message that the coordinator waits for in this phase (`Prepared` or `Applied`), if there is one."""
        if self._phase == "prepared":
            return self._prepare()
        return (
            [SendToCoordinator(Applied(self.epoch, self.worker, self.applied))]
            if self._phase == "paused"
            else []
        )

    def _on_arrived(self, label: TensorLabel) -> list[Effect]:
        if label.step > self._step.number:
            self._early.append(label)
            return []
        if label.step < self._step.number or label in self._step.arrived:
            return []
        self._step.arrived.add(label)
        return self._tie() if self._phase == "tying" else self._next()

    def _reject(self, source: Worker, label: TensorLabel, what: str, *, is_certain: bool) -> list[Effect]:
        """Report an unusable tensor to the coordinator, and keep the report to repeat it."""
        rejected = Rejected(self.epoch, self.worker, source, label, what, is_certain)
        self._rejected[label] = rejected
        return [SendToCoordinator(rejected)]

    def _on_logged(self, logged: Logged) -> list[Effect]:
        if self._phase != "logging" or logged.step != self._step.number:
            return []
        self._logged.add(logged.place)
        return [] if self._unlogged() else self._prepare()

    def _on_computed(self, computed: Computed) -> list[Effect]:
        running = self._running
        assert isinstance(running, Compute)
        assert running.action == computed.action
        self._running = None
        step = self._step
        if not computed.is_finite:
            return self._on_unusable(computed.action)
        actions = [Action(computed.action.kind, microbatch) for microbatch in running.microbatches]
        for microbatch in running.microbatches:
            if computed.action.kind == "F":
                step.activations.add(microbatch)
                if running.has_backward:
                    step.forwarded.add(microbatch)
            else:
                step.forwarded.discard(microbatch)
                step.gradients.add(microbatch)
                if running.adds:
                    step.summed.add(microbatch)
        if self.membership is None:
            return self._settle()
        sent: list[Effect] = []
        for action in actions:
            self._waiting.remove(action)
            sent += self._deliver(action)
        return sent + self._next()

    def _on_compute_failed(self) -> list[Effect]:
        """Discard all results of the open step, which the next epoch computes again."""
        assert isinstance(self._running, Compute)
        self._running = None
        self._step = _Step(self._step.number, self._step.generation)
        if self.membership is None:
            return [Discard(), *self._settle()]
        self._phase = "broken"
        return [Discard(), SendToCoordinator(Broken(self.epoch, self.worker))]

    def _on_unusable(self, action: Action) -> list[Effect]:
        """Discard all results of the open step. Reject the result that is not finite, unless the member is halted."""
        self._step = _Step(self._step.number, self._step.generation, arrived=self._step.arrived)
        if self.membership is None:
            return [Discard(), *self._settle()]
        self._phase = "broken"
        cargo: Cargo = "activation" if action.kind == "F" else "gradient"
        label = TensorLabel(self._step.number, cargo, action.microbatch, self._stage)
        what = "its numbers are not finite"
        return [Discard(), *self._reject(self.worker, label, what, is_certain=False)]

    def _on_reduction_ended(self, ended: Reduced | ReduceFailed) -> list[Effect]:
        assert isinstance(self._running, Reduce)
        self._running = None
        if isinstance(ended, Reduced):
            self._step.is_reduced = True
        elif ended.is_spoilt:
            self._step.summed.clear()
        if self.membership is None:
            return self._settle()
        if isinstance(ended, Reduced):
            return self._tie(sends=True)
        self._phase = "broken"
        return [SendToCoordinator(Broken(self.epoch, self.worker))]

    def _on_updated(self, updated: Updated) -> list[Effect]:
        assert isinstance(self._running, Apply)
        self._running = None
        self.applied = updated.step
        self._step = _Step(updated.step + 1)
        if self.membership is None:
            return self._settle()
        self._take_early()
        if self.membership.has_shares(self._stage):
            return self._gather()
        return self._begin() + self._answer()

    def _gather(self) -> list[Effect]:
        self._phase = "gathering"
        return self._start(Gather())

    def _on_gather_ended(self, ended: Gathered | GatherFailed) -> list[Effect]:
        assert isinstance(self._running, Gather)
        self._running = None
        if self.membership is None:
            return self._settle()
        if isinstance(ended, GatherFailed):
            self._phase = "broken"
            return [SendToCoordinator(Broken(self.epoch, self.worker))]
        formed: list[Effect] = [self._formed()] if self._is_forming else []
        self._is_forming = False
        return formed + self._begin() + self._answer()

    def _take_early(self) -> None:
        self._step.arrived |= {label for label in self._early if label.step == self._step.number}
        self._early.clear()

    # -- effects -----------------------------------------------------------------------------------------------------

    def _begin(self) -> list[Effect]:
        """Begin or resume the open step of the epoch, unless the step waits for `Proceed`."""
        assert self.membership is not None
        if self._pauses:
            self._phase = "paused"
            return []
        self._waiting = remaining(self.membership, self._step.number, self.worker)
        self._phase = "computing"
        return self._next()

    def _next(self) -> list[Effect]:
        """Start the next cell if its input has arrived; start the reduction after the last cell."""
        if self._running is not None or self._phase != "computing" or self.membership is None:
            return []
        if not self._waiting:
            return self._finish()
        action = self._waiting[0]
        slices = (
            self.membership.together(self.worker, action.microbatch) if self.membership.slices > 1 else ()
        )
        for microbatch in slices or (action.microbatch,):
            need = needed(self.membership, self._step.number, self._stage, Action(action.kind, microbatch))
            if need is not None and need not in self._step.arrived:
                return []
        task = self._task(action)
        is_last = action.kind == "B" and task.adds and len(self._waiting) == max(1, len(slices))
        is_checked = self._step.generation > 0
        return self._start(
            Compute(self._step.number, action, task.adds, task.backward, is_last, is_checked, slices)
        )

    @property
    def _stage(self) -> int:
        assert self.membership is not None
        return self.membership.stage_of(self.worker)

    def _task(self, action: Action) -> Task:
        assert self.membership is not None
        return self.membership.tasks_of(self._step.number)[self._stage][action.microbatch]

    def _deliver(self, action: Action) -> list[Effect]:
        """Send the output of a cell to the member that needs it."""
        assert self.membership is not None
        sent = delivery(self.membership, self._step.number, self._stage, action)
        return [Send(*sent)] if sent else []

    def _finish(self) -> list[Effect]:
        """Reduce the gradients over the stage, unless all its members already have the sum."""
        membership, number = self.membership, self._step.number
        assert membership is not None
        holders = membership.reduced.get(self._stage, ()) if number == membership.step else ()
        if len(holders) == len(membership.stages[self._stage]):
            return self._tie(sends=True)
        self._phase = "reducing"
        return self._start(Reduce(number, holders[0] if holders else None))

    def _tie(self, *, sends: bool = False) -> list[Effect]:
        """Exchange the gradient sum of a parameter that the first and the last stage share, if there is one."""
        membership, number = self.membership, self._step.number
        assert membership is not None
        stage, last = self._stage, len(membership.stages) - 1
        if not membership.is_tied or last == 0 or stage not in (0, last):
            return self._complete()
        self._phase = "tying"
        other = last - stage
        effects: list[Effect] = []
        if sends and self.worker == membership.stages[stage][0]:
            effects += [
                Send(TensorLabel(number, "tied", 0, stage), target) for target in membership.stages[other]
            ]
        return effects + (
            self._complete() if TensorLabel(number, "tied", 0, other) in self._step.arrived else []
        )

    def _complete(self) -> list[Effect]:
        self._step.is_complete = True
        self._logged.clear()
        return self._log()

    def _log(self) -> list[Effect]:
        """Send the gradient to backups and catch-up replicas that lack it; if none lacks it, report `Prepared`."""
        unlogged = self._unlogged()
        if not unlogged:
            return self._prepare()
        self._phase = "logging"
        return [*unlogged]

    def _unlogged(self) -> list[Log]:
        assert self.membership is not None
        return [
            Log(self._step.number, holder, place)
            for place, holder in enumerate(self.membership.copy_holders(self.worker))
            if place not in self._logged
        ]

    def _prepare(self) -> list[Effect]:
        self._phase = "prepared"
        return [SendToCoordinator(Prepared(self.epoch, self.worker, self._step.number))]

    def _start(self, effect: Compute | Reduce | Apply | Gather) -> list[Effect]:
        self._running = effect
        return [effect]
