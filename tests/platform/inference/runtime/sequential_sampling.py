"""The sampler before sequences were sampled together: one sequence after the other, by plain torch operations.

Tests compare `share_compute.inference.runtime.sampling` with it: both must draw the same tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from share_compute.inference.scheduler.engine_steps import Opening
from share_compute.inference.scheduler.options import SamplingOptions

_LIKELIEST = 1024


def sampled_alone(
    logits: Tensor, one: Opening, position: int
) -> tuple[int, float | None, tuple[tuple[int, float], ...]]:
    """Return the token at ``position``, its log-probability, and the most probable tokens with theirs."""
    options = one.options
    scores = adjusted(logits, one, position)
    token = int(scores.argmax() if options.temperature == 0 else draw(scores, options, position))
    if options.logprobs is None:
        return token, None, ()
    every = logits.log_softmax(-1)
    values, ids = every.topk(min(options.logprobs, len(every)))
    return token, float(every[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True))


def adjusted(logits: Tensor, one: Opening, position: int) -> Tensor:
    options, scores = one.options, logits
    if options.repetition_penalty != 1:
        seen: Any = torch.tensor([one.history])
        scores = RepetitionPenaltyLogitsProcessor(options.repetition_penalty)(seen, scores[None].clone())[0]
    if options.frequency_penalty or options.presence_penalty:
        generated = torch.tensor(one.history[one.prompt_tokens :], dtype=torch.int64)
        counts = torch.bincount(generated, minlength=len(logits)).float()
        scores = scores - options.frequency_penalty * counts
        scores = scores - options.presence_penalty * (counts > 0)
    if options.logit_bias:
        bias = torch.zeros(len(logits))
        for token, value in options.logit_bias:
            bias[token] = value
        scores = scores + bias
    if position - one.prompt_tokens < options.min_tokens:
        scores = scores.index_fill(0, torch.tensor(options.stop_token_ids, dtype=torch.int64), -torch.inf)
    return scores


def draw(scores: Tensor, options: SamplingOptions, position: int) -> Tensor:
    weights = ((scores - scores.max()) / options.temperature).exp()
    weights = weights.masked_fill(weights < least(weights, options), 0.0)
    source = np.random.Generator(np.random.Philox(key=options.seed % 2**64, counter=position << 64))
    lots = torch.from_numpy(source.standard_exponential(len(weights)))
    return (weights / lots).argmax()


def least(weights: Tensor, options: SamplingOptions) -> Tensor:
    found = weights.new_tensor(options.min_p)
    best, total = weights, weights.sum()
    if options.top_k:
        best = weights.topk(min(options.top_k, len(weights))).values
        total = best.sum()
        found = torch.maximum(found, best[-1])
    if options.top_p < 1:
        if not options.top_k:
            best = weights.topk(min(_LIKELIEST, len(weights))).values
            if best.sum() < options.top_p * total:
                best = weights.sort(descending=True).values
        before = best.cumsum(0) - best
        found = torch.maximum(found, best[(before < options.top_p * total).sum() - 1])
    return found
