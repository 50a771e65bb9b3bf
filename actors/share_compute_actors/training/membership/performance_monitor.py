"""Compares measured with predicted step times, and proposes better plans.

A search for a plan begins if step times drift from the prediction, or if the usable machines change. It also begins
after members were lost, and after a proposed plan was given up.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType

from share_compute.lifecycle.attempt_events import (
    Assignment,
    AttemptEvent,
    LayersTimed,
    Measured,
    ReplanProposed,
    StageTiming,
)
from share_compute.planning.cost.timings import LayerTiming, MachineTimings, Timings
from share_compute.planning.drift import DriftLimits, DriftWatch, layout_of, propose
from share_compute.planning.planner import Solution
from share_compute.protocol.membership import Worker
from share_compute.topology import Topology
from share_compute_actors.messages import StepFigures
from share_compute_actors.training.membership.changes import Changes

_STEPS = 10
"""Number of steps over which the median of step times is taken. A median ignores a single slow step."""
_PAUSE_S = 10.0
"""Minimum time between two reports of measured times, in seconds. The last step is always reported."""
_NOISE_STEPS = 50
"""Number of recent steps from which the natural variation of step times is estimated."""
_SIGMA = 1.4826
"""Standard deviation of a normal distribution, in median absolute deviations (Rousseeuw and Croux, 1993)."""


def begin_in_thread(work: Callable[[], None]) -> Callable[[], bool]:
    """Run a function in a daemon thread; return a function that returns whether the work still runs."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread.is_alive


