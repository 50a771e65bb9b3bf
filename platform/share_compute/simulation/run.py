"""Simulates a job on a fleet whose machines leave and return, and reports the job's steps and time by purpose.

Between two membership changes all steps take the same time, so the clock advances from event to event.

A machine that returns is a spare. When it returns, the planner may search for a better plan, at most once in
`_REPLAN_EVERY_S`. The job moves to the better plan at the end of a step if the time saved is more than the pause. The
job trains until the end of the simulation.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from share_compute.errors import UserError
from share_compute.models.profiles.profile import ModelProfile
from share_compute.planning.cost.layout import Layout
from share_compute.simulation.churn import Churn, ChurnEvent
from share_compute.simulation.fleet_planner import FleetPlanner
from share_compute.simulation.ledger import Ledger
from share_compute.simulation.report import SimulationReport
from share_compute.simulation.rules import Change, Downtime, EpochRules, Rules
from share_compute.specification import TrainJob
from share_compute.topology import Topology

_REPLAN_EVERY_S = 7200.0
"""Shortest time between two searches for a better plan, in seconds."""
_RETRY_S = 60.0
"""Shortest time between two searches while no plan is possible, in seconds."""
_WORTH = 1.02
"""Ratio of the current step time to the shortest so far, above which the planner may search for a better plan."""
_PROGRESS_EVERY = 100

Progress = Callable[[float], None]
"""Callback that takes the share of the time that has been simulated, 0 to 1."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """Length of a simulation, and failures of machines."""

    duration_s: float
    churn: Churn | None = None
    """Times between failures and until return; None for machines that never fail."""
    seed: int = 0


def simulate(
    spec: TrainJob,
    topology: Topology,
    profile: ModelProfile,
    scenario: Scenario,
    *,
    rules: Rules | None = None,
    progress: Progress = lambda _: None,
) -> SimulationReport:
    """Simulate a job on a fleet, and return the report. Equal arguments give equal reports.

    Args:
        spec: the job.
        topology: the fleet.
        profile: the job's model.
        scenario: duration and churn.
        rules: cost of a membership change; default: `EpochRules`.
        progress: callback that takes the share of the time that has been simulated, 0 to 1.

    Raises:
        PlanInfeasible: all machines together cannot hold the job.
        UserError: there are no machines, the duration is not positive and finite, or too many failures are expected.
    """
    if not topology.contributors or not 0 < scenario.duration_s < math.inf:
        raise UserError(
            "a simulation needs machines and a time that is more than 0", hint="give --machines and --hours"
        )
    run = _Run(spec, topology, profile, scenario, rules or EpochRules())
    churn, duration_s = scenario.churn, scenario.duration_s
    trace = churn.trace(len(topology.contributors), duration_s, scenario.seed) if churn else ()
    for number, event in enumerate(trace):
        if number % _PROGRESS_EVERY == 0:
            progress(event.time_s / duration_s)
        run.take(event)
    run.finish()
    progress(1.0)
    return run.report(seed=scenario.seed)


class _Run:
    """State of one simulation, such as the machines that are present and the current epoch."""

    def __init__(
        self, spec: TrainJob, topology: Topology, profile: ModelProfile, scenario: Scenario, rules: Rules
    ) -> None:
        self._planner = FleetPlanner(spec, topology, profile)
        self._profile, self._scenario, self._rules = profile, scenario, rules
        self._ledger = Ledger(scenario.duration_s)
        self._counts: Counter[str] = Counter(searches=1)
        self._alive = np.ones(len(topology.contributors), dtype=bool)
        self._is_running = True
        # The current layout, or the last one while no plan is possible.
        self._layout = self._planner.first_plan()
        # The last layout whose members had all their state, and the machines that died since then.
        self._holders, self._gone = self._layout, set[int]()
        self._switch: tuple[float, Layout] | None = None
        self._searched_s, self._has_returned = 0.0, False
        self._areas: defaultdict[str, float] = defaultdict(float)
        self._seen_s = 0.0
        self._best_step_s = math.inf
        self._open(0.0, self._layout, Downtime(), 0.0)
        self._first_step_s = self._ledger.step_s

    # -- events --------------------------------------------------------------------------------------------------

    def take(self, event: ChurnEvent) -> None:
        """Process an event: a machine leaves or returns."""
        now_s, machine, is_up = event
        self._move_until(now_s)
        self._measure(now_s)
        self._alive[machine] = is_up
        if not is_up:
            self._counts["deaths"] += 1
            if self._is_running and machine in self._layout.machines:
                self._die(now_s, machine)
            else:
                self._gone.add(machine)
            return
        self._has_returned = True
        if self._is_running:
            self._replan(now_s)
        else:
            self._retry(now_s)

    def finish(self) -> None:
        """Advance the clock to the end of the simulation."""
        end_s = self._scenario.duration_s
        self._move_until(end_s)
        self._measure(end_s)
        self._ledger.close(end_s)

    def _die(self, now_s: float, machine: int) -> None:
        self._counts["member_deaths"] += 1
        self._switch = None
        self._settle(now_s)
        self._gone.add(machine)
        done = self._ledger.close(now_s)
        layout = self._planner.replaced(self._layout, machine, self._alive)
        is_search = layout is None
        if layout is None:
            layout = self._search()
        else:
            self._counts["replacements"] += 1
        redone = self._rules.redone(done, self._layout, layout)
        self._ledger.lose(redone)
        if layout is None:
            self._is_running, self._searched_s = False, now_s
            self._ledger.open(now_s, math.inf, Downtime(), done - redone)
        else:
            self._change(now_s, layout, done - redone, is_death=True, is_search=is_search)

    def _retry(self, now_s: float) -> None:
        """Try to plan again after a machine has returned, unless the last search was less than `_RETRY_S` ago."""
        if now_s < self._searched_s + _RETRY_S:
            return
        self._searched_s = now_s
        layout = self._search()
        if layout is not None:
            self._is_running = True
            self._change(now_s, layout, self._ledger.close(now_s), is_death=False, is_search=True)

    def _replan(self, now_s: float) -> None:
        """Search for a better plan, if a search is due; if moving saves time, schedule it for the end of the step."""
        is_due = self._has_returned and now_s >= self._searched_s + _REPLAN_EVERY_S and self._switch is None
        is_slow = self._ledger.step_s > _WORTH * self._best_step_s
        if not is_due or not is_slow or now_s < self._ledger.begun_s:
            return
        self._searched_s, self._has_returned = now_s, False
        layout = self._search()
        if layout is None:
            return
        at_s = self._ledger.end_of_step_s(now_s)
        gained_s = (self._scenario.duration_s - at_s) * (
            1 - self._planner.step_s(layout) / self._ledger.step_s
        )
        pause = self._rules.pause(self._planner.cost, Change(self._layout, layout))
        if gained_s > pause.total_s:
            self._switch = at_s, layout

    def _move_until(self, now_s: float) -> None:
        """Move to the scheduled plan if its time is before ``now_s``; drop it if one of its machines has left."""
        if self._switch is None or self._switch[0] >= now_s:
            return
        (at_s, layout), self._switch = self._switch, None
        if self._alive[list(layout.machines)].all():
            self._measure(at_s)
            self._settle(at_s)
            self._change(at_s, layout, self._ledger.close(at_s), is_death=False, is_search=True)

    # -- epochs --------------------------------------------------------------------------------------------------

    def _search(self) -> Layout | None:
        self._counts["searches"] += 1
        return self._planner.plan(self._alive)

    def _settle(self, now_s: float) -> None:
        """Record the members of the current layout as holders of the state, once all of them have received it."""
        if now_s >= self._ledger.begun_s:
            self._holders, self._gone = self._layout, set()

    def _change(
        self, now_s: float, layout: Layout, carried: float, *, is_death: bool, is_search: bool
    ) -> None:
        change = Change(self._holders, layout, frozenset(self._gone), is_death=is_death, is_search=is_search)
        self._open(now_s, layout, self._rules.pause(self._planner.cost, change), carried)

    def _open(self, now_s: float, layout: Layout, pause: Downtime, carried: float) -> None:
        self._layout = layout
        self._ledger.open(now_s, self._planner.step_s(layout), pause, carried)
        self._best_step_s = min(self._best_step_s, self._ledger.step_s)
        self._counts["epochs"] += 1

    # -- sums ----------------------------------------------------------------------------------------------------

    def _measure(self, now_s: float) -> None:
        """Integrate the number and speed of machines and members over the time since the last call."""
        lasted_s, self._seen_s = now_s - self._seen_s, now_s
        speed = self._planner.flops_per_s
        members = list(self._layout.machines) if self._is_running else []
        self._areas["machines"] += lasted_s * float(self._alive.sum())
        self._areas["lent"] += lasted_s * float(speed[self._alive].sum())
        self._areas["members"] += lasted_s * len(members)
        self._areas["held"] += lasted_s * float(speed[members].sum())

    def report(self, seed: int) -> SimulationReport:
        """Return the report of the simulation."""
        workload, duration_s, counts = self._planner.cost.workload, self._scenario.duration_s, self._counts
        committed, lost = self._ledger.committed, self._ledger.lost
        samples_per_s = committed * workload.batch_size / duration_s
        computed = committed * workload.batch_size * flops_per_sample(self._profile, workload.sequence_length)
        return SimulationReport(
            machines=len(self._alive),
            mean_machines=self._areas["machines"] / duration_s,
            mean_members=self._areas["members"] / duration_s,
            simulated_s=duration_s,
            seed=seed,
            layers=len(self._profile.layers),
            parameters=self._profile.parameters,
            microbatches=workload.microbatches,
            first_step_s=self._first_step_s,
            samples_per_s=samples_per_s,
            tokens_per_s=samples_per_s * workload.sequence_length,
            utilisation=_share(computed, self._areas["lent"]),
            member_utilisation=_share(computed, self._areas["held"]),
            attempted_steps=committed + lost,
            committed_steps=committed,
            lost_steps=lost,
            epochs=counts["epochs"],
            deaths=counts["deaths"],
            member_deaths=counts["member_deaths"],
            replacements=counts["replacements"],
            searches=counts["searches"],
            hours=self._ledger.hours,
            curve_samples_per_s=tuple(steps * workload.batch_size for steps in self._ledger.curve),
        )


def flops_per_sample(profile: ModelProfile, tokens: int) -> float:
    """Return the floating-point operations of one sample, forward and backward."""
    pieces = (profile.embedding, *profile.layers, profile.head)
    return sum(piece.forward_flops.at(tokens) + piece.backward_flops.at(tokens) for piece in pieces)


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
