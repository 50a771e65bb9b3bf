"""Plans of operators of drawn layers: their content, given strategies, and refused inputs."""

from __future__ import annotations

import random

import pytest
from tests.platform.planning.operators.drawn import Drawing, attention, draw_graph, draw_group, mlp

from share_compute.errors import PlanInfeasible, UserError
from share_compute.planning.operators.cost import DeviceGroup, LayerCost, Workload, collective_between
from share_compute.planning.operators.graph import OperatorGraph
from share_compute.planning.operators.plan import LayerOperators, group_on, plan_layer, require_matches
from share_compute.planning.operators.strategies import PARTIAL, REPLICATE, options_of, shard
from share_compute.specification.placement.operators import SearchName
from share_compute.topology import Contributor, Device, Link, Topology

SEARCHES: tuple[SearchName, ...] = ("dynamic_programming", "recursive_programming", "sharding_propagation")
SERVER = DeviceGroup(4, 1e12, 1e11, 1e10, 1e-5, 4e-6)


def mlp_graph() -> OperatorGraph:
    drawing = Drawing(1, 512, 1024)
    return drawing.graph(mlp(drawing, "x", 2816))


def attention_graph(heads: int = 16) -> OperatorGraph:
    drawing = Drawing(1, 512, 1024)
    return drawing.graph(attention(drawing, "x", heads=heads, causal=True))


def strategies(plan: LayerOperators, kind: str) -> list[str]:
    return [each.strategy for each in plan.operators if each.kind == kind]


@pytest.mark.parametrize("search", SEARCHES)
def test_an_mlp_is_cut_by_columns_then_rows(search: SearchName) -> None:
    plan = plan_layer(mlp_graph(), SERVER, search=search)
    assert strategies(plan, "matmul") == ["column", "column", "row"]
    assert plan.parameter_bytes == plan.one_device_parameter_bytes // 4
    assert plan.seconds < plan.one_device_s


@pytest.mark.parametrize("search", SEARCHES)
def test_attention_is_cut_by_heads(search: SearchName) -> None:
    plan = plan_layer(attention_graph(), SERVER, search=search)
    assert strategies(plan, "attention") == ["heads"]
    assert strategies(plan, "matmul") == ["column", "column", "column", "row"]


def test_many_samples_and_slow_links_are_cut_by_batch() -> None:
    drawing = Drawing(64, 512, 256)
    graph = drawing.graph(mlp(drawing, "x", 512))
    assert strategies(plan_layer(graph, SERVER, workload=Workload(8)), "matmul") == ["batch"] * 3


def test_slow_links_leave_all_to_each_device() -> None:
    drawing = Drawing(1, 4, 64)
    graph = drawing.graph(mlp(drawing, "x", 64))
    slow = DeviceGroup(4, 1e12, 1e11, 1e6, 1e-2, 4e-6)
    plan = plan_layer(graph, slow)
    assert plan.communication_s == 0
    assert plan.seconds <= plan.one_device_s
    assert "replicated" not in strategies(plan_layer(graph, slow, fully_use_devices=True), "matmul")


def test_the_times_add_up() -> None:
    for seed in range(20):
        draw, layers = random.Random(seed), range(1 + seed % 2)
        graph, group = draw_graph(draw, 60), draw_group(draw, draw.choice((2, 4)))
        plan = plan_layer(graph, group, layers=layers)
        options = [options_of(each, graph.forked(), group.devices) for each in graph.forked().operators]
        costs = LayerCost(graph.forked(), group, repeated=len(layers) > 1).table(options)
        choice = [own.names.index(each.strategy) for own, each in zip(options, plan.operators, strict=True)]
        assert plan.seconds == pytest.approx(costs.total(choice))


@pytest.mark.parametrize("search", SEARCHES)
def test_the_end_of_a_layer_without_a_next_one_is_not_left_partial_for_free(search: SearchName) -> None:
    drawing = Drawing(8, 1024, 1024)
    hidden = drawing.add("relu", (8, 1024, 4096), drawing.linear("x", 4096), pointwise=True)
    graph = drawing.graph(drawing.linear(hidden, 1024))
    fixed = {"linear1": "column", "relu2": "column", "linear3": "row"}
    plan = plan_layer(graph, SERVER, search=search, fixed=fixed)
    assert [each.gradient_collective for each in plan.redistributions if each.tensor == "x"] == ["AllReduce"]
    last = plan.redistributions[-1]
    assert (last.producer, last.consumer, last.collective) == ("linear3", "input", "AllReduce")
    assert plan.communication_s == pytest.approx(2 * SERVER.collective_s("AllReduce", 4 * 8 * 1024 * 1024))


def test_a_lookup_reads_only_the_rows_that_it_returns() -> None:
    drawing = Drawing(2, 8)
    drawing.add("embedding", (2, 8, 64), drawing.parameter(100_000, 64), "x")
    graph = drawing.graph("embedding1")
    (lookup,) = [each for each in graph.operators if each.kind == "embedding"]
    whole = options_of(lookup, graph, 1).strategies[-1]
    found = LayerCost(graph, DeviceGroup(1, 1e12, 1e9, 1e9, 0), Workload(trains=False)).of(lookup, whole)
    assert found.compute_s == pytest.approx((2 * 2 * 8 * 64 + 2 * 8) * 4 / 1e9)
    assert found.parameter_bytes == 100_000 * 64 * 4


