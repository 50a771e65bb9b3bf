"""What all parts of a job share: closed models of finite numbers, and names that are suggested where one is wrong."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict

from share_compute.strict import StrictModel, nearest


def known(value: Any, names: Sequence[str], what: str) -> Any:
    """Return a value unless it is text that is none of some names.

    Raises:
        ValueError: with the nearest name, or all of them.
    """
    if isinstance(value, str) and value not in names:
        guess = nearest(value, list(names))
        hint = f"did you mean {guess!r}?" if guess else f"known: {', '.join(names)}"
        raise ValueError(f"unknown {what} {value!r}; {hint}")
    return value


def plain_json(value: Any) -> Any:
    """Return a value that survives as JSON, which not all that YAML or Python can say does.

    Raises:
        ValueError: it does not.
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
"""A path that JSON and databases can hold, which not every name on a disk can."""


def exactly_one(*fields: str) -> ConfigDict:
    """Return what tells forms, in a model's JSON schema, that exactly one of these fields is to be given."""
    return ConfigDict(json_schema_extra={"x-exactly-one": list(fields)})


class SpecModel(StrictModel):
    """Base of all parts of a job: every number in it is finite."""

    model_config = ConfigDict(allow_inf_nan=False)
