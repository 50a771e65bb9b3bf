"""Policies by which the branches of a training job exchange what they learned, with the options of each policy.

A branch is a virtual worker of the job. Its samples follow from (seed, round, branch, step), and not from the machines
that run it. The number of branches is fixed for the job.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, Self, TypeAlias

from pydantic import Field, field_validator, model_validator

from share_compute.specification.base import SpecModel, known_tag

POLICIES: Final = ("allreduce", "auto", "local", "elastic", "gossip", "parameter_server")
OUTER_OPTIMIZERS: Final = ("sgd", "nesterov", "adam")
GRAPHS: Final = ("ring", "exponential", "measured", "random_pairs")
MOST_BRANCHES: Final = 1024
_ROUNDING: Final = 1e-9
"""Tolerance of a product that must not exceed 1, for rates such as 1/3."""
_MOST_SERVERS: Final = 256
Servers: TypeAlias = Annotated[int, Field(ge=0, le=_MOST_SERVERS)] | Literal["auto"]
Graph: TypeAlias = Literal["ring", "exponential", "measured", "random_pairs"]


class OuterSgdSpec(SpecModel):
    """Add the mean change of the branches, times a learning rate, to the weights."""

    name: Literal["sgd"] = "sgd"
    """Name of the outer optimizer."""
    learning_rate: float = Field(default=1.0, gt=0, le=10)
    """Factor of the mean change; with 1 the weights become the mean of the branches' weights."""


class OuterNesterovSpec(SpecModel):
    """Add the mean change of the branches with Nesterov momentum (DiLoCo)."""

    name: Literal["nesterov"] = "nesterov"
    """Name of the outer optimizer."""
    learning_rate: float = Field(default=0.7, gt=0, le=10)
    """Factor of each update."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Decay of earlier changes."""


class OuterAdamSpec(SpecModel):
    """Add the mean change of the branches as Adam adds a negative gradient; the defaults are those of DiLoCo."""

    name: Literal["adam"] = "adam"
    """Name of the outer optimizer."""
    learning_rate: float = Field(default=0.3, gt=0, le=10)
    """Factor of each update."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the moment estimates."""
    epsilon: float = Field(default=0.1, gt=0)
    """Added to denominators."""

    @field_validator("betas")
    @classmethod
    def _each_beta_decays(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in value):
            raise ValueError("each beta must be at least 0 and less than 1")
        return value


OuterSpec = Annotated[
    Annotated[OuterSgdSpec | OuterNesterovSpec | OuterAdamSpec, Field(discriminator="name")],
    known_tag("name", OUTER_OPTIMIZERS, "outer optimizer"),
]
"""An outer optimizer with its options; the field ``name`` says which one."""


class AllReduceSpec(SpecModel):
    """Sum the gradients of all members in each step."""

    kind: Literal["allreduce"] = "allreduce"
    """Name of the policy."""


