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
    ("training-step.md", "A microbatch: from the step message to the commit"): 14,
    ("chat-token.md", "A token: from its draw to the SSE body"): 16,
}
"""Limit on the distinct files of a section. Lower it when the code passes fewer; never raise it."""
KINDS = {
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
SOURCES = [ROOT / "platform", ROOT / "actors", ROOT / "api"]
SENDING, RECEIVING = {"send_multipart", "_write"}, {"recv_multipart", "readline"}
"""Functions by which data enters a socket, and leaves it."""
ENDS = {
    "chat-token.md": ("create_chat_completion", "_body"),
    "training-step.md": ("ApiRequests.submit", "Runner.apply"),
}
"""First and last function of each page."""
SHORTCUTS = {
    "chat-token.md": set[str](),
    "training-step.md": {
        "JobSupervisor._poll",
        "TrainingRun._steps",
        "TrainingEngine._take_event",
    },
}
"""Functions whose lines may be missing: the line before them also leads to the line after them, in another case."""
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


@cache
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


@cache
def words(tree: ast.AST) -> set[str]:
    """Return all names, attributes and strings in a part of a file, without the names of its definitions."""
    found = set[str]()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=word) | ast.Attribute(attr=word) | ast.alias(name=word) | ast.arg(arg=word):
                found.add(word)
            case ast.Constant(value=str(word)):
                found.add(word)
    return found


def compared(tree: ast.AST) -> set[str]:
    """Return the classes with which a part of a file compares a value, by `match` or `isinstance`."""
    found = set[str]()
    for node in ast.walk(tree):
        match node:
            case ast.MatchClass(cls=classes) | ast.Call(func=ast.Name("isinstance"), args=[_, classes]):
                found |= words(classes)
    return found


@cache
def defined(path: Path, name: str) -> tuple[Path, ast.stmt] | None:
    """Return the definition of a name at the top of a file, or of the file from which it is imported."""
    for node in ast.walk(parsed(path)):
        match node:
            case ast.ImportFrom(module=str(module)) if name in {alias.name for alias in node.names}:
                for root in SOURCES:
                    if (file := root / f"{module.replace('.', '/')}.py").is_file():
                        return defined(file, name)
                    if (file := root / module.replace(".", "/") / "__init__.py").is_file():
                        return defined(file, name)
    for node in parsed(path).body:
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef() if node.name == name:
                return path, node
            case ast.Assign(targets=[ast.Name(found)]) | ast.AnnAssign(target=ast.Name(found)) if (
                found == name
            ):
                return path, node
    return None


Types = frozenset[tuple[Path, str]]
"""Classes: file and name."""


@cache
def classes(path: Path, annotation: str) -> Types:
    """Return the classes that an annotation in a file names, also by an alias such as ``Shape``."""
    found = set[tuple[Path, str]]()
    for word in words(ast.parse(annotation)):
        match defined(path, word):
            case where, ast.ClassDef(name=name):
                found.add((where, name))
            case where, ast.Assign(value=value) if not isinstance(value, ast.Call):
                found |= classes(where, ast.unparse(value))
    return frozenset(found)


@cache
def attribute(owner: tuple[Path, str], name: str) -> Types:
    """Return the classes of an attribute, as far as annotations and constructors in its class and bases tell."""
    path, owner_name = owner
    definition = defined(path, owner_name)
    if definition is None or not isinstance(definition[1], ast.ClassDef):
        return frozenset()
    found = set[tuple[Path, str]]()
    for body in definition[1].body:
        match body:
            case ast.AnnAssign(target=ast.Name(one), annotation=annotation) if one == name:
                found |= classes(path, ast.unparse(annotation))
            case ast.FunctionDef(name=one, returns=ast.expr() as returned) if one == name:
                found |= classes(path, ast.unparse(returned))
        for node in ast.walk(body) if isinstance(body, Function) else ():
            for target, value in assignments(node):
                match target:
                    case ast.Attribute(ast.Name("self"), one) if one == name:
                        if isinstance(node, ast.AnnAssign):
                            found |= classes(path, ast.unparse(node.annotation))
                        elif not isinstance(value, ast.Attribute) or value.attr != name:
                            found |= kinds(Place(path, owner_name, body), value)
    for base in definition[1].bases:
        for one in classes(path, ast.unparse(base)) - {owner}:
            found |= attribute(one, name)
    return frozenset(found)


