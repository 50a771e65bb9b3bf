"""Restricted YAML for hand-written files: no aliases, tags, duplicate keys or octal numbers, and 1e-5 is a number."""

from __future__ import annotations

import json
import re
from typing import Any

import yaml
from yaml._yaml import CParser
from yaml.composer import Composer, ComposerError
from yaml.constructor import ConstructorError, SafeConstructor
from yaml.resolver import Resolver

from share_compute.errors import UserError
from share_compute.quantities import bytes_text, clipped

MOST_BYTES = 256 << 10
"""Default maximum size of YAML text in bytes."""


_PROBLEMS = {
    "did not find expected ',' or ']'": "a list that begins with [ has no ] or lacks a comma",
    "did not find expected ',' or '}'": "a mapping that begins with { has no } or lacks a comma",
    "found character that cannot start any token": "no value begins with this character; indent with spaces, not tabs",
    "mapping values are not allowed in this context": "a second colon is in the line, or its indentation is wrong",
    "could not find expected ':'": "a key has no colon",
    "did not find expected key": "a key is missing, or its indentation is wrong",
    "did not find expected '-' indicator": "an item of a list has no hyphen, or its indentation is wrong",
    "did not find expected node content": "a value is missing",
    "found unexpected end of stream": "a text has no closing quote",
    "found unexpected document indicator": "a text has no closing quote",
    "did not find expected <document start>": "more follows after the end of the document",
    "but found another document": "a second document begins with ---; keep one",
    "found unknown escape character": "a backslash is followed by a character that has no meaning; use single quotes",
    "found a tab character that violates indentation": "indent with spaces, not tabs",
}
"""Problem that libyaml reports -> the words in place of it."""


_WIDE = {
    "\N{FULLWIDTH COLON}": ":",
    "\N{FULLWIDTH COMMA}": ",",
    "\N{LEFT DOUBLE QUOTATION MARK}": '"',
    "\N{RIGHT DOUBLE QUOTATION MARK}": '"',
    "\N{LEFT SINGLE QUOTATION MARK}": "'",
    "\N{RIGHT SINGLE QUOTATION MARK}": "'",
    "\N{FULLWIDTH LEFT CURLY BRACKET}": "{",
    "\N{FULLWIDTH RIGHT CURLY BRACKET}": "}",
    "\N{FULLWIDTH LEFT SQUARE BRACKET}": "[",
    "\N{FULLWIDTH RIGHT SQUARE BRACKET}": "]",
}
"""Punctuation mark of East Asian keyboards -> the mark that YAML reads."""
_HAS_KEY = re.compile(r"\s*(- +)?[\w.-]+:(\s|$)")
"""Beginning of a line with a key, and so with a right colon."""


_LEADING_ZERO = re.compile(r"^[-+]?0[0-9_]*[0-9]$")
"""Whole number that YAML 1.1 reads as octal, or as text if it has an 8 or 9; YAML 1.2 reads it as decimal."""
_TEXT = "tag:yaml.org,2002:str"
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


class _PlainLoader(Composer, CParser, SafeConstructor, Resolver):
    """Loader that refuses aliases, tags and duplicate keys. Nested aliases can expand a few lines to gigabytes.

    libyaml parses the text, for speed. The nodes are composed in Python, where they can be checked.
    """

    def __init__(self, text: str) -> None:
        CParser.__init__(self, text)
        Composer.__init__(self)
        SafeConstructor.__init__(self)
        Resolver.__init__(self)

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            raise _refused("aliases (*name) are not read; write it out", event)
        # No file needs tags, and `!!int ""` makes PyYAML fail.
        if getattr(event, "tag", None) not in (None, "!"):
            raise _refused("tags (!name) are not read; leave it out", event)
        if isinstance(event, yaml.ScalarEvent) and event.implicit[0] and _LEADING_ZERO.match(event.value):
            number = clipped(event.value, 40)
            raise _refused(f"{number} begins with a zero; write it without, or put it in quotes", event)
        return super().compose_node(parent, index)

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> Any:
        tag = super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]
        return _TEXT if tag in _NUMBERS and ":" in value else tag  # YAML 1.1 reads 1:30 as 90

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise ConstructorError(None, None, f"{key.value!r} is given twice", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def _refused(problem: str, event: Any) -> ComposerError:
    return ComposerError(None, None, problem, event.start_mark)


class _PlainDumper(yaml.SafeDumper):
    """Dumper that quotes strings which `_PlainLoader` would refuse or read as numbers, such as ``1e-5``."""


# YAML 1.1 reads 1e-5 as text because it has no dot. JSON reads it as a number.
for _form in (_PlainLoader, _PlainDumper):
    _form.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
        list("-+0123456789"),
    )
_PlainDumper.add_implicit_resolver("tag:yaml.org,2002:int", _LEADING_ZERO, list("-+0"))


def write_yaml(data: Any) -> str:
    """Return data as YAML text that `read_yaml` can read."""
    return yaml.dump(data, Dumper=_PlainDumper, sort_keys=False, allow_unicode=True)


