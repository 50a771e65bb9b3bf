"""Sharding specs: numbers of parts for each dimension of a tensor, and the DTensor placements that they mean."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache

from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from share_compute.errors import UserError
from share_compute.models.devices import OPERATIONS

Spec = tuple[int, ...]
"""Number of parts of each dimension of a tensor: ``(2, 1)`` cuts the first of two dimensions into halves."""


class ShardingRefused(UserError):
    """Error: a tensor cannot be sharded by its spec, or a mesh cannot be made."""

    code = "sharding-refused"


def mesh_of(mesh: DeviceMesh | int | Sequence[int]) -> DeviceMesh:
    """Return a mesh of devices.

    Args:
        mesh: a mesh, its shape, or the number of its devices. A number of devices becomes a mesh of its prime factors,
            so that four devices can cut two dimensions into halves.

    Raises:
        ShardingRefused: there is no process group, or it has another number of devices.
    """
    if isinstance(mesh, DeviceMesh):
        return mesh
    shape = tuple(_prime_factors(mesh)) if isinstance(mesh, int) else tuple(mesh)
    if not shape or any(size < 1 for size in shape):
        raise ShardingRefused(f"a mesh cannot have the shape {mesh}", hint="give sizes of at least 1")
    if not distributed.is_initialized():
        raise ShardingRefused(
            "a mesh needs a process group, and this process has none",
            hint="call torch.distributed.init_process_group in each process first",
        )
    devices, size = distributed.get_world_size(), math.prod(shape)
    if size != devices:
        relation = "larger than" if size > devices else "smaller than"
        raise ShardingRefused(
            f"the mesh {shape} has {size} devices: it is {relation} the process group, which has {devices}",
            hint=f"give a mesh of {devices} devices, or a DeviceMesh of some of them",
        )
    return _mesh(distributed.group.WORLD, shape)


@lru_cache(maxsize=16)
def _mesh(_world: object, shape: tuple[int, ...]) -> DeviceMesh:
    """Return the mesh of a shape for a default process group; a new mesh would make new groups of processes."""
    return init_device_mesh(_device_type(), shape)


def _device_type() -> str:
    """Return the type of the devices of the process group's backend."""
    backend = distributed.get_backend()
    fit = (
        one for one in OPERATIONS.values() if one.facts.collectives == backend and not one.facts.copies_sums
    )
    return next((one.kind for one in fit if one.count()), "cpu")


def _prime_factors(number: int) -> list[int]:
    if number < 2:
        return [number]
    found, divisor = list[int](), 2
    while number > 1:
        while number % divisor == 0:
            found.append(divisor)
            number //= divisor
        divisor += 1
    return found


def is_spec(value: object) -> bool:
    """Return whether a value is one spec, and not a sequence of specs."""
    return isinstance(value, tuple | list) and all(isinstance(each, int) for each in value)


def placements_of(spec: Spec, shape: Sequence[int], mesh: DeviceMesh, name: str) -> list[Placement]:
    """Return the placement on each dimension of a mesh that cuts a tensor as a spec says.

    Dimensions of the mesh are given to dimensions of the tensor in order, as far as the sizes allow. The others
    replicate.

    Args:
        spec: number of parts of each dimension.
        shape: shape of the tensor.
        mesh: the mesh.
        name: name of the tensor in messages.

    Raises:
        ShardingRefused: the tensor or the mesh cannot be divided as the spec requires.
    """
    if len(spec) != len(shape):
        raise ShardingRefused(
            f"the spec {spec} of {name} has {len(spec)} numbers, but the tensor has {len(shape)} dimensions",
            hint="give one number of parts for each dimension; 1 does not cut it",
        )
    for dimension, (parts, size) in enumerate(zip(spec, shape, strict=True)):
        if parts < 1 or size % parts:
            raise ShardingRefused(
                f"the spec {spec} cannot divide {name}: dimension {dimension} of size {size} into {parts} parts",
                hint=f"give a number of parts that divides {size}",
            )
    if math.prod(spec) > mesh.size():
        raise ShardingRefused(
            f"the spec {spec} of {name} needs {math.prod(spec)} devices, and the mesh has {mesh.size()}",
            hint="give fewer parts, or a larger mesh",
        )
    owners = _owners(tuple(spec), tuple(mesh.shape))
    if owners is None:
        raise ShardingRefused(
            f"the spec {spec} of {name} does not fit the mesh {tuple(mesh.shape)}",
            hint="each number of parts must be a product of sizes of the mesh, and each of them is used once",
        )
    return [Replicate() if owner is None else Shard(owner) for owner in owners]


@lru_cache(maxsize=4096)
def _owners(spec: Spec, mesh_shape: tuple[int, ...]) -> tuple[int | None, ...] | None:
    """Return, for each dimension of a mesh, the dimension of the tensor that it shards; None if impossible."""
    for owners in itertools.product((*range(len(spec)), None), repeat=len(mesh_shape)):
        parts_of = [1] * len(spec)
        for owner, size in zip(owners, mesh_shape, strict=True):
            if owner is not None:
                parts_of[owner] *= size
        if parts_of == list(spec):
            return owners
    return None


def distribute_parameters(
    module: nn.Module,
    mesh: DeviceMesh,
    placements: Callable[[Sequence[str], nn.Parameter], Sequence[Placement]],
) -> None:
    """Replace the parameters of a module by DTensors with the values of the first device; tied parameters stay tied.

    Args:
        module: the module. Its existing DTensors stay unchanged.
        mesh: the mesh.
        placements: function from all names of a parameter to its placements.
    """
    names_of = defaultdict[nn.Parameter, list[str]](list)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names_of[parameter].append(name)
    for parameter, names in names_of.items():
        if isinstance(parameter, DTensor):
            continue
        cut = distribute_tensor(parameter.detach(), mesh, placements(names, parameter))
        placed = nn.Parameter(cut, requires_grad=parameter.requires_grad)
        for name in names:
            path, _, own = name.rpartition(".")
            setattr(module.get_submodule(path), own, placed)
