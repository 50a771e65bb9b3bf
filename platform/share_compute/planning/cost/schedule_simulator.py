"""Event simulation of one training step, cell by cell.

A cell is a forward or a backward of one microbatch on one member. Each member runs its cells in the order of
`share_compute.protocol.schedule`, as soon as their inputs arrive.

- A link carries one tensor at a time in each direction. A tensor occupies the link for size / bandwidth, but not during
  the latency. Both directions work at the same time, and sending does not delay computing.
- If the machines of one host together use more threads than the host has, the machines that compute at the same moment
  share its threads in proportion to the threads that each uses alone (processor sharing, Kleinrock 1967). Other threads
  and processes always take `SIDE_THREADS` per machine. On a shared core, cells need up to `CROWDED_WORK` times as much
  processor time. Hosts with enough threads for the layout's machines do not slow them down.
- Members of a stage start to sum gradients when all of them are in their last backward. They sum the last bucket after
  these backwards.
- If backups are on, the only member of a stage sends its gradient to another machine of the layout over the best link
  before its update. A stage with all layers has no backup.
- The first and the last stage exchange the gradients of tied weights.
- The update waits for a message from each other stage, which takes one latency. The fixed work of a member in each step
  (``call`` in the formula of `share_compute.planning.cost.cost`) follows the update.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Literal, NamedTuple

from share_compute.models.profiles.profile import FLOAT_BYTES
from share_compute.planning.cost.cost import TrainingCost
from share_compute.planning.cost.layout import Layout, StageLayout
from share_compute.planning.network.network import transfer_s
from share_compute.protocol.schedule import Action, one_forward_one_backward

SIDE_THREADS = 0.14
"""Processors that each machine on a crowded host uses beside its computations.

Measured while three members trained on two cores: 0.07 in a member's transport threads, 0.02 in its agent and raylet,
and 0.15 in all processes of the server.
"""
CROWDED_WORK = 1.25
"""Ratio of a cell's processor time, while at least one thread more than the cores wants to run, to that on a core of
its own. With a part of a thread more, the ratio is between 1 and this one.

Measured as 1.2 to 1.33 in the same training. Threads that take turns on a core replace each other's data in its caches;
three processes that only compute, without messages, reach 1.11.
"""


class SimulatedCell(NamedTuple):
    """One cell (a forward or a backward of one microbatch), with its start and end in seconds."""

    stage: int
    member: int
    """Index of the member in the stage."""
    microbatch: int
    kind: Literal["F", "B"]
    start_s: float
    stop_s: float


class SimulatedTransfer(NamedTuple):
    """One transfer of a tensor between two members."""

    microbatch: int
    kind: Literal["F", "B"]
    """Kind of tensor: F for an activation, B for the gradient of an activation."""
    source: tuple[int, int]
    """Sender, as (index of the stage, index of the member in the stage)."""
    target: tuple[int, int]
    """Receiver, as (index of the stage, index of the member in the stage)."""
    start_s: float
    """Time when the link begins to carry the tensor."""
    stop_s: float
    """Time of arrival."""


@dataclass(frozen=True, slots=True)
class StepTimeline:
    """One simulated step. All times are in seconds from its start."""

    step_s: float
    """Time until the last member has done its update and its fixed work; infinite if the step needs a dead link."""
    cells: tuple[SimulatedCell, ...]
    """Cells, ordered by stage, member and time."""
    busy_fractions: dict[int, float]
    """Fraction of the step that a machine spends on cells and on its weight update, by its index in the topology."""
    updates: dict[int, tuple[float, float]] = field(default_factory=dict)
    """(start, end) of each machine's weight update with the fixed work after it, by index in the topology."""
    transfers: tuple[SimulatedTransfer, ...] = ()
    """Transfers between stages; empty unless requested."""
    slowdowns: dict[int, float] = field(default_factory=dict)
    """Ratio of a machine's cell times to its cell times on unshared cores, by its index in the topology.

    Empty if every host has enough threads for its machines.
    """


