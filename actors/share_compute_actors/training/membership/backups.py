"""Selects the backup members of shards that only one machine holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence

from share_compute.protocol.membership import Worker
from share_compute.topology import Topology


def backups_of(
    stages: Sequence[Sequence[Worker]],
    topology: Topology,
    cramped: Container[Worker] = (),
    present: Mapping[Worker, Worker] | None = None,
    *,
    shares_optimizer: bool = False,
) -> dict[Worker, Worker]:
    """Choose a backup member for each member that alone holds some state; return the backup members by primary.

    In a stage whose members keep shares of the optimizer's state, the next member backs up each share, so that no
    member keeps two copies of one stage. Members are ordered by kind of device.

    A member that no other member can reach gets no backup. Candidates are compared by these criteria, in order:

    1. The candidate is not known to lack space for a copy.
    2. Its device is of the same kind as the primary's. Only then are both members' updates bit-identical.
    3. It already keeps a copy of the shard.
    4. The primary's gradient reaches it soonest, assuming that all copies that it keeps share the link equally.
    5. Its machine has the most memory.

    Args:
        stages: members of each stage.
        topology: machines of the members. An unmeasured link is assumed to be as slow as the slowest measured link.
        cramped: members that lacked the space for a copy. They become backup members only if no other member can.
        present: backup members of the previous epoch, by primary; only for primaries that keep their shards.
        shares_optimizer: whether each member of a stage keeps a share of the optimizer's state.
    """
    present = present or {}
    dead = {frozenset(pair) for pair in topology.cut_off}
    rates = {(link.source, link.target): link.bytes_per_s for link in topology.links if not link.is_dead}
    slowest = min(rates.values(), default=1.0)
    kept: Counter[Worker] = Counter()
    backups: dict[Worker, Worker] = {}
    members = [worker for stage in stages for worker in stage]
    for stage in stages if shares_optimizer else ():
        if len(stage) > 1:
            ring = sorted(stage, key=lambda worker: topology[worker].device.kind)
            backups |= dict(zip(ring, [*ring[1:], ring[0]], strict=True))
    for primary in (stage[0] for stage in stages if len(stage) == 1):
        kind = topology[primary].device.kind

        def cost(
            worker: Worker, primary: Worker = primary, kind: str = kind
        ) -> tuple[bool, bool, bool, float, int, Worker]:
            machine = topology[worker]
            is_new = present.get(primary) != worker
            seconds_per_byte = (kept[worker] + 1) / rates.get((primary, worker), slowest)
            is_unlike = machine.device.kind != kind
            return worker in cramped, is_unlike, is_new, seconds_per_byte, -machine.memory_bytes, worker

        others = [worker for worker in members if worker != primary and {worker, primary} not in dead]
        if others:
            backups[primary] = min(others, key=cost)
            kept[backups[primary]] += 1
    return backups
