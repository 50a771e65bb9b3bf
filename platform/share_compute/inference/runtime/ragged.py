"""Ragged attention: the chunks of an engine step are concatenated along the token dimension, without padding.

Transformers models call the attention function that their configuration names; here this is `attend`, which computes
attention for each chunk separately. There is no list of supported architectures: `Probe` and `attend` raise an error
for models that need a different kind of attention.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from share_compute.errors import UserError
from share_compute.inference.runtime.kv_slots import KVSlot, LayerCache
from share_compute.inference.runtime.opaque import define_operator

RAGGED = "share_compute_ragged"
"""Name under which `attend` is registered as an attention implementation."""
_HARMLESS = frozenset({"position_ids", "cache_position", "position_embeddings"})
"""Tensor arguments that some models pass to attention functions, and that `attend` can ignore."""
_KINDS = frozenset({"full_attention", "sliding_attention"})
"""Layer types that `attend` supports."""


class AttentionChunk:
    """A chunk of an engine step: positions [start, start + count) of a KV slot.

    Args:
        slot: KV slot of the sequence.
        start: first position of the chunk.
        count: number of tokens.
    """

    __slots__ = ("count", "slot", "start", "stop")

    def __init__(self, slot: KVSlot, start: int, count: int) -> None:
        assert start + count <= slot.capacity_tokens
        self.slot = slot
        self.start = start
        self.count = count
        self.stop = start + count

    def first_seen(self, window: int | None) -> int:
        """Return the first position that any token of the chunk attends to; ``window`` as in `Attention.attend`."""
        return 0 if window is None else max(0, self.start + 1 - window)

    def is_triangle(self, window: int | None) -> bool:
        """Return whether the mask is purely causal: the chunk begins at position 0, and the window covers all of it."""
        return self.start == 0 and (window is None or self.count <= window)


class Attention:
    """Attention state of one engine step, shared by all layers of a shard.

    Each layer calls `attend` once, in the order of the layers.

    Args:
        pieces: chunks in the order of their tokens.
    """

    def __init__(self, pieces: Sequence[AttentionChunk]) -> None:
        self._pieces = pieces
        self._counts = [piece.count for piece in pieces]
        self._decodes = all(count == 1 for count in self._counts)
        written = [piece.slot.between(piece.start, piece.stop) for piece in pieces]
        self._written = list(zip(*written, strict=True))
        self._seen: dict[int | None, list[tuple[Tensor, ...]]] = {}
        self._masks: dict[tuple[int, int | None], Tensor] = {}
        self._layer = -1

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Write the keys and values of the next layer to the KV slots, and compute the layer's attention.

        Args:
            query: ``[1, heads, tokens, key_size]``.
            key: ``[1, kv_heads, tokens, key_size]``.
            value: ``[1, kv_heads, tokens, value_size]``.
            scaling: factor of the products of queries and keys; None for ``key_size ** -0.5``.
            window: number of positions that each token attends to: its own and those before it; None for all.
            softcap: bound of the scaled products, applied with tanh; None for no bound.
            sinks: attention sinks ``[heads]``: logits that take part in the softmax but have no value; None for no
                sinks.

        Returns:
            Attention outputs ``[1, tokens, heads, value_size]``.
        """
        self._layer += 1
        place = 2 * self._layer
        if len(self._counts) == 1:
            self._written[place][0].copy_(key)
            self._written[place + 1][0].copy_(value)
        else:
            torch._foreach_copy_(
                self._written[place] + self._written[place + 1],
                key.split_with_sizes(self._counts, 2) + value.split_with_sizes(self._counts, 2),
            )
        if window not in self._seen:
            views = [piece.slot.between(piece.first_seen(window), piece.stop) for piece in self._pieces]
            self._seen[window] = list(zip(*views, strict=True))
        keys, values = self._seen[window][place], self._seen[window][place + 1]
        if softcap is not None or sinks is not None:
            found = [
                _by_hand(
                    asking,
                    keys[index],
                    values[index],
                    self._mask(index, window, query),
                    scaling,
                    softcap,
                    sinks,
                )
                for index, asking in enumerate(query.split_with_sizes(self._counts, 2))
            ]
            return torch.cat(found, 1)
        groups = key.shape[1]
        if self._decodes:
            # Grouped-query attention: query heads of a group share keys. So they are computed like several tokens that
            # attend to the same positions.
            tokens = query.transpose(1, 2)
            askings = tokens.reshape(tokens.shape[1], 1, groups, -1, tokens.shape[3]).unbind(0)
            found = [
                scaled_dot_product_attention(*each, scale=scaling)
                for each in zip(askings, keys, values, strict=True)
            ]
            outputs = found[0] if len(found) == 1 else torch.cat(found)
            return outputs.reshape(1, *tokens.shape[1:3], -1)
        found = []
        for index, asking in enumerate(query.split_with_sizes(self._counts, 2)):
            triangle = self._pieces[index].is_triangle(window)
            outputs = scaled_dot_product_attention(
                asking,
                keys[index],
                values[index],
                attn_mask=None if triangle else self._mask(index, window, query),
                is_causal=triangle,
                scale=scaling,
                enable_gqa=query.shape[1] != groups,
            )
            found.append(outputs.transpose(1, 2))
        return found[0] if len(found) == 1 else torch.cat(found, 1)

    def _mask(self, index: int, window: int | None, like: Tensor) -> Tensor | None:
        """Return a chunk's additive mask ``[tokens, attended positions]``, cached; None for a single token."""
        piece = self._pieces[index]
        if piece.count == 1:
            return None
        within = None if window is None or piece.stop <= window else window
        key = (index, within)
        if key not in self._masks:
            rows = torch.arange(piece.start, piece.stop, device=like.device)[:, None]
            columns = torch.arange(piece.first_seen(within), piece.stop, device=like.device)
            hidden = columns > rows
            if within is not None:
                hidden |= columns <= rows - within
            mask = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device)
            self._masks[key] = mask.masked_fill_(hidden, -torch.inf)
        return self._masks[key]


