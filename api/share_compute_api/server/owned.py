"""Ownership: only the submitting key and admins see a job's results, and the paths in jobs and deployments."""

from __future__ import annotations

from pathlib import Path
from typing import Final, TypeVar

from share_compute.errors import NotFound
from share_compute.specification import with_paths
from share_compute.specification.paths import DATA_FIELDS
from share_compute.store import ApiKeyRecord, DeploymentRecord, JobRecord, Store

HIDDEN: Final = Path("hidden")
"""Path that replaces every path in a specification when another key reads the specification."""
Specified = TypeVar("Specified", JobRecord, DeploymentRecord)


def require_results(store: Store, job_id: str, caller: ApiKeyRecord) -> JobRecord:
    """Return a job whose checkpoints and results the caller may read.

    Raises:
        NotFound: the job does not exist or belongs to another key; the error is the same in both cases.
    """
    try:
        job = store.jobs.get(job_id)
    except NotFound:
        job = None
    if job is None or not caller.owns(job.owner):
        raise NotFound(
            f"there is no job {job_id} with results that this key may read",
            hint="share-compute jobs lists jobs; their results are for the key that submitted them, and for admins",
            job=job_id,
        )
    return job


def shown(record: Specified, caller: ApiKeyRecord) -> Specified:
    """Return a record without the paths that the caller may not see.

    For callers other than the owner and admins, `HIDDEN` replaces the paths of data, models and tokenizers.
    """
    if caller.owns(record.owner):
        return record

    def hidden(path: Path, field: str) -> Path:
        # Keep the suffix: it determines the file's format, and a specification without a known format is invalid.
        return HIDDEN.with_suffix(path.suffix) if field in DATA_FIELDS else HIDDEN

    return record.model_copy(update={"spec": with_paths(record.spec, hidden)})
