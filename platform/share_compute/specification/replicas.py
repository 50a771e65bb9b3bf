"""How many replicas a deployment has: a number, or a range in which it follows what is asked of it.

Names and meanings are those of Ray Serve's ``autoscaling_config``.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from share_compute.errors import UserError
from share_compute.specification.base import SpecModel

_MOST = 1024
_RANGE = re.compile(r"^\s*(\d{1,4})(?:\s*\.\.\s*(\d{1,4}))?\s*$")


class ReplicasSpec(SpecModel):
    """The range of a deployment's replicas, and how it follows the requests in it."""

    min: int = Field(default=1, ge=0, le=_MOST)
    """Fewest replicas; 0 lets the machines go while nobody asks."""
    max: int = Field(ge=1, le=_MOST)
    """Most replicas."""
    target_ongoing_requests: float | None = Field(default=None, ge=1)
    """Sequences, running and queued, that each replica is to have; default: ``max_concurrent``, so that none waits."""
    upscale_delay_s: float = Field(default=2.0, ge=0, le=86400)
    """So long more replicas must be needed before they are started; from none to one it is done at once."""
    downscale_delay_s: float = Field(default=60.0, ge=0, le=86400)
    """So long fewer replicas must suffice before some are ended."""
    downscale_to_zero_delay_s: float = Field(default=300.0, ge=0, le=30 * 86400)
    """So long nobody must have asked before the last replica is ended."""
    cold_start_timeout_s: float = Field(default=120.0, gt=0, le=3600)
    """Longest wait of a request for a replica that answers."""

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if self.max < self.min:
            raise ValueError(f"max ({self.max}) must not be less than min ({self.min})")
        return self

    @property
    def is_fixed(self) -> bool:
        """Whether there is nothing to follow."""
        return self.min == self.max

    def changed_by(self, change: ReplicasSpec) -> ReplicasSpec:
        """Return this with what ``change`` was given in its place; the rest stays.

        Raises:
            UserError: the two do not go together.
        """
        try:
            return ReplicasSpec.model_validate(
                {**self.model_dump(), **change.model_dump(include=change.model_fields_set)}
            )
        except ValidationError as failure:
            said = failure.errors()[0]["msg"].removeprefix("Value error, ")
            raise UserError(f"replicas: {said}", mend="give min and max together") from failure

    def __str__(self) -> str:
        """Return it as the command line takes it: ``2`` or ``0..4``."""
        return str(self.max) if self.is_fixed else f"{self.min}..{self.max}"


def read_replicas(text: str) -> dict[str, int]:
    """Return what ``2`` or ``0..4`` asks for, as the fields of a `ReplicasSpec`.

    Raises:
        ValueError: it is neither.
    """
    found = _RANGE.match(text)
    if found is None:
        raise ValueError(f"{text!r} is neither a number of replicas, such as 2, nor a range, such as 0..4")
    least, most = int(found[1]), int(found[2] or found[1])
    if most == 0:
        raise ValueError("0 replicas would never answer; give a range from 0, such as 0..1, or undeploy it")
    return {"min": least, "max": most}


def _as_range(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | str):
        return value
    return read_replicas(str(value))


Replicas = Annotated[
    ReplicasSpec, BeforeValidator(_as_range, json_schema_input_type=int | str | ReplicasSpec)
]
"""Read from a number, from text such as ``0..4``, or from the fields of a `ReplicasSpec`."""
