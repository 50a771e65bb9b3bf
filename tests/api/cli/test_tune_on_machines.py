"""``share-compute tune`` on a real machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from share_compute.specification import parse_job

pytestmark = pytest.mark.slow


@pytest.mark.thorough
def test_a_job_is_measured_on_the_machines_that_are_there(
    server: Any, contributor: Any, run_command: Any, tmp_path: Path
) -> None:
    del contributor
    job = {
        "model": {"layers": [{"type": "linear", "options": {"in_features": 64, "out_features": 10}}]},
        "data": {"dataset": "digits"},
        "training": {"batch_size": 32, "microbatches": 16},
    }
    file, output = tmp_path / "job.yaml", tmp_path / "fast.yaml"
    file.write_text(yaml.safe_dump(job))
    variables = {"SHARE_COMPUTE_URL": server.url, "SHARE_COMPUTE_API_KEY": server.api_key}
    words = ("tune", str(file), "--steps", "8", "--output", str(output), "--json")
    with run_command(tmp_path, *words, **variables) as command:
        assert command.process.wait(800) == 0, command.text()
        found = json.loads(command.text())
    assert all(one["step_s"] > 0 for one in found["runs"])
    assert {one["settings"]["precision"] for one in found["runs"]} == {"float32", "bfloat16"}
    assert {one["settings"]["microbatches"] for one in found["runs"]} >= {16, 32}
    best, tuned = found["runs"][found["best"]]["settings"], parse_job(output.read_text())
    assert tuned.training.microbatches == best["microbatches"]
    assert tuned.training.precision == best["precision"]
    with server.client() as client:
        assert client.jobs(tags=["tuning"]).jobs == []
