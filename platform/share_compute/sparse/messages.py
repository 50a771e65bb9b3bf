"""Messages between workers and servers: rows of values.

Lists of keys are sent only once, small updates can be held back, and values can be int8.

Layout of rows: a header of `HEADER` bytes; the places, unless the receiver has the list; one bit for each place, which
says whether its row is in the message, unless all are; the scales of int8; the values.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from share_compute.errors import StaleEpoch, UserError, VerificationFailed
from share_compute.sparse.blocks import Floats
from share_compute.sparse.keys import KeyCache, PlaceIndex, Places, digest_of
from share_compute.sparse.table import RowValues

ValueType = Literal["float32", "int8"]
HEADER = struct.Struct("<16sIIBBH")
"""Digest of the places, number of places, rows in the message, whether places follow, whether int8, and the width."""
_MOST_PLACES = (1 << 32) - 1
"""Maximum number of rows in a message, which the header can count."""
GROUP = 256
"""Values that share one scale in int8."""


class KeysUnknown(StaleEpoch):
    """The receiver does not have a list of keys; the sender has to send the list itself."""

    code = "keys-unknown"


def encode(
    rows: RowValues, value_type: ValueType, *, with_places: bool, kept: NDArray[np.bool_] | None = None
) -> bytes:
    """Return rows as bytes.

    Args:
        rows: the rows; rows that are not kept are left out.
        value_type: type of the numbers in the message.
        with_places: whether the receiver may lack the list of places.
        kept: whether each row is in the message; None if all are.

    Raises:
        UserError: there are too many rows for one message.
    """
    if len(rows.places) > _MOST_PLACES:
        raise UserError(
            f"{len(rows.places)} rows of weights are too many for one message",
            hint="lower training.batch_size, or train with servers instead of hogwild_threads",
        )
    values = rows.values if kept is None else rows.values[kept]
    digest = bytes.fromhex(rows.digest or digest_of(rows.places))
    is_int8 = value_type == "int8"
    parts: list[bytes | memoryview] = [
        HEADER.pack(digest, len(rows.places), len(values), with_places, is_int8, rows.values.shape[1]),
        _bytes_of(rows.places, "<u8") if with_places else b"",
        b"" if kept is None or len(values) == len(rows.places) else np.packbits(kept).tobytes(),
    ]
    if is_int8:
        scales, numbers = _quantized(values)
        parts += [_bytes_of(scales, "<f4"), _bytes_of(numbers, "i1")]
    else:
        parts.append(_bytes_of(values, "<f4"))
    return b"".join(parts)


def _bytes_of(array: NDArray[np.generic], kind: str) -> memoryview:
    """Return the bytes of an array, row by row; without a copy if it has them already."""
    return np.ascontiguousarray(array, kind).reshape(-1).view(np.uint8).data


def decode(content: bytes | memoryview, cache: KeyCache, width: int) -> RowValues:
    """Return the rows of a message; rows that were held back are left out.

    Raises:
        KeysUnknown: the list of places is needed.
        VerificationFailed: the message is damaged, or has other rows than it should.
    """
    if len(content) < HEADER.size:
        raise VerificationFailed("a message of rows is shorter than its header")
    digest, count, num_rows, has_places, is_int8, found_width = HEADER.unpack_from(content)
    if found_width != width or num_rows > count or max(has_places, is_int8) > 1:
        raise VerificationFailed(
            f"a message has {num_rows} of {count} rows of {found_width} numbers, not {width}"
        )
    num_groups = -(-num_rows * width // GROUP)
    lengths = [
        8 * count if has_places else 0,
        0 if num_rows == count else -(-count // 8),
        4 * num_groups if is_int8 else 0,
        num_rows * width * (1 if is_int8 else 4),
    ]
    if len(content) != HEADER.size + sum(lengths):
        raise VerificationFailed(
            f"a message of rows has {len(content)} bytes, not {HEADER.size + sum(lengths)}"
        )
    ends = list(accumulate(lengths, initial=HEADER.size))
    view = memoryview(content)
    listed, bits, scales, numbers = (view[a:b] for a, b in pairwise(ends))
    name = digest.hex()
    places = _places(listed, name, cache) if has_places else cache.get(name)
    if places is None:
        raise KeysUnknown("the receiver does not have this list of keys", hint="send the list itself")
    if len(places) != count:
        raise VerificationFailed("a message names a list of keys of another length")
    if num_rows != count:
        kept = np.unpackbits(np.frombuffer(bits, np.uint8), count=count).astype(bool)
        if int(kept.sum()) != num_rows:
            raise VerificationFailed("a message of rows has other rows than it says")
        places, name = places[kept], ""
    values = _values(numbers, scales, is_int8=bool(is_int8)).reshape(num_rows, width)
    if not np.isfinite(values).all():
        raise VerificationFailed("a message of rows has numbers that are not finite")
    return RowValues(places, values, name)


def with_list(content: bytes, places: Places) -> bytes:
    """Convert a message without its list of places into one with the list."""
    digest, count, num_rows, _, is_int8, width = HEADER.unpack_from(content)
    header = HEADER.pack(digest, count, num_rows, True, is_int8, width)  # noqa: FBT003 - a field of the header
    return b"".join((header, _bytes_of(places, "<u8"), memoryview(content)[HEADER.size :]))


def _places(listed: memoryview, digest: str, cache: KeyCache) -> Places:
    places = np.frombuffer(listed, "<u8").astype(np.uint64)
    if digest_of(places) != digest or (places[1:] <= places[:-1]).any():
        raise VerificationFailed("a list of keys has another digest, or is not sorted")
    cache.put(digest, places)
    return places


def _quantized(values: Floats) -> tuple[Floats, NDArray[np.int8]]:
    """Return the scales of groups of `GROUP` values, and the values as int8, rounded to nearest."""
    flat = values.ravel()
    padded = np.zeros(-(-flat.size // GROUP) * GROUP, np.float32)
    padded[: flat.size] = flat
    groups = padded.reshape(-1, GROUP)
    scales = np.maximum(groups.max(axis=1, initial=0), -groups.min(axis=1, initial=0)) / np.float32(127)
    scales[scales < np.finfo(np.float32).tiny] = 0
    inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales > 0)
    groups *= inverse[:, None]
    numbers = np.clip(np.rint(groups, out=groups), -127, 127).astype(np.int8)
    return scales, numbers.ravel()[: flat.size]


def _values(numbers: bytes | memoryview, scales: bytes | memoryview, *, is_int8: bool) -> Floats:
    if not is_int8:
        return np.frombuffer(numbers, "<f4").astype(np.float32)  # the message may be unaligned
    flat = np.frombuffer(numbers, np.int8).astype(np.float32)
    per_group = np.frombuffer(scales, "<f4").astype(np.float32)
    whole = flat.size // GROUP * GROUP
    flat[:whole].reshape(-1, GROUP)[...] *= per_group[: whole // GROUP, None]
    flat[whole:] *= per_group[whole // GROUP :].repeat(flat.size - whole)
    return flat


@dataclass(frozen=True, slots=True)
class FilterOptions:
    """Options of what a worker sends."""

    threshold: float = 0.0
    """Rows are held back if their largest value is below this multiple of the message's root mean square."""
    value_type: ValueType = "float32"

    @property
    def is_exact(self) -> bool:
        """Whether a message holds its input without any loss."""
        return not self.threshold and self.value_type == "float32"


