"""Sampling: draw tokens from a model's logits, according to the options of each sequence.

Each draw uses one exponential random number per token id. These numbers depend only on the seed and the position to
fill. The token with the largest quotient of probability and random number is drawn (equivalent to the Gumbel-max
trick).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from share_compute.errors import UserError
from share_compute.inference.runtime.constraints import Grammar, Grammars
from share_compute.inference.scheduler.engine_steps import Chunk, Opening, SampledToken
from share_compute.inference.scheduler.options import SamplingOptions

_LIKELIEST = 1024
"""Number of most probable tokens that ``top_p`` tries first, because sorting a whole vocabulary is slow."""


class _Sequence:
    """Sampling state of one sequence."""

    def __init__(
        self, opening: Opening, grammar: Grammar | None, vocabulary_size: int, device: torch.device
    ) -> None:
        options = opening.options
        self.options = options
        self.prompt_tokens = opening.prompt_tokens
        self.grammar = grammar
        self.end: int | None = None
        """The token that ended the sequence; None while it continues."""
        self.is_greedy = options.temperature == 0
        self._stops = torch.tensor(options.stop_token_ids, dtype=torch.int64, device=device)
        self._seen: Tensor | None = None
        self._num_seen = len(opening.history)
        self._counts: Tensor | None = None
        if options.repetition_penalty != 1:
            self._repetition = RepetitionPenaltyLogitsProcessor(options.repetition_penalty)
            self._seen = torch.tensor([opening.history], dtype=torch.int64, device=device)
        generated = opening.history[opening.prompt_tokens :]
        if options.frequency_penalty or options.presence_penalty:
            made = torch.tensor(generated, dtype=torch.int64, device=device)
            self._counts = torch.bincount(made, minlength=vocabulary_size).float()
        if grammar is not None:
            grammar.accept(generated)

    @property
    def is_plain(self) -> bool:
        """Whether each token is the one with the largest unadjusted logit."""
        options = self.options
        return (
            self.is_greedy
            and self._seen is None
            and self._counts is None
            and self.grammar is None
            and not options.min_tokens
        )

    def adjust(self, logits: Tensor, position: int) -> Tensor:
        """Return the logits ``[vocabulary]`` for ``position`` with penalties applied; forbidden tokens have -inf."""
        options, scores = self.options, logits
        if self._seen is not None:
            seen: torch.LongTensor = self._seen[:, : self._num_seen]  # type: ignore[assignment]
            scores = self._repetition(seen, scores[None].clone())[0]
        if self._counts is not None:
            scores = scores - options.frequency_penalty * self._counts
            scores = scores - options.presence_penalty * (self._counts > 0)
        if self.grammar is not None:
            allowed = torch.from_numpy(self.grammar.allowed()).to(scores.device)
            scores = scores.masked_fill(~allowed, -torch.inf)
        elif position - self.prompt_tokens < options.min_tokens:
            scores = scores.index_fill(0, self._stops, -torch.inf)
        return scores

    def note(self, token: int) -> None:
        """Record a token that was drawn, and whether it ends the sequence."""
        if self._seen is not None:
            if self._num_seen == self._seen.shape[1]:
                self._seen = torch.nn.functional.pad(self._seen, (0, self._num_seen))
            self._seen[0, self._num_seen] = token
            self._num_seen += 1
        if self._counts is not None:
            self._counts[token] += 1
        if self.grammar is not None:
            self.grammar.accept((token,))
        if token in self.options.stop_token_ids or (self.grammar is not None and self.grammar.is_complete):
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
        self._device = device
        self._grammars = None if tokenizer is None else Grammars(tokenizer, vocabulary_size)
        self._sequences: dict[int, _Sequence] = {}

    def open(self, opening: Opening) -> None:
        """Create the sampling state of a sequence.

        Raises:
            UserError: the sequence's JSON schema, or the model's tokenizer, cannot be used for constrained decoding.
                ``details`` names the sequence.
        """
        schema = opening.options.json_schema
        try:
            grammar = None if schema is None else self._grammar(schema)
        except UserError as refusal:
            refusal.details = {**refusal.details, "sequence": opening.sequence}
            raise
        self._sequences[opening.sequence] = _Sequence(opening, grammar, self._vocabulary_size, self._device)

    def _grammar(self, schema: str) -> Grammar:
        if self._grammars is None:
            raise UserError(
                "constrained text needs the model's tokenizer",
                hint="serve a folder that holds a tokenizer",
            )
        return self._grammars.start(schema)

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

        Args:
            logits: logits after the last token of each chunk, ``[chunks, vocabulary]``.
            chunks: the chunks that sample, one row of ``logits`` each.
        """
        if not chunks:
            return ()
        logits = logits.float()
        drawn = logits.argmax(-1)
        for row, chunk in enumerate(chunks):
            sequence = self._sequences[chunk.sequence]
            if not sequence.is_plain and sequence.end is None:
                position = chunk.start + chunk.count
                scores = sequence.adjust(logits[row], position)
                drawn[row] = (
                    scores.argmax() if sequence.is_greedy else draw(scores, sequence.options, position)
                )
        return tuple(
            self._sampled(chunk, token, logits[row])
            for row, (chunk, token) in enumerate(zip(chunks, drawn.tolist(), strict=True))
        )

    def _sampled(self, chunk: Chunk, token: int, logits: Tensor) -> SampledToken:
        sequence, position = self._sequences[chunk.sequence], chunk.start + chunk.count
        if sequence.end is not None:
            # The scheduler sent this step before it knew that the sequence had ended; it will drop the token.
            return SampledToken(chunk.sequence, position, sequence.end, finish="stop")
        sequence.note(token)
        logprob: float | None = None
        top: tuple[tuple[int, float], ...] = ()
        if sequence.options.logprobs is not None:
            logprob, top = _logprobs(logits, token, sequence.options.logprobs)
        finish = None if sequence.end is None else "stop"
        return SampledToken(chunk.sequence, position, token, logprob, top, finish)


