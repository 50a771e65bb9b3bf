"""The page of a sweep in a real browser: the picture of all trials, the table, and the way to a trial and back."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect
from tests.api.conftest import wait_until
from tests.e2e.accessibility import LOCALES, appearances, checked_pages
from tests.e2e.conftest import Cluster, Complaints

from share_compute.lifecycle.attempt_events import AttemptEnded, Validated
from share_compute.lifecycle.states import JobState
from share_compute.specification import parse_any_job
from share_compute.store import JobRecord, Store, TrialJobRecord

pytestmark = pytest.mark.browser

SWEEP = {
    "kind": "sweep",
    "name": "rates",
    "job": {
        "model": {"layers": [{"type": "linear", "options": {"in_features": 64, "out_features": 10}}]},
        "data": {"dataset": "digits"},
        "training": {"steps": 40, "validate_every": 5},
    },
    "fields": {
        "training.optimizer.learning_rate": {"log_uniform": [0.0001, 0.1]},
        "training.optimizer.name": {"values": ["adamw", "sgd"]},
        "training.batch_size": {"values": [16, 32]},
    },
    "search": {"kind": "random", "trials": 6},
    "early_stopping": {"first": 10},
    "jobs_at_once": 4,
}
LOSSES = (0.9, 0.4, 0.6)


def run(store: Store, job: TrialJobRecord, loss: float) -> None:
    store.jobs.begin(job.id, [])
    store.jobs.move(job.id, JobState.running, "running", attempt=1)
    measured = [Validated(split="validation", step=step, loss=loss + 4 / step) for step in (10, 40)]
    store.progress.record(job.id, 1, [*measured, AttemptEnded(outcome="succeeded", reason="done")])


def begun(store: Store) -> JobRecord:
    """Return a sweep of six trials: three are over, one is queued, and two wait."""
    sweep = store.jobs.create(parse_any_job(SWEEP))
    for number, loss in enumerate(LOSSES, 1):
        wait_until(lambda wanted=number: len(store.sweeps.trials(sweep.id)) >= wanted)
        run(store, store.sweeps.trials(sweep.id)[number - 1], loss)
    return sweep


def test_the_trials_of_a_sweep(page: Page, cluster: Cluster) -> None:
    sweep = begun(cluster.store)
    page.goto(f"{cluster.url}/jobs/{sweep.id}")
    picture = page.get_by_role(
        "img", name=re.compile(r"Settings and Loss \(validation\) of 3 trials; the best is trial 2")
    )
    expect(picture).to_be_visible()
    rows = page.get_by_role("row")
    expect(rows.nth(1)).to_contain_text("trial 2 · best")
    expect(rows.nth(1)).to_contain_text("0.5000")
    # A result arrives while the page is open.
    fourth = cluster.store.sweeps.trials(sweep.id)[3]
    run(cluster.store, fourth, 0.1)
    expect(rows.nth(1)).to_contain_text("trial 4 · best")
    wait_until(lambda: len(cluster.store.sweeps.trials(sweep.id)) >= 5)
    fifth = cluster.store.sweeps.trials(sweep.id)[4]
    cluster.store.sweeps.stop(sweep.id, fifth.id, "its loss is number 5 of 5", is_interrupted=False)
    expect(page.get_by_role("row", name=re.compile("trial 5"))).to_contain_text("stopped")
    expect(page.get_by_role("region", name="Progress")).not_to_contain_text("Time left")
    page.get_by_role("link", name="trial 4").click()
    page.get_by_role("heading", name="rates 4", level=1).wait_for()
    page.get_by_role("link", name="Trial 4 of a sweep").click()
    page.get_by_role("heading", name="rates", level=1, exact=True).wait_for()


@appearances("phone", ("en", "zh"))
def test_a_sweep_can_be_read_by_everybody(
    cluster: Cluster,
    browser: Browser,
    complaints: Complaints,
    tmp_path: Path,
    language: str,
    scheme: Any,
    width: int,
) -> None:
    sweep = begun(cluster.store)
    with checked_pages(
        browser, tmp_path, complaints, scheme=scheme, width=width, locale=LOCALES[language]
    ) as seen:
        seen.page.goto(f"{cluster.url}/#key={cluster.key}")
        seen.page.get_by_role("heading", level=1).first.wait_for()
        seen.page.goto(f"{cluster.url}/jobs/{sweep.id}")
        seen.page.get_by_role("img").last.wait_for()
        seen.check(f"sweep-{language}-{scheme}-{width}")
