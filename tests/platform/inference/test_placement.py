"""Memory that a deployment leaves free on its machines."""

from __future__ import annotations

import pytest

from share_compute.inference.placement import Holding, limits_of, place
from share_compute.models.profiles.profile import LayerProfile, ModelProfile, QuadraticGrowth
from share_compute.specification import ServeJob
from share_compute.topology import Contributor, Device, Topology

LAYERS = 4
MIB = 2**20
PROFILE = ModelProfile(
    layers=(
        LayerProfile(
            parameters=MIB,
            forward_flops=QuadraticGrowth(linear=1.0),
            cache_numbers=QuadraticGrowth(linear=64.0),
        ),
    )
    * LAYERS
)
WEIGHT_BYTES = 4 * LAYERS * MIB
CACHE_BYTES = 4 * LAYERS * 64 * 640 * 16
"""KV caches of all sequences that run at one time."""


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_what_is_looked_up_does_not_reduce_kv_capacity(dtype: str) -> None:
    embedding = LayerProfile(parameters=256 * MIB)
    profile = PROFILE.model_copy(update={"embedding": embedding, "tied": 256 * MIB})
    weight_bytes = 4 * 256 * MIB + (1 if dtype == "int8" else 4) * LAYERS * MIB
    lent = int((weight_bytes + 500 * MIB + CACHE_BYTES) / 0.9)
    machine = Contributor("c0", "ada", (Device("cpu", "cpu", lent, {"float32": 1e10}),), 1, "ab", "192.0.2.7")
    spec = ServeJob.model_validate({"name": "m", "model": {"path": "/m"}, "dtype": dtype})
    placement = place(spec, Topology((machine,)), profile, window_tokens=1024, epoch=1, stages=None)
    assert placement.memory_budgets["c0"].working_bytes == 0
    holding = Holding(4 * LAYERS * 64, weight_bytes + 400 * MIB)
    limits = limits_of(spec, placement, {"c0": holding}, 1024, {})
    assert limits.kv_tokens == pytest.approx((CACHE_BYTES + 100 * MIB) / holding.cache_token_bytes, rel=0.01)
    assert not placement.memory_budgets["c0"].holds_weights_twice, (
        "the tied head is packed beside what is there"
    )


@pytest.mark.parametrize("copies", [1, 2])
def test_weights_are_held_twice_only_beside_all_caches(copies: int) -> None:
    process_bytes = (copies - 1) * 480 * MIB
    lent = int((copies * WEIGHT_BYTES + process_bytes + CACHE_BYTES + MIB) / 0.9)
    machine = Contributor("c0", "ada", (Device("cpu", "cpu", lent, {"float32": 1e10}),), 1, "ab", "192.0.2.7")
    spec = ServeJob.model_validate({"name": "llama", "model": {"path": "/models/llama"}})
    placement = place(spec, Topology((machine,)), PROFILE, window_tokens=1024, epoch=1, stages=None)
    assert placement.concurrent == 16
    assert placement.memory_budgets["c0"].holds_weights_twice == (copies == 2)