def draw(scores: Tensor, options: SamplingOptions, position: int) -> Tensor:
    """Return the id of the token drawn for a position, as a scalar tensor.

    Args:
        scores: logits ``[vocabulary]``.
        options: sampling options with a temperature above 0.
        position: position of the token in the sequence.
    """
    # Subtract the maximum first, so that exp does not overflow at a small temperature.
    weights = ((scores - scores.max()) / options.temperature).exp()
    weights = weights.masked_fill(weights < _least(weights, options), 0.0)
    source = np.random.Generator(np.random.Philox(key=options.seed % 2**64, counter=position << 64))
    lots = torch.from_numpy(source.standard_exponential(len(weights)))
    return (weights / lots.to(weights.device)).argmax()


def _least(weights: Tensor, options: SamplingOptions) -> Tensor:
    """Return the smallest weight that may be drawn; ``weights`` is ``[vocabulary]`` with a maximum of 1."""
    least = weights.new_tensor(options.min_p)
    best, total = weights, weights.sum()
    if options.top_k:
        best = weights.topk(min(options.top_k, len(weights))).values
        total = best.sum()
        least = torch.maximum(least, best[-1])
    if options.top_p < 1:
        if not options.top_k:
            best = weights.topk(min(_LIKELIEST, len(weights))).values
            if best.sum() < options.top_p * total:
                best = weights.sort(descending=True).values
        # Keep a token if all more probable tokens together have less than top_p. So the kept ones have at least top_p.
        before = best.cumsum(0) - best
        least = torch.maximum(least, best[(before < options.top_p * total).sum() - 1])
    return least


def _logprobs(logits: Tensor, token: int, count: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """Return a token's log-probability, and (token, log-probability) of the ``count`` most probable tokens.

    Log-probabilities are computed from the unadjusted logits ``[vocabulary]``.
    """
    every = logits.log_softmax(-1)
    values, ids = every.topk(min(count, len(every)))
    return float(every[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True))
