"""The command ``models``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.markup import escape

from share_compute.quantities import bytes_text, count_text
from share_compute_api.terminal.options import Json
from share_compute_api.terminal.output import console, print_items, print_table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from share_compute_api.schemas.catalogue import CatalogueEntry

_MOST_REQUESTS = 16
_PAUSE_S, _PAUSE_STEP_S, _MOST_PAUSE_S = 2.0, 0.5, 5.0


def models(as_json: Json = False) -> None:
    """List the models that can be served here: uploads, results, folders, and the operator's own list."""
    from share_compute_api.client.client import Client

    with Client() as client:
        found = client.models()
        asked = 1
        while asked < _MOST_REQUESTS and any(entry.is_pending for entry in found.models):
            time.sleep(min(_PAUSE_S + _PAUSE_STEP_S * (asked - 1), _MOST_PAUSE_S))
            found = client.models()
            asked += 1
    if as_json:
        print_items(found.models, notes=found.notes)
        return
    print_table(
        ("name", "source", "parameters", "weights", "longest", "answers", "licence", "serve it as"),
        map(_row, found.models),
        empty="No model is here yet. share-compute upload FOLDER sends one.",
        right=("parameters", "weights", "longest"),
    )
    for name, problem in _problems(found.models):
        console.print(f"[dim]{escape(name)} cannot be served: {escape(problem)}[/dim]")
    for note in found.notes:
        console.print(f"[dim]{escape(note)}[/dim]")


def _row(entry: CatalogueEntry) -> tuple[object, ...]:
    facts = entry.facts
    answers = facts and {
        "embed": "embeddings",
        "generate": "chat" if facts.has_chat_template else "completions",
    }
    return (
        escape(entry.name),
        entry.source,
        facts and count_text(facts.parameters),
        facts and bytes_text(facts.weights_bytes),
        facts and facts.window_tokens,
        facts and answers and answers[facts.kind],
        entry.licence and escape(entry.licence),
        None if entry.problem else escape(_argument(entry)),
    )


def _argument(entry: CatalogueEntry) -> str:
    """Return the argument of ``share-compute serve`` for a model."""
    model = entry.model
    if model.hub is not None:
        return f"hub:{model.hub}" + (f"@{model.revision}" if model.revision else "")
    return str(model.path) if model.path is not None else model.label


def _problems(entries: list[CatalogueEntry]) -> Iterator[tuple[str, str]]:
    return ((entry.name, entry.problem) for entry in entries if entry.problem)
