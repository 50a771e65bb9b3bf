"""Short messages about the invalid fields of a document, and errors with several problems."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from pydantic import ValidationError

from share_compute.errors import UserError, is_lack_of_memory
from share_compute.files.plain_yaml import json_words
from share_compute.files.problem_words import problem_text

MOST_NAMED = 50
"""Maximum number of fields that an error names."""
NOT_JSON = "the body was not read: its header Content-Type is missing, or is not application/json"
"""Message for a request whose header Content-Type is missing, or is not that of JSON."""
_MOST_CHARACTERS = 300
"""Maximum length in characters of a field's name, and of the problem with it; longer text is cut."""
Error = TypeVar("Error", bound=Mapping[str, Any])
"""An error as pydantic and FastAPI report it."""


def invalid(failure: ValidationError, hint: str) -> UserError:
    """Return the error for a document that pydantic refuses; its ``details`` list the invalid fields."""
    errors = _errors(failure)
    fields = named(errors, _path)
    return UserError(fields_text(fields, len(errors)), hint=hint, details=fields_details(fields, len(errors)))


def field_errors(failure: ValidationError) -> list[dict[str, str]]:
    """Return the first `MOST_NAMED` problems of a pydantic error as ``[{field, problem}]``.

    Paths of fields are written with dots.
    """
    return named(_errors(failure), _path)


def named(errors: Sequence[Error], name: Callable[[Error], str]) -> list[dict[str, str]]:
    """Return the first `MOST_NAMED` of pydantic's errors as ``[{field, problem}]``.

    Args:
        errors: the errors.
        name: returns the name of an error's field; "" for an error of the whole document.
    """
    return [{"field": name(error), "problem": cut(problem_text(error))} for error in errors[:MOST_NAMED]]


def without_consequences(errors: Sequence[Error]) -> list[Error]:
    """Return pydantic's errors, except reports that a list with an invalid item is too short.

    pydantic drops invalid items, and may then report that the list is too short.
    """
    wrong = {tuple(error["loc"])[:depth] for error in errors for depth in range(len(error["loc"]))}
    return [error for error in errors if error["type"] != "too_short" or tuple(error["loc"]) not in wrong]


def json_problem_of(errors: Sequence[Error]) -> str | None:
    """Return where and why FastAPI could not parse the JSON of a body; None if the errors are about its fields."""
    if not errors or errors[0]["type"] != "json_invalid":
        return None
    problem = json_words(str(errors[0]["ctx"]["error"]))
    return f"the body is not valid JSON at character {int(errors[0]['loc'][-1]) + 1}: {problem}"


def _errors(failure: ValidationError) -> list[Any]:
    return without_consequences(failure.errors(include_url=False))


def _path(error: Mapping[str, Any]) -> str:
    return field_name(error["loc"])


def fields_text(fields: Sequence[dict[str, str]], total: int) -> str:
    """Return the message about invalid fields; ``fields`` lists the first of ``total`` problems."""
    texts = [": ".join(filter(None, (item["field"], item["problem"]))) for item in fields]
    if total > len(fields):
        texts.append(f"and {total - len(fields)} more")
    return "; ".join(texts)


def fields_details(fields: list[dict[str, str]], total: int) -> dict[str, Any]:
    """Return the ``details`` of an error about invalid fields: ``fields``, and ``more``, the number left out."""
    left_out = total - len(fields)
    return {"fields": fields, **({"more": left_out} if left_out else {})}


def field_name(path: Iterable[object]) -> str:
    """Return the path of a field, written with dots and cut to `_MOST_CHARACTERS` characters."""
    return cut(".".join(str(part) for part in path))


def cut(text: str) -> str:
    """Return a text, cut to `_MOST_CHARACTERS` characters if it is longer."""
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."


def refused(field: str, problem: str, hint: str) -> UserError:
    """Return the error for an invalid field of a job."""
    return _of_fields([{"field": field, "problem": problem}], hint, 0)


class Problems:
    """Collects errors and raises them as one error."""

    def __init__(self) -> None:
        self._found: list[UserError] = []

    @contextmanager
    def noted(self, field: str = "") -> Iterator[None]:
        """Collect a `UserError` from the block, and continue after the block.

        Args:
            field: field of the job, for problems without a field.
        """
        try:
            yield
        except UserError as failure:
            self.note(failure, field)

    def note(self, failure: UserError, field: str = "") -> None:
        """Collect an error; ``field`` as in `noted`."""
        start = f"{field} is wrong: "
        named = [
            {**one, "field": one["field"] or field, "problem": one["problem"].removeprefix(start)}
            for one in _fields_of(failure)
        ]
        found = _of_fields(named, failure.hint, failure.details.get("more", 0))
        details = {**failure.details, **found.details}
        noted = type(failure)(found.message, hint=failure.hint, details=details)
        noted.__cause__ = failure
        self._found.append(noted)

    def require_none(self) -> None:
        """Raise all collected errors as one `UserError`; do nothing if there are none."""
        if len(self._found) < 2:
            for failure in self._found:
                raise failure
            return
        fields = [one for failure in self._found for one in _fields_of(failure)]
        hints = dict.fromkeys(failure.hint for failure in self._found if failure.hint)
        left_out = sum(failure.details.get("more", 0) for failure in self._found)
        cause = next(filter(is_lack_of_memory, self._found), self._found[0])
        raise _of_fields(fields, "; ".join(hints), left_out) from cause


def _fields_of(failure: UserError) -> list[dict[str, Any]]:
    return failure.details.get("fields") or [{"field": "", "problem": failure.message}]


def _of_fields(fields: list[dict[str, Any]], hint: str | None, left_out: int) -> UserError:
    """Return the error about these problems, and ``left_out`` others."""
    named, total = fields[:MOST_NAMED], len(fields) + left_out
    return UserError(fields_text(named, total), hint=hint, details=fields_details(named, total))
