"""Ownership: only the submitting key and admins see a job's results, paths, and the causes of failed links."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, TypeVar

from share_compute.errors import NotFound
from share_compute.specification import with_paths
from share_compute.specification.paths import names_file
from share_compute.store import (
    ApiKeyRecord,
    DeploymentRecord,
    EventRecord,
    JobRecord,
    LinkRecord,
    LinkState,
    Store,
)

LINK_EVENT: Final = "link"
"""Kind of the events that report changes of links."""
HIDDEN: Final = Path("hidden")
"""Path that replaces every path in a specification when another key reads the specification."""
_HIDDEN_FAILURE: Final = (
    "it could not be started; only the key that submitted the job, and admins, see the cause"
)
"""Reason of a failed link when another key reads it, because the stored reason may name files."""
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

    For callers other than the owner and admins, `HIDDEN` replaces the paths of data, models and tokenizers, and the
    causes of failed links are left out.
    """
    if caller.owns(record.owner):
        return record

    def hidden(path: Path, field: str) -> Path:
        # Keep the suffix: it determines the file's format, and a specification without a known format is invalid.
        return HIDDEN.with_suffix(path.suffix) if names_file(field) else HIDDEN

    changed: dict[str, Any] = {"spec": with_paths(record.spec, hidden)}
    if isinstance(record, JobRecord):
        changed["links"] = tuple(_shown_link(link) for link in record.links)
    return record.model_copy(update=changed)


def _shown_link(link: LinkRecord) -> LinkRecord:
    if link.state is not LinkState.failed:
        return link
    code = (link.error or {}).get("code", "")
    return link.model_copy(update={"reason": _HIDDEN_FAILURE, "error": {"code": code}})


def shown_events(events: Iterable[EventRecord], store: Store, caller: ApiKeyRecord) -> list[EventRecord]:
    """Return events without the causes of failed links of jobs that the caller does not own."""
    return [_shown_event(event, store, caller) for event in events]


def _shown_event(event: EventRecord, store: Store, caller: ApiKeyRecord) -> EventRecord:
    if event.kind != LINK_EVENT or event.data.get("state") != LinkState.failed or event.job_id is None:
        return event
    try:
        is_owner = caller.owns(store.jobs.get(event.job_id).owner)
    except NotFound:
        is_owner = caller.owns(None)
    if is_owner:
        return event
    code = event.data.get("error", {}).get("code", "")
    return event.model_copy(
        update={"data": {**event.data, "reason": _HIDDEN_FAILURE, "error": {"code": code}}}
    )
