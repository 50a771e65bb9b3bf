"""Graphs traced from real layers, and rules checked against real operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import tensor as dtensor
from torch.nn import functional
from transformers import LlamaModel

from share_compute.errors import UserError
from share_compute.models.blueprint import Blueprint
from share_compute.models.huggingface import decoder
from share_compute.models.objective import Objective
from share_compute.planning.operators.cost import DeviceGroup
from share_compute.planning.operators.graph import OperatorGraph
from share_compute.planning.operators.plan import plan_layer
from share_compute.planning.operators.strategies import PARTIAL, Strategy, options_of
from share_compute.planning.operators.trace import NotTraceable, layer_graphs, require_strategies, trace
from share_compute.specification import LayerSpec, TrainJob, parse_job

LLAMA = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}
SERVER = DeviceGroup(4, 1e12, 1e11, 1e10, 1e-5, 4e-6)


def test_a_llama_layer_comes_out_as_megatron_cuts_it() -> None:
    ((graph, layers),) = layer_graphs(Blueprint(config=LLAMA), batch=1, length=512)
    assert layers == (0, 1, 2)
    plan = plan_layer(graph, SERVER, layers=layers)
    found = {each.name: each.strategy for each in plan.operators}
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    assert {found[name] for name in columns} == {"column"}
    assert {found["self_attn.o_proj"], found["mlp.down_proj"]} == {"row"}
    assert found["self_attn.scaled_dot_product_attention"] == "heads"
    (down,) = [each for each in plan.operators if each.name == "mlp.down_proj"]
    assert down.parameters == {"mlp.down_proj.weight": "Shard(1)"}
    collectives = [each.collective for each in plan.redistributions if each.collective]
    assert collectives == ["AllGather", "ReduceScatter"] * 2
    weights = 2 * 1024 * 1024 + 2 * 1024 * 512 + 3 * 1024 * 2816
    assert sum(each.flops for each in graph.operators if each.kind == "matmul") == 2 * 512 * weights


@pytest.mark.parametrize(
    ("strategies", "problem", "hint"),
    [
        ({"mlp.down_projection": "row"}, "no operator matches 'mlp.down_projection'", "mlp.down_proj"),
        ({"self_attn.scaled*": "sequence"}, "cannot have the strategy sequence", "heads"),
        (
            {"mlp.*_proj": "expert"},
            "mlp.gate_proj cannot have the strategy expert: mlp.gate_proj (matmul) has no such strategy",
            "give one of: ",
        ),
        ({"mlp.experts": "expert"}, "no operator matches 'mlp.experts'", "names of operators are"),
        (
            {"mlp.up*": "row", "mlp.up_proj": "column"},
            "two strategies: row by 'mlp.up*'",
            "leave one of them out",
        ),
    ],
)
def test_strategies_of_a_job_that_cannot_be_are_refused(
    strategies: dict[str, str], problem: str, hint: str
) -> None:
    parallelism = {"tensor": 2, "operators": {"strategies": strategies}}
    job = parse_job({"model": {"config": LLAMA}, "data": {"files": ["a.txt"]}, "parallelism": parallelism})
    assert isinstance(job, TrainJob)
    with pytest.raises(UserError, match=r"^parallelism.operators.strategies: ") as refused:
        require_strategies(Blueprint(config=LLAMA), job)
    assert problem in refused.value.message
    assert hint in str(refused.value.hint)


def test_a_sample_of_pairs_is_two_rows() -> None:
    pairs = Objective(task="embedding", loss="info_nce")
    ((graph, _),) = layer_graphs(Blueprint(config=LLAMA, objective=pairs), batch=3, length=16)
    assert graph.tensors[graph.output].shape == (6, 16, 1024)


def test_declared_layers_are_one_graph() -> None:
    layers = (
        LayerSpec(type="linear", options={"in_features": 64, "out_features": 256}),
        LayerSpec(type="relu"),
        LayerSpec(type="linear", options={"in_features": 256, "out_features": 16}),
    )
    ((graph, _),) = layer_graphs(Blueprint(layers=layers), batch=8, length=1)
    assert [each.kind for each in graph.operators] == ["input", "matmul", "elementwise", "matmul"]
    assert not graph.repeats
    slow = DeviceGroup(4, 1e12, 1e11, 1e6, 1e-2)
    fixed = {"*0": "column", "*1": "column", "*2": "row"}
    (output,) = [each for each in plan_layer(graph, slow, fixed=fixed).redistributions if each.collective]
    assert (output.source, output.target, output.collective) == ("Partial()", "Replicate()", "AllReduce")
    assert output.gradient_collective is None
    assert plan_layer(graph, slow).communication_s == 0


MIXTURE = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "hidden_size": 64,
    "head_dim": 4,
    "num_hidden_layers": 1,
}


@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
def test_the_experts_of_a_layer_are_one_operator(implementation: str) -> None:
    config = {**MIXTURE, "experts_implementation": implementation}
    ((graph, _),) = layer_graphs(Blueprint(config=config), batch=2, length=16)
    (experts,) = [each for each in graph.operators if each.kind == "experts"]
    rows = 2 * 16 * 2
    assert experts.flops == 2 * rows * 64 * 3 * 32
    assert options_of(experts, graph, 2).names == ("batch", "expert", "replicated")
    (by_expert,) = [each for each in options_of(experts, graph, 2).strategies if each.name == "expert"]
    hidden, _, weights, *parameters = by_expert.inputs
    assert hidden == weights == ("Replicate()", "Partial()")
    assert set(parameters) == {("Shard(0)", "Shard(0)")}
    assert by_expert.output == ("Partial()", "Replicate()")
    refused = options_of(experts, graph, 4).refused["expert"]
    assert refused == "4 devices cannot divide 6 evenly (expert of mlp.experts)"


def test_slow_devices_divide_experts() -> None:
    ((graph, _),) = layer_graphs(Blueprint(config=MIXTURE), batch=1, length=17)
    plan = plan_layer(graph, DeviceGroup(2, 1e9, 1e11, 1e10, 1e-7))
    found = {each.name: each for each in plan.operators}
    assert found["mlp.experts"].strategy == "expert"
    whole = 6 * 3 * 32 * 64 * 4
    assert found["mlp.experts"].parameter_bytes == whole // 2


class Products(nn.Module):
    """Calls products other than linear layers and matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.vector = nn.Parameter(torch.ones(1, 8)), nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        added = torch.baddbmm(self.bias.expand(2, 1, 8), x, x.new_ones(2, 6, 8))
        chained = torch.einsum("...i,io,op->...p", x, x.new_ones(6, 8), x.new_ones(8, 5))
        return (added.sum() + (x @ self.vector).sum() + chained.sum(),)


