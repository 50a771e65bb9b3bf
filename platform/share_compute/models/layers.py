"""Stages of models given as a declared list of torch layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from share_compute.errors import UserError
from share_compute.models.batch_norm import running_statistics
from share_compute.models.blocks import Chain, Heads, Sequential, draws
from share_compute.models.blueprint import Blueprint
from share_compute.models.cells import derive_seed, run_by_cell
from share_compute.models.freezing import freeze, require_sense, trains_before
from share_compute.models.losses import require_outputs, summed_loss
from share_compute.models.profiles.places import Places
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
from share_compute.models.tiles import Tiled
from share_compute.shards import Shard
from share_compute.specification.layers import expanded

_DENSE_BACKWARD_OPERATIONS = 5
"""Kernel calls in a linear layer's backward: two matrix products, the bias sum and two gradient accumulations."""


class _Layers(nn.Module):
    """Layers [start, stop) of a model. Parameter names contain the index in the whole model: ``layers.3.weight``."""

    def __init__(self, blueprint: Blueprint, start: int, stop: int | None = None) -> None:
        super().__init__()
        placed = expanded(blueprint.layers)
        stop = blueprint.num_declared if stop is None else stop
        self.layers = Chain({index: placed[index] for index in range(start, min(stop, len(placed)))})
        if stop > len(placed):
            self.layers.append(len(placed), Heads(blueprint.heads, str(len(placed))), "tasks")
        if blueprint.tiles is not None and start == 0 < stop:
            block = self.layers["0"]
            assert isinstance(block, Sequential)
            _, height, width = blueprint.sample_shape
            self.layers["0"] = Tiled(block, blueprint.tiles, (height, width))

    @property
    def heads(self) -> Heads | None:
        """The last layer of a model with several tasks; None if the shard lacks it."""
        return next((layer for layer in self.layers.values() if isinstance(layer, Heads)), None)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layers(inputs)
        return outputs


