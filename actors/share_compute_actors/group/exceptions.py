"""Exceptions that interrupt a job's coordinator or a deployment's server while it waits for its members."""

from __future__ import annotations

from collections.abc import Collection

from share_compute.protocol.membership import Worker


class Cancelled(Exception):
    """The submitter cancelled the job, or the deployment's replica was stopped."""


class MembersLost(Exception):
    """Members died, became unresponsive or sent invalid data."""

    def __init__(self, workers: Collection[Worker]) -> None:
        super().__init__(", ".join(sorted(workers)))
        self.workers = frozenset(workers)
