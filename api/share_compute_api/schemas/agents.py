"""Requests of a machine's agent, and the answers: joining, port tests, heartbeats."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AwareDatetime, Field, IPvAnyAddress

from share_compute.device_kinds import DeviceKind
from share_compute.files.plain_text import PlainText
from share_compute.files.strict import StrictModel
from share_compute.labels import Labels
from share_compute.lifecycle.states import ContributorState
from share_compute.lifecycle.work import NO_WORK, WorkSums
from share_compute.rate_limit import LEAST_BYTES_PER_S
from share_compute.topology import MOST_DEVICES
from share_compute_api.schemas.bodies import MOMENT, ResponseBody, Versions, example
from share_compute_api.schemas.utilization import Utilization

SERVER = "the server"
"""Value of `ClosedPorts.source` if the server itself tried to connect."""
TcpPort = Annotated[int, Field(ge=1, le=65535)]
MachineName = Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
GpuId = Annotated[str, Field(max_length=100, pattern=r"^[!-~]+$")]


class PreflightRequest(StrictModel):
    """Invite and versions of a machine, to be checked before the machine joins."""

    model_config = example(
        invite="abcd-efgh-ijkl-mnop",
        versions={"python": "3.11.7", "ray": "2.60.0", "torch": "2.13.0", "share_compute": "0.2.0"},
    )

    invite: str = Field(min_length=1, max_length=200)
    versions: Versions


class Preflight(ResponseBody):
    """Facts that a machine needs before it joins."""

    ray_address: str
    """host:port of the Ray head, which the machine must reach."""


class MachineLimits(StrictModel):
    """Resources that a machine's owner lends."""

    memory_bytes: int = Field(ge=1, le=2**63 - 1)
    cpu_threads: int = Field(ge=1, le=4096)
    device: DeviceKind = "cpu"
    """Kind of the devices."""
    devices: int = Field(default=1, ge=1, le=MOST_DEVICES)
    """Number of devices, which members use together."""
    gpus: tuple[GpuId, ...] = Field(default=(), max_length=MOST_DEVICES)
    """UUIDs of the GPUs, as reported by NVIDIA's driver; empty for CPUs."""
    host_id: str = Field(default="", pattern=r"^[0-9a-f]{0,64}$")
    """Label of the host; machines with the same label share its processors. Empty if unknown."""
    host_threads: int = Field(default=0, ge=0, le=65536)
    """Number of processors that the machines with this ``host_id`` share; 0 if unknown."""
    upload_bytes_per_s: int | None = Field(default=None, ge=LEAST_BYTES_PER_S, le=2**63 - 1)
    """Rate at which the machine may send to other machines, in bytes/s; null for no limit."""
    download_bytes_per_s: int | None = Field(default=None, ge=LEAST_BYTES_PER_S, le=2**63 - 1)
    """Rate at which the machine may receive from other machines, in bytes/s; null for no limit."""
    labels: Labels = Field(default_factory=dict)
    """Labels that the owner gives the machine, such as ``{"site": "paris"}``; nobody verifies them."""


class SiblingRequest(StrictModel):
    """Request to join with another device of a host, sent with the key of a device that has joined."""

    model_config = example(
        name="ada-box.cuda1",
        versions={"python": "3.11.7", "ray": "2.60.0", "torch": "2.13.0", "share_compute": "0.2.0"},
        clock=MOMENT,
        limits={
            "memory_bytes": 4 * 2**30,
            "cpu_threads": 4,
            "device": "cuda",
            "gpus": ["GPU-8f1c2d3e-0a1b-4c5d-9e8f-7a6b5c4d3e2f"],
        },
        host="ada-box.example",
    )

    name: MachineName
    """Human-readable name; unique among the machines that are present."""
    versions: Versions
    clock: AwareDatetime
    """Time on the machine's clock; may differ from the server's by at most 30 s."""
    limits: MachineLimits
    host: PlainText = Field(max_length=255)
    """Host name of the machine."""


class JoinRequest(SiblingRequest):
    """Request of a machine to join with an invite."""

    model_config = example(
        invite="abcd-efgh-ijkl-mnop",
        name="ada-laptop",
        versions={"python": "3.11.7", "ray": "2.60.0", "torch": "2.13.0", "share_compute": "0.2.0"},
        clock=MOMENT,
        limits={"memory_bytes": 4 * 2**30, "cpu_threads": 4, "device": "cpu"},
        host="ada-laptop.example",
    )

    invite: str = Field(min_length=1, max_length=200)


