"""The project's messages for problems that pydantic finds, with the nearest valid value or field."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

BELOW = "below"
"""Key in the context of an unknown key's error: path of the nearest key, relative to the mapping with the error."""
_OTHER_NAMES = {
    "fp16": "float16",
    "f16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "f32": "float32",
    "full": "float32",
    "single": "float32",
}
"""Name of a precision in other programs -> its name here."""
_PATTERNS = {
    r"^[\w][\w .-]*$": "begin with a letter, a digit or _, and have only these, spaces, dots and hyphens",
    r"^[\w][\w .:/=+@-]*$": "begin with a letter, a digit or _, and have only these, spaces and . : / = + @ -",
    r"^[A-Za-z0-9][A-Za-z0-9._-]*$": "begin with a letter or a digit (A-Z, a-z, 0-9), and have only these, . _ and -",
    r"^[A-Za-z0-9][A-Za-z0-9_.-]*$": "begin with a letter or a digit (A-Z, a-z, 0-9), and have only these, . _ and -",
    r"^[a-z][a-z0-9_]*$": "begin with a lower-case letter (a-z), and have only these, digits and _",
    r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)?$": "be the name of a model on the Hub: OWNER/NAME",
}
"""Pattern of a field -> what it means, after "must"."""
_WORDS: Sequence[tuple[str, str | Callable[[re.Match[str]], str]]] = (
    (r"Value error, (.*)", r"\1"),
    (r"Assertion failed, (.*)", r"\1"),
    (r"Field required", "is missing"),
    (r"Extra inputs are not permitted", "unknown key"),
    (r"Input should be a valid integer.*", "must be a whole number"),
    (r"Input should be a valid number.*", "must be a number"),
    (r"Input should be a valid decimal.*", "must be a number"),
    (r"Input should be a valid string, unable to parse .*", "must be text of valid Unicode characters"),
    (r"Input should be a valid string.*", "must be text"),
    (r"Input should be a valid boolean.*", "must be true or false"),
    (r"Input should be a valid (?:list|tuple|array|set|frozenset).*", "must be a list"),
    (r"Input should be a valid (?:dictionary|object).*", "must be a mapping of keys to values"),
    (
        r"Input should be a valid (?:datetime|date).*",
        "must be a date and a time, such as 2026-01-31T12:00:00Z",
    ),
    (r"Input (?:is not a valid path.*|should be a valid path.*)", "must be a path"),
    (r"Input should be a finite number", "must be a finite number"),
    (r"Input should be greater than or equal to (.*)", r"must be at least \1"),
    (r"Input should be greater than (.*)", r"must be more than \1"),
    (r"Input should be less than or equal to (.*)", r"must be at most \1"),
    (r"Input should be less than (.*)", r"must be less than \1"),
    (r"Input should be (?:None|null)", "must be left out"),
    (
        r"String should match pattern '(.*)'",
        lambda found: f"must {_PATTERNS.get(found[1]) or f'match the pattern {found[1]}'}",
    ),
    (
        r"\w+ should have at least (\d+ (?:character|item)s?)(?: after validation)?((?:, not .*)?)",
        r"must have at least \1\2",
    ),
    (
        r"\w+ should have at most (\d+ (?:character|item)s?)(?: after validation)?((?:, not .*)?)",
        r"must have at most \1\2",
    ),
    (r"Unable to extract tag using discriminator '(.*)'", r"needs the key '\1'"),
    (
        r"Input tag .* found using '(.*)' does not match any of the expected tags: (.*)",
        r"\1 must be one of \2",
    ),
    (r"Input should be (.*)", r"must be \1"),
)
"""Pattern of a message of pydantic, with the words in place of it; the first pattern that matches counts."""


_KINDS = {
    dict: "a mapping of keys to values",
    list: "a list",
    str: "text",
    bool: "true or false",
    type(None): "nothing",
}


def kind_of(value: object) -> str:
    """Return the name of the type of a value from YAML or JSON, such as ``a list``."""
    return _KINDS.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)


def problem_text(error: Mapping[str, Any]) -> str:
    """Return the project's message for one of pydantic's errors, without the field's name.

    The text suggests the nearest value for an unknown choice, and the full path of the nearest key for an unknown key.
    """
    text = str(error["msg"])
    below = (error.get("ctx") or {}).get(BELOW)
    if below:
        path = ".".join(str(part) for part in (*error["loc"][:-1], below) if part != "body")
        return f"{text}; did you mean {path!r}?"
    for pattern, words in _WORDS:
        if found := re.fullmatch(pattern, text, re.DOTALL):
            text = found.expand(words) if isinstance(words, str) else words(found)
            break
    return text + _guess(error)


def _guess(error: Mapping[str, Any]) -> str:
    """Return the suggestion for text that is not among the values of a field; empty if none is near."""
    value = error.get("input")
    if error["type"] not in {"literal_error", "enum"} or not isinstance(value, str):
        return ""
    known = re.findall(r"'([^']*)'", str(error["msg"]))
    lowered = value.lower()
    other = _OTHER_NAMES.get(lowered)
    near = [other] if other in known else difflib.get_close_matches(lowered, known, n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""
