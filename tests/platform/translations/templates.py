"""Extracts the templates of all texts for people from the Python sources."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGES = ("platform/share_compute", "actors/share_compute_actors", "api/share_compute_api")
LEFT_OUT = (
    "platform/share_compute/store/migrations",
    "platform/share_compute/protocol/points.py",
    "actors/share_compute_actors/testing",
    "actors/share_compute_actors/machine/ray_start.py",
    "api/share_compute_api/app/dashboard.py",
    "api/share_compute_api/app/openapi.py",
    "api/share_compute_api/control/jobs/training_metrics.py",
    "api/share_compute_api/demonstration/job.py",
    "api/share_compute_api/hub/model_card.py",
    "api/share_compute_api/openai/metrics.py",
    "api/share_compute_api/openai/tools/grammar.py",
    "api/share_compute_api/terminal/children.py",
)
"""Files whose texts are for programs, or for readers of REST's documentation or of a model's card."""

_INTERNAL = frozenset(
    {
        "AssertionError",
        "AttributeError",
        "IndexError",
        "KeyError",
        "NotImplementedError",
        "OSError",
        "RuntimeError",
    }
    | {"TypeError", "FileNotFoundError", "ImportError", "ModuleNotFoundError"}
)
"""Exceptions that show a defect of the program or of the machine; their texts are not translated."""
_DECLARED = frozenset(
    {
        "Option",
        "Argument",
        "Query",
        "Header",
        "Typer",
        "add_typer",
        "add",
        "counter",
        "histogram",
        "gauge",
        "compile",
    }
    | {"Counter", "Histogram", "Gauge", "getLogger", "Path", "Depends", "APIRouter", "FastAPI", "ConfigDict"}
    | {"SettingsConfigDict", "execute", "executescript", "text", "sub", "match", "fullmatch", "search"}
)
"""Functions whose texts are help, descriptions for programs, patterns or SQL."""
_LOGGED = frozenset({"debug", "info", "warning", "error", "exception", "critical", "log"})
_UNSHOWN = frozenset(
    {"help", "description", "title", "rich_help_panel", "epilog", "metavar", "id", "pattern", "responses"}
    | {
        "json_schema_extra",
        "examples",
        "summary",
        "headers",
        "media_type",
        "env",
        "server_default",
        "response_description",
    }
)
"""Keyword arguments whose texts are for help, programs or schemas."""
_SQL = re.compile(
    r"\s*(SELECT|UPDATE|INSERT|DELETE|BEGIN|PRAGMA|CREATE|ALTER|DROP|COMMIT|VACUUM|LOCK|WITH|ATTACH|SET) "
)
_CODE = re.compile(
    r"\(\.\*|\.\*$|\\w|torch\.cuda\.|^import \S+|^from [\w.]+ import |^\{?\"|^\[Unit\]|^-c |^git clone|^abcdefg"
    r"|^Input |^Bearer |^#include |^[a-z]+\(Tensor "
    r"|^(\{\}=\{\} )?share-compute [a-z]+( [a-z]+)?( -f)?( \{\})*\n?$|^(prctl|landlock_add_rule) "
)
"""Patterns, programs and commands."""
_MARKUP = re.compile(r"\[/?[a-z ]*\]")
_SLOT = re.compile(r"\{[a-z_]+\}|\\\d")
"""Slots of `str.format` and of `re.sub` in a plain text."""
_WORDS = re.compile(r"[A-Za-z]{2,}[^A-Za-z]* |[ ][(\"'`]?[A-Za-z]{2,}")
_SHORT = 12
"""Longest alternative, such as the ending of a plural, that makes a template of its own."""
_MOST_ALTERNATIVES = 8


@dataclass(frozen=True, slots=True)
class Found:
    """A template in the sources, with the place of its first line."""

    template: str
    path: str
    line: int


@cache
def found_templates() -> tuple[Found, ...]:
    """Return all templates of texts for people, in the order of the sources."""
    return tuple(
        replace(found, path=name)
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if not (name := str(path.relative_to(ROOT))).startswith(LEFT_OUT)
        for found in templates_of(path.read_text(encoding="utf-8"))
    )


def templates_of(source: str) -> Iterator[Found]:
    """Yield the templates of a module's source text; their paths are empty."""
    tree = ast.parse(source)
    yield from _of_node(tree, _docstrings(tree))


def _docstrings(tree: ast.Module) -> frozenset[int]:
    """Return the ids of all nodes that are docstrings of modules, classes, functions or fields."""
    return frozenset(
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    )


def _of_node(node: ast.AST, skipped: frozenset[int]) -> Iterator[Found]:
    if id(node) in skipped or _is_unshown(node):
        return
    if isinstance(node, ast.Constant | ast.JoinedStr):
        for template in _alternatives(node):
            if is_shown(template):
                yield Found(template, "", node.lineno)
        if isinstance(node, ast.JoinedStr):
            for part in node.values:
                if isinstance(part, ast.FormattedValue) and _short_choice(part.value) is None:
                    yield from _of_node(part.value, skipped)
        return
    for child in ast.iter_child_nodes(node):
        yield from _of_node(child, skipped)


def _is_unshown(node: ast.AST) -> bool:
    if isinstance(node, ast.keyword):
        return node.arg in _UNSHOWN
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        return _name(node.exc.func) in _INTERNAL
    if isinstance(node, ast.Assert):
        return True
    if not isinstance(node, ast.Call):
        return False
    name = _name(node.func)
    return name in _DECLARED or (
        name in _LOGGED and "log" in _name(getattr(node.func, "value", node.func)).lower()
    )


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _alternatives(node: ast.Constant | ast.JoinedStr) -> list[str]:
    """Return the templates of a text: several if it chooses between short words, such as ``layer`` and ``layers``."""
    if isinstance(node, ast.Constant):
        return [_SLOT.sub("{}", node.value)] if isinstance(node.value, str) else []
    parts: list[list[str]] = []
    for part in node.values:
        if isinstance(part, ast.Constant):
            parts.append([str(part.value)])
        else:
            assert isinstance(part, ast.FormattedValue)
            parts.append(_short_choice(part.value) or ["{}"])
    every = ["".join(chosen) for chosen in product(*parts)]
    return every[:_MOST_ALTERNATIVES]


def _short_choice(node: ast.expr) -> list[str] | None:
    """Return both texts of ``"a" if ... else "b"`` if they are short; None for another expression."""
    if not isinstance(node, ast.IfExp):
        return None
    ends = [end.value for end in (node.body, node.orelse) if isinstance(end, ast.Constant)]
    if len(ends) < 2 or not all(isinstance(end, str) and len(end) <= _SHORT for end in ends):
        return None
    return [str(end) for end in ends]


def is_shown(template: str) -> bool:
    """Return whether a text is long enough to be a sentence or a part of one, and no SQL."""
    literal = _MARKUP.sub("", template).replace("{}", "0")
    return (
        _WORDS.search(literal) is not None
        and sum(map(str.isalpha, literal)) >= 3
        and not _SQL.match(template)
        and not _CODE.search(template)
    )
