"""A placement as the search sees it: machines by index, no reasons yet. `Plan` is what people see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class PoolLayout(NamedTuple):
    """Layers [start, stop) and the machines that each hold all of them."""

    start: int
    stop: int
    members: tuple[int, ...]
    """Indices into the topology's contributors."""
    shares: tuple[int, ...]
    """Microbatches that each member computes in a step; each at least 1. In serving: all 1."""


class Layout(NamedTuple):
    """Pools in pipeline order, covering all layers."""

    pools: tuple[PoolLayout, ...]

    @property
    def machines(self) -> tuple[int, ...]:
        """All machines that hold something, in pipeline order."""
        return tuple(member for pool in self.pools for member in pool.members)

    def renumbered(self, numbers: Sequence[int] | Mapping[int, int]) -> Layout:
        """Return the same with each machine's number replaced by what stands at its place in ``numbers``."""
        return Layout(
            tuple(
                pool._replace(members=tuple(numbers[member] for member in pool.members))
                for pool in self.pools
            )
        )


def solo(machine: int, num_layers: int, microbatches: int) -> Layout:
    """Return the whole model on one machine."""
    return Layout((PoolLayout(0, num_layers, (machine,), (microbatches,)),))
