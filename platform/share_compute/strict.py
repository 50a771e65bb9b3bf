"""The base of every model at an edge: frozen, and it refuses unknown keys with the nearest known name."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError


def nearest(name: str, known: Sequence[str]) -> str | None:
    """Return the known name most like ``name``, or None when nothing is close."""
    matches = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return matches[0] if matches else None


class StrictModel(BaseModel):
    """Frozen pydantic model whose unknown keys are errors that suggest the nearest known one."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @model_validator(mode="wrap")
    @classmethod
    def _suggest_known_keys(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(data)
        except ValidationError as failure:
            errors = failure.errors(include_url=False)
            if not any(map(_is_unknown_key, errors)):
                raise
            known = [field.alias or name for name, field in cls.model_fields.items()]
            explained = [
                InitErrorDetails(type=_explain(error, known), loc=error["loc"], input=error["input"])
                for error in errors
            ]
            raise ValidationError.from_exception_data(failure.title, explained) from None


def _is_unknown_key(error: Any) -> bool:
    # Deeper models have explained their own keys already.
    return error["type"] == "extra_forbidden" and len(error["loc"]) == 1


def _explain(error: Any, known: Sequence[str]) -> PydanticCustomError:
    if not _is_unknown_key(error):
        return PydanticCustomError(error["type"], error["msg"])
    key = str(error["loc"][-1])
    guess = nearest(key, known)
    hint = f"did you mean {guess!r}?" if guess else f"known keys: {', '.join(known)}"
    return PydanticCustomError("unknown_key", f"unknown key {key!r}; {hint}")
