"""Number of replicas of a deployment: fixed, or a range within which it scales with the load.

The target load and the delays have the names of Ray Serve's ``autoscaling_config``.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from share_compute.errors import UserError
from share_compute.files.problem_words import problem_text
from share_compute.specification.base import SpecModel

_MOST = 1024
_RANGE = re.compile(r"^\s*(\d{1,4})(?:\s*\.\.\s*(\d{1,4}))?\s*$")


class ReplicasSpec(SpecModel):
    """Range of a deployment's replicas, and the autoscaling within it."""

    min: int = Field(default=1, ge=0, le=_MOST)
    """Fewest replicas; 0 releases the machines while there are no requests, unless ``reserve`` is true."""
    max: int = Field(ge=1, le=_MOST)
    """Most replicas."""
    target_ongoing_requests: float | None = Field(default=None, ge=1)
    """Target load per replica, in running and queued sequences; default: ``max_concurrent``."""
    upscale_delay_s: float = Field(default=2.0, ge=0, le=86400)
    """Scale-up delay: time for which more replicas must be needed; scaling up from 0 is immediate."""
    downscale_delay_s: float = Field(default=60.0, ge=0, le=86400)
    """Scale-down delay: time for which fewer replicas must suffice."""
    downscale_to_zero_delay_s: float = Field(default=300.0, ge=0, le=30 * 86400)
    """Idle time before scaling to zero."""
    cold_start_timeout_s: float = Field(default=120.0, gt=0, le=3600)
    """Longest time that a request waits for a replica to become ready."""
    reserve: bool = False
    """Keep the machines and processes of one replica, without weights, after scaling to zero."""

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if self.max < self.min:
            raise ValueError(f"max ({self.max}) must not be less than min ({self.min})")
        return self

    @property
    def is_fixed(self) -> bool:
        """Whether the number of replicas is fixed."""
        return self.min == self.max

    def changed_by(self, change: ReplicasSpec) -> ReplicasSpec:
        """Return a copy with the fields that are set in ``change``; other fields keep their values.

        Raises:
            UserError: the fields do not fit together.
        """
        try:
            return ReplicasSpec.model_validate(
                {**self.model_dump(), **change.model_dump(include=change.model_fields_set)}
            )
        except ValidationError as failure:
            problem = problem_text(failure.errors(include_url=False)[0])
            raise UserError(f"replicas: {problem}", hint="give min and max together") from failure

    def __str__(self) -> str:
        """Return the range in the form of the command line: ``2`` or ``0..4``."""
        return str(self.max) if self.is_fixed else f"{self.min}..{self.max}"


def read_replicas(text: str) -> dict[str, int]:
    """Parse ``2`` or ``0..4`` into the fields of a `ReplicasSpec`.

    Raises:
        ValueError: the text is neither a number nor a range, or it requests 0 replicas.
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
"""A `ReplicasSpec`, read from a number, from text such as ``0..4``, or from its fields."""
