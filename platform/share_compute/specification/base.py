"""Base class of all parts of a specification, and checks of their values.

Parts refuse unknown fields, and infinite and NaN numbers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import InitErrorDetails

from share_compute.choices import Compiling
from share_compute.files.strict import StrictModel, custom_error, nearest


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


def known_tag(field: str, names: Sequence[str], what: str) -> WrapValidator:
    """Return a validator of a tagged union that checks the tag in ``field``; see `known`.

    Errors inside the union then have the path of the field in the document, without the tag that pydantic adds to the
    path.
    """

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        if isinstance(value, dict):
            known(value.get(field), names, what)
        try:
            return handler(value)
        except ValidationError as failure:
            errors = [_without_tag(error, names) for error in failure.errors(include_url=False)]
            raise ValidationError.from_exception_data(failure.title, errors) from None

    return WrapValidator(check)


def _without_tag(error: Any, tags: Sequence[str]) -> InitErrorDetails:
    place = error["loc"][1:] if error["loc"] and error["loc"][0] in tags else error["loc"]
    return InitErrorDetails(type=custom_error(error), loc=place, input=error["input"])


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


def _switch(value: Any) -> Any:
    """Restore the word of a YAML file if YAML 1.1 read ``on`` or ``off`` as a boolean."""
    return ("on" if value else "off") if isinstance(value, bool) else value


CompileMode: TypeAlias = Annotated[Compiling, BeforeValidator(_switch, json_schema_input_type=Compiling)]
"""A field ``compile``, also in YAML."""
HubName: TypeAlias = Annotated[
    str,
    Field(max_length=193, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)?$"),
]
"""Name of a model on the Hugging Face Hub: OWNER/NAME."""
Revision: TypeAlias = Annotated[str, Field(max_length=200, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/+-]*$")]
"""Branch, tag or commit of a repository on the Hub."""
COMMIT = re.compile(r"^[0-9a-f]{40}$")
"""Form of a commit on the Hub."""


def exactly_one(*fields: str) -> ConfigDict:
    """Return a pydantic ``ConfigDict`` for a model whose ``fields`` are mutually exclusive, with one required.

    It adds ``x-exactly-one`` to the JSON schema, for forms. The model's own validator must enforce the rule.
    """
    return ConfigDict(json_schema_extra={"x-exactly-one": list(fields)})


class SpecModel(StrictModel):
    """Base of all parts of a specification. It refuses infinite and NaN numbers."""

    model_config = ConfigDict(allow_inf_nan=False)


_LABEL = r"^[\w][\w .:/=+@-]*$"
"""Letters, digits and few other characters, so that labels have no control characters and no commas."""
MOST_TAGS = 50


def _once(tags: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(tags)) < len(tags):
        raise ValueError("a tag is given twice")
    return tags


Tag: TypeAlias = Annotated[str, Field(min_length=1, max_length=60, pattern=_LABEL)]
Tags: TypeAlias = Annotated[
    tuple[Tag, ...], Field(max_length=MOST_TAGS, fail_fast=True), AfterValidator(_once)
]
Group: TypeAlias = Annotated[str, Field(min_length=1, max_length=80, pattern=_LABEL)]
