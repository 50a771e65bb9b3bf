"""Keys of rows, their places, and ranges of places."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

from share_compute.errors import UserError

KEY_LIMIT = 1 << 63
"""Keys are below this number."""
Places = NDArray[np.uint64]
Rows = NDArray[np.int64]
_SECOND = np.uint64(1 << 63)
_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_LAST = np.uint64((1 << 64) - 1)
_MOST_PROBES = 16
"""Number of places with the same first bits that are compared one after the other."""
_FEW = 4096
"""Number of places below which a binary search takes less time than `PlaceIndex` needs to prepare another one."""
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))


def places_of(keys: NDArray[np.uint64], *, is_second: bool = False) -> Places:
    """Return the places of keys, ``[keys]``: the finalizer of splitmix64 (Steele et al. 2014), which is a bijection.

    Args:
        keys: numbers below `KEY_LIMIT`.
        is_second: whether the keys are of a second kind, such as items beside users. Keys of the two kinds have
            different places.

    Raises:
        UserError: a key is too large.
    """
    if keys.size and int(keys.max()) >= KEY_LIMIT:
        raise UserError(
            f"key {int(keys.max())} is not below 2^63", hint="number features, users and items from 0 or 1"
        )
    x = (keys | _SECOND) if is_second else keys.astype(np.uint64)
    with np.errstate(over="ignore"):
        x = (x ^ (x >> _SHIFTS[0])) * _FACTORS[0]
        x = (x ^ (x >> _SHIFTS[1])) * _FACTORS[1]
    return x ^ (x >> _SHIFTS[2])


def keys_of(places: Places) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """Return the keys with these places, and whether each is of the second kind; the inverse of `places_of`."""
    inverses = [np.uint64(pow(int(factor), -1, 1 << 64)) for factor in _FACTORS]
    with np.errstate(over="ignore"):
        x = _unshifted(places, 31) * inverses[1]
        x = _unshifted(x, 27) * inverses[0]
    x = _unshifted(x, 30)
    return x & ~_SECOND, (x & _SECOND) != 0


def _unshifted(x: Places, shift: int) -> Places:
    """Return the inverse of ``y ^ (y >> shift)``."""
    result = x
    for _ in range(64 // shift):
        result = x ^ (result >> np.uint64(shift))
    return result


BIAS = int(places_of(np.zeros(1, np.uint64), is_second=True)[0])
"""Place of the bias, which belongs to no feature."""


def uniform(places: Places, seed: int, width: int) -> NDArray[np.float64]:
    """Return numbers in (0, 1), ``[places, width]``, which depend on the seed, the place and the column only."""
    with np.errstate(over="ignore"):
        start = places + np.uint64(seed) * np.uint64(0x9E3779B97F4A7C15)
        steps = np.arange(1, width + 1, dtype=np.uint64) * np.uint64(0xD1B54A32D192ED03)
        x = start[:, None] + steps[None, :]
        x = (x ^ (x >> _SHIFTS[0])) * _FACTORS[0]
        x = (x ^ (x >> _SHIFTS[1])) * _FACTORS[1]
        x = x ^ (x >> _SHIFTS[2])
    numbers: NDArray[np.float64] = ((x >> np.uint64(11)).astype(np.float64) + 0.5) / float(1 << 53)
    return numbers


def range_bounds(number: int, ranges: int) -> tuple[int, int]:
    """Return the first place of a range, and the place after its last one."""
    return (number << 64) // ranges, ((number + 1) << 64) // ranges


def cuts(places: Places, ranges: int) -> list[int]:
    """Return the indices at which sorted places are cut into ranges: ``ranges + 1``, from 0 to the number of places."""
    starts = np.array([range_bounds(number, ranges)[0] for number in range(1, ranges)], dtype=np.uint64)
    return [0, *np.searchsorted(places, starts).tolist(), len(places)]


def digest_of(places: Places) -> str:
    """Return a 128-bit digest of a list of places."""
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(places, "<u8").tobytes())


def bias_rows(places: Places) -> slice:
    """Return the slice of the bias among sorted places: one row, or none."""
    at = int(np.searchsorted(places, np.uint64(BIAS)))
    return slice(at, at + (at < len(places) and int(places[at]) == BIAS))


class PlaceIndex:
    """Assigns row numbers to places, in the order in which they are added. A place never changes its row.

    New places stay in a separate list until they are an eighth of all, because changing a long list is slow.
    """

    def __init__(self, places: Sequence[Places] = ()) -> None:
        self._most, self._new = _SortedPlaces(), _SortedPlaces()
        for each in places:
            self.add(each)

    def __len__(self) -> int:
        return len(self._most) + len(self._new)

    @property
    def sorted(self) -> Places:
        """All places, sorted. Later additions do not change this array."""
        self._merge()
        return self._most.places

    @property
    def in_row_order(self) -> Places:
        """Place of each row."""
        places = np.empty(len(self), np.uint64)
        for part in (self._most, self._new):
            places[part.rows] = part.places
        return places

    def find(self, places: Places) -> Rows:
        """Return the row of each place, ``[places]``; -1 for places that were not added."""
        rows = self._most.find(places)
        if len(self._new):
            rest = np.flatnonzero(rows < 0)
            rows[rest] = self._new.find(places[rest])
        return rows

    def add(self, places: Places) -> Rows:
        """Return the row of each place; add places that are new. No place may occur twice."""
        rows = self.find(places)
        new = np.flatnonzero(rows < 0)
        if len(new):
            rows[new] = np.arange(len(self), len(self) + len(new))
            self._new.insert(places[new], rows[new])
            if len(self._new) > len(self._most) // 8:
                self._merge()
        return rows

    def _merge(self) -> None:
        if len(self._new):
            self._most.insert(self._new.places, self._new.rows)
            self._new = _SortedPlaces()


class _SortedPlaces:
    """Sorted places with their rows.

    Places are uniformly distributed, so the first bits of a place predict its index.
    """

    def __init__(self) -> None:
        self._ended: Places = np.array([_LAST])
        """The places, and a number after them that is not smaller."""
        self.rows: Rows = np.empty(0, np.int64)
        """Row of each place."""
        self._firsts: NDArray[np.uint32] | None = None
        """Number of places with smaller first bits, for all values of these bits; None until it is needed."""
        self._shift = np.uint64(0)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def places(self) -> Places:
        """The places, sorted."""
        return self._ended[:-1]

    def insert(self, places: Places, rows: Rows) -> None:
        """Add places that are not stored yet, in any order."""
        order = np.argsort(places)
        at = np.searchsorted(self.places, places[order])
        self._ended, self._firsts = np.insert(self._ended, at, places[order]), None
        self.rows = np.insert(self.rows, at, rows[order])

    def find(self, places: Places) -> Rows:
        """Return the row of each place, ``[places]``; -1 for unknown places."""
        if not len(self):
            return np.full(len(places), -1, np.int64)
        at = np.minimum(self._search(places), len(self) - 1)
        return np.where(self._ended[at] == places, self.rows[at], -1)

    def _search(self, places: Places) -> Rows:
        """Return the same as `numpy.searchsorted`, which takes three times as long for many places."""
        if len(places) < _FEW or len(self) < _FEW:
            return np.searchsorted(self.places, places)
        if self._firsts is None:
            bits = len(self).bit_length() - 1  # about one or two places for each value of these bits
            self._shift = np.uint64(64 - bits)
            counts = np.bincount((self.places >> self._shift).view(np.int64), minlength=1 << bits)
            self._firsts = (np.cumsum(counts) - counts).astype(np.uint32)
        at = self._firsts.take((places >> self._shift).view(np.int64)).astype(np.int64)
        behind = np.flatnonzero(self._ended.take(at) < places)
        for _ in range(_MOST_PROBES):
            if not len(behind):
                return at
            at[behind] += 1
            behind = behind[self._ended.take(at[behind]) < places[behind]]
        # Keys may be chosen maliciously, so that many places have the same first bits.
        return np.searchsorted(self.places, places)


class PlaceCounter:
    """Estimates the number of distinct places from the smallest ones (Bar-Yossef et al. 2002, algorithm 1).

    Places are spread evenly over 64 bits. The estimate is exact below ``kept`` places; above, its relative error is
    about 1 / sqrt(kept).

    Args:
        kept: number of smallest places that are kept.
    """

    def __init__(self, kept: int = 4096) -> None:
        self._kept = kept
        self._smallest: Places = np.empty(0, np.uint64)

    def add(self, places: Places) -> None:
        """Count places; places that were counted before do not count again."""
        if len(self._smallest) == self._kept:
            places = places[places < self._smallest[-1]]
        self._smallest = np.unique(np.concatenate([self._smallest, places]))[: self._kept]

    @property
    def count(self) -> int:
        """Estimated number of different places."""
        if len(self._smallest) < self._kept:
            return len(self._smallest)
        return ((self._kept - 1) << 64) // max(1, int(self._smallest[-1]))


class KeyCache:
    """Lists of places that a receiver has, by their digest; the least recently used lists are dropped.

    Args:
        most_places: number of places in all lists together that are kept.
    """

    def __init__(self, most_places: int = 1 << 25) -> None:
        self._most = most_places
        self._lists: OrderedDict[str, Places] = OrderedDict()
        self._held = 0

    def get(self, digest: str) -> Places | None:
        """Return the list with this digest, or None if the receiver lacks it and the sender must send it."""
        places = self._lists.get(digest)
        if places is not None:
            self._lists.move_to_end(digest)
        return places

    def put(self, digest: str, places: Places) -> None:
        """Keep a list."""
        if digest in self._lists:
            return
        self._lists[digest] = places
        self._held += len(places)
        while self._held > self._most and len(self._lists) > 1:
            _, dropped = self._lists.popitem(last=False)
            self._held -= len(dropped)
