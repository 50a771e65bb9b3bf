"""The walkthroughs name functions that exist, in the order in which they call each other or pass data on."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from tests.docs.pages import ROOT

FOLDER = ROOT / "docs" / "walkthroughs"
PAGES = sorted(FOLDER.glob("*.md"))
MOST_FILES = {
    ("training-step.md", "A microbatch: from the step message to the commit"): 17,
    ("chat-token.md", "A token: from its draw to the SSE body"): 16,
}
"""Limit on the distinct files of a section. Lower it when the code passes fewer; never raise it."""
KINDS = {
    "HTTP GET",
    "HTTP POST",
    "Ray call",
    "Ray result",
    "callback",
    "effect",
    "event",
    "future",
    "generator",
    "queue",
    "return",
    "row",
    "socket",
}
"""Kinds of hops that a page may mark; `return` has no name."""
ITEM = re.compile(
    r"(?P<number>\d+)\. \[`(?P<name>[\w.]+)`\]\((?P<path>[^)]+)\) (?P<sentence>[^→]+?\.)"
    r"(?: → (?P<kind>[A-Za-z ]+?)(?: `(?P<medium>[^`]+)`)?)?"
)

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Step:
    """One item of a page: a function, and how its data reaches the function of the next item."""

    section: str
    number: int
    path: Path
    name: str
    """`Class.method`, or the name of a function of a module."""
    kind: str | None
    """Kind of the hop to the next item; None for a call."""
    medium: str | None

    def __str__(self) -> str:
        return f"{self.number}. {self.name} ({self.path.relative_to(ROOT)})"

    @property
    def called(self) -> str:
        """The name by which callers refer to the function: the class for a constructor, `anext` for `__anext__`."""
        owner, _, last = self.name.rpartition(".")
        if last == "__init__":
            return owner
        return last.removeprefix("__").removesuffix("__") if last.startswith("__") else last


def items(text: str) -> Iterator[tuple[str, str]]:
    """Yield the items of the numbered lists of a page, each in one line, with the title of its section."""
    section, item = "", ""
    for line in [*text.splitlines(), ""]:
        if item and not line.startswith("   "):
            yield section, item
            item = ""
        if line.startswith("## "):
            section = line.removeprefix("## ")
        elif re.match(r"\d+\. ", line):
            item = line
        elif item:
            item += f" {line.strip()}"


def steps(page: Path) -> list[Step]:
    """Return the items of a page in their order."""
    found = list[Step]()
    for section, item in items(page.read_text(encoding="utf-8")):
        match = ITEM.fullmatch(item)
        assert match is not None, f"{page.name}: this item has another syntax: {item}"
        path = (page.parent / match["path"]).resolve()
        found.append(Step(section, int(match["number"]), path, match["name"], match["kind"], match["medium"]))
    return found


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def owner(step: Step) -> ast.ClassDef | Function:
    """Return the class of a method, or the function itself."""
    first = step.name.partition(".")[0]
    for node in parsed(step.path).body:
        if isinstance(node, ast.ClassDef | Function) and node.name == first:
            return node
    raise AssertionError(f"{step}: the file has no {first}")


def function(step: Step) -> Function:
    """Return the definition of an item's function."""
    found = owner(step)
    if isinstance(found, ast.ClassDef):
        last = step.name.rpartition(".")[2]
        for node in found.body:
            if isinstance(node, Function) and node.name == last:
                return node
        raise AssertionError(f"{step}: the class has no method {last}")
    assert "." not in step.name, f"{step}: this is no class"
    return found


def words(tree: ast.AST) -> set[str]:
    """Return all names, attributes, definitions and strings in a part of a file."""
    found = set[str]()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=word) | ast.Attribute(attr=word) | ast.alias(name=word) | ast.arg(arg=word):
                found.add(word)
            case ast.ClassDef(name=word) | ast.FunctionDef(name=word) | ast.AsyncFunctionDef(name=word):
                found.add(word)
            case ast.Constant(value=str(word)):
                found.add(word)
    return found


def broken(before: Step, after: Step) -> str | None:
    """Return what is wrong with the hop between two consecutive items; None if nothing is."""
    if before.kind is None:
        is_called = after.called in words(function(before))
        return None if is_called else f"{before} does not call {after}"
    if before.kind not in KINDS or (before.medium is None) != (before.kind == "return"):
        return f"{before}: a hop of this syntax is unknown"
    if before.medium is None:
        is_caller = before.called in words(function(after))
        return None if is_caller else f"{before} does not return to {after}"
    places: tuple[ast.AST, ast.AST] = (parsed(before.path), parsed(after.path))
    if before.path == after.path:  # closer, because one file always shares its names with itself
        is_queue = before.kind == "queue"
        places = (function(before), function(after)) if is_queue else (owner(before), owner(after))
    missing = [
        str(step)
        for step, place in zip((before, after), places, strict=True)
        if before.medium not in words(place)
    ]
    return f"{before.kind} {before.medium} is not in {' and not in '.join(missing)}" if missing else None


def faults(way: Sequence[Step]) -> list[str]:
    return [fault for before, after in pairwise(way) if (fault := broken(before, after)) is not None]


def test_there_are_two_walkthroughs() -> None:
    assert [page.name for page in PAGES] == ["chat-token.md", "training-step.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_file_and_function_exists(page: Path) -> None:
    way = steps(page)
    assert [step.number for step in way] == list(range(1, len(way) + 1))
    for step in way:
        assert step.path.is_relative_to(ROOT)
        assert step.path.is_file(), f"{step}: there is no such file"
        function(step)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_function_leads_to_the_next(page: Path) -> None:
    way = steps(page)
    assert faults(way) == []
    assert way[-1].kind is None, "nothing follows the last item"


@pytest.mark.parametrize(("name", "section"), MOST_FILES)
def test_number_of_files(name: str, section: str) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8")
    files = dict.fromkeys(step.path for step in steps(FOLDER / name) if step.section == section)
    listed = "\n".join(str(path.relative_to(ROOT)) for path in files)
    assert 0 < len(files) <= MOST_FILES[name, section], f"{section}: {len(files)} files\n{listed}"
    assert f"**{len(files)} files**" in text, f"the page must say {len(files)} files\n{listed}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_other_orders_are_found(page: Path) -> None:
    way = steps(page)
    for place in range(len(way) - 2):
        first, second, third = way[place : place + 3]
        if first.kind is None and second.kind is None and third.called != second.called:
            swapped = faults([*way[: place + 1], third, second, *way[place + 3 :]])
            assert swapped, f"{second} and {third} can be exchanged"
