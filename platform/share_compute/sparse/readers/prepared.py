"""Rows in the form in which workers receive them: safetensors, so that nothing is unpickled or parsed again."""

from __future__ import annotations

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from share_compute.errors import VerificationFailed
from share_compute.sparse.blocks import RawRows


def rows_bytes(rows: RawRows) -> bytes:
    """Return rows as bytes; values and targets are rounded to float32."""
    arrays = {
        "starts": rows.starts,
        "keys": rows.keys,
        "values": rows.values.astype(np.float32),
        "targets": rows.targets.astype(np.float32),
    }
    if rows.is_second is not None:
        arrays["is_second"] = rows.is_second
    return bytes(save({name: np.ascontiguousarray(array) for name, array in arrays.items()}))


def rows_of(content: bytes) -> RawRows:
    """Return the rows that these bytes encode.

    Raises:
        VerificationFailed: the bytes are damaged.
    """
    try:
        arrays = load(content)
        rows = RawRows(
            arrays["starts"],
            arrays["keys"],
            arrays["values"].astype(np.float64),
            arrays["targets"].astype(np.float64),
            arrays.get("is_second"),
        )
        is_whole = rows.starts[0] == 0 and rows.starts[-1] == len(rows.keys) == len(rows.values)
    except (SafetensorError, KeyError, IndexError, ValueError) as failure:
        raise VerificationFailed(f"prepared rows cannot be read: {failure}") from failure
    if not is_whole or len(rows.targets) != len(rows):
        raise VerificationFailed("prepared rows are cut off", hint="start the job again")
    return rows
