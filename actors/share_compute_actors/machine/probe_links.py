"""Measures the latency of a link by calls with empty payloads, and its bandwidth by calls with large payloads."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from share_compute.topology import Link

Payload = npt.NDArray[np.uint8]
Echo = Callable[[Payload], Any]
"""A function that sends a payload ``[bytes]`` to the peer and waits for its short answer."""

_SMALL_CALLS = 8
_LARGE_CALLS = 3
_LARGE_BYTES = 4 * 2**20
_BUDGET_S = 0.8
"""Time in seconds after which the large payload is not sent again. On a slow link, one call is accurate enough."""


def measure_link(
    source: str, target: str, echo: Echo, clock: Callable[[], float] = time.perf_counter
) -> Link:
    """Return the latency (half a round trip) and the bandwidth of the link from ``source`` to ``target``.

    Args:
        source: contributor id of this machine.
        target: contributor id of the peer.
        echo: sends a payload to the peer and waits for the answer.
        clock: returns the time in seconds.
    """
    nothing = np.empty(0, dtype=np.uint8)
    echo(nothing)  # the first call opens the connection
    round_trip_s = min(_timed(echo, nothing, clock) for _ in range(_SMALL_CALLS))
    payload = np.zeros(_LARGE_BYTES, dtype=np.uint8)
    begin = clock()
    best_s = float("inf")
    for _ in range(_LARGE_CALLS):
        best_s = min(best_s, _timed(echo, payload, clock))
        if clock() - begin > _BUDGET_S:
            break
    # On a fast link the difference may be tiny or negative, because of noise. So at least half of the call's time
    # counts as transfer.
    transfer_s = max(best_s - round_trip_s, best_s / 2)
    return Link(source, target, round_trip_s / 2, _LARGE_BYTES / transfer_s)


def _timed(echo: Echo, payload: Payload, clock: Callable[[], float]) -> float:
    begin = clock()
    echo(payload)
    return clock() - begin
