"""Results of sparse models: weights by key as safetensors, with the settings as metadata."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open

from share_compute.errors import VerificationFailed
from share_compute.files.durable import sync
from share_compute.sparse.blocks import Floats
from share_compute.sparse.keys import BIAS, PlaceIndex, Places, keys_of, places_of
from share_compute.sparse.settings import SparseSettings
from share_compute.sparse.table import RowValues

_SETTINGS = TypeAdapter(SparseSettings)
_DTYPES = {"<u8": "U64", "<f4": "F32"}
_BLOCK_ROWS = 1 << 16


class _Part(NamedTuple):
    """Rows of an array in a new order."""

    array: NDArray[Any]
    order: NDArray[np.int64]


def save_rows(file: Path, settings: SparseSettings, pieces: Iterable[RowValues]) -> int:
    """Write the weights of all rows, and return their number. Only the keys are all in memory at the same time.

    The file has ``keys`` ``[rows]`` and ``weights`` ``[rows, width]``, ordered by key, and ``bias`` if there is one.
    Matrix factorisation has ``users.keys``, ``users.weights``, ``items.keys`` and ``items.weights`` instead.

    Args:
        file: the file.
        settings: settings of the model.
        pieces: rows; each place is in at most one piece.
    """
    spool = file.with_name(f"{file.name}.unordered")
    try:
        parts = [np.empty(0, np.uint64)]
        with spool.open("wb") as unordered:
            for piece in pieces:
                parts.append(piece.places)
                unordered.write(piece.values.astype("<f4").tobytes())
        places, width = np.concatenate(parts), settings.build_rule().width
        values: NDArray[Any] = np.empty((0, width), np.float32)
        if len(places):  # an empty file cannot be mapped
            values = np.memmap(spool, np.float32, "r", shape=(len(places), width))
        keys, is_second = keys_of(places)
        tensors: dict[str, _Part] = {}
        if settings.model == "matrix_factorization":
            for name, chosen in (("users.", ~is_second), ("items.", is_second)):
                tensors |= _sorted(name, keys, chosen, values)
        else:
            tensors |= _sorted("", keys, ~is_second, values)
            if settings.has_bias:
                tensors["bias"] = _Part(values[:, 0], np.flatnonzero(places == np.uint64(BIAS)))
        _write(file, tensors, asdict(settings))
        return len(places)
    finally:
        spool.unlink(missing_ok=True)


def save_linear(
    file: Path, facts: Mapping[str, object], places: Places, weights: NDArray[np.float64]
) -> None:
    """Write the weights of a linear model that CoCoA solved: ``keys`` ``[rows]``, ``weights`` ``[rows, 1]``, ``bias``.

    Args:
        file: the file.
        facts: facts of the model, which become metadata.
        places: all places.
        weights: weight of each place.
    """
    keys, is_second = keys_of(places)
    values = weights.astype(np.float32)[:, None]
    tensors = dict(_sorted("", keys, ~is_second, values))
    tensors["bias"] = _Part(values[:, 0], np.flatnonzero(places == np.uint64(BIAS)))
    _write(file, tensors, facts)


def _write(file: Path, tensors: Mapping[str, _Part], facts: Mapping[str, object]) -> None:
    """Write tensors as safetensors, in blocks of rows: the size of the header in 8 bytes, the header, the data."""
    header: dict[str, object] = {"__metadata__": {"share-compute-sparse": json.dumps(facts)}}
    end = 0
    for name, (array, order) in tensors.items():
        shape = [len(order), *array.shape[1:]]
        start, end = end, end + math.prod(shape) * array.itemsize
        header[name] = {"dtype": _DTYPES[array.dtype.str], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    partial = file.with_name(f"{file.name}.partial")
    with partial.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for array, order in tensors.values():
            for first in range(0, len(order), _BLOCK_ROWS):
                out.write(np.ascontiguousarray(array[order[first : first + _BLOCK_ROWS]]).data)
    sync(partial)
    partial.replace(file)
    sync(file.parent)


def _sorted(
    prefix: str, keys: NDArray[np.uint64], chosen: NDArray[np.bool_], weights: NDArray[Any]
) -> dict[str, _Part]:
    """Return keys and weights of the chosen rows, in the order of keys."""
    rows = np.flatnonzero(chosen)
    order = rows[np.argsort(keys[rows])]
    return {f"{prefix}keys": _Part(keys, order), f"{prefix}weights": _Part(weights, order)}


def load_rows(file: Path) -> tuple[SparseSettings, RowValues]:
    """Return the settings and the rows of a file that `save_rows` wrote, in the order of places.

    Raises:
        VerificationFailed: the file is missing or damaged.
    """
    try:
        with safe_open(file, framework="numpy") as source:
            settings = _SETTINGS.validate_json((source.metadata() or {})["share-compute-sparse"])
            arrays = {name: source.get_tensor(name) for name in source.keys()}  # noqa: SIM118 - it is no dict
        parts: list[tuple[Places, Floats]] = []
        for prefix, is_second in (("", False), ("users.", False), ("items.", True)):
            if f"{prefix}keys" in arrays:
                places = places_of(arrays[f"{prefix}keys"], is_second=is_second)
                parts.append((places, arrays[f"{prefix}weights"]))
        if "bias" in arrays:
            row = np.zeros((len(arrays["bias"]), parts[0][1].shape[1]), np.float32)
            row[:, 0] = arrays["bias"]
            parts.append((np.full(len(row), BIAS, np.uint64), row))
        places = np.concatenate([part for part, _ in parts])
        weights = np.concatenate([part for _, part in parts])
    except (SafetensorError, OSError, KeyError, ValueError, ValidationError) as failure:
        raise VerificationFailed(
            f"{file.name} is not the result of a sparse model: {failure}", hint="train the model again"
        ) from failure
    order = np.argsort(places)
    return settings, RowValues(places[order], weights[order])


def weights_for(rows: RowValues, places: Places) -> Floats:
    """Return the weights of places, ``[places, width]``; zeros for places that no row has."""
    found = PlaceIndex([rows.places]).find(places)
    weights: Floats = np.where(found[:, None] >= 0, rows.values[np.maximum(found, 0)], np.float32(0))
    return weights