def simulate_step(cost: TrainingCost, layout: Layout, *, with_transfers: bool = False) -> StepTimeline:
    """Simulate one step of a layout.

    Args:
        cost: cost model of the job on its machines.
        layout: stages in pipeline order; each stage's shares add up to the step's microbatches.
        with_transfers: whether to record transfers between stages.
    """
    transfers: list[SimulatedTransfer] | None = [] if with_transfers else None
    pipeline = _Pipeline(cost, layout, transfers)
    hosts = _crowded_hosts(cost, layout)
    if hosts:
        pipeline.run_on(hosts)
    else:
        pipeline.run()
    prepared = [
        _prepared_s(cost, stage, members) + cost.log_s(stage, layout.machines)
        for stage, members in zip(layout.stages, pipeline.members, strict=True)
    ]
    updates = _update_s(cost, layout, _exchange_tied(cost, layout, prepared))
    step_s = max(stop for stop, _ in updates.values())
    busy = {
        member.machine: (
            sum(cell.stop_s - cell.start_s for cell in member.cells) + updates[member.machine][1]
        )
        for members in pipeline.members
        for member in members
    }
    return StepTimeline(
        step_s=step_s,
        cells=tuple(cell for members in pipeline.members for member in members for cell in member.cells),
        busy_fractions={
            machine: time / step_s if 0 < step_s < math.inf else 0.0 for machine, time in busy.items()
        },
        updates={
            machine: (done_s - takes_s - float(cost.call_s[machine]), done_s)
            for machine, (done_s, takes_s) in updates.items()
        },
        transfers=tuple(transfers or ()),
        slowdowns={
            member.machine: sum(cell.stop_s - cell.start_s for cell in member.cells) / alone_s
            for members in pipeline.members
            for member in members
            if hosts and 0 < (alone_s := sum(map(member.takes_s, member.actions))) < math.inf
        },
    )


@dataclass(slots=True)
class _Member:
    """State of one member in the simulation."""

    stage: int
    place: int
    machine: int
    forward_s: float
    backward_s: float
    actions: list[Action]
    free_s: float = 0.0
    """Time when the member completed its latest cell; 0 before the first."""
    cells: list[SimulatedCell] = field(default_factory=list)

    @property
    def next(self) -> Action | None:
        """The action that the member computes now or next; None after the last one."""
        return self.actions[len(self.cells)] if len(self.cells) < len(self.actions) else None

    def takes_s(self, action: Action) -> float:
        """Return the seconds that an action takes on unshared cores."""
        return self.forward_s if action.kind == "F" else self.backward_s


@dataclass(slots=True)
class _Host:
    """A host whose computing members share its threads, in proportion to the threads that each uses when alone."""

    threads: float
    side_threads: float = 0.0
    """Processors in use beside the computations."""
    wants: dict[int, int] = field(default_factory=dict)
    """Number of threads that each machine uses if it computes alone, by machine."""
    left_s: dict[int, float] = field(default_factory=dict)
    """Remaining seconds of each computing machine's current cell, at the speed of unshared cores."""
    at_s: float = 0.0

    @property
    def rate(self) -> float:
        """Current speed of the computing members, as a share of their speed on unshared cores."""
        if not self.left_s:
            return 1.0
        wanted = sum(self.wants[machine] for machine in self.left_s) + self.side_threads
        if wanted <= self.threads:
            return 1.0
        work = 1 + (CROWDED_WORK - 1) * min(1.0, wanted - self.threads)
        return self.threads / wanted / work

    @property
    def is_crowded(self) -> bool:
        """Whether the machines together compute with more threads than the host has."""
        return sum(self.wants.values()) > self.threads

    def advance(self, now_s: float) -> None:
        """Advance the cells in progress to the time ``now_s``."""
        done_s = (now_s - self.at_s) * self.rate
        self.left_s = {machine: left_s - done_s for machine, left_s in self.left_s.items()}
        self.at_s = now_s