class BranchesSpec(SpecModel):
    """Common options of policies with branches."""

    branches: int = Field(ge=1, le=MOST_BRANCHES)
    """Number of branches: virtual workers that train apart. It is independent of the number of machines."""
    every: int = Field(default=10, ge=1, le=2**31 - 1, title="Steps in a round")
    """Steps that each branch takes in a round."""
    inner_state: Literal["keep", "reset"] = "keep"
    """Keep the state of each branch's optimizer from round to round, or reset it at the start of each round."""

    def rounds(self, steps: int) -> int:
        """Return the number of rounds in which each branch takes ``steps`` steps; the last round may be shorter."""
        return -(-steps // self.every)

    def ends_round(self, step: int, steps: int) -> bool:
        """Return whether a round ends after a step of a branch that takes ``steps`` steps."""
        return step % self.every == 0 or step == steps

    def merges(self, name: str, round_number: int, rounds: int) -> bool:  # noqa: ARG002 - most policies merge all
        """Return whether a round merges a parameter.

        Args:
            name: stored name of the parameter.
            round_number: the round, from 1.
            rounds: number of rounds of the job.
        """
        return True

    @property
    def overlapping(self) -> int:
        """Number of steps that a branch trains on while the server merges its round."""
        return 0

    def steps_after(self, rounds: int, steps: int) -> int:
        """Return the number of steps of a branch after some rounds, if it takes ``steps`` steps in all."""
        return min(rounds * self.every, steps)

    @property
    def needed(self) -> int:
        """Number of contributions from branches that a round needs to end."""
        return self.branches

    @property
    def patience_s(self) -> float:
        """Time in seconds that a round waits for further branches once it has all needed contributions."""
        return 0.0

    @property
    def keeps_own_weights(self) -> bool:
        """Whether each branch continues with its own weights after a merge, instead of common weights."""
        return False

    @property
    def ranges(self) -> Servers:
        """Number of ranges of the weights that are merged on machines of the job; 0 if the server merges all."""
        return 0

    @property
    def merges_apart(self) -> bool:
        """Whether each contribution is merged as soon as it arrives, instead of with those of other branches."""
        return False

    @property
    def skips_missed(self) -> bool:
        """Whether a late branch continues with the open round, instead of training the rounds that it missed."""
        return not (self.keeps_own_weights or self.merges_apart)

    @property
    def drops_late(self) -> bool:
        """Whether a contribution is ignored if its round is already merged."""
        return False


class RoundsSpec(BranchesSpec):
    """Common options of policies that merge all branches of a round together."""

    quorum: int | None = Field(default=None, ge=1)
    """Branches without which a round cannot end; null: all, so that no branch is ever dropped from a round."""
    grace_s: float = Field(default=60.0, ge=0, le=86_400, title="Grace period (s)")
    """Seconds that a round waits for the other branches when it has a quorum."""

    @model_validator(mode="after")
    def _quorum_can_be_reached(self) -> Self:
        if self.quorum is not None and self.quorum > self.branches:
            raise ValueError(f"quorum {self.quorum} is more than the {self.branches} branches")
        return self

    @property
    def needed(self) -> int:
        """Number of branches whose contributions a round needs to end."""
        return self.branches if self.quorum is None else self.quorum

    @property
    def patience_s(self) -> float:
        """Time that a round waits for the other branches when those that it needs are there, in seconds."""
        return self.grace_s


PRESETS: Final[dict[str, dict[str, Any]]] = {
    "diloco": {"every": 500, "outer": OuterNesterovSpec(), "inner_state": "keep"},
    "sparse_loco": {"every": 30, "outer": OuterSgdSpec(), "inner_state": "keep"},
}
"""Settings of the papers: DiLoCo (arXiv 2311.08105) and SparseLoCo (arXiv 2508.15706).

SparseLoCo's compression is not a part of the synchronization. Its outer learning rate is the 1 of its authors'
experiments; they used 0.9 and 0.4 in long runs. In `benchmarks/slow_links.py` the loss is 0.6% higher with 0.4.
"""


class LocalOptions(RoundsSpec):
    """Common options of policies that merge the changes of branches after some steps."""

    preset: Literal["diloco", "sparse_loco"] | None = None
    """Settings of a paper for ``every``, ``outer`` and ``inner_state``, unless these are given."""
    every: int = Field(default=30, ge=1, le=2**31 - 1, title="Steps in a round")
    """Steps that each branch takes in a round."""
    outer: OuterSpec = OuterSgdSpec()
    """Optimizer that adds the branches' mean change to the weights."""
    late: Literal["merge", "drop"] = "merge"
    """Merge the result of a branch that missed its round in the next round, scaled by its age; or drop it."""
    overlap: int = Field(default=0, ge=0, le=2**31 - 1, title="Overlapping steps")
    """Steps that a branch trains on while the server merges its round; less than ``every``."""
    fragments: int = Field(default=1, ge=1, le=4096)
    """Parts of the model, of which each round merges one in turn; the last round merges all of them."""
    servers: Servers = Field(default=0, title="Machines that merge")
    """Machines of the job that each merge a part of the weights; 0: the server merges all; auto: if it is faster."""

    @model_validator(mode="after")
    def _parts_of_rounds_fit(self) -> Self:
        if self.fragments > 1 and self.quorum is not None and self.late == "merge":
            raise ValueError(
                "fragments needs late: drop where there is a quorum: the next round merges another part of the model"
            )
        if self.overlap >= self.every:
            raise ValueError(
                f"overlap {self.overlap} must be less than every {self.every}: rounds are merged one after the other"
            )
        return self

    def merges(self, name: str, round_number: int, rounds: int) -> bool:
        """Return whether a round merges a parameter.

        Args:
            name: stored name of the parameter. The first number in the name, which is the layer, decides: neighbouring
                layers are in different parts (the strided pattern of Streaming DiLoCo, arXiv 2501.18512).
            round_number: the round, from 1.
            rounds: number of rounds of the job; the last one merges all parameters.
        """
        numbers = (part for part in name.split(".") if part.isdecimal())
        layer = int(next(numbers, 0))
        return round_number >= rounds or layer % self.fragments == (round_number - 1) % self.fragments

    @property
    def drops_late(self) -> bool:
        """Whether a contribution is ignored if its round is merged."""
        return self.late == "drop"

    @property
    def overlapping(self) -> int:
        """Number of steps that a branch trains on while the server merges its round."""
        return self.overlap

    @property
    def ranges(self) -> Servers:
        """Number of ranges of the weights that are merged on machines of the job; 0 if the server merges all."""
        return self.servers

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, data: Any) -> Any:
        preset = data.get("preset") if isinstance(data, dict) else None
        return {**PRESETS[preset], **data} if isinstance(preset, str) and preset in PRESETS else data


