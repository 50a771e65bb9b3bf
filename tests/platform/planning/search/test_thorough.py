"""Optimality of `auto` in the simulated step: no other strategy and no smaller set of machines gives a better plan."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
from tests.platform.planning.fleets import fleet
from tests.platform.planning.models import PROFILE, job, make_plan
from tests.thoroughly import thoroughly

from share_compute.errors import PlanInfeasible
from share_compute.planning.network.regions import complete
from share_compute.planning.search.partitioning import strategy_names
from share_compute.specification import TrainJob
from share_compute.topology import Topology


def step_s(spec: TrainJob, topology: Topology) -> float:
    """Return the simulated step of a plan; infinite where there is none."""
    try:
        prediction = make_plan(spec, topology, PROFILE).prediction
    except PlanInfeasible:
        return math.inf
    assert prediction is not None
    return prediction.step_s


@pytest.mark.parametrize("seed", thoroughly(range(18), quick=6))
def test_no_strategy_and_no_number_of_microbatches_beats_auto(seed: int) -> None:
    count = 2 + seed % 11
    topology = fleet(seed, count)
    microbatches = None if count < 10 else 4
    auto_s = step_s(job(microbatches=microbatches), topology)
    for strategy in strategy_names():
        assert auto_s <= step_s(job(microbatches=microbatches, strategy=strategy), topology) * (1 + 1e-9)
    for number in (2, 8, 16) if microbatches is None else ():
        assert auto_s <= step_s(job(microbatches=number, strategy="recursive"), topology) * (1 + 1e-9)


@pytest.mark.parametrize("seed", thoroughly(range(12), quick=4))
def test_one_more_machine_never_makes_the_plan_slower(seed: int) -> None:
    spec = job(microbatches=random.Random(seed).choice((4, 8, None)))
    fleets = [fleet(seed, count) for count in range(1, 8)]
    times_s = [step_s(spec, topology) for topology in fleets]
    for before, after in pairwise(range(7)):
        if joined_alike(fleets[before], fleets[after]):
            assert times_s[after] <= times_s[before] * (1 + 1e-9)


def joined_alike(fewer: Topology, more: Topology) -> bool:
    """Return whether the estimated links between the other machines stay the same when a machine joins."""
    before, after = complete(fewer), complete(more)
    machines = range(len(fewer.contributors))
    return all(before.link(one, other) == after.link(one, other) for one in machines for other in machines)
