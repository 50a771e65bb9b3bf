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
KNOWN: dict[Import, str] = {
    ("share_compute_actors.coordinator.coordinator", "share_compute_actors.coordinator.attempt"): "modules",
    ("share_compute_actors.testing", "share_compute_actors.member.mishaps"): "testing and member",
    ("share_compute_actors.testing", "share_compute_actors.member.naming"): "testing and member",
    ("share_compute_actors.member.copies.service", "share_compute_actors.member.engine"): "member, copies",
    ("share_compute_api.batches.attempt", "share_compute_api.supervision.patience"): "batches, supervision",
    ("share_compute_api.cluster.cluster", "share_compute_api.supervision"): "cluster and supervision",
    ("share_compute_api.cluster.rotation", "share_compute_api.supervision.jobs"): "cluster and supervision",
    ("share_compute_api.data_roots", "share_compute_api.supervision.coordinators"): "serving, supervision",
    ("share_compute_api.fencing", "share_compute_api.cli.output"): "fencing, cli and server",
    ("share_compute_api.isolated.messages", "share_compute_api.serving.vocabulary"): "isolated and serving",
    ("share_compute_api.isolated.worker", "share_compute_api.serving.tokenizer"): "isolated and serving",
    ("share_compute_api.metrics", "share_compute_api.serving.metering"): "metrics, serving, supervision",
    ("share_compute_api.uploads.naming", "share_compute_api.context"): "uploads and context",
}
"""Imports without which there would be no circle, each with the circle that it closes. This list only shrinks."""


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
    assert circles(pair for pair in imports if pair not in KNOWN) == []


def test_no_folder_imports_itself_through_others(imports: list[Import]) -> None:
    allowed = [pair for pair in imports if pair not in KNOWN]
    folders = {module.rpartition(".")[0] for pair in imports for module in pair if "." in module}
    found = {folder: circles(between_folders(allowed, folder)) for folder in sorted(folders)}
    assert {folder: each for folder, each in found.items() if each} == {}


@pytest.mark.parametrize("pair", KNOWN, ids=" -> ".join)
def test_known_circles_are_still_there(pair: Import, imports: list[Import]) -> None:
    """An import that is gone leaves the list, so that it cannot come back."""
    assert pair in imports
