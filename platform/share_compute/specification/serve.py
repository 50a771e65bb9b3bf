"""A deployment as it is asked for: which model, how long its sequences are, and how many of them at one time."""

from __future__ import annotations

from pathlib import PurePath
from typing import Literal, Self

from pydantic import Field, model_validator

from share_compute.planning.workload import Objective, ServedPrecision, ServingWorkload
from share_compute.specification.base import SpecModel, TextPath, exactly_one
from share_compute.specification.replicas import Replicas, ReplicasSpec

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
"""Clients put a deployment's name into URLs, and send it as ``model``."""


class ServedModelSpec(SpecModel):
    """The model to serve: exactly one of ``path`` and ``job``."""

    model_config = exactly_one("path", "job")

    path: TextPath | None = Field(default=None, title="Folder")
    """Hugging Face folder on the server (config.json, safetensors, tokenizer), or an upload: ``upload:ID``."""
    job: str | None = Field(default=None, min_length=1, max_length=100, title="Result of a job")
    """Id of a training job whose result is served."""
    artifact: str = Field(default="model", min_length=1, max_length=200)
    """Which result of the job."""

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.path is None) == (self.job is None):
            raise ValueError("give exactly one of path and job")
        return self

    @property
    def label(self) -> str:
        """Short name for people: the folder's own, or the job with its result."""
        return f"{self.job}/{self.artifact}" if self.path is None else PurePath(self.path).name


class ServingParallelismSpec(SpecModel):
    """How a served model is laid over the machines."""

    pools: int | None = Field(default=None, ge=1)
    """Pools in a row, each holding one shard; default: what is best for the objective."""
    channel: Literal["auto", "direct", "ray"] = "auto"
    """How tensors travel: direct sockets, Ray calls, or direct wherever the machines reach each other."""


class ServeJob(SpecModel):
    """Serve a model to clients of the OpenAI API until it is taken down."""

    kind: Literal["serve"] = "serve"
    """What sort of job this is."""
    name: str = Field(min_length=1, max_length=80, pattern=NAME_PATTERN)
    """What clients send as ``model``; unique among the deployments that are up."""
    model: ServedModelSpec
    """What to serve."""
    replicas: Replicas = ReplicasSpec(min=1, max=1)
    """Copies of the whole row of pools, over which requests are shared out: a number, or a range to follow them in."""
    max_seq: int | None = Field(default=None, ge=16, le=2**24, title="Longest sequence")
    """Most tokens of a prompt and its answer together; default: what the model was made for."""
    max_concurrent: int = Field(default=16, ge=1, le=2**20, title="Sequences at one time")
    """Most sequences that are generated at one time on one replica; others wait."""
    dtype: ServedPrecision = Field(default="float32", title="Precision")
    """What weights are loaded as, and layers compute in; int8 is for weights alone, all else is float32 then."""
    objective: Objective = "latency"
    """What machines are chosen for: the shortest answer, or most tokens a second within the limits."""
    prompt_tokens: int = Field(default=512, ge=1, le=2**24)
    """Tokens of a typical prompt; what machines are chosen for."""
    new_tokens: int = Field(default=128, ge=1, le=2**24)
    """Tokens of a typical answer; what machines are chosen for, and the room that each answer gets first."""
    first_token_limit_s: float | None = Field(default=None, gt=0)
    """Longest wait for the first token; for objective throughput."""
    next_token_limit_s: float | None = Field(default=None, gt=0)
    """Longest wait for each token after it; for objective throughput."""
    parallelism: ServingParallelismSpec = ServingParallelismSpec()
    """How the model is laid over the machines."""

    @model_validator(mode="after")
    def _limits_fit_objective(self) -> Self:
        limits = ("first_token_limit_s", "next_token_limit_s")
        given = [name for name in limits if getattr(self, name) is not None]
        if given and self.objective == "latency":
            raise ValueError(f"{given[0]} is for objective throughput; latency is as short as it can be")
        return self

    def workload(self) -> ServingWorkload:
        """Return what the planner reads."""
        return ServingWorkload(
            objective=self.objective,
            prompt_tokens=self.prompt_tokens,
            new_tokens=self.new_tokens,
            concurrent=self.max_concurrent,
            first_token_limit_s=self.first_token_limit_s,
            next_token_limit_s=self.next_token_limit_s,
            dtype=self.dtype,
        )
