"""Collects text that every Python installation has: the language reference and the standard library's docstrings."""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

ENOUGH_BYTES = 1_500_000


def gather_corpus(file: Path, enough_bytes: int = ENOUGH_BYTES) -> int:
    """Write text to ``file`` until it has ``enough_bytes`` bytes or no text is left; return its size in bytes.

    The text is the same for each installation of the same version of Python.
    """
    size = 0
    with file.open("w", encoding="utf-8") as output:
        for text in _texts():
            paragraphs = (" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
            block = "\n".join(filter(None, paragraphs)) + "\n"
            output.write(block)
            size += len(block.encode())
            if size >= enough_bytes:
                break
    return size


def _texts() -> Iterator[str]:
    yield from (topics[name].strip() for name in sorted(topics))
    library = Path(sysconfig.get_path("stdlib"))
    for source in sorted(library.glob("*.py")):
        tree = ast.parse(source.read_bytes())
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text:
                    yield text
