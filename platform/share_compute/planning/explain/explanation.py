"""Explanations of plans: the bottleneck, and one sentence for each machine."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property

from share_compute.device_kinds import KINDS
from share_compute.models.profiles.profile import FLOAT_BYTES
from share_compute.planning.cost.cost import TrainingCost
from share_compute.planning.cost.layout import Layout, StageLayout
from share_compute.planning.cost.schedule_simulator import StepTimeline
from share_compute.planning.explain.cause_words import blamed, devices_text, speed_text, worded
from share_compute.planning.explain.causes import Cause, causes
from share_compute.planning.plan import PINNED, Bottleneck, layer_span
from share_compute.planning.search.additions import Addition, Additions, worth_trying
from share_compute.planning.search.problem import SearchProblem
from share_compute.quantities import bytes_text, listed, percent_text, seconds_text

_SIMPLE = {
    "uniform": "every machine gets the same share",
    "memory_weighted": "shares follow the memory that machines lend",
    "compute_weighted": "shares follow the speed that machines measured",
}
_GIVEN = {PINNED: "as the pinned plan says", **_SIMPLE}
_PLACED = {
    "latency": "its links to its neighbours have a low latency",
    "location": "it works with the machines of its location",
}
_NOTICEABLE = 1.001
_ALIKE = 1.05
"""Ratio of speeds, times or memory up to which two machines count as equal."""


class Explanation:
    """Explains one plan.

    Args:
        cost: cost model of the job on its machines.
        layout: the layout of the plan.
        timeline: one simulated step of the plan; None if no machine's speed was measured.
        requested: (stages, members per stage) that the job requires; each is None if the planner may choose it.
        strategy: name of the strategy.
        exact: whether the search proved that no layout has a shorter step by the cost formula.
        additions: cache of layouts with one more machine.
    """

    def __init__(
        self,
        cost: TrainingCost,
        layout: Layout,
        timeline: StepTimeline | None,
        *,
        requested: tuple[int | None, int | None],
        strategy: str,
        exact: bool,
        additions: Additions,
    ) -> None:
        self._cost = cost
        self._layout = layout
        self._timeline = timeline
        self._stages, self._members = requested
        self._strategy = strategy
        self._exact = exact
        self._additions = additions

    # -- the plan ------------------------------------------------------------------------------------------------

    def bottleneck(self) -> Bottleneck:
        """Return the cause whose removal would shorten the step most, among the causes that `causes` tries."""
        assert self._timeline is not None
        step_s = self._timeline.step_s
        worst = causes(self._cost, self._layout, step_s)[0]
        where, what = worded(self._cost, worst.kind, worst.machines)
        without = seconds_text(max(step_s - worst.saved_s, 0.0))
        if len(self._layout.machines) == 1:
            return Bottleneck(
                kind=worst.kind, where=where, sentence=f"{what}, and does all of the work alone"
            )
        if worst.kind in ("compute", "memory"):
            hint = (
                f"a step takes {seconds_text(step_s)}; with a faster machine in its place down to {without}"
            )
        else:
            hint = f"without that a step would take {without} instead of {seconds_text(step_s)}"
        return Bottleneck(kind=worst.kind, where=where, sentence=f"{what}: {hint}")

    # -- machines of the plan ------------------------------------------------------------------------------------

    def why_in(self, place: int, index: int) -> str:
        """Return why a member holds its layers.

        Args:
            place: index of the member's stage.
            index: index of the member in the stage.
        """
        stage = self._layout.stages[place]
        machine = stage.members[index]
        contributor = self._cost.topology.contributors[machine]
        facts = [self._standing(machine)]
        if self._timeline is not None:
            facts.append(f"{percent_text(self._timeline.busy_fractions[machine])} busy")
        need = self._cost.member_bytes(self._layout, place, index)
        facts.append(f"{bytes_text(need)} of {bytes_text(contributor.memory_bytes)} used")
        facts += self._sharing(stage, index)
        return f"holds {layer_span(stage.start, stage.stop)}: {', '.join(facts)}"

    def standing(self, place: int, index: int) -> str:
        """Return the part of `why_in` about the machine's speed or share, and about the other members of its stage."""
        stage = self._layout.stages[place]
        return ", ".join([self._standing(stage.members[index]), *self._sharing(stage, index)])

    def _sharing(self, stage: StageLayout, index: int) -> list[str]:
        devices = devices_text(self._cost, stage.members[index])
        if len(stage.members) == 1:
            return devices
        work = self._cost.workload
        count = f"{stage.shares[index]} of {sum(stage.shares)} microbatches"
        if work.slices > 1:
            count = (
                f"{stage.shares[index] // work.slice_microbatches} of {work.slices} slices of each sequence"
            )
        others = [self._name(member) for place, member in enumerate(stage.members) if place != index]
        found = [*devices, f"{count}, the rest with {listed(others)}"]
        if work.shares_optimizer and work.optimizer_tensors:
            kept, whole = (
                FLOAT_BYTES
                * work.optimizer_tensors
                * self._cost.updated_parameters(stage.start, stage.stop, members)
                for members in (len(stage.members), 1)
            )
            found.append(f"at most {bytes_text(kept)} of the optimizer's {bytes_text(whole)}")
        return found

    def _standing(self, machine: int) -> str:
        if self._strategy in _GIVEN:
            return _GIVEN[self._strategy]
        if self._strategy in _PLACED and len(self._layout.machines) > 1:
            return _PLACED[self._strategy]
        if self._timeline is None:
            return "no machine's speed was measured, so all count as alike"
        if len(self._layout.machines) == 1:
            return speed_text(self._cost, machine) + self._alone(machine)
        others = [other for other in range(self._cost.num_machines) if other != machine]
        faster = sum(self._is_slower(machine, other) for other in others)
        alike = any(not self._is_slower(other, machine) for other in others)
        if faster == 0:
            return (
                f"as fast as any here ({speed_text(self._cost, machine)})"
                if alike
                else f"the fastest machine here ({speed_text(self._cost, machine)})"
            )
        return f"{speed_text(self._cost, machine)}, {self._ordinal(faster + 1)} fastest here"

    def _alone(self, machine: int) -> str:
        """Return the end of a sentence: why one machine holds all layers; "" if no reason is known."""
        others = [other for other in range(self._cost.num_machines) if other != machine]
        if not others or self._stages is not None:
            return ""
        if not any(self._reached(machine, other) for other in others):
            return "; no usable link joins it to another machine"
        if self._exact:
            return "; alone it is faster than any split"
        return "; alone it is faster than every split that was tried" if self._strategy == "auto" else ""

    def _reached(self, one: int, other: int) -> bool:
        return math.isfinite(self._cost.network.transfer_s(one, other, 1.0))

    @staticmethod
    def _ordinal(number: int) -> str:
        ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
        return f"{number}{ending}"

    # -- machines without work -----------------------------------------------------------------------------------

    def why_out(self, machines: Sequence[int]) -> dict[int, str]:
        """Return, by machine index, why the plan gives each of these machines no layers."""
        if self._strategy == PINNED:
            return dict.fromkeys(machines, "the pinned plan does not use it")
        if self._timeline is None or self._strategy in _SIMPLE:
            reasons = {machine: self._without_search(machine) for machine in machines}
        else:
            tried = worth_trying(self._cost, self._layout)
            reasons = {machine: self._why_out(machine) for machine in tried if machine in machines}
            reasons |= {machine: self._not_tried(machine) for machine in machines if machine not in reasons}
        return {machine: self._with_kind(machine, reason) for machine, reason in reasons.items()}

    def _with_kind(self, machine: int, reason: str) -> str:
        """Add to a reason that the machine's kind of device excludes it from all stages, if this is the case."""
        own = self._cost.kinds[machine]
        used = {self._cost.kinds[other] for other in self._layout.machines}
        if not own or own in used or "" in used:
            return reason
        label = {str(kind): facts.label for kind, facts in KINDS.items()}
        labels = ", ".join(sorted(label[kind] for kind in used))
        return (
            f"{reason}; it can share no stage, because it computes on {label[own]} and the machines of the plan on "
            f"{labels}, and different kinds of devices get sums with other last bits"
        )

    def _without_search(self, machine: int) -> str:
        """Return why a machine has no work in a plan that was made without comparing predicted steps."""
        count = len(self._layout.machines)
        if self._timeline is None:
            return f"no machine's speed was measured, and the plan has work for {count} of them"
        slower = self._is_slower(machine, self._slowest)
        scarce = (
            f"there is no work for more than {_machines(count)}"
            if self._stages is None
            else f"the job asks for {self._requested()}"
        )
        return f"{scarce}, and {'the others are faster' if slower else 'it is no faster than the others'}"

    def _not_tried(self, machine: int) -> str:
        """Return why a machine has no layers, if the search tried no layout with this machine.

        The text omits the machine's own figures, so that machines with equal reasons can be grouped.
        """
        used = self._layout.machines
        if float(self._cost.memory_bytes[machine]) < self._cost.least_bytes:
            return "the memory that it lends does not hold a single layer"
        if not any(self._reached(machine, other) for other in used):
            return "no usable link joins it to the machines of the plan"
        return self._others(machine)

    def _others(self, machine: int) -> str:
        """Return text that compares a machine's speed, links and memory with the machines of the plan."""
        count = len(self._layout.machines)
        behind = [f"{_machines(count)} make{'s' if count == 1 else ''} the shortest step that was found"]
        if self._is_slower(machine, self._slowest):
            behind.append("it is slower than each of them")
        if self._nearest_s(machine) > _ALIKE * self._farthest_s:
            behind.append("its links to them are slower than theirs")
        if _ALIKE * self._cost.memory_bytes[machine] < self._least_bytes:
            behind.append("it lends less memory than each of them")
        return ", and ".join(behind)

    def _is_slower(self, machine: int, other: int) -> bool:
        return _ALIKE * self._flops(machine) < self._flops(other)

    @cached_property
    def _slowest(self) -> int:
        """The slowest machine of the plan."""
        return min(self._layout.machines, key=self._flops)

    @cached_property
    def _least_bytes(self) -> float:
        """Bytes that a plan may fill on the machine with the least memory, among the machines of this plan."""
        return min(float(self._cost.memory_bytes[machine]) for machine in self._layout.machines)

    @cached_property
    def _farthest_s(self) -> float:
        """Largest `_nearest_s` of all machines of the plan; infinite if the plan uses only one machine."""
        used = self._layout.machines
        return max(map(self._nearest_s, used)) if len(used) > 1 else math.inf

    def _nearest_s(self, machine: int) -> float:
        """Return the shortest time to transfer the largest boundary tensor to another machine of the plan."""
        size = float(self._cost.link_bytes.max())
        others = [other for other in self._layout.machines if other != machine]
        return min(self._cost.network.transfer_s(machine, other, size) for other in others)

    def _why_out(self, machine: int) -> str:
        problem = SearchProblem(self._cost, self._stages, self._members)
        with_it = self._additions.of(problem, self._layout)[machine]
        return self._does_not_fit(machine) if with_it is None else self._not_worth_it(machine, with_it)

    def _does_not_fit(self, machine: int) -> str:
        lent = self._cost.topology.contributors[machine].memory_bytes
        if float(self._cost.memory_bytes[machine]) < self._cost.least_bytes:
            return f"the {bytes_text(lent)} that it lends do not hold a single layer"
        if self._stages is not None:
            return f"the job asks for {self._requested()}, and {self._others(machine)}"
        return f"no place is left for it, and {self._others(machine)}"

    def _not_worth_it(self, machine: int, with_it: Addition) -> str:
        assert self._timeline is not None
        step_s, now_s = with_it.step_s, self._timeline.step_s
        if math.isinf(step_s):
            return "no usable link joins it to the machines of the plan"
        if step_s * _NOTICEABLE < now_s:
            return (
                "this strategy found no place for it; "
                f"with it a step would take {seconds_text(step_s)} instead of {seconds_text(now_s)}"
            )
        if step_s < now_s * _NOTICEABLE:
            return f"with it a step would be no shorter than {seconds_text(now_s)}, so it stays free for other jobs"
        longer = f"with it a step would take {seconds_text(step_s)} instead of {seconds_text(now_s)}"
        cause = next(iter(self._own_causes(machine, with_it.layout, step_s)), None)
        return (
            longer
            if cause is None
            else f"{longer}, because {blamed(self._cost, cause.kind, cause.machines, machine)}"
        )

    def _own_causes(self, machine: int, with_it: Layout, step_s: float) -> Iterator[Cause]:
        """Yield the causes of a long step that involve the added machine, the most expensive first.

        The machine's speed is left out if no machine of the plan is faster by more than `_ALIKE`.
        """
        whole_s = [self._cost.cell_s(other, 0, self._cost.num_layers) for other in self._layout.machines]
        is_slow = self._cost.cell_s(machine, 0, self._cost.num_layers) > _ALIKE * min(whole_s)
        for cause in causes(self._cost, with_it, step_s, of=machine):
            if cause.saved_s > 0 and (is_slow or cause.kind not in ("compute", "memory")):
                yield cause

    # -- texts ---------------------------------------------------------------------------------------------------

    def _requested(self) -> str:
        count = self._stages if self._stages is not None else len(self._layout.stages)
        stages = "1 stage" if count == 1 else f"{count} stages"
        if self._members is None and self._strategy not in _SIMPLE:
            return stages
        return f"{stages} of {_machines(self._members or 1)}"

    def _name(self, machine: int) -> str:
        return self._cost.topology.contributors[machine].name

    def _flops(self, machine: int) -> float:
        return self._cost.topology.contributors[machine].flops_per_s()


def _machines(count: int) -> str:
    return "1 machine" if count == 1 else f"{count} machines"
