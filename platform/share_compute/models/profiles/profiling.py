"""Count the operations and memory of code without data: tensors have shapes, but no memory and no values.

Tensors are fake CPU tensors (torch's `FakeTensorMode`), not meta tensors, so that attention uses the same fused kernel
as on real tensors. If code reads a value of a fake tensor, torch raises an exception in `UNCOUNTABLE`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only
from torch.utils.flop_counter import FlopCounterMode, flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from share_compute.models.profiles.profile import QuadraticGrowth

UNCOUNTABLE = (
    RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError, ArithmeticError
)  # fmt: skip
"""Exceptions that a model's code may raise when it runs without data."""
LOSS_COPIES = 3
"""Number of tensors of the logits' size in the backward pass of the loss, besides those that autograd saved.

These are the logits themselves, and the gradients before and after the softmax.
"""
_TOLERANCE = 0.01
"""Maximum relative difference between a counted quantity and the parabola through its first three counts."""


class NotQuadratic(ValueError):
    """Error: a counted quantity is not a quadratic function of the sequence length."""


@dataclass(frozen=True, slots=True)
class Count:
    """Cost of one forward and one backward pass."""

    forward_flops: int
    backward_flops: int
    forward_operations: int
    """Kernel calls, without views."""
    backward_operations: int
    forward_traffic: int
    """Bytes that kernels other than matrix products, such as norms, read and write."""
    backward_traffic: int
    kept_bytes: int
    """Memory of the output and of tensors saved by autograd, without inputs, parameters and buffers."""
    saved: Mapping[StorageWeakRef, torch.UntypedStorage]
    """Storages saved by autograd, including inputs, but no parameters or buffers."""
    output: Tensor


def fake_mode() -> FakeTensorMode:
    """Return a mode in which new tensors are fake; tensors of different modes cannot be mixed."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def empty_module(mode: FakeTensorMode, module: nn.Module) -> None:
    """Replace all parameters and buffers of a module, on any device, with fake CPU tensors."""
    for part in module.modules():
        for name, parameter in part._parameters.items():  # noqa: SLF001 - there is no public way to replace them in place
            if parameter is not None:
                with mode:
                    value = torch.empty(parameter.shape, dtype=parameter.dtype)
                part._parameters[name] = nn.Parameter(value, parameter.requires_grad)  # noqa: SLF001
        for name, buffer in part._buffers.items():  # noqa: SLF001
            if buffer is not None:
                with mode:
                    part._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)  # noqa: SLF001


def empty_tensors(mode: FakeTensorMode, values: Any) -> Any:
    """Return nested tuples, lists and mappings with all tensors replaced by fake ones of the same shapes."""
    return tree_map_only(Tensor, mode.from_tensor, values)


def count(run: Callable[[], Tensor], inputs: Any, module: nn.Module) -> Count:
    """Run forward and backward once and return their cost, for fake or real tensors.

    Args:
        run: forward function.
        inputs: input tensors, nested in any way; ``kept_bytes`` of the result does not include them.
        module: module whose parameters and buffers ``kept_bytes`` leaves out, too. Its gradients are overwritten.
    """
    saved: dict[StorageWeakRef, torch.UntypedStorage] = {}

    def save(tensor: Tensor) -> Tensor:
        saved[storage_of(tensor)] = tensor.untyped_storage()
        return tensor

    saving = torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor)
    with torch.enable_grad(), flop_counter() as forward, OperationCounter() as forward_operations, saving:
        output = run()
    gradients = [torch.zeros_like(parameter) for parameter in module.parameters()]
    for parameter, total in zip(module.parameters(), gradients, strict=True):
        parameter.grad = total  # as in training, where gradients are accumulated
    gradient = torch.ones_like(output)
    with flop_counter() as backward, OperationCounter(gradients) as backward_operations:
        if output.requires_grad:
            output.backward(gradient)  # type: ignore[no-untyped-call]
    for tensor in (*module.parameters(), *module.buffers()):
        saved.pop(storage_of(tensor), None)
    kept = {**saved, storage_of(output): output.untyped_storage()}
    for tensor in tree_iter(inputs):
        if isinstance(tensor, Tensor):
            kept.pop(storage_of(tensor), None)
    kept_bytes = sum(storage.nbytes() for storage in kept.values())
    return Count(
        forward_flops=forward.get_total_flops(),
        backward_flops=backward.get_total_flops(),
        forward_operations=forward_operations.count,
        backward_operations=backward_operations.count,
        forward_traffic=forward_operations.traffic,
        backward_traffic=backward_operations.traffic,
        kept_bytes=kept_bytes,
        saved=saved,
        output=output,
    )


class OperationCounter(TorchDispatchMode):
    """Mode that counts kernel calls, without views, and the memory traffic of kernels other than matrix products.

    Args:
        gradients: gradients of parameters. Kernels that add to them do not count as traffic, because their cost does
            not depend on the number of tokens.
    """

    def __init__(self, gradients: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0
        self.traffic = 0
        """Bytes that kernels other than matrix products read and write."""
        self._gradients = frozenset(map(storage_of, gradients))

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and count it."""
        del types
        result = func(*args, **(kwargs or {}))
        # Operations in ``prim`` are not kernels: fake tensors use them to look up their device.
        if not func.is_view and func.namespace != "prim":
            self.count += 1
            if func.overloadpacket not in _WITHOUT_TRAFFIC:
                tensors = [one for one in tree_iter((args, kwargs, result)) if isinstance(one, Tensor)]
                if self._gradients.isdisjoint(map(storage_of, tensors)):
                    self.traffic += sum(one.numel() * one.itemsize for one in tensors)
        return result


