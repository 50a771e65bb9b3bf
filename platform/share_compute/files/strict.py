"""Base class of pydantic models of external data: frozen, and unknown keys are errors that suggest a known key."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, LiteralString, Self

from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from share_compute.files.described import DescribedModel

MOST_UNKNOWN = 49
"""Maximum number of unknown keys that an error names, if a document has very many unknown keys."""
_UNKNOWN: LiteralString = "unknown_key"
_SHOWN_CHARACTERS = 100


def nearest(name: str, known: Sequence[str]) -> str | None:
    """Return the known name most similar to ``name``, or None if none is close."""
    matches = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return matches[0] if matches else None


class StrictModel(DescribedModel):
    """Frozen pydantic model whose unknown keys are errors that suggest the nearest known key or list all."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="wrap")
    @classmethod
    def _suggest_known_keys(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if isinstance(data, dict) and len(data) > len(cls.model_fields) + MOST_UNKNOWN:
            cls._refuse_many(data)
        try:
            return handler(data)
        except ValidationError as failure:
            errors = failure.errors(include_url=False)
            if not any(map(_is_unknown_key, errors)):
                raise
            known = _names(cls)
            explained = [
                InitErrorDetails(type=_explain(error, known), loc=error["loc"], input=error["input"])
                for error in errors
            ]
            raise ValidationError.from_exception_data(failure.title, explained) from None

    @classmethod
    def _refuse_many(cls, data: dict[Any, Any]) -> None:
        """Raise a ValidationError that names the first `MOST_UNKNOWN` unknown keys and counts the remaining ones.

        This avoids one error for each of very many keys. The known keys are listed once.
        """
        known = _names(cls)
        unknown = [str(key) for key in data if key not in known]
        named = [
            InitErrorDetails(type=_unknown_key(key, known, lists_known=False), loc=(key,), input=None)
            for key in unknown[:MOST_UNKNOWN]
        ]
        rest = f"and {len(unknown) - len(named)} more unknown keys; known keys: {', '.join(known)}"
        more = PydanticCustomError(_UNKNOWN, rest)
        raise ValidationError.from_exception_data(
            cls.__name__, [*named, InitErrorDetails(type=more, loc=(), input=None)]
        )


def _names(model: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items()]


def _is_unknown_key(error: Any) -> bool:
    # Errors with a longer location belong to nested models, which have already explained them.
    return error["type"] == "extra_forbidden" and len(error["loc"]) == 1


def _explain(error: Any, known: Sequence[str]) -> PydanticCustomError:
    if not _is_unknown_key(error):
        return PydanticCustomError(error["type"], error["msg"])
    return _unknown_key(str(error["loc"][-1]), known)


def _unknown_key(key: str, known: Sequence[str], *, lists_known: bool = True) -> PydanticCustomError:
    """Return the error for an unknown key: it names the nearest known key or, if none is close, may list all."""
    guess = nearest(key, known)
    every = f"; known keys: {', '.join(known)}" if lists_known else ""
    hint = f"; did you mean {guess!r}?" if guess else every
    shown = key if len(key) <= _SHOWN_CHARACTERS else f"{key[:_SHOWN_CHARACTERS]}..."
    return PydanticCustomError(_UNKNOWN, f"unknown key {shown!r}{hint}")
