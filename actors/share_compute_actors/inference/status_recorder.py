"""Collects the status of a replica, which the replica's server reports to the control plane."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from share_compute.errors import ShareComputeError
from share_compute.inference.placement import Placement
from share_compute.inference.scheduler.figures import Latency
from share_compute.lifecycle.computation import Computation
from share_compute.lifecycle.deployment_states import DeploymentState
from share_compute.lifecycle.deployment_status import (
    Interruption,
    LatencyStatus,
    QueueStatus,
    ServingStatus,
    StageStatus,
)
from share_compute.protocol.membership import Worker
from share_compute_actors.inference.scheduler_service import SchedulerService

if TYPE_CHECKING:
    from share_compute_actors.inference.messages import Heartbeat

_HEARTBEATS = 20
"""Number of heartbeats over which a member's fraction of compute time is measured."""
_INTERRUPTIONS = 8
"""Number of interruptions that are kept; the oldest are dropped."""


@dataclass(slots=True)
class _Interruption:
    number: int
    reason: str
    machines: tuple[str, ...]
    began_s: float
    seconds: float | None = None


class StatusRecorder:
    """Collects the status of a replica; the thread of the main loop writes it, and any thread may read it.

    Args:
        service: the scheduler service with the sequences.
        window_tokens: longest sequence, in tokens.
        embeds: whether the model is an encoder, for which no token rate is predicted.
    """

    def __init__(self, service: SchedulerService, window_tokens: int, *, embeds: bool = False) -> None:
        self._service = service
        self._embeds = embeds
        self._window_tokens = window_tokens
        self._lock = threading.Lock()
        self._state = DeploymentState.pending
        self._reason = "the model's files are being read"
        self._is_reading_model = True
        self._error: dict[str, Any] | None = None
        self._epoch = 0
        self._placement: Placement | None = None
        self._heartbeats: dict[Worker, deque[Heartbeat]] = {}
        self._alive: frozenset[Worker] = frozenset()
        self._expected: frozenset[Worker] = frozenset()
        self._recoveries = 0
        self._lost_s: float | None = None
        """Time of the first loss since the last token was sampled; None if there was no loss since."""
        self._last_gap_s: float | None = None
        self._interruptions: deque[_Interruption] = deque(maxlen=_INTERRUPTIONS)
        self._proposal: Computation | None = None

    def set_state(self, state: DeploymentState, reason: str, error: ShareComputeError | None = None) -> None:
        """Set the state, with its reason."""
        with self._lock:
            self._state, self._reason, self._is_reading_model = state, reason, False
            self._error = None if error is None else {"code": error.code, **error.facts()}

    def propose(self, computation: Computation | None) -> None:
        """Report a proposed choice between compiled and eager code; None once a choice is stored."""
        with self._lock:
            self._proposal = computation

    def formed(self, epoch: int, placement: Placement) -> None:
        """Record that stages were formed."""
        with self._lock:
            self._epoch, self._placement = epoch, placement
            now_s = time.monotonic()
            for interruption in self._interruptions:
                if interruption.seconds is None:
                    interruption.seconds = now_s - interruption.began_s
            self._heartbeats = {worker: deque(maxlen=_HEARTBEATS) for worker in placement.workers}

    def lost(self, reason: str, machines: tuple[str, ...] = ()) -> None:
        """Record that the stages became unusable, for example because a member was lost.

        Args:
            reason: description of the event.
            machines: names of the lost members' machines.
        """
        with self._lock:
            self._recoveries += 1
            now_s = time.monotonic()
            self._lost_s = self._lost_s or now_s
            self._interruptions.append(_Interruption(self._recoveries, reason, machines, now_s))

    def standing_by(self) -> None:
        """Record that the members have freed their shards, and that there are no stages."""
        with self._lock:
            self._placement, self._heartbeats, self._lost_s = None, {}, None
        self.set_state(DeploymentState.pending, "members keep their processes, without weights")

    def sampled(self) -> None:
        """Record that tokens were sampled; this ends the time without tokens after a loss."""
        if self._lost_s is not None:
            with self._lock:
                self._last_gap_s, self._lost_s = time.monotonic() - self._lost_s, None

    def observe(
        self, alive: frozenset[Worker], expected: frozenset[Worker], heartbeats: Mapping[Worker, Any]
    ) -> None:
        """Record which members are alive and which are starting, with their last heartbeats."""
        with self._lock:
            self._alive, self._expected = alive, expected
            for worker, seen in self._heartbeats.items():
                heartbeat = heartbeats.get(worker)
                if heartbeat is not None and (not seen or seen[-1].at_s != heartbeat.at_s):
                    seen.append(heartbeat)

    def read(self) -> ServingStatus:
        """Return the complete status."""
        stats, measured = self._service.stats(), self._service.measured()
        with self._lock:
            placement = self._placement
            prediction = None if placement is None else placement.prediction
            of_tokens = None if self._embeds else prediction
            return ServingStatus(
                state=self._state,
                reason=self._reason,
                is_reading_model=self._is_reading_model,
                epoch=self._epoch,
                window_tokens=self._window_tokens,
                prediction=prediction,
                stages=() if placement is None else tuple(self._stages(placement)),
                queue=QueueStatus(
                    queued=stats.queued + stats.interrupted,
                    running=stats.running,
                    batch_size=measured.batch_size,
                    steps_in_flight=stats.steps_in_flight,
                    kv_tokens=stats.kv_tokens,
                    kv_tokens_used=stats.kv_tokens_used,
                    kv_tokens_cached=stats.kv_tokens_cached,
                    prefix_hits=stats.totals.prefix_hits,
                    emitted_tokens=stats.totals.emitted_tokens,
                    wasted_tokens=stats.totals.wasted_tokens,
                    preempted=stats.totals.preempted,
                ),
                tokens_per_s=measured.tokens_per_s,
                predicted_tokens_per_s=None if of_tokens is None else of_tokens.tokens_per_s,
                first_token=_beside(
                    measured.first_token, None if prediction is None else prediction.first_token_s
                ),
                next_token=_beside(
                    measured.next_token, None if of_tokens is None else of_tokens.next_token_s
                ),
                recoveries=self._recoveries,
                last_gap_s=self._last_gap_s,
                interruptions=tuple(
                    Interruption(
                        number=one.number,
                        reason=one.reason,
                        machines=one.machines,
                        ago_s=time.monotonic() - one.began_s,
                        seconds=one.seconds,
                    )
                    for one in self._interruptions
                ),
                holds=tuple(sorted(self._alive | self._expected)),
                proposed_computation=self._proposal,
                error=self._error,
            )

    def _stages(self, placement: Placement) -> list[StageStatus]:
        found = []
        for stage in placement.plan.stages:
            member = stage.members[0]
            seen = self._heartbeats.get(member.contributor_id)
            last = seen[-1] if seen else None
            found.append(
                StageStatus(
                    contributor_id=member.contributor_id,
                    name=member.name,
                    start=stage.start,
                    stop=stage.stop,
                    is_alive=member.contributor_id in self._alive,
                    busy_fraction=_busy(seen) if seen else None,
                    predicted_busy_fraction=member.busy_fraction,
                    process_id=last.process_id if last else None,
                    resident_bytes=last.resident_bytes if last else 0,
                    cache_bytes=last.cache_bytes if last else 0,
                )
            )
        return found


def _busy(seen: deque[Heartbeat]) -> float | None:
    passed_s = seen[-1].at_s - seen[0].at_s
    return (seen[-1].computed_s - seen[0].computed_s) / passed_s if passed_s > 0 else None


def _beside(measured: Latency, predicted_s: float | None) -> LatencyStatus:
    return LatencyStatus(p50_s=measured.p50_s, p95_s=measured.p95_s, predicted_s=predicted_s)
