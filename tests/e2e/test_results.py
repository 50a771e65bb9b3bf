"""Pages of jobs of all tasks in a real browser: rows of their data, predictions, curves, and a comparison."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image
from playwright.sync_api import Browser, Page, expect
from tests.e2e.accessibility import LOCALES, appearances, checked_pages
from tests.e2e.conftest import Cluster, Complaints
from tests.thoroughly import thoroughly

from share_compute.lifecycle.attempt_events import (
    AttemptEnded,
    AttemptEvent,
    Pictured,
    StepCommitted,
    Validated,
)
from share_compute.lifecycle.states import JobState
from share_compute.specification import parse_job
from share_compute.store import JobRecord, Store

pytestmark = pytest.mark.browser

LINEAR = {"type": "linear", "options": {"in_features": 64, "out_features": 10}}
KINDS = ("setosa", "versicolor", "a rare kind of iris with a long name")
PREVIEW_TIMEOUT_MS = 180_000
"""The first preview starts a process that imports libraries."""


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for data: jobs may not read that of the server, which is ``tmp_path``."""
    return tmp_path_factory.mktemp("files")


def table_job(folder: Path) -> dict[str, Any]:
    rows = [
        f"{20261129 + row},{row / 7:.9f},{'red' if row % 3 else ''},{KINDS[row % 3]}\n" for row in range(40)
    ]
    (folder / "rows.csv").write_text("day,width,colour,kind\n" + "".join(rows))
    table = {"target": "kind", "categorical": ["colour"], "missing": "fill"}
    return {
        "task": "tabular_classification",
        "model": {"layers": [LINEAR]},
        "data": {"files": [str(folder / "rows.csv")], "table": table},
    }


def image_job(folder: Path) -> dict[str, Any]:
    draw = np.random.default_rng(5)
    for place, name in enumerate(KINDS[:2]):
        (folder / "pictures" / name).mkdir(parents=True)
        for number in range(6):
            pixels = draw.integers(0, 90, (48, 64, 3)) + np.array([160, 80, 10]) * place
            Image.fromarray(pixels.astype(np.uint8)).save(folder / "pictures" / name / f"{number}.png")
    images = {"height": 48, "width": 64, "channels": 3, "mean": [0.5] * 3, "deviation": [0.5] * 3}
    return {"model": {"layers": [LINEAR]}, "data": {"files": [str(folder / "pictures")], "images": images}}


def text_job(folder: Path) -> dict[str, Any]:
    lines = [
        "to be or not to be, that is the question " * (4 if row == 3 else 1) + str(row) for row in range(20)
    ]
    (folder / "corpus.txt").write_text("\n".join(lines))
    config = {"model_type": "llama", "vocab_size": 300, "hidden_size": 16, "intermediate_size": 32}
    return {
        "model": {"config": {**config, "num_hidden_layers": 2}},
        "data": {"files": [str(folder / "corpus.txt")]},
    }


DATA = {"table": table_job, "images": image_job, "text": text_job}


def preview(page: Page, cluster: Cluster, job: dict[str, Any]) -> None:
    """Open a job in the form, and show its first rows."""
    page.goto(f"{cluster.url}/submit?view=yaml")
    editor, text = page.locator("textarea").first, yaml.safe_dump(job)
    expect(editor).to_have_value(re.compile("kind: train"))  # the example is there, and comes no more
    editor.fill(text)
    expect(editor).to_have_value(text)
    section = page.locator("section").filter(has_text=re.compile("First rows of the data|数据的前几行"))
    section.get_by_role("button").click()
    page.get_by_role("table").wait_for(timeout=PREVIEW_TIMEOUT_MS)


