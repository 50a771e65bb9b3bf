"""Layouts: the layers, machines and microbatches of each stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class StageLayout(NamedTuple):
    """One stage: layers [start, stop) and the machines that each hold all of them."""

    start: int
    stop: int
    members: tuple[int, ...]
    """Machines, as indices into the topology's contributors."""
    shares: tuple[int, ...]
    """Number of microbatches that each member computes in a step, at least 1. In serving plans, always 1."""


class Layout(NamedTuple):
    """Stages in pipeline order, covering all layers."""

    stages: tuple[StageLayout, ...]

    @property
    def machines(self) -> tuple[int, ...]:
        """All machines that hold layers, in pipeline order."""
        return tuple(member for stage in self.stages for member in stage.members)

    def renumbered(self, numbers: Sequence[int] | Mapping[int, int]) -> Layout:
        """Return the layout with each machine number ``m`` replaced by ``numbers[m]``."""
        return Layout(
            tuple(
                stage._replace(members=tuple(numbers[member] for member in stage.members))
                for stage in self.stages
            )
        )


def solo(machine: int, num_layers: int, microbatches: int) -> Layout:
    """Return the layout with the whole model on one machine."""
    return Layout((StageLayout(0, num_layers, (machine,), (microbatches,)),))
