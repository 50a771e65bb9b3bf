"""Specification of a deployment: a served model, its limits, the number of its replicas and their placement."""

from __future__ import annotations

from pathlib import PurePath
from typing import Literal, Self, TypeAlias

from pydantic import Field, model_validator

from share_compute.choices import Objective, ServedPrecision
from share_compute.specification.base import (
    CompileMode,
    HubName,
    Revision,
    SpecModel,
    TextPath,
    exactly_one,
)
from share_compute.specification.placement.selection import SelectionSpec
from share_compute.specification.replicas import Replicas, ReplicasSpec

ToolFormat: TypeAlias = Literal["hermes", "llama", "mistral"]
"""Format in which a model writes tool calls."""
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
"""Pattern of a deployment's name, which clients use in URLs and send as ``model``."""


class ServedModelSpec(SpecModel):
    """The model to serve: exactly one of ``path``, ``hub`` and ``job``.

    In a submitted specification, ``path`` beside ``hub`` is the server's copy of the model; in a file it is ignored.
    """

    model_config = exactly_one("path", "hub", "job")

    path: TextPath | None = Field(default=None, title="Folder")
    """Hugging Face folder on the server (config.json, safetensors, tokenizer), or an upload: ``upload:ID``."""
    hub: HubName | None = Field(default=None, title="Name on the Hub")
    """Name of a public model on the Hugging Face Hub, which the server fetches."""
    revision: Revision | None = Field(default=None, title="Revision on the Hub")
    """Branch, tag or commit of ``hub``, default: main. The deployment keeps the commit that this was at first."""
    job: str | None = Field(default=None, min_length=1, max_length=100, title="Result of a job")
    """Id of a training job whose result is served."""
    artifact: str = Field(default="model", min_length=1, max_length=200)
    """Name of the job's result to serve."""

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.path is None and self.hub is None) == (self.job is None):
            raise ValueError("give exactly one of path, hub and job")
        if self.revision is not None and self.hub is None:
            raise ValueError("revision is that of a model on the Hub: give hub, too")
        return self

    @property
    def label(self) -> str:
        """Short name for display: the name on the Hub or of the folder, or the job and the name of its result."""
        if self.hub is not None:
            return self.hub
        return f"{self.job}/{self.artifact}" if self.path is None else PurePath(self.path).name


class ServingParallelismSpec(SelectionSpec):
    """Partitioning of a served model over the machines."""

    stages: int | None = Field(default=None, ge=1)
    """Number of pipeline stages, one shard each; default: the best number for the objective."""
    channel: Literal["auto", "direct", "ray"] = "auto"
    """Transport of tensors: direct sockets, Ray calls, or (auto) direct wherever the machines reach each other."""
    tensor: int = Field(default=1, ge=1, le=64, title="Tensor parallelism")
    """Number of processes on each machine that compute each layer together. They share its CPU threads, or have one GPU
    each."""

    @property
    def ranks(self) -> int:
        """Number of processes on each machine that compute each layer together."""
        return self.tensor


class DeploymentName(SpecModel):
    """Name of a deployment."""

    name: str = Field(min_length=1, max_length=80, pattern=NAME_PATTERN)
    """Name that clients send as ``model``; unique among the deployments that are up."""


class ServingOptions(SpecModel):
    """Limits of a deployment, the number of its replicas and their placement."""

    replicas: Replicas = ReplicasSpec(min=1, max=1)
    """Number of copies of the whole pipeline, which share the requests: fixed, or a range for autoscaling."""
    max_seq: int | None = Field(default=None, ge=16, le=2**24, title="Longest sequence")
    """Maximum number of tokens of a prompt and its answer together; default: the model's context window."""
    max_concurrent: int = Field(default=16, ge=1, le=2**20, title="Sequences at one time")
    """Most sequences that are generated at one time on one replica; others wait."""
    dtype: ServedPrecision = Field(default="float32", title="Precision")
    """Type of weights and of computation. With int8, only weights are int8, and computation is in float32."""
    compile: CompileMode = Field(default="off", title="Compiled code")
    """Compile layers with torch.compile; auto does so if it is faster. Answers may then differ in the last bits."""
    objective: Objective = "latency"
    """Objective of the placement: the shortest time of one request, or the most tokens per second within the limits."""
    prompt_tokens: int = Field(default=512, ge=1, le=2**24)
    """Tokens of a typical prompt, for which machines are chosen."""
    new_tokens: int = Field(default=128, ge=1, le=2**24)
    """Tokens of a typical answer, for which machines are chosen and KV capacity is reserved."""
    first_token_limit_s: float | None = Field(default=None, gt=0)
    """Longest wait for the first token; for objective throughput."""
    next_token_limit_s: float | None = Field(default=None, gt=0)
    """Longest wait for each token after the first; for objective throughput."""
    tool_format: Literal["auto", ToolFormat] = "auto"
    """Format in which the model writes tool calls; auto finds it from the chat template."""
    parallelism: ServingParallelismSpec = ServingParallelismSpec()
    """Partitioning of the model over the machines."""

    @model_validator(mode="after")
    def _limits_fit_objective(self) -> Self:
        limits = ("first_token_limit_s", "next_token_limit_s")
        given = [name for name in limits if getattr(self, name) is not None]
        if given and self.objective == "latency":
            raise ValueError(f"{given[0]} is for objective throughput; latency is as short as it can be")
        return self

    @model_validator(mode="after")
    def _can_be_compiled(self) -> Self:
        if self.compile != "off" and self.parallelism.tensor > 1:
            raise ValueError(
                f"compile {self.compile} needs parallelism.tensor 1, and it is {self.parallelism.tensor}: the "
                "processes of a machine compute eagerly"
            )
        return self


class _ServedModel(DeploymentName):
    """Fields of a deployment that come before its options."""

    kind: Literal["serve"] = "serve"
    """Kind of the specification."""
    model: ServedModelSpec
    """Model to serve."""


class ServeJob(ServingOptions, _ServedModel):
    """Serve a model to clients of the OpenAI API until it is taken down."""
