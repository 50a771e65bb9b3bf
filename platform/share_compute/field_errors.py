"""What is wrong with the fields of a document, in few words: whoever sends a million mistakes reads about fifty."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pydantic import ValidationError

from share_compute.errors import UserError

MOST_NAMED = 50
"""Fields that an error names."""
_MOST_CHARACTERS = 300
"""Of a field's name, and of what is wrong with it."""


def invalid(failure: ValidationError, mend: str) -> UserError:
    """Return the error of a document that pydantic refuses; ``details`` has its fields."""
    fields = field_errors(failure)
    return UserError(told(fields, failure.error_count()), mend=mend, details={"fields": fields})


def field_errors(failure: ValidationError) -> list[dict[str, str]]:
    """Flatten a pydantic error to ``[{field, problem}]``, fields written with dots; the first `MOST_NAMED`."""
    errors = failure.errors(include_url=False, include_context=False, include_input=False)
    return [
        {"field": field_name(error["loc"]), "problem": cut(error["msg"].removeprefix("Value error, "))}
        for error in errors[:MOST_NAMED]
    ]


def told(fields: Sequence[dict[str, str]], total: int) -> str:
    """Return the sentence about fields, of which there are ``total``."""
    texts = [": ".join(filter(None, (item["field"], item["problem"]))) for item in fields]
    if total > len(fields):
        texts.append(f"and {total - len(fields)} more")
    return "; ".join(texts)


def field_name(path: Iterable[object]) -> str:
    """Return a field's place as it is written with dots."""
    return cut(".".join(str(part) for part in path))


def cut(text: str) -> str:
    """Return the beginning of a text that may be of any length."""
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."
