"""YAML as people write it by hand, and no more: no aliases, no key twice, and 1e-5 is a number."""

from __future__ import annotations

import json
import re
from typing import Any

import yaml
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError

from share_compute.errors import UserError


class _PlainLoader(yaml.SafeLoader):
    """YAML without aliases, by which a few lines grow to gigabytes, and without keys that are given twice."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise ComposerError(None, None, "aliases (*name) are not read; write it out", event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise ConstructorError(None, None, f"{key.value!r} is given twice", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


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


def read_yaml(text: str, what: str) -> Any:
    """Return what YAML text says; JSON is YAML.

    Args:
        text: the text.
        what: what it should be, for errors: ``job file``.

    Raises:
        UserError: it is not valid, saying where.
    """
    try:
        return yaml.load(text, _PlainLoader)  # noqa: S506 - it is a safe loader
    # Beside its own errors, YAML lets through what impossible dates and endless nesting cause.
    except (yaml.YAMLError, ValueError, RecursionError) as failure:
        where = getattr(failure, "problem_mark", None)
        line = f" at line {where.line + 1}, column {where.column + 1}" if where else ""
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
