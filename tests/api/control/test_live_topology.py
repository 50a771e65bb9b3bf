"""The topology of contributors: figures of machines that share the cores of one computer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from share_compute.store import ContributorRecord
from share_compute.topology import Device, Link
from share_compute_api.control.machines.live_topology import live_topology


def record(
    name: str, gigaflops: float, *, host: str = "desk", bandwidth: float = 2e10, threads: int = 1
) -> ContributorRecord:
    device = Device(
        kind="cpu",
        name="a processor",
        memory_bytes=1 << 30,
        flops_per_s={"float32": gigaflops * 1e9, "bfloat16": 2e9 * gigaflops},
        memory_bytes_per_s=bandwidth,
        overhead_s=1e-5,
    )
    fields: dict[str, Any] = {
        "id": name,
        "name": name,
        "node_id": None,
        "address": None,
        "capacity": (device,),
        "links": (),
        "threads": threads,
        "limits": {"host_id": host, "host_threads": 2},
    }
    return ContributorRecord.model_construct(**fields)


def gigaflops(records: Sequence[ContributorRecord], dtype: str = "float32") -> list[float]:
    return [machine.flops_per_s(dtype) / 1e9 for machine in live_topology(records).contributors]


def test_machines_of_one_computer_get_the_median_of_similar_figures() -> None:
    records = [record("a", 55), record("b", 81), record("c", 77)]

    assert gigaflops(records) == [77, 77, 77]
    assert gigaflops(records, "bfloat16") == [154, 154, 154]
    assert gigaflops(records[:2]) == [68, 68]
    # The median of machines with a whole and with half a core would be wrong for both.
    assert gigaflops([record("a", 100), record("b", 50), record("c", 104)]) == [102, 50, 102]


@pytest.mark.parametrize(
    "other",
    [
        record("b", 81, host="another desk"),
        record("b", 81, host=""),
        record("b", 81, threads=2),
        record("b", 200),
        record("b", 81, bandwidth=2e11),
    ],
    ids=["another computer", "unknown computer", "other threads", "less of a core", "other memory"],
)
def test_machines_under_other_conditions_keep_their_figures(other: ContributorRecord) -> None:
    given = [record("a", 60), other]

    assert gigaflops(given) == [
        machine.capacity[0].flops_per_s["float32"] / 1e9 for machine in given if machine.capacity
    ]


def test_links_are_at_most_as_fast_as_the_owners_of_both_ends_allow() -> None:
    links = (Link("a", "head", 0.01, 5e6), Link("a", "b", 0.01, 5e5), Link("b", "head", 0.01, 5e6))
    machines = [record("a", 50), record("b", 60)]
    machines[0] = machines[0].model_copy(
        update={
            "links": links,
            "limits": {"upload_bytes_per_s": 1_000_000, "download_bytes_per_s": 2_000_000},
        }
    )
    topology = live_topology(machines)
    assert [link.bytes_per_s for link in topology.links] == [1e6, 5e5, 5e6]
    assert (topology["a"].upload_bytes_per_s, topology["a"].download_bytes_per_s) == (1e6, 2e6)
    assert topology["b"].upload_bytes_per_s == 0
