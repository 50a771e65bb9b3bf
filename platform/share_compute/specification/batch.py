"""Specifications of batch jobs, in which a served model answers every row of some files."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from share_compute.specification.base import Group, SpecModel, Tags, TextPath, exactly_one, plain_json
from share_compute.specification.placement.selection import SelectionSpec
from share_compute.specification.serve import NAME_PATTERN, ServedModelSpec
from share_compute.specification.token_options import TokenOptions

ROW_SUFFIXES = (".jsonl", ".parquet")
_Column = Field(default=None, min_length=1, max_length=200)


class BatchDataSpec(SpecModel):
    """Files whose rows are answered."""

    files: tuple[TextPath, ...] = Field(min_length=1, fail_fast=True)
    """Files on the server, or of an upload, read in this order: .jsonl or .parquet, all of one kind."""

    @field_validator("files")
    @classmethod
    def _one_kind(cls, files: tuple[TextPath, ...]) -> tuple[TextPath, ...]:
        suffixes = sorted({file.suffix for file in files})
        for file in files:
            if file.suffix not in ROW_SUFFIXES:
                what = file.name if file.suffix else f"{file.name}, which has no suffix"
                raise ValueError(f"cannot read rows of {what}; known: {', '.join(ROW_SUFFIXES)}")
        if len(suffixes) > 1:
            raise ValueError(f"files are of several kinds: {', '.join(suffixes)}")
        return files


class GenerateDataSpec(BatchDataSpec):
    """Files whose rows hold inputs of a model that generates text; give exactly one of ``prompt`` and ``messages``."""

    model_config = exactly_one("prompt", "messages")

    prompt: str | None = _Column
    """Column that holds a text to continue."""
    messages: str | None = _Column
    """Column that holds a conversation: a list of ``{role, content}``, formatted by the model's own chat template."""

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give exactly one of prompt and messages: the column that is read")
        return self

    @property
    def column(self) -> str:
        """Name of the column that is read."""
        return self.prompt or self.messages or ""


class EmbedDataSpec(BatchDataSpec):
    """Files whose rows hold texts that are embedded into vectors."""

    text: str = Field(default="text", min_length=1, max_length=200)
    """Column that holds the text."""

    @property
    def column(self) -> str:
        """Name of the column that is read."""
        return self.text


class BatchOutputSpec(SpecModel):
    """Format of the output."""

    format: Literal["jsonl", "parquet"] | None = None
    """Format of the output file; default: the format of the input files."""


class BatchSamplingSpec(TokenOptions):
    """Sampling options and end conditions of answers, with the names and defaults of the OpenAI API."""

    max_tokens: int | None = Field(default=None, ge=1, le=2**31)
    """Most tokens of an answer; default: 16 for prompts, the rest of the window for messages."""
    temperature: float | None = Field(default=None, ge=0, le=2)
    """Divisor of the logits, default 1; 0 takes the most probable token."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Keep the most probable tokens that together have this probability."""
    top_k: int | None = Field(default=None, ge=-1, le=2**31)
    """Keep this number of most probable tokens; 0 and -1 keep all."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    """Keep tokens with at least this fraction of the highest probability."""
    repetition_penalty: float | None = Field(default=None, gt=0, le=100)
    """Values above 1 make tokens of prompt and answer less probable."""
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    """Subtracted from the logit of a token once for each time that it was generated."""
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    """Subtracted once from the logits of all tokens that were generated."""
    seed: int = Field(default=0, ge=-(2**63), lt=2**63)
    """Seed of the job; the seed of each row is derived from this seed and the row's number."""
    stop: tuple[str, ...] = Field(default=(), max_length=16, fail_fast=True)
    """Stop strings: an answer ends before the first of them."""
    ignore_eos: bool | None = None
    """Continue past the model's end-of-text tokens."""
    response_format: dict[str, Any] | None = None
    """Format of the text: ``{type: json_object}``, or ``{type: json_schema, json_schema: {schema: ...}}``."""

    @field_validator("stop")
    @classmethod
    def _no_empty_stop(cls, stop: tuple[str, ...]) -> tuple[str, ...]:
        if "" in stop:
            raise ValueError("a stop string is empty")
        return stop

    @field_validator("response_format")
    @classmethod
    def _format_is_plain(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        plain_json(value)
        return value


class BatchOptions(SpecModel):
    """Options of batch jobs that do not depend on the model."""

    output: BatchOutputSpec = BatchOutputSpec()
    """Format of the output."""
    concurrency: int | None = Field(default=None, ge=1, le=2**16)
    """Most rows in progress at one time; default: 2 x ``max_concurrent`` x ``replicas.max`` of the deployment."""


class _BatchModel(SpecModel):
    """Common fields of batch jobs; exactly one of ``deployment`` and ``model`` is given."""

    model_config = exactly_one("deployment", "model")

    deployment: str | None = Field(default=None, min_length=1, max_length=80, pattern=NAME_PATTERN)
    """Name of the deployment that answers."""
    model: ServedModelSpec | None = None
    """Model that is deployed for this job alone, and taken down when the job ends."""
    parallelism: SelectionSpec = SelectionSpec()
    """Machines that may hold ``model``; a deployment has machines of its own."""

    @model_validator(mode="after")
    def _exactly_one_model(self) -> Self:
        if (self.deployment is None) == (self.model is None):
            raise ValueError("give exactly one of deployment and model")
        return self

    @model_validator(mode="after")
    def _deployment_has_its_machines(self) -> Self:
        if self.deployment is not None and self.parallelism != SelectionSpec():
            name = "only" if self.parallelism.only else "avoid"
            raise ValueError(
                f"parallelism.{name}: the deployment has machines of its own: leave it out, or give model"
            )
        return self


class _Batch(BatchOptions, _BatchModel):
    """Common fields of batch jobs."""


class GenerateJob(_Batch):
    """Answer every row of some files with a model that generates text."""

    kind: Literal["generate"] = "generate"
    """Kind of the job."""
    name: str = Field(default="generate", min_length=1, max_length=80, pattern=r"^[\w][\w .-]*$")
    """Display name of the job."""
    tags: Tags = ()
    """Tags by which the job is found."""
    group: Group | None = None
    """Group of jobs that belong together."""
    data: GenerateDataSpec
    """Files whose rows are answered."""
    sampling: BatchSamplingSpec = BatchSamplingSpec()
    """Sampling options and end conditions of answers."""


class EmbedJob(_Batch):
    """Embed a text of every row of some files into a vector, with an encoder."""

    kind: Literal["embed"] = "embed"
    """Kind of the job."""
    name: str = Field(default="embed", min_length=1, max_length=80, pattern=r"^[\w][\w .-]*$")
    """Display name of the job."""
    tags: Tags = ()
    """Tags by which the job is found."""
    group: Group | None = None
    """Group of jobs that belong together."""
    data: EmbedDataSpec
    """Files whose texts are embedded into vectors."""


BatchJob = GenerateJob | EmbedJob
BATCH_KINDS = ("generate", "embed")
