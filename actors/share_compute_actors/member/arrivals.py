"""Which tensors of one sender came, so that one that never will is missed soon."""

from __future__ import annotations

_OVERTAKEN_S = 0.5
"""For so long a tensor is waited for that others have overtaken."""


class Arrivals:
    """What came over one link in one epoch. Tensors are counted from 1."""

    def __init__(self) -> None:
        self._whole = 0
        """All up to this one came."""
        self._ahead: set[int] = set()
        """What came after one that did not."""
        self._sent = 0
        """So many were sent, for all that is known."""
        self._missed_since_s: float | None = None

    def came(self, number: int, now_s: float) -> None:
        """Take note of a tensor."""
        if number > self._whole:
            self._ahead.add(number)
        self.expect(number, now_s)

    def expect(self, sent: int, now_s: float) -> None:
        """Take note that so many were sent."""
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
        """Return whether one that was sent is not to be expected any more."""
        return self._missed_since_s is not None and now_s - self._missed_since_s > _OVERTAKEN_S
