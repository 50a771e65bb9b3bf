"""Keeps the utilization of machines over the last hour, in memory, and exposes the newest values to Prometheus."""

from __future__ import annotations

import math
import struct
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import islice

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest

from share_compute_api.openai.metering import PREFIX
from share_compute_api.schemas.utilization import (
    ClusterUtilization,
    MachineUtilization,
    Utilization,
    UtilizationHistory,
    UtilizationSample,
)

KEPT = timedelta(hours=1)
FRESH = timedelta(minutes=1)
"""Age up to which a sample counts as the present utilization; agents measure every 10 s."""
_LEAST_S = 5.0
"""Least time between two samples before the last one, so that frequent reports do not displace the last hour."""
_MOST_SAMPLES = 720
_MOST_METERED = 256
_FIELDS = tuple(Utilization.model_fields)
_PACKED = struct.Struct(f"<d{len(_FIELDS)}f")
_SIZES = frozenset({"memory_bytes", "gpu_memory_bytes", "gpu_total_bytes"})
_METRICS = {
    "cpu_fraction": ("cpu_ratio", "Used part of the lent CPU threads."),
    "host_cpu_fraction": ("host_cpu_ratio", "Used part of all processors of the host."),
    "memory_bytes": ("memory_bytes", "Memory that the processes of the cluster hold."),
    "gpu_fraction": ("gpu_ratio", "Part of the time in which the lent GPU computed."),
    "gpu_memory_bytes": ("gpu_memory_bytes", "Used memory of the lent GPU."),
    "gpu_total_bytes": ("gpu_total_bytes", "Memory of the lent GPU."),
    "cpu_celsius": ("cpu_celsius", "Highest temperature of the processors."),
    "gpu_celsius": ("gpu_celsius", "Temperature of the lent GPU."),
    "received_bytes_per_s": ("received_bytes_per_second", "Rate at which the network interface received."),
    "sent_bytes_per_s": ("sent_bytes_per_second", "Rate at which the network interface sent."),
}


class UtilizationMonitor:
    """Utilization of all machines over the last hour. Methods may be called from several threads.

    A sample takes 90 bytes, so a machine that reports every 10 s takes 32 kB.

    Args:
        clock: function that returns the current time in UTC.
    """

    def __init__(self, clock: Callable[[], datetime]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._machines: OrderedDict[str, deque[bytes]] = OrderedDict()
        """Packed samples by contributor id, oldest first; the machine with the latest sample is last."""

    def add(self, contributor_id: str, utilization: Utilization, at: datetime) -> None:
        """Add a sample of this time."""
        at_s = at.timestamp()
        values = (getattr(utilization, name) for name in _FIELDS)
        packed = _PACKED.pack(at_s, *(math.nan if value is None else value for value in values))
        with self._lock:
            kept = self._machines.setdefault(contributor_id, deque(maxlen=_MOST_SAMPLES))
            # If the clock was set back, drop samples with later times.
            while kept and _at_s(kept[-1]) > at_s:
                kept.pop()
            if len(kept) > 1 and _at_s(kept[-1]) - _at_s(kept[-2]) < _LEAST_S:
                kept.pop()
            kept.append(packed)
            self._machines.move_to_end(contributor_id)
            self._forget(at_s - KEPT.total_seconds())

    def _forget(self, before_s: float) -> None:
        """Forget machines whose last sample is older."""
        while self._machines:
            contributor_id, kept = next(iter(self._machines.items()))
            if _at_s(kept[-1]) >= before_s:
                return
            del self._machines[contributor_id]

    def latest(self, contributor_id: str) -> UtilizationSample | None:
        """Return a machine's last sample; None if it is older than a minute."""
        with self._lock:
            kept = self._machines.get(contributor_id)
            packed = kept[-1] if kept else None
        if packed is None or self._clock().timestamp() - _at_s(packed) > FRESH.total_seconds():
            return None
        return _unpacked(packed)

    def history(self, contributor_id: str) -> UtilizationHistory:
        """Return a machine's samples of the last hour."""
        end = self._clock()
        begin = end - KEPT
        samples = tuple(map(_unpacked, self._since(contributor_id, begin.timestamp())))
        return UtilizationHistory(begin=begin, end=end, samples=samples)

    def cluster(self, *, points: int = 0, machines: list[str] | None = None) -> ClusterUtilization:
        """Return the present utilization of machines, and the busy part of their lent devices over the last hour.

        Args:
            points: number of intervals into which the last hour is divided; 0 leaves ``busy`` empty.
            machines: only these machines; None for all.
        """
        end = self._clock()
        begin = end - KEPT
        with self._lock:
            wanted = list(self._machines) if machines is None else dict.fromkeys(machines)
        found = {
            one: MachineUtilization(latest=latest, busy=self._busy(one, begin.timestamp(), points))
            for one in wanted
            if (latest := self.latest(one)) is not None
        }
        interval_s = KEPT.total_seconds() / max(1, points)
        return ClusterUtilization(begin=begin, interval_s=interval_s, machines=found)

    def _busy(self, contributor_id: str, begin_s: float, points: int) -> tuple[float | None, ...]:
        if points == 0:
            return ()
        sums, counts = [0.0] * points, [0] * points
        cpu, gpu = _FIELDS.index("cpu_fraction"), _FIELDS.index("gpu_fraction")
        with self._lock:
            kept = b"".join(self._machines.get(contributor_id, ()))
        for at_s, *values in _PACKED.iter_unpack(kept):
            value = values[cpu] if math.isnan(values[gpu]) else values[gpu]
            if at_s >= begin_s and not math.isnan(value):
                place = min(points - 1, int((at_s - begin_s) / KEPT.total_seconds() * points))
                sums[place] += value
                counts[place] += 1
        return tuple(
            round(total / count, 3) if count else None for total, count in zip(sums, counts, strict=True)
        )

    def _since(self, contributor_id: str, begin_s: float) -> list[bytes]:
        with self._lock:
            kept = list(self._machines.get(contributor_id, ()))
        return [packed for packed in kept if _at_s(packed) >= begin_s]

    def exposition(self) -> bytes:
        """Return the present utilization of at most `_MOST_METERED` machines in the Prometheus text format."""
        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry)

    def describe(self) -> Iterator[Metric]:
        """Return nothing: the collector is alone in its registry, so names need not be checked for conflicts."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield a gauge for each figure."""
        with self._lock:
            known = sorted(self._machines)
        fresh = ((one, latest) for one in known if (latest := self.latest(one)) is not None)
        found = dict(islice(fresh, _MOST_METERED))
        for field, (name, text) in _METRICS.items():
            gauge = GaugeMetricFamily(f"{PREFIX}_machine_{name}", text, labels=["contributor"])
            for contributor_id, sample in found.items():
                if (value := getattr(sample, field)) is not None:
                    gauge.add_metric([contributor_id], value)
            yield gauge


def _at_s(packed: bytes) -> float:
    return float(_PACKED.unpack(packed)[0])


def _unpacked(packed: bytes) -> UtilizationSample:
    """Unpack a sample to four significant digits, which exceeds the precision of the sensors."""
    at_s, *values = _PACKED.unpack(packed)
    fields = {
        name: round(value) if name in _SIZES else float(f"{value:.4g}")
        for name, value in zip(_FIELDS, values, strict=True)
        if not math.isnan(value)
    }
    return UtilizationSample(at=datetime.fromtimestamp(at_s, UTC), **fields)
