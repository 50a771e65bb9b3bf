"""Who keeps a copy of what only one machine holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence

from share_compute.protocol.roster import Worker
from share_compute.topology import Topology


def buddies_of(
    pools: Sequence[Sequence[Worker]],
    topology: Topology,
    cramped: Container[Worker] = (),
    present: Mapping[Worker, Worker] | None = None,
) -> dict[Worker, Worker]:
    """Return by each member that is alone in its pool who keeps a copy of its shard; none where nobody reaches it.

    A buddy is a member that has room, as far as it is known, and of those one on a device of the same kind if there is
    one: only there updates have the same bits. Of those it is the one that keeps a copy of the shard already, else the
    one that a gradient reaches soonest, when it shares its link with what else it follows.

    Args:
        pools: members of each pool.
        topology: their machines; links that were not measured count as the slowest that was.
        cramped: those that had no room for a copy; they are asked again where nobody else is there.
        present: buddies of before, by owners whose shards stay the same.
    """
    present = present or {}
    dead = {frozenset(pair) for pair in topology.cut_off}
    rates = {(link.source, link.target): link.bytes_per_s for link in topology.links if not link.is_dead}
    slowest = min(rates.values(), default=1.0)
    follows: Counter[Worker] = Counter()
    buddies: dict[Worker, Worker] = {}
    members = [worker for pool in pools for worker in pool]
    for owner in (pool[0] for pool in pools if len(pool) == 1):
        kind = topology[owner].device.kind

        def cost(
            worker: Worker, owner: Worker = owner, kind: str = kind
        ) -> tuple[bool, bool, bool, float, int, Worker]:
            machine = topology[worker]
            is_new = present.get(owner) != worker
            seconds_per_byte = (follows[worker] + 1) / rates.get((owner, worker), slowest)
            is_unlike = machine.device.kind != kind
            return worker in cramped, is_unlike, is_new, seconds_per_byte, -machine.memory_bytes, worker

        others = [worker for worker in members if worker != owner and {worker, owner} not in dead]
        if others:
            buddies[owner] = min(others, key=cost)
            follows[buddies[owner]] += 1
    return buddies
