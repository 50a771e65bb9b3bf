"""KV slots hold the keys and values of sequences at one stage, each slot in one contiguous block of memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Shape of the keys and values that one layer keeps for each token."""

    heads: int
    """Number of key heads, and of value heads."""
    key_size: int
    """Size of a key of one head."""
    value_size: int
    """Size of a value of one head."""

    @property
    def numbers(self) -> int:
        """Number of scalars that the layer keeps for one token, in keys and values together."""
        return self.heads * (self.key_size + self.value_size)


class KVSlot:
    """A KV slot: the keys and values of one sequence, in one contiguous block of memory.

    The keys of one head are contiguous, and so are its values. Attention reads this layout faster than one that is
    contiguous by token.

    Args:
        layers: cache shapes of the shard's layers.
        capacity_tokens: number of positions.
        dtype: type of keys and values.
        device: device of keys and values.
    """

    __slots__ = ("_parts", "capacity_tokens")

    def __init__(
        self, layers: Sequence[LayerCache], capacity_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.capacity_tokens = capacity_tokens
        shapes = [
            (1, layer.heads, capacity_tokens, size)
            for layer in layers
            for size in (layer.key_size, layer.value_size)
        ]
        memory = torch.empty(sum(map(math.prod, shapes)), dtype=dtype, device=device)
        self._parts: list[Tensor]
        if len(set(shapes)) == 1:  # the usual case: one tensor, so that one operation slices all layers
            self._parts = [memory.view(len(shapes), *shapes[0])]
        else:
            parts = torch.split_with_sizes(memory, [math.prod(shape) for shape in shapes])
            self._parts = [part.view(1, *shape) for part, shape in zip(parts, shapes, strict=True)]

    def between(self, start: int, stop: int) -> list[Tensor]:
        """Return views of positions [start, stop): keys of the first layer, its values, keys of the second, ...

        Each view is ``[1, heads, positions, size]``.
        """
        return [view for part in self._parts for view in part.narrow(3, start, stop - start).unbind(0)]

    def copy(self, source: KVSlot, count: int) -> None:
        """Copy the first ``count`` positions of another slot into this one."""
        for mine, theirs in zip(self._parts, source._parts, strict=True):
            mine.narrow(3, 0, count).copy_(theirs.narrow(3, 0, count))


class KVSlots:
    """All KV slots of one stage.

    Args:
        layers: cache shapes of the shard's layers.
        dtype: type of keys and values.
        device: device of keys and values.
    """

    def __init__(self, layers: Sequence[LayerCache], dtype: torch.dtype, device: torch.device) -> None:
        self._layers = tuple(layers)
        self._dtype = dtype
        self._device = device
        self._held: dict[int, KVSlot] = {}

    @property
    def bytes_per_token(self) -> int:
        """Memory of one position of a slot, in bytes."""
        return sum(layer.numbers for layer in self._layers) * self._dtype.itemsize

    @property
    def held_tokens(self) -> int:
        """Capacity of all slots together, in positions."""
        return sum(slot.capacity_tokens for slot in self._held.values())

    def spare(self, count: int, capacity_tokens: int) -> list[KVSlot]:
        """Return slots that belong to no sequence."""
        return [KVSlot(self._layers, capacity_tokens, self._dtype, self._device) for _ in range(count)]

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._held

    def __getitem__(self, sequence: int) -> KVSlot:
        return self._held[sequence]

    def open(
        self, sequence: int, capacity_tokens: int, copy_from: int | None = None, copy_tokens: int = 0
    ) -> None:
        """Open a slot; if ``copy_from`` is given, copy the first ``copy_tokens`` positions of that sequence's slot."""
        assert sequence not in self._held
        (slot,) = self.spare(1, capacity_tokens)
        if copy_from is not None and copy_tokens:
            slot.copy(self._held[copy_from], copy_tokens)
        self._held[sequence] = slot

    def grow(self, sequence: int, capacity_tokens: int) -> None:
        """Replace a slot by a larger one with the same contents."""
        smaller = self._held.pop(sequence)
        self.open(sequence, capacity_tokens)
        self._held[sequence].copy(smaller, smaller.capacity_tokens)

    def close(self, sequence: int) -> None:
        """Free a slot."""
        del self._held[sequence]

    def clear(self) -> None:
        """Free all slots."""
        self._held.clear()
