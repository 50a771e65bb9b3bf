"""Simulates a job whose branches merge in rounds, on a fleet whose machines leave and return.

`RoundsMachine` decides on merges, as in real jobs. `place_branches` makes the first placement, and the planner predicts
the times of steps and exchanges.

- A branch computes its steps, sends its contribution, waits for the merge, and receives the updates that it needs.
  Merges take 0 s. Steps do not overlap with merges.
- After the loss of one of several machines, an island continues from its last step, with a spare machine if one is
  free.
- After the loss of its only machine, an island restarts its rounds on a spare machine, with the newest weights that its
  branches may use. Contributions that wait for a merge are withdrawn, as in real jobs.
- An island without enough machines waits until a machine returns. It moves back when all its first machines are
  present.

The job trains until the end of the simulation.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from typing import Literal, NamedTuple, TypeAlias

from share_compute.errors import UserError
from share_compute.models.profiles.profile import ModelProfile
from share_compute.planning.branches import rounds_of
from share_compute.planning.planner import workload
from share_compute.simulation.churn import ChurnEvent
from share_compute.simulation.island_planner import IslandPlanner, PlannedIsland
from share_compute.simulation.report import BranchHours, RoundsReport
from share_compute.simulation.rules import EpochRules
from share_compute.simulation.run import Progress, Scenario, flops_per_sample
from share_compute.specification import TrainJob
from share_compute.synchronization.records import BranchRun, Contribution
from share_compute.synchronization.rounds import (
    Contributed,
    ContributionIgnored,
    MergeRecorded,
    RoundEvent,
    RoundsMachine,
    TimeRead,
)
from share_compute.topology import Topology

_ENDLESS = 2**31 - 1
"""Number of rounds, which a simulation never reaches."""
_PROGRESS_EVERY = 1000

Phase: TypeAlias = Literal["computing", "sending", "waiting", "receiving", "idle"]
_PHASES = ("computing", "redone", "sending", "waiting", "receiving", "idle")
"""Names of the times in the report. ``redone`` is the time of rounds that were begun again."""


@dataclass(eq=False, slots=True)
class _Island:
    """An island and its branches, which always move together."""

    plan: PlannedIsland
    home: tuple[int, ...]
    """Machines of the first placement."""
    branches: list[_Branch] = field(default_factory=list)

    def compute_s(self, steps: int) -> float:
        """Return the time in which each branch computes ``steps`` steps; the branches share the machines."""
        return len(self.branches) * steps * self.plan.step_s


@dataclass(eq=False, slots=True)
class _Branch:
    """A branch and what it does now."""

    number: int
    island: _Island
    round: int = 1
    """The version of its weights, plus 1."""
    phase: Phase = "idle"
    since_s: float = 0.0
    """Time up to which the branch's time is counted."""
    until_s: float = inf
    """End of the phase; infinite while only an event can end it."""
    spent_s: dict[str, float] = field(default_factory=dict)
    """Time in this round, by phase."""
    ticket: int = 0
    """Number of the phase. Ends of earlier phases are ignored."""


class _End(NamedTuple):
    """An event: a phase of a branch ends, or, without a branch, a round may be due."""

    time_s: float
    order: int
    branch: _Branch | None
    ticket: int


