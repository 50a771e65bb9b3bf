"""What a submitter asks for: one frozen model, the same as YAML file, REST body and form.

`parse_job` turns text or a mapping into a `TrainJob`; `job_schema` is the published JSON schema.
"""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from share_compute.errors import UserError
from share_compute.plain_yaml import read_yaml
from share_compute.strict import StrictModel, nearest

TEXT_SUFFIXES = (".txt", ".jsonl", ".parquet")
LAYER_TYPES = (
    "avg_pool2d", "conv2d", "dropout", "flatten", "gelu", "layer_norm",
    "linear", "max_pool2d", "relu", "sigmoid", "tanh", "unflatten",
)  # fmt: skip
SCHEDULES = ("constant", "constant_with_warmup", "linear", "cosine", "polynomial", "inverse_sqrt")


class OptimizerName(StrEnum):
    """The optimizers that exist."""

    sgd = "sgd"
    momentum = "momentum"
    adagrad = "adagrad"
    rmsprop = "rmsprop"
    adam = "adam"
    adamw = "adamw"

    @property
    def state_tensors(self) -> int:
        """Tensors as large as the weights that it keeps."""
        match self:
            case OptimizerName.sgd:
                return 0
            case OptimizerName.momentum | OptimizerName.adagrad:
                return 1
            case OptimizerName.rmsprop | OptimizerName.adam | OptimizerName.adamw:
                return 2


def _known(value: Any, known: tuple[str, ...], what: str) -> Any:
    if isinstance(value, str) and value not in known:
        guess = nearest(value, list(known))
        hint = f"did you mean {guess!r}?" if guess else f"known: {', '.join(known)}"
        raise ValueError(f"unknown {what} {value!r}; {hint}")
    return value


def _writable(path: Path) -> Path:
    try:
        str(path).encode()
    except UnicodeEncodeError as failure:
        raise ValueError("a path must be Unicode text") from failure
    return path


TextPath = Annotated[Path, AfterValidator(_writable)]
"""A path that JSON and databases can hold, which not every name on a disk can."""


class SpecModel(StrictModel):
    """Base of all parts of a job: every number in it is finite."""

    model_config = ConfigDict(allow_inf_nan=False)


class LayerSpec(SpecModel):
    """One declared torch layer of a model that is given as a list of layers."""

    type: str = Field(json_schema_extra={"enum": list(LAYER_TYPES)})
    """Name of the layer: linear, conv2d, relu, ..."""
    options: dict[str, int | float | bool | list[int]] = Field(default_factory=dict)
    """Arguments of the torch module, e.g. ``{in_features: 64, out_features: 128}``."""

    @field_validator("options", mode="before")
    @classmethod
    def _options_are_plain(cls, value: Any) -> Any:
        for name, option in value.items() if isinstance(value, dict) else ():
            whole = isinstance(option, list) and all(type(item) is int for item in option)
            if not whole and not isinstance(option, int | float):
                raise ValueError(
                    f"{name} must be a number, true, false or a list of whole numbers, not {option!r}"
                )
        return value

    @field_validator("type", mode="before")
    @classmethod
    def _layer_exists(cls, value: Any) -> Any:
        return _known(value, LAYER_TYPES, "layer type")


