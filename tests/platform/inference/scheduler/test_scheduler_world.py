"""The scheduler on simulated stages: whatever fails, every sequence gets exactly the tokens of the reference."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from tests.platform.inference.scheduler.world import World, drawn_generations, drawn_limits

SCHEDULES = 120


def run(seed: int) -> World:
    """Run one drawn schedule: requests, cancellations and deaths at any time."""
    draw = Random(seed)
    world = World(drawn_limits(draw), seed)
    requests = draw.randint(1, 25)
    deaths, cancels = draw.choice([0, 0, 1, 3]), draw.choice([0, 0, 2, 8])
    submits_often = draw.choice([0.02, 0.2])
    while requests:
        chance = draw.random()
        if chance < submits_often:
            requests -= 1
            world.submit(*drawn_generations(draw, len(world.requested), world.scheduler.limits))
        elif chance < submits_often + 0.01 and deaths:
            deaths -= 1
            world.reform(drawn_limits(draw))
        elif chance < submits_often + 0.03 and cancels and world.requested:
            cancels -= 1
            world.cancel(draw.choice(list(world.requested)))
        else:
            world.go_on()
    world.finish()
    return world


def test_drawn_schedules_give_the_tokens_of_the_reference() -> None:
    met: Counter[str] = Counter()
    for seed in range(SCHEDULES):
        world = run(seed)
        totals = world.scheduler.stats().totals
        met["prefix hits"] += totals.prefix_hits
        met["wasted"] += totals.wasted_tokens
        met["preempted"] += totals.preempted
        met["grown"] += sum(len(step.grows) for step in world.steps)
        met["busy"] += world.num_busy
        met["epochs"] += world.scheduler.epoch
        met.update(getattr(end, "reason", "failed") for end in world.ends.values())
    often = ("prefix hits", "wasted", "preempted", "grown", "busy", "epochs", "stop", "length", "cancelled")
    assert min(met[what] for what in often) > 40, met
    assert met["failed"] > 5


@pytest.mark.slow
@pytest.mark.thorough
def test_many_more_schedules() -> None:
    for seed in range(SCHEDULES, 20 * SCHEDULES):
        run(seed)


def test_the_same_calls_give_the_same_steps() -> None:
    assert run(11).steps == run(11).steps