def simulate_rounds(
    spec: TrainJob,
    topology: Topology,
    profile: ModelProfile,
    scenario: Scenario,
    *,
    progress: Progress = lambda _: None,
) -> RoundsReport:
    """Simulate the rounds of a job on a fleet, and return the report. Equal arguments give equal reports.

    Args:
        spec: a job with branches.
        topology: the fleet.
        profile: cost profile of the job's model.
        scenario: duration and churn.
        progress: callback that takes the share of the time that has been simulated, 0 to 1.

    Raises:
        PlanInfeasible: the machines cannot hold all branches at the same time.
        UserError: there are no measured machines, the duration is not positive and finite, too many failures are
            expected, or the weights are merged on machines of the job.
    """
    ranges = rounds_of(spec.training).ranges
    if ranges:
        raise UserError(
            f"training.synchronization.servers is {ranges}, and a simulation merges on the server only",
            hint="set training.synchronization.servers to 0 to simulate the job, or use share-compute plan",
        )
    speeds = [machine.flops_per_s() for machine in topology.contributors]
    if not any(speeds) or not 0 < scenario.duration_s < inf:
        raise UserError(
            "a simulation needs measured machines and a time that is more than 0",
            hint="give --machines and --hours",
        )
    churn = scenario.churn
    trace = churn.trace(len(speeds), scenario.duration_s, scenario.seed) if churn else ()
    run = _Run(spec, topology, profile, scenario)
    for number, event in enumerate(trace):
        if number % _PROGRESS_EVERY == 0:
            progress(event.time_s / scenario.duration_s)
        run.advance(event.time_s)
        run.take(event)
    run.advance(scenario.duration_s)
    progress(1.0)
    return run.report()


