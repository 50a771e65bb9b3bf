"""Policies of synchronization side by side: lockstep, the job's own rounds, and presets."""

from __future__ import annotations

from typing import Any

import pytest
from tests.platform.planning.models import GIB, PROFILE, job, lan, machine

from share_compute.planning.dry_run import dry_run
from share_compute.planning.policies import compare_policies
from share_compute.planning.report import PolicyFigures
from share_compute.planning.rounds import plan_rounds
from share_compute.synchronization.graphs import edges_of
from share_compute.topology import Link, Topology

NAMES = "abcd"
FAST, SLOW = (5e-4, 1e8), (0.05, 1e6)
TOPOLOGY = Topology(
    tuple(machine(name, 50) for name in NAMES),
    (
        *(
            Link(one, other, *(FAST if (one < "c") == (other < "c") else SLOW))
            for place, one in enumerate(NAMES)
            for other in NAMES[place + 1 :]
        ),
        *(Link("head", name, *SLOW) for name in NAMES),
    ),
)
"""Two islands of two machines each, with slow links between them and to the server."""


def own(compression: dict[str, Any] | None = None, **rounds: Any) -> Any:
    synchronization = {"kind": "local", "branches": 2, "every": 20, **rounds}
    training: dict[str, Any] = {"steps": 1_000, "synchronization": synchronization}
    if compression is not None:
        training["compression"] = compression
    return job(training=training)


def named(rows: tuple[PolicyFigures, ...]) -> dict[tuple[str, str], PolicyFigures]:
    found = {(row.policy, row.compression): row for row in rows}
    assert len(found) == len(rows)
    return found


def test_the_jobs_own_rounds_have_the_figures_of_its_plan() -> None:
    spec = own({"name": "bf16"})
    rows = named(compare_policies(spec, TOPOLOGY, PROFILE))
    assert set(rows) == {
        ("lockstep", "none"),
        ("rounds", "bf16"),
        ("rounds", "none"),
        ("diloco", "int8"),
        ("diloco", "none"),
        ("sparse_loco", "topk"),
        ("sparse_loco", "none"),
        ("elastic", "bf16"),
        ("gossip, ring", "bf16"),
        ("server, staleness 0", "bf16"),
        ("server, staleness 1", "bf16"),
    }
    assert [row.policy for row in rows.values() if row.is_own] == ["rounds"]
    _, figures, _ = plan_rounds(spec, TOPOLOGY, PROFILE)
    mine = rows["rounds", "bf16"]
    assert mine.samples_per_s == figures.samples_per_s
    assert mine.sent_bytes_per_step == figures.contribution_bytes / 20
    assert mine.received_bytes_per_step == figures.update_bytes / 20
    assert rows["lockstep", "none"].samples_per_s == figures.lockstep_samples_per_s
    assert mine.sample_s == pytest.approx(1 / figures.samples_per_s)  # type: ignore[operator]


def test_compression_and_longer_rounds_send_less_and_use_machines_more() -> None:
    rows = named(compare_policies(own(), TOPOLOGY, PROFILE))
    for policy, codec in (("rounds", "int8"), ("sparse_loco", "topk")):
        compressed, plain = rows[policy, codec], rows[policy, "none"]
        assert compressed.sent_bytes_per_step < plain.sent_bytes_per_step  # type: ignore[operator]
        assert compressed.samples_per_s > plain.samples_per_s  # type: ignore[operator]
        assert compressed.utilisation > plain.utilisation  # type: ignore[operator]
        assert "small changes" in compressed.gives_up
        assert "small changes" not in plain.gives_up
    short, long = rows["rounds", "none"], rows["diloco", "none"]
    assert long.sent_bytes_per_step == pytest.approx(short.sent_bytes_per_step * 20 / 500)  # type: ignore[operator]
    assert all(0 < row.utilisation <= 1 for row in rows.values() if row.utilisation is not None)


def test_the_fastest_policies_come_first_and_each_gives_up_something() -> None:
    rows = compare_policies(own(), TOPOLOGY, PROFILE)
    speeds = [row.samples_per_s for row in rows]
    assert speeds == sorted(speeds, reverse=True)  # type: ignore[type-var]
    assert len({row.gives_up for row in rows}) > 3
    assert all(row.gives_up.endswith(".") for row in rows)


