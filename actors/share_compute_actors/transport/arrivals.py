"""Tracks the tensors that arrive from one sender, to detect lost tensors."""

from __future__ import annotations

_OVERTAKEN_S = 0.5
"""Time limit for the first missing tensor to arrive, in seconds; after that, the tensor counts as lost."""


class Arrivals:
    """Records which tensors arrived over one link in one epoch; the sender numbers them from 1."""

    def __init__(self) -> None:
        self._whole = 0
        """Number up to which all tensors have arrived."""
        self._ahead: set[int] = set()
        """Numbers of tensors that arrived although an earlier one is still missing."""
        self._sent = 0
        """Number of the last tensor that is known to have been sent."""
        self._missed_since_s: float | None = None

    def came(self, number: int, now_s: float) -> None:
        """Record that the tensor with this number arrived."""
        if number > self._whole:
            self._ahead.add(number)
        self.expect(number, now_s)

    def expect(self, sent: int, now_s: float) -> None:
        """Record that all tensors up to this number were sent."""
        self._sent = max(self._sent, sent)
        before = self._whole
        while self._whole + 1 in self._ahead:
            self._whole += 1
            self._ahead.remove(self._whole)
        if self._whole == self._sent:
            self._missed_since_s = None
        elif self._missed_since_s is None or self._whole > before:
            self._missed_since_s = now_s

    def lack(self, now_s: float) -> bool:
        """Return whether a tensor counts as lost: it was sent, but has not arrived in time."""
        return self._missed_since_s is not None and now_s - self._missed_since_s > _OVERTAKEN_S
