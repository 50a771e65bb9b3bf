"""Optimization options of a job: optimizer, learning rate schedule, and fusion of communication within a stage."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import Field, ValidationError, field_validator, model_validator

from share_compute.specification.base import SpecModel, known
from share_compute.specification.task import Metric

_CURVES = ("linear", "cosine", "1-sqrt")
SCHEDULE_OPTIONS: dict[str, tuple[str, ...]] = {
    "constant": (),
    "constant_with_warmup": (),
    "linear": (),
    "cosine": ("num_cycles",),
    "cosine_with_restarts": ("num_cycles",),
    "cosine_with_min_lr": ("num_cycles", "min_lr", "min_lr_rate"),
    "cosine_warmup_with_min_lr": ("num_cycles", "min_lr", "min_lr_rate", "warmup_lr_rate"),
    "polynomial": ("lr_end", "power"),
    "inverse_sqrt": ("timescale",),
    "warmup_stable_decay": ("num_decay_steps", "warmup_type", "decay_type", "min_lr_ratio", "num_cycles"),
    "reduce_on_plateau": (
        "metric",
        "factor",
        "patience",
        "threshold",
        "threshold_mode",
        "cooldown",
        "min_lr",
    ),
}
"""Option names of each supported schedule: those of ``transformers``, and reduce_on_plateau."""
PLATEAU = "reduce_on_plateau"
SCHEDULES = tuple(SCHEDULE_OPTIONS)
_WHOLE = ("timescale", "num_decay_steps")


class PlateauOptions(SpecModel):
    """Options of schedule reduce_on_plateau, with the names and defaults of torch's ``ReduceLROnPlateau``."""

    metric: Metric = "validation_loss"
    """Metric of the validations that must improve."""
    factor: float = Field(default=0.1, gt=0, lt=1)
    """Factor by which the learning rate is multiplied."""
    patience: int = Field(default=10, ge=0)
    """Number of validations without improvement after which the next one reduces the learning rate."""
    threshold: float = Field(default=1e-4, ge=0)
    """Improvement that counts: a fraction of the best value, or a difference from it."""
    threshold_mode: Literal["rel", "abs"] = "rel"
    """rel: ``threshold`` is a fraction; abs: a difference."""
    cooldown: int = Field(default=0, ge=0)
    """Number of validations after a reduction that are not counted."""
    min_lr: float = Field(default=0.0, ge=0)
    """Lowest learning rate."""


class OptimizerName(StrEnum):
    """Supported optimizers."""

    sgd = "sgd"
    momentum = "momentum"
    adagrad = "adagrad"
    rmsprop = "rmsprop"
    adam = "adam"
    adamw = "adamw"

    @property
    def state_tensors(self) -> int:
        """Number of state tensors that the optimizer keeps for each weight tensor, of the same size."""
        match self:
            case OptimizerName.sgd:
                return 0
            case OptimizerName.momentum | OptimizerName.adagrad:
                return 1
            case OptimizerName.rmsprop | OptimizerName.adam | OptimizerName.adamw:
                return 2


class OptimizerSpec(SpecModel):
    """Optimizer and its options."""

    name: OptimizerName = Field(default=OptimizerName.adamw, title="Optimizer")
    """Name of the optimizer: sgd, momentum, adagrad, rmsprop, adam or adamw."""
    learning_rate: float = Field(default=1e-3, gt=0)
    """Peak learning rate."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay: decoupled for adamw, added to the gradient for the other optimizers."""
    l1: float = Field(default=0.0, ge=0)
    """L1 penalty: this number times the sign of each weight that decays is added to its clipped gradient."""
    decays: Literal["matrices", "all"] = "matrices"
    """Weights that decay. matrices: all except biases and the weights of norms; all: every weight."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Momentum factor (momentum, rmsprop)."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the moment estimates (adam, adamw)."""
    epsilon: float = Field(default=1e-8, gt=0)
    """Added to denominators (adagrad, rmsprop, adam, adamw)."""

    @field_validator("name", mode="before")
    @classmethod
    def _optimizer_exists(cls, value: Any) -> Any:
        return known(value, tuple(name.value for name in OptimizerName), "optimizer")

    @field_validator("betas")
    @classmethod
    def _betas_in_range(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in value):
            raise ValueError("each beta must be at least 0 and less than 1")
        return value


