"""Checks that the machines that a training job names are known, before the job is queued."""

from __future__ import annotations

from share_compute.lifecycle.states import HERE, ContributorState
from share_compute.quantities import listed
from share_compute.specification import TrainJob
from share_compute.store import Store
from share_compute_api.submission.model_folders import refused


def check_placement(spec: TrainJob, store: Store) -> None:
    """Check that the machines of a job's pinned plan exist; they need not be free, since the job waits for them.

    Args:
        spec: the training job.
        store: the store of contributors.

    Raises:
        UserError: there is no such machine; the error names the field.
    """
    plan = spec.parallelism.plan
    if plan is None:
        return
    known = {record.name for record in store.contributors.list([*HERE, ContributorState.lost])}
    absent = [name for name in plan.names if name not in known]
    if absent:
        there = f"there are {listed(sorted(known))}" if known else "no machine has joined"
        raise refused(
            "parallelism.plan",
            f"it names {listed(absent)}, and no such machine has joined; {there}",
            "let it join, or write another plan file with share-compute plan --output",
        )
