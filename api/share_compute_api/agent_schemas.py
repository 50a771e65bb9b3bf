"""What a machine's agent asks and is answered: to join, to come online, and while it is there."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AwareDatetime, Field, IPvAnyAddress

from share_compute.jobs.states import ContributorState
from share_compute.plain_text import PlainText
from share_compute.strict import StrictModel
from share_compute.topology import DeviceKind
from share_compute_api.schemas import MOMENT, Versions, View, example

SERVER = "the server"
"""Source of the row that says what the server itself does not reach."""
TcpPort = Annotated[int, Field(ge=1, le=65535)]


class PreflightRequest(StrictModel):
    """What a machine asks before it joins."""

    model_config = example(
        invite="abcd-efgh-ijkl-mnop",
        versions={"python": "3.11.7", "ray": "2.60.0", "torch": "2.13.0", "share_compute": "0.1.0"},
    )

    invite: str = Field(min_length=1, max_length=200)
    versions: Versions


class Preflight(View):
    """What a machine needs to know before it joins."""

    ray_address: str
    """host:port of the Ray head, which it must reach."""


class Limits(StrictModel):
    """What a machine's owner lends."""

    memory_bytes: int = Field(ge=1, le=2**63 - 1)
    cpu_threads: int = Field(ge=1, le=4096)
    device: DeviceKind = "cpu"
    gpu: str | None = Field(default=None, max_length=100, pattern=r"^[!-~]+$")
    """UUID of the GPU, as NVIDIA's driver names it; null for a CPU."""
    host_id: str = Field(default="", pattern=r"^[0-9a-f]{0,64}$")
    """Label of the processors that it uses: machines with the same one share them; empty where that is not known."""
    host_threads: int = Field(default=0, ge=0, le=65536)
    """How many processors these are; 0 where that is not known."""


class SiblingRequest(StrictModel):
    """What a host says to join with another of its devices, by the key of one that joined."""

    model_config = example(
        name="ada-box.cuda1",
        versions={"python": "3.11.7", "ray": "2.60.0", "torch": "2.13.0", "share_compute": "0.1.0"},
        clock=MOMENT,
        limits={
            "memory_bytes": 4 * 2**30,
            "cpu_threads": 4,
            "device": "cuda",
            "gpu": "GPU-8f1c2d3e-0a1b-4c5d-9e8f-7a6b5c4d3e2f",
        },
        host="ada-box.example",
    )

    name: str = Field(min_length=1, max_length=63, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """What people call it; unique among the machines that are here."""
    versions: Versions
    clock: AwareDatetime
    """What its clock says; may differ by 30 s."""
    limits: Limits
    host: PlainText = Field(max_length=255)
    """Its host name."""


class JoinRequest(SiblingRequest):
    """What a machine says to get in."""

    model_config = example(
        invite="abcd-efgh-ijkl-mnop",
        name="ada-laptop",
        versions={"python": "3.11.7", "ray": "2.60.0", "torch": "2.13.0", "share_compute": "0.1.0"},
        clock=MOMENT,
        limits={"memory_bytes": 4 * 2**30, "cpu_threads": 4, "device": "cpu"},
        host="ada-laptop.example",
    )

    invite: str = Field(min_length=1, max_length=200)


class RejoinRequest(StrictModel):
    """What an agent that was started again says."""

    model_config = example(
        versions={"python": "3.11.7", "ray": "2.60.0", "torch": "2.13.0", "share_compute": "0.1.0"},
        clock=MOMENT,
        limits={"memory_bytes": 4 * 2**30, "cpu_threads": 4, "device": "cpu"},
    )

    versions: Versions
    clock: AwareDatetime
    """What its clock says; may differ by 30 s."""
    limits: Limits


class ClusterAccess(View):
    """All that a machine needs to start its Ray node."""

    ray_address: str
    """host:port of the head."""
    token: str
    """The cluster's secret; keep it out of logs."""
    labels: dict[str, str]
    """Labels that its node must carry."""
    environment: dict[str, str]
    """Environment variables that its node must be started with."""


class Joined(View):
    """The machine is in; its Ray node may start."""

    contributor_id: str
    contributor_key: str
    """Bearer key of this one contributor; not shown again."""
    cluster: ClusterAccess


class DialRequest(StrictModel):
    """A machine listens on the ports that its Ray node will have, and asks others to connect to them."""

    model_config = example(address="192.0.2.7", ports=[24001, 24002], greeting="5e" * 16)

    address: IPvAnyAddress
    """That other machines are to reach it at."""
    ports: tuple[TcpPort, ...] = Field(min_length=1, max_length=1024)
    greeting: str = Field(pattern=r"^[0-9a-f]{32}$")
    """The machine sends these 16 random bytes on each connection; in hexadecimal."""


class ClosedPorts(View):
    """Ports of a machine that another one does not reach."""

    source: str
    """Name of the machine that tried to connect; ``the server`` for the server."""
    ports: tuple[int, ...]
    """Without those that it reaches; empty: it reaches all."""


class NodePlace(View):
    """Where the Ray node of another machine listens."""

    name: str
    address: str
    port: int


class DialReport(View):
    """Which ports of a machine the server and some other machines do not reach."""

    closed: tuple[ClosedPorts, ...]
    """One row for each machine that tried: the server first."""
    nodes: tuple[NodePlace, ...]
    """Nodes of the other machines that tried; the machine itself must reach them as well."""


class OnlineRequest(StrictModel):
    """A machine's Ray node runs."""

    model_config = example(node_id="f" * 56, address="192.0.2.7")

    node_id: str = Field(pattern=r"^[0-9a-f]{1,64}$")
    address: PlainText = Field(min_length=1, max_length=45)
    """IP address that other members reach it at."""


class ContributorWork(View):
    """What a contributor does right now; the answer to its sign of life."""

    state: ContributorState
    reason: str
    job: str | None
    """Id of the job that it is leased to."""
    deployment: str | None = None
    """Name of the deployment that it is leased to."""
    shard: str | None
    """E.g. ``layers 3-7 of 12``."""
    tokens_per_s: float | None
    """Of the whole job, or of the replicas of the deployment."""
    wanted: Literal["run", "leave"]
    """``leave``: hand over, then go."""
