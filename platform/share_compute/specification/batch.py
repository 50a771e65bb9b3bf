"""Batches: a served model answers every row of some files."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from share_compute.specification.base import SpecModel, TextPath, exactly_one, plain_json
from share_compute.specification.serve import NAME_PATTERN, ServedModelSpec

ROW_SUFFIXES = (".jsonl", ".parquet")
_Column = Field(default=None, min_length=1, max_length=200)


class BatchDataSpec(SpecModel):
    """Files whose rows are answered."""

    files: tuple[TextPath, ...] = Field(min_length=1)
    """Files on the server, or of an upload, read in this order: .jsonl or .parquet, all of one kind."""

    @field_validator("files")
    @classmethod
    def _one_kind(cls, files: tuple[TextPath, ...]) -> tuple[TextPath, ...]:
        suffixes = sorted({file.suffix for file in files})
        for suffix in suffixes:
            if suffix not in ROW_SUFFIXES:
                what = suffix or "a file without suffix"
                raise ValueError(f"cannot read rows of {what}; known: {', '.join(ROW_SUFFIXES)}")
        if len(suffixes) > 1:
            raise ValueError(f"files are of several kinds: {', '.join(suffixes)}")
        return files


class GenerateDataSpec(BatchDataSpec):
    """Files whose rows hold what a model goes on with: exactly one of ``prompt`` and ``messages``."""

    model_config = exactly_one("prompt", "messages")

    prompt: str | None = _Column
    """Column that holds a text to go on with."""
    messages: str | None = _Column
    """Column that holds a conversation: a list of ``{role, content}``, written by the model's own chat template."""

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give exactly one of prompt and messages: the column that is read")
        return self

    @property
    def column(self) -> str:
        """The column that is read."""
        return self.prompt or self.messages or ""


class EmbedDataSpec(BatchDataSpec):
    """Files whose rows hold what is turned into vectors."""

    text: str = Field(default="text", min_length=1, max_length=200)
    """Column that holds the text."""

    @property
    def column(self) -> str:
        """The column that is read."""
        return self.text


class BatchOutputSpec(SpecModel):
    """What the answers are written as."""

    format: Literal["jsonl", "parquet"] | None = None
    """Default: what the files are."""


class BatchSamplingSpec(SpecModel):
    """How answers are drawn, and when they end; as in requests of the OpenAI API, whose defaults hold."""

    max_tokens: int | None = Field(default=None, ge=1, le=2**31)
    """Most tokens of an answer; default: 16 for prompts, what the window holds for messages."""
    temperature: float | None = Field(default=None, ge=0, le=2)
    """Default 1; 0 takes the most probable token."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Only the most probable tokens that together have this probability."""
    top_k: int | None = Field(default=None, ge=-1, le=2**31)
    """Only so many of the most probable tokens; 0 and -1 leave all."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    """Only tokens at least so probable, in parts of the most probable one."""
    repetition_penalty: float | None = Field(default=None, gt=0, le=100)
    """Makes tokens of prompt and answer rarer above 1."""
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    """Taken from the logit of a token once for each time that it was generated."""
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    """Taken from the logits of all tokens that were generated."""
    seed: int = Field(default=0, ge=-(2**63), lt=2**63)
    """Each row's own seed follows from it and the row's number: the same job gives the same answers."""
    stop: tuple[str, ...] = Field(default=(), max_length=16)
    """Texts before which an answer ends."""
    ignore_eos: bool | None = None
    """Go on past the model's ends of text."""
    response_format: dict[str, Any] | None = None
    """``{type: json_object}``, or ``{type: json_schema, json_schema: {schema: ...}}``."""

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


class _Batch(SpecModel):
    """What both kinds of batches have in common: exactly one of ``deployment`` and ``model``."""

    model_config = exactly_one("deployment", "model")

    deployment: str | None = Field(default=None, min_length=1, max_length=80, pattern=NAME_PATTERN)
    """Name of a deployment that answers."""
    model: ServedModelSpec | None = None
    """A model that is deployed for this job alone, and taken down with it."""
    output: BatchOutputSpec = BatchOutputSpec()
    """What the answers are written as."""
    concurrency: int | None = Field(default=None, ge=1, le=2**16)
    """Most rows under way at one time; default: twice as many as the deployment's replicas take at one time."""

    @model_validator(mode="after")
    def _exactly_one_model(self) -> Self:
        if (self.deployment is None) == (self.model is None):
            raise ValueError("give exactly one of deployment and model")
        return self


class GenerateJob(_Batch):
    """A model that writes text answers every row of some files."""

    kind: Literal["generate"] = "generate"
    """What sort of job this is."""
    name: str = Field(default="generate", min_length=1, max_length=80, pattern=r"^[\w][\w .-]*$")
    """What people call it."""
    data: GenerateDataSpec
    """What is answered."""
    sampling: BatchSamplingSpec = BatchSamplingSpec()
    """How answers are drawn, and when they end."""


class EmbedJob(_Batch):
    """An encoder turns a text of every row of some files into a vector."""

    kind: Literal["embed"] = "embed"
    """What sort of job this is."""
    name: str = Field(default="embed", min_length=1, max_length=80, pattern=r"^[\w][\w .-]*$")
    """What people call it."""
    data: EmbedDataSpec
    """What is turned into vectors."""


BatchJob = GenerateJob | EmbedJob
BATCH_KINDS = ("generate", "embed")
