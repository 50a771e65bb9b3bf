"""The coordinator's loop: it drives the protocol's machine with what members say, and carries out what it wants."""

from __future__ import annotations

import math
import queue
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from share_compute.errors import ContributorLost, ShareComputeError, StaleEpoch, Unavailable
from share_compute.protocol.coordinator import (
    Assemble,
    Committed,
    Continue,
    CoordinatorMachine,
    Effect,
    Event,
    Lost,
    Pause,
    Plan,
    Planned,
    Record,
    Recorded,
    Tell,
    Tick,
)
from share_compute.protocol.messages import Form, Prepared, ToCoordinator
from share_compute.protocol.roster import Roster, Worker
from share_compute.specification import TrainingSpec
from share_compute.training.loss_scale import not_finite, update_factor
from share_compute_actors.coordinator import Cancelled, Wishes
from share_compute_actors.crew import Crew, MembersLost
from share_compute_actors.messages import StepFigures
from share_compute_actors.record import Standing, StepRecord
from share_compute_actors.rosters import machines_lost

_GLANCE_S = 0.2
_TICK_S = 2.0
_QUIET_S = 120.0
"""Time without news after which members begin a new epoch, and go on where they are; longer where steps take long."""
_QUIET_STEPS = 5
_EPOCHS_IN_VAIN = 5

Result = TypeVar("Result")
Heard = tuple[Worker, ToCoordinator | ShareComputeError, StepFigures | None]


