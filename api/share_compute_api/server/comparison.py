"""Compares jobs: their results, and the fields in which their job files differ."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from share_compute.specification.task import METRICS_BESIDE_LOSS
from share_compute.store import JobRecord, Store
from share_compute_api.schemas.labels import ComparedJob, FieldDifference, JobComparison

_LABELS = ("name", "tags", "group")
"""Fields that are no settings of a job."""


def compared(store: Store, jobs: Sequence[JobRecord]) -> JobComparison:
    """Return the comparison of some jobs.

    Args:
        store: the store of the jobs' metrics.
        jobs: the jobs, without paths that the caller may not see.
    """
    results = results_of(store, [job.id for job in jobs])
    return JobComparison(
        jobs=[_job(job, results.get(job.id, {})) for job in jobs], differences=differences(jobs)
    )


def _job(job: JobRecord, results: dict[str, float]) -> ComparedJob:
    seconds = None
    if job.started_at is not None and job.finished_at is not None:
        seconds = (job.finished_at - job.started_at).total_seconds()
    return ComparedJob(
        id=job.id,
        name=job.name,
        state=job.state,
        tags=job.tags,
        group=job.group,
        step=job.step,
        total_steps=job.total_steps,
        seconds=seconds,
        tokens_per_s=job.tokens_per_s,
        results=results,
    )


def results_of(store: Store, job_ids: Collection[str]) -> dict[str, dict[str, float]]:
    """Return {job id: last metrics by name}; jobs without metrics are missing.

    Names are ``loss`` for training, and those of the splits with the prefix ``validation_`` or ``test_``.
    """
    return {job_id: _results(latest) for job_id, latest in store.progress.latest(job_ids).items()}


def _results(latest: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for split, data in latest.items():
        names = ("loss",) if split == "train" else ("loss", *METRICS_BESIDE_LOSS)
        prefix = "" if split == "train" else f"{split}_"
        found |= {prefix + name: data[name] for name in names if data.get(name) is not None}
        found |= {prefix + name: value for name, value in (data.get("tasks") or {}).items()}
    return found


def differences(jobs: Sequence[JobRecord]) -> list[FieldDifference]:
    """Return the fields that are not the same in all job files, in the order of the job file."""
    flat = [dict(_leaves(job.spec.model_dump(mode="json", exclude=set(_LABELS)))) for job in jobs]
    names = dict.fromkeys(name for leaves in flat for name in leaves)
    # Ranks keep a part's fields together if only some job files have them.
    rank: dict[str, int] = {}
    for name in names:
        for part in _parts(name):
            rank.setdefault(part, len(rank))
    found = []
    for field in sorted(names, key=lambda name: [rank[part] for part in _parts(name)]):
        # If a part above a field is null in a job file, the missing field is shown as null, too.
        values = [leaves.get(field) for leaves in flat]
        if any(value != values[0] for value in values):
            found.append(FieldDifference(field=field, values=values))
    return found


def _parts(name: str) -> Iterator[str]:
    """Yield ``a``, ``a.b`` and ``a.b.c`` for the name ``a.b.c``."""
    return accumulate(name.split("."), "{}.{}".format)


def _leaves(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaf fields by their dotted names, as in sweeps: ``model.layers.0.options.bias``."""
    for name, value in node.items():
        if isinstance(value, list) and any(isinstance(part, dict) for part in value):
            yield from _leaves(dict(zip(map(str, range(len(value))), value, strict=True)), f"{prefix}{name}.")
        elif isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
