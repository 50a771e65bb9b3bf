"""What is left of machines' memory where a deployment is placed."""

from __future__ import annotations

import pytest

from share_compute.planning.profile import Growth, LayerProfile, ModelProfile
from share_compute.serving.placement import place
from share_compute.specification import ServeJob
from share_compute.topology import Contributor, Device, Topology

LAYERS = 4
MIB = 2**20
PROFILE = ModelProfile(
    layers=(
        LayerProfile(parameters=MIB, forward_flops=Growth(linear=1.0), cache_numbers=Growth(linear=64.0)),
    )
    * LAYERS
)
WEIGHT_BYTES = 4 * LAYERS * MIB
CACHE_BYTES = 4 * LAYERS * 64 * 640 * 16
"""Of all sequences that run at one time."""


@pytest.mark.parametrize("copies", [1, 2])
def test_weights_are_held_twice_only_beside_all_caches(copies: int) -> None:
    process_bytes = (copies - 1) * 480 * MIB
    lent = int((copies * WEIGHT_BYTES + process_bytes + CACHE_BYTES + MIB) / 0.9)
    machine = Contributor("c0", "ada", (Device("cpu", "cpu", lent, {"float32": 1e10}),), 1, "ab", "192.0.2.7")
    spec = ServeJob.model_validate({"name": "llama", "model": {"path": "/models/llama"}})
    placement = place(spec, Topology((machine,)), PROFILE, window_tokens=1024, epoch=1, pools=None)
    assert placement.concurrent == 16
    assert placement.rooms["c0"].holds_weights_twice == (copies == 2)
