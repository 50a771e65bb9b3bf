"""Plans of layers that the ranks of a member divide, and checks of them before a job has members."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import tree_map

from share_compute.errors import UserError
from share_compute.models.blocks import Heads
from share_compute.models.blueprint import Blueprint
from share_compute.models.huggingface.experts import experts_as_operations
from share_compute.models.profiles.profiling import UNCOUNTABLE
from share_compute.planning.operators.cost import DeviceGroup
from share_compute.planning.operators.plan import LayerOperators, StrategyRefused, naming_field, plan_layer
from share_compute.planning.operators.strategies import REPLICATED
from share_compute.planning.operators.trace import NotTraceable, layer_calls, require_strategies, traced
from share_compute.sharding.execution import require_runnable_layer
from share_compute.shards import Shard
from share_compute.specification import TrainJob
from share_compute.specification.placement.operators import OperatorsSpec

_FLOPS_PER_S, _MEMORY_BYTES_PER_S = 5e10, 1e10
"""Assumed speed of a rank. All members of a job must have the same plan, so that they compute the same bits."""
_LINK_BYTES_PER_S, _LINK_LATENCY_S = 2e9, 1e-6
"""Assumed link between ranks. Its latency is low, since a job that asks for several ranks wants its layers divided."""
_MOST_TOKENS = 2**16
"""Most tokens with which a layer is traced for a check before the job has a plan."""
Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a call to a layer."""


class PlannedLayer(NamedTuple):
    """Plan of a layer."""

    plan: LayerOperators
    leaving: Tensor
    """Output of the layer, on the meta device."""


def planned(layer: nn.Module, call: Call, ranks: int, operators: OperatorsSpec) -> PlannedLayer | str:
    """Return how ranks divide a layer, or why they cannot.

    Args:
        layer: the layer.
        call: arguments of a call.
        ranks: number of ranks.
        operators: how operators are divided.

    Raises:
        StrategyRefused: a given strategy is not legal.
    """
    arguments, options = call
    name = type(layer).__name__
    if isinstance(layer, Heads) or not arguments or not isinstance(arguments[0], Tensor):
        return f"{name} depends on more than its first argument"
    group = DeviceGroup(ranks, _FLOPS_PER_S, _MEMORY_BYTES_PER_S, _LINK_BYTES_PER_S, _LINK_LATENCY_S)
    try:
        blank = empty_copy(layer).to("meta")
        with experts_as_operations(blank):
            leaving = blank(*tree_map(_on_meta, arguments), **tree_map(_on_meta, options))
        found = traced(empty_copy(layer), arguments, options, name=name)
        with naming_field():
            plan = plan_layer(
                found.graph,
                group,
                search=operators.search,
                fixed=operators.strategies,
                fully_use_devices=operators.fully_use_devices,
            )
        require_runnable_layer(found)
    except StrategyRefused:
        raise
    except UserError as error:
        return error.message
    except UNCOUNTABLE as error:
        return f"{name} does not run without data: {error}"
    if not isinstance(leaving, Tensor):
        return f"{name} returns several tensors"
    if all(each.strategy == REPLICATED or not each.target for each in plan.operators):
        return "no way to divide it would save time"
    return PlannedLayer(plan, leaving)


def undivided(shard: Shard, ranks: int, layer: int, reason: str) -> UserError:
    """Return the error for a stage without a layer that ranks can divide.

    Args:
        shard: layers of the stage.
        ranks: number of ranks.
        layer: index of a layer with parameters.
        reason: why this layer is not divided.
    """
    return UserError(
        f"parallelism.tensor: no layer of the stage with layers {shard.start} to {shard.stop - 1} can be divided "
        f"between {ranks} ranks: layer {layer}: {reason}",
        hint="set parallelism.tensor to 1, or change the model: dropout rates of 0, sizes that the ranks divide",
    )


def require_parallelism(blueprint: Blueprint, spec: TrainJob) -> None:
    """Check that a model supports ``parallelism``: division by ranks, or slices of sequences.

    For ranks, models of declared layers and text encoders are not checked: their layers are planned when a member holds
    them. Models whose code around the layers needs data are not checked either.

    Args:
        blueprint: the model.
        spec: the job.

    Raises:
        UserError: ranks can divide no layer, a given strategy is not legal or matches no operator, or sequences cannot
            be cut into slices.
    """
    if spec.parallelism.operators.strategies:
        require_strategies(blueprint, spec)
    if spec.parallelism.tensor > 1 and blueprint.config is not None and not blueprint.uses_encoder:
        _require_divided(blueprint, spec)
    if spec.parallelism.sequence > 1:
        from share_compute.models.huggingface.cut_check import require_slices  # noqa: PLC0415 - slow to import

        require_slices(blueprint.config or {})


def _require_divided(blueprint: Blueprint, spec: TrainJob) -> None:
    """Raise UserError if the ranks of ``parallelism.tensor`` can divide no layer of a Hugging Face model."""
    training, ranks, layers = spec.training, spec.parallelism.tensor, 0
    first: tuple[int, str] | None = None
    rows = training.batch_size // (training.microbatches or 1)
    # The planner has not chosen the microbatches yet, and the hidden states of a whole batch may not fit into memory.
    rows = min(rows, max(1, _MOST_TOKENS // training.sequence_length))
    try:
        for layer, call, places in layer_calls(blueprint, rows, training.sequence_length):
            found = planned(layer, call, ranks, spec.parallelism.operators)
            if isinstance(found, PlannedLayer):
                return
            first, layers = first or (places[0], found), layers + len(places)
    except NotTraceable:
        return
    if first is not None:
        raise undivided(Shard("model", 0, layers, layers), ranks, *first)


def _on_meta(value: Any) -> Any:
    return value.detach().to("meta") if isinstance(value, Tensor) else value


def empty_copy(layer: nn.Module) -> nn.Module:
    """Return a copy of a layer, of the layer's own class, with parameters on the meta device."""
    memo: dict[int, Any] = {id(each): each for each in layer.buffers()}
    for parameter in layer.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
    found = copy.deepcopy(layer, memo)
    vars(found).pop("forward", None)  # the one of `run_by_cell` runs the original
    return found
