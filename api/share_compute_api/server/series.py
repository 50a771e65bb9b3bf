"""Series of a training job as rows, for the curves on its page."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from share_compute.specification import TrainJob
from share_compute.specification.task import METRICS, METRICS_BESIDE_LOSS, figure_of
from share_compute.store import MetricRecord, Store

COLUMNS: dict[str, type[int | float | str]] = {
    "step": int,
    "split": str,
    "loss": float,
    "learning_rate": float,
    "gradient_norm": float,
    "samples": int,
    "tokens": int,
    "seconds": float,
    "tokens_per_s": float,
    **dict.fromkeys(METRICS_BESIDE_LOSS, float),
    "sent_bytes": int,
    "received_bytes": int,
}
"""Columns of all series. ``split`` is train, validation, test, or traffic, whose rows have only bytes."""
ROWS = 5_000
"""Number of rows that are read at a time."""


def columns_of(spec: TrainJob) -> dict[str, type[int | float | str]]:
    """Return the columns of a job's series: with several tasks, also the loss and metrics of each task."""
    named = {
        figure_of(task.name, "loss" if metric == "validation_loss" else metric): float
        for task, single in zip(spec.tasks, spec.single_tasks, strict=bool(spec.tasks))
        for metric in METRICS[single.resolved_task]
    }
    return {**COLUMNS, **named}


def rows_of(store: Store, job_id: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each step and split of a job's metrics, in order, and for each report of traffic.

    Rows of traffic have the bytes of all machines since the previous row of traffic.
    """
    traffic = iter(sorted(store.progress.traffic(job_id).items()))
    due = next(traffic, None)
    for metric in chain(_metrics(store, job_id), [None]):
        while due is not None and (metric is None or due[0] < metric.step):
            step, (sent, received) = due
            yield {"step": step, "split": "traffic", "sent_bytes": sent, "received_bytes": received}
            due = next(traffic, None)
        if metric is not None:
            yield {
                "step": metric.step,
                "split": metric.split,
                **metric.data,
                **(metric.data.get("tasks") or {}),
            }


def _metrics(store: Store, job_id: str) -> Iterator[MetricRecord]:
    last: MetricRecord | None = None
    while metrics := store.progress.metrics_after(job_id, last, limit=ROWS):
        yield from metrics
        last = metrics[-1]
