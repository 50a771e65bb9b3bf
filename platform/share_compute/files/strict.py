"""Base class of pydantic models of external data: frozen, and unknown keys are errors that suggest a known key."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from types import UnionType
from typing import Annotated, Any, LiteralString, Self, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from share_compute.files.described import DescribedModel
from share_compute.files.problem_words import BELOW

MOST_UNKNOWN = 49
"""Maximum number of unknown keys that an error names, if a document has very many unknown keys."""
_UNKNOWN: LiteralString = "unknown_key"
_SHOWN_CHARACTERS = 100
_VERY_CLOSE = 0.8
"""Similarity from which a key of the same mapping is suggested rather than a key of this name in another place."""


def nearest(name: str, known: Sequence[str]) -> str | None:
    """Return the known name most similar to ``name``, or None if none is close."""
    return _nearest(name, known, 0.6)


def suggestion(name: str, known: Sequence[str], cutoff: float = 0.6) -> str:
    """Return ``; did you mean 'x'?`` with the known name most similar to ``name``; empty if none is close."""
    found = _nearest(name, known, cutoff)
    return f"; did you mean {found!r}?" if found is not None else ""


def _nearest(name: str, known: Sequence[str], cutoff: float) -> str | None:
    same = [one for one in known if one.lower() == name.lower()]  # difflib counts capitals as other letters
    matches = same or difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
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
            explained = [
                InitErrorDetails(type=_explain(error, cls), loc=error["loc"], input=error["input"])
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


def custom_error(error: Any) -> PydanticCustomError:
    """Return an error of pydantic with the same type, message and path of the nearest key."""
    below = (error.get("ctx") or {}).get(BELOW)
    return PydanticCustomError(error["type"], error["msg"], {BELOW: below} if below else None)


def _explain(error: Any, model: type[BaseModel]) -> PydanticCustomError:
    if not _is_unknown_key(error):
        return custom_error(error)
    key, known = str(error["loc"][-1]), _names(model)
    below = None if difflib.get_close_matches(key, known, cutoff=_VERY_CLOSE) else place_below(key, model)
    return _unknown_key(key, known) if below is None else _misplaced_key(key, below)


def place_below(key: str, model: type[BaseModel]) -> str | None:
    """Return the path, with dots, of the key of this name in the parts of a model; None if there are none or several.

    If several keys have this name, return the one with the shortest path, unless others have the same length. Lists of
    parts are not searched.
    """
    level, seen = [("", model)], {model}
    while level:
        parts = [
            (f"{path}{field.alias or name}.", part)
            for path, one in level
            for name, field in one.model_fields.items()
            for part in _models(field.annotation)
            if part not in seen
        ]
        found = sorted({path + key for path, part in parts if key in _names(part)})
        if found:
            return found[0] if len(found) == 1 else None
        seen |= {part for _, part in parts}
        level = parts
    return None


def _models(annotation: Any) -> list[type[BaseModel]]:
    """Return the models in the type of a field, including types in a union or in ``Annotated``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) is Annotated:
        return _models(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [model for part in get_args(annotation) for model in _models(part)]
    return []


def _misplaced_key(key: str, below: str) -> PydanticCustomError:
    return PydanticCustomError(_UNKNOWN, f"unknown key {_shown(key)!r}", {BELOW: below})


def _unknown_key(key: str, known: Sequence[str], *, lists_known: bool = True) -> PydanticCustomError:
    """Return the error for an unknown key: it names the nearest known key or, if none is close, may list all."""
    guess = nearest(key, known)
    every = f"; known keys: {', '.join(known)}" if lists_known else ""
    hint = f"; did you mean {guess!r}?" if guess else every
    return PydanticCustomError(_UNKNOWN, f"unknown key {_shown(key)!r}{hint}")


def _shown(key: str) -> str:
    return key if len(key) <= _SHOWN_CHARACTERS else f"{key[:_SHOWN_CHARACTERS]}..."
