"""Jobs with ``synchronization: {kind: auto}`` on real Ray nodes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.actors.training.rounds.test_rounds import digest, job, require_success

from share_compute.lifecycle.attempt_events import AttemptEvent, Note
from share_compute.topology import Link, Topology

pytestmark = [pytest.mark.slow, pytest.mark.exact]
Attempt = Callable[..., list[AttemptEvent]]
AUTO = {"kind": "auto", "branches": 2, "every": 10}


def with_links(topology: Topology, bytes_per_s: float) -> Topology:
    """Return two machines with equal links between them and to the server."""
    machines = topology.contributors[:2]
    ids = [machine.id for machine in machines]
    ends = [(ids[0], ids[1]), *(("head", each) for each in ids)]
    return replace(
        topology, contributors=machines, links=tuple(Link(*end, 1e-7, bytes_per_s) for end in ends)
    )


def document(place: Path, synchronization: dict[str, Any]) -> dict[str, Any]:
    corpus = place / "corpus.txt"
    corpus.write_text((Path(__file__).parents[4] / "LICENSE").read_text() * 5)
    return {**job(corpus, synchronization), "parallelism": {"stages": 1}}


def notes(events: list[AttemptEvent]) -> str:
    return "\n".join(event.message for event in events if isinstance(event, Note))


@pytest.mark.parametrize(("bytes_per_s", "every"), [(1e9, None), (6e7, 10)], ids=["lockstep", "rounds"])
def test_the_first_attempt_chooses_and_the_weights_are_those_of_the_chosen_policy(
    attempt: Attempt, topology: Topology, tmp_path: Path, bytes_per_s: float, every: int | None
) -> None:
    machines = with_links(topology, bytes_per_s)
    events = attempt(document(tmp_path, AUTO), machines=machines, folder=tmp_path / "auto")
    require_success(events)
    assert ("rounds of 10 steps" if every else "lockstep") in notes(events)
    choice = json.loads((tmp_path / "auto" / "synchronization.json").read_text())
    assert choice["every"] == every

    alone = document(tmp_path, {"kind": "local", "branches": 2, "every": 10})
    if every is None:
        alone["training"] |= {"synchronization": {"kind": "allreduce"}, "batch_size": 8, "microbatches": 4}
    require_success(attempt(alone, machines=machines, folder=tmp_path / "alone"))
    assert digest(tmp_path / "auto") == digest(tmp_path / "alone")


def test_a_later_attempt_keeps_the_choice_on_other_machines(
    attempt: Attempt, topology: Topology, tmp_path: Path
) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "synchronization.json").write_text('{"every": 4}')
    events = attempt(document(tmp_path, AUTO), machines=with_links(topology, 1e9), folder=folder)
    require_success(events)
    assert "lockstep" not in notes(events)
    assert (folder / "rounds").is_dir()


@pytest.mark.parametrize(
    "text", ["", '{"every": 0}', "{}", None], ids=["empty", "no steps", "no choice", "missing"]
)
def test_a_lost_choice_is_an_error_that_names_the_file(
    attempt: Attempt, topology: Topology, tmp_path: Path, text: str | None
) -> None:
    folder = tmp_path / "job"
    (folder / "rounds").mkdir(parents=True)
    if text is not None:
        (folder / "synchronization.json").write_text(text)
    (ended,) = attempt(document(tmp_path, AUTO), machines=with_links(topology, 1e9), folder=folder)
    assert ended.type == "ended"
    assert ended.error is not None
    assert ended.error["code"] == "verification-failed"
    assert "synchronization.json" in ended.error["hint"]
