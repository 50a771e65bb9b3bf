"""Islands: where the model is cut, how the batch is shared, and how often islands synchronise."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from share_compute.models.profiles.profile import LayerProfile, ModelProfile, QuadraticGrowth
from share_compute.planning.cost.cost import TrainingCost
from share_compute.planning.islands import MOST_STEPS, interval, propose_islands
from share_compute.planning.network.network import Network
from share_compute.specification.workload import TrainingWorkload
from share_compute.topology import Contributor, Device, Topology


def two_sites(
    far_bytes_per_s: float,
    *,
    each: int = 2,
    near_bytes_per_s: float = 1e9,
    memory: int = 10**12,
    boundary_numbers: float = 1e6,
) -> TrainingCost:
    """Sites of equal machines; a layer takes 1 s forward and 2 s backward for one microbatch."""
    machines = tuple(
        Contributor(f"c{index}", f"c{index}", (Device("cpu", "cpu", memory, {"float32": 1.0}),))
        for index in range(2 * each)
    )
    layer = LayerProfile(
        parameters=1_000_000,
        forward_flops=QuadraticGrowth(1.0),
        backward_flops=QuadraticGrowth(2.0),
        boundary_numbers=QuadraticGrowth(boundary_numbers),
    )
    rate = np.array([[near_bytes_per_s, far_bytes_per_s], [far_bytes_per_s, near_bytes_per_s]])
    return TrainingCost(
        ModelProfile(layers=(layer,) * 4),
        Topology(machines),
        Network(np.repeat([0, 1], each), np.full((2, 2), 1e-3), rate),
        TrainingWorkload(batch_size=32, microbatches=32),
    )


def test_slow_links_between_sites_make_islands() -> None:
    # No machine can hold the model alone. Half of it fits, with the tensors of 32 microbatches at the cut.
    proposal = propose_islands(two_sites(2e4, memory=50_000_000, boundary_numbers=4e4))
    assert proposal is not None
    assert {frozenset(island.machines) for island in proposal.islands} == {
        frozenset({"c0", "c1"}),
        frozenset({"c2", "c3"}),
    }
    # 16 MB of weights, half of it twice, at 20 kB/s, and two latencies.
    assert proposal.synchronisation_s == pytest.approx(800 + 2e-3)
    slowest_s = max(island.step_s for island in proposal.islands)
    together_s = proposal.interval_steps * slowest_s + proposal.synchronisation_s
    assert proposal.synchronisation_s <= 0.05 * together_s * (1 + 1e-9)
    shorter_s = (proposal.interval_steps - 1) * slowest_s + proposal.synchronisation_s
    assert proposal.synchronisation_s > 0.05 * shorter_s
    assert proposal.samples_per_s == pytest.approx(proposal.interval_steps * 32 / together_s)


def test_fast_links_keep_one_lockstep() -> None:
    assert propose_islands(two_sites(1e9, memory=50_000_000, boundary_numbers=4e4)) is None
    assert propose_islands(two_sites(1e9, each=1), lockstep_samples_per_s=1e9) is None


def test_no_islands_where_nothing_gets_through_or_nothing_fits() -> None:
    assert propose_islands(two_sites(0.0)) is None
    assert propose_islands(two_sites(1e5, memory=10**6)) is None


def test_a_batch_is_shared_in_proportion_to_speed() -> None:
    cost = two_sites(1e5, each=1)
    fast, slow = cost.topology.contributors
    faster = replace(fast, devices=(replace(fast.device, flops_per_s={"float32": 3.0}),))
    proposal = propose_islands(replace(cost, topology=Topology((faster, slow))))
    assert proposal is not None
    speeds = {island.machines: island.samples_per_s for island in proposal.islands}
    assert speeds[("c0",)] == pytest.approx(3 * speeds[("c1",)])
    # Both islands finish their share at the same time.
    assert len({round(island.step_s, 6) for island in proposal.islands}) == 1


def test_one_microbatch_cannot_be_shared() -> None:
    cost = two_sites(1e5)
    assert propose_islands(replace(cost, workload=TrainingWorkload(1, 1))) is None


@pytest.mark.parametrize(
    ("step_s", "synchronisation_s", "steps"),
    [(1.0, 0.0, 1), (1.0, 1 / 19, 1), (1.0, 1.0, 19), (1.0, 1.1, 21), (1.0, 1e9, MOST_STEPS)],
)
def test_the_interval_is_the_shortest_that_keeps_synchronisation_small(
    step_s: float, synchronisation_s: float, steps: int
) -> None:
    assert interval(step_s, synchronisation_s) == steps
