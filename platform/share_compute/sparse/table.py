"""The rows of one range, with the rule that updates them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import xxhash
from numpy.typing import NDArray

from share_compute.errors import VerificationFailed
from share_compute.sparse.blocks import Floats
from share_compute.sparse.keys import PlaceIndex, Places, Rows, bias_rows
from share_compute.sparse.rules import RangeCounters, UpdateRule

_SMALLEST_FACTOR = 1e-12
_MOST_CACHED = 1 << 25
"""Number of row numbers that are kept for lists of places."""


@dataclass(frozen=True, slots=True)
class RowValues:
    """Values of some rows."""

    places: Places
    """Places, sorted; none occurs twice."""
    values: Floats
    """Values, ``[places, width]``."""
    digest: str = ""
    """Digest of the places, if the sender computed it."""


def summed(parts: Sequence[RowValues], width: int) -> RowValues:
    """Return the sum of several messages as one. Parts are added in the given order."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0] if parts else RowValues(np.empty(0, np.uint64), np.empty((0, width), np.float32))
    if first.digest and all(part.digest == first.digest for part in parts):
        total = first.values.copy()
        for part in parts[1:]:
            total += part.values
        return RowValues(first.places, total, first.digest)
    places = np.unique(np.concatenate([first.places, *(part.places for part in parts[1:])]))
    sums = np.zeros((len(places), width), np.float32)
    for part in parts:
        sums[np.searchsorted(places, part.places)] += part.values
    return RowValues(places, sums)


@dataclass(frozen=True, slots=True)
class TableSnapshot:
    """All that a table keeps, as arrays."""

    places: Places
    """Place of each row."""
    state: Floats
    totals: NDArray[np.float64]
    counters: RangeCounters


@dataclass(slots=True)
class _Found:
    """Rows of the places of a list in a table."""

    rows: Rows
    """Row of each place; -1 if it has none."""
    missing: Rows
    """Which places have no row."""
    length: int
    """Number of rows of the table when missing places were looked for."""
    bias: slice
    """Where the bias is among the places."""