def read_yaml(text: str, what: str, most_bytes: int = MOST_BYTES) -> Any:
    """Return the data that a YAML text contains; a JSON text is valid YAML.

    Args:
        text: the YAML text.
        what: name of the kind of document for error messages, e.g. ``job file``.
        most_bytes: maximum length in bytes, as UTF-8.

    Raises:
        UserError: the text is too long or not valid; the error has the line and column if they are known.
    """
    size_bytes = len(text.encode(errors="replace"))
    if size_bytes > most_bytes:
        raise UserError(
            f"the {what} has {bytes_text(size_bytes)} of YAML; at most {bytes_text(most_bytes)} are read",
            hint="make it shorter, or write it as JSON, which may be longer",
        )
    try:
        return _PlainLoader(text).get_single_data()
    # PyYAML also raises ValueError, for impossible dates, and RecursionError, for deep nesting.
    except (yaml.YAMLError, ValueError, RecursionError) as failure:
        where = getattr(failure, "problem_mark", None)
        # For text that ends too early, PyYAML reports the line after the last one.
        last = len(text.splitlines())
        line = f" at line {min(where.line + 1, last)}, column {where.column + 1}" if where else ""
        problem = getattr(failure, "problem", None) or str(failure).partition("\n")[0]
        if "control characters are not allowed" in problem or isinstance(failure, yaml.reader.ReaderError):
            raise UserError(
                f"the {what} is not text{line}: it has a character that no text has",
                hint="name a text file, in YAML or JSON",
            ) from failure
        text_of = _PROBLEMS.get(problem, problem)
        if where and problem == "found character that cannot start any token":
            text_of = _begins_no_value(text, where.line, where.column) or text_of
        if (typed := wide_punctuation(text, where.line + 1 if where else None)) is not None:
            text_of = typed
        if isinstance(failure, RecursionError):
            text_of = "it is nested too deeply"
        raise UserError(
            f"the {what} is not valid YAML{line}: {text_of}", hint="check its indentation and quotes"
        ) from failure


def _begins_no_value(text: str, line: int, column: int) -> str | None:
    """Return the problem with the character at a place, from 0, with which no value can begin; None for a tab."""
    row = text.splitlines()[line]
    if row.startswith("```"):
        return "a line with ``` is no YAML; leave such lines out"
    found = row[column : column + 1]
    return None if not found or found.isspace() else f"no value begins with {found}; put the text in quotes"


def wide_punctuation(text: str, line: int | None = None) -> str | None:
    """Return the problem with the first full-width punctuation mark, such as a colon; None if there is none.

    Such marks are typed with Chinese and Japanese keyboards. In YAML they are ordinary letters of a text.

    Args:
        text: the YAML text.
        line: number of the line with an error, from 1; only this line and the one before are searched, unless they have
            a key. None for all lines.
    """
    for number, row in enumerate(text.splitlines(), start=1):
        if line is not None and (number not in (line - 1, line) or _HAS_KEY.match(row)):
            continue
        if found := re.search(f"[{''.join(_WIDE)}]", row.partition("#")[0]):
            mark = found[0]
            return f"line {number} has the full-width mark {mark}; write {_WIDE[mark]} instead"
    return None


def line_of(text: str, field: str) -> int:
    """Return the line, from 1, at which a field begins in a text that `read_yaml` can read.

    Args:
        text: the YAML text.
        field: path of the field, with dots: ``models.1.name``. A missing field has the line of its mapping.
    """
    node, line = _PlainLoader(text).get_single_node(), 1
    for part in field.split("."):
        if isinstance(node, yaml.MappingNode):
            found = next(((key, value) for key, value in node.value if key.value == part), None)
            if found is None:
                break
            line, node = found[0].start_mark.line + 1, found[1]
        elif isinstance(node, yaml.SequenceNode) and part.isdecimal() and int(part) < len(node.value):
            node = node.value[int(part)]
            line = node.start_mark.line + 1
        else:
            break
    return line


def read_json(text: str, what: str) -> Any:
    """Return the data that a JSON text contains; a duplicate key is an error.

    Args:
        text: the JSON text.
        what: name of the kind of document for error messages.

    Raises:
        UserError: the text is not valid; the error has the line and column if they are known.
    """
    try:
        return json.loads(text, object_pairs_hook=_without_doubles)
    except json.JSONDecodeError as failure:
        raise UserError(
            f"the {what} is not valid JSON at {json_problem(failure)}",
            hint="fix the JSON",
        ) from failure
    except RecursionError as failure:
        raise UserError(f"the {what} is nested too deeply", hint="flatten it") from failure
    except ValueError as failure:  # a number with thousands of digits, or a duplicate key
        raise UserError(f"the {what} is not valid JSON: {failure}", hint="fix the JSON") from failure


_JSON_PROBLEMS = {
    "Expecting value": "a value is missing",
    "Expecting property name enclosed in double quotes": "a key in double quotes is missing",
    "Illegal trailing comma before end of object": "a comma is before }",
    "Illegal trailing comma before end of array": "a comma is before ]",
    "Expecting ':' delimiter": "a colon is missing",
    "Expecting ',' delimiter": "a comma is missing",
    "Extra data": "more follows after the end",
    "Unterminated string starting at": "a text has no closing quote",
    "Invalid control character at": "a text has a line break or a control character",
    "Invalid \\escape": "a backslash is followed by a character that has no meaning",
    "Invalid \\uXXXX escape": "\\u is not followed by four hexadecimal digits",
    "Unexpected UTF-8 BOM (decode using utf-8-sig)": "it begins with a byte order mark",
}
"""Problem that Python's json reports -> the words in place of it."""


def json_problem(failure: json.JSONDecodeError) -> str:
    """Return the place and the problem of text that is not JSON, such as ``line 1, column 2: a value is missing``."""
    return f"line {failure.lineno}, column {failure.colno}: {json_words(failure.msg)}"


def json_words(message: str) -> str:
    """Return the project's message for an error of Python's json."""
    return _JSON_PROBLEMS.get(message, message)


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key!r} is given twice")
        found[key] = value
    return found