class ModelSpec(SpecModel):
    """The model to train: exactly one of ``path``, ``config`` and ``layers``."""

    path: TextPath | None = None
    """Local Hugging Face folder (config.json, safetensors); training starts from its weights."""
    config: dict[str, Any] | None = None
    """Hugging Face configuration with its ``model_type``; training starts from random weights."""
    layers: tuple[LayerSpec, ...] | None = None
    """Declared list of torch layers; training starts from random weights."""

    @field_validator("config")
    @classmethod
    def _config_is_plain(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        # It is kept and handed on as JSON, which not all that YAML or Python can say survives.
        try:
            json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
        except (TypeError, ValueError, RecursionError) as failure:
            raise ValueError(f"must be plain JSON: {failure}") from failure
        return value

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        given = [name for name in ("path", "config", "layers") if getattr(self, name) is not None]
        if len(given) != 1:
            found = ", ".join(given) or "none"
            raise ValueError(f"give exactly one of path, config and layers; given: {found}")
        if self.config is not None and not isinstance(self.config.get("model_type"), str):
            raise ValueError("config needs a model_type, e.g. llama")
        if self.layers is not None and not self.layers:
            raise ValueError("layers is empty")
        return self


class DataSpec(SpecModel):
    """What to train on: text ``files``, or a ``dataset`` that ships with a package."""

    files: tuple[TextPath, ...] | None = None
    """Text files on the server: .txt, .jsonl or .parquet, all of one kind."""
    dataset: Literal["digits"] | None = None
    """A data set that ships with scikit-learn: 1,797 handwritten digits of 8 x 8 pixels."""
    text_column: str = "text"
    """Column of .jsonl and .parquet files that holds the text."""
    validation_fraction: float = Field(default=0.05, ge=0, lt=0.5)
    """Share of the samples kept for validation."""
    test_fraction: float = Field(default=0.05, ge=0, lt=0.5)
    """Share of the samples kept for the final test."""
    shuffle: bool = True
    """Visit the samples in a new order, drawn from the seed, in each pass."""

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.files is None) == (self.dataset is None):
            raise ValueError("give exactly one of files and dataset")
        if self.files is not None:
            if not self.files:
                raise ValueError("files is empty")
            suffixes = {file.suffix for file in self.files}
            unknown = sorted(suffixes - set(TEXT_SUFFIXES))
            if unknown:
                what = unknown[0] or "a file without suffix"
                raise ValueError(f"cannot read {what}; known: {', '.join(TEXT_SUFFIXES)}")
            if len(suffixes) > 1:
                raise ValueError(f"files are of several kinds: {', '.join(sorted(suffixes))}")
        return self


class TokenizerSpec(SpecModel):
    """Where token ids come from: a folder, or trained from the data (byte-level BPE)."""

    path: TextPath | None = None
    """Folder of a Hugging Face tokenizer; default: the model's own folder, if it has one."""
    vocab_size: int | None = Field(default=None, ge=257)
    """Size of a tokenizer trained from the data; default: the model configuration's."""

    @model_validator(mode="after")
    def _not_both(self) -> Self:
        if self.path is not None and self.vocab_size is not None:
            raise ValueError("give path, or vocab_size to train one, not both")
        return self


class OptimizerSpec(SpecModel):
    """How gradients become updates."""

    name: OptimizerName = OptimizerName.adamw
    """sgd, momentum, adagrad, rmsprop, adam or adamw."""
    learning_rate: float = Field(default=1e-3, gt=0)
    """Peak learning rate."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled for adamw, added to the gradient for the others."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """For momentum and rmsprop."""
    betas: tuple[float, float] = (0.9, 0.95)
    """For adam and adamw."""
    epsilon: float = Field(default=1e-8, gt=0)
    """Added to denominators (adagrad, rmsprop, adam, adamw)."""

    @field_validator("name", mode="before")
    @classmethod
    def _optimizer_exists(cls, value: Any) -> Any:
        return _known(value, tuple(name.value for name in OptimizerName), "optimizer")

    @field_validator("betas")
    @classmethod
    def _betas_in_range(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in value):
            raise ValueError("each beta must be at least 0 and less than 1")
        return value


class ScheduleSpec(SpecModel):
    """How the learning rate moves over the steps (the schedules of ``transformers``)."""

    name: str = Field(default="cosine", json_schema_extra={"enum": list(SCHEDULES)})
    """constant, constant_with_warmup, linear, cosine, polynomial or inverse_sqrt."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises from 0."""

    @field_validator("name", mode="before")
    @classmethod
    def _schedule_exists(cls, value: Any) -> Any:
        return _known(value, SCHEDULES, "schedule")


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
    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    """Initial weights, order of samples and dropout follow from it alone."""
    validate_every: int | None = Field(default=None, ge=1)
    """Steps between validations; null validates only at the end."""
    checkpoint_every: int | None = Field(default=None, ge=1)
    """Steps between checkpoints that a job can be resumed from; null keeps only the last."""

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