@pytest.mark.parametrize(
    ("policy", "name", "others"),
    [
        ({"kind": "elastic", "rate": 0.2}, "elastic", 9),
        ({"kind": "gossip", "graph": "random_pairs"}, "gossip, random_pairs", 10),
        (
            {"kind": "parameter_server", "staleness": "unbounded"},
            "server, unbounded",
            10,
        ),
    ],
)
def test_jobs_of_all_policies_are_compared(policy: dict[str, Any], name: str, others: int) -> None:
    spec = job(training={"steps": 100, "synchronization": {"branches": 2, **policy}})
    rows = named(compare_policies(spec, TOPOLOGY, PROFILE))
    (mine,) = (row for row in rows.values() if row.is_own)
    assert (mine.policy, mine.compression) == (name, "none")
    assert len(rows) == others + 1
    _, figures, _ = plan_rounds(spec, TOPOLOGY, PROFILE)
    assert mine.samples_per_s == figures.samples_per_s
    assert mine.received_bytes_per_step == figures.update_bytes / figures.every


def test_each_policy_says_what_it_gives_up() -> None:
    rows = {row.policy: row for row in compare_policies(own(), TOPOLOGY, PROFILE)}
    assert "10% of the way to the centre" in rows["elastic"].gives_up
    assert "averages their weights only with one other branch" in rows["gossip, ring"].gives_up
    synchronous, bounded = (rows[f"server, staleness {number}"] for number in (0, 1))
    assert synchronous.gives_up == rows["rounds"].gives_up
    assert "may lack up to 2 pushes of each other branch" in bounded.gives_up
    assert bounded.received_bytes_per_step == 2 * synchronous.received_bytes_per_step  # type: ignore[operator]


@pytest.mark.parametrize("branches", [3, 4, 6, 9])
def test_gossip_has_a_row_for_each_graph_with_other_edges(branches: int) -> None:
    """On three branches, a ring and an exponential graph have the same edges."""
    topology = lan(*(machine(name, 50) for name in "abc"))
    spec = job(
        training={"steps": 100, "synchronization": {"kind": "local", "branches": branches, "every": 10}}
    )
    rows = {row.policy: row for row in compare_policies(spec, topology, PROFILE)}
    for graph in ("ring", "exponential"):
        row = rows.get(f"gossip, {graph}")
        if branches == 3 and graph == "exponential":
            assert row is None
            continue
        ends = [branch for edge in edges_of(graph, branches, 0, 1) for branch in edge]
        assert row is not None
        assert f"only with {len(ends) // branches} other branches" in row.gives_up
    assert "drawn anew" in rows["gossip, random_pairs"].gives_up


def test_a_job_in_lockstep_is_compared_with_two_branches() -> None:
    rows = named(compare_policies(job(training={"steps": 100}), TOPOLOGY, PROFILE))
    assert rows["lockstep", "none"].is_own
    assert {row.branches for row in rows.values()} == {1, 2}
    assert rows["diloco", "none"].every == 100  # no longer than the job
    assert rows["server, staleness 0", "int8"].every == 1


def test_compressed_sums_are_those_of_the_job_in_lockstep() -> None:
    compression = {"name": "int8", "error_feedback": None}
    plain, compact = (
        compare_policies(job(training={"steps": 100, **options}, stages=1), TOPOLOGY, PROFILE)
        for options in ({}, {"compression": compression})
    )
    (before,), (after,) = ([row for row in rows if row.is_own] for rows in (plain, compact))
    assert (before.compression, after.compression) == ("none", "int8")
    assert after.sent_bytes_per_step < before.sent_bytes_per_step  # type: ignore[operator]


def test_error_feedback_decides_whether_small_changes_are_lost() -> None:
    rows = named(compare_policies(own({"name": "int8", "error_feedback": None}), TOPOLOGY, PROFILE))
    assert "are lost" in rows["rounds", "int8"].gives_up
    assert "later round" in rows["diloco", "int8"].gives_up


def test_policies_without_a_plan_say_why_and_come_last() -> None:
    """Two machines hold the model together, but not once for each branch."""
    topology = lan(*(machine(name, 50, memory_bytes=GIB * 12 // 5) for name in "ab"))
    rows = compare_policies(job(training={"steps": 100}), topology, PROFILE)
    assert rows[0].policy == "lockstep"
    assert rows[0].problem is None
    assert all(row.problem and row.samples_per_s is None for row in rows[1:])


def test_one_machine_has_nothing_to_compare() -> None:
    assert compare_policies(job(), lan(machine("a", 50)), PROFILE) == ()


def test_the_report_has_them_only_on_request() -> None:
    assert dry_run(own(), TOPOLOGY, PROFILE).policies == ()
    report = dry_run(own(), TOPOLOGY, PROFILE, compare=True)
    assert report.policies == compare_policies(own(), TOPOLOGY, PROFILE)
