"""Redistribution of local tensors between the layouts of a plan, with the redistribution of the gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from share_compute.planning.operators.strategies import PARTIAL, REPLICATE, TensorLayout, shard

WHOLE = TensorLayout(REPLICATE, REPLICATE)
"""Layout of a tensor that each device has as a whole, and so its gradient."""


def placement_of(text: str) -> Placement:
    """Return the placement for its text in a plan, such as ``Shard(1)``."""
    if text == REPLICATE:
        return Replicate()
    return Partial() if text == PARTIAL else Shard(int(text.removeprefix("Shard(").removesuffix(")")))


def text_of(placement: Placement) -> str:
    """Return a placement as a plan writes it."""
    if isinstance(placement, Shard):
        return shard(placement.dim)
    return REPLICATE if isinstance(placement, Replicate) else PARTIAL


def redistribute(local: Tensor, source: TensorLayout, target: TensorLayout, mesh: DeviceMesh) -> Tensor:
    """Return the local part of a tensor in another layout.

    In the backward pass, the gradient goes from the gradient layout of ``target`` to that of ``source``.

    Args:
        local: this device's part of the tensor.
        source: its layout.
        target: the layout that a reader needs.
        mesh: a mesh of one dimension.
    """
    if source == target:
        return local
    if not torch.is_grad_enabled() or not local.requires_grad:
        return _moved(local, source.value, target.value, mesh)
    moved: Tensor = _Redistribution.apply(local, source, target, mesh)  # type: ignore[no-untyped-call]
    return moved


class _Redistribution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, local: Tensor, source: TensorLayout, target: TensorLayout, mesh: DeviceMesh
    ) -> Tensor:
        ctx.gradients = target.gradient, source.gradient, mesh
        return _moved(local, source.value, target.value, mesh)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        source, target, mesh = ctx.gradients
        return _moved(gradients[0], source, target, mesh), None, None, None


def _moved(local: Tensor, source: str, target: str, mesh: DeviceMesh) -> Tensor:
    if source == target:
        return local.view_as(local)
    if target == PARTIAL:
        return _as_summand(local, source, mesh)
    if source == PARTIAL and mesh.size() > 2 and distributed.get_backend(mesh.get_group()) == "nccl":
        # NCCL adds in an order that depends on the wiring of the machine. Two numbers have the same sum in any order.
        local, source = sum_in_order(local, mesh), REPLICATE
        if source == target:
            return local
    value = DTensor.from_local(local.contiguous(), mesh, [placement_of(source)], run_check=False)
    return value.redistribute(mesh, [placement_of(target)]).to_local()


def sum_in_order(local: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the sum of the tensors of all devices, added in float32 in the order of the devices.

    Each device sums one part of the tensors, so that as much is sent as in a ring (reduce-scatter and all-gather).
    """
    count, group = mesh.size(), mesh.get_group()
    flat = local.reshape(-1)
    flat = torch.nn.functional.pad(flat, (0, -flat.numel() % count))
    parts = torch.empty_like(flat)
    distributed.all_to_all_single(parts, flat, group=group)
    total, *others = parts.float().view(count, -1).unbind()
    for part in others:
        total = total + part
    whole = torch.empty_like(flat)
    distributed.all_gather(list(whole.view(count, -1).unbind()), total.to(flat.dtype), group=group)
    return whole[: local.numel()].view(local.shape)


def _as_summand(local: Tensor, source: str, mesh: DeviceMesh) -> Tensor:
    """Return this device's summand of a tensor that it holds whole or in part. Nothing is sent."""
    rank = mesh.get_local_rank()
    if source == REPLICATE:
        return local.clone() if rank == 0 else torch.zeros_like(local)
    placement = placement_of(source)
    assert isinstance(placement, Shard)
    parts = [torch.zeros_like(local)] * mesh.size()
    parts[rank] = local
    return torch.cat(parts, placement.dim)