class _Run:
    """State of one simulation."""

    def __init__(self, spec: TrainJob, topology: Topology, profile: ModelProfile, scenario: Scenario) -> None:
        policy = rounds_of(spec.training)
        self._spec, self._profile, self._policy, self._scenario = spec, profile, policy, scenario
        self._rules = EpochRules()
        self._fleet = IslandPlanner(spec, topology, profile)
        self._machine = RoundsMachine(policy, _ENDLESS)
        self._ends: list[_End] = []
        self._now_s = 0.0
        self._counts: Counter[str] = Counter()
        self._hours: defaultdict[str, float] = defaultdict(float)
        self._areas: defaultdict[str, float] = defaultdict(float)
        self._held: dict[int, _Island] = {}
        """Island by machine."""
        self._islands: list[_Island] = []
        self._branches: list[_Branch] = []
        self._place()
        self._first_round_s = max(
            self._fleet.round_s(island.plan, len(island.branches)) for island in self._islands
        )

    def _place(self) -> None:
        for planned, count in self._fleet.first_places():
            island = _Island(planned, planned.machines)
            self._islands.append(island)
            self._hold(island)
            for _ in range(count):
                branch = _Branch(len(self._branches), island)
                island.branches.append(branch)
                self._branches.append(branch)
        for branch in self._branches:
            self._begin(branch, 0.0)

    # -- phases of branches ------------------------------------------------------------------------------------------

    def advance(self, until_s: float) -> None:
        """Move the clock, and end all phases that are due by then."""
        while self._ends and self._ends[0].time_s <= until_s:
            end = heappop(self._ends)
            self._measure(end.time_s)
            if end.branch is None:
                self._tell(TimeRead(end.time_s))
            elif end.ticket == end.branch.ticket:
                self._end_phase(end.branch)
        self._measure(until_s)

    def _enter(self, branch: _Branch, phase: Phase, lasts_s: float = inf) -> None:
        self._count_time(branch)
        branch.phase, branch.until_s = phase, self._now_s + lasts_s
        branch.ticket += 1
        if lasts_s < inf:
            self._schedule(branch.until_s, branch)

    def _schedule(self, time_s: float, branch: _Branch | None) -> None:
        self._counts["scheduled"] += 1
        ticket = 0 if branch is None else branch.ticket
        heappush(self._ends, _End(time_s, self._counts["scheduled"], branch, ticket))

    def _count_time(self, branch: _Branch) -> None:
        lasted_s = self._now_s - branch.since_s
        self._hours[branch.phase] += lasted_s
        branch.spent_s[branch.phase] = branch.spent_s.get(branch.phase, 0.0) + lasted_s
        branch.since_s = self._now_s

    def _end_phase(self, branch: _Branch) -> None:
        island = branch.island
        if branch.phase == "computing":
            self._enter(branch, "sending", island.plan.upload_s)
        elif branch.phase == "sending":
            self._enter(branch, "waiting")
            self._contribute(branch)
        else:
            self._begin(branch, 0.0)

    def _begin(self, branch: _Branch, pause_s: float) -> None:
        """Begin the branch's round after a pause in which members start."""
        self._count_time(branch)
        branch.spent_s = {}
        self._enter(branch, "computing", pause_s + branch.island.compute_s(self._policy.every))

    def _begin_again(self, branch: _Branch, pause_s: float) -> None:
        """Restart a round without the state of the lost members, from the newest weights that the branch may use."""
        self._drop_work(branch)
        if not self._policy.keeps_own_weights:
            branch.round = self._machine.open_round
        self._begin(branch, pause_s)

    def _contribute(self, branch: _Branch) -> None:
        run = BranchRun(branch.round, branch.number)
        samples = float(self._policy.every * self._spec.training.batch_size)
        self._counts["sent_bytes"] += self._fleet.sizes.contribution
        self._tell(TimeRead(self._now_s))
        self._tell(Contributed(Contribution(run, samples, "")))
        if self._policy.patience_s:
            self._schedule(self._now_s + self._policy.patience_s, None)
        self._answer(branch)

    def _tell(self, event: RoundEvent) -> None:
        """Pass an event to the state machine, and carry out its effects."""
        for effect in self._machine.handle(event):
            if isinstance(effect, ContributionIgnored):
                self._counts["ignored"] += 1
                self._counts["late"] += 1
                continue
            if not self._policy.merges_apart:
                self._counts["missing"] += len(self._machine.missing(effect.record.runs))
                self._counts["late"] += sum(run.round < effect.record.version for run in effect.record.runs)
            self._counts["merged"] += len(effect.record.runs)
            self._tell(MergeRecorded(effect.record))
            self._move_back()
            for branch in self._branches:
                self._answer(branch)

    def _answer(self, branch: _Branch) -> None:
        """Send a waiting branch the updates with which it continues, unless it must wait for other branches."""
        if branch.phase != "waiting":
            return
        versions = self._machine.updates(BranchRun(branch.round, branch.number))
        if versions is None:
            return
        branch.round = versions.stop
        self._counts["received_bytes"] += len(versions) * self._fleet.sizes.update
        self._enter(branch, "receiving", len(versions) * branch.island.plan.download_s)

    # -- machines that leave and return ------------------------------------------------------------------------------

    def take(self, event: ChurnEvent) -> None:
        """Process an event: a machine leaves or returns."""
        self._fleet.is_there[event.machine] = event.is_up
        self._areas["present"] += (self._scenario.duration_s - self._now_s) * (1 if event.is_up else -1)
        rest = (self._scenario.duration_s - self._now_s) * float(self._fleet.speeds[event.machine])
        self._areas["lent"] += rest if event.is_up else -rest
        if event.is_up:
            for island in self._islands:
                if not island.plan.machines:
                    self._settle(island, event.machine)
            return
        self._counts["deaths"] += 1
        island_there = self._held.get(event.machine)
        if island_there is not None:
            self._counts["member_deaths"] += 1
            self._lose(island_there, event.machine)

    def _lose(self, island: _Island, machine: int) -> None:
        """Continue an island after the loss of a machine."""
        left = [one for one in island.plan.machines if one != machine]
        old_s = island.plan.step_s
        self._free(island)
        planned = self._fleet.replaced(left, len(island.branches), machine)
        if planned is None:
            self._counts["stranded"] += 1
            island.plan = island.plan._replace(machines=())
            for branch in island.branches:
                self._drop_work(branch)
                self._enter(branch, "idle")
            return
        island.plan = planned
        self._hold(island)
        pause_s = self._rules.noticing_s + self._rules.search_s + self._rules.start_s + planned.fetch_s
        for branch in island.branches:
            if not left:
                self._begin_again(branch, pause_s)
            elif branch.phase == "computing":
                left_s = (branch.until_s - self._now_s) * planned.step_s / old_s
                self._enter(branch, "computing", left_s + pause_s)
            elif branch.phase == "sending":
                self._enter(branch, "sending", planned.upload_s + pause_s)
            elif branch.phase == "receiving":
                self._enter(branch, "receiving", planned.download_s + pause_s)
        self._counts["replaced"] += 1

    def _drop_work(self, branch: _Branch) -> None:
        """Withdraw a branch's contributions that wait for a merge, and count the time of a restarted round as lost."""
        withdrawn = self._machine.withdraw(branch.number)
        if withdrawn or branch.phase in {"computing", "sending"}:
            self._count_time(branch)
            for phase, spent_s in branch.spent_s.items():
                self._hours[phase] -= spent_s
                self._hours["redone"] += spent_s
            branch.spent_s = {}
            self._counts["restarts"] += 1

    def _settle(self, island: _Island, near: int) -> None:
        """Give new machines to an island that has none, if enough are free."""
        planned = self._fleet.replaced((), len(island.branches), near)
        if planned is None:
            return
        island.plan = planned
        self._hold(island)
        for branch in island.branches:
            self._begin_again(branch, self._rules.search_s + self._rules.start_s + planned.fetch_s)

    def _move_back(self) -> None:
        """Move islands with waiting branches back to their first machines, if all of these are present and free."""
        fleet = self._fleet
        for island in self._islands:
            home, used = island.home, island.plan.machines
            if used == home or any(branch.phase in {"computing", "sending"} for branch in island.branches):
                continue
            if all(fleet.is_there[one] and (one in used or not fleet.is_used[one]) for one in home):
                count = len(island.branches)
                planned = fleet.plan(home, count)
                if planned is not None and fleet.round_s(planned, count) < fleet.round_s(island.plan, count):
                    self._free(island)
                    island.plan = planned
                    self._hold(island)
                    self._counts["returned"] += 1

    def _hold(self, island: _Island) -> None:
        for machine in island.plan.machines:
            self._held[machine], self._fleet.is_used[machine] = island, True

    def _free(self, island: _Island) -> None:
        for machine in island.plan.machines:
            del self._held[machine]
            self._fleet.is_used[machine] = False

    # -- sums --------------------------------------------------------------------------------------------------------

    def _measure(self, now_s: float) -> None:
        lasted_s, self._now_s = now_s - self._now_s, now_s
        self._areas["members"] += lasted_s * len(self._held)

    def report(self) -> RoundsReport:
        """Return the report of the simulation."""
        for branch in self._branches:
            self._count_time(branch)
        counts, duration_s, training = self._counts, self._scenario.duration_s, self._spec.training
        speeds = self._fleet.speeds
        lent = float(speeds.sum()) * duration_s + self._areas["lent"]
        samples = counts["merged"] * self._policy.every * training.batch_size
        tokens = workload(self._spec, 1).sequence_length
        whole_s = duration_s * len(self._branches)
        return RoundsReport(
            machines=len(speeds),
            mean_machines=len(speeds) + self._areas["present"] / duration_s,
            mean_members=self._areas["members"] / duration_s,
            simulated_s=duration_s,
            seed=self._scenario.seed,
            branches=len(self._branches),
            islands=len(self._islands),
            policy=self._spec.training.synchronization.kind,
            every=self._policy.every,
            first_round_s=self._first_round_s,
            rounds=self._machine.version,
            merged_contributions=counts["merged"],
            missing_contributions=counts["missing"],
            late_contributions=counts["late"],
            ignored_contributions=counts["ignored"],
            samples_per_s=samples / duration_s,
            tokens_per_s=samples * tokens / duration_s,
            utilisation=samples * flops_per_sample(self._profile, tokens) / lent if lent > 0 else 0.0,
            computing_share=self._hours["computing"] / whole_s,
            sent_bytes=counts["sent_bytes"],
            received_bytes=counts["received_bytes"],
            deaths=counts["deaths"],
            member_deaths=counts["member_deaths"],
            replacements=counts["replaced"],
            restarts=counts["restarts"],
            stranded=counts["stranded"],
            returns=counts["returned"],
            searches=self._fleet.searches,
            hours=BranchHours(**{f"{name}_s": self._hours[name] for name in _PHASES}),
        )
