"""Computes alerts for the operator, for example lost machines, jobs that fail or wait, and a full disk.

Alerts are not stored. Each query computes them from the current rows of the store, the state of Ray, and the free disk
space. `AlertWatch` polls the alerts, because an alert may begin without a change in the store, for example when
heartbeats stop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Final

from share_compute.errors import ShareComputeError, VersionMismatch
from share_compute.lifecycle.deployment_states import DeploymentState
from share_compute.lifecycle.states import ContributorState
from share_compute.quantities import bytes_text
from share_compute.store import DeploymentRecord, JobRecord, PresenceRecord, QueuedJob
from share_compute_actors.machine.preflight import check_disk
from share_compute_api.schemas.bodies import Alert, Versions
from share_compute_api.schemas.versions import check_versions, local_versions
from share_compute_api.server.context import Context

REMEMBERED: Final = timedelta(hours=1)
"""Time for which a lost machine, a failed job or a failed deployment causes an alert."""
UNRESPONSIVE_AFTER: Final = timedelta(seconds=20)
"""Time without a heartbeat (one every 2 s) after which a machine counts as unresponsive."""
_FRUITLESS: Final = 2
_POLL_S: Final = 5.0
_WITH_HEARTBEATS = (
    ContributorState.probing,
    ContributorState.ready,
    ContributorState.quarantined,
    ContributorState.draining,
)
"""States in which an agent sends heartbeats. An agent in `joining` sends none yet; `ContributorSupervisor` limits the
time in that state."""
_log = logging.getLogger(__name__)


def find_alerts(context: Context) -> list[Alert]:
    """Return all current alerts: errors first, then by start time, newest first."""
    store, now = context.store, context.store.clock()
    lately, longest_wait = now - REMEMBERED, timedelta(seconds=context.settings.alert_wait_s)
    found = [
        *_of_server(context),
        *of_machines(store.contributors.presences(lately), local_versions(), now, context.started_at),
        *of_jobs(store.jobs.queue(), store.jobs.failed_since(lately), now, longest_wait),
        *of_deployments(
            [*reversed(store.deployments.list()), *store.deployments.failed_since(lately)], now, longest_wait
        ),
    ]
    oldest = datetime.min.replace(tzinfo=UTC)
    found.sort(key=lambda alert: alert.since or oldest, reverse=True)
    return sorted(found, key=lambda alert: alert.severity != "error")


def _of_server(context: Context) -> Iterator[Alert]:
    if context.cluster is None:
        yield Alert(
            id="no-cluster",
            kind="no-cluster",
            severity="error",
            text="the server runs without a cluster: machines cannot join, and jobs wait",
            hint="start it with `share-compute up`",
            since=context.started_at,
        )
    elif context.cluster.trouble is not None:
        yield Alert(
            id="cluster-down",
            kind="no-cluster",
            severity="error",
            text=f"machines cannot join, and jobs wait: {context.cluster.trouble}",
            hint="it is started again; if it stays so, look into the server's log, and for lack of memory or disk",
        )
    disk = check_disk(context.settings.data_folder)
    if disk.state != "ok":
        missing = bytes_text(disk.details["missing_bytes"])
        text = f"the disk of the data folder lacks {missing} of what the server needs"
        yield Alert(id="disk", kind="disk", severity="error", text=text, hint=disk.hint)


def of_machines(
    machines: Iterable[PresenceRecord], server: Versions, now: datetime, started_at: datetime
) -> Iterator[Alert]:
    """Yield alerts for machines that are lost, unresponsive, quarantined, or incompatible with the server.

    Args:
        machines: present machines, and machines that left or were lost within `REMEMBERED`.
        server: versions of the server.
        now: the current time.
        started_at: start time of the server; no heartbeat could arrive before this time.
    """
    machines = list(machines)
    here = {machine.name for machine in machines if machine.left_at is None}
    for machine in machines:
        if machine.state is ContributorState.lost:
            # If a present machine has the same name, the lost machine has rejoined with another invite.
            if machine.name not in here:
                yield _of_machine(
                    "machine-lost",
                    machine,
                    f"machine {machine.name} was lost: {machine.reason}",
                    machine.left_at,
                )
            continue
        if machine.left_at is not None:
            continue
        seen_at = max(machine.last_seen_at, started_at)
        if machine.state in _WITH_HEARTBEATS and now - seen_at > UNRESPONSIVE_AFTER:
            yield _of_machine(
                "machine-unresponsive",
                machine,
                f"machine {machine.name} is unresponsive: its agent does not answer, though its Ray node does",
                seen_at,
            )
        if machine.state is ContributorState.quarantined:
            yield _of_machine(
                "machine-quarantined", machine, f"machine {machine.name} is quarantined: it {machine.reason}"
            ).model_copy(
                update={
                    "severity": "error",
                    "hint": f"check its memory and software, then `share-compute clear {machine.name}`",
                }
            )
        mismatch = _mismatch(server, machine)
        if mismatch is not None:
            yield _of_machine(
                "versions-differ", machine, f"machine {machine.name} does not fit: {mismatch.message}"
            ).model_copy(update={"hint": mismatch.hint})


def _of_machine(kind: str, machine: PresenceRecord, text: str, since: datetime | None = None) -> Alert:
    return Alert.model_validate(
        {
            "id": f"{kind} {machine.id}",
            "kind": kind,
            "severity": "warning",
            "text": text,
            "name": machine.name,
            "hint": f"look at `share-compute join` on {machine.host}; it says what it does",
            "since": since,
            "contributor_id": machine.id,
        }
    )


def _mismatch(server: Versions, machine: PresenceRecord) -> VersionMismatch | None:
    """Return the error if a machine's versions are incompatible with the server's; None if compatible or unknown.

    Versions are checked when a machine joins. They can differ later, because the server may have been upgraded since.
    """
    if not set(Versions.model_fields) <= set(machine.versions):
        return None
    try:
        check_versions(server, Versions(**machine.versions))
    except VersionMismatch as failure:
        return failure
    return None


def of_jobs(
    queue: Iterable[QueuedJob], failed: Iterable[JobRecord], now: datetime, longest_wait: timedelta
) -> Iterator[Alert]:
    """Yield alerts for jobs that failed, that have waited long, or that make no progress.

    A job makes no progress if at least `_FRUITLESS` attempts in a row were lost before a step was committed.
    """
    for job in failed:
        yield Alert(
            id=f"job-failed {job.id} {job.attempt}",
            kind="job-failed",
            severity="error",
            text=f"job {job.name} failed: {job.reason}",
            name=job.name,
            hint=(job.error or {}).get("hint"),
            since=job.finished_at,
            job_id=job.id,
        )
    for waiting in queue:
        if waiting.fruitless_attempts >= _FRUITLESS:
            yield Alert(
                id=f"job-fruitless {waiting.id}",
                kind="job-fruitless",
                severity="warning",
                text=f"job {waiting.name} makes no progress: {waiting.fruitless_attempts} attempts in a row were "
                f"lost before a step was committed",
                name=waiting.name,
                hint=f"look into its log: share-compute logs {waiting.id}",
                since=waiting.waiting_since,
                job_id=waiting.id,
            )
        elif now - waiting.waiting_since > longest_wait:
            yield Alert(
                id=f"job-waits {waiting.id} {waiting.attempt}",
                kind="job-waits",
                severity="warning",
                text=f"job {waiting.name} waits: {waiting.reason}",
                name=waiting.name,
                since=waiting.waiting_since,
                job_id=waiting.id,
            )


def of_deployments(
    deployments: Iterable[DeploymentRecord], now: datetime, longest_wait: timedelta
) -> Iterator[Alert]:
    """Yield alerts for deployments that failed, are degraded, or have waited long."""
    for one in deployments:
        match one.state:
            case DeploymentState.failed:
                alert = Alert(
                    id=f"deployment-failed {one.id}",
                    kind="deployment-failed",
                    severity="error",
                    text=f"deployment {one.name} failed: {one.reason}",
                    name=one.name,
                    hint=(one.error or {}).get("hint"),
                    since=one.ended_at,
                    deployment_id=one.id,
                )
            case DeploymentState.degraded:
                alert = Alert(
                    id=f"deployment-degraded {one.id}",
                    kind="deployment-degraded",
                    severity="warning",
                    text=f"deployment {one.name} is degraded: {one.reason}",
                    name=one.name,
                    deployment_id=one.id,
                )
            case DeploymentState.pending | DeploymentState.loading if now - one.created_at > longest_wait:
                alert = Alert(
                    id=f"deployment-waits {one.id}",
                    kind="deployment-waits",
                    severity="warning",
                    text=f"deployment {one.name} does not answer: {one.reason}",
                    name=one.name,
                    # The store does not record when a deployment stopped being ready.
                    since=one.created_at if one.ready_at is None else None,
                    deployment_id=one.id,
                )
            case _:
                continue
        yield alert


class AlertWatch:
    """Polls the alerts, and emits an event when an alert begins or ends."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._known: dict[str, Alert] | None = None

    async def run(self) -> None:
        """Call `poll` every 5 s until cancelled."""
        while True:
            try:
                await asyncio.to_thread(self.poll)
            except ShareComputeError as failure:
                _log.warning("alerts could not be checked: %s", failure.message)
            await asyncio.sleep(_POLL_S)

    def poll(self) -> None:
        """Compute the alerts, and emit an event if an alert began or ended since the previous call.

        The first call emits no event, because there is no previous state to compare with.
        """
        found = {alert.id: alert for alert in find_alerts(self._context)}
        known, self._known = self._known, found
        if known is not None and known.keys() != found.keys():
            began = [alert.text for name, alert in found.items() if name not in known]
            ended = [alert.text for name, alert in known.items() if name not in found]
            self._context.store.events.record("alerts", {"began": began, "ended": ended})
