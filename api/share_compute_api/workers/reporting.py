"""Writes the curves of one training job in the format of another program, in this process.

``python -m share_compute_api.workers.reporting`` reads a `ReportRequest` as JSON from standard input. Nothing is sent
over the network.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from share_compute.files.strict import StrictModel
from share_compute.specification.job import Report

_NO_SERIES = frozenset({"step", "split"})


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
    write = {"tensorboard": _write_tensorboard, "wandb": _write_wandb}[request.report]
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


def _write_wandb(request: ReportRequest) -> None:
    import wandb

    settings = wandb.Settings(
        silent=True,
        console="off",
        disable_git=True,
        disable_code=True,
        # The server's packages, hardware and load are not the submitter's.
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
