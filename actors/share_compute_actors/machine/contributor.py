"""Measures a contributor's devices and its links to other machines, in an actor on the contributor's node."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from share_compute.errors import UserError, as_ours
from share_compute.program import command_of
from share_compute.topology import Link
from share_compute_actors.machine.cores import on_cores, share_cores
from share_compute_actors.machine.probe_links import Payload, measure_link
from share_compute_actors.machine.processes import tied
from share_compute_actors.machine.reach import Place, closed_ports, unanswered
from share_compute_actors.wire import TEXT, answers_by

_PROBE_TIMEOUT_S = 120.0
_ECHO_S = 20.0
"""Time limit of one echo call, in seconds. 4 MiB take this long at 1.7 Mbit/s, and the peer's actor may be starting."""


@ray.remote(num_cpus=0, max_restarts=0, concurrency_groups={"echo": 2, "measure": 1})
class ContributorActor:
    """Actor on one node that measures the node and its links, and concurrently answers other nodes' measurements.

    Args:
        contributor_id: id of the contributor; ``head`` for the head itself.
    """

    def __init__(self, contributor_id: str) -> None:
        self._id = contributor_id

    @ray.method(concurrency_group="measure")
    @answers_by(TEXT, as_ours)
    def probe(
        self, memory_bytes: int, cpu_threads: int, device: str, beside: int = 0, devices: int = 1
    ) -> str:
        """Measure the lent devices, each in a separate process; return a list of `Device` as JSON.

        Devices that are lent together are measured at the same time, as members use them. Parts of a CPU have equal
        parts of memory, threads and processors.

        Args:
            memory_bytes: lent memory, in bytes.
            cpu_threads: number of threads to compute with.
            device: kind of the devices; see `share_compute.device_kinds`.
            beside: number of threads that other contributors on this host use.
            devices: number of devices that are lent together.

        Raises:
            UserError: a device could not be measured.
        """
        threads = max(1, cpu_threads // devices)
        # Ray sets OMP_NUM_THREADS to 1 for an actor that reserves no CPUs.
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        cores = share_cores(devices) if devices > 1 and device == "cpu" else ((),) * devices
        with tempfile.TemporaryDirectory() as folder:
            commands = [
                [
                    *command_of("share_compute_actors.machine.probe", "--json"),
                    *("--device", device, "--devices", str(devices), "--place", str(place)),
                    *("--memory-bytes", str(memory_bytes // devices), "--cpu-threads", str(threads)),
                    *("--beside", str(beside // devices + (place < beside % devices))),
                    *(["--meeting", folder] if devices > 1 else []),
                ]
                for place in range(devices)
            ]
            answers = _run_together(
                [on_cores(command, own) for command, own in zip(commands, cores, strict=True)], environment
            )
        return json.dumps([measured for answer in answers for measured in json.loads(answer)])

    @ray.method(concurrency_group="measure")
    def measure_links(self, peers: Sequence[tuple[str, Place, Any]]) -> str:
        """Measure the links to these peers; return the result of `links_to` as JSON."""
        return json.dumps([asdict(link) for link in links_to(self._id, peers)])

    @ray.method(concurrency_group="echo")
    def dial(self, address: str, ports: Sequence[int], handshake: str) -> str:
        """Test another machine's ports from this machine; return the result of `closed_ports` as JSON.

        Args:
            address: IP address of the other machine.
            ports: TCP ports that the other machine listens on.
            handshake: handshake that the other machine sends on each connection, in hexadecimal.
        """
        return json.dumps(closed_ports(address, ports, bytes.fromhex(handshake)))

    @ray.method(concurrency_group="echo")
    def echo(self, payload: Payload) -> int:
        """Return the number of bytes of ``payload``."""
        return payload.nbytes


def _run_together(commands: Sequence[Sequence[str]], environment: Mapping[str, str]) -> list[str]:
    """Run the probes of all devices at the same time, and return the output of each.

    Raises:
        UserError: a probe failed, or took too long. The others are ended.
    """
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(len(commands)))
        processes = [
            subprocess.Popen(
                tied(command), env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            for command in commands
        ]
        for process in processes:
            stack.callback(process.kill)
        answers = [pool.submit(process.communicate, timeout=_PROBE_TIMEOUT_S) for process in processes]
        for answer in as_completed(answers):
            process = processes[answers.index(answer)]
            try:
                _, errors = answer.result()
            except subprocess.TimeoutExpired:
                raise UserError(
                    f"the device was not measured within {_PROBE_TIMEOUT_S:.0f} s",
                    hint="end other programs that use it, or lend less",
                ) from None
            if process.returncode != 0:
                last = (errors.strip().splitlines() or ["it printed nothing"])[-1]
                raise UserError(
                    f"the device could not be measured: {last}", hint="try --device cpu, or lend less"
                )
        return [answer.result()[0] for answer in answers]


def _echo(actor: Any, payload: Payload) -> Any:
    return ray.get(actor.echo.remote(payload), timeout=_ECHO_S)


def links_to(
    contributor_id: str,
    peers: Sequence[tuple[str, Place, Any]],
    echo: Callable[[Any, Payload], Any] = _echo,
) -> list[Link]:
    """Measure the links from this machine to its peers, one at a time.

    The link to a peer that does not answer is reported as dead. Peers whose actors died are left out.

    Args:
        contributor_id: contributor id of this machine.
        peers: contributor id, address and port of the Ray node, and actor of each peer.
        echo: sends a payload to an actor, and returns the answer; it raises Ray's errors.
    """
    unresponsive = unanswered({place for _, place, _ in peers})
    links = []
    for peer_id, place, actor in peers:
        try:
            is_dead = place in unresponsive
            link = None if is_dead else measure_link(contributor_id, peer_id, partial(echo, actor))
        except (ActorUnavailableError, GetTimeoutError):
            link = None
        except RayActorError:
            continue
        links.append(link or Link.dead(contributor_id, peer_id))
    return links


def start_contributor(contributor_id: str, node_id: str) -> Any:
    """Start a `ContributorActor` on Ray node ``node_id`` and return its handle; the actor ends with its last handle."""
    where = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ContributorActor.options(scheduling_strategy=where).remote(contributor_id)  # type: ignore[attr-defined]
