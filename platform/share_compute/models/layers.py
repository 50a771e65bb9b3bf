"""Stages of models given as a declared list of torch layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from share_compute.errors import UserError
from share_compute.models.blueprint import Blueprint
from share_compute.models.cells import derive_seed, run_by_cell
from share_compute.models.freezing import Places, freeze, require_sense, trains_before
from share_compute.models.losses import require_outputs, summed_loss
from share_compute.models.profiles.profile import (
    FLOAT_BYTES,
    LayerProfile,
    ModelProfile,
    QuadraticGrowth,
    forward_only_before_training,
)
from share_compute.models.profiles.profiling import (
    LOSS_COPIES,
    UNCOUNTABLE,
    Count,
    count,
    empty_module,
    fake_mode,
    storage_of,
)
from share_compute.models.profiles.shape_estimate import (
    frozen_parameters_of,
    largest_trained_of,
    parameters_of,
)
from share_compute.models.stage import Stage
from share_compute.shard import Shard
from share_compute.specification import LayerSpec

_DENSE_BACKWARD_OPERATIONS = 5
"""Kernel calls in a linear layer's backward: two matrix products, the bias sum and two gradient accumulations."""

_MODULES: dict[str, Callable[..., nn.Module]] = {
    "avg_pool2d": nn.AvgPool2d,
    "conv2d": nn.Conv2d,
    "dropout": nn.Dropout,
    "flatten": nn.Flatten,
    "gelu": nn.GELU,
    "layer_norm": nn.LayerNorm,
    "linear": nn.Linear,
    "max_pool2d": nn.MaxPool2d,
    "relu": nn.ReLU,
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "unflatten": nn.Unflatten,
}


def _make(index: int, spec: LayerSpec) -> nn.Module:
    try:
        return _MODULES[spec.type](**spec.options)
    except (TypeError, ValueError, RuntimeError) as failure:
        raise UserError(
            f"layer {index} ({spec.type}) has wrong options: {failure}",
            hint=f"give the arguments of torch.nn.{_MODULES[spec.type].__name__}",
        ) from failure


class _Layers(nn.Module):
    """Layers [start, stop) of a model. Parameter names contain the index in the whole model: ``layers.3.weight``."""

    def __init__(self, specs: Sequence[LayerSpec], start: int, stop: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(index): _make(index, specs[index]) for index in range(start, stop)})

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs
        for index, layer in self.layers.items():
            try:
                hidden = layer(hidden)
            except (RuntimeError, ValueError, IndexError) as failure:
                raise UserError(
                    f"layer {index} does not fit its input of shape {list(hidden.shape)}: {failure}",
                    hint="make each layer's options fit the output of the layer before",
                ) from failure
        return hidden


class LayeredStage(Stage):
    """One shard of a declared list of layers."""

    def __init__(self, blueprint: Blueprint, shard: Shard, device: torch.device) -> None:
        super().__init__(blueprint, shard, device)
        with torch.device("meta"):
            whole = _whole(blueprint)
            module = _Layers(blueprint.layers, shard.start, shard.stop)
        self.trains_before = trains_before(whole.named_parameters(), shard.start, _places(blueprint))
        freeze(module.named_parameters(), blueprint.freeze, _places(blueprint))
        self.module: _Layers = module.to_empty(device=device)
        self.tied = {}
        for name, layer in module.layers.items():
            run_by_cell(
                layer,
                int(name),
                lambda: self._cell,
                draws=isinstance(layer, nn.Dropout),
                recomputes=blueprint.activation_checkpointing,
            )

    @property
    def layers(self) -> dict[int, nn.Module]:
        """The shard's layers, by their index in the whole model."""
        return {int(name): layer for name, layer in self.module.layers.items()}

    def compute(self, inputs: Tensor) -> Tensor:
        """Run the shard's layers on samples, or on outputs of the previous stage, ``[batch, ...]``.

        Raises:
            UserError: a layer does not fit its input.
        """
        outputs: Tensor = self.module(inputs)
        return outputs

    def initialize(self, seed: int) -> None:
        """Initialize each layer by torch's own rule, with random numbers seeded by (seed, layer name)."""
        for name, module in self.module.named_modules():
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                torch.manual_seed(derive_seed(seed, name))
                reset()


def _places(blueprint: Blueprint) -> Places:
    return Places("layers.", len(blueprint.layers))


def _whole(blueprint: Blueprint) -> _Layers:
    """Return a module of all layers of the model; frozen parameters do not require gradients."""
    module, places = _Layers(blueprint.layers, 0, len(blueprint.layers)), _places(blueprint)
    require_sense([name for name, _ in module.named_parameters()], blueprint.freeze, places)
    freeze(module.named_parameters(), blueprint.freeze, places)
    return module


