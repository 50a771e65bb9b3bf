"""Drawn operator graphs: residual networks of linear layers, norms, attention and elementwise operators."""

from __future__ import annotations

import random

from share_compute.planning.operators.calls import Dims, TracedCall
from share_compute.planning.operators.cost import CostGraph, DeviceGroup, LayerCost, Workload
from share_compute.planning.operators.graph import Operator, OperatorGraph, TensorSpec, input_operator
from share_compute.planning.operators.rules import describe
from share_compute.planning.operators.strategies import options_of


class Drawing:
    """Builder of a graph, operator by operator."""

    def __init__(self, *shape: int) -> None:
        self.operators: list[Operator] = []
        self.tensors = {"x": TensorSpec("x", shape, 4)}
        self.dims = {"x": Dims(shape, ("batch", "sequence", "features")[: len(shape)])}
        self.operators.append(input_operator(self.tensors["x"], self.dims["x"].names))

    def parameter(self, *shape: int) -> str:
        name = f"weight{len(self.tensors)}"
        self.tensors[name] = TensorSpec(name, shape, 4, "parameter")
        self.dims[name] = Dims(shape, tuple(f"dim{place}" for place in range(len(shape))))
        return name

    def add(
        self, operation: str, shape: tuple[int, ...], *inputs: str, pointwise: bool = False, **options: object
    ) -> str:
        return self.call(operation, shape, inputs, [], pointwise=pointwise, **options)

    def call(
        self,
        operation: str,
        shape: tuple[int, ...],
        inputs: tuple[str, ...],
        others: list[object],
        *,
        pointwise: bool = False,
        **options: object,
    ) -> str:
        """Add an operator with tensors as its first arguments; return the name of its output."""
        args = [*(self.dims[name] for name in inputs), *others]
        rule = describe(TracedCall(operation, args, options, shape, pointwise))
        name = f"{operation}{len(self.operators)}"
        self.tensors[name] = TensorSpec(name, shape, 4)
        self.dims[name] = Dims(shape, tuple(rule.names))
        self.operators.append(
            Operator(name, rule.kind, inputs, name, rule.equation, rule.axes, rule.flops, operation)
        )
        return name

    def linear(self, x: str, size: int) -> str:
        shape = self.dims[x].shape
        return self.add("linear", (*shape[:-1], size), x, self.parameter(size, shape[-1]))

    def graph(self, output: str) -> OperatorGraph:
        return OperatorGraph("drawn", tuple(self.operators), self.tensors, output)


def draw_graph(draw: random.Random, operators: int) -> OperatorGraph:
    """Return a residual network with about this number of operators."""
    batch, length, hidden = draw.choice((1, 2, 8)), draw.choice((64, 512)), draw.choice((256, 1024, 2048))
    drawing = Drawing(batch, length, hidden)
    x = "x"
    while len(drawing.operators) < operators:
        left = operators - len(drawing.operators)
        x = _block(drawing, draw, x, left)
    return drawing.graph(x)


def _block(drawing: Drawing, draw: random.Random, x: str, left: int) -> str:
    shape = drawing.dims[x].shape
    wide = shape[-1] * draw.choice((1, 2, 4))
    kind = draw.choice(("chain", "residual", "gated", "attention"))
    if kind == "residual" and left >= 4:
        inner = drawing.add("gelu", (*shape[:-1], wide), drawing.linear(x, wide), pointwise=True)
        return drawing.add("add", shape, x, drawing.linear(inner, shape[-1]), pointwise=True)
    if kind == "gated" and left >= 6:
        return mlp(drawing, x, wide)
    if kind == "attention" and left >= 12:
        return attention(drawing, x, heads=draw.choice((6, 8, 16)), causal=draw.random() < 0.5)
    if draw.random() < 0.5:
        return drawing.add("relu", shape, x, pointwise=True)
    return drawing.linear(x, shape[-1])


def mlp(drawing: Drawing, x: str, wide: int) -> str:
    """Add the gated MLP of a Llama layer, with its residual."""
    shape = drawing.dims[x].shape
    gate, up = drawing.linear(x, wide), drawing.linear(x, wide)
    gate = drawing.add("silu", (*shape[:-1], wide), gate, pointwise=True)
    product = drawing.add("mul", (*shape[:-1], wide), gate, up, pointwise=True)
    return drawing.add("add", shape, x, drawing.linear(product, shape[-1]), pointwise=True)


def attention(drawing: Drawing, x: str, *, heads: int, causal: bool) -> str:
    """Add multi-head attention with 64 features a head, with its residual."""
    batch, length, hidden = drawing.dims[x].shape
    parts = []
    for _ in range(3):
        split = drawing.add("view", (batch, length, heads, 64), drawing.linear(x, heads * 64))
        parts.append(drawing.call("transpose", (batch, heads, length, 64), (split,), [1, 2]))
    mixed = drawing.add("scaled_dot_product_attention", (batch, heads, length, 64), *parts, is_causal=causal)
    turned = drawing.call("transpose", (batch, length, heads, 64), (mixed,), [1, 2])
    joined = drawing.add("reshape", (batch, length, heads * 64), turned)
    return drawing.add("add", (batch, length, hidden), x, drawing.linear(joined, hidden), pointwise=True)


def draw_group(draw: random.Random, devices: int) -> DeviceGroup:
    return DeviceGroup(
        devices=devices,
        flops_per_s=10 ** draw.uniform(10, 14),
        memory_bytes_per_s=10 ** draw.uniform(10, 12),
        link_bytes_per_s=10 ** draw.uniform(8.5, 11),
        link_latency_s=10 ** draw.uniform(-6, -4),
        overhead_s=10 ** draw.uniform(-6, -5),
    )


def cost_graph(graph: OperatorGraph, group: DeviceGroup, microbatches: int = 1) -> CostGraph:
    forked = graph.forked()
    options = [options_of(operator, forked, group.devices) for operator in forked.operators]
    return LayerCost(forked, group, Workload(microbatches)).table(options)
