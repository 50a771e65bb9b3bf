"""Parameters and gradients of a divided layer, as one rank has them.

The first rank has whole parameters, so that optimizer, checkpoints and backups need not know of ranks. Each other rank
has its parts of them, on its own device. The first rank sends the parts when parameters have changed, and gathers the
parts of the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from share_compute.sharding.execution import ShardedLayer
from share_compute.sharding.outdated import Outdated


class _Whole(NamedTuple):
    """A whole parameter of a layer, and how it is cut."""

    names: list[str]
    whole: nn.Parameter
    placement: Placement


_Transfer = tuple[Callable[..., Any], Tensor, int]
"""`distributed.isend` or `distributed.irecv`, a contiguous tensor, and the other rank."""


class RankMemory:
    """The parameters of a divided layer on one rank.

    The parts of the first rank are views of the whole parameters, which thus are always up to date. After it may have
    changed parameters, the caller calls `outdate`, and other ranks get them again before they read them. The version
    counters of torch show some further changes, but none by fused optimizers or through `Tensor.data`.

    Args:
        layer: the whole layer. On other ranks than the first, its parameters are freed.
        sharded: the layer's graph and plan; its parameters, on the meta device, are replaced by this rank's parts.
    """

    def __init__(self, layer: nn.Module, sharded: ShardedLayer) -> None:
        self._sharded = sharded
        self._mesh = sharded.mesh
        self._rank = sharded.mesh.get_local_rank()
        self._parameters = _parameters(layer, sharded)
        self.trained: list[nn.Parameter] = []
        """This rank's parts of the trained parameters, as DTensors, in the order of the whole layer."""
        device = torch.device(self._mesh.device_type)
        self._outdated = Outdated.everything
        self._seen: tuple[list[int], list[int]] = [], []
        for parameter in self._parameters:
            whole = parameter.whole
            if self._rank == 0:
                self._use(parameter, _part(whole.detach(), parameter.placement, self._mesh, 0))
                continue
            like = _part(whole.detach(), parameter.placement, self._mesh, self._rank)
            self._use(parameter, torch.empty(like.shape, dtype=like.dtype, device=device))
            whole.data = whole.new_empty(0)
        if self._rank > 0:
            for module in sharded.layer.modules():
                for name, buffer in module.named_buffers(recurse=False):
                    setattr(module, name, buffer.to(device))

    def outdate(self, what: Outdated) -> None:
        """Note on the first rank that it may have changed parameters."""
        self._outdated = max(self._outdated, what)

    @property
    def outdated(self) -> Outdated:
        """Parameters that `refresh` must send before ranks read them; ask the first rank."""
        trained, others = self._versions()
        if others != self._seen[1]:
            return Outdated.everything
        return max(self._outdated, Outdated.trained if trained != self._seen[0] else Outdated.none)

    def refresh(self, what: Outdated) -> None:
        """Give all ranks the parameters of the first rank; all ranks call this together."""
        sent = [
            parameter
            for parameter in self._parameters
            if what is Outdated.everything or parameter.whole.requires_grad
        ]
        with torch.no_grad():
            self._send(sent)
            if what is Outdated.everything:
                for buffer in self._buffers():
                    found = buffer.contiguous()
                    distributed.broadcast(found, 0, group=self._mesh.get_group())
                    if self._rank > 0:
                        buffer.data.copy_(found)  # `data`, as in `_send`
        self._outdated, self._seen = Outdated.none, self._versions()

    def _send(self, sent: Sequence[_Whole]) -> None:
        """Send the other ranks their parts; all ranks call this together."""
        if self._rank == 0:
            moved = [each.names[0] for each in sent if not _is_view(self._own(each), each.whole)]
            if moved:
                raise RuntimeError(
                    f"the parameters {', '.join(moved)} have other memory than when they were divided"
                )
            self._exchange(
                (distributed.isend, _part(each.whole, each.placement, self._mesh, rank).contiguous(), rank)
                for rank in range(1, self._mesh.size())
                for each in sent
            )
            return
        # `data` has a version counter of its own. Otherwise, torch would refuse the backward passes of open cells
        # whenever unchanged values are sent again, such as after an evaluation in the middle of a step.
        self._exchange((distributed.irecv, self._own(each).data, 0) for each in sent)

    def _exchange(self, transfers: Iterable[_Transfer]) -> None:
        """Carry out transfers, each with another rank, at the same time."""
        group = self._mesh.get_group()
        operations = [
            distributed.P2POp(way, tensor, group=group, group_peer=rank) for way, tensor, rank in transfers
        ]
        if operations:
            for work in distributed.batch_isend_irecv(operations):
                work.wait()

    def collect(self, found: Sequence[Tensor | None]) -> list[Tensor]:
        """Return whole gradients on the first rank; all ranks call this together.

        Args:
            found: gradients of `trained`, as DTensors; None for parameters that the output does not depend on.
        """
        own = [
            torch.zeros_like(_local(placed)) if each is None else _local(each)
            for placed, each in zip(self.trained, found, strict=True)
        ]
        transfers: list[_Transfer] = []
        copied: list[tuple[Tensor, Tensor]] = []
        for place, (gradient, placed) in enumerate(zip(own, self.trained, strict=True)):
            placement = _placement(placed)
            if not isinstance(placement, Shard):
                continue
            if self._rank > 0:
                transfers.append((distributed.isend, gradient.contiguous(), 0))
                continue
            own[place] = gradient.new_empty(placed.shape)
            first, *others = (
                _part(own[place], placement, self._mesh, rank) for rank in range(self._mesh.size())
            )
            first.copy_(gradient)
            for rank, part in enumerate(others, 1):
                arriving = part
                if not part.is_contiguous():
                    arriving = gradient.new_empty(part.shape)
                    copied.append((part, arriving))
                transfers.append((distributed.irecv, arriving, rank))
        self._exchange(transfers)
        for part, arrived in copied:
            part.copy_(arrived)
        return own

    def _use(self, parameter: _Whole, local: Tensor) -> None:
        """Make a tensor this rank's part of a parameter."""
        whole, mesh = parameter.whole, self._mesh
        part = DTensor.from_local(
            local, mesh, [parameter.placement], run_check=False, shape=whole.shape, stride=whole.stride()
        )
        placed = nn.Parameter(part, requires_grad=whole.requires_grad)
        for name in parameter.names:
            path, _, leaf = name.rpartition(".")
            setattr(self._sharded.layer.get_submodule(path), leaf, placed)
        if whole.requires_grad:
            self.trained.append(placed)

    def _own(self, parameter: _Whole) -> Tensor:
        placed = self._sharded.layer.get_parameter(parameter.names[0])
        return _local(placed.detach())

    def _buffers(self) -> list[Tensor]:
        return list(self._sharded.layer.buffers())

    def _versions(self) -> tuple[list[int], list[int]]:
        """Return the version counters of the trained parameters, and of the other tensors."""
        frozen = [each.whole for each in self._parameters if not each.whole.requires_grad]
        trained = [each.whole for each in self._parameters if each.whole.requires_grad]
        return _versions(trained), _versions([*frozen, *self._buffers()])


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    return [each._version for each in tensors]  # noqa: SLF001 - no public name


def _parameters(layer: nn.Module, sharded: ShardedLayer) -> list[_Whole]:
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in layer.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    found: Mapping[str, nn.Parameter] = dict(sharded.layer.named_parameters(remove_duplicate=False))
    return [_Whole(own, whole, _placement(found[own[0]])) for whole, own in names.items()]


def _is_view(part: Tensor, whole: Tensor) -> bool:
    return part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def _placement(parameter: Tensor) -> Placement:
    assert isinstance(parameter, DTensor)
    return parameter.placements[0]


def _local(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


def _part(whole: Tensor, placement: Placement, mesh: DeviceMesh, rank: int) -> Tensor:
    """Return a rank's part of a tensor, as a view."""
    if isinstance(placement, Shard):
        return whole.chunk(mesh.size(), placement.dim)[rank]
    return whole