class TextAttention(Attention):
    """Attention of an encoder's engine step: tokens also attend to later tokens, and there are no KV slots.

    Args:
        counts: number of tokens of each text, in the order of the texts.
    """

    def __init__(self, counts: Sequence[int]) -> None:
        super().__init__(())
        self._counts = list(counts)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Compute the attention of a layer, text by text; arguments as in `Attention.attend`.

        The window limits the distance to earlier and to later tokens.

        Raises:
            UserError: the model uses softcap or sinks.
        """
        if softcap is not None or sinks is not None:
            raise cannot_serve("encoder", "bends its attention, or gives it sinks")
        grouped = query.shape[1] != key.shape[1]
        parts = (tensor.split_with_sizes(self._counts, 2) for tensor in (query, key, value))
        found = [
            scaled_dot_product_attention(
                queries,
                keys,
                values,
                attn_mask=_near(queries, window),
                scale=scaling,
                enable_gqa=grouped,
            ).transpose(1, 2)
            for queries, keys, values in zip(*parts, strict=True)
        ]
        return torch.cat(found, 1)


def _near(query: Tensor, window: int | None) -> Tensor | None:
    """Return the mask ``[query token, key token]``, true within the window; None if the window covers all tokens."""
    count = query.shape[2]
    if window is None or count <= window:
        return None
    places = torch.arange(count, device=query.device)
    return (places[:, None] - places).abs() < window


def _by_hand(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Compute one chunk's attention with softcap or sinks, which `scaled_dot_product_attention` does not support.

    Shapes as in `Attention.attend`; keys and values are those of the positions that the chunk attends to.
    """
    _, heads, count, size = query.shape
    groups = keys.shape[1]
    shape = (1, groups, heads // groups, count, size)
    products = query.reshape(shape) @ keys[:, :, None].mT
    products = products * (size**-0.5 if scaling is None else scaling)
    if softcap is not None:
        products = torch.tanh(products / softcap) * softcap
    if mask is not None:
        products = products + mask
    if sinks is not None:
        ends = sinks.view(1, groups, -1, 1, 1).expand(*products.shape[:-1], 1)
        products = torch.cat([products, ends.to(products.dtype)], -1)
    weights = torch.softmax(products, -1, dtype=torch.float32).to(query.dtype)
    if sinks is not None:
        weights = weights[..., :-1]
    outputs = weights @ values[:, :, None]
    return outputs.reshape(1, heads, count, -1).transpose(1, 2)


class Probe(Attention):
    """Attention that records the cache shape of each layer, and raises an error for unsupported models.

    Args:
        model_type: name of the architecture, for error messages.
        kinds: type of each of the shard's layers; None if the configuration names no types.
    """

    def __init__(self, model_type: str, kinds: Sequence[str] | None) -> None:
        super().__init__(())
        self._model_type = model_type
        self._kinds = kinds
        self.layers: list[LayerCache] = []

    def check(self, module: nn.Module, window: int | None, options: dict[str, Any]) -> None:
        """Raise a UserError if `attend` does not support the next layer's attention."""
        odd = sorted(
            name for name, given in options.items() if isinstance(given, Tensor) and name not in _HARMLESS
        )
        if odd:
            self._refuse(f"passes additional tensors to its attention: {', '.join(odd)}")
        if options.get("is_causal") is False or getattr(module, "is_causal", True) is False:
            self._refuse("lets tokens attend to later tokens")
        if self._kinds is None or len(self.layers) >= len(self._kinds):
            return
        kind = self._kinds[len(self.layers)]
        if kind not in _KINDS or (kind == "sliding_attention") != (window is not None):
            self._refuse(f"has layers of kind {kind}")

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
        """Record a layer; return zeros of the shape of its attention outputs."""
        self.layers.append(LayerCache(key.shape[1], key.shape[3], value.shape[3]))
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])

    def finish(self, num_layers: int) -> list[LayerCache]:
        """Return the cache shape of each layer.

        Raises:
            UserError: the number of calls of `attend` differs from ``num_layers``.
        """
        if len(self.layers) != num_layers:
            self._refuse("caches more of past tokens than the keys and values of each layer")
        return self.layers

    def _refuse(self, reason: str) -> None:
        raise cannot_serve(self._model_type, reason)