def test_all_products_are_counted() -> None:
    graph = trace(Products(), (torch.zeros(2, 4, 6),), {}, name="Products")
    flops = {each.target.split(".")[1]: each.flops for each in graph.operators if each.flops}
    assert flops == {
        "baddbmm": 2 * 2 * 4 * 6 * 8,
        "matmul": 2 * 2 * 4 * 6,
        "einsum": 2 * 2 * 4 * (6 * 8 + 8 * 5),
    }


class Scaling(nn.Module):
    """Divides in place: a new tensor, a view, and a tensor of which a view is read later."""

    def forward(self, x: Tensor) -> Tensor:
        fresh, viewed, read = x + 1, x.exp().view(-1, 8), x * 2
        view = read.view(-1, 8)
        fresh /= 2
        viewed /= 2
        read /= 2
        return fresh + viewed + view


def test_a_change_in_place_of_an_unread_tensor_is_a_new_tensor() -> None:
    graph = trace(Scaling(), (torch.zeros(2, 8),), {}, name="Scaling")
    targets = [each.target for each in graph.operators if each.name.startswith("div")]
    assert targets == ["aten.div.Tensor", "aten.div_.Tensor", "aten.div_.Tensor"]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = nn.LSTM(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.own(x)[0]
        return found


@pytest.mark.filterwarnings("ignore:The tensor attributes")
def test_products_that_are_not_counted_are_refused() -> None:
    with pytest.raises(NotTraceable, match=r"operations of aten\.lstm\.input are not known"):
        trace(Recurrent(), (torch.zeros(2, 4, 6),), {}, name="Recurrent")


class Fickle(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + 1 if hidden.sum() > 0 else hidden


class Branching(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        found: Tensor = torch.cond(hidden.sum() > 0, torch.sin, torch.cos, (hidden,))
        return found


def test_graphs_within_a_graph_are_refused() -> None:
    with pytest.raises(NotTraceable, match="it has the inner graph"):
        trace(Branching(), (torch.zeros(2, 4),), {}, name="Branching")


class Speechless(nn.Module):
    def forward(self, _: Tensor) -> Tensor:
        raise ValueError


def test_a_failure_without_a_message_is_refused() -> None:
    with pytest.raises(NotTraceable, match="no fixed graph of operators: ValueError"):
        trace(Speechless(), (torch.zeros(2, 4),), {}, name="Speechless")


def test_modules_after_the_layers_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("the norm ran")

    sketched = decoder.trained_sketch

    def sketch(blueprint: Blueprint) -> tuple[Any, Any]:
        model, outline = sketched(blueprint)
        model.model.norm.register_forward_pre_hook(fail)
        return model, outline

    monkeypatch.setattr(decoder, "trained_sketch", sketch)
    layer_graphs(Blueprint(config=LLAMA), batch=1, length=8)


def test_a_model_that_does_not_run_without_its_layers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AttributeError("no such part")

    monkeypatch.setattr(LlamaModel, "forward", fail)
    with pytest.raises(NotTraceable, match="LlamaForCausalLM has no fixed graph of operators: no such part"):
        layer_graphs(Blueprint(config=LLAMA), batch=1, length=8)


def test_control_flow_on_data_is_refused() -> None:
    with pytest.raises(NotTraceable, match="no fixed graph") as caught:
        trace(Fickle(), (torch.zeros(2, 4),), {}, name="Fickle")
    assert caught.value.hint


def pieces(value: Tensor, placement: str, devices: int) -> list[Tensor]:
    """Return what each device has of a tensor."""
    where = eval(placement, vars(dtensor))
    return list(value.chunk(devices, where.dim)) if isinstance(where, dtensor.Shard) else [value] * devices


def joined(parts: list[Tensor], placement: str) -> Tensor:
    """Return the whole tensor of what each device has."""
    where = eval(placement, vars(dtensor))
    if isinstance(where, dtensor.Shard):
        return torch.cat(parts, where.dim)
    if placement == PARTIAL:
        return torch.stack(parts).sum(0)
    torch.testing.assert_close(parts[1], parts[0])
    return parts[0]


def last_strategies(graph: OperatorGraph) -> tuple[Strategy, ...]:
    return options_of(graph.operators[-1], graph, 2).strategies


RULES: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]], set[str]]] = {
    "linear": (functional.linear, [(2, 4, 6), (8, 6)], {"batch", "sequence", "row", "column"}),
    "matmul": (torch.matmul, [(2, 4, 6), (2, 6, 8)], {"batch", "sequence", "row", "column"}),
    "einsum": (
        lambda x, w: torch.einsum("...i,ihd->...hd", x, w),
        [(2, 4, 6), (6, 8, 2)],
        {"batch", "sequence", "row", "column", "column2"},
    ),
    "add": (torch.add, [(2, 4, 6), (6,)], {"batch", "sequence", "column"}),
    "softmax": (lambda x: x.softmax(-1), [(2, 4, 6)], {"batch", "sequence"}),
    "norm": (lambda x, w: functional.layer_norm(x, [6], w), [(2, 4, 6), (6,)], {"batch", "sequence"}),
    "sum": (lambda x: x.sum(1), [(2, 4, 6)], {"batch", "row", "column"}),
    "transpose": (lambda x: x.transpose(1, 2), [(2, 4, 6)], {"batch", "sequence", "column"}),
    "split": (lambda x: x.unflatten(-1, (-1, 3)), [(2, 4, 12)], {"batch", "sequence", "heads"}),
    "attention": (
        lambda q, k: functional.scaled_dot_product_attention(q, k, k),
        [(2, 4, 6, 8)] * 2,
        {"batch", "heads", "sequence"},
    ),
    "slice": (lambda x: x[..., :3], [(2, 4, 6)], {"batch", "sequence"}),
    "convolution": (functional.conv2d, [(2, 4, 6, 6), (8, 4, 3, 3)], {"batch", "row", "column"}),
}