class _Pipeline:
    """Simulates all cells and transfers of a step."""

    def __init__(self, cost: TrainingCost, layout: Layout, transfers: list[SimulatedTransfer] | None) -> None:
        self._cost = cost
        self._transfers = transfers
        self._count = cost.workload.microbatches
        self.members = [list(_members(cost, layout, index)) for index in range(len(layout.stages))]
        self._starts = [stage.start for stage in layout.stages]
        # `_owners` (computing members) and `_arrived` (arrival times of inputs) are indexed by stage and microbatch.
        self._owners = [
            [member for member, share in zip(members, stage.shares, strict=True) for _ in range(share)]
            for members, stage in zip(self.members, layout.stages, strict=True)
        ]
        blank = [[math.nan] * self._count for _ in layout.stages]
        self._arrived = {"F": blank, "B": [list(row) for row in blank]}
        self._arrived["F"][0] = [0.0] * self._count
        self._arrived["B"][-1] = [
            0.0
        ] * self._count  # the last stage computes the loss, so it receives no gradient
        self._link_free_s: dict[tuple[int, int], float] = {}

    def run(self) -> None:
        """Simulate every cell as early as its input allows."""
        waiting = deque(member for members in self.members for member in members)
        while waiting:
            member = waiting.popleft()
            while (action := member.next) is not None and (begin_s := self._begin_s(member)) is not None:
                woken = self._complete(member, action, begin_s, begin_s + member.takes_s(action))
                if woken is not None:
                    waiting.append(woken)
        assert all(member.next is None for members in self.members for member in members)

    def run_on(self, hosts: Sequence[_Host]) -> None:
        """Simulate every cell as early as its input allows, with shared threads on each host."""
        host_of = {machine: host for host in hosts for machine in host.wants}
        by_machine = {member.machine: member for members in self.members for member in members}
        events: list[tuple[float, int, _Member]] = []
        numbers = count()
        current: dict[int, int] = {}  # number of the valid event, by machine; earlier events are outdated

        def plan(at_s: float, member: _Member) -> None:
            current[member.machine] = number = next(numbers)
            heappush(events, (at_s, number, member))

        def plan_host(host: _Host) -> None:
            for machine, left_s in host.left_s.items():
                plan(host.at_s + max(0.0, left_s) / host.rate, by_machine[machine])

        def plan_begin(member: _Member) -> None:
            if (begin_s := self._begin_s(member)) is not None:
                plan(begin_s, member)

        began_s: dict[int, float] = {}
        for member in by_machine.values():
            plan_begin(member)
        while events:
            now_s, number, member = heappop(events)
            if current[member.machine] != number:
                continue
            host, action = host_of[member.machine], member.next
            assert action is not None
            host.advance(now_s)
            if member.machine not in host.left_s:
                began_s[member.machine] = now_s
                host.left_s[member.machine] = member.takes_s(action)
            else:
                del host.left_s[member.machine]
                woken = self._complete(member, action, began_s[member.machine], now_s)
                plan_begin(member)
                if woken is not None:
                    plan_begin(woken)
            plan_host(host)
        assert all(member.next is None for member in by_machine.values())

    def _begin_s(self, member: _Member) -> float | None:
        """Return the time when a member can begin its next cell.

        Return None if no cell is left, or if the arrival time of the cell's input is unknown.
        """
        action = member.next
        if action is None:
            return None
        arrived_s = self._arrived[action.kind][member.stage][action.microbatch]
        return None if math.isnan(arrived_s) else max(member.free_s, arrived_s)

    def _complete(self, member: _Member, action: Action, start_s: float, stop_s: float) -> _Member | None:
        """Record one cell and send its output; return the receiver if the receiver was waiting for it, else None."""
        forward = action.kind == "F"
        member.free_s = stop_s
        cell = SimulatedCell(member.stage, member.place, action.microbatch, action.kind, start_s, stop_s)
        member.cells.append(cell)
        target_stage = member.stage + (1 if forward else -1)
        if not 0 <= target_stage < len(self.members):
            return None
        target = self._owners[target_stage][action.microbatch]
        cut = self._starts[target_stage if forward else member.stage]
        sent_s, arrival_s = self._send(member.machine, target.machine, cut, member.free_s)
        if self._transfers is not None:
            ends = (member.stage, member.place), (target.stage, target.place)
            self._transfers.append(
                SimulatedTransfer(action.microbatch, action.kind, *ends, sent_s, arrival_s)
            )
        self._arrived[action.kind][target_stage][action.microbatch] = arrival_s
        return target if target.next == action else None

    def _send(self, source: int, target: int, cut: int, at_s: float) -> tuple[float, float]:
        """Carry a tensor over a link; return (time when the link begins to carry it, time of arrival)."""
        latency_s, bytes_per_s = self._cost.network.link(source, target)
        carried_s = transfer_s(0.0, bytes_per_s, float(self._cost.link_bytes[cut]))
        start_s = max(at_s, self._link_free_s.get((source, target), 0.0))
        free_s = start_s + carried_s
        self._link_free_s[source, target] = free_s
        return start_s, free_s + latency_s


