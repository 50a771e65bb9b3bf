"""Prometheus metrics of served models: the metrics of `metering`, and gauges for each deployment and replica."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from share_compute.lifecycle.deployment_status import ServingStatus
from share_compute_api.openai.metering import MODEL, PREFIX, ServingMetrics
from share_compute_api.schemas.bodies import ReplicaCounts

MEDIA_TYPE = CONTENT_TYPE_LATEST
_REPLICA = {
    "num_requests_running": "Requests that a replica runs.",
    "num_requests_waiting": "Requests that wait in a replica's queue.",
    "num_preemptions": "Requests of a replica that were preempted, because KV capacity was short.",
    "kv_cache_usage_perc": "Share of a replica's KV capacity that is reserved, from 0 to 1.",
    "batch_size": "Requests in one step of a replica, the mean of the last steps.",
    "generation_tokens_per_second": "Tokens that a replica generates a second, while it does.",
    "predicted_generation_tokens_per_second": "The same on paper, with all requests in flight.",
    "predicted_time_to_first_token_seconds": "Time to the first token on paper.",
    "predicted_inter_token_latency_seconds": "Time from token to token on paper.",
}
_STAGE = {
    "stage_busy_ratio": "Share of the last seconds in which a stage's machine computed.",
    "predicted_stage_busy_ratio": "The same on paper, with all requests in flight.",
}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Status of one deployment at one moment."""

    name: str
    counts: ReplicaCounts
    replicas: Mapping[int, ServingStatus]
    """Status of each replica that has reported one, by the replica's number."""


class PrometheusMetrics:
    """The Prometheus metrics of one control plane."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.serving = ServingMetrics(self._registry)

    def exposition(self, deployments: Iterable[Snapshot]) -> bytes:
        """Return all metrics in the Prometheus text format.

        Args:
            deployments: snapshots of the deployments that are up.
        """
        now = CollectorRegistry()
        now.register(_Gauges(tuple(deployments)))
        return generate_latest(self._registry) + generate_latest(now)


class _Gauges:
    """Prometheus collector of the gauges of all deployments at one moment."""

    def __init__(self, deployments: tuple[Snapshot, ...]) -> None:
        self._deployments = deployments

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Return nothing: the collector is alone in its registry, so names need not be checked for conflicts."""
        return ()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield all gauges."""
        counts = _family("replicas", "Replicas of a deployment, by how they are.", "state")
        waiting = _family("num_requests_unplaced", "Requests that wait for a replica that answers.")
        for one in self._deployments:
            waiting.add_metric([one.name], one.counts.waiting)
            for state in ("ready", "wanted", "draining"):
                counts.add_metric([one.name, state], getattr(one.counts, state))
        yield from (counts, waiting)
        families = {name: _family(name, text, "replica") for name, text in _REPLICA.items()}
        stages = {name: _family(name, text, "replica", "stage", "machine") for name, text in _STAGE.items()}
        for one in self._deployments:
            for number, status in one.replicas.items():
                for name, value in _of_replica(status).items():
                    if value is not None:
                        families[name].add_metric([one.name, str(number)], value)
                for index, stage in enumerate(status.stages):
                    measured = (stage.busy_fraction, stage.predicted_busy_fraction)
                    for family, share in zip(stages.values(), measured, strict=True):
                        if share is not None:
                            family.add_metric([one.name, str(number), str(index), stage.name], share)
        yield from (*families.values(), *stages.values())


def _family(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"{PREFIX}_{name}", text, labels=[MODEL, *labels])


def _of_replica(status: ServingStatus) -> dict[str, float | None]:
    queue = status.queue
    values = (
        queue.running,
        queue.queued,
        queue.preempted,
        queue.kv_tokens_used / queue.kv_tokens if queue.kv_tokens else None,
        queue.batch_size,
        status.tokens_per_s,
        status.predicted_tokens_per_s,
        status.first_token.predicted_s,
        status.next_token.predicted_s,
    )
    return dict(zip(_REPLICA, values, strict=True))
