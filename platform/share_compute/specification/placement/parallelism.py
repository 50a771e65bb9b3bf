"""Options of a job for the division of its model among machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from share_compute.specification.placement.operators import NO_STRATEGIES, OperatorsSpec
from share_compute.specification.placement.pinned_plan import PinnedPlan
from share_compute.specification.placement.selection import SelectionSpec


def _content(value: Any) -> Any:
    if isinstance(value, str | Path):
        raise ValueError(  # noqa: TRY004 - pydantic reports ValueError
            "names a file, which only the command line reads: submit the job file with share-compute submit, or give "
            "the file's content here"
        )
    return value


_Plan: TypeAlias = Annotated[
    PinnedPlan | None,
    BeforeValidator(_content),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}, {"type": "null"}]}),
]
"""A pinned plan. A job file names its file, and the client puts the content in place of the name."""


class ParallelismSpec(SelectionSpec):
    """Partitioning of the model over the machines."""

    strategy: str = "auto"
    """Name of the partitioning strategy, which splits the model into stages and places them."""
    stages: int | None = Field(default=None, ge=1)
    """Number of pipeline stages, one shard each; default: the strategy chooses."""
    members_per_stage: int | None = Field(default=None, ge=1)
    """Number of machines per stage, which share its microbatches; default: the strategy chooses."""
    channel: Literal["auto", "direct", "ray"] = "auto"
    """Transport of tensors: direct sockets, Ray calls, or (auto) direct wherever the machines reach each other."""
    threads: int | None = Field(default=None, ge=1, le=2**10, title="CPU threads")
    """Most CPU threads with which a machine computes; default: all that its owner lends."""
    tensor: int = Field(default=1, ge=1, le=64, title="Tensor parallelism")
    """Number of processes on each machine that compute each layer together. They share its CPU threads, or have one GPU
    each."""
    operators: OperatorsSpec = NO_STRATEGIES
    """How these processes divide the operators of a layer."""
    sequence: int = Field(default=1, ge=1, le=64, title="Sequence parallelism")
    """Number of slices of each sequence's tokens. Each stage has as many machines, and each computes one slice."""
    optimizer: Literal["replicated", "sharded"] = Field(default="replicated", title="Optimizer's state")
    """replicated: each member of a stage keeps the optimizer's whole state; sharded: an equal share of it (ZeRO-1)."""
    backups: bool = True
    """Copy state that only one machine holds to another machine, so that any one machine may be lost."""
    plan: _Plan = Field(default=None, title="Pinned plan")
    """Plan file that `share-compute plan --output` wrote: the job starts exactly so, or not at all."""

    @property
    def shares_optimizer(self) -> bool:
        """Whether each member of a stage keeps a share of the optimizer's state."""
        return self.optimizer == "sharded"

    @property
    def needs_a_check(self) -> bool:
        """Whether only the model's layers show if it supports several processes or slices."""
        return self.tensor > 1 or self.sequence > 1

    @property
    def machines_needed(self) -> int:
        """Number of machines of ``plan``, or those that ``stages`` and `stage_size` need; None counts as 1."""
        if self.plan is not None:
            return len(self.plan.names)
        return (self.stages or 1) * (self.stage_size or 1)

    @property
    def stage_size(self) -> int | None:
        """Number of machines that each stage must have; None leaves it to the strategy."""
        return self.sequence if self.sequence > 1 else self.members_per_stage

    @property
    def ranks(self) -> int:
        """Number of processes on each machine that compute each layer together."""
        return self.tensor

    @model_validator(mode="after")
    def _ranks_have_threads(self) -> Self:
        if self.threads is not None and self.threads < self.tensor:
            raise ValueError(f"tensor {self.tensor} needs as many threads, and threads is {self.threads}")
        if self.tensor == 1 and self.operators != NO_STRATEGIES:
            raise ValueError("operators are divided between several processes only: set tensor to 2 or more")
        return self

    @model_validator(mode="after")
    def _plan_decides(self) -> Self:
        for name in ("stages", "members_per_stage"):
            if self.plan is not None and getattr(self, name) is not None:
                raise ValueError(f"{name}: the pinned plan decides it: leave out {name} or plan")
        avoided = [name for name in self.plan.names if name in self.avoid] if self.plan is not None else []
        if avoided:
            raise ValueError(f"avoid names {avoided[0]}, which the pinned plan uses: leave out one of them")
        return self
