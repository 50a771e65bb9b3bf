"""Sparse models on real machines, through the control plane: killed processes, cancelled and resumed jobs, results."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score
from tests.conftest import descendants, run_contributor
from tests.planted import planted_files

from share_compute.errors import UserError
from share_compute.lifecycle.states import JobState
from share_compute.sparse.blocks import block_of
from share_compute.sparse.models import Logistic
from share_compute.sparse.readers.libsvm import libsvm_blocks
from share_compute.sparse.results import load_rows, weights_for
from share_compute.store import JobRecord

pytestmark = [pytest.mark.slow, pytest.mark.chaos]
ROWS, FEATURES = 2000, 60
PASSES = 180
"""So many passes that a job still runs when a busy machine has found its processes after the first steps."""


@pytest.fixture(scope="module")
def machines(server: Any) -> Iterator[list[Any]]:
    with ExitStack() as stack, ThreadPoolExecutor() as threads:
        yield list(threads.map(lambda _: stack.enter_context(run_contributor(server)), range(2)))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Rows of a planted model, for training and validation."""
    return planted_files(tmp_path_factory.mktemp("rows"), np.random.default_rng(0), ROWS, FEATURES)


def job(model: dict[str, Any], files: dict[str, str], **training: Any) -> dict[str, Any]:
    data: dict[str, Any] = {"files": [files["train"]], "validation_files": [files["validation"]]}
    return {"kind": "sparse", "model": model, "data": data, "training": training}


def ended(client: Any, job_id: str, wait_for: Any) -> JobRecord:
    def over() -> JobRecord | None:
        record = client.job(job_id)
        return record if record.state.is_final else None

    found: JobRecord = wait_for(over, "the end of the job")
    return found


def jobs_of(client: Any, machines: list[Any]) -> set[str | None]:
    """Return the jobs of these machines; the server may also know machines of earlier tests."""
    ids = {machine.record.id for machine in machines}
    return {one.job_id for one in client.contributors() if one.id in ids}


def test_a_killed_worker_is_replaced_and_the_result_is_an_artifact(
    server: Any, machines: list[Any], files: dict[str, str], wait_for: Any, tmp_path: Path
) -> None:
    with server.client() as client:
        spec = job({"name": "logistic", "l2": 1e-3}, files, passes=PASSES, batch_size=50, staleness=1)
        job_id = client.submit(spec).id
        wait_for(lambda: client.job(job_id).step > 20, "steps")
        record = client.job(job_id)
        assert record.state is JobState.running
        assert record.total_steps == PASSES * ROWS // 2 // 50
        assert jobs_of(client, machines) == {job_id}
        workers = [
            process
            for machine in machines
            for process in descendants("ray::SparseRows", machine.command.process.pid)
        ]
        assert len(workers) == 2
        workers[0].kill()
        record = ended(client, job_id, wait_for)
        assert (record.state, record.attempt) == (JobState.succeeded, 1), record.reason
        assert record.step == record.total_steps
        assert "2 workers and 1 server" in next(
            event.data["sentence"] for event in client.events(job_id).events if event.kind == "ranges-placed"
        )
        validated = [one.data for one in client.metrics(job_id) if one.split == "validation"]
        assert len(validated) > 1
        assert validated[-1]["loss"] < validated[0]["loss"]
        assert len([one for one in client.metrics(job_id) if one.split == "train"]) > 1
        [artifact] = client.artifacts(job_id)
        client.download(job_id, "model", tmp_path / "result")
        assert artifact.size_bytes > 0
        assert jobs_of(client, machines) == {None}
    [file] = list((tmp_path / "result").rglob("*.safetensors"))
    _, rows = load_rows(file)
    [raw] = libsvm_blocks(Path(files["validation"]))
    block = block_of(raw, with_bias=True)
    scores = Logistic().scores(block, weights_for(rows, block.places))
    assert roc_auc_score(raw.targets > 0, scores) == pytest.approx(validated[-1]["auroc"], abs=1e-6)
    assert validated[-1]["auroc"] > 0.8


def test_a_job_is_cancelled_and_resumed(
    server: Any, machines: list[Any], files: dict[str, str], wait_for: Any
) -> None:
    assert len(machines) == 2
    with server.client() as client:
        spec = job({"name": "logistic"}, files, passes=10_000, batch_size=50)
        job_id = client.submit(spec).id
        wait_for(lambda: client.job(job_id).step > 5, "steps")
        client.cancel(job_id)
        assert ended(client, job_id, wait_for).state is JobState.cancelled
        client.resume(job_id)
        wait_for(lambda: client.job(job_id).step > 5, "steps")
        assert client.job(job_id).attempt == 2
        client.cancel(job_id)
        assert ended(client, job_id, wait_for).state is JobState.cancelled


def test_wrong_rows_are_refused_with_their_line(server: Any, files: dict[str, str]) -> None:
    bad = Path(files["train"]).with_name("bad.libsvm")
    bad.write_text("1 3:1\n0 -3:1\n")
    with server.client() as client, pytest.raises(UserError, match="line 2: key -3 is negative") as caught:
        client.submit(job({"name": "logistic"}, {**files, "train": str(bad)}))
    assert caught.value.hint
