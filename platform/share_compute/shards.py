"""A shard: the contiguous range of a model's layers that one member holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shard:
    """The layers [start, stop) of a model with ``num_layers`` layers."""

    model_id: str
    start: int
    stop: int
    num_layers: int

    @property
    def is_first(self) -> bool:
        """Whether the shard begins with the model's first layer."""
        return self.start == 0

    @property
    def is_last(self) -> bool:
        """Whether the shard ends with the model's last layer."""
        return self.stop == self.num_layers

    def __len__(self) -> int:
        return self.stop - self.start
