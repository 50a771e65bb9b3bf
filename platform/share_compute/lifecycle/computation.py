"""The choice whether a job or deployment computes with compiled or with eager code."""

from __future__ import annotations

from pydantic import Field

from share_compute.files.strict import StrictModel


class Computation(StrictModel):
    """The choice between compiled and eager code, for a job or deployment whose ``compile`` is not ``off``."""

    is_compiled: bool
    gain: float | None = Field(default=None, gt=0)
    """Ratio of the eager time to the compiled time; None if it was not measured."""
    sentence: str
    """Human-readable description with the reason."""