class RejoinRequest(StrictModel):
    """Request of a restarted agent to rejoin."""

    model_config = example(
        versions={"python": "3.11.7", "ray": "2.60.0", "torch": "2.13.0", "share_compute": "0.2.0"},
        clock=MOMENT,
        limits={"memory_bytes": 4 * 2**30, "cpu_threads": 4, "device": "cpu"},
    )

    versions: Versions
    clock: AwareDatetime
    """Time on the machine's clock; may differ from the server's by at most 30 s."""
    limits: MachineLimits


class ClusterAccess(ResponseBody):
    """Address, token and options that a machine needs to start its Ray node."""

    ray_address: str
    """host:port of the Ray head."""
    token: str
    """The cluster's secret; keep it out of logs."""
    labels: dict[str, str]
    """Labels that the machine's node must carry."""
    environment: dict[str, str]
    """Environment variables that the machine's node must be started with."""


class Joined(ResponseBody):
    """Answer to a machine that has joined; its Ray node may start."""

    contributor_id: str
    contributor_key: str
    """Bearer key of this contributor; not shown again."""
    cluster: ClusterAccess


class DialRequest(StrictModel):
    """Request of a machine, before its Ray node starts, to test whether other machines reach its ports."""

    model_config = example(address="192.0.2.7", ports=[24001, 24002], handshake="5e" * 16)

    address: IPvAnyAddress
    """IP address of the requesting machine, for connections from other machines."""
    ports: tuple[TcpPort, ...] = Field(min_length=1, max_length=1024)
    handshake: str = Field(pattern=r"^[0-9a-f]{32}$")
    """16 random bytes, in hexadecimal, that the machine sends on each connection."""


class ClosedPorts(ResponseBody):
    """Ports of the requesting machine that another machine, or the server, cannot reach."""

    source: str
    """Name of the machine that tried to connect, or ``the server``."""
    ports: tuple[int, ...]
    """Ports that the source cannot reach; empty if it reaches all."""


class NodePlace(ResponseBody):
    """Address and port of another machine's Ray node."""

    name: str
    address: str
    port: int


class DialReport(ResponseBody):
    """Result of a test of a machine's ports by the server and some other machines."""

    closed: tuple[ClosedPorts, ...]
    """One row for each machine that tried to connect; the first is the server's."""
    nodes: tuple[NodePlace, ...]
    """Ray nodes of the machines that tried to connect; the requesting machine must reach these nodes as well."""


class OnlineRequest(StrictModel):
    """Report that a machine's Ray node runs."""

    model_config = example(node_id="f" * 56, address="192.0.2.7")

    node_id: str = Field(pattern=r"^[0-9a-f]{1,64}$")
    address: PlainText = Field(min_length=1, max_length=45)
    """IP address at which other machines reach the node."""


class HeartbeatRequest(StrictModel):
    """Measurement of a machine since its last heartbeat that had one."""

    model_config = example(utilization={"cpu_fraction": 0.75, "memory_bytes": 2**31, "cpu_celsius": 61.0})

    utilization: Utilization


class ContributorWork(ResponseBody):
    """Current work of a contributor; the answer to its heartbeat."""

    state: ContributorState
    reason: str
    job: str | None
    """Id of the job that the contributor is leased to."""
    job_name: str | None = None
    deployment: str | None = None
    """Name of the deployment that the contributor is leased to."""
    shard: str | None
    """Part of the model that the contributor holds, e.g. ``layers 3-7 of 12``; null if none."""
    tokens_per_s: float | None
    """Throughput of the whole job, or of all replicas of the deployment."""
    flops_per_s: float | None = None
    """Measured speed of the machine in float32 FLOP/s; null until it was measured."""
    head_latency_s: float | None = None
    """One-way latency between the machine and the server; null until it was measured."""
    head_bytes_per_s: float | None = None
    contributed: WorkSums | None = None
    """Sums of all work of the contributor, in the answer to a heartbeat with a body, and to each one of a contributor
    that leaves; null while the server counts events of earlier runs."""
    wanted: Literal["run", "leave"]
    """``leave``: the machine must hand its shards over, then leave."""


class ContributedWork(ResponseBody):
    """Work of a machine as its owner sees it."""

    this_stay: WorkSums
    """Work since the command `share-compute join` started."""
    in_all: WorkSums
    """Work since the machine joined for the first time."""

    @classmethod
    def begin(cls, total: WorkSums) -> Self:
        """Return the work at the start of a machine's stay, given the sum of its earlier work."""
        return cls(this_stay=NO_WORK, in_all=total)

    def until(self, total: WorkSums) -> Self:
        """Return the work at a later time of the stay, when the sum is ``total``.

        If the sum has decreased, because the server lost records, the work of this stay does not change.
        """
        more = {
            name: getattr(self.this_stay, name) + max(0, getattr(total, name) - getattr(self.in_all, name))
            for name in WorkSums.model_fields
        }
        return type(self)(this_stay=WorkSums(**more), in_all=total)
