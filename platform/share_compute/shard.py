"""A shard: the contiguous range of a model's layers that one member holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shard:
    """The layers [start, stop) of a model that has ``num_layers`` of them."""

    model_id: str
    start: int
    stop: int
    num_layers: int

    @property
    def is_first(self) -> bool:
        """Whether the shard includes the embedding."""
        return self.start == 0

    @property
    def is_last(self) -> bool:
        """Whether the shard includes the final norm and the head."""
        return self.stop == self.num_layers

    def __len__(self) -> int:
        return self.stop - self.start
