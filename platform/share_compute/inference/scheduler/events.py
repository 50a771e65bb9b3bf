"""Events that a scheduler reports about its sequences, and statistics of the scheduler."""

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
"""Bytes that are written to JSON as base64."""
ErrorDocument = Annotated[ShareComputeError, PlainValidator(_read_error), PlainSerializer(_error_document)]
"""A `ShareComputeError` that is written to JSON as its code, message and facts."""
FinishReason = Literal["stop", "length", "cancelled"]
"""Cause of a sequence's end: a stop token or a complete grammar, the maximum length, or `Scheduler.cancel`."""


@dataclass(frozen=True, slots=True)
class Emitted:
    """The next token of a sequence."""

    sequence: int
    index: int
    """Index among the generated tokens, from 0. Tokens in `Generation.emitted` count but are not reported again."""
    token: int
    """Token id. It may be a stop token, which is not part of the text; then `Finished` follows."""
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    cached_tokens: int = 0
    """Number of prompt tokens that were copied from another sequence; 0 except with the first token."""


@dataclass(frozen=True, slots=True)
class Embedded:
    """The vector of a text; this is the sequence's last event."""

    sequence: int
    tokens: int
    """Length of the text in tokens."""
    vector: Base64
    """The vector as little-endian 32-bit floats."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A sequence has ended; this is its last event."""

    sequence: int
    reason: FinishReason
    new_tokens: int
    """Number of generated tokens, including those in `Generation.emitted` and a drawn stop token."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A sequence cannot continue; this is its last event. The tokens that it emitted earlier stay valid."""

    sequence: int
    error: ErrorDocument


SequenceEvent = Emitted | Embedded | Finished | Failed
_KINDS: Mapping[str, TypeAdapter[Any]] = {
    kind.__name__.lower(): TypeAdapter(kind) for kind in (Emitted, Embedded, Finished, Failed)
}


def write_events(events: Sequence[SequenceEvent]) -> str:
    """Return events as JSON: a list of [kind, fields] pairs."""
    kinds = [type(event).__name__.lower() for event in events]
    fields = [_KINDS[kind].dump_python(event, mode="json") for kind, event in zip(kinds, events, strict=True)]
    return json.dumps(list(zip(kinds, fields, strict=True)))


def read_events(text: str) -> list[SequenceEvent]:
    """Return the events that `write_events` wrote.

    Raises:
        ValueError: the text is not a valid list of events.
    """
    try:
        return [_KINDS[kind].validate_python(fields) for kind, fields in json.loads(text)]
    except (KeyError, TypeError) as failure:
        raise ValueError(f"no list of events: {failure}") from failure


@dataclass(slots=True)
class Totals:
    """Counters of a scheduler since it started, over all epochs."""

    prefix_hits: int = 0
    """Number of KV slots that started with a copy of another slot's first tokens."""
    prefix_tokens: int = 0
    """Total number of positions that were copied into these KV slots (`prefix_hits`)."""
    computed_tokens: int = 0
    """Number of positions in all engine steps that were sent."""
    emitted_tokens: int = 0
    preempted: int = 0
    """Number of times that a sequence was preempted, because its full KV slot could not grow."""
    wasted_tokens: int = 0
    """Number of sampled tokens and vectors that were dropped because their sequences had ended."""


@dataclass(frozen=True, slots=True)
class Stats:
    """State of a scheduler at one moment."""

    queued: int
    """Number of sequences that wait to start."""
    interrupted: int
    """Number of sequences that wait to continue, after a membership change or a preemption."""
    running: int
    """Number of sequences that have a KV slot, or of texts that an encoder computes."""
    owners: int
    """Number of owners of the queued, interrupted and running sequences."""
    steps_in_flight: int
    kv_tokens: int
    """KV capacity of all slots together, in tokens; 0 for an encoder."""
    kv_tokens_used: int
    """KV capacity reserved for running sequences, in tokens."""
    kv_tokens_cached: int
    """KV capacity, in tokens, of slots that are kept for prefix copies after their sequences ended."""
    totals: Totals
