"""Attention over a sequence whose tokens are cut into slices, as ring attention (Liu et al. 2023, arXiv 2310.01889).

A slice has the queries of its own tokens. Keys and values of all slices go around a ring. Partial results of the
softmax are merged by their log-sum-exp (Milakov and Gimelshein 2018, arXiv 1805.02867). The backward pass recomputes
the scores (Dao et al. 2022, arXiv 2205.14135). Keys and values go around the ring once more, together with their
gradients. Scores exist for `_ROWS` queries and the keys of one slice at a time.

Each block of scores has the same shapes wherever it is computed. So the result depends on the number of slices only,
not on the processes that compute them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from share_compute.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NAME = "share_compute_ring"
"""Name of the attention function in transformers."""
_ROWS = 512
"""Number of queries whose scores exist at a time."""
_present = threading.local()


class Ring(Protocol):
    """Exchange of tensors between the slices of a sequence."""

    def turn(self, index: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Give tensors to the next slice, and return those of the previous slice in new memory.

        Args:
            index: index of the slice that calls.
            tensors: tensors that must not change until the call returns.

        Raises:
            ContributorLost: another member was lost.
        """


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """One slice of the tokens of a microbatch."""

    index: int
    count: int
    """Number of slices of a sequence."""
    ring: Ring


@contextmanager
def computing_slice(own: SequenceSlice) -> Iterator[None]:
    """Return a context in which this thread computes a slice: attention reads keys and values of all slices."""
    before, _present.slice = present_slice(), own
    try:
        yield
    finally:
        _present.slice = before


def present_slice() -> SequenceSlice | None:
    """Return the slice that this thread computes; None if it computes whole sequences."""
    found: SequenceSlice | None = getattr(_present, "slice", None)
    return found


def use_ring_attention(model: PreTrainedModel) -> None:
    """Make a model use `ring_attention` in `computing_slice`, and torch's attention kernel elsewhere."""
    # Slow to import, and models of declared layers do not need it.
    from transformers import AttentionInterface, AttentionMaskInterface  # noqa: PLC0415

    AttentionInterface.register(_NAME, _attend)
    AttentionMaskInterface.register(_NAME, _mask)
    model.set_attn_implementation(_NAME)


def _mask(*arguments: Any, **options: Any) -> Tensor | None:
    """Return the mask of whole sequences; None for slices, which `_attend` masks."""
    from transformers.masking_utils import sdpa_mask  # noqa: PLC0415

    return None if present_slice() is not None else sdpa_mask(*arguments, **options)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention as transformers calls it; queries, keys and values are ``[batch, heads, tokens, size]``."""
    own = present_slice()
    if own is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: PLC0415

        whole, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, **options
        )
        return whole, None
    unknown = [
        name
        for name in ("sliding_window", "softcap", "position_bias", "s_aux")
        if options.get(name) is not None
    ]
    if unknown or attention_mask is not None or (dropout and module.training):
        what = unknown[0] if unknown else "dropout" if attention_mask is None else "a mask of its own"
        raise UserError(
            f"parallelism.sequence: the attention of {type(module).__name__} has {what}, which slices do not support",
            hint="set parallelism.sequence to 1, or choose an architecture with plain attention, such as llama",
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = ring_attention(query, key, value, own, is_causal=bool(causal), scale=scale)
    return output.transpose(1, 2).contiguous(), None


def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, own: SequenceSlice, *, is_causal: bool, scale: float
) -> Tensor:
    """Return the attention of a slice's queries over all keys and values, ``[batch, heads, tokens, size]``.

    All slices call this function together, and its backward pass, too, in `computing_slice`. It computes in float32.

    Args:
        query: queries of the slice, ``[batch, heads, tokens, size]``.
        key: keys of the slice, ``[batch, key heads, tokens, size]``; the heads are a multiple of the key heads.
        value: values of the slice, like the keys.
        own: the slice.
        is_causal: whether a token sees only itself and the tokens before it.
        scale: factor of the scores.
    """
    output: Tensor = _Ring.apply(query, key, value, own, is_causal, scale)  # type: ignore[no-untyped-call]
    return output


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, own: SequenceSlice, is_causal: bool, scale: float
    ) -> Tensor:
        with torch.autocast(query.device.type, enabled=False):
            grouped = _grouped(query.float(), key.shape[1]) * scale
            output, total = _forward(grouped, key, value, own, is_causal=is_causal)
        ctx.save_for_backward(query, key, value, output, total)
        ctx.is_causal, ctx.scale = is_causal, scale
        return output.view(query.shape).to(query.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, total = ctx.saved_tensors
        own = present_slice()
        assert own is not None, "a backward pass runs in `computing_slice`"
        with torch.autocast(query.device.type, enabled=False):
            grouped = _grouped(query.float(), key.shape[1]) * ctx.scale
            arrived = _grouped(gradients[0].float(), key.shape[1])
            found = _backward(grouped, key, value, output, total, arrived, own, is_causal=ctx.is_causal)
        to_query, to_key, to_value = found
        to_query = (to_query * ctx.scale).view(query.shape)
        return to_query.to(query.dtype), to_key.to(key.dtype), to_value.to(value.dtype), None, None, None


def _grouped(heads: Tensor, groups: int) -> Tensor:
    """Return ``[batch, heads, tokens, size]`` as ``[batch, groups, n, tokens, size]``; heads of a group share keys."""
    batch, count, tokens, size = heads.shape
    return heads.reshape(batch, groups, count // groups, tokens, size)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, own: SequenceSlice, *, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Return the output, and the log-sum-exp of each query's scores.

    Args:
        query: scaled queries, ``[batch, groups, n, tokens, size]``.
        key: keys of the slice, ``[batch, groups, tokens, size]``.
        value: values of the slice, like the keys.
        own: the slice.
        is_causal: whether a token sees only itself and the tokens before it.
    """
    output = query.new_zeros(*query.shape[:-1], value.shape[-1])
    total = query.new_full(query.shape[:-1], -torch.inf)
    pair = [key, value]
    for hop in range(own.count):
        source = (own.index - hop) % own.count
        if not (is_causal and source > own.index):
            keys, values = (each.float().unsqueeze(2) for each in pair)
            for rows in _rows(query.shape[3]):
                scores = _scores(
                    query[..., rows, :], keys, rows, is_diagonal=is_causal and source == own.index
                )
                part = scores.logsumexp(-1)
                block = torch.exp(scores - part.unsqueeze(-1)) @ values
                before, merged = total[..., rows], torch.logaddexp(total[..., rows], part)
                output[..., rows, :] = output[..., rows, :] * torch.exp(before - merged).unsqueeze(
                    -1
                ) + block * torch.exp(part - merged).unsqueeze(-1)
                total[..., rows] = merged
        if hop + 1 < own.count:
            pair = own.ring.turn(own.index, pair)
    return output, total


