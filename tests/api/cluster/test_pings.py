"""Pings distinguish a hanging gateway from a hanging head; a control plane that was suspended blames neither."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from itertools import chain, cycle, repeat

import pytest

from share_compute_api.cluster.calls import CallFailure
from share_compute_api.cluster.gateway import CallFailed
from share_compute_api.cluster.pings import MOST_MISSED, unresponsive

Ping = Callable[[float], Awaitable[object]]


class Answers:
    """Answers pings in turn: true, false, or None for no answer."""

    def __init__(self, answers: Iterable[bool | None]) -> None:
        self._answers = iter(answers)
        self.num_calls = 0

    async def __call__(self, timeout_s: float) -> bool:
        self.num_calls += 1
        answer = next(self._answers)
        if answer is None:
            await asyncio.sleep(timeout_s)
            raise CallFailed(CallFailure(kind="no_answer", message="no answer to ping"))
        return answer


def first(gateway: Ping, head: Ping) -> str:
    async def watch() -> str:
        async with asyncio.timeout(60):
            return await unresponsive(gateway, head, period_s=0.001)

    return asyncio.run(watch())


@pytest.mark.parametrize("answer", [None, False])
def test_a_head_that_hangs_or_is_dead_to_ray_is_noticed(answer: bool | None) -> None:
    head = Answers(chain([True] * 3, repeat(answer)))
    assert first(Answers(cycle([True])), head) == "head"
    assert head.num_calls == 3 + MOST_MISSED


def test_a_gateway_that_hangs_is_noticed_and_the_head_is_not_blamed_for_it() -> None:
    gateway = Answers(chain([True] * 3, repeat(None)))
    assert first(gateway, Answers(chain([True] * 3, repeat(None)))) == "gateway"
    assert gateway.num_calls == 3 + MOST_MISSED


def test_pings_that_are_missed_now_and_then_do_no_harm() -> None:
    now_and_then = [*([None] * (MOST_MISSED - 1)), True] * 4
    gateway = Answers(chain(now_and_then, repeat(None)))
    assert first(gateway, Answers(cycle([True]))) == "gateway"
    assert gateway.num_calls == len(now_and_then) + MOST_MISSED


def test_a_control_plane_that_was_suspended_has_missed_one_ping() -> None:
    """This holds however long it was stopped: the ping's deadline and its period are then over at once."""
    slept = Answers(chain([True, None, True], repeat(None)))
    assert first(slept, Answers(cycle([True]))) == "gateway"
    assert slept.num_calls == 3 + MOST_MISSED
