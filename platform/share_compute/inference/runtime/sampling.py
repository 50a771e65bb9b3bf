"""Sampling: draw tokens from a model's logits, according to the options of each sequence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from share_compute.errors import UserError
from share_compute.inference.runtime.adjustments import Adjustment, adjusted
from share_compute.inference.runtime.constraints import Grammar, Grammars
from share_compute.inference.runtime.drawing import draw, most_probable
from share_compute.inference.scheduler.engine_steps import Chunk, Opening, SampledToken
from share_compute.inference.scheduler.options import SamplingOptions

_BLOCK_NUMBERS = 1 << 17
"""Number of logits that a CPU processes at once: so many float32 numbers fit into the cache of a core."""


class _Sequence:
    """Sampling state of one sequence."""

    def __init__(self, opening: Opening, grammar: Grammar | None, vocabulary_size: int) -> None:
        self.options = opening.options
        self.adjustment = Adjustment(opening, grammar, vocabulary_size)
        self.end: int | None = None
        """The token that ended the sequence; None while it continues."""
        self.is_greedy = np.float32(self.options.temperature) == 0
        """Whether each token is the one with the largest adjusted logit."""
        if grammar is not None:
            grammar.accept(opening.history[opening.prompt_tokens :])

    def note(self, token: int) -> None:
        """Record a token that was drawn, and whether it ends the sequence."""
        self.adjustment.note(token)
        grammar = self.adjustment.grammar
        if token in self.options.stop_token_ids or (grammar is not None and grammar.is_complete):
            self.end = token


class Sampler:
    """Draws the tokens of all sequences of a replica, on its last stage.

    Args:
        vocabulary_size: number of logits of the model.
        device: device of the logits.
        tokenizer: folder of the tokenizer, for constrained text; None if there is none.
    """

    def __init__(self, vocabulary_size: int, device: torch.device, tokenizer: Path | None = None) -> None:
        self._vocabulary_size = vocabulary_size
        self._rows_at_once = max(1, _BLOCK_NUMBERS // vocabulary_size) if device.type == "cpu" else None
        """Number of rows of logits that are processed at once; None for all."""
        self._grammars = None if tokenizer is None else Grammars(tokenizer, vocabulary_size)
        self._sequences: dict[int, _Sequence] = {}

    def open(self, opening: Opening) -> None:
        """Create the sampling state of a sequence.

        Raises:
            UserError: the sequence's JSON schema or grammar, or the model's tokenizer, cannot be used for constrained
                decoding. ``details`` names the sequence.
        """
        try:
            grammar = self._grammar(opening.options)
        except UserError as refusal:
            refusal.details = {**refusal.details, "sequence": opening.sequence}
            raise
        self._sequences[opening.sequence] = _Sequence(opening, grammar, self._vocabulary_size)

    def _grammar(self, options: SamplingOptions) -> Grammar | None:
        constraint = options.json_schema if options.grammar is None else options.grammar
        if constraint is None:
            return None
        if self._grammars is None:
            raise UserError(
                "constrained text needs the model's tokenizer",
                hint="serve a folder that holds a tokenizer",
            )
        is_lark, stop_ids = options.grammar is not None, options.stop_token_ids
        return self._grammars.start(constraint, is_lark=is_lark, stop_ids=stop_ids)

    def warm_up(self) -> None:
        """Load the tokenizer for constrained text in advance; do nothing if there is no usable tokenizer."""
        if self._grammars is not None:
            with suppress(UserError):  # the first request for constrained text reports the error
                self._grammars.warm_up()

    def close(self, sequence: int) -> None:
        """Forget a sequence."""
        del self._sequences[sequence]

    def clear(self) -> None:
        """Forget all sequences."""
        self._sequences.clear()

    def sample(self, logits: Tensor, chunks: Sequence[Chunk]) -> tuple[SampledToken, ...]:
        """Sample one token after each chunk. A sequence that has ended repeats its last token.

        The token of a sequence does not depend on the other sequences of the call.

        Args:
            logits: logits after the last token of each chunk, ``[chunks, vocabulary]``.
            chunks: the chunks that sample, one row of ``logits`` each.
        """
        rows = [
            _Row(row, self._sequences[chunk.sequence], chunk.start + chunk.count)
            for row, chunk in enumerate(chunks)
        ]
        # The scheduler sent this step before it knew of the end of some sequences, and drops their tokens.
        active = [row for row in rows if row.sequence.end is None]
        for block in self._blocks(row for row in active if row.sequence.is_greedy):
            _note(block, most_probable(_adjusted(logits, block)))
        for block in self._blocks(row for row in active if not row.sequence.is_greedy):
            options, positions = [row.sequence.options for row in block], [row.position for row in block]
            _note(block, draw(_adjusted(logits, block), options, positions))
        for block in self._blocks(row for row in active if row.sequence.options.logprobs is not None):
            _add_logprobs(block, _taken(logits, block).log_softmax(-1))
        return tuple(row.sampled(chunk) for row, chunk in zip(rows, chunks, strict=True))

    def _blocks(self, rows: Iterable[_Row]) -> Iterator[list[_Row]]:
        """Split rows into lists of rows that are processed at once."""
        left = list(rows)
        at_once = self._rows_at_once or max(1, len(left))
        for start in range(0, len(left), at_once):
            yield left[start : start + at_once]


@dataclass(slots=True)
class _Row:
    """A row of logits, and the token that is drawn from it."""

    index: int
    sequence: _Sequence
    position: int
    """Position of the token in the sequence."""
    token: int | None = None
    """The drawn token; None for a sequence that had ended before."""
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()

    def sampled(self, chunk: Chunk) -> SampledToken:
        """Return the token of the chunk that the row belongs to."""
        end = self.sequence.end
        token = self.token if self.token is not None else end
        assert token is not None
        finish: Literal["stop"] | None = None if end is None else "stop"
        return SampledToken(chunk.sequence, self.position, token, self.logprob, self.top, finish)


def _taken(logits: Tensor, rows: Sequence[_Row]) -> Tensor:
    """Return the logits of some rows ``[rows, vocabulary]``, in float32; they must not be changed."""
    if len(rows) == 1:
        return logits[rows[0].index][None].float()
    return torch.stack([logits[row.index] for row in rows]).float()  # twice as fast as indexing


def _adjusted(logits: Tensor, rows: Sequence[_Row]) -> Tensor:
    adjustments, positions = [row.sequence.adjustment for row in rows], [row.position for row in rows]
    return adjusted(_taken(logits, rows), adjustments, positions)


def _note(rows: Sequence[_Row], tokens: Sequence[int]) -> None:
    for row, token in zip(rows, tokens, strict=True):
        row.token = token
        row.sequence.note(token)


def _add_logprobs(rows: Sequence[_Row], logprobs: Tensor) -> None:
    """Add the log-probabilities of the drawn and the most probable tokens to rows.

    Args:
        rows: rows whose sequences report log-probabilities.
        logprobs: logarithms of the model's own probabilities ``[rows, vocabulary]``: no option has changed them.
    """
    for row, every in zip(rows, logprobs, strict=True):
        row.logprob = float(every[row.token])
        values, ids = every.topk(min(row.sequence.options.logprobs or 0, len(every)))
        row.top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
