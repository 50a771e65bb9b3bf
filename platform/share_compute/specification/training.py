"""The training part of a job."""

from __future__ import annotations

from typing import Literal, Self, TypeAlias

from pydantic import Field, field_validator, model_validator

from share_compute.specification.base import SpecModel
from share_compute.specification.optimization import GradientFusionSpec, OptimizerSpec, ScheduleSpec

Precision: TypeAlias = Literal["float32", "bfloat16", "float16"]
DEFAULT_LR_END = 1e-7
"""Where schedule polynomial ends unless it is told; as ``transformers`` has it."""


class LoraSpec(SpecModel):
    """Low-rank adapters: beside a matrix W, ``alpha / rank * B A`` is trained, and W is not."""

    rank: int = Field(default=8, ge=1, le=4096)
    """Rows of A, columns of B."""
    alpha: float = Field(default=16.0, gt=0)
    """How much an adapter counts: its product is multiplied by alpha / rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of an adapter's inputs that is dropped in training."""
    targets: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Last parts of the names of the matrices that get one, e.g. ``[q_proj, v_proj]``; default: all in all layers."""
    merge: bool = False
    """Give a whole model with the adapters added to its weights, instead of an adapter folder for ``peft``."""


class EarlyStoppingSpec(SpecModel):
    """When a job has learnt what it can."""

    metric: Literal["validation_loss"] = "validation_loss"
    """What must fall."""
    patience: int = Field(default=3, ge=1)
    """Validations in a row without a new best after which the job ends."""
    min_delta: float = Field(default=0.0, ge=0)
    """A new best is lower than the last one by more than this."""


class SamplesSpec(SpecModel):
    """Text that the model makes while it is trained, always the likeliest token next."""

    every: int = Field(ge=1, title="Steps between samples")
    """Steps between samples."""
    prompts: tuple[str, ...] = Field(min_length=1, max_length=8)
    """What it goes on from."""
    max_tokens: int = Field(default=32, ge=1, le=512)
    """Most tokens that it adds to a prompt."""

    @field_validator("prompts")
    @classmethod
    def _prompts_have_text(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not all(value):
            raise ValueError("a prompt is empty")
        return value


class TrainingSpec(SpecModel):
    """The steps of training."""

    steps: int = Field(default=100, ge=1, le=2**31 - 1)
    """Optimizer updates."""
    batch_size: int = Field(default=16, ge=1, le=2**20)
    """Samples in one step, over all machines."""
    microbatches: int | None = Field(default=None, ge=1, le=2**20)
    """Pieces that a batch is cut into; each travels alone. Default: the planner chooses."""
    sequence_length: int = Field(default=128, ge=2)
    """Tokens in one sample of text."""
    optimizer: OptimizerSpec = OptimizerSpec()
    """How gradients become updates."""
    schedule: ScheduleSpec = ScheduleSpec()
    """How the learning rate moves over the steps."""
    max_gradient_norm: float | None = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global norm; null turns that off."""
    gradient_fusion: GradientFusionSpec = GradientFusionSpec()
    """How gradients are joined to be summed over a pool."""
    precision: Precision = "float32"
    """What layers compute in; weights, their gradients and the optimizer's state stay float32."""
    activation_checkpointing: bool = False
    """Keep only what enters each layer, and compute the rest again on the way back: less memory, more time."""
    freeze: tuple[str, ...] = Field(default=(), title="Frozen")
    """What is not trained: patterns of stored names (``model.embed_tokens.*``), ranges of layers (``layers[:6]``)."""
    lora: LoraSpec | None = Field(default=None, title="Adapters (LoRA)")
    """Train small adapters beside the frozen weights of a pretrained model (LoRA) instead of the weights."""
    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    """Initial weights, order of samples and dropout follow from it alone."""
    validate_every: int | None = Field(default=None, ge=1, title="Steps between validations")
    """Steps between validations; null validates only at the end."""
    checkpoint_every: int | None = Field(default=None, ge=1, title="Steps between checkpoints")
    """Steps between checkpoints that a job can be resumed from; null: by time, as the server is set (180 s)."""
    checkpoints_kept: int = Field(default=3, ge=1, le=2**20)
    """Newest checkpoints that are kept; with one alone there is none to go back to when it is damaged."""
    early_stopping: EarlyStoppingSpec | None = Field(default=None, title="Stop early")
    """End the job when validations no longer get better."""
    samples: SamplesSpec | None = Field(default=None, title="Sample texts")
    """Let the model continue some prompts from time to time, to see what it has learnt."""

    @field_validator("freeze")
    @classmethod
    def _patterns_say_something(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not all(value):
            raise ValueError("a pattern is empty")
        return value

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.lora is not None and self.freeze:
            raise ValueError("give lora or freeze, not both: lora freezes all weights of the model")
        if self.early_stopping is not None and self.validate_every is None:
            raise ValueError("early_stopping needs validate_every, the steps between validations")
        schedule, rate = self.schedule, self.optimizer.learning_rate
        end = schedule.options.get("lr_end", DEFAULT_LR_END)
        if schedule.name == "polynomial" and isinstance(end, float) and end >= rate:
            raise ValueError(
                f"schedule.options.lr_end {end:g} must be below optimizer.learning_rate {rate:g}"
            )
        decay = schedule.options.get("num_decay_steps", 0.0)
        if isinstance(decay, float) and schedule.warmup_steps + decay > self.steps:
            raise ValueError(
                f"schedule.warmup_steps and num_decay_steps are {schedule.warmup_steps + decay:g} together, "
                f"more than the {self.steps} steps"
            )
        return self

    @model_validator(mode="after")
    def _microbatches_divide(self) -> Self:
        if self.microbatches is not None and self.batch_size % self.microbatches:
            raise ValueError(
                f"batch_size {self.batch_size} is not a multiple of microbatches {self.microbatches}"
            )
        return self

    @property
    def microbatch_size(self) -> int:
        """Samples in one microbatch, once their number is known."""
        assert self.microbatches is not None, "the plan says how many"
        return self.batch_size // self.microbatches