class LocalSpec(LocalOptions):
    """Let branches train apart for some steps, then merge them: local SGD, DiLoCo, SparseLoCo."""

    kind: Literal["local"] = "local"
    """Name of the policy."""


class AutoSpec(LocalOptions):
    """Let the first plan choose between lockstep and rounds.

    Rounds have the fewest steps for which the links hardly slow the branches. Lockstep is ``allreduce`` with the
    batches of all branches in each step, so both train the same samples.
    """

    kind: Literal["auto"] = "auto"
    """Name of the policy."""
    every: int = Field(default=100, ge=1, le=2**31 - 1, title="Steps in a round")
    """Largest number of steps in a round that may be chosen."""
    shortest: int = Field(default=1, ge=1, le=2**31 - 1, title="Fewest steps in a round")
    """Smallest number of steps in a round that may be chosen; more than ``overlap``."""

    @model_validator(mode="after")
    def _limits_fit(self) -> Self:
        if self.shortest > self.every:
            raise ValueError(f"shortest {self.shortest} is more than every {self.every}, the largest number")
        if self.overlap >= self.shortest:
            raise ValueError(f"overlap {self.overlap} must be less than shortest {self.shortest}")
        return self

    def length(self, least: int, steps: int, intervals: Sequence[int]) -> int:
        """Return the least allowed number of steps in a round from ``least`` on, or else the largest allowed one.

        Args:
            least: smallest number that is wanted.
            steps: steps of the job.
            intervals: steps between events after which a round must end; all must be multiples of the number.

        Raises:
            ValueError: no number within the limits divides all intervals.
        """
        most = min(self.every, steps)
        if not intervals:
            return max(self.shortest, min(least, most))
        common = math.gcd(*intervals)
        small = [number for number in range(1, math.isqrt(common) + 1) if common % number == 0]
        divisors = sorted({*small, *(common // number for number in small)})
        allowed = [number for number in divisors if self.shortest <= number <= most]
        if not allowed:
            raise ValueError(
                f"no number of steps from synchronization.shortest {self.shortest} to {most} divides "
                f"{', '.join(map(str, intervals))}: branches are merged only after a round"
            )
        return next((number for number in allowed if number >= least), allowed[-1])

    def local(self, every: int) -> LocalSpec:
        """Return rounds of ``every`` steps with the same options."""
        options = self.model_dump(exclude={"kind", "shortest", "preset"})
        return LocalSpec.model_validate({**options, "every": every})


class ElasticSpec(RoundsSpec):
    """Let each branch keep its own weights, and pull them and a centre together after some steps (EASGD)."""

    kind: Literal["elastic"] = "elastic"
    """Name of the policy."""
    rate: float = Field(default=0.1, gt=0, le=1)
    """Fraction of the difference to the centre by which a branch and the centre move; times branches at most 1."""

    @model_validator(mode="after")
    def _centre_is_stable(self) -> Self:
        if self.rate * self.branches > 1 + _ROUNDING:
            raise ValueError(
                f"rate {self.rate:g} times {self.branches} branches is {self.rate * self.branches:g}, more than 1: "
                f"the centre would not settle; the highest rate is {1 / self.branches:g}"
            )
        return self

    @property
    def keeps_own_weights(self) -> bool:
        """Whether each branch continues with weights of its own after a merge, instead of common weights."""
        return True


class GossipSpec(RoundsSpec):
    """Let each branch keep its own weights, and average them with its neighbours' weights after some steps."""

    kind: Literal["gossip"] = "gossip"
    """Name of the policy."""
    branches: int = Field(ge=2, le=MOST_BRANCHES)
    """Number of branches: virtual workers that train apart. It is independent of the number of machines."""
    graph: Graph = "exponential"
    """Neighbours of a branch: ring, exponential (distances 1, 2, 4, ...), measured, or random_pairs (NoLoCo)."""

    @property
    def keeps_own_weights(self) -> bool:
        """Whether each branch continues with weights of its own after a merge, instead of common weights."""
        return True


class ParameterServerSpec(RoundsSpec):
    """Let the server hold the weights; branches push their changes to it, and continue with its newest weights."""

    kind: Literal["parameter_server"] = "parameter_server"
    """Name of the policy."""
    every: int = Field(default=1, ge=1, le=2**31 - 1, title="Steps in a round")
    """Steps that each branch takes in a round."""
    staleness: Annotated[int, Field(ge=0, le=2**31 - 1)] | Literal["unbounded"] = 0
    """Pushes that a branch may be ahead of the slowest branch; 0 is synchronous, unbounded is asynchronous."""
    late: Literal["merge", "drop"] = "merge"
    """Merge the result of a branch that missed its round in the next round, scaled by its age; or drop it."""
    servers: Servers = Field(default=0, title="Machines that merge")
    """Machines of the job that each merge a part of the weights; 0: the server merges all; auto: if it is faster."""

    @property
    def ranges(self) -> Servers:
        """Number of ranges of the weights that are merged on machines of the job; 0 if the server merges all."""
        return self.servers

    @field_validator("staleness", mode="before")
    @classmethod
    def _staleness_is_known(cls, value: Any) -> Any:
        is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31
        if value != "unbounded" and not is_count:
            raise ValueError("give a whole number from 0, or unbounded")
        return value

    @model_validator(mode="after")
    def _quorum_has_rounds(self) -> Self:
        if self.quorum is not None and self.merges_apart:
            raise ValueError(
                f"quorum {self.quorum} needs staleness 0: with staleness {self.staleness}, each push is merged alone; "
                "staleness unbounded waits for no branch"
            )
        return self

    @property
    def needed(self) -> int:
        """Number of branches whose contributions a round needs to end."""
        return 1 if self.merges_apart else super().needed

    @property
    def patience_s(self) -> float:
        """Time that a round waits for the other branches when those that it needs are there, in seconds."""
        return 0.0 if self.merges_apart else super().patience_s

    @property
    def drops_late(self) -> bool:
        """Whether a contribution is ignored if its round is merged."""
        return self.late == "drop" and not self.merges_apart

    @property
    def merges_apart(self) -> bool:
        """Whether each contribution is merged as soon as it arrives, instead of with those of other branches."""
        return self.staleness != 0


SynchronizationSpec = Annotated[
    Annotated[
        AllReduceSpec | AutoSpec | LocalSpec | ElasticSpec | GossipSpec | ParameterServerSpec,
        Field(discriminator="kind"),
    ],
    known_tag("kind", POLICIES, "synchronization"),
]
"""A policy that jobs can use, with its options; the field ``kind`` says which one."""
