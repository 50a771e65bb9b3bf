"""Very deep models: grouped layers cost what they cost one by one, and plans stay good and small in memory."""

from __future__ import annotations

import dataclasses
import tracemalloc

import pytest
from tests.platform.planning.instances import instance
from tests.platform.planning.search.test_search import check

from share_compute.planning.cost.cost import TrainingCost
from share_compute.planning.search.grouping import MOST_LAYERS, group
from share_compute.planning.search.search import search


def deep(layers: int, machines: int = 4) -> TrainingCost:
    """Return an instance whose layers are equal except for the first and last few."""
    cost = dataclasses.replace(instance(1, machines=machines, layers=8, microbatches=4), timings={})
    inner = cost.profile.layers[3]
    profile = cost.profile.model_copy(
        update={"layers": (*cost.profile.layers[:3], *[inner] * (layers - 5), *cost.profile.layers[6:])}
    )
    return dataclasses.replace(cost, profile=profile)


@pytest.mark.parametrize("layers", [193, 400, 1000])
def test_groups_cost_what_their_layers_do(layers: int) -> None:
    cost = deep(layers)
    groups = group(cost, 0)
    assert len(groups.edges) - 1 == groups.coarse.num_layers <= MOST_LAYERS
    for table in ("forward_s", "backward_s", "parameters", "activation_bytes", "boundary_bytes"):
        fine, coarse = getattr(cost, table), getattr(groups.coarse, table)
        assert coarse == pytest.approx(fine[..., list(groups.edges)])


def test_as_many_groups_as_requested_stages() -> None:
    assert group(deep(400), 250).coarse.num_layers >= 250


def test_plans_of_a_deep_model_are_good_and_take_little_memory() -> None:
    cost = deep(600)
    with_more_memory = dataclasses.replace(
        cost,
        topology=dataclasses.replace(
            cost.topology,
            contributors=tuple(
                dataclasses.replace(
                    machine,
                    devices=tuple(
                        dataclasses.replace(device, memory_bytes=device.memory_bytes * 80)
                        for device in machine.devices
                    ),
                )
                for machine in cost.topology.contributors
            ),
        ),
    )
    tracemalloc.start()
    found = search(with_more_memory)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    check(with_more_memory, found)
    assert peak < 300 * 2**20
    assert found[0].step_s <= search(with_more_memory, method="recursive")[0].step_s
