"""The field ``training`` of a training job: steps, precision, frozen parameters, adapters, and intervals."""

from __future__ import annotations

from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, field_validator, model_validator

from share_compute.specification.base import CompileMode, SpecModel
from share_compute.specification.boundaries import NO_BOUNDARY_COMPRESSION, BoundaryCompressionSpec
from share_compute.specification.compression import (
    CompressionSpec,
    LossyCompressionSpec,
    NoCompressionSpec,
    PowerSgdSpec,
)
from share_compute.specification.optimization import (
    PLATEAU,
    CommunicationFusionSpec,
    OptimizerSpec,
    ScheduleSpec,
)
from share_compute.specification.synchronization import (
    AllReduceSpec,
    AutoSpec,
    BranchesSpec,
    SynchronizationSpec,
)
from share_compute.specification.task import RISING, LossSpec, Metric, TargetSpec, figure_of

Precision: TypeAlias = Literal["float32", "bfloat16", "float16"]
Collective: TypeAlias = Literal["auto", "ring", "tree", "sharded", "hierarchical"]
DEFAULT_LR_END = 1e-7
"""Default final learning rate of schedule polynomial, as in ``transformers``."""


class LoraSpec(SpecModel):
    """Low-rank adapters (LoRA): ``alpha / rank * B A`` is added to a frozen matrix W, and only A and B are trained."""

    rank: int = Field(default=8, ge=1, le=4096)
    """Rank of an adapter: rows of A, columns of B."""
    alpha: float = Field(default=16.0, gt=0)
    """Scale of an adapter: the product B A is multiplied by alpha / rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout probability of an adapter's inputs in training."""
    targets: Annotated[tuple[str, ...], Field(fail_fast=True)] | None = Field(default=None, min_length=1)
    """Last name components of the matrices to adapt, e.g. ``[q_proj, v_proj]``; default: all matrices in all layers."""
    merge: bool = False
    """Save a whole model with the adapters merged into its weights, instead of an adapter folder for ``peft``."""


class EarlyStoppingSpec(SpecModel):
    """Rule that ends a job when validations no longer improve."""

    task: str | None = Field(default=None, title="Task of the metric")
    """Name of the task to which the metric belongs, in a job with ``tasks``; default: the loss of all tasks."""
    metric: Metric = "validation_loss"
    """Metric of the task that must improve, so that training continues."""
    patience: int = Field(default=3, ge=1)
    """Number of consecutive validations without improvement after which the job ends."""
    min_delta: float = Field(default=0.0, ge=0)
    """Improvement that counts: the metric must be better than the best one by more than this."""

    @property
    def figure(self) -> str:
        """Name of the metric among the figures of a validation."""
        return figure_of(self.task, self.metric)