class ParallelismSpec(SpecModel):
    """How the model is laid over the machines."""

    strategy: str = "auto"
    """Name of the partitioning strategy that cuts the model into pools and places them."""
    pools: int | None = Field(default=None, ge=1)
    """Pools in a row, each holding one shard; default: the fastest number (simple strategies: all machines)."""
    members_per_pool: int | None = Field(default=None, ge=1)
    """Machines that hold one shard and share its microbatches; default: the fastest number (simple strategies: 1)."""
    channel: Literal["auto", "direct", "ray"] = "auto"
    """How tensors travel: direct sockets, Ray calls, or direct wherever the machines reach each other."""

    @property
    def machines_needed(self) -> int:
        """Fewest machines that the job can run on."""
        return (self.pools or 1) * (self.members_per_pool or 1)


class TrainJob(SpecModel):
    """Train a model: a causal language model on text, or a classifier built from declared layers."""

    kind: Literal["train"] = "train"
    """What sort of job this is."""
    name: str = Field(default="train", min_length=1, max_length=80, pattern=r"^[\w][\w .-]*$")
    """What people call it."""
    model: ModelSpec
    """What to train."""
    data: DataSpec
    """What to train it on."""
    tokenizer: TokenizerSpec = TokenizerSpec()
    """How text becomes token ids."""
    training: TrainingSpec = TrainingSpec()
    """How long and how."""
    parallelism: ParallelismSpec = ParallelismSpec()
    """How the model is laid over the machines."""

    def with_microbatches(self, microbatches: int) -> TrainJob:
        """Return the job with the number of microbatches that its plan settled."""
        training = self.training.model_copy(update={"microbatches": microbatches})
        return self.model_copy(update={"training": training})

    @model_validator(mode="after")
    def _model_fits_data(self) -> Self:
        if (self.model.layers is not None) != (self.data.dataset is not None):
            raise ValueError("declared layers train on a dataset, language models on text files")
        return self

    @model_validator(mode="after")
    def _members_have_work(self) -> Self:
        members, microbatches = self.parallelism.members_per_pool, self.training.microbatches
        if members is not None and microbatches is not None and members > microbatches:
            raise ValueError(
                f"parallelism.members_per_pool {members} is more than training.microbatches {microbatches}: "
                "each member needs at least one"
            )
        return self


_ADAPTER: TypeAdapter[TrainJob] = TypeAdapter(Annotated[TrainJob, Field()])
_KINDS = ("train",)


def parse_job(source: str | dict[str, Any]) -> TrainJob:
    """Read a job from YAML (or JSON) text or from a mapping.

    Raises:
        UserError: naming each field that is wrong and, where there is one, the nearest known name.
    """
    data: Any = read_yaml(source, "job file") if isinstance(source, str) else source
    if not isinstance(data, dict):
        raise UserError(
            f"a job is a mapping of keys, not {type(data).__name__}", mend="start from a file in examples/"
        )
    try:
        _known(data.get("kind", "train"), _KINDS, "kind")
        return _ADAPTER.validate_python(data)
    except ValidationError as failure:
        problems = field_errors(failure)
        text = "; ".join(": ".join(filter(None, (item["field"], item["problem"]))) for item in problems)
        raise UserError(text, mend="mend these fields of the job", details={"fields": problems}) from failure
    except ValueError as failure:
        raise UserError(str(failure), mend="mend the job's kind") from failure


def field_errors(failure: ValidationError) -> list[dict[str, str]]:
    """Flatten a pydantic error to ``[{field, problem}]``, fields written with dots."""
    return [
        {
            "field": ".".join(str(part) for part in error["loc"]),
            "problem": error["msg"].removeprefix("Value error, "),
        }
        for error in failure.errors(include_url=False, include_context=False, include_input=False)
    ]


def job_schema() -> dict[str, Any]:
    """Return the JSON schema that editors and forms use."""
    return _ADAPTER.json_schema()
