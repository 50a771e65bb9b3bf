"""What the scheduler tells about its sequences, and about itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from share_compute.errors import ShareComputeError

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
    vector: bytes
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
    error: ShareComputeError


SequenceEvent = Emitted | Embedded | Finished | Failed


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
