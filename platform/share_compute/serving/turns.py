"""Turns: the batches of work that the server sends to the pools, and what comes back.

What holds of them, and what everybody relies on:

1. The server sends every turn to every pool, in the order of their ids. Every pool executes them in that order, whole,
   one after the other; how many are under way in different pools does not matter. So when a pool executes a turn, its
   slabs are exactly what all turns before have made of them. That is why a slab may be closed, or copied from, while
   turns that write to it are still on their way: at each pool they come first.
2. Within a turn a pool first frees the slabs in `Turn.closes`, then makes those in `Turn.grows` larger, then makes
   those in `Turn.opens`, all in their order, then computes the chunks, all of which are of different sequences.
3. Chunks of a sequence follow each other without gap: the first begins at `Opening.copy_tokens`, each next one where
   the last ended. All tokens of `Opening.history` that are not copied come as tokens of chunks; the last of these
   chunks samples, and so does every chunk after it.
4. A sampled token is the input of the next chunk of its sequence, if there is one: it has no tokens of its own, since
   the last pool hands the token straight to the first one. It does so for every token, stop tokens too: the server may
   have sent the next chunk before it knows (run-ahead). What is sampled behind an end is dropped, so any token will do.
5. The last pool of an encoder draws no token: each sequence has one chunk, its whole text, and `Pooled` comes of it.
   Nothing of it is kept, so nothing is opened or closed.
6. All this is within one epoch. A new epoch begins with no slabs and nothing on its way; what is of another epoch is
   dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from share_compute.serving.options import SamplingOptions


@dataclass(frozen=True, slots=True)
class Opening:
    """A slab to be made at every pool."""

    sequence: int
    capacity_tokens: int
    """Positions that will be written before it grows; the last token that is sampled is no input, and needs none."""
    options: SamplingOptions
    history: tuple[int, ...]
    """Prompt, then tokens emitted so far: for the sampler's penalties and grammar."""
    prompt_tokens: int
    """How many of them are the prompt's."""
    copy_from: int | None = None
    """Sequence with the same first tokens, whose slab is there; not one that this turn closes or opens."""
    copy_tokens: int = 0
    """Positions to be copied from its slab: fewer than the history has, so that there is something to sample from."""


@dataclass(frozen=True, slots=True)
class Growth:
    """A slab that gets more room at every pool: for a moment it is there twice."""

    sequence: int
    capacity_tokens: int
    """Positions that it has room for from now on; those that are written stay."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One sequence's part of a turn: positions ``start`` to ``start + count`` (exclusive) are computed."""

    sequence: int
    start: int
    count: int
    tokens: tuple[int, ...] | None
    """Inputs, ``[count]``. None: one token, the one sampled last, fed back by the last pool."""
    samples: bool
    """Whether the token at position ``start + count`` is sampled, or the text made a vector."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One batch of work that travels once through all pools."""

    id: int
    """Counts all turns of a scheduler, over its epochs."""
    epoch: int
    batch: int
    """Sequences that decode together; the next turn of a batch waits at the first pool for this one's tokens."""
    opens: tuple[Opening, ...]
    closes: tuple[int, ...]
    """Sequences whose slabs are freed, before any is made."""
    chunks: tuple[Chunk, ...]
    """May be empty, when slabs are only closed."""
    grows: tuple[Growth, ...] = ()
    """Slabs that have become too small; not those that this turn opens or closes."""

    @property
    def num_tokens(self) -> int:
        """Positions that are computed."""
        return sum(chunk.count for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class Sampled:
    """A token that the last pool drew."""

    sequence: int
    position: int
    """In the whole sequence, prompt included: the end of the chunk that it was sampled from."""
    token: Annotated[int, Field(ge=0, lt=2**31)]
    logprob: float | None = None
    """Its log-probability, when asked for."""
    top: tuple[tuple[int, float], ...] = ()
    """The most probable tokens with their log-probabilities, as many as asked for, most probable first."""
    finish: Literal["stop"] | None = None
    """Whether this is the sequence's last token: a stop token, or its grammar is complete."""


@dataclass(frozen=True, slots=True)
class Pooled:
    """A vector that the last pool of an encoder made of a text."""

    sequence: int
    position: int
    """Tokens of the text."""
    vector: bytes
    """32-bit floats, little-endian."""


Outcome: TypeAlias = Sampled | Pooled
"""What comes of a chunk that samples."""


@dataclass(frozen=True, slots=True)
class TurnResult:
    """What the last pool tells the server of a turn."""

    turn: int
    epoch: int
    sampled: tuple[Outcome, ...]
    """One for each chunk that samples."""
    seconds: tuple[float, ...] = ()
    """Time that each pool computed, where it is known."""
