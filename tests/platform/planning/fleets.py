"""Seeded fleets on which jobs are planned from end to end: unequal machines, scarce memory, one to three regions."""

from __future__ import annotations

import random

from tests.platform.planning.models import GIB, machine

from share_compute.topology import Link, Topology


def fleet(seed: int, count: int) -> Topology:
    """Return the first ``count`` machines of a seed; a larger count does not change them."""
    draw = random.Random(seed)
    regions, rate, latency_s = (
        draw.choice((1, 1, 2, 3)),
        draw.choice((1e6, 1e7, 1e8, 1e9)),
        draw.choice((1e-4, 1e-3, 2e-2)),
    )
    machines, region = [], []
    for index in range(count):
        machines.append(
            machine(
                f"m{index}",
                draw.choice((50.0, draw.uniform(20, 60), draw.uniform(5, 90))),
                memory_bytes=int(draw.choice((0.7, 1.5, 3, 8)) * GIB),
                kind="cuda" if draw.random() < 0.15 else "cpu",
            )
        )
        region.append(draw.randrange(regions))
    links = []
    for one in range(count):
        for other in range(one + 1, count):
            far = 1 if region[one] == region[other] else 8
            links.append(Link(f"m{one}", f"m{other}", latency_s * far, rate / far))
    return Topology(tuple(machines), tuple(links))
