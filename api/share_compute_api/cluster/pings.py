"""Detects that the gateway or the Ray head runs but no longer answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Literal

from share_compute_api.cluster.gateway import CallFailed

PING_S = 5.0
"""Time between two pings, and time limit for each answer, in seconds."""
MOST_MISSED = 6
"""Number of consecutive unanswered pings after which a process counts as unresponsive."""


async def unresponsive(
    ping_gateway: Callable[[float], Awaitable[object]],
    ping_head: Callable[[float], Awaitable[object]],
    period_s: float = PING_S,
) -> Literal["gateway", "head"]:
    """Ping the gateway and the head until one misses `MOST_MISSED` consecutive pings; return "gateway" or "head".

    Pings are counted instead of seconds, so that a suspension of the control plane itself counts as at most one missed
    ping.

    Args:
        ping_gateway: pings the gateway; its argument is the time limit in seconds.
        ping_head: pings the head through the gateway; its argument is the time limit in seconds.
        period_s: time between pings, in seconds.
    """
    gateway_missed = head_missed = 0
    while True:
        gateway_answers, head_answers, _ = await asyncio.gather(
            _is_answered(ping_gateway(period_s)), _is_answered(ping_head(period_s)), asyncio.sleep(period_s)
        )
        gateway_missed = 0 if gateway_answers else gateway_missed + 1
        if gateway_answers:  # without an answer from the gateway, the head's state is unknown
            head_missed = 0 if head_answers else head_missed + 1
        if gateway_missed >= MOST_MISSED:
            return "gateway"
        if head_missed >= MOST_MISSED:
            return "head"


async def _is_answered(ping: Awaitable[object]) -> bool:
    try:
        return bool(await ping)
    except CallFailed:
        return False
