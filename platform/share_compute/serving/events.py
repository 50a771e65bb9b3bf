"""What the scheduler tells about its sequences, and about itself."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import PlainSerializer, PlainValidator, TypeAdapter

from share_compute.errors import ShareComputeError, error_of


def _read_base64(value: Any) -> bytes:
    return value if isinstance(value, bytes) else base64.b64decode(str(value), validate=True)


def _error_document(error: ShareComputeError) -> dict[str, Any]:
    return {"code": error.code, "message": error.message, "facts": error.facts()}


def _read_error(document: Any) -> ShareComputeError:
    if isinstance(document, ShareComputeError):
        return document
    return error_of(str(document["code"]), str(document["message"]), dict(document["facts"]))


Base64 = Annotated[
    bytes, PlainValidator(_read_base64), PlainSerializer(lambda value: base64.b64encode(value).decode())
]
"""Bytes that JSON can say."""
ErrorDocument = Annotated[ShareComputeError, PlainValidator(_read_error), PlainSerializer(_error_document)]
"""An error of ours that JSON can say."""
FinishReason = Literal["stop", "length", "cancelled"]
"""A stop token or the end of the grammar; as many tokens as may be; nobody wants the rest."""


@dataclass(frozen=True, slots=True)
class Emitted:
    """A sequence has its next token. Each is told once, in order, whatever died on the way."""

    sequence: int
    index: int
    """Among the generated tokens, from 0; those in `Generation.emitted` come first and are not told again."""
    token: int
    """May be a stop token, which is no text: `Finished` follows."""
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    cached_tokens: int = 0
    """Told with the first: tokens of the prompt that were copied from another sequence, not computed."""


@dataclass(frozen=True, slots=True)
class Embedded:
    """A text has become a vector; nothing more is told of it."""

    sequence: int
    tokens: int
    """Of the text."""
    vector: Base64
    """32-bit floats, little-endian."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A sequence has ended; nothing more is told of it."""

    sequence: int
    reason: FinishReason
    new_tokens: int
    """All generated tokens: those emitted before, and a stop token, among them."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A sequence cannot go on; nothing more is told of it. What was emitted stays valid."""

    sequence: int
    error: ErrorDocument


SequenceEvent = Emitted | Embedded | Finished | Failed
_KINDS: Mapping[str, TypeAdapter[Any]] = {
    kind.__name__.lower(): TypeAdapter(kind) for kind in (Emitted, Embedded, Finished, Failed)
}


def write_events(events: Sequence[SequenceEvent]) -> str:
    """Return events as JSON: a list of pairs of kind and fields."""
    kinds = [type(event).__name__.lower() for event in events]
    fields = [_KINDS[kind].dump_python(event, mode="json") for kind, event in zip(kinds, events, strict=True)]
    return json.dumps(list(zip(kinds, fields, strict=True)))


def read_events(text: str) -> list[SequenceEvent]:
    """Return the events that `write_events` wrote.

    Raises:
        ValueError: they are not what they must be.
    """
    try:
        return [_KINDS[kind].validate_python(fields) for kind, fields in json.loads(text)]
    except (KeyError, TypeError) as failure:
        raise ValueError(f"no list of events: {failure}") from failure


@dataclass(slots=True)
class Totals:
    """What a scheduler has done so far, over all epochs."""

    prefix_hits: int = 0
    """Slabs that were begun with a copy of another one's first tokens."""
    prefix_tokens: int = 0
    """Positions copied for them."""
    computed_tokens: int = 0
    """Positions computed in all turns that were sent."""
    emitted_tokens: int = 0
    preempted: int = 0
    """Sequences that gave up their slab, since it was full and there was no room for a larger one."""
    wasted_tokens: int = 0
    """Sampled, but behind an end that was not known when the turn was sent."""


@dataclass(frozen=True, slots=True)
class Stats:
    """What a scheduler is doing now."""

    queued: int
    """Sequences that wait to be begun."""
    interrupted: int
    """Sequences that wait to go on: after a change of pools, or since memory was short."""
    running: int
    """Sequences that have a slab."""
    owners: int
    """Owners of all these."""
    turns_in_flight: int
    kv_tokens: int
    """Room for slabs."""
    kv_tokens_used: int
    """Of it, reserved for sequences that run."""
    kv_tokens_cached: int
    """Of it, slabs of ended sequences, kept for their first tokens until the room is needed."""
    totals: Totals
