"""Detects that the gateway or the Ray head no longer answers, though its process runs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Literal

from share_compute_api.cluster.gateway import CallFailed

PING_S = 5.0
"""Period of pings, and the time within which each must be answered."""
MOST_MISSED = 6
"""Unanswered pings in a row after which a process counts as unresponsive."""


async def unresponsive(
    ping_gateway: Callable[[float], Awaitable[object]],
    ping_head: Callable[[float], Awaitable[object]],
    period_s: float = PING_S,
) -> Literal["gateway", "head"]:
    """Return the first of the two that left `MOST_MISSED` pings in a row unanswered.

    Pings are counted, not seconds: a control plane that was suspended itself has missed one, however long that was.

    Args:
        ping_gateway: asks the gateway; takes the seconds within which it must answer.
        ping_head: asks the head, through the gateway.
        period_s: time between pings.
    """
    gateway_missed = head_missed = 0
    while True:
        gateway_answers, head_answers, _ = await asyncio.gather(
            _is_answered(ping_gateway(period_s)), _is_answered(ping_head(period_s)), asyncio.sleep(period_s)
        )
        gateway_missed = 0 if gateway_answers else gateway_missed + 1
        if gateway_answers:  # else nothing is known of the head
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
