"""Strategies for the operators of layers that several ranks compute together: ``parallelism.operators``."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from share_compute.specification.base import SpecModel

SearchName: TypeAlias = Literal["dynamic_programming", "recursive_programming", "sharding_propagation"]
StrategyName: TypeAlias = Literal["batch", "sequence", "heads", "expert", "column", "row", "replicated"]
_Pattern: TypeAlias = Annotated[str, Field(min_length=1, max_length=200)]


class OperatorsSpec(SpecModel):
    """How the ranks of ``parallelism.tensor`` divide the operators of a layer."""

    search: SearchName = "dynamic_programming"
    """Search for strategies: exact, by double recursion, or by propagation from the given ones."""
    strategies: dict[_Pattern, StrategyName] = Field(default={}, max_length=64, title="Given strategies")
    """Strategy by pattern of operators' names, such as `mlp.down_proj: row`; the search finds the others."""
    fully_use_devices: bool = False
    """Whether an operator that can be cut is never computed by each rank as a whole."""


NO_STRATEGIES = OperatorsSpec()
"""No strategy is given."""
