"""Starts the Ray node of a contributor as a confined child process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from share_compute.device_kinds import KINDS, DeviceKind
from share_compute.errors import Unavailable
from share_compute_actors.machine.confine import Policy
from share_compute_actors.machine.launch import RayNode, launch, ray_environment
from share_compute_actors.machine.ports import NodePorts
from share_compute_actors.machine.processes import ChildProcesses
from share_compute_actors.machine.temporary import (
    COMPILED,
    compiled_folder,
    private_folder,
    temporary_folder,
)

_OBJECT_STORE_BYTES = 80_000_000


@dataclass(frozen=True, slots=True)
class NodeLimits:
    """Resources that Ray may use on this node."""

    memory_bytes: int
    cpu_threads: int
    device: DeviceKind = "cpu"
    devices: int = 1
    """Number of devices."""
    gpus: tuple[str, ...] = ()
    """UUIDs of the only GPUs that processes of the node can use; empty without a GPU, or if it has no UUID."""


@dataclass(frozen=True, slots=True)
class NodeAccess:
    """Address, secret and settings that a node needs to join the cluster."""

    ray_address: str
    """Address of the head, as ``host:port``."""
    token: str
    labels: Mapping[str, str]
    environment: Mapping[str, str]


def start_node(
    children: ChildProcesses,
    access: NodeAccess,
    limits: NodeLimits,
    ports: NodePorts,
    *,
    address: str | None = None,
) -> RayNode:
    """Start this machine's node, confined to its own folders, and wait until it is registered.

    Args:
        children: starts the node as a child process. ``children.folder`` must have a short path and belong only to this
            node.
        access: address of the head, the cluster's token, and settings of the node.
        limits: resources that the node may use.
        ports: ports that the node may listen on.
        address: IP address at which other machines reach this machine. Default: its address on the route to the head.

    Raises:
        Unavailable: a folder of the node cannot be used, or the node did not start.
        Conflict, NotAuthorized, VersionMismatch: see `launch`.
    """
    labels = ",".join(f"{name}={value}" for name, value in access.labels.items())
    arguments = [
        f"--address={access.ray_address}",
        f"--num-cpus={limits.cpu_threads}",
        f"--num-gpus={limits.devices if KINDS[limits.device].is_gpu else 0}",
        f"--memory={limits.memory_bytes}",
        f"--object-store-memory={_OBJECT_STORE_BYTES}",
        f"--temp-dir={children.folder / 'ray'}",
        f"--labels={labels}",
        "--include-log-monitor=false",
        *ports.arguments(),
    ]
    if address:
        arguments.append(f"--node-ip-address={address}")
    temporary = private_folder(temporary_folder() / f"share-compute-{os.getuid()}-{children.folder.name}")
    own = private_folder(children.folder / "ray")
    environment = {
        **ray_environment(access.token, children.folder),
        **access.environment,
        **ports.environment,
        **_device_environment(limits.gpus),
        "TMPDIR": str(temporary),
    }
    write = [str(own), str(temporary)]
    with suppress(Unavailable):  # members then compile anew
        write.append(str(compiled_folder()))
        environment[COMPILED] = write[-1]
    policy = Policy(write=tuple(write), home=str(temporary), names_threads=bool(limits.gpus))
    return launch(children, "node", arguments, environment=environment, policy=policy)


def _device_environment(gpus: tuple[str, ...]) -> dict[str, str]:
    # Ray must not replace CUDA_VISIBLE_DEVICES in its actors. Members request a part of the GPU; the actor that
    # measures the GPU requests none. GPUs are named by their UUIDs, because CUDA and the driver may number them in
    # different orders.
    return {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
