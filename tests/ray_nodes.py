"""Real Ray nodes on this machine: a head and four raylets, each standing for a contributor."""

import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from tests.warm_workers import Forks

from share_compute.lifecycle.attempt_events import Assignment, AttemptEvent, attempt_events
from share_compute.planning.cost.timings import MachineTimings
from share_compute.protocol.failures import InjectedFailure
from share_compute.specification import parse_job
from share_compute.topology import Contributor, Device, Topology
from share_compute_actors.machine.launch import RAY_SETTINGS
from share_compute_actors.machine.ray_start import leave_out_agents

ENVIRONMENT = {
    **RAY_SETTINGS,
    "RAY_AUTH_MODE": "disabled",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",  # other tests would take the cores
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Cluster]:
    before = dict(os.environ)
    os.environ.update(ENVIRONMENT)
    # Paths of Ray's sockets are limited to 107 bytes, and pytest's own folders are longer.
    with tempfile.TemporaryDirectory(prefix="sc-", dir="/tmp") as short:
        os.environ["RAY_TMPDIR"] = short
        forks = Forks(Path(short))
        leave_out_agents()
        local = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 0,
                "include_dashboard": False,
                "include_log_monitor": False,
                "no_monitor": True,
                "object_store_memory": 100 * 2**20,
                "setup_worker_path": str(forks.script),
            },
        )
        ray.init(address=local.address, logging_level=logging.ERROR, log_to_driver=False)
        yield local
        ray.shutdown()
        local.shutdown()
        forks.close()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def nodes(ray_cluster: Cluster) -> list[Any]:
    return [add_node(ray_cluster) for _ in range(4)]


def add_node(cluster: Cluster) -> Any:
    """Start a raylet that stands for a contributor, with a GPU in Ray's books even where there is none."""
    return cluster.add_node(
        num_cpus=1, num_gpus=1, object_store_memory=80 * 2**20, setup_worker_path=str(Forks.script)
    )


def on_the_head() -> NodeAffinitySchedulingStrategy:
    """Return a scheduling strategy for the server's own actors: on the head, and on no contributor's machine."""
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def processes_on(node: Any, actor: str) -> list[psutil.Process]:
    """Return the processes of actors of this class on a node."""
    (raylet,) = node.all_processes["raylet"]
    forked = map(Forks.of, (started.pid for started in psutil.Process(raylet.process.pid).children()))
    found = []
    for pid in forked:
        with suppress(psutil.NoSuchProcess):
            if pid is not None and f"ray::{actor}" in title(worker := psutil.Process(pid)):
                found.append(worker)
    return found


def title(process: psutil.Process) -> str:
    """Return the command line of a process; empty if the process has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


@pytest.fixture
def topology(nodes: list[Any]) -> Topology:
    device = Device("cpu", "cpu", memory_bytes=2**31, flops_per_s={"float32": 1e10})
    return Topology(
        tuple(
            Contributor(
                id=f"c{index}",
                name=f"machine-{index}",
                devices=(device,),
                node_id=node.node_id,
                address="127.0.0.1",
            )
            for index, node in enumerate(nodes)
        )
    )


Attempt = Callable[..., list[AttemptEvent]]


@pytest.fixture
def attempt(topology: Topology, tmp_path: Path) -> Attempt:
    """Run one attempt at a job with the real coordinator; return all of its events, until it ends or dies."""

    def run(
        job: dict[str, Any],
        *,
        checkpoint: Path | None = None,
        number: int = 1,
        known: int = 0,
        machines: Topology = topology,
        folder: Path = tmp_path,
        timings: dict[str, MachineTimings] | None = None,
        drift: float = 0.25,
        checkpoint_every_s: float | None = None,
        failures: Sequence[InjectedFailure] = (),
        on_event: Callable[[AttemptEvent, Any], None] = lambda _event, _coordinator: None,
    ) -> list[AttemptEvent]:
        from share_compute_actors.testing.fault_injection import require_carried_out
        from share_compute_actors.training.coordinator.coordinator import Coordinator

        require_carried_out(failures)
        folder.mkdir(parents=True, exist_ok=True)
        assignment = Assignment(
            job_id="job-test",
            attempt=number,
            spec=parse_job(job),
            topology=machines,
            folder=folder,
            checkpoint=checkpoint,
            drift=drift,
            checkpoint_every_s=checkpoint_every_s,
            known_step=known,
            failures=tuple(failures),
            timings=timings or {},
        )
        coordinator = Coordinator.options(  # type: ignore[attr-defined]
            scheduling_strategy=on_the_head()
        ).remote(assignment.model_dump_json())
        running = coordinator.run.remote()
        reported: list[AttemptEvent] = []
        while not reported or reported[-1].type != "ended":
            try:
                news = attempt_events.validate_json(ray.get(coordinator.events.remote(len(reported), 5.0)))
            except RayActorError:
                return reported
            for event in news:
                reported.append(event)
                on_event(event, coordinator)
        ray.get(running)
        ray.kill(coordinator)
        return reported

    return run
