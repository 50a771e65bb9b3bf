"""Plan files: a plan that `share-compute plan --output` wrote, and that ``parallelism.plan`` pins."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from share_compute.errors import UserError
from share_compute.files.field_errors import invalid
from share_compute.files.plain_text import PlainText
from share_compute.files.plain_yaml import read_yaml, write_yaml
from share_compute.specification.base import SpecModel
from share_compute.topology import MOST_BYTES

MOST_STAGES = 1024
MOST_MEMBERS = 1024
"""Maximum number of machines of one stage of a plan file."""
_MOST_LAYERS = 2**16
_WRITE = "write it with share-compute plan JOB --output FILE"


class PinnedModel(SpecModel):
    """The model that a plan file is for."""

    layers: int = Field(ge=1, le=_MOST_LAYERS)
    """Number of layers."""
    parameters: int = Field(default=0, ge=0, le=MOST_BYTES)
    """Number of parameters when the plan was made; it is not compared."""
    digest: str = Field(pattern=r"^[0-9a-f]{32}$")
    """Digest of the layers' types and numbers of parameters."""


class PinnedMember(SpecModel):
    """One machine of a stage."""

    name: PlainText = Field(min_length=1, max_length=200)
    """Name of the machine."""
    microbatches: int = Field(ge=1, le=2**20)
    """Number of microbatches that the machine computes in each step."""
    memory_bytes: int = Field(default=0, ge=0, le=MOST_BYTES)
    """Predicted memory need when the plan was made; it is predicted again when the plan is used."""


class PinnedStage(SpecModel):
    """A range of layers, and the machines that each hold all of it."""

    first_layer: int = Field(ge=0, lt=_MOST_LAYERS)
    last_layer: int = Field(ge=0, lt=_MOST_LAYERS)
    machines: tuple[PinnedMember, ...] = Field(min_length=1, max_length=MOST_MEMBERS, fail_fast=True)


class PinnedPlan(SpecModel):
    """Stages with their layers and machines, as a plan file has them."""

    kind: Literal["plan"]
    version: Literal[1]
    model: PinnedModel
    microbatches: int = Field(ge=1, le=2**20)
    """Number of microbatches that a batch is split into."""
    stages: tuple[PinnedStage, ...] = Field(min_length=1, max_length=MOST_STAGES, fail_fast=True)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all machines, in pipeline order."""
        return tuple(member.name for stage in self.stages for member in stage.machines)

    @model_validator(mode="after")
    def _stages_cover_all_layers(self) -> Self:
        for place, stage in enumerate(self.stages):
            if stage.last_layer < stage.first_layer:
                raise ValueError(
                    f"stages.{place} ends with layer {stage.last_layer}, before its first layer {stage.first_layer}"
                )
        if self.stages[0].first_layer:
            raise ValueError(f"stages.0 begins with layer {self.stages[0].first_layer}, not with layer 0")
        for place, (before, after) in enumerate(pairwise(self.stages)):
            if after.first_layer <= before.last_layer:
                raise ValueError(
                    f"stages.{place} and stages.{place + 1} overlap: the first ends with layer {before.last_layer}, "
                    f"the second begins with layer {after.first_layer}"
                )
            if after.first_layer > before.last_layer + 1:
                raise ValueError(
                    f"no stage has layer {before.last_layer + 1}: stages.{place} ends with layer {before.last_layer}, "
                    f"stages.{place + 1} begins with layer {after.first_layer}"
                )
        if self.stages[-1].last_layer + 1 != self.model.layers:
            raise ValueError(
                f"the last stage ends with layer {self.stages[-1].last_layer}, and the last of model.layers "
                f"{self.model.layers} layers is layer {self.model.layers - 1}"
            )
        return self

    @model_validator(mode="after")
    def _machines_share_the_microbatches(self) -> Self:
        seen: set[str] = set()
        for place, stage in enumerate(self.stages):
            given = sum(member.microbatches for member in stage.machines)
            if given != self.microbatches:
                raise ValueError(
                    f"the machines of stages.{place} have {given} microbatches together, and the plan has "
                    f"{self.microbatches}"
                )
            for member in stage.machines:
                if member.name in seen:
                    raise ValueError(f"machine {member.name!r} is given twice")
                seen.add(member.name)
        return self


def read_plan(text: str) -> dict[str, Any]:
    """Return the content of a plan file, checked.

    Raises:
        UserError: the text is too long or no valid YAML, of another kind or version, or has invalid fields.
    """
    data = read_yaml(text, "plan file")
    if not isinstance(data, dict) or data.get("kind") != "plan":
        found = f"of kind {str(data.get('kind'))[:100]!r}" if isinstance(data, dict) else "no mapping of keys"
        raise UserError(f"this is no plan file: it is {found}, not of kind 'plan'", hint=_WRITE)
    if data.get("version") != 1 or isinstance(data["version"], bool):
        raise UserError(
            f"this plan file is of version {str(data.get('version'))[:100]!r}; this release reads version 1",
            hint=f"{_WRITE}, with this release",
        )
    try:
        PinnedPlan.model_validate(data)
    except ValidationError as failure:
        raise invalid(failure, f"fix these fields of the plan file, or {_WRITE}") from failure
    return data


def write_plan(plan: PinnedPlan) -> str:
    """Return the text of a plan file that `read_plan` can read."""
    return write_yaml(plan.model_dump(mode="json"))
