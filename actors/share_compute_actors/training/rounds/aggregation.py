"""Interface for merging the contributions of branches, and its implementation on the server."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Protocol

from share_compute.errors import VerificationFailed
from share_compute.synchronization.aggregator import Aggregator
from share_compute.synchronization.records import BranchRun, MergeRecord
from share_compute.topology import Topology
from share_compute_actors.training.rounds.messages import BranchReport, RangeAddress


class MergeListener(Protocol):
    """Receives what an `Aggregation` has done."""

    def accept(self, report: BranchReport, digest: str) -> None:
        """Handle a contribution that was checked and stored."""

    def refuse(self, report: BranchReport, failure: VerificationFailed) -> None:
        """Handle a damaged contribution."""

    def request_again(self, report: BranchReport) -> None:
        """Handle a contribution of which a part was lost before it was accepted."""

    def restart_round(self, why: str) -> None:
        """Handle the loss of contributions that were accepted."""

    def commit(self, record: MergeRecord, distance: float | None) -> None:
        """Handle a merge that was computed and stored: write its record."""


class Aggregation(Protocol):
    """Stores contributions of branches, and computes their merges. Calls the listener during its own methods."""

    def take(self, report: BranchReport) -> None:
        """Check and store the contribution that a branch reports."""

    def drop(self, report: BranchReport) -> None:
        """Remove a contribution that is merged or not used."""

    def merge(
        self, record: MergeRecord, reports: Mapping[BranchRun, BranchReport], facts: Mapping[str, Any]
    ) -> None:
        """Compute a merge of accepted contributions.

        Args:
            record: record of the merge.
            reports: report of each run in the record.
            facts: training state after the merge.
        """

    def poll(self) -> None:
        """Process everything that has happened since the last call."""

    def offer(self, topology: Topology, leaving: Collection[str]) -> None:
        """Use these machines, except those that are leaving."""

    def sources(self, version: int) -> tuple[tuple[RangeAddress, ...], dict[str, tuple[int, str]]]:
        """Return `BranchUpdate.servers` and `BranchUpdate.payloads` of an update."""

    def prune(self, version: int, oldest_base: int, loading: Iterable[int]) -> None:
        """Remove files that are no longer needed; see `Aggregator.prune`."""

    def close(self, *, is_over: bool, keeps: bool) -> None:
        """End processes on other machines.

        Args:
            is_over: whether no other attempt continues with these processes.
            keeps: whether another attempt continues the job.
        """


class ServerAggregation:
    """Merges all contributions on the server, in its folder.

    Args:
        aggregator: the weights.
        listener: receives the results.
    """

    def __init__(self, aggregator: Aggregator, listener: MergeListener) -> None:
        self._aggregator = aggregator
        self._listener = listener

    def take(self, report: BranchReport) -> None:
        """See `Aggregation.take`."""
        assert report.folder is not None
        try:
            digest = self._aggregator.check(report.run, report.folder)
        except VerificationFailed as failure:
            self._listener.refuse(report, failure)
        else:
            self._listener.accept(report, digest)

    def drop(self, report: BranchReport) -> None:
        """See `Aggregation.drop`."""
        assert report.folder is not None
        shutil.rmtree(report.folder, ignore_errors=True)

    def merge(
        self, record: MergeRecord, reports: Mapping[BranchRun, BranchReport], facts: Mapping[str, Any]
    ) -> None:
        """See `Aggregation.merge`."""
        folders = {run: report.folder for run, report in reports.items() if report.folder is not None}
        self._listener.commit(record, self._aggregator.merge(record, folders, facts))

    def poll(self) -> None:
        """Do nothing: all methods wait until they are done."""

    def offer(self, topology: Topology, leaving: Collection[str]) -> None:
        """Do nothing: no other machine merges."""

    def sources(self, version: int) -> tuple[tuple[RangeAddress, ...], dict[str, tuple[int, str]]]:  # noqa: ARG002
        """Return nothing: only the server has updates."""
        return (), {}

    def prune(self, version: int, oldest_base: int, loading: Iterable[int]) -> None:
        """See `Aggregation.prune`."""
        self._aggregator.prune(version, oldest_base, loading)

    def close(self, *, is_over: bool, keeps: bool) -> None:
        """Do nothing: no other machine merges."""
