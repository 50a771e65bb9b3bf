"""``share-compute chaos``: storms are drawn from a seed, and a job's reaction to one is reported correctly."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests.api.cli.test_cli import JOB, error, play, step

from share_compute.errors import Conflict, UserError
from share_compute.lifecycle.attempt_events import AttemptEnded, Planned
from share_compute.planning.plan import Plan
from share_compute.settings import Settings
from share_compute.store.records import EventRecord
from share_compute_api.client.client import Client
from share_compute_api.client.storm import Hit, Restart, assess, compare, gusts, pace, restarts

Run = Callable[..., "subprocess.CompletedProcess[str]"]
PLAN = Plan(epoch=0, strategy="uniform", num_layers=1, parameters=650, stages=(), microbatches=1)
RUNS = Planned(plan=PLAN)
NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


def event(at_s: float, kind: str, attempt: int = 1, **data: Any) -> EventRecord:
    return EventRecord(
        seq=round(1000 * at_s) + 1,
        job_id="job-1",
        contributor_id=None,
        attempt=attempt,
        kind=kind,
        at=NOON + timedelta(seconds=at_s),
        data=data,
    )


def hit(at_s: float, kind: Any = "kill", contributor_id: str = "c-1") -> Hit:
    return Hit(kind=kind, contributor_id=contributor_id, machine="one", at=NOON + timedelta(seconds=at_s))


def test_equal_seeds_give_equal_storms() -> None:
    storms = [list(gusts(seed, 10.0, 2000.0, ["kill", "stop"])) for seed in (7, 7, 8)]
    assert storms[0] == storms[1] != storms[2]
    assert 150 < len(storms[0]) < 250
    assert [gust.after_s for gust in storms[0]] == sorted(gust.after_s for gust in storms[0])
    for gust in storms[0]:
        assert (gust.duration_s is not None) == (gust.kind == "stop")
        assert gust.victim(["c", "a", "b"]) == gust.victim(["a", "b", "c"])
    assert {gust.victim(["a", "b", "c"]) for gust in storms[0]} == {"a", "b", "c"}
    with pytest.raises(UserError, match="without failures"):
        next(gusts(0, 1.0, 1.0, []))


def test_lost_members_are_distinguished_from_those_that_are_waited_for() -> None:
    events = [
        event(1.0, "step", step=1),
        event(2.0, "step", step=2),  # sent before the member died
        event(3.0, "reformed", lost=["c-1"], left=[], recomputed=3),
        event(3.5, "step", step=3),
        event(8.0, "step", step=4),
        event(8.5, "step", step=5),
        event(9.0, "step", step=6),
        event(9.1, "reformed", lost=["c-2"], left=[], recomputed=1),
    ]
    killed, stopped, last = assess([hit(1.5), hit(4.0, "stop", "c-2"), hit(9.0, "kill", "c-2")], events)
    assert (killed.step, killed.was_noticed, killed.recovered_s, killed.recomputed) == (1, True, 2.0, 3)
    assert (stopped.step, stopped.was_noticed, stopped.recovered_s, stopped.recomputed) == (3, False, 4.0, 0)
    assert (last.step, last.was_noticed, last.recovered_s) == (6, True, None)


def test_an_attempt_that_is_made_again_counts_with_what_it_repeats() -> None:
    events = [
        event(1.0, "step", step=1),
        event(2.0, "step", step=2),
        event(9.0, "started", attempt=2, first_step=2),
        event(9.5, "step", attempt=2, step=2),
        event(10.0, "step", attempt=2, step=3),
    ]
    (killed,) = assess([hit(2.5)], events)
    assert (killed.was_noticed, killed.recovered_s, killed.restarted_from) == (True, 7.0, 1)
    assert restarts(events, attempt=1, step=0) == (Restart(attempt=2, step=1, steps_lost=1),)
    assert pace(events) == (4, 1.0, 7.5)
    assert pace(events[:1]) == (1, None, None)


def test_steps_that_a_restart_lost_count_also_when_they_are_computed_after_the_storm() -> None:
    events = [
        event(1.0, "started", attempt=2, first_step=11),
        event(2.0, "step", attempt=2, step=11),
        event(3.0, "step", attempt=2, step=12),
        event(4.0, "started", attempt=3, first_step=12),
        event(5.0, "step", attempt=3, step=12),
        event(6.0, "started", attempt=4, first_step=13),  # its members were taken over
    ]
    # 90 of the 100 steps from before the storm are lost, although only three steps were committed since.
    assert restarts(events, attempt=1, step=100) == (
        Restart(attempt=2, step=10, steps_lost=90),
        Restart(attempt=3, step=11, steps_lost=1),
        Restart(attempt=4, step=12, steps_lost=0),
    )
    first, second, third = assess([hit(0.5), hit(3.5), hit(5.5)], events, before_step=100)
    assert (first.step, first.restarted_from, second.restarted_from) == (100, 10, 11)
    assert (third.was_noticed, third.restarted_from) == (True, None)


def test_losses_are_compared_to_the_last_bit() -> None:
    losses = {1: 2.0, 2: 1.0, 3: 0.5}
    assert compare("job-2", losses, {2: 1.0, 3: 0.5, 4: 0.1}).first_difference is None
    different = compare("job-2", losses, {1: 2.0, 2: 1.0 + 2**-52})
    assert (different.steps, different.first_difference) == (2, 2)


@pytest.mark.slow
def test_what_cannot_be_is_refused(client: Client, plane: Any, run: Run) -> None:
    job = client.submit(JOB.format(name="digits"))
    for words, wrong in (
        (("--mtbf", "soon"), "--mtbf: 'soon' is not a time"),
        (("--kinds", "kill,burn"), "--kinds burn is not known"),
    ):
        refused = run("chaos", "--job", job.id, *words, "--json")
        assert refused.returncode == 2
        assert error(refused)["detail"] == wrong
    refused = run("chaos", "--job", job.id, "--minutes", "0.05", "--json")
    assert refused.returncode == 4
    assert error(refused)["detail"].startswith("the job did not begin to run: ")
    play(plane, job.id, RUNS, AttemptEnded(outcome="succeeded", reason="done"))
    refused = run("chaos", "--job", job.id, "--json")
    assert refused.returncode == 4
    assert error(refused)["detail"] == "the job has ended (succeeded)"


def test_a_server_lets_nothing_fail_unless_it_is_allowed(client: Client, plane: Any) -> None:
    job = client.submit(JOB.format(name="digits"))
    play(plane, job.id, RUNS, step(1))
    with pytest.raises(UserError, match="does not let jobs fail on purpose") as refused:
        client.make_failure(job.id, "kill", "c-1")
    assert "--allow-failures" in (refused.value.hint or "")


@pytest.fixture
def open_client(settings: Settings, plane: Any) -> Client:
    """Return a client of a server that allows failures and has no cluster."""
    plane.settings = settings.model_copy(update={"allow_failures": True})
    plane.restart()
    return Client(plane.url, plane.api_key)


def test_only_members_of_jobs_that_run_can_fail(open_client: Client, http: Any) -> None:
    with open_client as client:
        job = client.submit(JOB.format(name="digits"))
        with pytest.raises(Conflict, match="the job is queued, so it has no members"):
            client.make_failure(job.id, "kill", "c-1")
        for body in ({"kind": "stop"}, {"kind": "kill", "duration_s": 3}, {"kind": "burn"}):
            answer = http.post(f"/jobs/{job.id}/failures", json={"contributor_id": "c-1", **body})
            assert answer.status_code == 422, answer.text


@pytest.mark.slow
def test_a_storm_in_which_nothing_is_hit_reports_so(open_client: Client, plane: Any, run: Run) -> None:
    with open_client as client:
        job = client.submit(JOB.format(name="digits"))
        other = client.submit(JOB.format(name="calm"))
    for each in (job, other):
        play(plane, each.id, RUNS, step(1))
    words = ("--minutes", "0.05", "--mtbf", "1s", "--seed", "1", "--against", other.id, "--json")
    done = run("chaos", "--job", job.id, *words)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["hits"] == report["restarts"] == []
    assert report["missed"] == len(list(gusts(1, 1.0, 3.0, ["kill", "stop"]))) > 0
    assert report["against"] == {"job_id": other.id, "steps": 1, "first_difference": None}