def test_given_strategies_are_kept() -> None:
    for search in SEARCHES:
        fixed = {"linear*": "row", "silu*": "replicated"}
        plan = plan_layer(mlp_graph(), SERVER, search=search, fixed=fixed)
        assert strategies(plan, "matmul") == ["row"] * 3
        assert [each.strategy for each in plan.operators if each.fixed] == ["row", "row", "replicated", "row"]


def test_given_strategies_are_refused_with_the_reason() -> None:
    with pytest.raises(UserError, match="4 devices cannot divide 6 evenly"):
        plan_layer(attention_graph(heads=6), SERVER, fixed={"scaled*": "heads"})
    with pytest.raises(UserError, match="ring attention"):
        plan_layer(attention_graph(), SERVER, fixed={"scaled*": "sequence"})
    with pytest.raises(UserError, match="no such strategy") as caught:
        plan_layer(mlp_graph(), SERVER, fixed={"linear*": "diagonal"})
    assert "column" in str(caught.value.hint)
    with pytest.raises(UserError, match="two strategies"):
        plan_layer(mlp_graph(), SERVER, fixed={"linear*": "row", "linear1": "column"})


def test_patterns_must_match_an_operator() -> None:
    require_matches([mlp_graph()], {"linear1": "row"})
    with pytest.raises(UserError, match="no operator matches 'linaer1'") as caught:
        require_matches([mlp_graph()], {"linaer1": "row"})
    assert "linear1" in str(caught.value.hint)


def test_heads_that_cannot_be_divided_are_not_cut() -> None:
    plan = plan_layer(attention_graph(heads=6), SERVER)
    (cut,) = [each for each in plan.operators if each.kind == "attention"]
    assert cut.strategy == "replicated"
    assert "4 devices cannot divide 6 evenly" in cut.refused["heads"]


@pytest.mark.parametrize(
    ("source", "target", "collective"),
    [
        (PARTIAL, REPLICATE, "AllReduce"),
        (PARTIAL, shard(1), "ReduceScatter"),
        (shard(0), REPLICATE, "AllGather"),
        (shard(0), shard(1), "AllToAll"),
        (shard(0), shard(0), None),
        (REPLICATE, shard(0), None),
        (REPLICATE, PARTIAL, None),
    ],
)
def test_collectives(source: str, target: str, collective: str | None) -> None:
    assert collective_between(source, target) == collective


def test_times_of_collectives() -> None:
    assert SERVER.collective_s("AllGather", 4 * 10**9) == pytest.approx(3e-5 + 0.3)
    assert SERVER.collective_s("AllReduce", 4 * 10**9) == pytest.approx(6e-5 + 0.6)
    assert SERVER.collective_s("AllToAll", 4 * 10**9) == pytest.approx(3e-5 + 0.075)


def machine(
    name: str, host: str = "", threads: int = 4, speed: float = 1e12, host_threads: int = 0
) -> Contributor:
    device = Device("cpu", "cpu", 2**34, {"float32": speed}, 4e10, 1e-6)
    return Contributor(name, name, (device,), cpu_threads=threads, host=host, host_threads=host_threads)


def test_devices_of_one_computer_have_its_measured_links() -> None:
    link = Link("a", "b", latency_s=2e-6, bytes_per_s=5e10)
    topology = Topology(
        (machine("a", "box", 1), machine("b", "box", 1, 5e11), machine("c", threads=1)), (link,)
    )
    name, group, assumed = group_on(topology, 2)
    assert (name, group.flops_per_s, group.link_bytes_per_s, assumed) == ("a", 5e11, 5e10, False)


@pytest.mark.parametrize(("host_threads", "share"), [(0, 1.0), (4, 0.5), (6, 0.75), (8, 1.0)])
def test_contributors_on_one_computer_share_its_cores(host_threads: int, share: float) -> None:
    own = tuple(machine(name, "box", 4, host_threads=host_threads) for name in "ab")
    _, group, _ = group_on(Topology(own), 2)
    assert group.flops_per_s == pytest.approx(share * 1e12)
    assert group.memory_bytes_per_s == pytest.approx(share * 4e10)


def test_threads_of_a_computer_are_logical_devices() -> None:
    _, group, assumed = group_on(Topology((machine("a"),)), 4)
    assert (group.devices, group.flops_per_s, group.memory_bytes_per_s, assumed) == (4, 2.5e11, 1e10, True)


@pytest.mark.parametrize(("devices", "message"), [(8, "a has the most: 4"), (0, "at least 1 device")])
def test_too_many_devices(devices: int, message: str) -> None:
    with pytest.raises((UserError, PlanInfeasible), match=message):
        group_on(Topology((machine("a"),)), devices)
