"""Explanations of serving plans: the bottleneck of the objective, and one sentence for each machine."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from share_compute.planning.cost.layout import Layout, StageLayout
from share_compute.planning.explain.cause_words import blamed, devices_text, memory_text, speed_text, worded
from share_compute.planning.explain.causes import with_boundless_memory
from share_compute.planning.network.network import Floats
from share_compute.planning.plan import Bottleneck, CauseKind
from share_compute.planning.serving.bound import objective_s
from share_compute.planning.serving.cost import ServingCost
from share_compute.planning.serving.parts import TimePart, step_parts, trip_parts
from share_compute.quantities import bytes_text, seconds_text

_MOST_TRIED = 12
"""Maximum number of idle machines that are tried in other placements, the fastest ones first."""
_NOTICEABLE = 1.001
_ALIKE = 1.05
"""Ratio of times or speeds up to which two machines count as equal."""


class ServingExplanation:
    """Explains one placement.

    Args:
        cost: cost model of the deployment on its machines.
        layout: the placement.
        exact: whether the search proved that no placement is better.
        measured: whether the speed of any machine was measured; if not, all speeds are assumed.
    """

    def __init__(self, cost: ServingCost, layout: Layout, *, exact: bool, measured: bool) -> None:
        self._cost, self._layout = cost, layout
        self._exact, self._measured = exact, measured
        self._alone = cost.workload.objective == "latency"
        self._objective_s = objective_s(cost, layout)

    def bottleneck(self) -> Bottleneck:
        """Return the largest part of the time that the objective minimises."""
        trip = trip_parts(self._cost, self._layout)
        trip_s = sum(part.seconds for part in trip)
        worst = self._largest(trip)
        share = "that a request takes" if self._alone else "that a token takes to go round"
        text = f"{seconds_text(worst.seconds)} of the {seconds_text(trip_s)} {share}"
        if not self._alone:
            busiest = self._largest(step_parts(self._cost, self._layout))
            if busiest.seconds >= trip_s * (1 - 1e-9):
                worst = busiest
                text = f"busy {seconds_text(worst.seconds)} from token to token, and nothing is longer"
        kind = self._kind(worst, self._layout)
        where, what = worded(self._cost, kind, worst.machines)
        return Bottleneck(kind=kind, where=where, sentence=f"{what}: {text}")

    @staticmethod
    def _largest(parts: Sequence[TimePart]) -> TimePart:
        return max(parts, key=lambda part: part.seconds)

    def _kind(self, part: TimePart, layout: Layout) -> CauseKind:
        """Return a part's kind; memory if a machine would compute more than twice as fast without waits for memory."""
        if part.kind != "compute":
            return part.kind
        (machine,) = part.machines
        stage = next(stage for stage in layout.stages if machine in stage.members)
        row = Layout((stage._replace(members=(0,)),))
        alone = replace(self._cost.part([machine]), timings={})
        (contributor,) = alone.topology.contributors
        fast = replace(
            alone, topology=replace(alone.topology, contributors=(with_boundless_memory(contributor),))
        )
        return "memory" if self._busy_s(fast, row) < 0.5 * self._busy_s(alone, row) else "compute"

    def _busy_s(self, cost: ServingCost, layout: Layout) -> float:
        parts = trip_parts(cost, layout) if self._alone else step_parts(cost, layout)
        return parts[0].seconds

    # -- machines of the placement -------------------------------------------------------------------------------

    def busy_fraction(self, place: int) -> float:
        """Return the share of the time that the objective minimises in which the machine of stage ``place`` works."""
        return min(1.0, self._busy[place] / self._objective_s) if self._objective_s > 0 else 0.0

    def standing(self, place: int) -> str:
        """Return a text about the machine of a stage: its speeds, its busy time, and why it was chosen."""
        (machine,) = self._layout.stages[place].members
        busy, whole = seconds_text(self._busy[place]), seconds_text(self._objective_s)
        of = f"a request's {whole}" if self._alone else f"the {whole} from token to token"
        speeds = ", ".join([self._speeds(machine), *devices_text(self._cost, machine)])
        return f"{speeds}, busy {busy} of {of}{self._against_splits(machine)}"

    @cached_property
    def _busy(self) -> list[float]:
        parts = trip_parts if self._alone else step_parts
        return [part.seconds for part in parts(self._cost, self._layout)[: len(self._layout.stages)]]

    def _speeds(self, machine: int) -> str:
        if not self._measured:
            return "no machine's speed was measured, so all count as alike"
        if not self._cost.topology.contributors[machine].memory_bytes_per_s:
            return speed_text(self._cost, machine)
        return f"{speed_text(self._cost, machine)}, memory read at {memory_text(self._cost, machine)}"

    def _against_splits(self, machine: int) -> str:
        others = [other for other in range(self._cost.num_machines) if other != machine]
        if len(self._layout.stages) > 1 or not others:
            return ""
        if not any(self._reached(machine, other) for other in others):
            return "; no usable link joins it to another machine"
        return (
            "; alone it is better than any split"
            if self._exact
            else "; alone it is better than every split tried"
        )

    def _reached(self, one: int, other: int) -> bool:
        return math.isfinite(self._cost.network.transfer_s(one, other, 1.0))

    # -- machines without work -----------------------------------------------------------------------------------

    def why_out(self, machines: Sequence[int]) -> dict[int, str]:
        """Return, for each of these machines, the reason why the placement gives it no layers."""
        whole_s = self._whole_s
        tried = set(sorted(machines, key=lambda machine: (whole_s[machine], machine))[:_MOST_TRIED])
        return {machine: self._why_out(machine, tried=machine in tried) for machine in machines}

    @cached_property
    def _whole_s(self) -> Floats:
        """Seconds that each machine would need for all layers ``[machines]``: in one request, or in one engine step."""
        new, prompt_s = self._cost.workload.new_tokens, self._cost.prompt_s[:, -1]
        if self._alone:
            return prompt_s + new * self._cost.token_s(1)[:, -1]
        batch = self._cost.batches(len(self._layout.stages))[1]
        return self._cost.token_s(batch)[:, -1] + batch * prompt_s / new

    @cached_property
    def _smallest_bytes(self) -> float:
        needed = self._cost.needed_bytes
        return min(float(needed[layer, layer + 1]) for layer in range(self._cost.num_layers))

    @cached_property
    def _slowest_s(self) -> float:
        """Seconds that the slowest machine of the placement would need for all layers."""
        return max(float(self._whole_s[machine]) for machine in self._layout.machines)

    def _why_out(self, machine: int, *, tried: bool) -> str:
        lent = self._cost.topology.contributors[machine].memory_bytes
        if float(self._cost.memory_bytes[machine]) < self._smallest_bytes:
            return f"the {bytes_text(lent)} that it lends do not hold a single layer with its caches"
        if not any(self._reached(machine, other) for other in self._layout.machines):
            return "no usable link joins it to the machines that serve"
        best = min(self._with(machine), key=lambda each: (each[0], each[1]), default=None) if tried else None
        if best is not None and math.isfinite(best[0]):
            return self._compared(machine, *best)
        slower = self._whole_s[machine] > _ALIKE * self._slowest_s
        count = len(self._layout.machines)
        serve = "1 machine serves" if count == 1 else f"{count} machines serve"
        return f"{serve} best of what was found" + (", and it is slower than each of them" if slower else "")

    def _with(self, machine: int) -> Iterator[tuple[float, Layout]]:
        """Yield (objective in seconds, placement) for changed placements that fit.

        The machine is added, or replaces another machine. For throughput, placements that exceed the limit on the first
        token are left out.
        """
        stages = self._layout.stages
        for place, stage in enumerate(stages):
            for new in _with_part(stage, machine):
                layout = Layout((*stages[:place], *new, *stages[place + 1 :]))
                if self._cost.fits(layout) and self._in_time(layout):
                    yield objective_s(self._cost, layout), layout

    def _in_time(self, layout: Layout) -> bool:
        limit = self._cost.workload.first_token_limit_s
        return self._alone or limit is None or self._cost.first_token_s(layout) <= limit

    def _compared(self, machine: int, with_s: float, layout: Layout) -> str:
        what = "a request" if self._alone else "the way from token to token"
        now = seconds_text(self._objective_s)
        taken = f"with it {what} would take {seconds_text(with_s)} instead of {now}"
        if with_s * _NOTICEABLE < self._objective_s:
            return f"the search found no place for it; {taken}"
        if with_s < self._objective_s * _NOTICEABLE:
            return f"with it {what} would be no shorter than {now}, so it stays free for other work"
        part = self._fault(machine, layout)
        if part is None:
            return taken
        kind = self._kind(part, layout)
        if kind == "compute" and not self._computes_slower(machine):
            kind = "memory"  # the plan's fastest machine does not compute faster, so memory bandwidth is the cause
        return f"{taken}, because {blamed(self._cost, kind, part.machines, machine)}"

    def _computes_slower(self, machine: int) -> bool:
        speeds = [contributor.flops_per_s() for contributor in self._cost.topology.contributors]
        best = min(self._layout.machines, key=lambda other: float(self._whole_s[other]))
        return _ALIKE * speeds[machine] < speeds[best]

    def _fault(self, machine: int, layout: Layout) -> TimePart | None:
        """Return the largest part of the time that involves the machine; None if there is none.

        The machine's computing is left out if no machine of the plan is clearly faster (`_ALIKE`).
        """
        parts = trip_parts(self._cost, layout)
        steps = [] if self._alone else step_parts(self._cost, layout)
        if steps and self._largest(steps).seconds >= sum(part.seconds for part in parts):
            parts = steps
        fastest_s = min(float(self._whole_s[other]) for other in self._layout.machines)
        slow = self._whole_s[machine] > _ALIKE * fastest_s
        own = [part for part in parts if machine in part.machines and (slow or part.kind != "compute")]
        largest = max(own, key=lambda part: part.seconds, default=None)
        return largest if largest is not None and largest.seconds > 0 else None


def _with_part(stage: StageLayout, machine: int) -> Iterator[tuple[StageLayout, ...]]:
    yield (stage._replace(members=(machine,)),)
    layers = stage.stop - stage.start
    for part in sorted({1, layers // 2}):
        if 0 < part < layers:
            cut = stage.start + part
            yield stage._replace(stop=cut, members=(machine,)), stage._replace(start=cut)
            cut = stage.stop - part
            yield stage._replace(stop=cut), stage._replace(start=cut, members=(machine,))
