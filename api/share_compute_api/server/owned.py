"""Ownership: a job's files and results belong to the key that submitted the job; other keys see a redacted record."""

from __future__ import annotations

from pathlib import Path
from typing import Final, TypeVar

from share_compute.errors import NotFound
from share_compute.specification import with_paths
from share_compute.store import ApiKeyRecord, DeploymentRecord, JobRecord, Store

HIDDEN: Final = Path("hidden")
"""Replaces each path in a specification that is shown to another key."""
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
    """Return a record as the caller may see it.

    Only the owner and admins see paths of data, models and tokenizers; others see `HIDDEN` instead.
    """
    if caller.owns(record.owner):
        return record

    def hidden(path: Path, field: str) -> Path:
        # The suffix is kept, because it gives the files' format, without which the specification is not valid.
        return HIDDEN.with_suffix(path.suffix) if field == "data.files" else HIDDEN

    return record.model_copy(update={"spec": with_paths(record.spec, hidden)})
