"""Commands, code blocks and REST routes of README.md, CONTRIBUTING.md and docs/, as their readers see them."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NEEDS_THE_HUB = "needs the Hugging Face Hub; tests/api/cli/test_push.py has a stand-in of it"
ASK = {("delete",), ("restore",), ("remove",), ("artifacts", "delete")}
"""First words of commands that ask for confirmation before a deletion; tests run them with `--yes`."""
SHELLS = {"sh", "bash", "console", ""}
PROMPT = re.compile(r"^(server|second)?\$ +")
ASSIGNMENT = re.compile(r"^[A-Z][A-Z_0-9]*=")
_PATH = r"(?:\{[^}]*\}|[^\s`\"?{])*"
ROUTE = re.compile(
    rf"(?P<methods>(?:(?:GET|POST|PUT|PATCH|DELETE)`?,? `?)+)(?P<path>/[a-z]{_PATH})"
    rf"|(?P<bare>/(?:api/)?v1/{_PATH})"
)


@dataclass(frozen=True)
class Block:
    """One fenced block; ``line`` is that of its first line of text."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Command:
    """One command of a shell block, or of a code span in a sentence."""

    page: str
    line: int
    variables: tuple[tuple[str, str], ...]
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {' '.join(self.words)}"


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks() -> Iterator[Block]:
    """Yield all fenced blocks of all pages."""
    for page in PAGES:
        language, begin, lines = None, 0, list[str]()
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            fence = re.match(r"^ *```(\w*)", line)
            if fence and language is None:
                language, begin, lines = fence[1], number + 1, []
            elif fence and language is not None:
                yield Block(name(page), begin, language, "\n".join(lines) + "\n")
                language = None
            else:
                lines.append(line)
        assert language is None, f"{name(page)}: the fence at line {begin - 1} is not closed"


def in_shell(block: Block) -> bool:
    """Return whether a block shows commands; blocks without a language may also show output or a drawing."""
    first = block.text.split(maxsplit=1)[0]
    return block.language in SHELLS and (block.language != "" or first == "share-compute")


def split(page: str, line: int, text: str) -> Iterator[Command]:
    """Yield the commands of one line of a shell, without comments and prompts."""
    lexer = shlex.shlex(PROMPT.sub("", text), posix=True, punctuation_chars=";&|")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if set(word) <= set(";&|"):
            variables = tuple(one.partition("=")[::2] for one in takewhile(ASSIGNMENT.match, words))
            if words:
                yield Command(page, line, variables, tuple(words[len(variables) :]))
            words = []
        else:
            words.append(word)


def commands(block: Block) -> list[Command]:
    """Return the commands of a shell block in their order."""
    found, held = list[Command](), ""
    for number, line in enumerate(block.text.splitlines(), block.line):
        held += line
        if line.endswith("\\"):
            held = held[:-1]
            continue
        found += split(block.page, number, held)
        held = ""
    return found


def copy_examples(folder: Path) -> None:
    """Copy the examples as they are in a fresh clone, without the files that prepare.py writes."""
    written = shutil.ignore_patterns("*.txt", "*.jsonl", "*-model", "encoder")
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=written)


def readme_commands() -> list[Command]:
    """Return the commands of share-compute and Python in the shell blocks of README.md, in their order."""
    return [
        command
        for block in blocks()
        if block.page == "README.md" and in_shell(block)
        for command in commands(block)
        if command.words and command.words[0] in ("share-compute", "python")
    ]


def spans() -> Iterator[tuple[str, int, str]]:
    """Yield the code spans of all sentences: page, line, text."""
    for page in PAGES:
        fenced = False
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            if re.match(r"^ *```", line):
                fenced = not fenced
            elif not fenced:
                for span in re.findall(r"`([^`]+)`", line):
                    yield name(page), number, span


def routes() -> Iterator[tuple[str, int, str, str]]:
    """Yield the REST routes that pages name: page, line, method ("" if none is named), whole path."""
    for page in PAGES:
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            for found in ROUTE.finditer(line):
                path = (found["path"] or found["bare"]).rstrip(".,;:)*/")
                whole = path if path.startswith(("/api/v1", "/v1", "/metrics")) else f"/api/v1{path}"
                for method in re.findall("[A-Z]+", found["methods"] or "") or [""]:
                    yield name(page), number, method, whole
