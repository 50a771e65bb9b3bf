"""The base of every model at an edge: frozen, and it refuses unknown keys with the nearest known name."""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


def nearest(name: str, known: list[str]) -> str | None:
    """Return the known name most like ``name``, or None when nothing is close."""
    matches = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return matches[0] if matches else None


class StrictModel(BaseModel):
    """Frozen pydantic model whose unknown keys are errors that suggest the nearest known one."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _suggest_known_keys(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        known = [field.alias or name for name, field in cls.model_fields.items()]
        for key in data:
            if key not in known:
                guess = nearest(str(key), known)
                hint = f"did you mean {guess!r}?" if guess else f"known keys: {', '.join(known)}"
                raise ValueError(f"unknown key {key!r}; {hint}")
        return data
