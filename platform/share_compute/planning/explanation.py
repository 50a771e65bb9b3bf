"""Why a plan is as it is: its bottleneck, and for each machine one sentence that its owner understands."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from share_compute.planning.causes import Cause, causes
from share_compute.planning.cost import TrainingCost
from share_compute.planning.layout import Layout, PoolLayout
from share_compute.planning.plan import Bottleneck, layer_span
from share_compute.planning.schedule_simulator import StepTimeline, simulate_step
from share_compute.planning.words import (
    bytes_text,
    flops_text,
    listed,
    percent_text,
    rate_text,
    seconds_text,
)

_SIMPLE = {
    "uniform": "every machine gets the same share",
    "memory_weighted": "shares follow the memory that machines lend",
    "compute_weighted": "shares follow the speed that machines measured",
}
_MOST_TRIED = 12
"""Idle machines of which it is worked out what a step with them would take."""
_NOTICEABLE = 1.001


class Explanation:
    """Explains one plan.

    Args:
        cost: tables of the job on its machines.
        layout: the plan.
        timeline: one step of it; None where no machine's speed was measured.
        asked: pools and members per pool that the job insists on.
        strategy: its name.
    """

    def __init__(
        self,
        cost: TrainingCost,
        layout: Layout,
        timeline: StepTimeline | None,
        *,
        asked: tuple[int | None, int | None],
        strategy: str,
    ) -> None:
        self._cost = cost
        self._layout = layout
        self._timeline = timeline
        self._pools, self._members = asked
        self._strategy = strategy

    # -- the plan ------------------------------------------------------------------------------------------------

    def bottleneck(self) -> Bottleneck:
        """Return what a step would be shortest without."""
        assert self._timeline is not None
        step_s = self._timeline.step_s
        worst = causes(self._cost, self._layout, step_s)[0]
        where, what = self._worded(worst)
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

    def _worded(self, cause: Cause) -> tuple[str, str]:
        """Return where a cause is, and what it is in words."""
        names = [self._name(machine) for machine in cause.machines]
        match cause.kind:
            case "compute":
                return names[0], f"{names[0]} computes at {self._speed(cause.machines[0])}"
            case "memory":
                rate = rate_text(self._cost.topology.contributors[cause.machines[0]].memory_bytes_per_s)
                return names[0], f"{names[0]} reads its weights from memory at {rate}"
            case "link":
                rate = rate_text(self._cost.network.link(*cause.machines)[1])
                return listed(names), f"the link between {listed(names)} carries {rate}"
            case "latency":
                latency = seconds_text(self._cost.network.link(*cause.machines)[0])
                return listed(names), f"a message between {listed(names)} takes {latency}"
            case "synchronisation":
                return listed(names), f"{listed(names)} sum their gradients in each step"

    # -- machines of the plan ------------------------------------------------------------------------------------

    def why_in(self, place: int, seat: int) -> str:
        """Return why a member holds what it holds.

        Args:
            place: its pool.
            seat: its place in the pool.
        """
        pool = self._layout.pools[place]
        machine = pool.members[seat]
        contributor = self._cost.topology.contributors[machine]
        facts = [self._standing(machine)]
        if self._timeline is not None:
            facts.append(f"{percent_text(self._timeline.busy_fractions[machine])} busy")
        need = self._cost.member_bytes(self._layout, place, seat)
        facts.append(f"{bytes_text(need)} of {bytes_text(contributor.memory_bytes)} used")
        if len(pool.members) > 1:
            count = f"{pool.shares[seat]} of {sum(pool.shares)} microbatches"
            others = [self._name(member) for member in pool.members if member != machine]
            facts.append(f"{count}, the rest with {listed(others)}")
        return f"holds {layer_span(pool.start, pool.stop)}: {', '.join(facts)}"

    def _standing(self, machine: int) -> str:
        if self._strategy in _SIMPLE:
            return _SIMPLE[self._strategy]
        if self._timeline is None:
            return "no machine's speed was measured, so all count as alike"
        if len(self._layout.machines) == 1:
            alone = self._cost.num_machines > 1 and self._pools is None
            return (
                f"{self._speed(machine)}; alone it is faster than any split"
                if alone
                else self._speed(machine)
            )
        speeds = [self._flops(other) for other in range(self._cost.num_machines)]
        speed, faster = self._flops(machine), sum(other > self._flops(machine) for other in speeds)
        alike = speeds.count(speed) > 1
        if faster == 0:
            return (
                f"as fast as any here ({self._speed(machine)})"
                if alike
                else f"the fastest machine here ({self._speed(machine)})"
            )
        return f"{self._speed(machine)}, {self._ordinal(faster + 1)} fastest here"

    @staticmethod
    def _ordinal(number: int) -> str:
        ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
        return f"{number}{ending}"

    # -- machines without work -----------------------------------------------------------------------------------

    def why_out(self, machines: Sequence[int]) -> dict[int, str]:
        """Return for each machine without work why it has none."""
        order = sorted(machines, key=lambda machine: (-self._flops(machine), machine))
        reasons = {machine: self._why_out(machine) for machine in order[:_MOST_TRIED]}
        least = min(map(self._flops, self._layout.machines))
        for machine in order[_MOST_TRIED:]:
            slower = ", and it is slower than each of them" if self._flops(machine) < least else ""
            count = len(self._layout.machines)
            reasons[machine] = (
                f"{count} machines make the shortest step that was found{slower} ({self._speed(machine)})"
            )
        return reasons

    def _why_out(self, machine: int) -> str:
        if self._timeline is None:
            return f"no machine's speed was measured, and the plan has work for {len(self._layout.machines)} of them"
        if self._strategy in _SIMPLE and self._pools is None:
            return f"there is no work for more than {len(self._layout.machines)} machines, and the others are faster"
        if self._strategy in _SIMPLE:
            return f"the job asks for {self._asked()}, and the others are faster"
        with_it = self._best_with(machine)
        return self._no_room(machine) if with_it is None else self._not_worth_it(machine, with_it)

    def _no_room(self, machine: int) -> str:
        lent = self._cost.topology.contributors[machine].memory_bytes
        if float(self._cost.memory_bytes[machine]) < self._smallest_part():
            return f"the {bytes_text(lent)} that it lends do not hold a single layer"
        if self._pools is not None:
            return f"the job asks for {self._asked()}, and the others make a shorter step"
        return "every place that it could take is held by a machine that makes a shorter step"

    def _not_worth_it(self, machine: int, with_it: Layout) -> str:
        assert self._timeline is not None
        step_s, now_s = simulate_step(self._cost, with_it).step_s, self._timeline.step_s
        if math.isinf(step_s):
            return "no usable link joins it to the machines of the plan"
        if step_s < now_s * _NOTICEABLE:
            return f"with it a step would be no shorter than {seconds_text(now_s)}, so it stays free for other jobs"
        cause = causes(self._cost, with_it, step_s, of=machine)[0]
        return (
            f"with it a step would take {seconds_text(step_s)} instead of {seconds_text(now_s)}, "
            f"because {self._blame(machine, cause)}"
        )

    def _blame(self, machine: int, cause: Cause) -> str:
        others = [other for other in cause.machines if other != machine]
        names = listed([self._name(other) for other in others])
        match cause.kind:
            case "compute":
                return f"it computes at {self._speed(machine)}"
            case "memory":
                rate = self._cost.topology.contributors[machine].memory_bytes_per_s
                return f"it reads weights from memory at {rate_text(rate)}"
            case "link":
                return (
                    f"its link to {names} carries {rate_text(self._cost.network.link(machine, others[0])[1])}"
                )
            case "latency":
                return f"a message to {names} takes {seconds_text(self._cost.network.link(machine, others[0])[0])}"
            case "synchronisation":
                return f"it would have to sum gradients with {names} in each step"

    def _best_with(self, machine: int) -> Layout | None:
        """Return the layout with the machine worked in that the formula likes best; None where it fits nowhere."""
        layouts = [layout for layout in self._with(machine) if self._cost.fits(layout)]
        return min(layouts, key=self._cost.step_s, default=None)

    def _with(self, machine: int) -> Iterator[Layout]:
        """Give layouts that differ from the plan only by having the machine in them."""
        pools = self._layout.pools
        for place, pool in enumerate(pools):
            members = (*pool.members, machine)
            shares = (
                self._cost.shares(members, pool.start, pool.stop) if self._cost.may_pool(members) else None
            )
            if shares is not None and self._members is None:
                yield _replaced(pools, place, PoolLayout(pool.start, pool.stop, members, shares))
        if self._pools is not None or self._members not in (None, 1):
            return
        shares = (self._cost.workload.microbatches,)
        for place, pool in enumerate(pools):
            for part in sorted({1, self._fair_part(machine, pool)}):
                if part < pool.stop - pool.start:
                    head = PoolLayout(pool.start, pool.start + part, (machine,), shares)
                    yield _replaced(pools, place, head, pool._replace(start=head.stop))
                    tail = PoolLayout(pool.stop - part, pool.stop, (machine,), shares)
                    yield _replaced(pools, place, pool._replace(stop=tail.start), tail)

    def _fair_part(self, machine: int, pool: PoolLayout) -> int:
        own, theirs = self._flops(machine), sum(map(self._flops, pool.members))
        return max(1, round((pool.stop - pool.start) * own / (own + theirs)))

    def _smallest_part(self) -> float:
        return min(self._cost.bytes_needed(layer, layer + 1, 1, 0) for layer in range(self._cost.num_layers))

    # -- words ---------------------------------------------------------------------------------------------------

    def _asked(self) -> str:
        count = self._pools if self._pools is not None else len(self._layout.pools)
        pools = "1 pool" if count == 1 else f"{count} pools"
        if self._members is None and self._strategy not in _SIMPLE:
            return pools
        return f"{pools} of {self._members or 1} machine{'s' if (self._members or 1) > 1 else ''}"

    def _name(self, machine: int) -> str:
        return self._cost.topology.contributors[machine].name

    def _flops(self, machine: int) -> float:
        return self._cost.topology.contributors[machine].flops_per_s()

    def _speed(self, machine: int) -> str:
        return flops_text(self._flops(machine))


def _replaced(pools: Sequence[PoolLayout], place: int, *new: PoolLayout) -> Layout:
    return Layout((*pools[:place], *new, *pools[place + 1 :]))
