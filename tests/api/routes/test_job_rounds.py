"""The last rounds of a job: by REST, and as a picture in the terminal."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from datetime import UTC, datetime, timedelta
from subprocess import CompletedProcess
from typing import Any

import httpx
import pytest
from rich.console import Console
from tests.api.conftest import Plane

from share_compute.lifecycle.attempt_events import BranchRound, RoundMerged
from share_compute.store.records import EventRecord
from share_compute_api.schemas.rounds import RoundsView
from share_compute_api.terminal.rounds import picture

START = datetime(2026, 1, 1, tzinfo=UTC)
ROUNDS = {"kind": "local", "branches": 2, "every": 1, "quorum": 1}


def merge(number: int, *, late: Collection[int] = (), missing: Collection[int] = ()) -> RoundMerged:
    """Return a merge of two branches; the first one computes for 6 s and waits for 2 s, the second one for 8 s."""
    branches = tuple(
        BranchRound(
            number=branch,
            round=number - (branch in late),
            machines=(f"c-{branch}", "c-other"),
            loss=4.0 / number,
            samples=16,
            seconds=6.0 + 2 * branch,
            waited_s=2.0 - 2 * branch,
            sent_bytes=1000,
        )
        for branch in (0, 1)
        if branch not in missing
    )
    return RoundMerged(
        round=number,
        step=number,
        branches=branches,
        missing=tuple({*late, *missing}),
        update_bytes=3000,
        weight_bytes=40_000,
        consensus_distance=0.125,
        merge_s=0.5,
    )


def view(
    *merges: RoundMerged, merges_apart: bool = False, attempts: dict[int, int] | None = None
) -> RoundsView:
    """Return the rounds of merges, 10 s apart; ``attempts`` has the attempts other than 1 by place."""
    events = [
        EventRecord(
            seq=place,
            job_id="job-1",
            contributor_id=None,
            attempt=(attempts or {}).get(place, 1),
            kind="round",
            at=START + timedelta(seconds=10 * place),
            data=merged.model_dump(mode="json", exclude={"type"}),
        )
        for place, merged in enumerate(merges)
    ]
    return RoundsView.of(events, {"c-0": "ada"}, merges_apart=merges_apart)


def drawn(rounds: RoundsView, *, width: int = 80, merges_apart: bool = False) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(picture(rounds.rounds, console, merges_apart=merges_apart))
    return capture.get()


class TestFigures:
    def test_a_round_has_the_figures_of_each_branch(self) -> None:
        first, second = view(merge(1), merge(2, late=[1])).rounds
        assert (first.elapsed_s, second.elapsed_s) == (None, 10.0)
        assert second.compression_ratio == 20.0
        assert second.consensus_distance == 0.125
        in_time, late = second.branches
        assert in_time.machines == {"c-0": "ada", "c-other": "c-other"}
        assert (in_time.seconds, in_time.waited_s, in_time.other_s) == (6.0, 2.0, 2.0)
        assert (in_time.loss, in_time.sent_bytes, in_time.staleness) == (2.0, 1000, 0)
        assert (late.staleness, late.other_s) == (1, None)
        assert first.branches[0].other_s is None

    def test_rounds_that_are_merged_again_are_listed_once(self) -> None:
        rounds = view(merge(1), merge(2), merge(3), merge(2), attempts={3: 2}).rounds
        assert [(one.round, one.attempt, one.elapsed_s) for one in rounds] == [(1, 1, None), (2, 2, None)]

    def test_merges_of_single_pushes_have_no_common_round(self) -> None:
        rounds = view(merge(1, missing=[1]), merge(2, missing=[0]), merges_apart=True).rounds
        assert all(run.other_s is None for one in rounds for run in one.branches)


class TestPicture:
    def test_bars_have_the_times_of_the_branches(self) -> None:
        rounds = view(merge(1), merge(2), merge(3, late=[1]), merge(4, missing=[1]))
        assert drawn(rounds) == (
            "round     1                2                3                4\n"
            "branch 0  ██████████···    ██████████···░░░ ██████████···░░░ ██████████···░░░\n"
            "branch 1  █████████████    █████████████░░░ ▓▓▓▓▓▓▓▓▓▓▓▓▓    missing\n"
            "          █ computing  ▓ computing, late  · waiting  ░ exchange and other work\n"
        )

    def test_no_line_is_longer_than_the_terminal(self) -> None:
        for width in (40, 80, 200):
            text = drawn(view(*(merge(number) for number in range(1, 14))), width=width)
            lines = text.splitlines()
            assert max(map(len, lines[:-1])) <= width
            assert lines[0].endswith(" 13") or lines[0].split()[-1] == "13"
            assert len(lines[0].split()) == 1 + min(13, (width - 10) // 8)

    def test_pushes_of_single_branches_are_drawn_one_after_the_other(self) -> None:
        merges = [merge(number, missing=[number % 2]).model_copy(update={"missing": ()}) for number in (1, 2)]
        assert drawn(view(*merges, merges_apart=True), width=40, merges_apart=True) == (
            "merge     1              2\n"
            "branch 0  ██████████····\n"
            "branch 1                 ██████████████\n"
            "          █ computing  · waiting\n"
        )


@pytest.fixture
def job_id(plane: Plane, http: httpx.Client, digits: dict[str, Any]) -> str:
    """Return the id of a job with three merged rounds."""
    training = {"steps": 8, "synchronization": ROUNDS}
    made = str(http.post("/jobs", json={**digits, "training": training}).json()["id"])
    plane.store.jobs.begin(made, [])
    plane.store.progress.record(made, 1, [merge(1), merge(2), merge(3, missing=[1])])
    return made


def test_rest_returns_the_last_rounds(http: httpx.Client, job_id: str, digits: dict[str, Any]) -> None:
    rounds = http.get(f"/jobs/{job_id}/rounds").json()["rounds"]
    assert [one["round"] for one in rounds] == [1, 2, 3]
    assert rounds[0]["elapsed_s"] is None
    assert rounds[2]["missing"] == [1]
    (last,) = http.get(f"/jobs/{job_id}/rounds", params={"limit": 1}).json()["rounds"]
    assert last == rounds[2]
    assert last["elapsed_s"] is not None
    other = http.post("/jobs", json=digits).json()["id"]
    assert http.get(f"/jobs/{other}/rounds").json() == {"rounds": []}


def test_bad_questions_about_rounds_are_refused(
    http: httpx.Client, job_id: str, digits: dict[str, Any]
) -> None:
    assert http.get("/jobs/job-none/rounds").status_code == 404
    for limit in ("0", "101", "x"):
        assert http.get(f"/jobs/{job_id}/rounds", params={"limit": limit}).status_code == 422
    field = {"training.optimizer.learning_rate": {"values": [0.1]}}
    sweep = http.post("/jobs", json={"kind": "sweep", "job": digits, "fields": field}).json()["id"]
    answer = http.get(f"/jobs/{sweep}/rounds")
    assert answer.status_code == 409
    assert answer.json()["hint"]


def test_show_has_the_last_rounds(job_id: str, run: Callable[..., CompletedProcess[str]]) -> None:
    document = json.loads(run("show", job_id, "--json").stdout)
    assert document["id"] == job_id
    assert [one["round"] for one in document["rounds"]] == [1, 2, 3]
    text = run("show", job_id, COLUMNS="80").stdout
    assert "round 3 after step 3; each branch received 2.9 KiB; 20 times less than float32" in text
    lines = text.splitlines()
    (head,) = (place for place, line in enumerate(lines) if line.startswith("branch  round  machines"))
    assert [line.split()[:4] for line in lines[head + 1 : head + 3]] == [
        ["0", "3", "c-0", "+1"],
        ["1", "2", "c-1", "+1"],
    ]
    assert any("missing" in line for line in lines[:head])