@pytest.mark.parametrize(
    ("kind", "head", "first"),
    thoroughly(
        [
            ("images", "image image", "setosa"),
            ("table", "day number", "20261129"),
            ("text", "text text", "to be or not"),
        ],
        quick=1,
    ),
)
def test_ten_rows_are_shown_in_the_form(
    page: Page, cluster: Cluster, folder: Path, complaints: Complaints, kind: str, head: str, first: str
) -> None:
    preview(page, cluster, DATA[kind](folder))
    rows = page.get_by_role("table").get_by_role("row")
    expect(rows).to_have_count(11)
    assert rows.nth(0).inner_text().replace("\n", " ").startswith(head)
    expect(rows.nth(1)).to_contain_text(first)
    if kind == "images":
        sizes = page.locator("td img").evaluate_all("all => all.map(one => one.naturalWidth)")
        assert sizes == [64] * 10
    # The plan of a job without machines is refused, which the form shows as such.
    assert [text for text in complaints if "Failed to load resource" not in text] == []
    complaints.clear()


def over(store: Store, document: dict[str, Any], events: list[AttemptEvent]) -> JobRecord:
    """Return a job that has succeeded with these events."""
    job = store.jobs.create(parse_job(document))
    store.jobs.begin(job.id, [])
    store.jobs.move(job.id, JobState.running, "running", attempt=1)
    ended = AttemptEnded(outcome="succeeded", reason="all 8 steps are done")
    store.progress.record(job.id, 1, [*events, ended])
    return store.jobs.get(job.id)


def steps(loss: float) -> list[AttemptEvent]:
    return [
        StepCommitted(
            step=step,
            loss=loss / step,
            learning_rate=0.01,
            gradient_norm=1.0,
            samples=32,
            tokens=32,
            seconds=0.01,
            tokens_per_s=3200.0,
        )
        for step in range(1, 9)
    ]


def classifier(store: Store, name: str = "iris", width: int = 10, loss: float = 2.0) -> JobRecord:
    """Return a job with three classes, of which one has a long name."""
    document = {
        "name": name,
        "model": {"layers": [{"type": "linear", "options": {"in_features": 64, "out_features": width}}]},
        "data": {"dataset": "digits"},
        "training": {"steps": 8, "validate_every": 4, "optimizer": {"learning_rate": loss / 100}},
    }
    figures = [
        Validated(split="validation", step=step, loss=loss / step, accuracy=1 - 1 / step) for step in (4, 8)
    ]
    matrix = ((48, 2, 0), (1, 1234, 3), (0, 9, 41))
    pictures = [
        Pictured(split=split, step=8, samples=1338, confusion=matrix, classes=KINDS)
        for split in ("validation", "test")
    ]
    tested = Validated(split="test", step=8, loss=loss / 8, accuracy=0.875, f1=0.81, auroc=0.99)
    return over(store, document, [*steps(loss), *figures, *pictures, tested])


def regression(store: Store) -> JobRecord:
    truth = np.linspace(25, 346, 200)
    noise = np.random.default_rng(1).normal(0, 45, 200)
    points = tuple((float(one), float(one + other)) for one, other in zip(truth, noise, strict=True))
    document = {
        "name": "diabetes",
        "task": "tabular_regression",
        "model": {"layers": [{"type": "linear", "options": {"in_features": 10, "out_features": 1}}]},
        "data": {"files": ["/data/diabetes.csv"], "table": {"target": "target"}},
        "training": {"steps": 8, "validate_every": 4},
    }
    figures = Validated(split="validation", step=8, loss=0.51, rmse=55.1, mae=44.2, r2=0.49)
    picture = Pictured(split="validation", step=8, samples=200, points=points)
    return over(store, document, [*steps(1.0), figures, picture])


def several(store: Store) -> JobRecord:
    """Return a job with two tasks."""
    layers = [{"type": "linear", "options": {"in_features": 64, "out_features": 10}}]
    document = {
        "name": "two tasks",
        "model": {"layers": layers},
        "data": {"dataset": "digits"},
        "tasks": [{"name": "digit", "layers": layers}, {"name": "parity", "layers": layers}],
        "training": {"steps": 8, "validate_every": 4, "batch_size": 32, "microbatches": 4},
    }
    named = {f"{task}.{name}": 0.1 for task in ("digit", "parity") for name in ("loss", "accuracy")}
    figures: list[AttemptEvent] = [
        Validated(
            split="validation", step=step, loss=2 / step, tasks={**named, "digit.accuracy": 1 - 1 / step}
        )
        for step in (4, 8)
    ]
    matrix = tuple(
        tuple(30 if row == column else (row + column) % 3 for column in range(10)) for row in range(10)
    )
    pictures: list[AttemptEvent] = [
        Pictured(task="digit", split="validation", step=8, samples=390, confusion=matrix),
        Pictured(
            task="parity",
            split="validation",
            step=8,
            samples=390,
            confusion=((190, 5), (3, 192)),
            classes=("even", "odd"),
        ),
    ]
    return over(store, document, [*steps(2.0), *figures, *pictures])