class SamplesSpec(SpecModel):
    """Sample texts that the model generates during training, by greedy decoding."""

    every: int = Field(ge=1, title="Steps between samples")
    """Steps between samples."""
    prompts: tuple[str, ...] = Field(min_length=1, max_length=8, fail_fast=True)
    """Prompts that the model continues."""
    max_tokens: int = Field(default=32, ge=1, le=512)
    """Most tokens that the model adds to a prompt."""

    @field_validator("prompts")
    @classmethod
    def _prompts_have_text(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not all(value):
            raise ValueError("a prompt is empty")
        return value


class TrainingSpec(SpecModel):
    """Steps and options of training."""

    steps: int = Field(default=100, ge=1, le=2**31 - 1)
    """Number of optimizer updates; with branches, of each branch."""
    batch_size: int = Field(default=16, ge=1, le=2**20)
    """Samples in one step, over all machines; with branches, in one step of each branch."""
    microbatches: int | None = Field(default=None, ge=1, le=2**20)
    """Number of microbatches per batch; default: the planner chooses."""
    sequence_length: int = Field(default=128, ge=2)
    """Tokens in one sample of text."""
    loss: LossSpec = LossSpec()
    """Loss that training minimizes."""
    optimizer: OptimizerSpec = OptimizerSpec()
    """Optimizer and its options."""
    schedule: ScheduleSpec = ScheduleSpec()
    """Learning rate schedule over the steps."""
    max_gradient_norm: float | None = Field(default=1.0, gt=0)
    """Gradients are clipped to this global norm; null turns clipping off."""
    communication_fusion: CommunicationFusionSpec = CommunicationFusionSpec()
    """Buckets of tensors that the members of a stage exchange together."""
    collective: Collective = "auto"
    """Algorithm that sums gradients over the members of a stage; auto: the fastest by the measured links."""
    synchronization: SynchronizationSpec = AllReduceSpec()
    """Way in which the parts of a job exchange what they learned: in each step, or in rounds for slow links."""
    compression: CompressionSpec = NoCompressionSpec()
    """Codec of the changes of weights that branches exchange after a round, or of the gradients that a stage sums."""
    boundary_compression: BoundaryCompressionSpec = Field(
        default=NO_BOUNDARY_COMPRESSION, title="Compression between stages"
    )
    """Codec of the activations and gradients that stages exchange, for slow links."""
    precision: Precision = "float32"
    """Type in which layers compute; weights, their gradients and the optimizer's state stay float32."""
    compile: CompileMode = Field(default="off", title="Compiled code")
    """Compile layers with torch.compile; auto does so if it is faster. The weights then differ in the last bits."""
    activation_checkpointing: bool = False
    """Keep only the inputs of each layer and recompute the rest in the backward pass: less memory, more time."""
    freeze: tuple[str, ...] = Field(default=(), title="Frozen", fail_fast=True)
    """Frozen parameters: patterns of stored names (``model.embed_tokens.*``), or layer ranges (``layers[:6]``)."""
    lora: LoraSpec | None = Field(default=None, title="Adapters (LoRA)")
    """Train small adapters beside the frozen weights of a pretrained model (LoRA) instead of the weights."""
    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    """Seed of the initial weights, the order of samples, and dropout."""
    validate_every: int | None = Field(default=None, ge=1, title="Steps between validations")
    """Steps between validations; null validates only at the end."""
    checkpoint_every: int | None = Field(default=None, ge=1, title="Steps between checkpoints")
    """Steps between checkpoints to resume from; null: by time, as set on the server (default 180 s)."""
    checkpoints_kept: int = Field(default=3, ge=1, le=2**20)
    """Number of newest checkpoints to keep."""
    early_stopping: EarlyStoppingSpec | None = Field(default=None, title="Stop early")
    """End the job when validations no longer improve."""
    target: TargetSpec | None = Field(default=None, title="Goal")
    """End the job as soon as a validation reaches this value of a metric."""
    samples: SamplesSpec | None = Field(default=None, title="Sample texts")
    """Let the model continue some prompts at intervals, to show its progress."""

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
        if self.target is not None and self.validate_every is None:
            raise ValueError("target needs validate_every, the steps between validations")
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
    def _plateau_can_be_left(self) -> Self:
        options, rate = self.schedule.plateau, self.optimizer.learning_rate
        if options is None:
            return self
        name = f"schedule.name {PLATEAU}"
        if self.validate_every is None:
            raise ValueError(f"{name} needs validate_every, the steps between validations")
        if self.validate_every >= self.steps:
            raise ValueError(
                f"{name} needs a validation before the last step: validate_every {self.validate_every} must be below "
                f"steps {self.steps}"
            )
        if options.min_lr >= rate:
            raise ValueError(
                f"schedule.options.min_lr {options.min_lr:g} must be below optimizer.learning_rate {rate:g}"
            )
        if options.threshold_mode == "rel" and options.threshold >= 1 and options.metric not in RISING:
            raise ValueError(
                f"schedule.options.threshold {options.threshold:g} must be below 1: {options.metric} cannot fall by "
                "its whole value; or set threshold_mode to abs"
            )
        return self

    @model_validator(mode="after")
    def _microbatches_divide(self) -> Self:
        if self.microbatches is not None and self.batch_size % self.microbatches:
            raise ValueError(
                f"batch_size {self.batch_size} is not a multiple of microbatches {self.microbatches}"
            )
        return self

    @model_validator(mode="after")
    def _rounds_fit(self) -> Self:
        policy = self.rounds
        if policy is None:
            self._sums_can_be_compressed()
            return self
        if self.compile != "off":
            raise ValueError(
                f"compile {self.compile} needs synchronization {{kind: allreduce}}: branches compute eagerly"
            )
        if self.schedule.plateau is not None:
            raise ValueError(
                "schedule.name reduce_on_plateau needs synchronization {kind: allreduce}: only the first branch "
                "validates, and the others would keep another learning rate"
            )
        if policy.keeps_own_weights and self.endings:
            raise ValueError(
                f"{self.endings[0][0]} needs a synchronization with common weights, such as {{kind: local}}: with "
                f"{self.synchronization.kind}, only the last round gives the merged weights to all branches"
            )
        if isinstance(policy, AutoSpec):
            if policy.shortest > self.steps:
                raise ValueError(
                    f"synchronization.shortest {policy.shortest} is more than the {self.steps} steps of the job"
                )
            policy.length(1, self.steps, [*self.intervals.values()])
            return self
        if policy.every > self.steps:
            raise ValueError(
                f"synchronization.every {policy.every} is more than the {self.steps} steps of the job"
            )
        for name, steps in self.intervals.items():
            if steps % policy.every:
                raise ValueError(
                    f"{name} {steps} is not a multiple of synchronization.every {policy.every}: "
                    "branches are merged only after a round"
                )
        return self

    def _sums_can_be_compressed(self) -> None:
        codec = self.compression
        if isinstance(codec, NoCompressionSpec):
            return
        if isinstance(codec, PowerSgdSpec):
            raise ValueError(  # noqa: TRY004 - pydantic reports ValueError
                "compression.name powersgd keeps state: it needs a synchronization with branches"
            )
        if codec.error_feedback is not None:
            raise ValueError(
                f"compression.error_feedback {codec.error_feedback:g} needs a synchronization with branches: the "
                "error of a sum of gradients would be lost with its machine; set it to null"
            )
        if codec.from_step:
            raise ValueError(f"compression.from_step {codec.from_step} needs a synchronization with branches")

    @property
    def compresses_sums(self) -> bool:
        """Whether the members of a stage compress the gradients that they add up in each step."""
        return isinstance(self.synchronization, AllReduceSpec) and self.compression.name != "none"

    @property
    def intervals(self) -> dict[str, int]:
        """The given fields with the steps between validations, checkpoints and sample texts: the value of each."""
        given = {
            "validate_every": self.validate_every,
            "checkpoint_every": self.checkpoint_every,
            "samples.every": None if self.samples is None else self.samples.every,
        }
        return {name: steps for name, steps in given.items() if steps is not None}

    @property
    def endings(self) -> tuple[tuple[str, EarlyStoppingSpec | TargetSpec], ...]:
        """The given fields that end the job at a metric: the name and value of each."""
        given = (("early_stopping", self.early_stopping), ("target", self.target))
        return tuple((name, value) for name, value in given if value is not None)

    @property
    def watched(self) -> tuple[tuple[str, Metric], ...]:
        """The given fields that name a metric of the validations, and these metrics."""
        endings = tuple((f"{name}.metric", ending.metric) for name, ending in self.endings)
        plateau = self.schedule.plateau
        return endings if plateau is None else (*endings, ("schedule.options.metric", plateau.metric))

    @property
    def rounds(self) -> BranchesSpec | None:
        """The policy by which branches merge; None if the job has no branches."""
        return self.synchronization if isinstance(self.synchronization, BranchesSpec) else None

    @property
    def microbatch_size(self) -> int:
        """Number of samples in one microbatch; the number of microbatches must be known."""
        assert self.microbatches is not None, "the plan says how many"
        return self.batch_size // self.microbatches

    @property
    def state_tensors(self) -> int:
        """Number of tensors that a member keeps for each trained parameter, of the same size, beside its gradient."""
        return self.optimizer.name.state_tensors + self.branch_tensors

    @property
    def branch_tensors(self) -> int:
        """Number of tensors that a branch keeps for each trained parameter, of the same size; 0 without branches."""
        if self.rounds is None:
            return 0
        codec = self.compression
        has_residual = isinstance(codec, LossyCompressionSpec) and codec.error_feedback is not None
        others = (
            has_residual,
            self.rounds.keeps_own_weights,  # the merged weights, for evaluations
            self.rounds.overlapping > 0,  # the weights at the end of the round
        )
        return 1 + sum(others)
