"""Layer timings are kept over attempts, as long as they can still be valid."""

from __future__ import annotations

from dataclasses import replace

import pytest

from share_compute.planning.cost.timings import LayerTiming, MachineTimings, holding, merged
from share_compute.topology import Contributor, Device, Topology

DEVICE = Device("cpu", "some cpu", 2**30, {"float32": 1e11}, 2e10)


def timed(*layers: int, seconds: float = 1.0, size: int = 4, device: Device = DEVICE) -> MachineTimings:
    timings = {layer: LayerTiming(seconds, 2 * seconds) for layer in layers}
    return MachineTimings(microbatch_size=size, device=device, layers=timings)


def here(*ids: str, device: Device = DEVICE) -> Topology:
    return Topology(tuple(Contributor(one, one, (device,)) for one in ids))


def test_new_times_of_a_machine_stand_beside_its_others_and_over_older_ones() -> None:
    kept = merged({"a": timed(0, 1), "b": timed(2)}, {"a": timed(1, 2, seconds=3.0)})
    assert kept["b"] == timed(2)
    assert {layer: timing.forward_s for layer, timing in kept["a"].layers.items()} == {0: 1.0, 1: 3.0, 2: 3.0}


@pytest.mark.parametrize(
    "new",
    [timed(1, size=8), timed(1, device=replace(DEVICE, memory_bytes_per_s=4e10))],
    ids=["size", "device"],
)
def test_times_under_other_conditions_push_the_old_ones_out(new: MachineTimings) -> None:
    assert merged({"a": timed(0, 1)}, {"a": new})["a"] == new


def test_only_machines_that_are_there_count() -> None:
    assert holding({"a": timed(0), "gone": timed(1)}, here("a", "b"), 4) == {"a": timed(0).layers}


def test_times_hold_for_one_size_of_microbatches() -> None:
    assert holding({"a": timed(0, size=4)}, here("a"), 2) == {}


@pytest.mark.parametrize(
    ("factor", "holds"),
    [(1.0, True), (1.4, True), (1 / 1.4, True), (1.6, False), (1 / 1.6, False), (0.0, False)],
)
def test_a_machine_that_came_back_much_faster_or_slower_is_timed_anew(factor: float, holds: bool) -> None:
    for now in (
        replace(DEVICE, flops_per_s={"float32": 1e11 * factor}),
        replace(DEVICE, memory_bytes_per_s=2e10 * factor),
    ):
        assert bool(holding({"a": timed(0)}, here("a", device=now), 4)) is holds


def test_a_machine_that_came_back_with_another_device_is_timed_anew() -> None:
    assert not holding({"a": timed(0)}, here("a", device=replace(DEVICE, name="another cpu")), 4)
    assert not holding({"a": timed(0)}, Topology((Contributor("a", "a", ()),)), 4)


def test_kept_times_are_read_as_they_were_written() -> None:
    kept = timed(0, 11, seconds=0.123456789)
    assert MachineTimings.model_validate_json(kept.model_dump_json()) == kept