class ScheduleSpec(SpecModel):
    """Learning rate schedule over the steps: one of ``transformers``, or reduce_on_plateau."""

    name: str = Field(default="cosine", title="Schedule", json_schema_extra={"enum": list(SCHEDULES)})
    """Name of the schedule: constant, linear, cosine, polynomial, ..., or reduce_on_plateau."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises to its peak; schedule constant ignores them."""
    options: dict[str, float | str] = Field(default_factory=dict, title="Schedule options")
    """Further options of the schedule, by their names in ``transformers`` or torch, e.g. ``{min_lr_rate: 0.1}``."""

    @field_validator("name", mode="before")
    @classmethod
    def _schedule_exists(cls, value: Any) -> Any:
        return known(value, SCHEDULES, "schedule")

    @model_validator(mode="after")
    def _options_fit_the_schedule(self) -> Self:
        if self.name == PLATEAU:
            for option in self.options:
                known(option, SCHEDULE_OPTIONS[PLATEAU], f"option of schedule {PLATEAU}:")
            try:
                _ = self.plateau
            except ValidationError as failure:
                wrong = failure.errors(include_url=False)[0]
                raise ValueError(f"options.{wrong['loc'][0]}: {wrong['msg']}") from None
            return self
        for option, value in self.options.items():
            known(option, SCHEDULE_OPTIONS[self.name], f"option of schedule {self.name}:")
            if option.endswith("_type"):
                if value not in _CURVES:
                    raise ValueError(f"{option} must be one of {', '.join(_CURVES)}, not {value!r}")
            elif not isinstance(value, float) or value < 0:
                raise ValueError(f"{option} must be a number that is not negative, not {value!r}")
            elif option in _WHOLE and (value < 1 or value % 1):
                raise ValueError(f"{option} must be a whole number, at least 1, not {value}")
        if (
            "min_lr" in SCHEDULE_OPTIONS[self.name]
            and len({"min_lr", "min_lr_rate"} & set(self.options)) != 1
        ):
            raise ValueError(f"schedule {self.name} needs either option min_lr or option min_lr_rate")
        if self.name == "warmup_stable_decay" and "num_decay_steps" not in self.options:
            raise ValueError("schedule warmup_stable_decay needs option num_decay_steps")
        return self

    @property
    def plateau(self) -> PlateauOptions | None:
        """The options of schedule reduce_on_plateau; None for other schedules."""
        return PlateauOptions.model_validate(self.options) if self.name == PLATEAU else None

    @property
    def arguments(self) -> dict[str, float | int | str]:
        """The options, with ``timescale`` and ``num_decay_steps`` as integers."""
        return {name: int(value) if name in _WHOLE else value for name, value in self.options.items()}


FusionMode: TypeAlias = Literal["auto", "size", "index"]


class FusionSpec(SpecModel):
    """Buckets of tensors that one collective operation exchanges together between the members of a stage."""

    mode: FusionMode = "auto"
    """auto: an eighth of the tensors, at least 8 MiB, at most 64 MiB; size: ``bucket_bytes``; index: ``cuts``."""
    bucket_bytes: int | None = Field(default=None, ge=1, title="Bytes of a piece")
    """Mode size: maximum bytes of a bucket. A larger parameter is a separate bucket."""
    cuts: Annotated[tuple[int, ...], Field(fail_fast=True)] | None = Field(default=None, min_length=1)
    """Mode index: ends of buckets, counted in parameters from the shard's end; ``[2, 10]`` gives 2, 8 and the rest."""

    @model_validator(mode="after")
    def _only_what_the_mode_needs(self) -> Self:
        for mode, field in (("size", "bucket_bytes"), ("index", "cuts")):
            if (self.mode == mode) != (getattr(self, field) is not None):
                raise ValueError(f"mode {mode} needs {field}, and no other mode has it")
        cuts = self.cuts or ()
        if any(cut < 1 for cut in cuts) or list(cuts) != sorted(set(cuts)):
            raise ValueError("cuts must be at least 1 and ascending")
        return self


class AllReduceFusionSpec(FusionSpec):
    """Buckets of gradients that are summed together over the members of a stage."""

    mode: FusionMode = Field(default="auto", title="Fusion of gradient sums")
    """auto: an eighth of the tensors, at least 8 MiB, at most 64 MiB; size: ``bucket_bytes``; index: ``cuts``."""


class ReduceScatterFusionSpec(FusionSpec):
    """Buckets of gradients of which each member with a share of the optimizer's state gets the sum of its share."""

    mode: FusionMode = Field(default="auto", title="Fusion of sums of shares")
    """auto: an eighth of the tensors, at least 8 MiB, at most 64 MiB; size: ``bucket_bytes``; index: ``cuts``."""


class AllGatherFusionSpec(FusionSpec):
    """Buckets of updated weights that members with a share of the optimizer's state send to each other."""

    mode: FusionMode = Field(default="auto", title="Fusion of updated weights")
    """auto: an eighth of the tensors, at least 8 MiB, at most 64 MiB; size: ``bucket_bytes``; index: ``cuts``."""


class CommunicationFusionSpec(SpecModel):
    """Buckets of each collective operation between the members of a stage."""

    allreduce: AllReduceFusionSpec = AllReduceFusionSpec()
    """Buckets of gradients that are summed together over the members of a stage."""
    reducescatter: ReduceScatterFusionSpec = ReduceScatterFusionSpec()
    """Buckets of gradients of which each member with a share of the optimizer's state gets the sum of its share."""
    allgather: AllGatherFusionSpec = AllGatherFusionSpec()
    """Buckets of updated weights that members with a share of the optimizer's state send to each other."""
