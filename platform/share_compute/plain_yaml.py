"""YAML as people write it by hand, and no more: no aliases, no key twice, and 1e-5 is a number."""

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
from share_compute.planning.words import bytes_text

MOST_BYTES = 256 << 10
"""Of YAML that people write by hand: no job file has a tenth of it."""


class _PlainLoader(Composer, CParser, SafeConstructor, Resolver):
    """YAML without aliases, by which a few lines grow to gigabytes, and without keys that are given twice.

    libyaml reads the text, ten times as fast as Python; what stands in it is put together here, where it is looked at.
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
        # Nothing needs a tag, and `!!int ""` makes the library stumble.
        if getattr(event, "tag", None) not in (None, "!"):
            raise _refused("tags (!name) are not read; leave it out", event)
        return super().compose_node(parent, index)

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
    """Puts in quotes what the reader would take for a number."""


# YAML 1.1 takes 1e-5 for text, since it has no dot; everybody else takes it for a number.
for _form in (_PlainLoader, _PlainDumper):
    _form.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
        list("-+0123456789"),
    )


def write_yaml(data: Any) -> str:
    """Return YAML text that `read_yaml` reads as the same data."""
    return yaml.dump(data, Dumper=_PlainDumper, sort_keys=False, allow_unicode=True)


def read_yaml(text: str, what: str, most_bytes: int = MOST_BYTES) -> Any:
    """Return what YAML text says; JSON is YAML.

    Args:
        text: the text.
        what: what it should be, for errors: ``job file``.
        most_bytes: how long it may be, as UTF-8.

    Raises:
        UserError: it is too long, or not valid, saying where.
    """
    size_bytes = len(text.encode(errors="replace"))
    if size_bytes > most_bytes:
        raise UserError(
            f"the {what} has {bytes_text(size_bytes)} of YAML; at most {bytes_text(most_bytes)} are read",
            mend="make it shorter, or write it as JSON, which may be longer",
        )
    try:
        return _PlainLoader(text).get_single_data()
    # Beside its own errors, YAML lets through what impossible dates and endless nesting cause.
    except (yaml.YAMLError, ValueError, RecursionError) as failure:
        where = getattr(failure, "problem_mark", None)
        # What is missing at the end is told of the line after the last one.
        last = len(text.splitlines())
        line = f" at line {min(where.line + 1, last)}, column {where.column + 1}" if where else ""
        problem = getattr(failure, "problem", None) or str(failure).partition("\n")[0]
        raise UserError(
            f"the {what} is not valid YAML{line}: {problem}", mend="check its indentation and quotes"
        ) from failure


def read_json(text: str, what: str) -> Any:
    """Return what JSON text says: many times faster than `read_yaml`.

    Args:
        text: the text.
        what: what it should be, for errors.

    Raises:
        UserError: it is not valid, saying where.
    """
    try:
        return json.loads(text, object_pairs_hook=_without_doubles)
    except json.JSONDecodeError as failure:
        raise UserError(
            f"the {what} is not valid JSON at line {failure.lineno}, column {failure.colno}: {failure.msg}",
            mend="mend the JSON",
        ) from failure
    except RecursionError as failure:
        raise UserError(f"the {what} is nested too deeply", mend="flatten it") from failure
    except ValueError as failure:  # a number of thousands of digits, or a key that is given twice
        raise UserError(f"the {what} is not valid JSON: {failure}", mend="mend the JSON") from failure


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key!r} is given twice")
        found[key] = value
    return found