class PushFilter:
    """Encodes the pushes of one worker to one range, and keeps unsent parts for the next push of the same rows.

    Args:
        options: options of the filter.
        width: number of weights of a row.
    """

    def __init__(self, options: FilterOptions, width: int) -> None:
        self._options, self._width = options, width
        self._index = PlaceIndex()
        self._residuals = np.zeros((0, width), np.float32)
        self._rows: dict[str, NDArray[np.int64]] = {}

    def push(self, rows: RowValues, *, with_places: bool) -> bytes:
        """Return the message for an update, including the parts of its rows that earlier messages held back."""
        if self._options.is_exact:
            return encode(rows, "float32", with_places=with_places)
        at = self._positions(rows)
        wanted = rows.values + self._residuals[at]
        peaks = np.abs(wanted).max(axis=1) if self._width > 1 else np.abs(wanted[:, 0])
        scale = float(np.sqrt(np.mean(wanted * wanted))) if wanted.size else 0.0
        kept = peaks >= self._options.threshold * scale
        content = encode(
            RowValues(rows.places, wanted, rows.digest),
            self._options.value_type,
            with_places=with_places,
            kept=kept,
        )
        sent = np.zeros_like(wanted)
        sent[kept] = _round_trip(wanted[kept], self._options.value_type)
        self._residuals[at] = wanted - sent
        return content

    def rest(self) -> RowValues:
        """Return all held back parts as a separate update, and clear them."""
        places = self._index.in_row_order
        order = np.argsort(places)
        values = self._residuals[: len(places)][order]
        is_some = np.abs(values).max(axis=1, initial=0) > 0
        self._residuals[:] = 0
        return RowValues(places[order][is_some], values[is_some])

    def _positions(self, rows: RowValues) -> NDArray[np.int64]:
        at = self._rows.get(rows.digest)
        if at is None:
            at = self._index.add(rows.places)
            if rows.digest:
                self._rows[rows.digest] = at
            missing = len(self._index) - len(self._residuals)
            if missing > 0:
                more = np.zeros((max(missing, len(self._residuals)), self._width), np.float32)
                self._residuals = np.concatenate([self._residuals, more])
        return at


def _round_trip(values: Floats, value_type: ValueType) -> Floats:
    if value_type == "float32":
        return values
    scales, numbers = _quantized(values)
    return _values(numbers.tobytes(), scales.astype("<f4").tobytes(), is_int8=True).reshape(values.shape)
