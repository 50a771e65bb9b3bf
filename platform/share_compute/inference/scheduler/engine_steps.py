"""Engine steps (`EngineStep`): the batches of work that the server of a replica sends to its stages, and their results.

Server and stages rely on these invariants:

1. Every stage executes the steps of an epoch one after the other, in the order of their ids. So a step may close a KV
   slot, or copy from it, while earlier steps that write to the slot are in flight.
2. Within a step a stage first frees the KV slots in `EngineStep.closes`, then enlarges those in `EngineStep.grows`,
   then opens those in `EngineStep.opens`. Then it computes the chunks, each of a different sequence.
3. The first chunk in a KV slot begins at `Opening.copy_tokens`, and each next chunk where the previous one ended. The
   chunks with the tokens of `Opening.history` come first. The last of them samples a token, and so does every later
   chunk.
4. A sampled token is the input of the next chunk in its KV slot. The first stage receives it from the last stage, so
   the chunk itself contains no tokens. Tokens sampled after the end of a sequence are dropped.
5. In an encoder, each sequence has one chunk, its whole text, which gives a `Pooled`. No KV slots are opened or closed.
6. A new epoch begins with no KV slots and no steps in flight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from share_compute.inference.scheduler.options import SamplingOptions


@dataclass(frozen=True, slots=True)
class Opening:
    """A KV slot to open at every stage."""

    sequence: int
    capacity_tokens: int
    """Capacity of the slot in positions."""
    options: SamplingOptions
    history: tuple[int, ...]
    """Tokens of the prompt, then the tokens emitted so far."""
    prompt_tokens: int
    """Number of prompt tokens; the history begins with them."""
    copy_from: int | None = None
    """Sequence whose KV slot is copied; the step neither closes nor opens that slot. None to copy nothing."""
    copy_tokens: int = 0
    """Number of positions to copy; less than the length of the history, because its last token must be computed."""


@dataclass(frozen=True, slots=True)
class SlotGrowth:
    """A KV slot that gets more capacity at every stage.

    The stage copies the slot to a larger one, and both take memory until the copy is complete.
    """

    sequence: int
    capacity_tokens: int
    """New capacity in positions; positions that are written keep their contents."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One sequence's part of an engine step: positions ``start`` to ``start + count`` (exclusive) are computed."""

    sequence: int
    start: int
    count: int
    tokens: tuple[int, ...] | None
    """Input token ids, ``[count]``. None if the only input is the sequence's last sampled token."""
    samples: bool
    """Whether the last stage samples the token at position ``start + count``, or computes the vector of the text."""


@dataclass(frozen=True, slots=True)
class EngineStep:
    """An engine step: one batch of work, which passes all stages once."""

    id: int
    """Number of the step, counted over all epochs of a scheduler."""
    epoch: int
    batch: int
    """Index of the decode batch that the step belongs to."""
    opens: tuple[Opening, ...]
    closes: tuple[int, ...]
    """Sequences whose KV slots are freed."""
    chunks: tuple[Chunk, ...]
    """Chunks to compute; empty if the step only closes slots."""
    grows: tuple[SlotGrowth, ...] = ()
    """KV slots to enlarge; this step neither opens nor closes any of them."""

    @property
    def num_tokens(self) -> int:
        """Number of positions that the step computes."""
        return sum(chunk.count for chunk in self.chunks)

    def input_ids(self, fed_back: Mapping[int, int]) -> list[int]:
        """Return the token ids that the first stage computes, in the order of the chunks.

        Args:
            fed_back: last sampled token of each sequence whose chunk contains no tokens.
        """
        ids: list[int] = []
        for chunk in self.chunks:
            ids.extend(chunk.tokens if chunk.tokens is not None else (fed_back[chunk.sequence],))
        return ids


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token that the last stage sampled."""

    sequence: int
    position: int
    """Index of the token in its sequence, counted from the start of the prompt: ``start + count`` of its chunk."""
    token: Annotated[int, Field(ge=0, lt=2**31)]
    logprob: float | None = None
    """Log-probability of the token; None unless requested."""
    top: tuple[tuple[int, float], ...] = ()
    """The most probable tokens with their log-probabilities, as many as requested, most probable first."""
    finish: Literal["stop"] | None = None
    """``stop`` if the sequence has ended with a stop token or a complete grammar; otherwise None."""


@dataclass(frozen=True, slots=True)
class Pooled:
    """A vector that the last stage of an encoder computed for a text."""

    sequence: int
    position: int
    """Length of the text in tokens: ``start + count`` of its chunk."""
    vector: bytes
    """The vector as little-endian 32-bit floats."""


Outcome: TypeAlias = SampledToken | Pooled
"""Result of a chunk that samples."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of an engine step, sent by the last stage to the server."""

    step: int
    epoch: int
    sampled: tuple[Outcome, ...]
    """One outcome for each chunk that samples."""
