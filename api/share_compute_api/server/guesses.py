"""Limits the rate at which clients can guess keys, sign-in codes and invites."""

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
from share_compute_api.connection.connections import address_group
from share_compute_api.connection.private import is_from_here

Found = TypeVar("Found")

_FREE: Final = 5
"""Number of wrong attempts after which an address must wait before its next attempt."""
_LONGEST_S: Final = 60.0
_LONGEST_HERE_S: Final = 2.0
"""Longest wait for clients on this machine, in seconds. It is short, because these clients share one count."""
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
    """Counts wrong keys, codes and invites per address, and rejects attempts of an address that must wait.

    After `_FREE` wrong attempts an address must wait. Each further wrong attempt doubles the wait, up to `_LONGEST_S`.
    IPv6 addresses are counted together if they are in the same /64 network.

    A second limit, `_ALL_PER_MINUTE`, covers all addresses except this machine's. It slows guessing from many
    addresses. A secret that was correct before is verified without a wait, so that a guesser cannot lock out programs
    behind the same address. At most `_MOST_ADDRESSES` addresses are kept, those with the latest wrong attempts.

    Args:
        clock: monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._wrong: OrderedDict[str, _Wrong] = OrderedDict()
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._secret = secrets.token_bytes(32)
        self._minute, self._in_minute = 0, 0

    def check(self, request: Request, secret: str, verify: Callable[[], Found | None]) -> Found | None:
        """Return the result of ``verify``; count the attempt if the secret is wrong.

        Args:
            request: the request that makes the attempt.
            secret: the key, code or invite of the attempt.
            verify: function that verifies the secret; returns None or raises NotAuthorized if the secret is wrong.

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
            # An expired or revoked invite is not counted: its secret was correct, so it was not guessed.
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
                "too many wrong keys or invites came from this address",
                hint=f"try again in {ceil(wait_s)} s, with the right one",
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
