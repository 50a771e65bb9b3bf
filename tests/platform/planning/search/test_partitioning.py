"""Strategies and the mapping from partitions to shards, for any input."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from share_compute.errors import PlanInfeasible, UserError
from share_compute.planning.search.partitioning import (
    ComputeWeightedPartitioning,
    MemoryWeightedPartitioning,
    Partition,
    PartitioningStrategy,
    UniformPartitioning,
    load_strategy,
    map_partitions_to_shards,
    strategy_names,
)
from share_compute.planning.search.strategies import SearchingStrategy
from share_compute.shards import Shard
from share_compute.topology import Contributor, Device, Topology

STRATEGIES: list[PartitioningStrategy] = [
    UniformPartitioning(),
    MemoryWeightedPartitioning(),
    ComputeWeightedPartitioning(),
]


def machine(name: str, memory_bytes: int = 1, flops_per_s: float = 1.0) -> Contributor:
    return Contributor(name, name, (Device("cpu", "cpu", memory_bytes, {"float32": flops_per_s}),))


def partitions_at(inner: list[float]) -> list[Partition]:
    edges = [0.0, *sorted(inner), 1.0]
    return [Partition(f"m{n}", start, end) for n, (start, end) in enumerate(pairwise(edges))]


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    sizes = draw(
        st.lists(
            st.tuples(st.integers(0, 2**50), st.floats(0, 1e18, allow_nan=False, allow_infinity=False)),
            min_size=1,
            max_size=12,
        )
    )
    return Topology(tuple(machine(f"m{n}", memory, flops) for n, (memory, flops) in enumerate(sizes)))


def check_cover(shards: list[Shard], num_layers: int) -> None:
    assert [layer for shard in shards for layer in range(shard.start, shard.stop)] == list(range(num_layers))
    assert all(len(shard) >= 1 for shard in shards)
    assert [shard.is_first for shard in shards] == [True] + [False] * (len(shards) - 1)
    assert [shard.is_last for shard in shards] == [False] * (len(shards) - 1) + [True]


class TestMapping:
    @given(st.lists(st.floats(0, 1), max_size=30), st.integers(0, 200))
    @example([0.0, 0.0, 1.0, 1.0], 0)
    @example([5e-324], 0)
    def test_no_gap_no_overlap_no_empty_shard(self, inner: list[float], spare: int) -> None:
        partitions = partitions_at(inner)
        num_layers = len(partitions) + spare
        shards = map_partitions_to_shards(partitions, num_layers, "some/model")
        assert len(shards) == len(partitions)
        check_cover(shards, num_layers)
        assert {(shard.model_id, shard.num_layers) for shard in shards} == {("some/model", num_layers)}

    @given(st.lists(st.floats(0, 1), max_size=10), st.integers(1, 10))
    def test_more_partitions_than_layers_is_infeasible(self, inner: list[float], missing: int) -> None:
        partitions = partitions_at(inner)
        num_layers = len(partitions) - missing
        if num_layers < 1:
            return
        with pytest.raises(PlanInfeasible) as caught:
            map_partitions_to_shards(partitions, num_layers, "m")
        assert caught.value.details == {"stages": len(partitions), "layers": num_layers}
        assert caught.value.hint == f"ask for at most {num_layers} stages"

    @given(st.integers(1, 20), st.integers(1, 20))
    def test_equal_shares_of_a_multiple_are_equal(self, count: int, each: int) -> None:
        topology = Topology(tuple(machine(f"m{n}") for n in range(count)))
        shards = map_partitions_to_shards(UniformPartitioning().partition(topology), count * each, "m")
        assert [len(shard) for shard in shards] == [each] * count

    def test_edges_go_to_the_nearest_layer(self) -> None:
        shards = map_partitions_to_shards(partitions_at([0.26, 0.71]), 10, "m")
        assert [(shard.start, shard.stop) for shard in shards] == [(0, 3), (3, 7), (7, 10)]

    @pytest.mark.parametrize(
        ("edges", "num_layers"),
        [
            ([], 4),
            ([(0.0, 1.0)], 0),
            ([(0.0, 0.4), (0.5, 1.0)], 4),
            ([(0.0, 0.6), (0.5, 1.0)], 4),
            ([(0.1, 1.0)], 4),
            ([(0.0, 0.9)], 4),
            ([(0.0, 0.7), (0.7, 0.3), (0.3, 1.0)], 4),
            ([(0.0, float("nan")), (float("nan"), 1.0)], 4),
        ],
    )
    def test_what_does_not_cover_is_refused(self, edges: list[tuple[float, float]], num_layers: int) -> None:
        partitions = [Partition("m", start, end) for start, end in edges]
        with pytest.raises(UserError) as caught:
            map_partitions_to_shards(partitions, num_layers, "m")
        assert caught.value.hint


class TestStrategies:
    @pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: type(strategy).__name__)
    @given(topology=topologies(), spare=st.integers(0, 60))
    def test_every_strategy_covers_any_topology(
        self, strategy: PartitioningStrategy, topology: Topology, spare: int
    ) -> None:
        partitions = strategy.partition(topology)
        names = [partition.contributor_id for partition in partitions]
        assert sorted(names) == sorted(one.id for one in topology.contributors)
        num_layers = len(partitions) + spare
        check_cover(map_partitions_to_shards(partitions, num_layers, "m"), num_layers)

    def test_memory_is_a_ring_largest_first_in_proportion(self) -> None:
        topology = Topology((machine("small", memory_bytes=1), machine("large", memory_bytes=3)))
        assert MemoryWeightedPartitioning().partition(topology) == [
            Partition("large", 0.0, 0.75),
            Partition("small", 0.75, 1.0),
        ]

    def test_compute_is_in_proportion_in_the_order_they_joined(self) -> None:
        topology = Topology((machine("slow", flops_per_s=1e9), machine("fast", flops_per_s=3e9)))
        assert ComputeWeightedPartitioning().partition(topology) == [
            Partition("slow", 0.0, 0.25),
            Partition("fast", 0.25, 1.0),
        ]

    @pytest.mark.parametrize("name", ["latency", "location"])
    def test_a_strategy_for_far_machines_covers_a_nameless_model(self, name: str) -> None:
        strategy = load_strategy(name)
        topology = Topology(tuple(machine(f"m{n}", flops_per_s=1e9) for n in range(3)))
        partitions = strategy.partition(topology)
        assert {partition.contributor_id for partition in partitions} == {"m0", "m1", "m2"}
        check_cover(map_partitions_to_shards(partitions, 64, "m"), 64)
        assert strategy.partition(Topology(())) == []

    @pytest.mark.parametrize("name", ["auto", "dynamic_programming", "recursive"])
    @pytest.mark.parametrize("speeds", [[1e9], [0.0, 0.0], [5e10, 4e10, 1e9], [1e9, 0.0]])
    def test_a_searching_strategy_covers_a_nameless_model(self, name: str, speeds: list[float]) -> None:
        strategy = load_strategy(name)
        assert isinstance(strategy, SearchingStrategy)
        topology = Topology(tuple(machine(f"m{n}", flops_per_s=speed) for n, speed in enumerate(speeds)))
        partitions = strategy.partition(topology)
        assert {partition.contributor_id for partition in partitions} <= {
            one.id for one in topology.contributors
        }
        check_cover(map_partitions_to_shards(partitions, 64, "m"), 64)
        assert strategy.partition(Topology(())) == []

    @pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: type(strategy).__name__)
    def test_without_machines_there_is_nothing_to_share(self, strategy: PartitioningStrategy) -> None:
        assert strategy.partition(Topology(())) == []

    def test_strategies_are_found_by_name(self) -> None:
        simple, searching = (
            {"uniform", "memory_weighted", "compute_weighted"},
            {"dynamic_programming", "recursive"},
        )
        assert simple | searching | {"auto", "latency", "location"} <= set(strategy_names())
        assert isinstance(load_strategy("uniform"), UniformPartitioning)

    def test_an_unknown_strategy_names_the_nearest(self) -> None:
        with pytest.raises(UserError, match="did you mean 'uniform'") as caught:
            load_strategy("unifrom")
        assert "memory_weighted" in str(caught.value.hint)
