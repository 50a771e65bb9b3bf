"""Operations of torch on one device's parts of tensors, divided by the operator's strategy."""

from __future__ import annotations

import operator as operators
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from share_compute.errors import UserError
from share_compute.planning.operators.graph import Operator
from share_compute.planning.operators.strategies import PARTIAL, REPLICATE, Strategy

_SIZED = {"view", "reshape", "_unsafe_view", "expand"}
"""Operations whose second argument is the shape of the output."""
_BIASED = {"linear", "addmm", "baddbmm", "conv1d", "conv2d", "conv3d", "convolution"}
"""Operations that add inputs which the summed axis does not run over, such as a bias."""
_SUMS = _BIASED | {
    "matmul",
    "mm",
    "bmm",
    "sum",
    "_grouped_mm",
    "grouped_mm",
    "grouped_mm_fallback",
    "experts",
}
"""Operations whose results on parts of the summed axis add up to the result on all of it."""
_LOCAL_SIZES = {"narrow", "split_with_sizes", "unflatten"}
"""Operations with other arguments that are sizes of the whole tensor."""


class NotRunnable(UserError):
    """Error: a layer cannot be run with its plan of operators."""

    code = "operators-not-runnable"


def computed_by(node: fx.Node) -> fx.Node:
    """Return the node of the operation that has this node as its output or as one of its outputs."""
    if node.target is operators.getitem:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        return source
    return node


def reason_to_replicate(operator: Operator, strategy: Strategy) -> str:
    """Return the reason why each device must compute all of an operator; empty if it can compute its part."""
    operation = _operation(operator.target)
    if strategy.is_sharded and operation in _LOCAL_SIZES:
        return f"{operation} has arguments that are sizes of the whole tensor"
    if strategy.output.value == PARTIAL and operator.kind not in {"input", "fork"} and operation not in _SUMS:
        return f"results of {operation} on parts of a summed axis do not add up to the whole result"
    return ""


def require_runnable(operator: Operator, node: fx.Node) -> None:
    """Raise NotRunnable if the parts of an operation cannot be combined to the whole operation's result."""
    target = node.target
    operation = _operation(operator.target)
    schema = getattr(target, "_schema", None)
    hint = "run the layer on one device"
    if operation == "batch_norm" or (schema is not None and schema.is_mutable):
        raise NotRunnable(f"{operator.name} changes a tensor in place: {operator.target}", hint=hint)
    is_attention = operation == "scaled_dot_product_attention"
    rate = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
    is_seeded = torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
    if (is_attention and rate) or (is_seeded and not is_attention):
        raise NotRunnable(
            f"{operator.name} draws random numbers, which would differ between devices",
            hint="set the rate of dropout to 0, or the layer to evaluation",
        )


def computed(node: fx.Node, tensors: Sequence[Tensor], device: torch.device) -> Any:
    """Return the result of a node's operation on a device, from tensors in the order of its arguments."""
    return _called(node, tensors, device, None)


def computed_part(
    node: fx.Node,
    operator: Operator,
    strategy: Strategy,
    tensors: Sequence[Tensor],
    *,
    rank: int,
    devices: int,
) -> Tensor:
    """Return this device's part of an operator's output.

    Args:
        node: node of the output.
        operator: the operator.
        strategy: its strategy.
        tensors: this device's parts of the inputs.
        rank: place of this device.
        devices: number of devices.
    """
    source = computed_by(node)
    operation = _operation(operator.target)
    own = list(tensors)
    if strategy.output.value == PARTIAL and operation in _BIASED and rank > 0:
        for place, layout in enumerate(strategy.inputs):
            if layout.value == REPLICATE:
                # The first device adds the bias. The others add zeros, through which the bias gets its gradient.
                own[place] = own[place] - own[place].detach()
    shape = None
    if operation in _SIZED and not isinstance(source.args[1], torch.dtype):
        shape = list(node.meta["val"].shape)
        if strategy.output.value.startswith("Shard"):
            shape[int(strategy.output.value[6:-1])] //= devices
    part: Tensor = _called(node, own, own[0].device, shape)
    return part


def _called(node: fx.Node, tensors: Sequence[Tensor], device: torch.device, shape: list[int] | None) -> Any:
    source = computed_by(node)
    leaves, structure = tree_flatten((source.args, source.kwargs))
    given = iter(tensors)
    arguments, options = tree_unflatten(
        [
            # The program was exported on the meta device, so its device arguments are replaced.
            next(given) if isinstance(leaf, fx.Node) else device if isinstance(leaf, torch.device) else leaf
            for leaf in leaves
        ],
        structure,
    )
    if shape is None:
        assert callable(source.target)
        found = source.target(*arguments, **options)
    elif _operation(str(source.target)) == "expand":
        found = arguments[0].expand(shape)
    else:
        # A part may have other strides than the whole tensor, so a view may need a copy.
        found = arguments[0].reshape(shape)
    return found if source is node else found[node.args[1]]


def _operation(target: str) -> str:
    """Return the name of an operation without namespace and overload."""
    parts = target.split(".")
    return parts[1] if len(parts) > 1 else target
