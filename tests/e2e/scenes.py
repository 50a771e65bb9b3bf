"""Events of a cluster, written into the store as the supervisors write them."""

from __future__ import annotations

import math
from datetime import timedelta
from pathlib import Path

from share_compute.lifecycle.attempt_events import (
    ArtifactSaved,
    AttemptEnded,
    BranchRound,
    CheckpointSaved,
    Note,
    Planned,
    Reformed,
    RoundMerged,
    Started,
    StepCommitted,
    Validated,
)
from share_compute.lifecycle.states import ContributorState
from share_compute.planning.plan import BranchPlan, MemberPlan, Plan, StagePlan
from share_compute.specification import TrainJob, parse_job
from share_compute.store import ContributorRecord, JobRecord, Store
from share_compute.topology import Device, Link
from share_compute_api.control.machines.utilization import UtilizationMonitor
from share_compute_api.schemas.utilization import Utilization

VERSIONS = {"python": "3.11.7", "ray": "2.60.0", "torch": "2.13.0", "share_compute": "0.2.0"}
DIGITS = """
name: digits
model:
  layers:
    - {type: linear, options: {in_features: 64, out_features: 32}}
    - {type: relu}
    - {type: linear, options: {in_features: 32, out_features: 10}}
data: {dataset: digits}
training: {steps: 40, batch_size: 32, microbatches: 4}
"""


def digits() -> TrainJob:
    """Return a small job."""
    return parse_job(DIGITS)


def join(store: Store, name: str) -> ContributorRecord:
    """Add a machine that has passed preflight."""
    _, code = store.invites.create()
    limits = {"memory_bytes": 4 << 30, "cpu_threads": 4, "device": "cpu"}
    return store.contributors.join(code, name=name, host=f"{name}.example", versions=VERSIONS, limits=limits)[
        0
    ]


def measure(store: Store, machine: ContributorRecord, flops_per_s: float) -> ContributorRecord:
    """Add the node and the probe's results of a machine."""
    store.contributors.online(machine.id, node_id="ab" * 28, address="192.0.2.7")
    device = Device("cpu", "Example CPU", 4 << 30, {"float32": flops_per_s}, 2e10)
    return store.contributors.ready(
        machine.id, capacity=[device], links=[Link("head", machine.id, 0.00023, 1.2e9)]
    )


def use(monitor: UtilizationMonitor, store: Store, machine: ContributorRecord, busy: float) -> None:
    """Report a machine's utilization over the last hour, with a break; at last ``busy``, from 0 to 1."""
    now = store.clock()
    for ago in range(3600, -1, -10):
        if 1500 < ago < 1800:
            continue
        part = busy * (0.6 + 0.4 * math.cos(ago / 240 + len(machine.id)))
        figures = Utilization(
            cpu_fraction=part,
            host_cpu_fraction=min(1.0, part + 0.1),
            memory_bytes=int((1 + part) * 2**30),
            cpu_celsius=40 + 35 * part,
            received_bytes_per_s=2e7 * part,
            sent_bytes_per_s=1e7 * part * (1 + 0.3 * math.sin(ago / 60)),
        )
        monitor.add(machine.id, figures, now - timedelta(seconds=ago))
    monitor.add(machine.id, figures.model_copy(update={"cpu_fraction": busy}), now)


def start(store: Store, job: JobRecord, machines: list[ContributorRecord]) -> None:
    """Start an attempt on these machines, with a stage on each."""
    store.jobs.begin(job.id, [machine.id for machine in machines])
    note = Note(message="the pinned plan no longer holds: the job continues without elm", level="warning")
    started = Started(first_step=1, total_steps=40)
    store.progress.record(job.id, job.attempt, [Planned(plan=plan_on(machines)), note, started])


def reform(store: Store, job: JobRecord, machines: list[ContributorRecord], sentence: str) -> None:
    """Change the membership: training continues with these machines."""
    epoch = Reformed(epoch=1, step=11, plan=plan_on(machines), seconds=0.8, recomputed=3, sentence=sentence)
    store.progress.record(job.id, job.attempt, [epoch])