def assignments(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield target and value of each assignment in one statement."""
    match node:
        case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
            yield from zip(targets, values, strict=False)
        case ast.Assign(targets=targets, value=value):
            yield from ((target, value) for target in targets)
        case ast.AnnAssign(target=target, value=ast.expr() as value):
            yield target, value
        case ast.AnnAssign(target=target):
            yield target, target


@dataclass(frozen=True, slots=True)
class Place:
    """A function: its file, the name of its class ("" if it has none), and its definition."""

    path: Path
    owner: str
    tree: Function


@cache
def kinds(place: Place, value: ast.expr) -> Types:  # noqa: PLR0911 - a return for each kind of expression
    """Return the classes of an expression, as far as annotations and constructors tell; empty if they do not."""
    match value:
        case ast.Name("self") if place.owner:
            return frozenset({(place.path, place.owner)})
        case ast.Name(name):
            return variable(place, name)
        case ast.Attribute(of, name):
            return frozenset().union(*(attribute(one, name) for one in kinds(place, of)))
        case ast.Call(func=ast.Name(name)):
            match defined(place.path, name):
                case where, ast.ClassDef():
                    return frozenset({(where, name)})
                case where, ast.FunctionDef(returns=ast.expr() as returned):
                    return classes(where, ast.unparse(returned))
        case ast.Call(func=ast.Attribute() as called):
            return kinds(place, called)
        case ast.Subscript(value=of):
            return kinds(place, of)
        case ast.Await(value=of):
            return kinds(place, of)
    return frozenset()


@cache
def variable(place: Place, name: str) -> Types:
    """Return the classes of a parameter or variable of a function."""
    arguments = place.tree.args
    for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        if one.arg == name and one.annotation is not None:
            return classes(place.path, ast.unparse(one.annotation))
    found = set[tuple[Path, str]]()
    for node in ast.walk(place.tree):
        for target, value in assignments(node):
            if isinstance(target, ast.Name) and target.id == name and name not in words(value):
                found |= kinds(place, value)
        match node:
            case (
                ast.For(target=ast.Name(one), iter=iterated)
                | ast.AsyncFor(target=ast.Name(one), iter=iterated)
            ):
                found |= kinds(place, iterated) if one == name else frozenset()
    return frozenset(found)


@cache
def methods(path: Path, name: str) -> set[str]:
    """Return the names of a class's methods, with those of its bases but without properties."""
    match defined(path, name):
        case where, ast.ClassDef(bases=bases, body=body):
            inherited = (methods(*one) for base in bases for one in classes(where, ast.unparse(base)))
            own = {
                node.name
                for node in body
                if isinstance(node, Function) and "property" not in decorations(node)
            }
            return own.union(*inherited)
    return set()


def provides(known: tuple[Path, str], callee: Step) -> bool:
    """Return whether a class is that of a method, its base, or a protocol with all whose methods it has."""
    match owner(callee), defined(*known):
        case ast.ClassDef(name=name, bases=bases), (_, ast.ClassDef(bases=its)):
            if known == (callee.path, name) or any(
                known in classes(callee.path, ast.unparse(base)) for base in bases
            ):
                return True
            is_protocol = any("Protocol" in words(base) for base in its)
            return is_protocol and {callee.called} <= methods(*known) <= methods(callee.path, name)
    return False


@cache
def refers(caller: Step, callee: Step) -> bool:
    """Return whether a function calls another one, or passes it on to be called.

    A method counts only on an object of its class. Where neither annotations nor constructors tell the class of the
    object, the caller's file must name the method's class.
    """
    tree, callee_owner, last = function(caller), callee.name.rpartition(".")[0], callee.called
    place = Place(caller.path, caller.name.rpartition(".")[0], tree)
    for node in ast.walk(tree):
        match node:
            case ast.AsyncFor() | ast.Name("anext") if last == "anext":
                return True
            case ast.Name(name) if name == last and callee_owner in {"", last}:
                if defined(caller.path, name) == (callee.path, owner(callee)):
                    return True
            case ast.Attribute(receiver, name) if name == last and callee_owner not in {"", last}:
                if is_of(place, receiver, callee):
                    return True
            case ast.Call(func=ast.Name("getattr"), args=[receiver, ast.Attribute() | ast.Name(), *_]):
                if last[0] != "_" and any(provides(one, callee) for one in kinds(place, receiver)):
                    return True
    return False


def is_of(place: Place, receiver: ast.expr, callee: Step) -> bool:
    """Return whether an object may be of a method's class."""
    known = kinds(place, receiver)
    if known:
        return any(provides(one, callee) for one in known)
    return owner(callee).name in words(parsed(place.path))


def handles(step: Step, event: str) -> bool:
    """Return whether a method is called for events of a class: by itself, or by the `match` of its class."""
    if event in compared(function(step)):
        return True
    return any(
        event in words(node.pattern) and any(step.called in words(one) for one in node.body)
        for node in ast.walk(owner(step))
        if isinstance(node, ast.match_case)
    )


def is_given(caller: Step, callee: Step) -> bool:
    """Return whether the caller's object is constructed with the callee, or by it."""
    name = owner(caller).name
    if name in words(function(callee)) or callee.called in constructions().get(name, set()):
        return True
    # A function may choose between the class and its subclasses, and give the callee to the chosen one.
    return name in words(parsed(callee.path)) and callee.called in arguments(parsed(callee.path))


@cache
def arguments(tree: ast.AST) -> set[str]:
    """Return the words in the arguments of all calls in a part of a file."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return set().union(*(words(one) for call in calls for one in call.args))


@cache
def constructions() -> dict[str, set[str]]:
    """Return class -> words in the arguments of all its constructions."""
    found: dict[str, set[str]] = {}
    for path in sources():
        for node in ast.walk(parsed(path)):
            match node:
                case ast.Call(func=ast.Name(name), args=args, keywords=keywords) if name[0].isupper():
                    given = found.setdefault(name, set())
                    given.update(*(words(one) for one in (*args, *(one.value for one in keywords))))
    return found


@cache
def sources() -> list[Path]:
    """Return all files of the three packages."""
    return [path for root in SOURCES for path in sorted(root.rglob("*.py"))]


def decorations(tree: ast.AST) -> set[str]:
    """Return the words in the decorators of a class or function."""
    return {word for one in getattr(tree, "decorator_list", ()) for word in words(one)}


@cache
def passes(  # noqa: PLR0911 - a return for each kind of hop
    kind: str, medium: str, before: Step, after: Step
) -> bool:
    """Return whether data goes from one function to another one in this way."""
    sender, receiver = words(function(before)), words(function(after))
    is_dynamic = {"getattr", "remote"} <= sender
    match kind:
        case "effect":
            return medium in sender and medium in compared(function(after))
        case "event":
            return medium in sender and handles(after, medium)
        case "queue" | "future":
            return medium in sender & receiver
        case "row":
            return medium in sender and owner(before) is not owner(after)
        case "callback":
            return medium in sender and is_given(before, after)
        case "generator":
            is_iterated = any(isinstance(node, ast.AsyncFor) for node in ast.walk(function(after)))
            return medium in sender & words(owner(after)) and is_iterated
        case "socket":
            shared = words(owner(before)) & words(owner(after))
            return medium in shared and bool(sender & SENDING) and bool(receiver & RECEIVING)
        case "HTTP POST":
            return medium in sender and {"router", "post"} <= decorations(function(after))
        case "Ray call":
            is_sent = "remote" in sender and (medium in sender or is_dynamic)
            return is_sent and after.called == medium and "remote" in decorations(owner(after))
        case "Ray result":
            is_received = medium in words(owner(after)) and "get" in receiver
            is_received |= {"getattr", "remote"} <= receiver
            return is_received and before.called == medium and "remote" in decorations(owner(before))
    return False


def broken(before: Step, after: Step) -> str | None:
    """Return what is wrong with the hop between two consecutive items; None if nothing is."""
    if before.kind is None:
        return None if refers(before, after) else f"{before} does not call {after}"
    if before.kind == "return" and before.medium is None:
        return None if refers(after, before) else f"{before} does not return to {after}"
    if before.kind not in KINDS or before.medium is None:
        return f"{before}: a hop of this syntax is unknown"
    if passes(before.kind, before.medium, before, after):
        return None
    return f"{before} does not lead to {after} by the {before.kind} {before.medium}"


def faults(way: Sequence[Step]) -> list[str]:
    """Return what is wrong with a walkthrough.

    Calls that have not returned form a stack: a function returns to the item that called it.
    """
    found, stack = list[str](), list[Step]()
    for before, after in pairwise(way):
        if fault := broken(before, after):
            found.append(fault)
        if before.kind is None:
            stack.append(before)
        elif before.kind != "return":
            stack.clear()
        elif stack and (caller := stack.pop()).name != after.name:
            found.append(f"{before} returns to {after}, but {caller} called it")
    return found


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
    assert (way[0].name, way[-1].name) == ENDS[page.name]


@pytest.mark.parametrize(("name", "section"), MOST_FILES)
def test_number_of_files(name: str, section: str) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8")
    files = dict.fromkeys(step.path for step in steps(FOLDER / name) if step.section == section)
    listed = "\n".join(str(path.relative_to(ROOT)) for path in files)
    assert 0 < len(files) <= MOST_FILES[name, section], f"{section}: {len(files)} files\n{listed}"
    assert f"**{len(files)} files**" in text, f"the page must say {len(files)} files\n{listed}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_missing_line_is_found(page: Path) -> None:
    way = steps(page)
    found = {
        way[place].name for place in range(1, len(way) - 1) if not faults([*way[:place], *way[place + 1 :]])
    }
    assert found == SHORTCUTS[page.name]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_other_orders_are_found(page: Path) -> None:
    way = steps(page)
    for place in range(len(way) - 2):
        first, second, third = way[place : place + 3]
        if first.kind is None and second.kind is None and third.called != second.called:
            swapped = faults([*way[: place + 1], third, second, *way[place + 3 :]])
            assert swapped, f"{second} and {third} can be exchanged"
