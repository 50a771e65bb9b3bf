"""Real Ray nodes on this machine: a head and four raylets, each standing for a contributor."""

import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from share_compute.jobs.events import Assignment, AttemptEvent, attempt_events
from share_compute.planning.timings import MachineTimings
from share_compute.protocol.failures import Failure
from share_compute.specification import parse_job
from share_compute.topology import Contributor, Device, Topology

ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_max_direct_call_object_size": str(8 * 2**20),
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    before = dict(os.environ)
    os.environ.update(ENVIRONMENT)
    # Paths of Ray's sockets are limited to 107 bytes, and pytest's own folders are longer.
    with tempfile.TemporaryDirectory(prefix="sc-", dir="/tmp") as short:
        os.environ["RAY_TMPDIR"] = short
        local = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 0, "include_dashboard": False, "object_store_memory": 100 * 2**20},
        )
        ray.init(address=local.address, logging_level=logging.ERROR, log_to_driver=False)
        yield local
        ray.shutdown()
        local.shutdown()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def nodes(cluster: Cluster) -> list[Any]:
    return [cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20) for _ in range(4)]


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
    """Run one attempt at a job with the real coordinator, and return all it told."""

    def run(
        job: dict[str, Any],
        *,
        checkpoint: Path | None = None,
        number: int = 1,
        machines: Topology = topology,
        folder: Path = tmp_path,
        timings: dict[str, MachineTimings] | None = None,
        failures: Sequence[Failure] = (),
        on_event: Callable[[AttemptEvent, Any], None] = lambda _event, _coordinator: None,
    ) -> list[AttemptEvent]:
        from share_compute_actors.coordinator import Coordinator

        assignment = Assignment(
            job_id="job-test",
            attempt=number,
            spec=parse_job(job),
            topology=machines,
            folder=folder,
            checkpoint=checkpoint,
            failures=tuple(failures),
            timings=timings or {},
        )
        coordinator = Coordinator.remote(assignment.model_dump_json())
        running = coordinator.run.remote()
        told: list[AttemptEvent] = []
        while not told or told[-1].type != "ended":
            news = attempt_events.validate_json(ray.get(coordinator.events.remote(len(told), 5.0)))
            for event in news:
                told.append(event)
                on_event(event, coordinator)
        ray.get(running)
        ray.kill(coordinator)
        return told

    return run
