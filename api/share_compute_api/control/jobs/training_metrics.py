"""Prometheus metrics of training jobs: bytes of each machine, and the rounds of jobs whose branches merge.

The metrics are taken from the events of attempts. The number of series is bounded: only the last `_MOST_JOBS` jobs are
kept, with `_MOST_MACHINES` machines each. Further machines of a job are counted together as the machine ``other``.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest

from share_compute.lifecycle.attempt_events import (
    Assignment,
    AttemptEvent,
    Offer,
    RoundMerged,
    SparseAssignment,
    StepCommitted,
    TrafficMeasured,
    Validated,
)
from share_compute_api.control.jobs.coordinators import Attempt, Launch
from share_compute_api.openai.metering import PREFIX

_MOST_JOBS = 50
_MOST_MACHINES = 256
_OTHER = "other"
"""Value of the label ``contributor`` for machines beyond `_MOST_MACHINES`."""
_JOB, _MACHINE, _BRANCH = ("job",), ("job", "contributor"), ("job", "branch")
_METRIC = ("job", "split", "metric")

_COUNTERS = {
    "sent_bytes": ("Bytes of tensors that a machine's members sent, to machines and the server.", _MACHINE),
    "received_bytes": ("Bytes of tensors that a machine's members received.", _MACHINE),
    "branch_computing_seconds": ("Time in which a branch computed the steps of its rounds.", _BRANCH),
    "branch_waiting_seconds": ("Time in which a finished branch waited for a merge.", _BRANCH),
    "branch_sent_bytes": ("Bytes of a branch's contributions.", _BRANCH),
    "branch_missed_rounds": ("Rounds that were merged without a branch.", _BRANCH),
    "update_bytes": ("Bytes of the updates that each branch received.", _JOB),
    "merge_seconds": ("Time in which contributions were merged on the server.", _JOB),
}
_GAUGES = {
    "step": ("Last committed step.", _JOB),
    "metric": ("Value of a metric in the last validation or test.", _METRIC),
    "round": ("Last merged round.", _JOB),
    "missing_branches": ("Branches without a contribution to the last round.", _JOB),
    "compression_ratio": (
        "Bytes of the last round's contributions and updates in float32, divided by their real bytes.",
        _JOB,
    ),
    "consensus_distance": (
        "Root mean square distance of the branches' weights from the merged ones, relative to their norm.",
        _JOB,
    ),
    "branch_staleness_rounds": (
        "Age of a branch's last contribution when it was merged, in rounds.",
        _BRANCH,
    ),
}


@dataclass(slots=True)
class _Job:
    """The values of one job, by metric and by the labels after the job's id."""

    counters: defaultdict[str, defaultdict[tuple[str, ...], float]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(float))
    )
    gauges: defaultdict[str, dict[tuple[str, ...], float]] = field(default_factory=lambda: defaultdict(dict))

    def count(self, name: str, value: float, *labels: str) -> None:
        self.counters[name][labels] += value

    def observe(self, event: AttemptEvent) -> None:
        if isinstance(event, StepCommitted):
            self.gauges["step"][()] = event.step
        elif isinstance(event, Validated):
            for metric, value in event.figures().items():
                name = "loss" if metric == "validation_loss" else metric
                self.gauges["metric"][event.split, name] = value
            for name, value in (event.tasks or {}).items():
                self.gauges["metric"][event.split, name] = value
        elif isinstance(event, TrafficMeasured):
            known = self.counters["sent_bytes"]
            for machine, link in event.machines.items():
                label = machine if (machine,) in known or len(known) < _MOST_MACHINES else _OTHER
                self.count("sent_bytes", link.sent_bytes, label)
                self.count("received_bytes", link.received_bytes, label)
        elif isinstance(event, RoundMerged):
            self._merged(event)

    def _merged(self, event: RoundMerged) -> None:
        for branch in event.branches:
            label = str(branch.number)
            self.count("branch_computing_seconds", branch.seconds, label)
            self.count("branch_waiting_seconds", branch.waited_s, label)
            self.count("branch_sent_bytes", branch.sent_bytes, label)
            self.gauges["branch_staleness_rounds"][(label,)] = event.round - branch.round
        for number in event.missing:
            self.count("branch_missed_rounds", 1, str(number))
        self.count("update_bytes", event.update_bytes)
        self.count("merge_seconds", event.merge_s)
        self.gauges["round"][()] = event.round
        self.gauges["missing_branches"][()] = len(event.missing)
        if event.consensus_distance is not None:
            self.gauges["consensus_distance"][()] = event.consensus_distance
        if event.compression_ratio is not None:
            self.gauges["compression_ratio"][()] = event.compression_ratio


class TrainingMetrics:
    """The metrics of the training jobs of one control plane, since it started."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[str, _Job] = OrderedDict()
        """Metrics by job id; the job with the latest event is last."""

    def observe(self, job_id: str, events: Iterable[AttemptEvent]) -> None:
        """Add the events of an attempt at a job."""
        for event in events:
            if not isinstance(event, (StepCommitted, Validated, TrafficMeasured, RoundMerged)):
                continue
            self._jobs.setdefault(job_id, _Job()).observe(event)
            self._jobs.move_to_end(job_id)
        while len(self._jobs) > _MOST_JOBS:
            self._jobs.popitem(last=False)

    def exposition(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry)

    def describe(self) -> Iterable[Metric]:
        """Return nothing: the collector is alone in its registry, so names need not be checked for conflicts."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        for name, (text, labels) in _COUNTERS.items():
            counter = CounterMetricFamily(f"{PREFIX}_training_{name}", text, labels=labels)
            for job_id, job in self._jobs.items():
                for rest, value in job.counters.get(name, {}).items():
                    counter.add_metric([job_id, *rest], value)
            yield counter
        for name, (text, labels) in _GAUGES.items():
            gauge = GaugeMetricFamily(f"{PREFIX}_training_{name}", text, labels=labels)
            for job_id, job in self._jobs.items():
                for rest, value in job.gauges.get(name, {}).items():
                    gauge.add_metric([job_id, *rest], value)
            yield gauge


def metered(launch: Launch, metrics: TrainingMetrics) -> Launch:
    """Return a function that calls ``launch``, and adds the events of the attempt to ``metrics``."""

    async def start(assignment: Assignment | SparseAssignment) -> Attempt:
        return _MeteredAttempt(assignment.job_id, await launch(assignment), metrics)

    return start


class _MeteredAttempt:
    """An attempt whose events are added to metrics once each."""

    def __init__(self, job_id: str, attempt: Attempt, metrics: TrainingMetrics) -> None:
        self._job_id = job_id
        self._attempt = attempt
        self._metrics = metrics
        self._seen = 0

    async def events(self, after: int, timeout_s: float) -> list[AttemptEvent]:
        """See `Attempt.events`."""
        events = await self._attempt.events(after, timeout_s)
        self._metrics.observe(self._job_id, events[max(0, self._seen - after) :])
        self._seen = max(self._seen, after + len(events))
        return events

    async def cancel(self) -> None:
        """See `Attempt.cancel`."""
        await self._attempt.cancel()

    async def suspend(self) -> None:
        """See `Attempt.suspend`."""
        await self._attempt.suspend()

    async def offer(self, offer: Offer) -> None:
        """See `Attempt.offer`."""
        await self._attempt.offer(offer)

    async def drain(self, contributor_id: str) -> None:
        """See `Attempt.drain`."""
        await self._attempt.drain(contributor_id)

    def kill(self) -> None:
        """See `Attempt.kill`."""
        self._attempt.kill()