def test_predictions_have_the_names_of_classes_and_a_scale(page: Page, cluster: Cluster) -> None:
    job = classifier(cluster.store)
    page.goto(f"{cluster.url}/jobs/{job.id}")
    matrix = page.get_by_role("group", name="Confusion matrix").first
    heads = matrix.get_by_role("columnheader")
    assert [heads.nth(place).inner_text() for place in range(3)] == list(KINDS)
    expect(matrix.get_by_role("row").nth(2)).to_contain_text("1,234")
    page.goto(f"{cluster.url}/jobs/{regression(cluster.store).id}")
    scatter = page.get_by_role("img", name=re.compile("True and predicted values of 200 samples"))
    for text in ("true value", "predicted value", "200", "400"):
        expect(scatter.get_by_text(text, exact=True).first).to_be_visible()


def test_each_task_has_its_curve(page: Page, cluster: Cluster) -> None:
    job = several(cluster.store)
    page.goto(f"{cluster.url}/jobs/{job.id}")
    page.get_by_label("Figure").select_option("digit.accuracy")
    expect(page.get_by_role("img", name=re.compile("digit: Accuracy over steps"))).to_be_visible()
    expect(page.get_by_text("Task parity")).to_be_visible()


def test_two_jobs_are_compared(page: Page, cluster: Cluster) -> None:
    jobs = [classifier(cluster.store, "narrow"), classifier(cluster.store, "wide", 12, 1.0)]
    page.goto(f"{cluster.url}/compare?jobs={','.join(job.id for job in jobs)}")
    results = page.get_by_role("region", name="Results")
    expect(results.get_by_role("row").filter(has_text="Accuracy (test)")).to_contain_text("0.87500")
    differences = page.get_by_role("region", name="Differences of the job files")
    row = differences.get_by_role("row").filter(has_text="model.layers.0.options.out_features")
    expect(row).to_contain_text("10")
    expect(row).to_contain_text("12")
    expect(differences.get_by_role("link", name="wide")).to_have_attribute("href", f"/jobs/{jobs[1].id}")


@appearances("phone", ("en", "zh"))
def test_results_of_all_tasks_can_be_read_by_everybody(
    cluster: Cluster,
    browser: Browser,
    complaints: Complaints,
    tmp_path: Path,
    folder: Path,
    language: str,
    scheme: Any,
    width: int,
) -> None:
    store, name = cluster.store, f"{language}-{scheme}-{width}"
    jobs = [
        classifier(store),
        classifier(store, "an iris with a long name", 12, 1.0),
        regression(store),
        several(store),
    ]
    with checked_pages(
        browser, tmp_path, complaints, scheme=scheme, width=width, locale=LOCALES[language]
    ) as seen:
        page = seen.page
        page.goto(f"{cluster.url}/#key={cluster.key}")
        page.get_by_role("heading", level=1).first.wait_for()
        for job in (jobs[0], jobs[2], jobs[3]):
            page.goto(f"{cluster.url}/jobs/{job.id}")
            page.get_by_role("figure").or_(page.locator("figure")).last.wait_for()
            seen.check(f"results-{job.name}-{name}")
        page.goto(f"{cluster.url}/compare?jobs={','.join(job.id for job in jobs)}")
        page.get_by_role("table").last.wait_for()
        seen.check(f"compare-{name}")
        for kind, make in DATA.items():
            preview(page, cluster, make(folder))
            seen.check(f"preview-{kind}-{name}")
        assert [text for text in complaints if "Failed to load resource" not in text] == []
        complaints.clear()
