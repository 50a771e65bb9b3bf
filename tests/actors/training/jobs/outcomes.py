"""Outcomes of attempts on real Ray nodes: losses, metrics and weights, also when processes of a machine are killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tests.ray_nodes import Attempt, processes_on
from torch import Tensor

from share_compute.lifecycle.attempt_events import AttemptEvent


def succeeded(events: list[AttemptEvent]) -> list[AttemptEvent]:
    """Return the events of an attempt that must have succeeded."""
    ending: Any = events[-1]
    assert ending.outcome == "succeeded", ending.reason
    return events


def losses_of(events: list[AttemptEvent]) -> list[float]:
    return [event.loss for event in events if event.type == "step"]


def validated(events: list[AttemptEvent], split: str) -> Any:
    """Return the last evaluation of a split."""
    return [event for event in events if event.type == "validated" and event.split == split][-1]


def weights_of(folder: Path) -> dict[str, Tensor]:
    """Return the weights of a job's result."""
    tensors: dict[str, Tensor] = {}
    for file in (folder / "artifacts" / "model").glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def require_same_weights(one: Path, other: Path) -> None:
    first, second = weights_of(one), weights_of(other)
    assert first.keys() == second.keys() != set()
    assert all(torch.equal(first[name], value) for name, value in second.items())


def runs_in_layouts(
    attempt: Attempt, document: dict[str, Any], folder: Path, layouts: Sequence[dict[str, Any]]
) -> list[list[AttemptEvent]]:
    """Run a job in several layouts, and return the events of each; losses, test and weights must be the same."""
    runs = []
    for place, layout in enumerate(layouts):
        parallelism = {**document["parallelism"], **layout}
        runs.append(succeeded(attempt({**document, "parallelism": parallelism}, folder=folder / str(place))))
    for place, events in enumerate(runs):
        assert losses_of(events) == losses_of(runs[0])
        assert validated(events, "test") == validated(runs[0], "test")
        require_same_weights(folder / "0", folder / str(place))
    return runs


def killing(node: Any, at_step: int) -> tuple[Callable[[AttemptEvent, Any], None], list[int]]:
    """Return a receiver of events that kills the members on a node, and the list that gets the ids of the killed.

    They are killed once, at step ``at_step``, or when each layer is on two machines if that is later.
    """
    killed: list[int] = []
    is_protected = False

    def kill(event: AttemptEvent, _coordinator: Any) -> None:
        nonlocal is_protected
        if event.type == "protection":
            is_protected = event.is_protected
        if event.type == "step" and event.step >= at_step and is_protected and not killed:
            killed.extend(process.pid for process in processes_on(node, "Member"))
            for pid in killed:
                os.kill(pid, signal.SIGKILL)

    return kill, killed


def require_no_change_by_a_kill(
    attempt: Attempt, document: dict[str, Any], folder: Path, node: Any, *, at_step: int = 5
) -> None:
    """Run a job twice, and kill the members on a node in the second run (see `killing`): the results must be equal.

    The job needs hundreds of steps, because it must not end before the backups are there and the kill is done.
    """
    calm = succeeded(attempt(document, folder=folder / "calm"))
    kill, killed = killing(node, at_step)
    rough = succeeded(attempt(document, folder=folder / "rough", on_event=kill))
    assert killed
    assert any(event.type == "reformed" and event.lost for event in rough)
    assert losses_of(rough) == losses_of(calm)
    assert validated(rough, "test") == validated(calm, "test")
    require_same_weights(folder / "calm", folder / "rough")