class LayeredStage(Stage):
    """One shard of a declared list of layers."""

    def __init__(self, blueprint: Blueprint, shard: Shard, device: torch.device) -> None:
        super().__init__(blueprint, shard, device)
        with torch.device("meta"):
            whole = _whole(blueprint)
            module = _Layers(blueprint, shard.start, shard.stop)
        self.trains_before = trains_before(whole.named_parameters(), shard.start, _places(blueprint))
        freeze(module.named_parameters(), blueprint.freeze, _places(blueprint))
        self.module: _Layers = module.to_empty(device=device)
        self.tied = {}
        for name, layer in module.layers.items():
            # Each head is wrapped separately, because another task may be current at the time of a recomputation.
            for part in layer.chains if isinstance(layer, Heads) else [layer]:
                run_by_cell(
                    part,
                    int(name),
                    lambda: self._cell,
                    draws=draws(part),
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
        if self.shard.is_first and self.objective.task == "embedding":
            inputs = inputs.flatten(0, 1)  # both texts of a pair
        heads = self.module.heads
        if heads is not None:
            heads.task = self.task
        outputs: Tensor = self.module(inputs)
        return outputs

    def statistics(self) -> dict[str, float]:
        """Return the momentum of each running statistic that is not frozen, by stored name."""
        return running_statistics(self.module)

    def initialize(self, seed: int) -> None:
        """Initialize each layer by torch's own rule, with random numbers seeded by (seed, layer name)."""
        for name, module in self.module.named_modules():
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                torch.manual_seed(derive_seed(seed, name))
                reset()


def _places(blueprint: Blueprint) -> Places:
    return Places(stack="layers.", num_layers=blueprint.num_declared)


def _whole(blueprint: Blueprint) -> _Layers:
    """Return a module of all layers of the model; frozen parameters do not require gradients."""
    module, places = _Layers(blueprint, 0), _places(blueprint)
    names = [name for name, _ in module.named_parameters()]
    require_sense(names, blueprint.freeze, places, running_statistics(module))
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
    layers, loss, counted = profile_modules(modules, blueprint)
    return ModelProfile(
        layers=forward_only_before_training(layers),
        head=loss,
        counted=counted,
        layer_types=tuple(type(module).__name__ for module in modules),
        places=_places(blueprint),
    )


def profile_modules(
    modules: Sequence[nn.Module], blueprint: Blueprint
) -> tuple[list[LayerProfile], LayerProfile, bool]:
    """Return the costs of modules that follow each other, with those of the loss, for samples of a fixed shape.

    Args:
        modules: all modules of the model, in order; their tensors are replaced by fake ones.
        blueprint: blueprint of the model.

    Returns:
        The profile of each module, that of the loss, and whether the costs were counted. If a module does not fit its
        input, the costs of all modules are estimated from their parameters.
    """
    try:
        return *_counted(modules, blueprint), True
    except (UserError, *UNCOUNTABLE):
        return [_estimated(module, blueprint) for module in modules], LayerProfile(parameters=0), False


def shape_before(blueprint: Blueprint, layer: int, batch: int) -> tuple[int, ...] | None:
    """Return the shape of a layer's inputs, ``[batch, ...]``; None if an earlier layer does not fit its input."""
    with torch.device("meta"):
        module = _Layers(blueprint, 0, layer)
        try:
            hidden = module(_sample(blueprint, batch))
        except UserError:
            return None
    return tuple(hidden.shape)


def require_fit(blueprint: Blueprint, *, checks_outputs: bool = True) -> None:
    """Raise UserError, which names the layer, if a layer does not fit its input, or the last one the objective.

    Args:
        blueprint: blueprint of declared layers.
        checks_outputs: whether the last layer is checked, too; its size may follow from data that is not read yet.
    """
    with torch.device("meta"):
        module = _whole(blueprint)
        for task, objective in enumerate(blueprint.objectives):
            if module.heads is not None:
                module.heads.task = task
            outputs = module(_sample(blueprint))
            if checks_outputs:
                require_outputs(outputs, objective)


def whole_model(blueprint: Blueprint, batch: int) -> tuple[nn.Module, Tensor]:
    """Return a module of all layers on the meta device, without tiles, and ``batch`` empty samples for it.

    Raises:
        UserError: a layer has wrong options, a frozen parameter does not exist, or all parameters are frozen.
    """
    with torch.device("meta"):
        return _whole(blueprint.model_copy(update={"tiles": None})), _sample(blueprint, batch)


def note_on_tiles(blueprint: Blueprint) -> str | None:
    """Return a sentence on the tiles of the first layer, for the job's log; None if the layer is computed whole."""
    with torch.device("meta"):
        block = _Layers(blueprint, 0, 1).layers["0"]
    if not isinstance(block, Tiled):
        return None
    assert blueprint.tiles is not None
    _, height, width = blueprint.sample_shape
    (top, bottom), (left, right) = block.reads((height, width), block.largest_box((height, width)))
    rows, columns = blueprint.tiles
    return (
        f"layer 0 is computed in {rows} x {columns} tiles of {height // rows} x {width // columns} pixels, and each "
        f"reads at most {bottom - top} x {right - left} pixels"
    )


def _sample(blueprint: Blueprint, batch: int = 1) -> Tensor:
    """Return empty samples, ``[batch, ...]``: token ids for texts, else numbers. A pair of texts is two rows."""
    objective = blueprint.objective
    dtype = torch.int64 if objective.reads_text else torch.float32
    samples = torch.empty(batch, *blueprint.sample_shape, dtype=dtype)
    return samples.flatten(0, 1) if objective.task == "embedding" else samples


def _counted(modules: Sequence[nn.Module], blueprint: Blueprint) -> tuple[list[LayerProfile], LayerProfile]:
    mode, counts, recomputed = fake_mode(), [], []
    objective = blueprint.objective
    with mode:
        hidden = _sample(blueprint)
        owners = {storage_of(hidden): -1}
        for place, module in enumerate(modules):
            empty_module(mode, module)
            inputs = hidden.detach().requires_grad_(hidden.requires_grad)
            if isinstance(module, Heads):
                _use_costliest(module, inputs)
                objective = blueprint.objectives[module.task]
            counted = count(partial(module, inputs), inputs, module)
            recomputed.append(_recomputed_bytes(module, inputs))
            hidden = counted.output
            for storage in (*counted.saved, storage_of(hidden)):
                owners.setdefault(storage, place)
            counts.append(counted)
        logits = hidden.detach().requires_grad_()
        dtype = torch.float32 if objective.task == "tabular_regression" else torch.int64
        targets = torch.zeros((1, 2) if objective.reads_text else logits.shape[:-1], dtype=dtype)
        loss = count(partial(summed_loss, logits, targets, objective), logits, nn.Identity())
    # The output of a layer takes memory between the passes only if autograd saves it in this layer or a later one.
    kept = dict.fromkeys(range(-1, len(modules)), 0)
    for storage, memory in {
        key: value for each in (*counts, loss) for key, value in each.saved.items()
    }.items():
        if storage in owners:
            kept[owners[storage]] += memory.nbytes()
    layers = [
        _constant(*each)
        for each in zip(
            modules, counts, [kept[place] for place in range(len(counts))], recomputed, strict=True
        )
    ]
    copies = LOSS_COPIES * logits.untyped_storage().nbytes()
    return layers, _constant(nn.Identity(), loss, loss.kept_bytes + copies)


def _use_costliest(heads: Heads, inputs: Tensor) -> None:
    """Select the head that keeps the most bytes of activations, for estimates; ties go to the most FLOPs."""
    costs = []
    for task in range(len(heads.chains)):
        heads.task = task
        counted = count(partial(heads, inputs), inputs, heads)
        costs.append((counted.kept_bytes, counted.forward_flops))
    heads.task = costs.index(max(costs))


def _recomputed_bytes(module: nn.Module, inputs: Tensor) -> int:
    """Return the bytes of the largest tile's activations; 0 if the module is not computed in tiles."""
    if not isinstance(module, Tiled):
        return 0
    want = module.largest_box((inputs.shape[-2], inputs.shape[-1]))
    return count(partial(module.compute_tile, inputs, want), inputs, module).kept_bytes


def _constant(module: nn.Module, counts: Count, kept_bytes: int, recomputed_bytes: int = 0) -> LayerProfile:
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
        recomputed_bytes=QuadraticGrowth(recomputed_bytes),
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