@dataclass(frozen=True, slots=True)
class Listener:
    """Hears what a conductor tells."""

    committed: Callable[[int, Mapping[Worker, Prepared], Mapping[Worker, StepFigures]], None]
    """Takes each committed step, what members prepared, and their figures."""
    reformed: Callable[[Roster, Roster, frozenset[Worker], float], None]
    """Takes the epoch before, the new one, who was lost, and for how many seconds nothing was computed."""
    note: Callable[[str], None]
    """Takes lines for the job's log."""


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
    ) -> None:
        self._crew = crew
        self._record = record
        self._plan = plan
        self._listener = listener
        self._inbox = inbox
        self._training = training
        self._wishes = wishes
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
        self._is_paused = False
        self._ticked_s = time.monotonic()
        self._committed_s = time.monotonic()
        self._epochs_in_vain = 0
        """Begun since a step was committed or a member lost."""
        self.parting: frozenset[Worker] = frozenset()
        """Members that the next epoch does without."""

    def assemble(self) -> None:
        """Begin the first epoch with all of the crew."""
        self._is_paused = False
        self._handle(Assemble(self._crew.workers))
        self._run()

    def steps(self, until: int) -> int:
        """Take the steps up to this one; return the last one, which all members have applied.

        That is an earlier one when a member wants to leave: see `part`.

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

    def at_pause(self, work: Callable[[], Result]) -> Result:
        """Do something with all members while no step is computed; again, when some are lost meanwhile."""
        while True:
            try:
                return work()
            except MembersLost as loss:
                self._lose(loss.workers)
            except StaleEpoch:
                self._handle(Assemble(self._crew.workers))
            self._is_paused = False
            self._run()

    @property
    def leaving(self) -> frozenset[Worker]:
        """Members that are asked to leave."""
        return self._wishes.leaving & self._crew.workers

    def part(self) -> None:
        """Go on without those that are asked to leave; only at a pause.

        Raises:
            ContributorLost: nobody else holds what one of them holds.
        """
        self.parting = self.leaving
        self._stopped_s = time.monotonic()
        self._is_paused = False
        try:
            self._handle(Assemble(self._crew.workers))
            self._run()
            self._crew.remove(self.parting)
        finally:
            self.parting = frozenset()

    @property
    def roster(self) -> Roster:
        """Members of the epoch."""
        assert self._roster is not None
        return self._roster

    # -- the loop ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_paused:
            try:
                worker, message, figures = self._inbox.get(timeout=_GLANCE_S)
            except queue.Empty:
                pass
            else:
                self._hear(worker, message, figures)
            if self._wishes.cancelled.is_set():
                raise Cancelled
            self._lose(self._crew.feel_pulse())
            if not self._crew.workers:
                raise machines_lost(self._crew.topology, self._lost)
            if self.leaving and self._machine.until > self._machine.committed and self._roster is not None:
                self._handle(Continue(self._machine.committed))
            if time.monotonic() - self._ticked_s > _TICK_S:
                self._ticked_s = time.monotonic()
                self._handle(Tick())

    def _hear(
        self, worker: Worker, message: ToCoordinator | ShareComputeError, figures: StepFigures | None
    ) -> None:
        if isinstance(message, (ContributorLost, StaleEpoch)):
            return  # it waited for somebody whose silence is noticed here
        if isinstance(message, ShareComputeError):
            if worker in self._crew.workers:
                if not isinstance(message, Unavailable):
                    message.machine = message.machine or self._crew.name(worker)
                raise message
            return
        if figures is not None:
            self._figures.setdefault(worker, figures)  # who says something again has nothing new to say
        self._handle(message)

    def _lose(self, workers: frozenset[Worker]) -> None:
        self._say_lost(workers)
        for worker in sorted(workers):
            self._handle(Lost(worker))

    def _say_lost(self, workers: frozenset[Worker]) -> None:
        for worker in sorted(workers):
            self._listener.note(f"lost machine {self._crew.name(worker)}")
            self._figures.pop(worker, None)
            self._lost.add(worker)
        if workers:
            self._epochs_in_vain = 0
            self._stop()

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
        if before is not None:
            stopped_s = time.monotonic() - (self._stopped_s or time.monotonic())
            self._listener.reformed(before, self.roster, frozenset(self._lost), stopped_s)
        self._lost.clear()
        self._stopped_s = None

    def _carry_out(self, effect: Effect) -> list[Event]:
        match effect:
            case Record(epoch=epoch, step=None):
                self._stop()
                self._count_epochs()
                return [_recorded(self._record.begin_epoch(epoch))]
            case Record(epoch=epoch, step=int(step), scale=scale):
                return [_recorded(self._record.commit(epoch, step, scale))]
            case Tell(worker=worker, message=message):
                self._crew.tell(worker, message)
            case Plan():
                return self._form(effect)
            case Committed(step=step, prepared=prepared):
                figures, self._figures = self._figures, {}
                self._listener.committed(step, prepared, figures)
                self._expect_the_next()
            case Pause():
                self._is_paused = True
        return []

    def _form(self, effect: Plan) -> list[Event]:
        form = self._plan(effect)
        self._roster = form.roster
        try:
            self._crew.connect(form.roster, self._listener.note)
        except MembersLost as loss:
            self._say_lost(loss.workers)
            return [Lost(worker) for worker in sorted(loss.workers)]
        except (ContributorLost, StaleEpoch) as failure:
            if self._epochs_in_vain >= _EPOCHS_IN_VAIN:
                raise
            self._listener.note(f"members could not be linked, and are linked anew: {failure.message}")
            return [Assemble(self._crew.workers)]
        return [Planned(form)]

    def _count_epochs(self) -> None:
        """Count an epoch that begins; when nothing comes of one after the other, something else is wrong."""
        self._epochs_in_vain += 1
        if self._epochs_in_vain > _EPOCHS_IN_VAIN:
            raise Unavailable(
                f"members began step {self._machine.committed + 1} anew {_EPOCHS_IN_VAIN} times, without a loss",
                mend="look into the job's log for what failed, and at the network between its machines",
                step=self._machine.committed + 1,
            )

    def _expect_the_next(self) -> None:
        """A step is committed: from how long it took, see for how long the next may give no news."""
        now = time.monotonic()
        slowest_s = max(_QUIET_S, _QUIET_STEPS * (now - self._committed_s))
        self._machine.patience = max(self._machine.patience, math.ceil(slowest_s / _TICK_S))
        self._committed_s = now
        self._epochs_in_vain = 0

    def _decide(self, prepared: Mapping[Worker, Prepared]) -> float:
        """Return what the gradient is multiplied by, from the norms of all parameters.

        Raises:
            NotFinite: the step must not be committed.
        """
        step = self._machine.committed + 1
        if not math.isfinite(sum(losses_of(prepared).values())):
            raise not_finite("loss", step)
        training = self._training
        return update_factor(global_norm(prepared), training.max_gradient_norm, training.precision, step)


def _recorded(standing: Standing | None) -> Recorded:
    """Return what a record says; of two coordinators of a job only the younger may write.

    Raises:
        StaleEpoch: it refused.
    """
    if standing is None:
        raise StaleEpoch(
            "another coordinator has taken over this job", mend="nothing: follow the job's other attempt"
        )
    return Recorded(standing.epoch, standing.committed, standing.scale)


def losses_of(prepared: Mapping[Worker, Prepared]) -> dict[int, float]:
    """Return the summed loss of each microbatch."""
    losses: dict[int, float] = {}
    for message in prepared.values():
        losses.update(message.losses)
    return losses


def global_norm(prepared: Mapping[Worker, Prepared]) -> float:
    """Return the norm of the whole gradient; the same, however layers are cut into pools.

    Members of a pool say the same, and so do both holders of a tied parameter: each name counts once.
    """
    squares: dict[str, float] = {}
    for message in prepared.values():
        squares.update(message.squared_norms)
    return math.sqrt(math.fsum(squares.values()))  # fsum is exact, so in any order the same