def _crowded_hosts(cost: TrainingCost, layout: Layout) -> list[_Host]:
    """Return the hosts of a layout's machines; an empty list if every host has enough threads for its machines."""
    if not cost.host_threads:
        return []
    shared: dict[str, _Host] = {host: _Host(threads) for host, threads in cost.host_threads.items()}
    hosts: list[_Host] = []
    for machine in layout.machines:
        contributor = cost.topology.contributors[machine]
        threads = contributor.threads
        if cost.kinds[machine] == "cpu" and contributor.host in shared:
            host = shared[contributor.host]
            host.wants[machine] = threads
            host.side_threads += SIDE_THREADS
        else:
            hosts.append(_Host(threads, wants={machine: threads}))
    used = [host for host in shared.values() if host.wants]
    return [*used, *hosts] if any(host.is_crowded for host in used) else []


def _members(cost: TrainingCost, layout: Layout, index: int) -> Iterator[_Member]:
    shares = [stage.shares for stage in layout.stages]
    stage = layout.stages[index]
    for place, machine in enumerate(stage.members):
        yield _Member(
            stage=index,
            place=place,
            machine=machine,
            forward_s=float(cost.forward_s[machine, stage.stop] - cost.forward_s[machine, stage.start]),
            backward_s=float(cost.backward_s[machine, stage.stop] - cost.backward_s[machine, stage.start]),
            actions=one_forward_one_backward(shares, index, place),
        )


def _prepared_s(cost: TrainingCost, stage: StageLayout, members: list[_Member]) -> float:
    """Return the time when the gradient sums of a stage are complete."""
    done_s = max(member.free_s for member in members)
    sum_s = cost.sum_s(stage) - cost.gather_s(stage)
    if sum_s == 0:
        return done_s
    started_s = max(member.cells[-1].start_s for member in members)
    return max(started_s + sum_s, done_s + sum_s / cost.buckets(stage))


def _exchange_tied(cost: TrainingCost, layout: Layout, prepared: list[float]) -> list[float]:
    """Return the time when each stage has its gradients, including the exchange of tied weights' gradients."""
    if not (cost.profile.tied and cost.profile.tied_trains) or len(prepared) == 1:
        return prepared
    size = cost.profile.tied * FLOAT_BYTES
    # The first member of the first (last) stage sends to all members of the last (first) stage, over separate links.
    ends = ((layout.stages[0], layout.stages[-1]), (layout.stages[-1], layout.stages[0]))
    sent_s = [
        max(cost.network.transfer_s(source.members[0], target, size) for target in other.members)
        for source, other in ends
    ]
    first, last = prepared[0], prepared[-1]
    return [max(first, last + sent_s[1]), *prepared[1:-1], max(last, first + sent_s[0])]


def _update_s(cost: TrainingCost, layout: Layout, prepared: list[float]) -> dict[int, tuple[float, float]]:
    """Return (time when a machine ends the step, seconds of its weight update alone) by machine.

    A machine waits for a message from the first member of each other stage, which takes one latency. In each region,
    only the latest stage other than the machine's own matters. So it is enough to keep the two latest stages of each
    region.
    """
    latest: dict[int, list[tuple[float, int]]] = {}
    for index, stage in enumerate(layout.stages):
        latest.setdefault(int(cost.network.region[stage.members[0]]), []).append((prepared[index], index))
    latest = {region: sorted(times)[-2:] for region, times in latest.items()}
    updates: dict[int, tuple[float, float]] = {}
    for index, stage in enumerate(layout.stages):
        updated = cost.updated_parameters(stage.start, stage.stop, len(stage.members))
        for machine in stage.members:
            here = int(cost.network.region[machine])
            received_s = [
                time + float(cost.network.latency_s[there, here])
                for there, times in latest.items()
                for time, other in times
                if other != index
            ]
            takes_s = updated * float(cost.update_s_per_parameter[machine])
            started_s = max(prepared[index], *received_s, 0.0)
            done_s = started_s + takes_s + float(cost.call_s[machine]) + cost.gather_s(stage)
            updates[machine] = (done_s, takes_s)
    return updates
