"""Adjust the logits of sequences before sampling: penalties, bias, forbidden tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from share_compute.inference.runtime.constraints import Grammar
from share_compute.inference.scheduler.engine_steps import Opening

Ids: TypeAlias = NDArray[np.int64]


class SeenTokens:
    """The different tokens that the penalties of one sequence apply to, with the number of times each was generated.

    Args:
        prompt: tokens of the prompt that count; empty if only generated tokens do.
        generated: tokens that were generated before.
    """

    def __init__(self, prompt: Sequence[int], generated: Sequence[int]) -> None:
        ids, firsts = np.unique(np.array([*prompt, *generated], dtype=np.int64), return_inverse=True)
        self._size = len(ids)
        self._ids = ids
        self._counts = np.bincount(firsts[len(prompt) :], minlength=len(ids)).astype(np.float32)
        self._places = {token: place for place, token in enumerate(ids.tolist())}

    @property
    def ids(self) -> Ids:
        """Ids of the tokens, each once."""
        return self._ids[: self._size]

    @property
    def counts(self) -> NDArray[np.float32]:
        """Number of times that each token of `ids` was generated."""
        return self._counts[: self._size]

    def note(self, token: int) -> None:
        """Count a token that was generated."""
        place = self._places.setdefault(token, self._size)
        if place == self._size:
            if place == len(self._ids):
                self._ids = np.pad(self._ids, (0, place + 16))
                self._counts = np.pad(self._counts, (0, place + 16))
            self._ids[place] = token
            self._size += 1
        self._counts[place] += 1


class Adjustment:
    """Changes of one sequence's logits before each draw.

    Penalties are applied first and ``logit_bias`` second, so that the repetition penalty does not scale a bias down. A
    grammar or ``min_tokens`` forbids tokens last, so that no bias makes them possible. Token ids without a logit are
    skipped.

    Args:
        opening: message that opens the sequence.
        grammar: constraint on the sequence's text; None if there is none.
        vocabulary_size: number of logits of the model.
    """

    def __init__(self, opening: Opening, grammar: Grammar | None, vocabulary_size: int) -> None:
        options = opening.options
        prompt, generated = (
            opening.history[: opening.prompt_tokens],
            opening.history[opening.prompt_tokens :],
        )
        self.options = options
        self.grammar = grammar
        self.seen: SeenTokens | None = None
        repeats = options.repetition_penalty != 1
        if repeats or options.frequency_penalty or options.presence_penalty:
            self.seen = SeenTokens(prompt if repeats else (), generated)
        bias = [(token, value) for token, value in options.logit_bias if token < vocabulary_size]
        self.biased: Ids = np.array([token for token, _ in bias], dtype=np.int64)
        self.bias = np.array([value for _, value in bias], dtype=np.float32)
        stops = [token for token in options.stop_token_ids if token < vocabulary_size]
        self._stops: Ids = np.array(stops, dtype=np.int64)
        self._first_stop = 0 if grammar is not None else opening.prompt_tokens + options.min_tokens
        """Position of the first token that may be a stop token."""

    def stops(self, position: int) -> Ids:
        """Return the ids of the stop tokens that ``min_tokens`` forbids at a position."""
        return self._stops if position < self._first_stop else self._stops[:0]

    @property
    def is_neutral(self) -> bool:
        """Whether no logit is ever changed."""
        return (
            self.seen is None
            and self.grammar is None
            and not len(self.biased)
            and not self.options.min_tokens
        )

    def note(self, token: int) -> None:
        """Record a token that was drawn."""
        if self.seen is not None:
            self.seen.note(token)
        if self.grammar is not None:
            self.grammar.accept((token,))


def adjusted(logits: Tensor, adjustments: Sequence[Adjustment], positions: Sequence[int]) -> Tensor:
    """Return adjusted logits ``[rows, vocabulary]``; those of forbidden tokens are -inf.

    Args:
        logits: logits ``[rows, vocabulary]`` in float32; returned unchanged without adjustments.
        adjustments: adjustment of each row.
        positions: position of each row's token in its sequence.
    """
    if all(one.is_neutral for one in adjustments):
        return logits
    scores = logits.clone(memory_format=torch.contiguous_format)
    rows = list(enumerate(adjustments))
    _penalize(scores, [(row, one, one.seen) for row, one in rows if one.seen is not None])
    biased = [(row, one) for row, one in rows if len(one.biased)]
    if biased:
        places = _places(scores, [(row, one.biased) for row, one in biased])
        scores.view(-1)[places] += _joined(scores, [one.bias for _, one in biased])
    waiting = [(row, stops) for row, one in rows if len(stops := one.stops(positions[row]))]
    if waiting:
        scores.view(-1)[_places(scores, waiting)] = -torch.inf
    for row, one in rows:
        if one.grammar is not None:
            allowed = torch.from_numpy(one.grammar.allowed()).to(scores.device)
            scores[row].masked_fill_(~allowed, -torch.inf)
    return scores


def _penalize(scores: Tensor, rows: Sequence[tuple[int, Adjustment, SeenTokens]]) -> None:
    """Apply the penalties of ``rows``: row of ``scores``, adjustment, tokens.

    Repetition penalties as in CTRL (https://arxiv.org/abs/1909.05858), which also count the prompt; frequency and
    presence penalties as in the OpenAI API, which count generated tokens only.
    """
    if not rows:
        return
    places = _places(scores, [(row, seen.ids) for row, _, seen in rows])
    counts = _joined(scores, [seen.counts for *_, seen in rows])
    lengths = torch.tensor([len(seen.ids) for *_, seen in rows])
    rules = [
        (one.options.repetition_penalty, one.options.frequency_penalty, one.options.presence_penalty)
        for _, one, _ in rows
    ]
    repetition, frequency, presence = (
        torch.tensor(rules).repeat_interleave(lengths, dim=0).to(scores.device).unbind(1)
    )
    values = scores.view(-1)[places]
    values = torch.where(values < 0, values * repetition, values / repetition)
    values = values - frequency * counts
    scores.view(-1)[places] = values - presence * (counts > 0)


def _places(scores: Tensor, rows: Sequence[tuple[int, Ids]]) -> Tensor:
    """Return the indexes of logits in the flattened ``scores``, for rows and the token ids of each."""
    size = scores.shape[1]
    return torch.from_numpy(np.concatenate([row * size + ids for row, ids in rows])).to(scores.device)


def _joined(scores: Tensor, values: Sequence[NDArray[np.float32]]) -> Tensor:
    return torch.from_numpy(np.concatenate(values)).to(scores.device)
