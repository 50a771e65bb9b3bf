"""Whole attempts on a small Ray cluster, started as by the control plane, with machines that can be killed."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import psutil

from share_compute.lifecycle.attempt_events import Assignment, AttemptEvent, Offer, attempt_events
from share_compute.models.storage.weights import WeightFolder
from share_compute.topology import Contributor, Device, Topology

Scope = Literal["member", "machine"]
"""Part of a machine that is killed: the member's process, or all processes including the raylet."""


NOMINAL = Device("cpu", "cpu", 4 * 2**30, {"float32": 1e10})


class Machines:
    """Raylets by contributor id. `topology` starts raylets again that were killed.

    Args:
        cluster: the `ray.cluster_utils.Cluster`.
        device: device that each machine reports.
    """

    def __init__(self, cluster: Any, device: Device = NOMINAL) -> None:
        self._cluster = cluster
        self._device = device
        self._nodes: dict[str, Any] = {}

    def topology(self, count: int) -> Topology:
        """Return a topology of this many equal machines."""
        found = []
        for place in range(count):
            worker = f"c{place}"
            if worker not in self._nodes:
                self._nodes[worker] = self._cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20)
            node = self._nodes[worker]
            found.append(
                Contributor(
                    worker, f"machine-{place}", (self._device,), node_id=node.node_id, address="127.0.0.1"
                )
            )
        return Topology(tuple(found))

    def killing(self, worker: str, scope: Scope) -> Callable[[], None]:
        """Return a function that kills a machine or the member on it; its processes are looked up beforehand.

        The look-up takes time, which would delay the kill.
        """
        node = self._nodes[worker]
        raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
        family = raylet.children(recursive=True)
        if scope == "member":
            members = [one for one in family if _title(one).startswith("ray::Member")]
            doomed = [*members, *(child for one in members for child in one.children(recursive=True))]
        else:
            doomed = [raylet, *family]
            del self._nodes[worker]
        if not doomed:
            raise RuntimeError(f"no member runs on {worker}")

        def kill() -> None:
            for process in doomed:
                with suppress(psutil.NoSuchProcess):  # its parent ended it meanwhile
                    process.kill()

        return kill

    def bury(self) -> None:
        """Remove the killed nodes from Ray's list of nodes."""
        living = {id(node) for node in self._nodes.values()}
        for node in [node for node in self._cluster.worker_nodes if id(node) not in living]:
            self._cluster.remove_node(node, allow_graceful=False)


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


class Attempt:
    """A running coordinator that gets all machines that it asks for, as the control plane offers free ones.

    Args:
        assignment: assignment of the attempt.
    """

    def __init__(self, assignment: Assignment) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from share_compute_actors.training.coordinator.coordinator import Coordinator

        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._actor = Coordinator.options(scheduling_strategy=here).remote(  # type: ignore[attr-defined]
            assignment.model_dump_json()
        )
        self._job_id = assignment.job_id
        self._topology = assignment.topology
        self._running = self._actor.run.remote()

    def events(self) -> Generator[tuple[AttemptEvent, float], None, None]:
        """Yield its events with the times at which they were received; end the attempt afterwards.

        Raises:
            RuntimeError: the attempt did not succeed.
        """
        import ray

        received = 0
        try:
            while True:
                news = attempt_events.validate_json(ray.get(self._actor.events.remote(received, 5.0)))
                now_s = time.monotonic()
                received += len(news)
                if not news and ray.wait([self._running], timeout=0)[0]:
                    ray.get(self._running)  # raises the error that stopped its events
                for event in news:
                    if event.type == "ended":
                        if event.outcome != "succeeded":
                            raise RuntimeError(f"the attempt {event.outcome}: {event.reason}")
                        return
                    if event.type == "replan-proposed":
                        answer = Offer(topology=self._topology, answers=event.step)
                        self._actor.offer.remote(answer.model_dump_json())
                    yield event, now_s
        finally:
            self.end()

    def end(self) -> None:
        """End the coordinator and the members that it started; no other coordinator takes them over."""
        import ray

        from share_compute_actors.group.naming import end_members

        ray.kill(self._actor)
        end_members(self._job_id)


def digest(folder: Path) -> str:
    """Return the SHA-256 of all weights of a finished job, in the order of their names."""
    return WeightFolder(folder / "artifacts" / "model").digest()
