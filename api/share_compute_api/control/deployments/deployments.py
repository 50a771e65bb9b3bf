"""Supervises deployments: for each deployment in the store, runs its replicas and the engine for its requests."""

from __future__ import annotations

import asyncio
import logging

from share_compute.lifecycle.deployment_status import ServingStatus
from share_compute.store import DeploymentRecord, Store
from share_compute_api.connection.notifier import Notifier
from share_compute_api.control.deployments.serving import Members, Serving
from share_compute_api.control.polling import poll_forever
from share_compute_api.openai.engine import Engines
from share_compute_api.openai.metering import ServingMetrics
from share_compute_api.openai.metrics import Snapshot
from share_compute_api.openai.replica import LaunchReplica
from share_compute_api.schemas.bodies import ReplicaCounts

_log = logging.getLogger(__name__)


class DeploymentSupervisor:
    """Runs the deployments that the store lists. Writes each change to the store before acting on it.

    Args:
        store: the store of deployments.
        engines: the registry in which requests find engines.
        launch: starts a replica.
        notifier: signals changes in the store.
        metrics: the Prometheus metrics of requests.
        members: returns, for each contributor, the jobs whose members occupy memory there.
        drain_s: seconds for a draining replica to finish its sequences; after that, other replicas continue them.
    """

    def __init__(
        self,
        store: Store,
        engines: Engines,
        launch: LaunchReplica,
        notifier: Notifier,
        metrics: ServingMetrics,
        members: Members,
        drain_s: float,
    ) -> None:
        self._drain_s = drain_s
        self._members = members
        self._metrics = metrics
        self._store = store
        self._engines = engines
        self._launch = launch
        self._notifier = notifier
        self._serving: dict[str, tuple[Serving, asyncio.Task[None]]] = {}
        self._failed: set[str] = set()
        """Ids of failed deployments, which must not be started again.

        A list of live deployments may have been read before a failure was recorded. It then still contains the failed
        deployment.
        """
        self._has_polled = False

    async def run(self) -> None:
        """Serve until cancelled. Deployments stay in the store, so the next server process continues them."""
        try:
            await poll_forever(self._poll, "deployments", self._notifier)
        finally:
            tasks = [_end(*each) for each in self._serving.values()]
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _poll(self) -> None:
        living = {record.id: record for record in await asyncio.to_thread(self._store.deployments.list)}
        if not self._has_polled:
            # Keep the leases of live deployments: their members may have outlived the earlier server process.
            await asyncio.to_thread(self._store.leases.keep_only, living.keys())
            self._has_polled = True
        for deployment_id, each in self._serving.items():
            if deployment_id not in living:
                _end(*each)
        for record in living.values():
            if record.id in self._serving:
                self._serving[record.id][0].revise(record)
            elif record.id not in self._failed:
                self._start(record)
        self._failed &= living.keys()

    def statuses(self, deployment_id: str) -> list[ServingStatus]:
        """Return the last reported status of each replica of a deployment; replicas without a report are left out."""
        serving = self._serving.get(deployment_id)
        return [] if serving is None else serving[0].statuses

    def replicas(self, deployment_id: str) -> ReplicaCounts | None:
        """Return the replica counts of a deployment; None if this server does not run it."""
        serving = self._serving.get(deployment_id)
        return None if serving is None else serving[0].replicas

    def may_have_members(self, replica_id: str) -> bool:
        """Return whether a replica may have members: it runs, or may take over members of an earlier server process."""
        deployment_id, _, number = replica_id.partition("/")
        serving = self._serving.get(deployment_id)
        if serving is None:
            return not self._has_polled
        return not serving[0].is_scaled or int(number) in serving[0].numbers

    def snapshots(self) -> list[Snapshot]:
        """Return a snapshot of each deployment that this server runs."""
        return [
            Snapshot(serving.name, serving.replicas, serving.numbered)
            for serving, _ in self._serving.values()
        ]

    def _start(self, record: DeploymentRecord) -> None:
        serving = Serving(
            self._store, self._engines, self._launch, self._members, self._metrics, record, self._drain_s
        )
        task = asyncio.create_task(serving.run())
        self._serving[record.id] = serving, task
        task.add_done_callback(lambda ended: self._ended(record, ended))

    def _ended(self, record: DeploymentRecord, task: asyncio.Task[None]) -> None:
        self._serving.pop(record.id, None)
        failure = None if task.cancelled() else task.exception()
        if failure is not None:
            _log.error("deployment %s: it is started again", record.name, exc_info=failure)
        elif not task.cancelled():
            self._failed.add(record.id)
        self._notifier.notify()


def _end(serving: Serving, task: asyncio.Task[None]) -> asyncio.Task[None]:
    """Cancel a deployment's task, and return the task.

    A task that already ends its deployment is not cancelled, because the clean-up must not be interrupted.
    """
    if not serving.is_ending:
        serving.is_ending = True
        task.cancel()
    return task
