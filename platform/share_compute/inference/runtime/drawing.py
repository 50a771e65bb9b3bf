"""Draw tokens from logits with temperature, top-k, top-p and min-p.

Each draw uses one exponential random number per token id, which depends only on the seed and the token's position. The
token with the largest quotient of probability and random number is drawn (equivalent to the Gumbel-max trick).

A drawn token must not depend on the other rows of a call. So several rows are computed at once only by operations whose
bits do not depend on the batch. Sums are computed row by row: torch splits the sum of a single long row between
threads, which changes its rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from share_compute.inference.scheduler.options import SamplingOptions

Ids: TypeAlias = NDArray[np.int64]
Weights: TypeAlias = NDArray[np.float32]

_SMALL = 4096
"""Largest vocabulary that is sorted whole: finding the most probable tokens first would not be faster."""
_FIRST_FRACTION = 8192
"""The first search for probable tokens finds those that have at least 1/8192 of the sum of all weights."""
_GROWTH = 8
"""Each further search lowers that bound by this factor."""


def most_probable(scores: Tensor) -> list[int]:
    """Return the id of the token with the largest logit in each row of ``scores`` ``[rows, vocabulary]``."""
    if scores.device.type == "cpu":
        best: list[int] = scores.numpy().argmax(-1).tolist()  # ten times as fast as argmax of torch
        return best
    return scores.argmax(-1).tolist()


def draw(scores: Tensor, options: Sequence[SamplingOptions], positions: Sequence[int]) -> list[int]:
    """Return the id of the token drawn in each row.

    Args:
        scores: logits ``[rows, vocabulary]`` in float32.
        options: sampling options of each row, with a temperature above 0 in float32.
        positions: position of each row's token in its sequence.
    """
    temperatures = torch.tensor([[one.temperature] for one in options], device=scores.device)
    # Subtract the maximum first, so that exp does not overflow at a small temperature.
    weights = (scores - scores.amax(-1, keepdim=True)).div_(temperatures).exp_().cpu()
    rows = zip(weights, options, positions, strict=True)
    return [_drawn(row, one, position) for row, one, position in rows]


def _drawn(weights: Tensor, options: SamplingOptions, position: int) -> int:
    """Return the id of the token drawn from ``weights`` ``[vocabulary]``, whose maximum is 1."""
    ids = eligible(weights, options)
    if ids is not None and len(ids) == 1:
        return int(ids[0])  # random numbers take most of the time of a draw
    source = np.random.Generator(np.random.Philox(key=options.seed % 2**64, counter=position << 64))
    if ids is None:
        return int((weights.numpy() / source.standard_exponential(len(weights))).argmax())
    lots = source.standard_exponential(int(ids[-1]) + 1)
    return int(ids[(weights.numpy()[ids] / lots[ids]).argmax()])


def eligible(weights: Tensor, options: SamplingOptions) -> Ids | None:
    """Return the ids of the tokens that top-k, top-p and min-p keep, in ascending order; None if all are kept.

    Args:
        weights: probabilities ``[vocabulary]`` divided by the largest one, in float32 on the CPU.
        options: sampling options.
    """
    if not options.top_k and options.top_p >= 1 and not options.min_p:
        return None
    total = np.float32(weights.sum().item())
    if np.isnan(total):
        return None
    if not options.top_k and options.top_p >= 1:
        return np.flatnonzero(weights.numpy() >= np.float32(options.min_p))
    for ids, found, is_whole in _searches(weights.numpy(), total):
        least = _least(found, total, options, is_whole=is_whole)
        if least is not None:
            return ids[found >= least]
    raise AssertionError("the last search finds all tokens")


def _searches(weights: Weights, total: np.float32) -> Iterator[tuple[Ids, Weights, bool]]:
    """Yield growing sets of the most probable tokens: ids, their weights, and whether the set has all tokens.

    Sorting a large vocabulary takes most of the time of a draw, and most draws need only a small sorted part.
    """
    size, fraction = len(weights), _FIRST_FRACTION
    while size > _SMALL and fraction <= size * _GROWTH:
        ids = np.flatnonzero(weights >= total / np.float32(fraction))
        yield ids, weights[ids], len(ids) == size
        fraction *= _GROWTH
    yield np.arange(size), weights, True


def _least(
    found: Weights, total: np.float32, options: SamplingOptions, *, is_whole: bool
) -> np.float32 | None:
    """Return the smallest weight that may be drawn; None if the smallest weight depends on tokens outside ``found``.

    Args:
        found: weights of the most probable tokens, in any order.
        total: sum of the weights of all tokens.
        options: sampling options.
        is_whole: whether ``found`` has the weights of all tokens.
    """
    least = np.float32(options.min_p)
    top_k = min(options.top_k, len(found)) if is_whole else options.top_k
    if len(found) < max(1, top_k):
        return None
    best = np.sort(found)[::-1]
    if top_k:
        best = best[:top_k]
        total = np.float32(torch.from_numpy(best.copy()).sum().item())
        least = max(least, best[-1])
    if options.top_p < 1:
        # Keep a token if the more probable ones sum to less than top_p. So the kept tokens sum to at least top_p.
        before = best.cumsum(dtype=np.float64).astype(np.float32) - best
        num_kept = int(np.count_nonzero(before < np.float32(options.top_p) * total))
        if num_kept == len(best) and not (is_whole or top_k):
            return None
        least = max(least, best[max(1, num_kept) - 1])
    return least