def storage_of(tensor: Tensor) -> StorageWeakRef:
    """Return a key of a tensor's storage, equal for tensors that share memory."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def fit(lengths: Sequence[int], values: Sequence[int]) -> QuadraticGrowth:
    """Return the parabola through the first three points (length, value); check it at the other points.

    Raises:
        NotQuadratic: a further point is more than 1% off the parabola.
    """
    growth = parabola(lengths, values)
    for length, value in zip(lengths[3:], values[3:], strict=True):
        if abs(growth.at(length) - value) > _TOLERANCE * max(abs(value), 1):
            raise NotQuadratic(f"{value} at {length} tokens, not {growth.at(length):.0f} as {growth} says")
    return growth


def parabola(lengths: Sequence[int], values: Sequence[int]) -> QuadraticGrowth:
    """Return the parabola through the first three points (length, value)."""
    (a, b, c), (at_a, at_b, at_c) = lengths[:3], values[:3]
    rise = Fraction(at_b - at_a, b - a)
    quadratic = (Fraction(at_c - at_b, c - b) - rise) / (c - a)
    linear = rise - quadratic * (a + b)
    return QuadraticGrowth(float(at_a - linear * a - quadratic * a * a), float(linear), float(quadratic))


def flop_counter() -> FlopCounterMode:
    """Return torch's FLOP counter, extended with formulas for kernels that it does not count."""
    return FlopCounterMode(display=False, custom_mapping=_FORMULAS)


def _grouped_flops(first: Sequence[int], second: Sequence[int], *_: Any, **__: Any) -> int:
    """Return the FLOPs of a grouped product, in which each row belongs to one group.

    Operands are ``[rows, k] @ [groups, k, n]``, or ``[m, rows] @ [rows, n]``.
    """
    return 2 * first[0] * first[1] * second[-1]


def _attention_flops(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any
) -> int:
    flops: int = sdpa_flop_count(query, key, value)  # type: ignore[no-untyped-call]
    return flops


def _attention_backward_flops(
    gradient: Sequence[int],
    query: Sequence[int],
    key: Sequence[int],
    value: Sequence[int],
    *_: Any,
    **__: Any,
) -> int:
    flops: int = sdpa_backward_flop_count(gradient, query, key, value)  # type: ignore[no-untyped-call]
    return flops


_WITHOUT_TRAFFIC = frozenset(
    {
        *flop_registry,
        torch.ops.aten.embedding,
        torch.ops.aten.embedding_dense_backward,
        torch.ops.aten._unsafe_view,  # noqa: SLF001 - operators have such names
    }
)
"""Operations that do not count as traffic: matrix products, whose time follows from their FLOPs, look-ups, which read
few rows of their table, and a view that torch does not mark as a view.
"""
_FORMULAS = {
    torch.ops.aten._grouped_mm: _grouped_flops,  # noqa: SLF001 - operators have such names
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,  # noqa: SLF001
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,  # noqa: SLF001
}
