"""Why a plan is as it is: its bottleneck, and for each machine one sentence that its owner understands."""

from __future__ import annotations

import math
from collections.abc import Sequence

from share_compute.planning.additions import best_with, worth_trying
from share_compute.planning.causes import Cause, causes
from share_compute.planning.cost import TrainingCost
from share_compute.planning.layout import Layout, PoolLayout
from share_compute.planning.plan import Bottleneck, layer_span
from share_compute.planning.problem import Problem
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
_NOTICEABLE = 1.001


class Explanation:
    """Explains one plan.

    Args:
        cost: tables of the job on its machines.
        layout: the plan.
        timeline: one step of it; None where no machine's speed was measured.
        asked: pools and members per pool that the job insists on.
        strategy: its name.
        exact: whether no layout has a smaller formula, proved.
    """

    def __init__(
        self,
        cost: TrainingCost,
        layout: Layout,
        timeline: StepTimeline | None,
        *,
        asked: tuple[int | None, int | None],
        strategy: str,
        exact: bool = False,
    ) -> None:
        self._cost = cost
        self._layout = layout
        self._timeline = timeline
        self._pools, self._members = asked
        self._strategy = strategy
        self._exact = exact

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
        facts += self._sharing(pool, seat)
        return f"holds {layer_span(pool.start, pool.stop)}: {', '.join(facts)}"

    def standing(self, place: int, seat: int) -> str:
        """Return the part of `why_in` that no figure says: why this machine, and with whom it shares."""
        pool = self._layout.pools[place]
        return ", ".join([self._standing(pool.members[seat]), *self._sharing(pool, seat)])

    def _sharing(self, pool: PoolLayout, seat: int) -> list[str]:
        if len(pool.members) == 1:
            return []
        count = f"{pool.shares[seat]} of {sum(pool.shares)} microbatches"
        others = [self._name(member) for place, member in enumerate(pool.members) if place != seat]
        return [f"{count}, the rest with {listed(others)}"]

    def _standing(self, machine: int) -> str:
        if self._strategy in _SIMPLE:
            return _SIMPLE[self._strategy]
        if self._timeline is None:
            return "no machine's speed was measured, so all count as alike"
        if len(self._layout.machines) == 1:
            return self._speed(machine) + self._alone(machine)
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

    def _alone(self, machine: int) -> str:
        """Return what is known of one machine against several."""
        others = [other for other in range(self._cost.num_machines) if other != machine]
        if not others or self._pools is not None:
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
        """Return for each machine without work why it has none."""
        tried = worth_trying(self._cost, self._layout)
        reasons = {machine: self._why_out(machine) for machine in tried if machine in machines}
        return reasons | {machine: self._not_tried(machine) for machine in machines if machine not in reasons}

    def _not_tried(self, machine: int) -> str:
        """Return a reason without figures of the machine's own: those of one cause are told together."""
        used = self._layout.machines
        if float(self._cost.memory_bytes[machine]) < self._smallest_part():
            return "the memory that it lends does not hold a single layer"
        if not any(self._reached(machine, other) for other in used):
            return "no usable link joins it to the machines of the plan"
        causes_ = []
        if self._flops(machine) < min(map(self._flops, used)):
            causes_.append("it is slower than each of them")
        if len(used) > 1 and self._nearest_s(machine) > max(self._nearest_s(other) for other in used):
            causes_.append("its links to them are slower than theirs")
        count = "1 machine makes" if len(used) == 1 else f"{len(used)} machines make"
        return ", and ".join([f"{count} the shortest step that was found", *causes_])

    def _nearest_s(self, machine: int) -> float:
        """Return the time of one microbatch to the machine of the plan that is nearest."""
        size = float(self._cost.boundary_bytes.max())
        others = [other for other in self._layout.machines if other != machine]
        return min(self._cost.network.transfer_s(machine, other, size) for other in others)

    def _why_out(self, machine: int) -> str:
        if self._timeline is None:
            return f"no machine's speed was measured, and the plan has work for {len(self._layout.machines)} of them"
        if self._strategy in _SIMPLE and self._pools is None:
            return f"there is no work for more than {len(self._layout.machines)} machines, and the others are faster"
        if self._strategy in _SIMPLE:
            return f"the job asks for {self._asked()}, and the others are faster"
        with_it = best_with(Problem(self._cost, self._pools, self._members), self._layout, machine)
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
        if step_s * _NOTICEABLE < now_s:
            return (
                "this strategy found no place for it; "
                f"with it a step would take {seconds_text(step_s)} instead of {seconds_text(now_s)}"
            )
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
