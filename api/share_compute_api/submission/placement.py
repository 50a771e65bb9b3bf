"""Checks that the machines that a training job names are known, before the job is queued."""

from __future__ import annotations

from share_compute.files.field_errors import refused
from share_compute.lifecycle.states import HERE, ContributorState
from share_compute.quantities import listed
from share_compute.specification import TrainJob
from share_compute.specification.placement.selection import SelectionSpec
from share_compute.store import ContributorRecord, Store


def check_placement(spec: TrainJob, store: Store) -> None:
    """Check that the machines of a job's pinned plan exist, and that the job's fields agree about each machine.

    Machines need not be free, since the job waits for them. Selectors need not match a machine.

    Args:
        spec: the training job.
        store: the store of contributors.

    Raises:
        UserError: there is no such machine, or ``only`` or the plan names a machine that the job avoids; the error
            names the field.
    """
    plan = spec.parallelism.plan
    records = check_selection(spec.parallelism, store)
    if plan is None:
        return
    # The name of a lost machine may have been reused.
    there = {record.name: record for record in sorted(records, key=lambda one: one.state in HERE)}
    for record in there.values():
        if record.name in plan.names and (why := spec.parallelism.why_not(record)):
            raise refused(
                "parallelism.plan", f"it uses {record.name}, which is {why}", "change one of the two fields"
            )
    absent = [name for name in plan.names if name not in there]
    if absent:
        names = f"there are {listed(sorted(there))}" if there else "no machine has joined"
        raise refused(
            "parallelism.plan",
            f"it names {listed(absent)}, and no such machine has joined; {names}",
            "let it join, or write another plan file with share-compute plan --output",
        )


def check_selection(selection: SelectionSpec, store: Store) -> list[ContributorRecord]:
    """Check that ``only`` and ``avoid`` do not name the same machine, by its name or its id; return all machines.

    Args:
        selection: both fields.
        store: the store of contributors.

    Raises:
        UserError: both name the same machine; the error names the field.
    """
    records = store.contributors.list([*HERE, ContributorState.lost])
    both = selection.disagreement(records)
    if both is not None:
        raise refused(
            "parallelism.avoid",
            f"machine {both} is named by only, too",
            "leave it out of parallelism.only or of parallelism.avoid",
        )
    return records
