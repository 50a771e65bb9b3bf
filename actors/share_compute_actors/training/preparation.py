"""Prepares the data of a training job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray

from share_compute.errors import ContributorLost
from share_compute_actors.group.answering import ask_shard_store
from share_compute_actors.group.control_requests import ControlRequests
from share_compute_actors.group.exceptions import Cancelled
from share_compute_actors.training.shard_store import FACTS, PROGRESS, ShardStoreFacts


def prepare(shard_store: Any, requests: ControlRequests, note: Callable[[str], None]) -> ShardStoreFacts:
    """Have the shard store prepare the data, and return the facts that it returns.

    Args:
        shard_store: the shard store's actor.
        requests: control requests, which may end the wait.
        note: called with each line for the job's log.

    Raises:
        Cancelled: the submitter cancelled the job.
        ContributorLost: a suspension was requested.
        ShareComputeError: the data cannot be prepared.
    """
    ref = shard_store.prepare.remote()
    reported = ""
    while not ray.wait([ref], timeout=1.0)[0]:
        if requests.cancelled.is_set():
            raise Cancelled
        if requests.suspended.is_set():
            raise suspended("while its data was prepared")
        what, _ = ask_shard_store(PROGRESS, shard_store.progress.remote())
        if what != reported:
            reported = what
            note(what)
    facts = ask_shard_store(FACTS, ref)
    for line in facts.notes:
        note(line)
    return facts


def suspended(when: str) -> ContributorLost:
    """Return the error that ends an attempt whose suspension was requested; another attempt continues the job.

    Args:
        when: point at which the attempt ends, such as "after step 7".
    """
    return ContributorLost(f"suspended {when}", hint="it continues by itself")
