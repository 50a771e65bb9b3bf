"""Owners share a deployment evenly, and no owner waits forever."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import count
from random import Random

import pytest
from tests.platform.inference.scheduler.world import World, generation

from share_compute.inference.scheduler.fair_queue import FairQueue
from share_compute.inference.scheduler.limits import SchedulerLimits
from share_compute.inference.scheduler.live_sequence import LiveSequence

LIMITS = SchedulerLimits(
    window_tokens=400, kv_tokens=1200, max_sequences=8, step_tokens=32, stages=2, max_queued=200, run_ahead=1
)


def loaded(
    kinds: dict[str, tuple[int, int, int]], steps: int, limits: SchedulerLimits = LIMITS
) -> Counter[str]:
    """Keep every owner's queue filled; return the positions computed for each after the first steps.

    Args:
        kinds: by owner, how many sequences it has at a time, their prompts' length, and their most tokens.
        steps: how long.
        limits: of the scheduler.
    """
    world, numbers, draw = World(limits), count(), Random(5)
    at_first: Counter[str] = Counter()
    while len(world.steps) < steps:
        there = Counter(world.requested[sequence].owner for sequence in world.running)
        for owner, (streams, prompt, most) in kinds.items():
            for _ in range(streams - there[owner]):
                tokens = tuple(draw.choices(range(1000), k=prompt))
                world.submit(generation(next(numbers), tokens, most, owner))
        world.go_on()
        if len(world.steps) < steps // 4:
            at_first = world.computed.copy()
    world.check()
    return world.computed - at_first


@pytest.mark.parametrize(
    "kinds",
    [
        {"ann": (20, 20, 20), "bob": (20, 20, 20)},
        {"ann": (60, 20, 20), "bob": (8, 20, 20)},
        {"ann": (12, 200, 4), "bob": (12, 4, 60)},
        {"ann": (12, 60, 100), "bob": (40, 5, 3)},
    ],
    ids=["alike", "many and few", "long prompts and long answers", "large and small"],
)
def test_two_owners_get_the_same_within_a_tenth(kinds: dict[str, tuple[int, int, int]]) -> None:
    computed = loaded(kinds, 700)
    assert min(computed.values()) >= 0.9 * max(computed.values()), computed


def test_who_stayed_away_has_saved_nothing_and_who_leaves_keeps_the_count() -> None:
    world = World(LIMITS)
    numbers = count()

    def ask(owner: str, num: int) -> None:
        for _ in range(num):
            sequence = next(numbers)
            world.submit(generation(sequence, (sequence,) * 10, 20, owner))

    ask("ann", 40)
    while world.computed["ann"] < 500:
        world.go_on()
    before = world.computed.copy()
    ask("bob", 40)
    while world.computed["bob"] < 300:
        world.go_on()
    assert 200 < world.computed["ann"] - before["ann"] < 600
    world.finish()


def test_a_large_sequence_is_passed_by_some_and_then_all_wait() -> None:
    world = World(replace(LIMITS, window_tokens=1000, kv_tokens=1000, max_sequences=16))
    numbers, draw = count(1), Random(3)

    def small_ones() -> list[int]:
        """Keep more sequences waiting than fit; return those that have begun by now."""
        for _ in range(20 - len(world.running)):
            sequence = next(numbers)
            world.submit(generation(sequence, (sequence,) * 10, draw.randint(20, 90), "ann"))
        world.go_on()
        return [opening.sequence for step in world.steps for opening in step.opens]

    while world.scheduler.stats().kv_tokens_used < 900:
        before = small_ones()
    world.submit(generation(0, (0,) * 300, 600, "bob"))
    while 0 not in (began := small_ones()):
        pass
    assert began.index(0) - len(before) == 16
    world.finish()


def test_who_leaves_for_a_moment_keeps_the_count() -> None:
    queue = FairQueue()

    def arrive(sequence: int, owner: str) -> LiveSequence:
        live = LiveSequence(generation(sequence, (1,) * 10, owner=owner), sequence, 8, 128)
        queue.add(live)
        return live

    def serve(live: LiveSequence, tokens: int) -> None:
        live.sent = tokens
        queue.charge(live)

    ann, bob = arrive(0, "ann"), arrive(1, "bob")
    serve(ann, 90)
    serve(bob, 40)
    queue.end(ann)
    arrive(2, "ann")
    arrive(3, "cid")
    assert [owner.served_tokens for owner in queue.in_turn()] == [40, 40, 90]
    assert [owner.waiting[0].id for owner in queue.in_turn()] == [1, 3, 2]