@pytest.mark.parametrize("name", RULES)
def test_devices_with_their_parts_compute_the_whole(name: str) -> None:
    """Run each strategy on two devices' parts of the inputs; compare joined outputs and gradients with the whole."""
    function, shapes, expected = RULES[name]
    values = [torch.randn(shape, requires_grad=True) for shape in shapes]
    first, *others = (value.detach() for value in values)
    graph = trace(Called(function, others), (first,), {}, name=name)
    found = last_strategies(graph)
    assert {each.name for each in found} == {*expected, "replicated"}
    whole = function(*values)
    seed = torch.randn_like(whole)
    gradients = torch.autograd.grad(whole, values, seed)
    for strategy in found:
        layouts = strategy.inputs[: len(values)]
        own = [pieces(value, layout.value, 2) for value, layout in zip(values, layouts, strict=True)]
        devices = [[piece.detach().requires_grad_() for piece in inputs] for inputs in zip(*own, strict=True)]
        outputs = [function(*inputs) for inputs in devices]
        torch.testing.assert_close(
            joined(outputs, strategy.output.value), whole, msg=f"{name}: {strategy.name}"
        )
        seeds = pieces(seed, strategy.output.gradient, 2)
        computed = [
            torch.autograd.grad(output, inputs, part)
            for output, inputs, part in zip(outputs, devices, seeds, strict=True)
        ]
        for place, (layout, gradient) in enumerate(zip(layouts, gradients, strict=True)):
            parts = [each[place] for each in computed]
            torch.testing.assert_close(
                joined(parts, layout.gradient),
                gradient,
                atol=1e-5,
                rtol=1e-5,
                msg=f"{name}: {strategy.name}, gradient of input {place}",
            )


class Called(nn.Module):
    """Calls a function with parameters as its further arguments."""

    def __init__(self, function: Callable[..., Tensor], parameters: list[Any]) -> None:
        super().__init__()
        self.function = function
        self.own = nn.ParameterList([nn.Parameter(value.clone()) for value in parameters])

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.own)
