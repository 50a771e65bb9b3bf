"""A job has the same result with each algorithm of gradient sums, also if a representative of a site is killed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.ray_nodes import Attempt

from share_compute.models.storage.weights import WeightFolder
from share_compute.planning.plan import Plan, SumPlan
from share_compute.protocol.failures import FailureKind, InjectedFailure
from share_compute.protocol.points import Point
from share_compute.topology import Link, Topology

pytestmark = [pytest.mark.exact]
KILL = InjectedFailure(FailureKind.kill, Point.cell_done, worker="c0", step=2)


def job(collective: str) -> dict[str, Any]:
    sizes = ((64, 96), (96, 96), (96, 10))
    layers: list[dict[str, Any]] = []
    for before, after in sizes:
        layers += [
            {"type": "linear", "options": {"in_features": before, "out_features": after}},
            {"type": "relu"},
        ]
    return {
        "model": {"layers": layers[:-1]},
        "data": {"dataset": "digits"},
        "training": {"steps": 4, "batch_size": 32, "microbatches": 4, "collective": collective},
        "parallelism": {"stages": 1, "members_per_stage": 4, "backups": False},
    }


@pytest.fixture
def two_sites(topology: Topology) -> Topology:
    """Return the machines as two sites of two, with a slow link between the sites."""
    machines = tuple(
        replace(machine, address=f"127.0.0.{1 + place}")
        for place, machine in enumerate(topology.contributors)
    )
    links = [Link("c0", "c1", 5e-4, 1e8), Link("c2", "c3", 5e-4, 1e8)]
    links += [Link(one, other, 5e-3, 1e6) for one in ("c0", "c1") for other in ("c2", "c3")]
    return Topology(machines, tuple(links))


@pytest.fixture(scope="module")
def digests() -> set[str]:
    """Return the digests of the models that the tests of this module trained."""
    return set()


@pytest.mark.parametrize(
    ("collective", "failures", "members"),
    [
        ("auto", [], 4),
        pytest.param("ring", [], 4, marks=pytest.mark.thorough),
        ("tree", [KILL], 3),
        pytest.param("sharded", [KILL], 3, marks=pytest.mark.thorough),
        ("hierarchical", [KILL], 3),
        ("ring", [KILL], 3),
    ],
)
def test_the_result_does_not_depend_on_the_collective(
    attempt: Attempt,
    two_sites: Topology,
    tmp_path: Path,
    digests: set[str],
    collective: str,
    failures: list[InjectedFailure],
    members: int,
) -> None:
    events = attempt(job(collective), machines=two_sites, failures=failures)
    assert events[-1].outcome == "succeeded", events[-1].reason  # type: ignore[union-attr]
    plans = [event.plan for event in events if event.type in ("planned", "reformed")]  # type: ignore[union-attr]
    wanted = "hierarchical" if collective == "auto" else collective
    for plan, count in ((plans[0], 4), (plans[-1], members)):
        sums = sums_of(plan)
        assert (sums.algorithm, len(sums.sites), len(set(sums.sites))) == (wanted, count, 2)
    digests.add(WeightFolder(tmp_path / "artifacts" / "model").digest())
    assert len(digests) == 1


def sums_of(plan: Plan) -> SumPlan:
    (stage,) = plan.stages
    assert stage.sums is not None
    return stage.sums
