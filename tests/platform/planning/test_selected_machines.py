"""Plans of jobs that name the machines that they use or avoid."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.platform.planning.models import PROFILE, job, lan, machine

from share_compute.errors import PlanInfeasible
from share_compute.files.topology_file import describe_topology, read_topology, write_topology
from share_compute.planning.dry_run import dry_run
from share_compute.specification.workload import ServingWorkload
from share_compute.topology import Contributor


def labelled(name: str, gflops: float, **labels: str) -> Contributor:
    return replace(machine(name, gflops), labels=labels)


TOPOLOGY = lan(
    labelled("a", 50, gpu="no", site="paris"), labelled("b", 90, site="rome"), labelled("c", 40, site="paris")
)


def test_machines_that_the_job_avoids_get_no_layers_in_any_plan() -> None:
    spec = job(avoid=["site=rome"])
    report = dry_run(spec, TOPOLOGY, PROFILE, compare=True, serving=ServingWorkload())
    assert report.serving is not None
    for plan in (report.plan, report.serving.plan):
        assert "b" not in plan.machines
        reasons = {idle.name: idle.reason for idle in plan.idle}
        assert reasons["b"] == "avoided by the job: parallelism.avoid names site=rome"
        assert plan.machines | {idle.contributor_id for idle in plan.idle} == {"a", "b", "c"}
    assert all(row.machines is None or row.machines <= 2 for row in report.alternatives)
    rounds = dry_run(
        job(only=["site=paris"], training={"synchronization": {"kind": "local", "branches": 2, "every": 4}}),
        TOPOLOGY,
        PROFILE,
    )
    assert rounds.plan.machines == {"a", "c"}
    assert "b" in {idle.name for idle in rounds.plan.idle}


def test_without_a_selection_nothing_changes() -> None:
    assert dry_run(job(), TOPOLOGY, PROFILE) == dry_run(job(only=["a", "b", "c"]), TOPOLOGY, PROFILE)


def test_a_job_that_may_use_no_machine_says_what_it_waits_for() -> None:
    with pytest.raises(PlanInfeasible) as caught:
        dry_run(job(only=["gpu=yes"]), TOPOLOGY, PROFILE)
    assert caught.value.message == (
        "the job may use none of the 3 machines: it waits for a machine with gpu=yes"
    )
    assert "parallelism.only" in (caught.value.hint or "")


def test_labels_travel_with_topology_files() -> None:
    again = read_topology(write_topology(describe_topology(TOPOLOGY)))
    assert [dict(one.labels) for one in again.contributors] == [
        dict(one.labels) for one in TOPOLOGY.contributors
    ]
