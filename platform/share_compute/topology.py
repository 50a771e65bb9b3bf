"""Topology: all contributors with their measured capacity and links, at one time."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

from share_compute.device_kinds import KINDS, DeviceKind

BASE_DTYPE = "float32"
"""Name of the dtype whose speed is used where none is named, or where that of another was not measured."""
DTYPES = (BASE_DTYPE, "bfloat16", "float16")
"""Names of the dtypes whose speed a probe measures."""
HEAD = "head"
"""Id of the Ray head in links; no contributor has this id."""
MOST_LATENCY_S = 60.0
MOST_PER_S = 1e18
"""Maximum plausible rate, in bytes/s or FLOP/s."""
MOST_BYTES = 2**60
"""Maximum plausible memory of one device, in bytes."""
MOST_OVERHEAD_S = 0.1
"""Maximum plausible time of one small operation, in seconds."""
MOST_DEVICES = 16
"""Maximum number of contributors (one for each lent device) that one host can add with one use of an invite."""


@dataclass(frozen=True, slots=True)
class Device:
    """Compute device (a CPU or a GPU), as the probe measured it."""

    kind: DeviceKind
    name: str
    memory_bytes: int
    """Memory that its owner lends."""
    flops_per_s: dict[str, float] = field(default_factory=dict)
    """Speed of a dense matrix product in FLOP/s, by dtype name: ``{"float32": 5.1e10}``."""
    memory_bytes_per_s: float = 0.0
    """Memory bandwidth of a copy, read plus write; 0.0 if it was not measured."""
    overhead_s: float = 0.0
    """Fixed cost of one operation in seconds, for example of a kernel launch; 0.0 if it was not measured."""
    uuid: str = ""
    """UUID of a GPU, as torch reports it; empty for a CPU."""
    peer_latency_s: float = 0.0
    """Time of the sum of a few numbers with the other devices of its contributor; 0.0 if it was not measured."""
    peer_bytes_per_s: float = 0.0
    """Size of a large tensor divided by the time of its sum with those devices; 0.0 if it was not measured."""


@dataclass(frozen=True, slots=True)
class Link:
    """Measured path from one contributor (or the head) to another."""

    source: str
    """Contributor id, or ``head``."""
    target: str
    """Contributor id, or ``head``."""
    latency_s: float
    """Half the round-trip time of a small message."""
    bytes_per_s: float

    @classmethod
    def dead(cls, source: str, target: str) -> Self:
        """Return a link that carries no data."""
        return cls(source, target, latency_s=MOST_LATENCY_S, bytes_per_s=0.0)

    @property
    def is_dead(self) -> bool:
        """Return whether the link carries no data."""
        return self.bytes_per_s == 0


@dataclass(frozen=True, slots=True)
class Contributor:
    """A machine that joined the cluster, or one or several of its devices."""

    id: str
    name: str
    devices: tuple[Device, ...]
    cpu_threads: int = 1
    """Number of CPU threads that it computes with; if several CPU devices are lent together, those of all."""
    node_id: str = ""
    """Id of its Ray node, in hexadecimal."""
    address: str = ""
    """Address at which other machines reach this machine."""
    host: str = ""
    """Label of the computer. Contributors with the same label share its cores; empty if its cores are not shared."""
    host_threads: int = 0
    """Number of CPU threads of the computer ``host``; 0 if unknown."""
    upload_bytes_per_s: float = 0.0
    """Rate at which its owner lets its members send, in bytes/s; 0.0 for no limit."""
    download_bytes_per_s: float = 0.0
    """Rate at which its owner lets its members receive, in bytes/s; 0.0 for no limit."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels that its owner gives it; see `share_compute.labels`."""
    ranks: int = 1
    """Number of processes of a member that compute its layers together (``parallelism.tensor`` of the job)."""
    is_training: bool = False
    """Whether the figures are for members that train; see `memory_bytes`."""

    @property
    def group(self) -> tuple[Device, ...]:
        """Return the devices that are lent together: all devices of the first GPU's kind, or the CPU without a GPU."""
        kinds = [each.kind for each in self.devices]
        kind = next((kind for kind in kinds if KINDS[kind].is_gpu), kinds[0] if kinds else None)
        return tuple(each for each in self.devices if each.kind == kind)

    @property
    def used(self) -> tuple[Device, ...]:
        """Return the devices that a member computes on: the first of the group, or one for each rank."""
        return self.group[: self.ranks]

    @property
    def device(self) -> Device:
        """Return the devices that a member computes on as one device, as fast as all of them together.

        The slowest and smallest device decides, because each rank computes an equal part.

        Raises:
            IndexError: the contributor has no device.
        """
        return _together(self.used)

    @property
    def whole(self) -> Contributor:
        """Return the contributor for a member with a rank on each device of the group."""
        return replace(self, ranks=max(1, len(self.group)))

    def with_memory(self, memory_bytes: int) -> Contributor:
        """Return the contributor with this much memory on the devices that a member computes on; see `memory_bytes`."""
        used, each_bytes = self.used, memory_bytes * self._memories // max(1, len(self.used))
        smaller = {id(device): replace(device, memory_bytes=each_bytes) for device in used}
        return replace(self, devices=tuple(smaller.get(id(device), device) for device in self.devices))

    @property
    def threads(self) -> int:
        """Return the number of CPU threads with which a member computes on its devices."""
        if not self.devices or KINDS[self.group[0].kind].is_gpu:
            return self.cpu_threads
        return max(1, self.cpu_threads // len(self.group)) * len(self.used)

    @property
    def memory_bytes(self) -> int:
        """Return the lent memory of the devices that a member computes on, in bytes; 0 if there is no device.

        For training on several GPUs, it is that of one of them: the first has all parameters, gradients and the
        optimizer's state.
        """
        return self.device.memory_bytes // self._memories if self.devices else 0

    @property
    def memory_bytes_per_s(self) -> float:
        """Return the measured memory bandwidth of the device that a member computes on; 0.0 if not measured."""
        return self.device.memory_bytes_per_s if self.devices else 0.0

    @property
    def overhead_s(self) -> float:
        """Return `Device.overhead_s` of the device that a member computes on; 0.0 if it was not measured."""
        return self.device.overhead_s if self.devices else 0.0

    @property
    def most_ranks(self) -> int:
        """Return the largest number of processes that can compute the layers of a member together.

        Devices that are lent together have one process each. A CPU that is lent alone has one for each thread.
        """
        devices = self.group
        is_cpu = not devices or not KINDS[devices[0].kind].is_gpu
        return self.cpu_threads if is_cpu and len(devices) < 2 else len(devices)

    @property
    def has_own_memories(self) -> bool:
        """Return whether a member computes on several devices that have memory of their own, as GPUs have."""
        return len(self.used) > 1 and not KINDS[self.used[0].kind].uses_main_memory

    @property
    def _memories(self) -> int:
        """Number of devices whose memory together holds what a member needs on its device with the most."""
        return len(self.used) if self.has_own_memories and self.is_training else 1

    def flops_per_s(self, dtype: str = BASE_DTYPE) -> float:
        """Return the speed of the device that a member computes on, in FLOP/s; 0.0 if not measured with this dtype."""
        return self.device.flops_per_s.get(dtype, 0.0) if self.devices else 0.0


def _together(devices: Sequence[Device]) -> Device:
    """Return devices of one kind as one device."""
    if len(devices) == 1:
        return devices[0]
    count, dtypes = len(devices), set.intersection(*(set(each.flops_per_s) for each in devices))
    return replace(
        devices[0],
        name=f"{count} x {devices[0].name}",
        memory_bytes=count * min(each.memory_bytes for each in devices),
        flops_per_s={
            dtype: count * min(each.flops_per_s[dtype] for each in devices) for dtype in sorted(dtypes)
        },
        memory_bytes_per_s=count * min(each.memory_bytes_per_s for each in devices),
        overhead_s=max(each.overhead_s for each in devices),
        peer_latency_s=max(each.peer_latency_s for each in devices),
        peer_bytes_per_s=min(each.peer_bytes_per_s for each in devices),
    )


@dataclass(frozen=True)
class Topology:
    """All contributors and the links between them, at one time."""

    contributors: tuple[Contributor, ...]
    links: tuple[Link, ...] = ()
    """Measured links; pairs of machines that were not measured have none."""

    def __getitem__(self, contributor_id: str) -> Contributor:
        """Return the contributor with this id, or raise KeyError."""
        return self._by_id[contributor_id]

    def with_ranks(self, ranks: int, *, is_training: bool = False) -> Topology:
        """Return the topology with these values of `Contributor.ranks` and `Contributor.is_training`."""
        wanted = ranks, is_training
        if all((machine.ranks, machine.is_training) == wanted for machine in self.contributors):
            return self
        machines = (replace(machine, ranks=ranks, is_training=is_training) for machine in self.contributors)
        return Topology(tuple(machines), self.links)

    def without(self, ids: Collection[str]) -> Topology:
        """Return the topology without the contributors with these ids, and without their links."""
        return Topology(
            tuple(machine for machine in self.contributors if machine.id not in ids),
            tuple(link for link in self.links if link.source not in ids and link.target not in ids),
        )

    @cached_property
    def cut_off(self) -> tuple[tuple[str, str], ...]:
        """Return the pairs of machine ids with a dead link, sorted, each pair once; links of the head do not count."""
        pairs = {
            (min(link.source, link.target), max(link.source, link.target))
            for link in self.links
            if link.is_dead
        }
        return tuple(sorted(pair for pair in pairs if all(end in self._by_id for end in pair)))

    @cached_property
    def measured_latency_s(self) -> Mapping[tuple[str, str], float]:
        """Return the largest measured latency of each pair of machine ids, in ascending order; infinite if dead."""
        found: dict[tuple[str, str], float] = {}
        for link in self.links:
            pair = (link.source, link.target) if link.source < link.target else (link.target, link.source)
            latency_s = math.inf if link.is_dead else link.latency_s
            if found.get(pair, -1.0) < latency_s:
                found[pair] = latency_s
        return found

    @cached_property
    def _by_id(self) -> dict[str, Contributor]:
        return {contributor.id: contributor for contributor in self.contributors}


def limited_links(contributors: Iterable[Contributor], links: Iterable[Link]) -> tuple[Link, ...]:
    """Return the links with the bandwidth that the owners of both ends allow.

    Plans use one bandwidth for both directions of a link, so the lowest of the upload and download limits counts.
    """
    limits = {
        machine.id: min(
            machine.upload_bytes_per_s or math.inf,
            machine.download_bytes_per_s or math.inf,
        )
        for machine in contributors
        if machine.upload_bytes_per_s or machine.download_bytes_per_s
    }
    if not limits:
        return tuple(links)
    return tuple(
        replace(
            link,
            bytes_per_s=min(
                link.bytes_per_s, limits.get(link.source, math.inf), limits.get(link.target, math.inf)
            ),
        )
        for link in links
    )


def absurdities(measured: Device | Link) -> Iterator[tuple[str, str]]:
    """Yield (field, problem) for each impossible value of a device or a link.

    Values must be finite, not negative, and at most a plausible maximum. Memory and FLOP/s must be more than 0. A link
    must not lead back to its source.
    """
    if isinstance(measured, Link):
        yield from _absurd("latency_s", measured.latency_s, MOST_LATENCY_S, may_be_zero=True)
        yield from _absurd("bytes_per_s", measured.bytes_per_s, MOST_PER_S, may_be_zero=True)
        if measured.source == measured.target:
            yield "target", "it leads back to its source"
        return
    yield from _absurd("memory_bytes", measured.memory_bytes, MOST_BYTES)
    for dtype, speed in measured.flops_per_s.items():
        yield from _absurd(f"flops_per_s.{dtype}", speed, MOST_PER_S)
    # 0 means that the value was not measured.
    yield from _absurd("memory_bytes_per_s", measured.memory_bytes_per_s, MOST_PER_S, may_be_zero=True)
    yield from _absurd("overhead_s", measured.overhead_s, MOST_OVERHEAD_S, may_be_zero=True)
    yield from _absurd("peer_latency_s", measured.peer_latency_s, MOST_LATENCY_S, may_be_zero=True)
    yield from _absurd("peer_bytes_per_s", measured.peer_bytes_per_s, MOST_PER_S, may_be_zero=True)


def _absurd(name: str, value: float, most: float, *, may_be_zero: bool = False) -> Iterator[tuple[str, str]]:
    if not math.isfinite(value):
        yield name, f"{value} is no measurement"
    elif value < 0 or (value == 0 and not may_be_zero):
        yield name, f"{value:g} is not {'at least' if may_be_zero else 'more than'} 0"
    elif value > most:
        yield name, f"{value:g} is more than {most:g}"
