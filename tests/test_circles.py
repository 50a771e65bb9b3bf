"""No module, and no folder of modules, imports itself through others.

Imports inside functions and those for type checking count as well: a reader follows them like any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import grimp
import networkx as nx
import pytest

PACKAGES = ("share_compute", "share_compute_actors", "share_compute_api")
Import = tuple[str, str]


@pytest.fixture(scope="module")
def imports() -> list[Import]:
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    return [
        (module, imported)
        for module in sorted(graph.modules)
        for imported in sorted(graph.find_modules_directly_imported_by(module))
    ]


def circles(imports: Iterable[Import]) -> list[list[str]]:
    found = nx.strongly_connected_components(nx.DiGraph(imports))
    return sorted(sorted(circle) for circle in found if len(circle) > 1)


def between_folders(imports: Iterable[Import], folder: str) -> Iterator[Import]:
    """Yield the imports from one child of a folder to another; a child is a module, or a folder with all it has."""
    level = folder.count(".") + 2
    for ends in imports:
        if all(end.startswith(f"{folder}.") for end in ends):
            one, other = (".".join(end.split(".")[:level]) for end in ends)
            if one != other:
                yield one, other


def test_circles_are_found() -> None:
    there = [("a.b.one", "a.c.two"), ("a.c.other", "a.b.last"), ("a.b.one", "a.b.last")]
    assert circles(there) == []
    assert circles(between_folders(there, "a")) == [["a.b", "a.c"]]
    assert circles(between_folders(there, "a.b")) == []


def test_no_module_imports_itself_through_others(imports: list[Import]) -> None:
    assert circles(imports) == []


def test_no_folder_imports_itself_through_others(imports: list[Import]) -> None:
    modules = {module for pair in imports for module in pair}
    folders = {module.rsplit(".", up)[0] for module in modules for up in range(1, module.count(".") + 1)}
    found = {folder: circles(between_folders(imports, folder)) for folder in sorted(folders)}
    assert {folder: each for folder, each in found.items() if each} == {}