def _backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    total: Tensor,
    arrived: Tensor,
    own: SequenceSlice,
    *,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of scaled queries, keys and values of the slice; see `_forward`.

    Args:
        query: as in `_forward`.
        key: as in `_forward`.
        value: as in `_forward`.
        output: output of `_forward`.
        total: log-sum-exp of `_forward`.
        arrived: gradient of the output.
        own: the slice.
        is_causal: as in `_forward`.
    """
    inner = (arrived * output).sum(-1, keepdim=True)
    to_query = torch.zeros_like(query)
    pair = [key, value]
    sums = [torch.zeros_like(each, dtype=torch.float32) for each in pair]
    for hop in range(own.count):
        source = (own.index - hop) % own.count
        if not (is_causal and source > own.index):
            keys, values = (each.float().unsqueeze(2) for each in pair)
            for rows in _rows(query.shape[3]):
                asked, given = query[..., rows, :], arrived[..., rows, :]
                scores = _scores(asked, keys, rows, is_diagonal=is_causal and source == own.index)
                weights = torch.exp(scores - total[..., rows].unsqueeze(-1))
                to_scores = weights * (given @ values.transpose(-1, -2) - inner[..., rows, :])
                to_query[..., rows, :] += to_scores @ keys
                sums[0] += (to_scores.transpose(-1, -2) @ asked).sum(2)
                sums[1] += (weights.transpose(-1, -2) @ given).sum(2)
        if own.count > 1:
            # After the last turn, the sums are back at their slice; keys and values are no longer needed.
            is_last = hop + 1 == own.count
            turned = own.ring.turn(own.index, sums if is_last else [*pair, *sums])
            sums, pair = turned[-2:], turned[:-2]
    return to_query, sums[0], sums[1]


def _scores(query: Tensor, keys: Tensor, rows: slice, *, is_diagonal: bool) -> Tensor:
    """Return the scores of some queries, ``[batch, groups, n, rows, tokens]``; a diagonal block masks later tokens."""
    scores = query @ keys.transpose(-1, -2)
    if is_diagonal:
        places = torch.arange(keys.shape[-2], device=keys.device)
        scores.masked_fill_(places > places[rows].unsqueeze(-1), -torch.inf)
    return scores


def _rows(tokens: int) -> Iterator[slice]:
    for start in range(0, tokens, _ROWS):
        yield slice(start, min(start + _ROWS, tokens))