def plan_on(machines: list[ContributorRecord], memory_bytes: int = 1 << 20) -> Plan:
    """Return a plan of the three layers with one machine for each stage."""
    stages = tuple(
        StagePlan(
            start=index,
            stop=index + 1 if machine is not machines[-1] else 3,
            parameters=2_000,
            members=(
                MemberPlan(
                    contributor_id=machine.id,
                    name=machine.name,
                    microbatches=(0, 1, 2, 3),
                    memory_bytes=memory_bytes,
                    reason="its share by measured speed",
                ),
            ),
        )
        for index, machine in enumerate(machines)
    )
    return Plan(
        epoch=0,
        strategy="compute_weighted",
        num_layers=3,
        parameters=2_000 * len(stages),
        stages=stages,
        microbatches=4,
    )


def train(store: Store, job: JobRecord, first_step: int, last_step: int) -> None:
    """Commit steps, with a validation and a checkpoint after the last of them."""
    steps = [
        StepCommitted(
            step=step,
            loss=2.3 / step,
            learning_rate=0.001,
            gradient_norm=1.0,
            samples=32,
            tokens=32,
            seconds=0.01,
            tokens_per_s=3200.0,
        )
        for step in range(first_step, last_step + 1)
    ]
    validated = Validated(split="validation", step=last_step, loss=2.4 / last_step, accuracy=0.5)
    saved = CheckpointSaved(step=last_step, path=Path("checkpoint"), size_bytes=12_345)
    store.progress.record(job.id, job.attempt, [*steps, validated, saved])


def branched(policy: str = "kind: local") -> TrainJob:
    """Return a small job with three branches."""
    rounds = f"steps: 40, synchronization: {{{policy}, branches: 3, every: 10}},"
    return parse_job(DIGITS.replace("steps: 40,", rounds))


def start_branches(store: Store, job: JobRecord, islands: list[list[ContributorRecord]]) -> None:
    """Start an attempt with a branch on each of these islands."""
    store.jobs.begin(job.id, [machine.id for island in islands for machine in island])
    branches = tuple(
        BranchPlan(number=number, stages=plan_on(island).stages) for number, island in enumerate(islands)
    )
    plan = plan_on(islands[0]).model_copy(update={"branches": branches})
    store.progress.record(job.id, job.attempt, [Planned(plan=plan), Started(first_step=1, total_steps=40)])


def merge(
    store: Store, job: JobRecord, number: int, late: tuple[int, ...] = (), missing: tuple[int, ...] = ()
) -> None:
    """Merge a round of three branches."""
    merged = [
        _contributed(branch, number - (branch in late), 0.3 - branch / 10)
        for branch in range(3)
        if branch not in missing
    ]
    _record(store, job, number, merged, tuple(sorted({*missing, *late})))


def push(store: Store, job: JobRecord, number: int, branch: int, base: int) -> None:
    """Merge the push of one branch to a parameter server, computed with the weights of merge ``base``."""
    _record(store, job, number, [_contributed(branch, base + 1, 0.0)], ())


def _contributed(branch: int, number: int, waited_s: float) -> BranchRound:
    return BranchRound(
        number=branch,
        round=number,
        machines=(),
        loss=2.3 / number + branch / 100,
        samples=320,
        seconds=0.6 + branch / 10,
        waited_s=waited_s,
        sent_bytes=1000 + branch,
    )


def _record(
    store: Store, job: JobRecord, number: int, merged: list[BranchRound], missing: tuple[int, ...]
) -> None:
    event = RoundMerged(
        round=number,
        step=10 * number,
        branches=tuple(merged),
        missing=missing,
        update_bytes=2500,
        weight_bytes=90_000,
        merge_s=0.01,
    )
    store.progress.record(job.id, job.attempt, [event])


def finish(store: Store, job: JobRecord, folder: Path) -> None:
    """Write the result; the job succeeds."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "layers"}')
    saved = ArtifactSaved(name="model", path=folder, size_bytes=24)
    ended = AttemptEnded(outcome="succeeded", reason="all 40 steps are done")
    store.progress.record(job.id, job.attempt, [saved, ended])


def lose(store: Store, job: JobRecord, machine: ContributorRecord) -> None:
    """Lose a machine of a job."""
    store.contributors.set_state(
        store.contributors.get(machine.id), ContributorState.lost, "its Ray node is dead or does not answer"
    )
    hint = "resume the job to continue from its last checkpoint on the available machines"
    error = {"code": "contributor-lost", "hint": hint}
    ended = AttemptEnded(outcome="failed", reason=f"machines were lost: {machine.name}", error=error)
    store.progress.record(job.id, job.attempt, [ended])