class RangeTable:
    """Rows of one range. Rows are added when an update touches them.

    Args:
        rule: update rule, which defines the state of a row.
        snapshot: initial rows.
    """

    def __init__(self, rule: UpdateRule, snapshot: TableSnapshot | None = None) -> None:
        self.rule = rule
        self.counters = RangeCounters()
        self._index = PlaceIndex()
        self._state = self._zeros(1024)
        self._totals = np.zeros(rule.width)
        self._cached: dict[str, _Found] = {}
        self._num_cached = 0
        if snapshot is not None:
            if snapshot.state.shape != (len(snapshot.places), rule.state_width):
                raise VerificationFailed(f"a table has rows of shape {snapshot.state.shape}")
            self._add(snapshot.places)
            self._state[: len(self)] = snapshot.state
            self._totals = snapshot.totals.copy()
            self.counters = RangeCounters(**asdict(snapshot.counters))

    def __len__(self) -> int:
        return len(self._index)

    @property
    def places(self) -> Places:
        """Places of all rows, sorted."""
        return self._index.sorted

    @property
    def totals(self) -> NDArray[np.float64]:
        """Sum of the weights of all rows, ``[width]``, for rules whose workers need it."""
        return self._totals * self.counters.factor

    def weights(self, places: Places, digest: str = "") -> Floats:
        """Return the weights of rows, ``[places, width]``; untouched rows have their initial weights."""
        found = self._find(places, digest)
        if len(found.missing):
            state = self._taken(np.maximum(found.rows, 0))
            state[found.missing] = self.rule.initial(places[found.missing], self.counters)
        else:
            state = self._taken(found.rows)
        return self.rule.weights(state, found.bias, self.counters)

    def learned(self, places: Places) -> Floats:
        """Return the weights of rows, ``[places, width]``; zeros for rows that no update touched."""
        weights = self.weights(places)
        weights[self._index.find(places) < 0] = 0
        return weights

    def apply(self, update: RowValues, examples: int) -> None:
        """Apply an update that is a sum over ``examples`` rows of data.

        Raises:
            VerificationFailed: the rows would not be finite; they keep their values.
        """
        found = self._find(update.places, update.digest)
        if len(found.missing):
            found.rows[found.missing] = self._add(update.places[found.missing])
            found.missing = np.empty(0, np.int64)
        counters = replace(self.counters)
        self.rule.begin(counters, examples)
        old = self._taken(found.rows)
        with np.errstate(over="ignore", invalid="ignore"):
            new = self.rule.changed(old, update.values, found.bias, counters)
        if not np.isfinite(new).all():
            raise VerificationFailed(
                "an update gives weights that are not finite",
                hint="scale the features, or lower training.learning_rate",
            )
        counters.examples += examples
        counters.updates += 1
        if self.rule.has_totals:
            self._totals += new.sum(axis=0, dtype=np.float64) - old.sum(axis=0, dtype=np.float64)
        self._put(found.rows, new)
        self.counters = counters
        if self.counters.factor < _SMALLEST_FACTOR:
            self._fold()

    def everything(self) -> RowValues:
        """Return the weights of all rows, in the order of places."""
        return RowValues(self.places, self.weights(self.places))

    def snapshot(self) -> TableSnapshot:
        """Return all that the table keeps."""
        counters = RangeCounters(**asdict(self.counters))
        return TableSnapshot(
            self._index.in_row_order, self._state[: len(self)].copy(), self._totals.copy(), counters
        )

    def digest(self) -> str:
        """Return a digest of all rows and counters."""
        order = np.argsort(self._index.in_row_order)
        hasher = xxhash.xxh3_128(self._index.in_row_order[order].tobytes())
        hasher.update(self._state[order].tobytes())
        hasher.update(repr(sorted(asdict(self.counters).items())).encode())
        return hasher.hexdigest()

    def _fold(self) -> None:
        """Multiply all rows by the common factor before the factor becomes too small for float32."""
        self._state[: len(self)] *= np.float32(self.counters.factor)
        self._totals *= self.counters.factor
        self.counters.folded *= self.counters.factor
        self.counters.factor = 1.0

    def _zeros(self, count: int) -> Floats:
        """Return the state of rows that are not used yet, in the layout that suits the rule."""
        return np.zeros((count, self.rule.state_width), np.float32, "F" if self.rule.is_by_column else "C")

    def _taken(self, rows: Rows) -> Floats:
        """Return a copy of the state of rows, in the same layout."""
        return self._state.T.take(rows, 1).T if self.rule.is_by_column else self._state.take(rows, 0)

    def _put(self, rows: Rows, state: Floats) -> None:
        """Replace the state of rows."""
        if self.rule.is_by_column:  # NumPy assigns one column five times as fast as rows of two numbers
            for column, values in zip(self._state.T, state.T, strict=True):
                column[rows] = values
        else:
            self._state[rows] = state

    def _find(self, places: Places, digest: str) -> _Found:
        """Return the rows of places. Row numbers are cached, because they never change once a row was added."""
        found = self._cached.get(digest) if digest else None
        if found is None:
            rows = self._index.find(places)
            found = _Found(rows, np.flatnonzero(rows < 0), len(self), bias_rows(places))
            if digest and self._num_cached + len(rows) <= _MOST_CACHED:
                self._cached[digest] = found
                self._num_cached += len(rows)
        elif len(found.missing) and found.length != len(self):
            rows = self._index.find(places[found.missing])
            found.rows[found.missing] = rows
            found.missing, found.length = found.missing[rows < 0], len(self)
        return found

    def _add(self, places: Places) -> Rows:
        before = len(self._index)
        rows = self._index.add(places)
        count = len(self._index)
        if count > len(self._state):
            grown = self._zeros(max(count, 2 * len(self._state)))
            grown[:before] = self._state[:before]
            self._state = grown
        is_new = rows >= before
        fresh = self.rule.initial(places[is_new], self.counters)
        self._state[rows[is_new]] = fresh
        if self.rule.has_totals:
            self._totals += fresh.sum(axis=0, dtype=np.float64)
        return rows
