"""Holds reality against the plan while a job runs: step times beside predictions, and better plans where they pay."""

from __future__ import annotations

import statistics
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from types import TracebackType

from share_compute.jobs.events import (
    Assignment,
    AttemptEvent,
    LayersTimed,
    Measured,
    PoolTiming,
    ReplanProposed,
)
from share_compute.planning.drift import DriftLimits, DriftWatch, propose, seats
from share_compute.planning.planner import Solution
from share_compute.planning.timings import LayerTiming, MachineTimings
from share_compute.protocol.roster import Roster, Worker
from share_compute_actors.messages import StepFigures

_STEPS = 10
"""Steps whose median counts: one slow step is no drift."""
_PAUSE_S = 10.0
"""Shortest time between two reports."""


class Reality:
    """Watches the steps of one attempt.

    Args:
        assignment: the attempt, its number of microbatches settled.
        solution: the plan in use, with what it was made from.
        tell: takes what happens.
        clock: tells seconds.
    """

    def __init__(
        self,
        assignment: Assignment,
        solution: Solution,
        tell: Callable[[AttemptEvent], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._assignment = assignment
        self._solution = solution
        self._tell = tell
        self._clock = clock
        self._limits = DriftLimits(drift=assignment.drift)
        self._watch = DriftWatch(self._limits)
        self._step_s: deque[float] = deque(maxlen=_STEPS)
        self._busy_s: dict[Worker, deque[float]] = defaultdict(lambda: deque(maxlen=_STEPS))
        self._timings: dict[str, dict[int, LayerTiming]] = {
            machine: dict(timed) for machine, timed in solution.cost.timings.items()
        }
        self._told_s: float | None = None
        self._planner: threading.Thread | None = None
        self._lock = threading.Lock()
        self._over = False
        self._proposed: object = None
        self._is_warm = False
        contributors = assignment.topology.contributors
        self._pools: tuple[tuple[Worker, ...], ...] = tuple(
            tuple(contributors[machine].id for machine in pool.members) for pool in solution.layout.pools
        )
        self._is_as_planned = True
        """Whether the members are those of the plan."""

    def __enter__(self) -> Reality:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        failure: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            self._over = True  # a plan that is still being made is of no use any more

    def reform(self, roster: Roster) -> None:
        """The job goes on with other members: what was predicted and measured of the old ones says nothing any more."""
        self._pools = roster.pools
        self._is_as_planned = False
        self._step_s.clear()
        self._busy_s.clear()

    def observe(self, step: int, seconds: float, results: Mapping[Worker, StepFigures]) -> None:
        """Take in one step.

        Args:
            step: its number.
            seconds: how long it took.
            results: what each member said of it.
        """
        self._learn(step, results)
        if not self._is_warm:
            self._is_warm = True  # the first step also loads libraries and fills caches
            return
        self._step_s.append(seconds)
        for worker, result in results.items():
            self._busy_s[worker].append(result.seconds - result.waited_s)
        total = self._assignment.spec.training.steps
        if len(self._step_s) < _STEPS and step < total:
            return
        now = self._clock()
        if self._told_s is None or now - self._told_s >= _PAUSE_S or step == total:
            self._told_s = now
            self._tell(self._measured(step))
        prediction = self._solution.plan.prediction if self._is_as_planned else None
        if prediction is not None and self._watch.observe(prediction.step_s, statistics.median(self._step_s)):
            self._plan_again(step)

    def _learn(self, step: int, results: Mapping[Worker, StepFigures]) -> None:
        """Keep what members timed: their layers' times replace estimates when the job is planned again."""
        timed: dict[str, MachineTimings] = {}
        for worker, result in results.items():
            if not result.layer_timings:
                continue
            machine = self._assignment.topology[worker]
            self._timings.setdefault(machine.id, {}).update(result.layer_timings)
            timed[machine.id] = MachineTimings(
                microbatch_size=self._assignment.spec.training.microbatch_size,
                device=machine.device,
                layers=dict(result.layer_timings),
            )
        if timed:
            self._tell(LayersTimed(step=step, machines=timed))

    def _measured(self, step: int) -> Measured:
        prediction, timeline = self._solution.plan.prediction, self._solution.timeline
        if not self._is_as_planned:
            prediction = timeline = None
        pools = []
        for pool, workers in zip(self._solution.layout.pools, self._pools, strict=True):
            predicted = None
            if timeline is not None:
                predicted = (
                    max(timeline.busy_fractions[machine] for machine in pool.members) * timeline.step_s
                )
            measured = max(
                (statistics.median(self._busy_s[worker]) for worker in workers if self._busy_s[worker]),
                default=0.0,
            )
            pools.append(PoolTiming(predicted_busy_s=predicted, measured_busy_s=measured))
        return Measured(
            step=step,
            predicted_step_s=prediction.step_s if prediction is not None else None,
            measured_step_s=statistics.median(self._step_s),
            pools=tuple(pools),
        )

    def _plan_again(self, step: int) -> None:
        """Look for a better plan beside the training, which must not wait for it."""
        left = self._assignment.spec.training.steps - step
        if not self._timings or left == 0 or (self._planner is not None and self._planner.is_alive()):
            return
        timings = {machine: dict(timed) for machine, timed in self._timings.items()}
        self._planner = threading.Thread(target=self._propose, args=(step, left, timings), daemon=True)
        self._planner.start()

    def _propose(self, step: int, left: int, timings: dict[str, dict[int, LayerTiming]]) -> None:
        replan = propose(
            self._assignment.spec, self._assignment.topology, self._solution, timings, left, self._limits
        )
        with self._lock:
            if self._over or replan is None or seats(replan.solution.plan) == self._proposed:
                return
            self._proposed = seats(replan.solution.plan)
            self._tell(
                ReplanProposed(
                    step=step,
                    plan=replan.solution.plan,
                    current_step_s=replan.current_step_s,
                    gain_s=replan.gain_s,
                    move_cost_s=replan.move_cost_s,
                    sentence=replan.sentence,
                )
            )