class PerformanceMonitor:
    """Compares measured with predicted step times of one attempt, and proposes better plans.

    Args:
        assignment: the attempt, with a fixed number of microbatches.
        solution: the plan in use, with its cost model and its simulated step.
        report: receives events.
        changes: receives better plans; provides the usable machines and the pending plan.
        clock: returns the time in seconds.
        begin: begins a search for a plan, for which training does not wait; see `begin_in_thread`.
    """

    def __init__(
        self,
        assignment: Assignment,
        solution: Solution,
        report: Callable[[AttemptEvent], None],
        changes: Changes,
        clock: Callable[[], float] = time.monotonic,
        begin: Callable[[Callable[[], None]], Callable[[], bool]] = begin_in_thread,
    ) -> None:
        self._assignment = assignment
        self._solution = solution
        self._report = report
        self._changes = changes
        self._known = changes.usable
        """Usable machines at the last search for a plan."""
        self._clock = clock
        self._limits = DriftLimits(drift=assignment.drift)
        self._watch = DriftWatch(self._limits)
        self._step_s: deque[float] = deque(maxlen=_STEPS)
        self._recent_s: deque[float] = deque(maxlen=_NOISE_STEPS)
        self._reformed_s = clock()
        self._busy_s: dict[Worker, deque[float]] = defaultdict(lambda: deque(maxlen=_STEPS))
        self._timings: dict[str, dict[int, LayerTiming]] = {
            machine: dict(timed) for machine, timed in solution.cost.timings.items()
        }
        self._reported_s: float | None = None
        self._begin = begin
        self._is_planning: Callable[[], bool] = lambda: False
        self._planned_after = 0
        """Step after which the last search for a plan began; 0 if there was no search."""
        self._lock = threading.Lock()
        self._over = False
        self._proposed: object = None
        self._is_warm = False
        self._is_disturbed = False
        """Whether members were lost since the last search for a plan."""
        self._is_given_up = False
        """Whether the proposed plan was given up since the last search. If so, the plan may be proposed again."""
        self._stages = _stages(solution)

    def __enter__(self) -> PerformanceMonitor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        failure: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            self._over = True  # a search that still runs must no longer propose a plan

    def reform(self, solution: Solution, *, are_lost: bool = False) -> None:
        """Restart the measurement for a new epoch, because older step times are not comparable.

        Args:
            solution: the solution that the members carry out in the new epoch.
            are_lost: whether members may have been lost. If so, a search for a plan begins after the second step
                from now, and may propose the last proposed plan again.
        """
        if are_lost:
            self._forget_proposal()
        self._solution = solution
        self._stages = _stages(solution)
        self._watch = DriftWatch(self._limits)
        self._step_s.clear()
        self._recent_s.clear()
        self._reformed_s = self._clock()
        self._busy_s.clear()
        self._is_warm = False
        self._is_disturbed |= are_lost

    def timings(self) -> Timings:
        """Return the layer timings of this and earlier attempts, by contributor id and layer index."""
        return {machine: dict(timed) for machine, timed in self._timings.items()}

    def observe(self, step: int, seconds: float, results: Mapping[Worker, StepFigures]) -> None:
        """Record the measurements of one step, and search for a better plan if one is due.

        Args:
            step: number of the step.
            seconds: duration of the step, in seconds.
            results: reported figures, by member.
        """
        self._learn(step, results)
        if not self._is_warm:
            self._is_warm = True  # ignore the first step, which loads libraries and fills caches
            return
        self._is_given_up |= self._changes.take_given_up()
        if self._is_disturbed or self._is_given_up or self._known != self._changes.usable:
            self._plan_again(step)
        self._step_s.append(seconds)
        self._recent_s.append(seconds)
        for worker, result in results.items():
            self._busy_s[worker].append(result.seconds - result.waited_s)
        total = self._assignment.spec.training.steps
        if len(self._step_s) < _STEPS and step < total:
            return
        now = self._clock()
        if self._reported_s is None or now - self._reported_s >= _PAUSE_S or step == total:
            self._reported_s = now
            self._report(self._measured(step))
        timeline = self._solution.timeline
        if timeline is None or now - self._reformed_s < self._limits.least_time_s:
            return
        if self._watch.observe(timeline.step_s, statistics.median(self._step_s)):
            self._plan_again(step)

    def _learn(self, step: int, results: Mapping[Worker, StepFigures]) -> None:
        """Store and report members' layer timings. The planner uses them instead of estimates."""
        timed: dict[str, MachineTimings] = {}
        timings = {worker: result.layer_timings for worker, result in results.items() if result.layer_timings}
        machines = {machine.id: machine for machine in self._changes.usable.contributors} if timings else {}
        slowdowns = _slowdowns(self._solution)
        for worker in sorted(timings.keys() & machines.keys()):
            machine = machines[worker]
            # The planner needs times without slowdowns by shared cores, because it applies the slowdowns itself.
            slowdown = slowdowns.get(worker, 1.0)
            layers = {
                layer: LayerTiming(timing.forward_s / slowdown, timing.backward_s / slowdown)
                for layer, timing in timings[worker].items()
            }
            self._timings.setdefault(machine.id, {}).update(layers)
            timed[machine.id] = MachineTimings(
                microbatch_size=self._assignment.spec.training.microbatch_size,
                device=machine.device,
                layers=layers,
            )
        if timed:
            self._report(LayersTimed(step=step, machines=timed))

    def _measured(self, step: int) -> Measured:
        timeline = self._solution.timeline
        stages = []
        for stage, workers in zip(self._solution.layout.stages, self._stages, strict=True):
            predicted = None
            if timeline is not None:
                predicted = (
                    max(timeline.busy_fractions[machine] for machine in stage.members) * timeline.step_s
                )
            measured = max(
                (statistics.median(self._busy_s[worker]) for worker in workers if self._busy_s[worker]),
                default=0.0,
            )
            stages.append(StageTiming(predicted_busy_s=predicted, measured_busy_s=measured))
        return Measured(
            step=step,
            predicted_step_s=timeline.step_s if timeline is not None else None,
            measured_step_s=statistics.median(self._step_s),
            stages=tuple(stages),
            machines={worker: statistics.median(busy) for worker, busy in self._busy_s.items() if busy},
        )

    def _plan_again(self, step: int) -> None:
        """Begin a search for a better plan, for which training does not wait.

        Do nothing if a search is running, if a search already began after this step, if no step is left, or while
        the members carry out the plan that the job pins.
        """
        left = self._assignment.spec.training.steps - step
        if left == 0 or step == self._planned_after or self._is_planning():
            return
        if self._solution.plan.carries_out(self._assignment.spec.parallelism.plan):
            return
        self._planned_after = step
        usable = self._changes.usable
        if self._is_given_up or usable != self._known:
            self._forget_proposal()
        self._known, self._is_disturbed, self._is_given_up = usable, False, False
        self._is_planning = self._begin(
            partial(self._search, step, left, self._known, self.timings(), self._noise())
        )

    def _forget_proposal(self) -> None:
        with self._lock:
            self._proposed = None

    def _noise(self) -> float:
        """Return the estimated standard deviation of step times, as a fraction of their median.

        The estimate is the scaled median absolute deviation, which is robust against single slow steps.
        """
        if not self._recent_s:
            return 0.0
        median_s = statistics.median(self._recent_s)
        return _SIGMA * statistics.median(abs(one - median_s) for one in self._recent_s) / median_s

    def _search(self, step: int, left: int, machines: Topology, timings: Timings, noise: float) -> None:
        solution = self._solution
        under_way = self._changes.under_way()
        limits = self._limits.model_copy(update={"least_gain": max(self._limits.least_gain, noise)})
        replan = propose(self._assignment.spec, machines, solution, timings, left, limits, under_way)
        with self._lock:
            if self._over or replan is None or self._solution is not solution:
                return
            better = layout_of(replan.solution.plan)
            if better == self._proposed:
                return
            self._proposed = better
            proposed = ReplanProposed(
                step=step,
                plan=replan.solution.plan,
                current_step_s=replan.current_step_s,
                gain_s=replan.gain_s,
                move_cost_s=replan.move_cost_s,
                sentence=replan.sentence,
            )
            self._changes.propose(replan.solution, proposed)


def _stages(solution: Solution) -> list[tuple[Worker, ...]]:
    """Return, for each stage, the members that compute at least one microbatch."""
    machines = solution.cost.topology.contributors
    return [tuple(machines[member].id for member in stage.members) for stage in solution.layout.stages]


def _slowdowns(solution: Solution) -> dict[str, float]:
    """Return the factor by which shared cores slow each member down in the plan, by contributor id."""
    if solution.timeline is None:
        return {}
    machines = solution.cost.topology.contributors
    return {machines[index].id: slowdown for index, slowdown in solution.timeline.slowdowns.items()}
