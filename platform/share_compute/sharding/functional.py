"""Functional sharding: a call of a function with inputs and outputs that are sharded by specs.

This is ``shard(in_strategy, out_strategy)`` of MindSpore, implemented with DTensor. Layouts between inputs and outputs
are propagated by DTensor's own rules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_module
from torch.utils._pytree import tree_flatten, tree_unflatten

from share_compute.sharding.specs import (
    ShardingRefused,
    Spec,
    distribute_parameters,
    is_spec,
    mesh_of,
    placements_of,
)

Specs = Spec | Sequence[Spec | None] | None


def shard(
    module_or_function: Callable[..., Any],
    in_specs: Specs,
    out_specs: Specs,
    mesh: DeviceMesh | int | Sequence[int],
    *,
    parameter_specs: Mapping[str, Spec] | None = None,
) -> Callable[..., Any]:
    """Return a function whose inputs and outputs are sharded according to specs.

    A spec has the number of parts of each dimension: ``(2, 1)`` cuts rows into halves. Devices beyond the number of
    parts hold copies. A plain tensor is an input that each device holds whole. DTensors on the same mesh are
    redistributed. Outputs are DTensors.

    Args:
        module_or_function: the module or function to call. Parameters of a module become DTensors in place.
        in_specs: spec of each positional argument. None for an argument keeps its layout, and None alone keeps all. A
            single spec is for a single argument.
        out_specs: spec of each output. None for an output keeps the layout that DTensor propagates, and None alone
            keeps all. A single spec is for a single output.
        mesh: a mesh, its shape, or the number of its devices. Without a mesh, all devices of the process group form it.
        parameter_specs: specs of a module's parameters by name; the others are replicated.

    Raises:
        ShardingRefused: a spec does not fit its tensor or the mesh, or their number is wrong. Errors of inputs and
            outputs are raised by the call.
    """
    devices = mesh_of(mesh)
    if isinstance(module_or_function, nn.Module):
        _distribute(module_or_function, parameter_specs or {}, devices)
    elif parameter_specs:
        raise ShardingRefused(
            "a function has no parameters that specs could cut",
            hint="leave out parameter_specs, or give a module",
        )

    @functools.wraps(module_or_function, updated=())
    def call(*arguments: Any, **options: Any) -> Any:
        specs = _for_each(in_specs, len(arguments), "in_specs", "argument")
        cut = [
            _entered(value, spec, devices, f"argument {place}")
            for place, (value, spec) in enumerate(zip(arguments, specs, strict=True))
        ]
        leaves, structure = tree_flatten(options)
        whole = [_entered(leaf, None, devices, "a keyword argument") for leaf in leaves]
        found = module_or_function(*cut, **tree_unflatten(whole, structure))
        return _left(found, out_specs, devices)

    return call


def _distribute(module: nn.Module, specs: Mapping[str, Spec], mesh: DeviceMesh) -> None:
    known = dict(module.named_parameters(remove_duplicate=False))
    for name in specs:
        if name not in known:
            raise ShardingRefused(
                f"there is no parameter {name}", hint=f"names of parameters are: {', '.join(known)}"
            )

    def placements(names: Sequence[str], parameter: nn.Parameter) -> Sequence[Placement]:
        given = [name for name in names if name in specs]
        if len({tuple(specs[name]) for name in given}) > 1:
            raise ShardingRefused(
                f"{' and '.join(given)} are one parameter, and have different specs",
                hint="give it one spec",
            )
        if not given:
            return [Replicate()] * mesh.ndim
        return placements_of(specs[given[0]], parameter.shape, mesh, f"the parameter {given[0]}")

    distribute_parameters(module, mesh, placements)
    distribute_module(module, mesh)  # the buffers


def _for_each(specs: Specs, count: int, field: str, noun: str) -> Sequence[Spec | None]:
    """Return one spec for each argument or output."""
    if specs is None:
        return [None] * count
    each: Sequence[Any] = [specs] if specs and is_spec(specs) else specs
    if len(each) != count:
        plural = "" if count == 1 else "s"
        raise ShardingRefused(
            f"{field} has {len(each)} specs, and there are {count} {noun}{plural}",
            hint=f"give one spec for each {noun}; None keeps its layout",
        )
    return each


def _entered(value: Any, spec: Spec | None, mesh: DeviceMesh, name: str) -> Any:
    """Return an argument in the layout of its spec."""
    if not isinstance(value, Tensor):
        if spec is not None:
            raise ShardingRefused(f"{name} is not a tensor, but has the spec {spec}", hint="give None")
        return value
    if not isinstance(value, DTensor):
        value = DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return _redistributed(value, spec, mesh, name)


def _redistributed(value: DTensor, spec: Spec | None, mesh: DeviceMesh, name: str) -> DTensor:
    if value.device_mesh != mesh:
        raise ShardingRefused(
            f"{name} is on another mesh: {value.device_mesh}", hint="use one mesh for all tensors of a call"
        )
    if spec is None:
        return value
    return value.redistribute(mesh, placements_of(tuple(spec), value.shape, mesh, name))


def _left(found: Any, specs: Specs, mesh: DeviceMesh) -> Any:
    """Return the outputs of a call in the layouts of their specs."""
    if specs is None:
        return found
    is_one = not isinstance(found, tuple | list)
    outputs = [found] if is_one else list(found)
    cut = [
        value if spec is None else _output(value, spec, mesh, f"output {place}")
        for place, (value, spec) in enumerate(
            zip(outputs, _for_each(specs, len(outputs), "out_specs", "output"), strict=True)
        )
    ]
    return cut[0] if is_one else type(found)(cut)


def _output(value: Any, spec: Spec, mesh: DeviceMesh, name: str) -> DTensor:
    if not isinstance(value, DTensor):
        raise ShardingRefused(
            f"{name} is not computed from the sharded inputs, but has the spec {spec}", hint="give None"
        )
    return _redistributed(value, spec, mesh, name)
