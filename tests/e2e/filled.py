"""A store with any number of machines and jobs, for measurements and screenshots."""

from __future__ import annotations

import math
import random
from datetime import timedelta
from typing import Any

import yaml
from tests.e2e.scenes import plan_on

from share_compute.lifecycle.attempt_events import Measured, Planned, StageTiming, Started, StepCommitted
from share_compute.lifecycle.states import ContributorState
from share_compute.simulation.fleet_name import FleetName
from share_compute.simulation.fleets import make_fleet
from share_compute.specification import parse_job
from share_compute.store import ContributorRecord, JobRecord, Store
from share_compute.topology import HEAD, Link
from share_compute_api.control.machines.utilization import UtilizationMonitor
from share_compute_api.schemas.utilization import Utilization

JOB = """
name: digits
model:
  layers:
    - {type: linear, options: {in_features: 64, out_features: 32}}
    - {type: relu}
    - {type: linear, options: {in_features: 32, out_features: 10}}
data: {dataset: digits}
training: {steps: 1000000, batch_size: 32, microbatches: 4}
"""


class Filled:
    """A store filled with machines and jobs, for which further events can be generated.

    Args:
        store: an empty store.
        machines: number of machines that join.
        jobs: number of jobs that are submitted; half of them run, on two machines each.
    """

    def __init__(self, store: Store, machines: int, jobs: int) -> None:
        self._store = store
        spec: dict[str, Any] = yaml.safe_load(JOB)
        self._draw = random.Random(0)
        self._reports = 0
        self._steps: dict[str, int] = {}
        self.machines = self._join(machines)
        self.jobs = [store.jobs.create(parse_job({**spec, "name": f"digits-{n}"})) for n in range(jobs)]
        free = iter(self.machines[: machines // 2])
        self._running = [
            self._start(job, [next(free), next(free)]) for job in self.jobs[: min(jobs, machines) // 4]
        ]
        self._restless = self.machines[machines // 2 :]

    def _join(self, count: int) -> list[ContributorRecord]:
        fleet = make_fleet(FleetName.mixed, count)
        ids: dict[str, str] = {HEAD: HEAD}
        joined = []
        for number, machine in enumerate(fleet.contributors):
            _, code = self._store.invites.create(label=f"owner {number % 40}")
            limits = {"memory_bytes": machine.memory_bytes, "cpu_threads": machine.cpu_threads, "gpus": 0}
            record, _ = self._store.contributors.join(
                code, name=f"machine-{number}", host=f"host-{number}.example", versions={}, limits=limits
            )
            ids[machine.id] = record.id
            joined.append((record, machine))
        ready: list[ContributorRecord] = []
        for record, machine in joined:
            self._store.contributors.online(
                record.id, node_id=f"{len(ready):056x}", address=machine.address or ""
            )
            links = [
                Link(ids[link.source], ids[link.target], link.latency_s, link.bytes_per_s)
                for link in fleet.links
                if link.source == machine.id
            ]
            ready.append(self._store.contributors.ready(record.id, capacity=machine.devices, links=links))
        return ready

    def _start(self, job: JobRecord, members: list[ContributorRecord]) -> tuple[JobRecord, list[str]]:
        begun = self._store.jobs.begin(job.id, [member.id for member in members])
        plan = plan_on(members, memory_bytes=1 << 28)
        self._store.progress.record(
            job.id, begun.attempt, [Planned(plan=plan), Started(first_step=1, total_steps=1_000_000)]
        )
        return begun, [member.id for member in members]

    def use(self, monitor: UtilizationMonitor) -> None:
        """Report the utilization of all machines over the last hour."""
        for number in range(len(self.machines)):
            # The page of the first one is opened, which draws no lines between distant reports.
            for ago in range(3600, -1, -60 if number else -10):
                self._report(monitor, number, ago)

    def report(self, monitor: UtilizationMonitor) -> None:
        """Report the present utilization of the next machine."""
        self._reports += 1
        self._report(monitor, self._reports % len(self.machines), 0)

    def _report(self, monitor: UtilizationMonitor, number: int, ago_s: float) -> None:
        now = self._store.clock()
        moved = now.timestamp() - ago_s
        busy = 0.5 + 0.45 * math.sin(number + moved / (60 + number % 600))
        figures = Utilization(
            cpu_fraction=busy,
            host_cpu_fraction=min(1.0, busy + 0.1),
            memory_bytes=int((1 + busy) * 2**30),
            received_bytes_per_s=2e7 * busy,
            sent_bytes_per_s=1e7 * busy,
        )
        monitor.add(self.machines[number].id, figures, now - timedelta(seconds=ago_s))

    def happen(self) -> None:
        """Generate one event: mostly a step, sometimes a measurement, or a machine that leaves or comes back."""
        chance = self._draw.random()
        if chance < 0.08:
            record = self._store.contributors.get(self._draw.choice(self._restless).id)
            if record.state is ContributorState.ready:
                self._store.contributors.set_state(
                    record, ContributorState.lost, "its Ray node is dead or does not answer"
                )
            elif record.state is ContributorState.lost:
                self._store.contributors.rejoin(record.id)
            elif record.state is ContributorState.joining:
                self._store.contributors.online(
                    record.id, node_id=record.id.encode().hex(), address="192.0.2.7"
                )
            else:
                self._store.contributors.ready(
                    record.id, capacity=record.capacity or (), links=record.links or ()
                )
            return
        # The first job is watched on its page: half of the steps are its steps.
        job, members = self._running[0] if self._draw.random() < 0.5 else self._draw.choice(self._running)
        step = self._steps[job.id] = self._steps.get(job.id, 0) + 1
        event: StepCommitted | Measured = StepCommitted(
            step=step,
            loss=2.3 / (1 + step),
            learning_rate=0.001,
            gradient_norm=1.0,
            samples=32,
            tokens=32,
            seconds=0.1,
            tokens_per_s=320.0,
        )
        if chance < 0.15:
            busy = {member: self._draw.random() for member in members}
            timings = tuple(StageTiming(predicted_busy_s=None, measured_busy_s=s) for s in busy.values())
            event = Measured(
                step=step, predicted_step_s=None, measured_step_s=1.0, stages=timings, machines=busy
            )
        self._store.progress.record(job.id, job.attempt, [event])