def cannot_serve(model_type: str, reason: str) -> UserError:
    """Return the error for an architecture that cannot be served for ``reason``."""
    return UserError(
        f"architecture {model_type!r} cannot be served here: it {reason}",
        hint="choose an architecture with plain attention in each layer, such as llama, qwen3, gemma3 or mistral",
    )


class _Now(threading.local):
    """Attention state of the engine step that this thread computes now."""

    attention: Attention | None = None


_NOW = _Now()


@contextmanager
def attending(attention: Attention) -> Iterator[None]:
    """Make models in this thread use ``attention`` within the block."""
    _NOW.attention = attention
    try:
        yield
    finally:
        _NOW.attention = None


def _attend_now(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> Tensor:
    """Run `Attention.attend` of the current engine step, as an operator of torch: outputs are contiguous."""
    assert _NOW.attention is not None
    return _NOW.attention.attend(query, key, value, *options).contiguous()


def _attended(query: Tensor, _key: Tensor, value: Tensor, *_: Any) -> Tensor:
    """Return an empty tensor of the shape of `_attend_now`."""
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


# Attention is an operator, so that compiled code does not trace into it: the number of past tokens changes with each
# step. The operator does not declare that it writes the KV slots, because they are not arguments.
_OPERATOR = define_operator(
    "attend(Tensor query, Tensor key, Tensor value, float? scaling, int? window, float? softcap, Tensor? sinks) "
    "-> Tensor",
    _attend_now,
    _attended,
)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Run `Attention.attend` of the current engine step, with the signature that transformers expects.

    Raises:
        UserError: the model passes a mask, or needs attention that the current `Attention` does not support.
    """
    if attention_mask is not None:
        raise cannot_serve(type(module).__name__, "makes a mask of its own")
    window, softcap, sinks = (options.pop(name, None) for name in ("sliding_window", "softcap", "s_aux"))
    if torch.compiler.is_compiling():
        found: Tensor = _OPERATOR(query, key, value, scaling, window, softcap, sinks)
        return found, None
    attention = _NOW.attention
    assert attention is not None, "only a ServingStage computes by this attention"
    if isinstance(attention, Probe):
        attention.check(module, window, options)
    return attention.attend(query, key, value, scaling, window, softcap, sinks), None


ALL_ATTENTION_FUNCTIONS.register(RAGGED, attend)


def attend_raggedly(model: nn.Module) -> None:
    """Set `attend` as a model's attention function, without the checks of ``set_attn_implementation``."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None:
            config._attn_implementation = RAGGED  # noqa: SLF001
