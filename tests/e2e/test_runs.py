"""The list of jobs as a table of experiments, and the comparison of chosen jobs, in a real browser."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect
from tests.e2e.accessibility import LOCALES, appearances, checked_pages
from tests.e2e.conftest import Cluster, Complaints

from share_compute.lifecycle.attempt_events import AttemptEnded, StepCommitted, Validated
from share_compute.lifecycle.states import JobState
from share_compute.specification import parse_job
from share_compute.store import Store

pytestmark = pytest.mark.browser


def trained(store: Store, name: str, *, rate: float, optimizer: str, loss: float) -> str:
    """Return the id of a job that trained for 20 steps; its first loss is far above all others."""
    layer = {"type": "linear", "options": {"in_features": 64, "out_features": 10}}
    job = store.jobs.create(
        parse_job(
            {
                "name": name,
                "model": {"layers": [layer]},
                "data": {"dataset": "digits"},
                "training": {"steps": 20, "optimizer": {"name": optimizer, "learning_rate": rate}},
            }
        )
    )
    store.jobs.begin(job.id, [])
    store.jobs.move(job.id, JobState.running, "running", attempt=1)
    steps = [
        StepCommitted(
            step=step,
            loss=500.0 if step == 1 else loss + 1 / step,
            learning_rate=rate,
            gradient_norm=1.0,
            samples=32,
            tokens=32,
            seconds=0.01,
            tokens_per_s=3200.0,
        )
        for step in range(1, 21)
    ]
    validated = [Validated(split="validation", step=step, loss=loss + 2 / step) for step in (10, 20)]
    ended = AttemptEnded(outcome="succeeded", reason="all 20 steps are done")
    store.progress.record(job.id, 1, [*steps, *validated, ended])
    return job.id


def three(store: Store) -> list[str]:
    return [
        trained(store, "slow", rate=0.001, optimizer="adamw", loss=0.9),
        trained(store, "quick", rate=0.01, optimizer="adamw", loss=0.4),
        trained(store, "plain", rate=0.01, optimizer="sgd", loss=0.6),
    ]


def test_jobs_are_arranged_and_labelled(page: Page, cluster: Cluster) -> None:
    _, quick, _ = three(cluster.store)
    page.goto(f"{cluster.url}/jobs")
    names = page.get_by_role("rowheader").get_by_role("link")
    expect(names).to_have_text(["plain", "quick", "slow"])

    # Fields that differ are offered first; the address keeps the view.
    page.get_by_role("button", name="Columns").click()
    differing = page.get_by_role("group", name="Fields that differ").get_by_role("checkbox")
    expect(differing).to_have_count(2)
    page.get_by_role("checkbox", name="training.optimizer.learning_rate").check()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Loss (validation)").click()
    expect(names).to_have_text(["quick", "plain", "slow"])
    expect(page).to_have_url(re.compile("sort=results.validation_loss"))
    page.get_by_label("Groups").select_option("by training.optimizer.name")
    group = page.get_by_role("row", name=re.compile("name: adamw"))
    expect(group).to_contain_text("best 0.5000")
    page.reload()
    expect(names).to_have_text(["quick", "slow", "plain"])
    expect(page.get_by_role("columnheader", name="learning_rate")).to_be_visible()
    group.get_by_role("button", name=re.compile("adamw")).click()
    expect(names).to_have_text(["plain"])
    group.get_by_role("button", name=re.compile("adamw")).click()

    # Labels are edited where they are shown.
    row = page.get_by_role("row", name=re.compile("^Choose quick"))
    row.get_by_role("button", name=f"Tags of quick {quick[-4:]}").click()
    page.get_by_role("textbox", name="Tags of quick").fill("best so far, a,b")
    page.keyboard.press("Enter")
    expect(row.get_by_role("link", name="best so far")).to_be_visible()
    row.get_by_role("button", name=f"Note on quick {quick[-4:]}").click()
    page.get_by_role("textbox", name="Note on quick").fill("no warm-up")
    page.keyboard.press("Enter")
    expect(row).to_contain_text("no warm-up")
    row.get_by_role("button", name=f"Note on quick {quick[-4:]}").click()
    page.keyboard.press("Escape")
    kept = cluster.store.jobs.get(quick)
    assert (kept.tags, kept.note) == (("best so far", "a", "b"), "no warm-up")


def test_chosen_jobs_are_compared(page: Page, cluster: Cluster) -> None:
    *_, plain = three(cluster.store)
    page.goto(f"{cluster.url}/jobs")
    page.get_by_role("checkbox", name="Choose quick").check()
    page.get_by_role("checkbox", name="Choose plain").check()
    expect(page.get_by_role("status").filter(has_text="Jobs chosen: 2")).to_be_visible()
    page.get_by_role("link", name="Compare").click()
    expect(page).to_have_url(re.compile("/compare"))

    chart = page.get_by_role("img", name="Loss of 2 jobs over steps")
    expect(chart).to_be_visible()
    expect(page.get_by_text("Values outside of the axis: 3.")).to_be_visible()
    page.get_by_role("switch", name="Cut off outliers").press("Space")
    expect(page.get_by_text("Values outside of the axis")).to_have_count(0)
    expect(page).to_have_url(re.compile("outliers=true"))
    legend = page.get_by_role("group", name="Compared jobs")
    expect(legend.get_by_role("row", name=re.compile("quick"))).to_contain_text("0.4500")
    coordinates = page.get_by_role("group", name="Settings and results")
    coordinates.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    expect(page.get_by_role("status").filter(has_text="plain")).to_contain_text(
        "name sgd, Loss (validation) 0.7"
    )
    results = page.get_by_role("group", name="Results", exact=True)
    expect(results.get_by_role("row", name=re.compile(r"Loss \(validation\)"))).to_contain_text(
        "0.50000 best"
    )
    legend.get_by_role("button", name="Show plain").click()
    expect(page.get_by_role("img", name="Loss of 1 jobs over steps")).to_be_visible()
    legend.get_by_role("button", name="Without plain").click()
    expect(legend.get_by_role("row")).to_have_count(2)
    expect(page).not_to_have_url(re.compile(plain))


def test_a_refused_label_says_why(page: Page, cluster: Cluster, complaints: Complaints) -> None:
    job = trained(cluster.store, "slow", rate=0.001, optimizer="adamw", loss=0.9)
    page.goto(f"{cluster.url}/jobs")
    page.get_by_role("button", name="Tags of slow").click()
    field = page.get_by_role("textbox", name="Tags of slow")
    field.fill("!")
    page.keyboard.press("Enter")
    expect(page.get_by_text(re.compile("tags"))).to_be_visible()
    assert cluster.store.jobs.get(job).tags == ()
    # The browser logs requests that the server refuses.
    assert [text for text in complaints if "422" not in text] == []
    complaints.clear()


@appearances("phone", ("en", "zh"))
def test_jobs_and_their_comparison_can_be_read_by_everybody(
    cluster: Cluster,
    browser: Browser,
    complaints: Complaints,
    tmp_path: Path,
    language: str,
    scheme: Any,
    width: int,
) -> None:
    ids = three(cluster.store)
    with checked_pages(
        browser, tmp_path, complaints, scheme=scheme, width=width, locale=LOCALES[language]
    ) as seen:
        seen.page.goto(f"{cluster.url}/#key={cluster.key}")
        seen.page.get_by_role("heading", level=1).first.wait_for()
        for path in ("jobs?by=state&sort=-loss", f"compare?jobs={','.join(ids)}", "compare"):
            seen.page.goto(f"{cluster.url}/{path}")
            seen.page.get_by_role("heading", level=1).first.wait_for()
            if ids[0] in path or "jobs" in path:
                seen.page.get_by_role("row").nth(3).wait_for()
            if ids[0] in path:
                seen.page.get_by_role("img").last.wait_for()
            seen.check(path[:20])
