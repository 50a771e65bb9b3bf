"""Submitting a job in a real browser: by the form, as YAML, with uploaded files, and with its plan beforehand."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect
from tests.e2e.accessibility import appearances, checked_pages
from tests.e2e.conftest import Cluster, Complaints
from tests.e2e.scenes import digits, join, measure

from share_compute.specification import TrainJob

pytestmark = pytest.mark.browser

PLAN_TIMEOUT_MS = 180_000
"""The planner starts a process that imports torch, with the lowest priority."""
TEXT = "a line of text\n" * 2000


def form(page: Page, cluster: Cluster, search: str = "") -> None:
    page.goto(f"{cluster.url}/submit{search}")
    expect(page.get_by_role("heading", name="Submit a job", level=1)).to_be_visible()


def submitted(cluster: Cluster) -> TrainJob:
    (job,) = cluster.store.jobs.queued()
    assert isinstance(job.spec, TrainJob)
    return job.spec


def submit(page: Page) -> None:
    page.get_by_role("button", name="Submit", exact=True).click()
    # The first job of a server waits for the process that checks what submitters send.
    expect(page).to_have_url(re.compile("/jobs/job-"))


def to_yaml(page: Page) -> Locator:
    page.get_by_text("YAML", exact=True).click()
    return page.get_by_label("Job as YAML")


def to_form(page: Page) -> None:
    page.get_by_text("Form", exact=True).click()


@pytest.mark.real_path
def test_a_job_is_submitted_by_the_form(page: Page, cluster: Cluster) -> None:
    form(page, cluster)
    expect(page.get_by_text("The server would accept this job.")).to_be_visible()
    page.get_by_label("Name", exact=True).fill("my digits")
    page.get_by_label("Steps", exact=True).fill("12")
    page.get_by_label("Learning rate").fill("2e-3")
    page.get_by_label("Optimizer", exact=True).select_option("sgd")
    page.get_by_text("Precision, memory and seed").click()
    page.get_by_label("Microbatches").fill("8")
    page.get_by_label("Activation checkpointing").check()
    page.get_by_role("button", name="Remove row 4").click()
    page.get_by_role("button", name="Add a row").click()
    page.get_by_role("combobox", name="Type of row 5").select_option("tanh")
    page.get_by_role("button", name="Move row 5 up").click()
    page.get_by_text("Trained parameters").click()
    page.get_by_label("Frozen").fill("layers[:1]")
    submit(page)
    spec = submitted(cluster)
    assert (spec.name, spec.training.steps, spec.training.microbatches) == ("my digits", 12, 8)
    assert (spec.training.optimizer.name.value, spec.training.optimizer.learning_rate) == ("sgd", 0.002)
    assert spec.training.activation_checkpointing
    assert spec.training.freeze == ("layers[:1]",)
    assert [layer.type for layer in spec.model.layers or ()] == ["linear", "relu", "linear", "tanh", "linear"]


def test_form_and_yaml_show_each_others_changes(page: Page, cluster: Cluster) -> None:
    form(page, cluster)
    page.get_by_label("Steps", exact=True).fill("77")
    editor = to_yaml(page)
    assert page.url.endswith("view=yaml")
    expect(editor).to_have_value(re.compile(r"^# A classifier.*steps: 77\n", re.DOTALL))
    editor.fill(editor.input_value().replace("steps: 77", "steps: 78").replace("batch_size: 32", ""))
    to_form(page)
    expect(page.get_by_label("Steps", exact=True)).to_have_value("78")
    expect(page.get_by_label("Batch size")).to_have_value("")
    page.reload()
    expect(page.get_by_label("Steps", exact=True)).to_have_value("200")
    to_yaml(page).fill("name: [broken")
    expect(page.get_by_role("button", name="Submit", exact=True)).to_be_disabled()
    to_form(page)
    page.get_by_role("button", name="Fix the YAML").click()
    expect(page.get_by_label("Job as YAML")).to_have_value("name: [broken")
    page.get_by_role("button", name="Undo all changes").click()
    expect(page.get_by_label("Job as YAML")).to_have_value(re.compile("kind: train"))


def test_a_revision_is_asked_for_a_model_on_the_hub_only(page: Page, cluster: Cluster) -> None:
    form(page, cluster, "?start=sweep")
    expect(page.get_by_text("Each trial gets a plan of its own when it starts.")).to_be_visible()
    expect(page.get_by_role("radio", name="Layers")).to_be_checked()
    expect(page.get_by_label("Revision on the Hub")).to_have_count(0)
    page.get_by_text("Name on the Hub", exact=True).click()
    page.get_by_label("Revision on the Hub").fill("main")
    page.get_by_text("Configuration", exact=True).click()
    # The server refuses the revision now, so that the user must see it.
    page.get_by_label("Revision on the Hub").fill("")
    expect(page.get_by_label("Revision on the Hub")).to_have_count(0)


def test_every_example_keeps_its_changes_and_sizes_are_buttons(page: Page, cluster: Cluster) -> None:
    form(page, cluster)
    page.get_by_label("Steps", exact=True).fill("77")
    starts = page.get_by_role("navigation", name="Start from")
    starts.get_by_role("link", name="Train a language model").click()
    expect(page.get_by_label("Steps", exact=True)).to_have_value("300")
    page.get_by_text("Small: 24 M").click()
    expect(page.get_by_role("radio", name="Small: 24 M")).to_be_checked()
    expect(to_yaml(page)).to_have_value(re.compile("hidden_size: 512"))
    starts.get_by_role("link", name="Train a digit classifier").click()
    expect(page.get_by_label("Job as YAML")).to_have_value(re.compile("steps: 77"))
    expect(starts.get_by_role("link", name="Train a digit classifier")).to_contain_text("changed")
    page.get_by_role("button", name="Undo all changes").click()
    expect(page.get_by_label("Job as YAML")).to_have_value(re.compile("steps: 200"))


def test_a_wrong_value_is_marked_at_its_field_as_one_types(page: Page, cluster: Cluster) -> None:
    form(page, cluster)
    steps = page.get_by_label("Steps", exact=True)
    steps.fill("0")
    expect(steps).to_have_accessible_description(re.compile("at least 1"))
    expect(steps).to_have_attribute("aria-invalid", "true")
    expect(page.get_by_role("status").filter(has_text="1 problem")).to_be_visible()
    editor = to_yaml(page)
    expect(page.get_by_role("button", name=re.compile("training.steps"))).to_be_visible()
    editor.fill(editor.input_value().replace("steps: 0", "steps: 5\n  checkpoints_kept: 0"))
    to_form(page)
    # A collapsed section with a problem opens automatically.
    expect(page.get_by_label("Checkpoints kept")).to_be_visible()
    expect(page.get_by_text("1 problem").first).to_be_visible()
    page.get_by_label("Checkpoints kept").fill("2")
    expect(page.get_by_text("The server would accept this job.")).to_be_visible()
    expect(page.get_by_label("Checkpoints kept")).to_be_visible()
    steps.fill("many")
    expect(steps).to_have_accessible_description(re.compile("whole number"))


def test_what_only_submitting_finds_is_marked_too(
    page: Page, cluster: Cluster, complaints: Complaints
) -> None:
    form(page, cluster, "?start=language")
    # An example that lacks files shows no problems before the user submits it.
    files = page.get_by_role("textbox", name="Files", exact=True)
    expect(page.get_by_role("button", name="Upload files")).to_be_visible()
    page.get_by_role("button", name="Submit", exact=True).click()
    expect(files).to_have_accessible_description(re.compile("is not below a folder that jobs may read"))
    assert [text for text in complaints if "422" not in text] == []
    complaints.clear()


def test_an_earlier_job_is_started_from_without_its_defaults(page: Page, cluster: Cluster) -> None:
    job = cluster.store.jobs.create(digits())
    form(page, cluster, f"?from={job.id}&view=yaml")
    editor = page.get_by_label("Job as YAML")
    expect(editor).to_have_value(re.compile(f"# From {job.id}"))
    assert "shuffle" not in editor.input_value()
    to_form(page)
    expect(page.get_by_label("Steps", exact=True)).to_have_value("40")
    page.get_by_label("Name", exact=True).fill("again")
    submit(page)
    fresh = cluster.store.jobs.queued()[-1]
    assert fresh.spec == digits().model_copy(update={"name": "again"})


@contextmanager
def held(page: Page) -> Iterator[Callable[[], None]]:
    """Hold back every file that is sent, until the yielded function is called."""
    gate = threading.Event()
    waiting: list[Route] = []

    def hold(route: Route) -> None:
        if gate.is_set():
            route.continue_()
        else:
            waiting.append(route)

    def let_go() -> None:
        gate.set()
        while waiting:
            waiting.pop().continue_()

    page.route("**/api/v1/uploads/*/files/**", hold)
    yield let_go
    page.unroute("**/api/v1/uploads/*/files/**")


def test_a_file_is_sent_with_progress_and_trained_on(page: Page, cluster: Cluster, tmp_path: Path) -> None:
    corpus = tmp_path / "my corpus.txt"
    corpus.write_text(TEXT)
    form(page, cluster, "?start=language")
    with held(page) as let_go:
        page.get_by_label("Files for Files").set_input_files(corpus)
        expect(
            page.get_by_role("progressbar", name=re.compile("my corpus.txt: 0 B of 29.3 KiB"))
        ).to_be_attached()
        expect(page.get_by_role("button", name="Submit", exact=True)).to_be_disabled()
        let_go()
        expect(page.get_by_text("my corpus.txt is on the server.")).to_be_visible()
    files = page.get_by_role("textbox", name="Files", exact=True)
    expect(files).to_have_value(re.compile(r"^upload:up-\w+/my corpus\.txt$"))
    expect(page.get_by_text("The server would accept this job.")).to_be_visible()
    submit(page)
    (file,) = submitted(cluster).data.files or ()
    assert file.read_text() == TEXT

    # The next job uses the upload without sending it again; an upload that a job uses is not deleted.
    form(page, cluster, "?start=language")
    page.get_by_role("combobox", name="Earlier uploads for Files").select_option(
        label="my corpus.txt · 29.3 KiB"
    )
    expect(files).to_have_value(re.compile("^upload:up-"))


def test_what_a_job_uses_is_not_removed(
    page: Page, cluster: Cluster, tmp_path: Path, complaints: Complaints
) -> None:
    (tmp_path / "corpus.txt").write_text(TEXT)
    form(page, cluster, "?start=language")
    page.get_by_label("Files for Files").set_input_files(tmp_path / "corpus.txt")
    expect(page.get_by_text("corpus.txt is on the server.")).to_be_visible()
    submit(page)
    job = cluster.store.jobs.queued()[0]
    form(page, cluster)
    page.get_by_role("button", name="Remove corpus.txt").click()
    expect(page.get_by_text(re.compile(f"is used by {job.id}"))).to_be_visible()
    cluster.store.jobs.cancel(job.id)
    # A process may still compute the plan of the first form, so the deletion is refused for some seconds.
    uploads = page.get_by_role("region", name="Uploads")
    removal = page.get_by_role("button", name="Remove corpus.txt")
    deadline = time.monotonic() + 60
    while uploads.count() and time.monotonic() < deadline:
        if removal.is_enabled():
            removal.click()
        page.wait_for_timeout(500)
    expect(uploads).to_have_count(0)
    assert [text for text in complaints if "409" not in text] == []
    complaints.clear()


def test_a_cancelled_upload_leaves_nothing(page: Page, cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text(TEXT)
    form(page, cluster, "?start=language")
    with held(page):
        page.get_by_label("Files for Files").set_input_files(tmp_path / "corpus.txt")
        page.get_by_role("button", name="Cancel upload").click()
        expect(page.get_by_text("The upload was cancelled; none of its files are kept.")).to_be_visible()
    expect(page.get_by_role("region", name="Uploads")).to_have_count(0)
    assert [*(cluster.folder / "uploads").iterdir()] == []


def test_the_folder_of_a_model_is_dropped_and_pickles_say_why_they_are_refused(
    page: Page, cluster: Cluster, complaints: Complaints
) -> None:
    form(page, cluster, "?start=serve")
    drop(page, {"pytorch_model.bin": "x", "config.json": "{}"})
    expect(page.get_by_text(re.compile("which could run code when it is read"))).to_be_visible()
    assert [text for text in complaints if "422" not in text] == []
    complaints.clear()


def drop(page: Page, files: dict[str, str]) -> None:
    """Drop files on the first place that accepts them, as a browser does after a drag."""
    transfer = page.evaluate_handle(
        """files => {
            const transfer = new DataTransfer();
            for (const [name, text] of Object.entries(files)) transfer.items.add(new File([text], name));
            return transfer;
        }""",
        files,
    )
    page.get_by_text(re.compile("^or drop")).first.dispatch_event("drop", {"dataTransfer": transfer})


def test_the_plan_is_shown_before_anything_is_queued(
    page: Page, cluster: Cluster, complaints: Complaints
) -> None:
    form(page, cluster)
    plan = page.get_by_role("region", name="Plan")
    expect(plan).to_contain_text("No machine is ready")
    for name in ("ash", "birch"):
        measure(cluster.store, join(cluster.store, name), 51e9)
    # The plan appears automatically when machines join.
    placement = plan.get_by_role("figure", name=re.compile("Placement of 5 layers"))
    expect(placement).to_be_visible(timeout=PLAN_TIMEOUT_MS)
    expect(plan).to_contain_text("One step")
    expect(plan).to_contain_text("All 200 steps")
    expect(plan).to_contain_text("Bottleneck")
    page.get_by_text("Placement of the model on the machines").click()
    page.get_by_label("Stages", exact=True).fill("3")
    expect(plan).to_contain_text(re.compile("machines", re.IGNORECASE), timeout=PLAN_TIMEOUT_MS)
    alert = plan.get_by_role("alert")
    expect(alert).to_contain_text(re.compile("3"), timeout=PLAN_TIMEOUT_MS)
    assert cluster.store.jobs.queued() == []
    assert [text for text in complaints if "Failed to load resource" not in text] == []
    complaints.clear()


@appearances("desk")
def test_the_form_is_accessible_and_fits(
    cluster: Cluster, browser: Browser, tmp_path: Path, scheme: Any, width: int, complaints: Complaints
) -> None:
    with checked_pages(browser, tmp_path, complaints, scheme=scheme, width=width) as seen:
        page = seen.page
        page.goto(f"{cluster.url}/#key={cluster.key}")
        page.get_by_role("heading", level=1).wait_for()
        for search in ("?start=language", "?start=generate", "?start=serve", "?view=yaml"):
            form(page, cluster, search)
            expect(page.get_by_label("Loading")).to_have_count(0)
            page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true })")
            seen.check(f"submit{search}")