def profile_layers(blueprint: Blueprint) -> ModelProfile:
    """Compute the cost profile of a declared model, layer by layer.

    Samples have a fixed shape, so no cost depends on a sequence length. If a layer does not fit its input, the costs
    of all layers are estimated from their parameters.

    Raises:
        UserError: a layer has wrong options, a frozen parameter does not exist, or all parameters are frozen.
    """
    with torch.device("meta"):
        modules = list(_whole(blueprint).layers.values())
    try:
        layers, head, counted = *_counted(modules, blueprint), True
    except UNCOUNTABLE:
        layers, head, counted = (
            [_estimated(module, blueprint) for module in modules],
            LayerProfile(parameters=0),
            False,
        )
    return ModelProfile(layers=forward_only_before_training(layers), head=head, counted=counted)


def shape_before(blueprint: Blueprint, layer: int, batch: int) -> tuple[int, ...] | None:
    """Return the shape of a layer's inputs, ``[batch, ...]``; None if an earlier layer does not fit its input."""
    with torch.device("meta"):
        modules = _Layers(blueprint.layers, 0, layer).layers.values()
        hidden = torch.empty(batch, *blueprint.sample_shape)
        try:
            for module in modules:
                hidden = module(hidden)
        except (RuntimeError, ValueError, IndexError):
            return None
    return tuple(hidden.shape)


def require_fit(blueprint: Blueprint) -> None:
    """Raise UserError, naming the layer, if a layer does not fit its input, or the last layer the objective."""
    with torch.device("meta"):
        hidden = _whole(blueprint)(torch.empty(1, *blueprint.sample_shape))
        require_outputs(hidden, blueprint.objective)


def _counted(modules: Sequence[nn.Module], blueprint: Blueprint) -> tuple[list[LayerProfile], LayerProfile]:
    mode, counts = fake_mode(), []
    with mode:
        hidden = torch.empty(1, *blueprint.sample_shape)
        owners = {storage_of(hidden): -1}
        for place, module in enumerate(modules):
            empty_module(mode, module)
            inputs = hidden.detach().requires_grad_(hidden.requires_grad)
            counted = count(partial(module, inputs), inputs, module)
            hidden = counted.output
            for storage in (*counted.saved, storage_of(hidden)):
                owners.setdefault(storage, place)
            counts.append(counted)
        logits = hidden.detach().requires_grad_()
        dtype = torch.float32 if blueprint.objective.task == "tabular_regression" else torch.int64
        targets = torch.zeros(logits.shape[:-1], dtype=dtype)
        loss = count(partial(summed_loss, logits, targets, blueprint.objective), logits, nn.Identity())
    # The output of a layer takes memory between the passes only if autograd saves it in this layer or a later one.
    kept = dict.fromkeys(range(-1, len(modules)), 0)
    for storage, memory in {
        key: value for each in (*counts, loss) for key, value in each.saved.items()
    }.items():
        if storage in owners:
            kept[owners[storage]] += memory.nbytes()
    layers = [
        _constant(*each)
        for each in zip(modules, counts, [kept[place] for place in range(len(counts))], strict=True)
    ]
    copies = LOSS_COPIES * logits.untyped_storage().nbytes()
    return layers, _constant(nn.Identity(), loss, loss.kept_bytes + copies)


def _constant(module: nn.Module, counts: Count, kept_bytes: int) -> LayerProfile:
    return LayerProfile(
        parameters=parameters_of(module),
        frozen=frozen_parameters_of(module),
        largest=largest_trained_of(module),
        forward_flops=QuadraticGrowth(counts.forward_flops),
        backward_flops=QuadraticGrowth(counts.backward_flops),
        forward_operations=counts.forward_operations,
        backward_operations=counts.backward_operations,
        forward_traffic=QuadraticGrowth(counts.forward_traffic),
        backward_traffic=QuadraticGrowth(counts.backward_traffic),
        activation_bytes=QuadraticGrowth(kept_bytes),
        boundary_numbers=QuadraticGrowth(counts.output.numel()),
    )


def _estimated(module: nn.Module, blueprint: Blueprint) -> LayerProfile:
    """Estimate the cost profile of a layer as if it were dense.

    The forward pass takes 2 FLOPs per parameter and sample, and the backward pass takes 4.
    """
    parameters = parameters_of(module)
    width = max(
        (parameter.shape[0] for parameter in module.parameters()), default=math.prod(blueprint.sample_shape)
    )
    return LayerProfile(
        parameters=parameters,
        frozen=frozen_parameters_of(module),
        largest=largest_trained_of(module),
        forward_flops=QuadraticGrowth(2.0 * parameters),
        backward_flops=QuadraticGrowth(4.0 * parameters),
        forward_operations=1,
        backward_operations=_DENSE_BACKWARD_OPERATIONS,
        activation_bytes=QuadraticGrowth(float(FLOAT_BYTES * width)),
        boundary_numbers=QuadraticGrowth(float(width)),
    )
