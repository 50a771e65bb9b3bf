"""Writes the curves of one training job in the format of another program, in this process.

``python -m share_compute_api.workers.reporting`` reads a `ReportRequest` as JSON from standard input. Nothing is sent
over the network.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from share_compute.files.strict import StrictModel
from share_compute.specification.job import Report

_NO_SERIES = frozenset({"step", "split"})
_MLFLOW_BATCH = 1000
"""Most values in one call of MLflow."""
_MLFLOW_PARAMETERS = 100
"""Most parameters in one call of MLflow."""


class ReportRequest(StrictModel):
    """Request to write one report."""

    report: Report
    rows: Path
    """File with the rows of the job's series, one JSON object in each line."""
    folder: Path
    """Folder to write to."""
    job_id: str
    name: str
    """Name of the job."""
    began_s: float
    """Time at which the job began, in seconds since 1970."""
    settings: dict[str, Any]
    """Fields of the job."""


def main() -> None:
    """Answer one request from standard input."""
    request = ReportRequest.model_validate_json(sys.stdin.read())
    write = {"tensorboard": _write_tensorboard, "mlflow": _write_mlflow, "wandb": _write_wandb}[
        request.report
    ]
    write(request)


def _rows(request: ReportRequest) -> Iterator[tuple[int, float, dict[str, float]]]:
    """Yield (step, time, values by ``split/name``) for each row. The time is the sum of the steps' durations."""
    at_s = request.began_s
    with request.rows.open(encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            at_s += row.get("seconds") or 0.0
            values = {
                f"{row['split']}/{name}": float(value)
                for name, value in row.items()
                if name not in _NO_SERIES and isinstance(value, int | float)
            }
            yield row["step"], at_s, values


def _write_tensorboard(request: ReportRequest) -> None:
    from tensorboard.compat.proto import event_pb2, summary_pb2
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(request.folder))
    try:
        for step, at_s, values in _rows(request):
            summary = summary_pb2.Summary(
                value=[
                    summary_pb2.Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()
                ]
            )
            writer.add_event(event_pb2.Event(wall_time=at_s, step=step, summary=summary))
    finally:
        writer.close()


def _write_mlflow(request: ReportRequest) -> None:
    """Write a run into an SQLite database, the store that MLflow recommends for local files."""
    from mlflow.entities import Metric, Param
    from mlflow.tracking import MlflowClient

    request.folder.mkdir(parents=True, exist_ok=True)
    client = MlflowClient(tracking_uri=f"sqlite:///{request.folder / 'mlflow.db'}")
    # The default would be a folder on the server. With this location, the submitter's `mlflow ui` stores files that
    # they add.
    experiment = client.create_experiment(
        "share-compute", artifact_location="mlflow-artifacts:/share-compute"
    )
    run = client.create_run(
        experiment,
        start_time=int(request.began_s * 1000),
        tags={"share_compute.job": request.job_id, "mlflow.user": ""},
        run_name=request.name,
    ).info.run_id
    parameters = (Param(name, value) for name, value in _flat(request.settings))
    while some := list(islice(parameters, _MLFLOW_PARAMETERS)):
        client.log_batch(run, params=some)
    ended_s = request.began_s

    metrics = (
        Metric(name, value, int((ended_s := at_s) * 1000), step)
        for step, at_s, values in _rows(request)
        for name, value in values.items()
    )
    while chunk := list(islice(metrics, _MLFLOW_BATCH)):
        client.log_batch(run, metrics=chunk)
    client.set_terminated(run, end_time=int(ended_s * 1000))


def _flat(settings: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (``a.b``, value) for each field. Values that MLflow could not name or show are JSON."""
    for name, value in settings.items():
        if isinstance(value, dict) and value and all(re.fullmatch(r"[\w-]+", key, re.ASCII) for key in value):
            yield from _flat(value, f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name}", value if isinstance(value, str) else json.dumps(value)


def _write_wandb(request: ReportRequest) -> None:
    import wandb

    settings = wandb.Settings(
        silent=True,
        console="off",
        disable_git=True,
        disable_code=True,
        # The packages, hardware and load would be those of the server, not the submitter's.
        x_disable_machine_info=True,
        x_disable_meta=True,
        x_disable_stats=True,
        x_save_requirements=False,
    )
    run = wandb.init(
        mode="offline",
        dir=str(request.folder),
        project="share-compute",
        id=request.job_id,
        name=request.name,
        config=request.settings,
        settings=settings,
    )
    for step, _, values in _rows(request):
        run.log(values, step=step)
    run.finish()


if __name__ == "__main__":
    main()
