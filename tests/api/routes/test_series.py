"""Series of jobs as files: all formats agree, pieces are bounded, and a full disk leaves no half file."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from pyarrow import parquet
from tests.api.conftest import Plane
from tests.api.playing import falling_step

from share_compute.files.series import SeriesFormat, write_series
from share_compute.lifecycle.attempt_events import LinkBytes, StepCommitted, TrafficMeasured, Validated
from share_compute.lifecycle.states import JobState
from share_compute_api.server.series import COLUMNS, rows_of

FORMATS: tuple[SeriesFormat, ...] = ("csv", "json", "parquet")


def traffic(number: int, sent: int) -> TrafficMeasured:
    return TrafficMeasured(step=number, machines={"ada": LinkBytes(sent_bytes=sent, received_bytes=7)})


@pytest.fixture
def job_id(plane: Plane, http: httpx.Client, digits: dict[str, Any]) -> str:
    made = str(http.post("/jobs", json=digits).json()["id"])
    store = plane.store
    store.jobs.begin(made, [])
    store.jobs.move(made, JobState.running, "running", attempt=1)
    validated = Validated(split="validation", step=2, loss=0.25, accuracy=0.5)
    events = [
        falling_step(1),
        traffic(1, 10),
        falling_step(2),
        validated,
        traffic(3, 20),
        falling_step(3),
        traffic(3, 5),
    ]
    store.progress.record(made, 1, events)
    return made


def read(format_: SeriesFormat, content: bytes) -> list[dict[str, Any]]:
    if format_ == "json":
        return list(json.loads(content))
    if format_ == "parquet":
        rows = parquet.read_table(io.BytesIO(content)).to_pylist()
        return [{name: value for name, value in row.items() if value is not None} for row in rows]
    return [
        {name: COLUMNS[name](value) for name, value in row.items() if value}
        for row in csv.DictReader(io.StringIO(content.decode()))
    ]


@pytest.mark.parametrize("format_", FORMATS)
def test_all_formats_have_the_curves_of_the_page(
    format_: SeriesFormat, http: httpx.Client, job_id: str
) -> None:
    answer = http.get(f"/jobs/{job_id}/metrics/file", params={"format": format_})
    assert answer.headers["content-disposition"].endswith(f'"{job_id}-metrics.{format_}"')
    rows = read(format_, answer.content)
    assert [(row["step"], row["split"]) for row in rows] == [
        (1, "train"), (1, "traffic"), (2, "train"), (2, "validation"), (3, "train"), (3, "traffic"),
    ]  # fmt: skip
    assert rows[0]["loss"] == 1.0
    assert rows[0]["tokens_per_s"] == 4.0
    assert rows[1] == {"step": 1, "split": "traffic", "sent_bytes": 10, "received_bytes": 7}
    assert rows[3] == {"step": 2, "split": "validation", "loss": 0.25, "accuracy": 0.5}
    assert rows[5]["sent_bytes"] == 25


def test_no_metric_lacks_a_column() -> None:
    ours = {name for model in (StepCommitted, Validated) for name in model.model_fields}
    assert ours - {"type", "tasks"} <= set(COLUMNS)


@pytest.mark.parametrize("format_", FORMATS)
def test_a_job_without_metrics_has_an_empty_file(
    format_: SeriesFormat, http: httpx.Client, digits: dict[str, Any]
) -> None:
    made = http.post("/jobs", json=digits).json()["id"]
    assert read(format_, http.get(f"/jobs/{made}/metrics/file", params={"format": format_}).content) == []
    assert http.get("/jobs/job-none/metrics/file").status_code == 404
    assert http.get(f"/jobs/{made}/metrics/file", params={"format": "xml"}).status_code == 422


@pytest.mark.parametrize("format_", FORMATS)
def test_rows_are_never_all_in_memory(format_: SeriesFormat) -> None:
    """The largest piece, and the memory, do not grow with the number of rows."""

    def rows(count: int) -> Iterator[dict[str, Any]]:
        return ({"step": number, "split": "train", "loss": 0.5} for number in range(count))

    for _ in write_series(rows(30_000), COLUMNS, format_):
        pass  # imports
    peaks = []
    for count in (50_000, 200_000):
        tracemalloc.start()
        pieces = [len(piece) for piece in write_series(rows(count), COLUMNS, format_)]
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert len(pieces) > count // 25_000
    assert peaks[1] < 1.5 * peaks[0]


def test_pages_of_the_store_are_joined(plane: Plane, job_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = list(rows_of(plane.store, job_id))
    monkeypatch.setattr("share_compute_api.server.series.ROWS", 1)
    assert list(rows_of(plane.store, job_id)) == whole


@pytest.mark.slow
def test_a_file_is_whole_or_missing(plane: Plane, run: Any, job_id: str, tmp_path: Path) -> None:
    target = tmp_path / "curves.parquet"
    done = run("metrics", job_id, "--output", str(target))
    assert done.returncode == 0, done.stderr
    assert len(parquet.read_table(target)) == 6
    assert run("metrics", job_id, "--output", str(tmp_path / "curves.txt")).returncode == 2
    assert len(json.loads(run("metrics", job_id, "--format", "json").stdout)) == 6
    program = Path(sys.executable).with_name("share-compute")
    full = subprocess.run(
        # A limit on the size of files acts as a full disk.
        ["bash", "-c", f"ulimit -f 0; {program} metrics {job_id} --output {tmp_path}/full.csv"],
        env={**os.environ, "SHARE_COMPUTE_URL": plane.url, "SHARE_COMPUTE_API_KEY": plane.api_key},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert full.returncode != 0
    assert "full.csv cannot be written" in full.stderr
    assert not list(tmp_path.glob("*full*"))
