"""Limits the rate of transfers with a token bucket. This module reads no clock and does not wait."""

from __future__ import annotations

from dataclasses import dataclass

BURST_BYTES = 64 * 1024
"""Default number of bytes that may be transferred at once after a pause."""
LEAST_BYTES_PER_S = 8_000
"""Lowest rate that an owner may choose, in bytes per second."""


@dataclass(frozen=True, slots=True)
class TokenBucket:
    """Token bucket in the form of the virtual scheduling algorithm (ITU-T I.371, generic cell rate algorithm).

    The state is one number: the time at which all transfers so far would have ended at exactly the limited rate. A
    transfer may begin when at most ``burst_bytes`` of earlier transfers are not due yet. Its own size does not matter,
    so a transfer that is larger than the burst begins at once after a pause, and later transfers wait for it.

    The transfers that begin in any ``T`` seconds have at most
    ``burst_bytes + T * bytes_per_s`` bytes, plus the bytes of the last one of them.
    """

    bytes_per_s: float
    burst_bytes: int = BURST_BYTES

    def take(self, due_s: float, now_s: float, size_bytes: int) -> tuple[float, float]:
        """Reserve a transfer, and return the next state and the seconds to wait before the transfer begins.

        Transfers begin in the order of their reservations.

        Args:
            due_s: the state, in seconds on the clock of ``now_s``; ``-inf`` at first.
            now_s: the current time, in seconds on any monotonic clock.
            size_bytes: size of the transfer.
        """
        wait_s = max(0.0, due_s - self.burst_bytes / self.bytes_per_s - now_s)
        return max(due_s, now_s) + size_bytes / self.bytes_per_s, wait_s
