"""Snapshots of replicas as safetensors, which a new backup loads without unpickling anything."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from share_compute.errors import VerificationFailed
from share_compute.sparse.replica import Push, ReplicaSnapshot
from share_compute.sparse.rules import RangeCounters
from share_compute.sparse.table import RowValues, TableSnapshot


def snapshot_bytes(snapshot: ReplicaSnapshot) -> bytes:
    """Return a snapshot as bytes."""
    facts = {
        "length": snapshot.length,
        "clocks": sorted(snapshot.clocks.items()),
        "ended": sorted(snapshot.ended),
        "counters": asdict(snapshot.table.counters),
        "waiting": [
            [push.worker, push.clock, push.examples, push.is_last, push.acknowledged]
            for push in snapshot.waiting
        ],
    }
    arrays: dict[str, Any] = {
        "facts": np.frombuffer(json.dumps(facts).encode(), np.uint8),
        "places": snapshot.table.places,
        "state": snapshot.table.state,
        "totals": snapshot.table.totals,
    }
    for number, push in enumerate(snapshot.waiting):
        arrays[f"waiting/{number}/places"] = push.update.places
        arrays[f"waiting/{number}/values"] = push.update.values
    return bytes(save({name: np.ascontiguousarray(array) for name, array in arrays.items()}))


def snapshot_of(content: bytes) -> ReplicaSnapshot:
    """Return the snapshot that these bytes encode.

    Raises:
        VerificationFailed: the bytes are damaged.
    """
    try:
        arrays = load(content)
        facts = json.loads(arrays["facts"].tobytes())
        waiting = tuple(
            Push(
                worker,
                clock,
                examples,
                RowValues(arrays[f"waiting/{number}/places"], arrays[f"waiting/{number}/values"]),
                is_last,
                acknowledged,
            )
            for number, (worker, clock, examples, is_last, acknowledged) in enumerate(facts["waiting"])
        )
        table = TableSnapshot(
            arrays["places"], arrays["state"], arrays["totals"], RangeCounters(**facts["counters"])
        )
        return ReplicaSnapshot(
            facts["length"], dict(facts["clocks"]), frozenset(facts["ended"]), waiting, table
        )
    except (SafetensorError, KeyError, ValueError, TypeError) as failure:
        raise VerificationFailed(f"a snapshot of a range cannot be read: {failure}") from failure
