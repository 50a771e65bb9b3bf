"""Guesses of keys and invites are slowed down."""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Final, TypeVar

from fastapi import Request

from share_compute.errors import InviteUnknown, NotAuthorized, TooManyAttempts
from share_compute_api.connections import address_group
from share_compute_api.private import is_from_here

Found = TypeVar("Found")

_FREE: Final = 5
"""Wrong attempts of an address before it has to wait."""
_LONGEST_S: Final = 60.0
_LONGEST_HERE_S: Final = 2.0
"""For this machine itself: whoever may use it must not be kept out for long by others who do."""
_FORGIVEN_AFTER_S: Final = 900.0
_MOST_ADDRESSES: Final = 4096
_MOST_KNOWN: Final = 4096
_ALL_PER_MINUTE: Final = 600
_HERE: Final = "this machine"


@dataclass(slots=True)
class _Wrong:
    count: int
    last_s: float


class Guesses:
    """Counts wrong keys and invites, and lets addresses that send many wait before the next try.

    The wait doubles with each wrong attempt after the first few. Beside the count of each address (an IPv6 client is
    its /64 network) there is one of all, against guessing from many addresses; this machine itself is left out.
    A key that was right before passes without waiting, so others behind one address do not keep running programs out.
    Memory is bounded: the addresses that were silent longest are forgotten first.

    Args:
        clock: seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._wrong: OrderedDict[str, _Wrong] = OrderedDict()
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._secret = secrets.token_bytes(32)
        self._minute, self._in_minute = 0, 0

    def check(self, request: Request, secret: str, verify: Callable[[], Found | None]) -> Found | None:
        """Return what ``verify`` finds, after the address of the request has waited long enough.

        Args:
            request: where the attempt comes from.
            secret: the key, code or invite that is tried.
            verify: returns None, or raises NotAuthorized, if it is wrong.

        Raises:
            TooManyAttempts: the address must wait; nothing was verified.
        """
        address = (
            _HERE if is_from_here(request) else address_group(request.client.host if request.client else "")
        )
        mark = hashlib.blake2b(secret.encode(), key=self._secret, digest_size=16).digest()
        self._require_patience(address, mark)
        try:
            found = verify()
        except NotAuthorized as refused:
            # Of an invite that was used or is over, the code was right.
            if type(refused) in (NotAuthorized, InviteUnknown):
                self._note_wrong(address)
            raise
        if found is None:
            self._note_wrong(address)
        else:
            self._note_right(mark)
        return found

    def _require_patience(self, address: str, mark: bytes) -> None:
        with self._lock:
            if mark in self._known:
                return
            now_s = self._clock()
            wrong = self._wrong.get(address)
            wait_s = 0.0
            if wrong is not None and wrong.count >= _FREE:
                longest_s = _LONGEST_HERE_S if address == _HERE else _LONGEST_S
                wait_s = wrong.last_s + min(2.0 ** min(wrong.count - _FREE, 10), longest_s) - now_s
            if address != _HERE and self._minute == int(now_s // 60) and self._in_minute >= _ALL_PER_MINUTE:
                wait_s = max(wait_s, 60 - now_s % 60)
        if wait_s > 0:
            raise TooManyAttempts(
                "too many wrong keys or invites came from there",
                mend=f"try again in {ceil(wait_s)} s, with the right one",
                details={"retry_after_s": ceil(wait_s)},
            )

    def _note_wrong(self, address: str) -> None:
        with self._lock:
            now_s = self._clock()
            wrong = self._wrong.pop(address, None)
            if wrong is None or now_s - wrong.last_s > _FORGIVEN_AFTER_S:
                wrong = _Wrong(0, now_s)
            self._wrong[address] = _Wrong(wrong.count + 1, now_s)
            while len(self._wrong) > _MOST_ADDRESSES:
                self._wrong.popitem(last=False)
            if address != _HERE:
                minute = int(now_s // 60)
                self._minute, self._in_minute = minute, self._in_minute + 1 if minute == self._minute else 1

    def _note_right(self, mark: bytes) -> None:
        with self._lock:
            self._known[mark] = None
            self._known.move_to_end(mark)
            while len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)
