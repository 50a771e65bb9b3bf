"""What belongs to the key that made it: a job's files and results, and what others see of a job."""

from __future__ import annotations

from pathlib import Path
from typing import Final, TypeVar

from share_compute.errors import NotFound
from share_compute.specification import with_paths
from share_compute.store import ApiKeyRecord, DeploymentRecord, JobRecord, Store

HIDDEN: Final = Path("hidden")
"""In place of the paths in a specification that is another key's."""
Specified = TypeVar("Specified", JobRecord, DeploymentRecord)


def require_results(store: Store, job_id: str, caller: ApiKeyRecord) -> JobRecord:
    """Return a job whose checkpoints and results the caller may read.

    Raises:
        NotFound: there is no such job, or it is another key's; the two are not told apart.
    """
    try:
        job = store.jobs.get(job_id)
    except NotFound:
        job = None
    if job is None or not caller.owns(job.owner):
        raise NotFound(
            f"there is no job {job_id} with results that this key may read",
            mend="share-compute jobs lists jobs; their results are for the key that submitted them, and for admins",
            job=job_id,
        )
    return job


def shown(record: Specified, caller: ApiKeyRecord) -> Specified:
    """Return a record as the caller may see it: of other keys' without the paths of their data and models."""
    if caller.owns(record.owner):
        return record

    def hidden(path: Path, field: str) -> Path:
        # The suffix says how files are read, and a specification is not valid without it.
        return HIDDEN.with_suffix(path.suffix) if field == "data.files" else HIDDEN

    return record.model_copy(update={"spec": with_paths(record.spec, hidden)})
