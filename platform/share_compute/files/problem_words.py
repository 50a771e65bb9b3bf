"""The project's messages for problems that pydantic finds, with the nearest valid value or field."""

from __future__ import annotations

import difflib
import math
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from datetime import date
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
_NAME = "must begin with a letter or a digit (A-Z, a-z, 0-9), and have only these, . _ and -"
_PATTERNS = {
    r"^[\w][\w .-]*$": "must begin with a letter, a digit or _, and have only these, spaces, dots and hyphens",
    r"^[\w][\w .:/=+@-]*$": "must begin with a letter, a digit or _, and have only these, spaces and . : / = + @ -",
    r"^[A-Za-z0-9][A-Za-z0-9._-]*$": _NAME,
    r"^[A-Za-z0-9][A-Za-z0-9_.-]*$": _NAME,
    r"^[a-z][a-z0-9_]*$": "must begin with a lower-case letter (a-z), and have only these, digits and _",
    r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)?$": "must name a model on the Hub: OWNER/NAME",
}
"""Pattern of a field -> what it means."""
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
        lambda found: _PATTERNS.get(found[1]) or f"must match the pattern {found[1]}",
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


_WITH_VALUE: Mapping[str, Callable[[str], str]] = {
    "must be a whole number": lambda value: f"must be a whole number, not {value}",
    "must be a number": lambda value: f"must be a number, not {value}",
    "must be text": lambda value: f"must be text, not {value}",
    "must be true or false": lambda value: f"must be true or false, not {value}",
    "must be a list": lambda value: f"must be a list, not {value}",
    "must be a mapping of keys to values": lambda value: f"must be a mapping of keys to values, not {value}",
}
"""Problem with the type of a field -> the problem with the value that the field has."""
_MOST_SHOWN = 40
"""Maximum length of a value in a message, in characters."""
_UNITS = {
    **dict.fromkeys(("s", "sec", "second", "seconds"), 1),
    **dict.fromkeys(("m", "min", "minute", "minutes"), 60),
    **dict.fromkeys(("h", "hour", "hours"), 3600),
    **dict.fromkeys(("d", "day", "days"), 86400),
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", start=1)},
    "%": 0.01,
}
"""Unit in small letters -> its value in seconds, bytes or one."""


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
    return _with_value(text, error) + _guess(error)


def _with_value(text: str, error: Mapping[str, Any]) -> str:
    """Return a problem with the type of a field, with the field's unit, its value, and the number that is meant."""
    name, value = str(error["loc"][-1]) if error["loc"] else "", error.get("input", error)
    if text not in _WITH_VALUE or value is error:
        return text
    told = _WITH_VALUE[text](_shown(value))
    if text == "must be a whole number" and name.endswith("_bytes"):
        told = f"must be a whole number of bytes, not {_shown(value)}"
    elif text == "must be a number" and name.endswith("_s") and not name.endswith("_per_s"):
        told = f"must be a number of seconds, not {_shown(value)}"
    if text == "must be text" and not isinstance(value, dict | list | None):
        return told + "; put it in quotes"
    number = None
    if "number" in text and isinstance(value, str):
        number = _number_of(value, name, is_whole="whole" in text)
    return told if number is None else told + f"; write {number}"


def _shown(value: object) -> str:
    if isinstance(value, str):
        return repr(value if len(value) <= _MOST_SHOWN else f"{value[:_MOST_SHOWN]}...")
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)[:_MOST_SHOWN] if isinstance(value, int | float | date) else kind_of(value)


def _number_of(text: str, name: str, *, is_whole: bool) -> str | None:
    """Return the number that a text such as ``0,5``, ``5 minutes`` or ``8MB`` means; None if that is not clear."""
    plain = unicodedata.normalize("NFKC", text).strip().lower()
    found = re.fullmatch(r"([-+]?\d+(?:[.,]\d+)?(?:e[-+]?\d+)?)\s*([a-z%]*)", plain)
    if found is None or not (found[2] in _UNITS or not found[2]):
        return None
    if re.fullmatch(r"[-+]?[1-9]\d{0,2},\d{3}", found[1]):
        return None  # thousands, or three places after the point
    is_time, is_size = found[2][:1].isalpha() and found[2][-1] != "b", found[2][-1:] == "b"
    if (is_time and not name.endswith("_s")) or (is_size and not name.endswith("_bytes")):
        return None
    number = float(found[1].replace(",", ".")) * _UNITS.get(found[2], 1)
    if not math.isfinite(number) or (is_whole and not number.is_integer()):
        return None
    return str(int(number)) if is_whole else f"{number:.12g}"


def _guess(error: Mapping[str, Any]) -> str:
    """Return the suggestion for text that is not among the values of a field; empty if none is near."""
    value = error.get("input")
    if error["type"] not in {"literal_error", "enum"} or not isinstance(value, str):
        return ""
    known = re.findall(r"'([^']*)'", str(error["msg"]))
    if len(known) < 2:  # the message says it already
        return ""
    lowered = value.lower()
    other = _OTHER_NAMES.get(lowered)
    near = [other] if other in known else difflib.get_close_matches(lowered, known, n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""
