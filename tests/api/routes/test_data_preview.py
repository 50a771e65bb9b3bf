"""The first rows of a job's data, through REST and the command line."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest
from pyarrow import parquet

from share_compute_api.client.client import Client

LINEAR = {"type": "linear", "options": {"in_features": 1, "out_features": 2}}


def job(**data: Any) -> dict[str, Any]:
    return {"model": {"layers": [LINEAR]}, "data": data}


@pytest.fixture
def table(tmp_path: Path) -> Path:
    file = tmp_path / "rows.csv"
    file.write_text("size,kind\n" + "".join(f"{row},{'ab'[row % 2]}\n" for row in range(30)))
    return file


def png(width: int, height: int) -> bytes:
    """Return a PNG file with one row of pixels, whatever size its header states."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        body = kind + content
        return struct.pack(">I", len(content)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        (chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(bytes(width + 1))), chunk(b"IEND", b""))
    )


def test_a_preview_has_the_first_rows_of_each_task(http: httpx.Client, table: Path) -> None:
    wanted = {"task": "tabular_classification", **job(files=[str(table)], table={"target": "kind"})}
    found = http.post("/jobs/preview", json=wanted).json()
    assert found["tasks"][0]["task"] is None
    preview = found["tasks"][0]["data"]
    assert [column["kind"] for column in preview["columns"]] == ["number", "class"]
    assert preview["rows"][:2] == [[0.0, "a"], [1.0, "b"]]
    assert len(preview["rows"]) == 10
    own = {
        "files": [str(table)],
        "table": {"target": "size", "features": ["kind"], "categorical": ["kind"]},
    }
    several = {
        **job(files=[str(table)], table={"target": "kind"}),
        "tasks": [
            {"name": "kind", "task": "tabular_classification", "layers": [LINEAR]},
            {"name": "size", "task": "tabular_regression", "layers": [LINEAR], "data": own},
        ],
        "training": {"batch_size": 2, "microbatches": 2},
    }
    digits = http.post("/jobs/preview", json=job(dataset="digits")).json()["tasks"][0]["data"]
    assert len(digits["rows"]) == 10
    found = http.post("/jobs/preview", json=several).json()
    assert [one["task"] for one in found["tasks"]] == ["kind", "size"]
    assert found["tasks"][1]["data"]["rows"][1] == ["b", 1.0]
    assert http.get("/jobs").json()["jobs"] == []


def test_errors_are_those_of_a_submission(http: httpx.Client, tmp_path: Path, table: Path) -> None:
    wrong = [
        {"task": "tabular_classification", **job(files=[str(table)], table={"target": "knid"})},
        {"task": "tabular_classification", **job(files=[str(tmp_path / "no.csv")], table={"target": "kind"})},
        job(files=["/etc/passwd"], labels={}),
        {**job(dataset="digits"), "name": ""},
    ]
    for each in wrong:
        preview, submitted = http.post("/jobs/preview", json=each), http.post("/jobs", json=each)
        assert preview.status_code == submitted.status_code == 422
        assert preview.json()["detail"] == submitted.json()["detail"]
    deployment = {"kind": "serve", "name": "x", "model": {"path": "/x"}, "replicas": 1}
    assert "deployment, not for a job" in http.post("/jobs/preview", json=deployment).json()["detail"]


def test_a_value_that_training_would_refuse_is_refused(http: httpx.Client, table: Path) -> None:
    wanted = {"task": "tabular_regression", **job(files=[str(table)], table={"target": "kind"})}
    answer = http.post("/jobs/preview", json=wanted)
    assert answer.status_code == 422
    assert "'a' in row 1, which is not a number" in answer.json()["detail"]


def test_hostile_files_are_refused(http: httpx.Client, tmp_path: Path, client: Client) -> None:
    place = tmp_path / "pictures" / "a"
    place.mkdir(parents=True)
    (place / "1.png").write_bytes(png(60_000, 60_000))
    images = job(files=[str(place.parent)], images={"height": 8, "width": 8})
    answer = http.post("/jobs/preview", json=images)
    assert answer.status_code == 422
    assert "has 3600000000 pixels; at most 67108864 are read" in answer.json()["detail"]
    (place / "1.png").write_bytes(png(4, 1))
    (cell, name) = client.preview_data(images).tasks[0].data.rows[0]
    assert base64.b64decode(str(cell)).startswith(b"\x89PNG")
    assert name == "a"
    values = pa.DictionaryArray.from_arrays(pa.array([0] * (1 << 20), pa.int32()), ["x" * (1 << 16)])
    parquet.write_table(pa.table({"text": values}), tmp_path / "bomb.parquet")  # 64 GiB when decoded
    model = {"config": {"model_type": "llama"}}
    bomb = {"model": model, "data": {"files": [str(tmp_path / "bomb.parquet")]}}
    found = http.post("/jobs/preview", json=bomb).json()
    assert [len(row[0]) for row in found["tasks"][0]["data"]["rows"]] == [400] * 10
    deep = tmp_path / "deep.jsonl"
    deep.write_text('{"text": ' + "[" * 100_000)
    answer = http.post("/jobs/preview", json={"model": model, "data": {"files": [str(deep)]}})
    assert answer.status_code == 422
    assert "is not JSON" in answer.json()["detail"]


def test_the_command_prints_a_table(run: Callable[..., Any], table: Path) -> None:
    text = f"task: tabular_classification\nmodel: {{layers: [{json.dumps(LINEAR)}]}}\n"
    text += f"data: {{files: [{table}], table: {{target: kind}}}}\n"
    done = run("preview-data", "-", text=text)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["size", "(number)", "kind", "(class,", "target)"]
    assert lines[2].split() == ["1", "b"]
    assert len(lines) == 11
    table.write_text("size,kind\n20261129,a\n0.333333333,b\n1234567.891,a\n,b\n")
    text = text.replace("target: kind", "target: kind, missing: fill")
    numbers = [line.split()[0] for line in run("preview-data", "-", text=text).stdout.splitlines()[1:]]
    assert numbers == ["20261129", "0.333333", "1234568", "-"]
    table.write_text("size,kind\n0,a\n")
    found = json.loads(run("preview-data", "-", "--json", text=text).stdout)
    assert found["tasks"][0]["data"]["rows"][0] == [0.0, "a"]
