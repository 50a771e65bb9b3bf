"""Base class of all parts of a specification, and checks of their values.

Parts refuse unknown fields, and infinite and NaN numbers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, ConfigDict

from share_compute.files.strict import StrictModel, nearest


def known(value: Any, names: Sequence[str], what: str) -> Any:
    """Return ``value``, but refuse text that is not among ``names``.

    Raises:
        ValueError: the value is unknown text; the message has the nearest known name, or all names if none is near.
    """
    if isinstance(value, str) and value not in names:
        guess = nearest(value, list(names))
        hint = f"did you mean {guess!r}?" if guess else f"known: {', '.join(names)}"
        raise ValueError(f"unknown {what} {value!r}; {hint}")
    return value


def known_tag(field: str, names: Sequence[str], what: str) -> BeforeValidator:
    """Return a validator of a tagged union's input that checks the tag in ``field``; see `known`."""

    def check(value: Any) -> Any:
        if isinstance(value, dict):
            known(value.get(field), names, what)
        return value

    return BeforeValidator(check)


def plain_json(value: Any) -> Any:
    """Return ``value``, but refuse a value that JSON cannot encode, such as a date or NaN.

    Raises:
        ValueError: the value cannot be encoded.
    """
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as failure:
        raise ValueError(f"must be plain JSON: {failure}") from failure
    return value


def _writable(path: Path) -> Path:
    try:
        str(path).encode()
    except UnicodeEncodeError as failure:
        raise ValueError("a path must be Unicode text") from failure
    return path


TextPath = Annotated[Path, AfterValidator(_writable)]
"""A path that is valid Unicode, so that JSON can store it."""


def exactly_one(*fields: str) -> ConfigDict:
    """Return a pydantic ``ConfigDict`` for a model whose ``fields`` are mutually exclusive, with one required.

    It adds ``x-exactly-one`` to the JSON schema, for forms. The model's own validator has to enforce the rule.
    """
    return ConfigDict(json_schema_extra={"x-exactly-one": list(fields)})


class SpecModel(StrictModel):
    """Base of all parts of a specification. It refuses infinite and NaN numbers."""

    model_config = ConfigDict(allow_inf_nan=False)
