"""The cost profile of a Hugging Face causal language model, or of a classifier or embedding model based on one.

Costs are counted by running the model's code without its large weights. The embedding, the layers and the head run on
fake tensors. The code around them runs on real tensors, because it may branch on the values of positions and masks.
`ShapeEstimate` estimates parts whose costs cannot be counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from share_compute.errors import UserError
from share_compute.models.blueprint import Blueprint
from share_compute.models.huggingface.cut_check import no_cut_reason
from share_compute.models.huggingface.decoder import trained_sketch
from share_compute.models.huggingface.layer_calls import (
    LayerCall,
    first_alike,
    pass_through,
    recorded_calls,
)
from share_compute.models.huggingface.parts import PartNames, head_of, tied_names
from share_compute.models.losses import summed_loss
from share_compute.models.objective import Objective
from share_compute.models.profiles.profile import ModelProfile, QuadraticGrowth, forward_only_before_training
from share_compute.models.profiles.profiling import (
    LOSS_COPIES,
    UNCOUNTABLE,
    Count,
    NotQuadratic,
    count,
    empty_module,
    empty_tensors,
    fake_mode,
    fit,
    parabola,
)
from share_compute.models.profiles.shape_estimate import ShapeEstimate

_LENGTHS = (256, 512, 1024, 768)
"""Lengths of the counted samples, in tokens; `fit` checks its result with the last one."""
_LONGER = (1280, 2048, 3072, 2560)
"""Lengths of the counted samples if costs are not quadratic over `_LENGTHS`."""
_Lengths = tuple[int, ...]
_Found = dict[str, QuadraticGrowth | int]
"""Counted costs by the name of their `LayerProfile` field; costs that could not be counted are missing."""


def profile_config(blueprint: Blueprint) -> ModelProfile:
    """Return the cost profile of a causal language model; tied parameters count once, in the embedding.

    Raises:
        UserError: the configuration does not describe a causal language model that can be split, a frozen or
            adapted parameter does not exist, all parameters are frozen, or no module follows the layers.
    """
    model, outline = trained_sketch(blueprint)
    layers = list(getattr(outline.base, outline.layers))
    layer_types = tuple(type(layer).__name__ for layer in layers)
    embedding = getattr(outline.base, outline.embedding)
    borrowed = tied_names(model)  # `sketch` makes a tied parameter twice: as itself, and in the head
    tied = next(
        (source for target, source in borrowed.items() if target.split(".")[0] in outline.heads), None
    )
    twin = model.get_parameter(tied).numel() if tied else 0
    elsewhere = {parameter for part in (embedding, *layers) for parameter in part.parameters()}
    rest = [
        parameter
        for name, parameter in model.named_parameters()
        if name not in borrowed and parameter not in elsewhere
    ]
    trained = [parameter.numel() for parameter in rest if parameter.requires_grad]
    size = sum(parameter.numel() for parameter in rest)
    tied_trains = tied is not None and model.get_parameter(tied).requires_grad
    estimate = ShapeEstimate(model.config.get_text_config())
    guesses = [
        estimate.embedding(embedding),
        *map(estimate.layer, layers),
        estimate.head(size, twin, size - sum(trained), max(trained, default=0)),
    ]
    objective = blueprint.whole_objective
    guesses = [guess.for_rows(objective.rows) for guess in guesses]
    parts = _Parts(model, outline, objective)
    found = [parts.embedding(), *parts.layers(), parts.head()]
    first, *between, last = forward_only_before_training(
        [guess.model_copy(update=better) for guess, better in zip(guesses, found, strict=True)]
    )
    return ModelProfile(
        layers=tuple(between),
        embedding=first,
        head=last,
        tied=twin,
        tied_trains=tied_trains or not twin,
        tied_name=tied if tied_trains else None,
        counted=all("forward_flops" in better for better in found),
        no_cut_reason=no_cut_reason(blueprint.config or {}) if len(layers) > 1 else None,
        layer_types=layer_types,
        places=outline.places,
    )


class _Parts:
    """Counts the cost of a model made by `sketch`, part by part.

    Args:
        model: the model; it must not be used afterwards, since its modules are replaced.
        outline: names of the model's parts.
        objective: task and loss.
    """

    def __init__(self, model: PreTrainedModel, outline: PartNames, objective: Objective) -> None:
        self._model, self._base = model.train(), outline.base
        self._objective = objective
        self._rows = objective.rows
        self._head = head_of(model, outline) if objective.task == "text_classification" else None
        text = model.config.get_text_config()
        self._hidden_size = int(text.hidden_size)
        self._stack: nn.ModuleList = getattr(outline.base, outline.layers)
        self._layers = list(self._stack)
        self._firsts = first_alike(self._layers, getattr(text, "layer_types", None))
        self._embedding: nn.Module = getattr(outline.base, outline.embedding)
        closing = [getattr(outline.base, name) for name in outline.closing]
        closing += [getattr(model, name) for name in outline.heads]
        if not closing:
            raise UserError(
                f"{type(model).__name__} has no module after its layers, so the cost of its end cannot be counted",
                hint="choose another architecture",
            )
        self._closing: nn.Module = closing[0]
        self._mode = fake_mode()
        for module in (self._embedding, *closing, *(self._layers[first] for first in set(self._firsts))):
            empty_module(self._mode, module)
        pass_through(outline.base, self._stack, outline.opening)
        self._tours: dict[tuple[int, bool], dict[int, LayerCall]] = {}

    def layers(self) -> list[_Found]:
        """Return the counted costs of all layers, in order."""
        found = {
            first: _tried(self._train, first) | _tried(self._generate, first) for first in set(self._firsts)
        }
        return [found[first] for first in self._firsts]

    def embedding(self) -> _Found:
        """Return the counted costs of the embedding."""
        return _tried(self._embed)

    def head(self) -> _Found:
        """Return the counted costs of the modules after the last layer, with the loss."""
        return _tried(self._lose)

    def _embed(self, lengths: _Lengths) -> _Found:
        counts = []
        for length in lengths:
            with self._mode:
                ids = torch.zeros(self._rows, length, dtype=torch.int64)
                counts.append(count(partial(self._embedding, ids), (), self._embedding))
        return _growths(lengths, counts)

    def _train(self, lengths: _Lengths, index: int) -> _Found:
        layer, counts = self._layers[index], []
        for length in lengths:
            (hidden, *others), options = self._given(index, length, cached=False)
            with self._mode, _GroupedProducts():
                entering = hidden.detach().requires_grad_()
                run = partial(_output, layer, entering, *others, **options)
                counts.append(count(run, (hidden, others, options), layer))
        return _growths(lengths, counts)

    def _generate(self, lengths: _Lengths, index: int) -> _Found:
        numbers = []
        for length in lengths:
            arguments, options = self._given(index, length, cached=True)
            kept = [value for value in options.values() if isinstance(value, Cache)][0]  # noqa: RUF015 - raises IndexError
            before = _numbers(kept)
            with torch.no_grad(), self._mode, _GroupedProducts():
                self._layers[index](*arguments, **options)
            numbers.append(_numbers(kept) - before)
        try:
            return {"cache_numbers": fit(lengths, numbers)}
        except NotQuadratic:  # for example, an attention window limits the cache
            return {"cache_numbers": QuadraticGrowth(float(max(numbers)))}

    def _lose(self, lengths: _Lengths) -> _Found:
        return _growths(lengths, [self._follow(length) for length in lengths])

    def _follow(self, length: int) -> Count:
        """Count the cost of the model without its embedding and layers, but with the loss."""
        entered: list[Tensor] = []
        logits: list[Tensor] = []

        def enter(_: nn.Module, arguments: tuple[Tensor, ...]) -> Tensor:
            entered.append(self._mode.from_tensor(arguments[0]).requires_grad_())
            return entered[0]

        def run() -> Tensor:
            hidden = torch.zeros(self._rows, length, self._hidden_size)
            options: dict[str, Any] = {"inputs_embeds": hidden, "use_cache": False, "return_dict": True}
            if self._objective.task == "language_model":
                logits.append(self._model(**options).logits)
            else:
                with self._mode:
                    outputs = self._base(**options)[0]
                    logits.append(outputs if self._head is None else self._head(outputs))
            with self._mode:
                size = 2 if self._objective.reads_text else length
                return summed_loss(logits[0], torch.zeros(1, size, dtype=torch.int64), self._objective)

        with self._closing.register_forward_pre_hook(enter):
            counted = count(run, entered, self._model)
        copies = LOSS_COPIES * logits[0].untyped_storage().nbytes()
        return replace(counted, kept_bytes=counted.kept_bytes + copies)

    def _given(self, index: int, length: int, *, cached: bool) -> LayerCall:
        """Return the arguments that the model passes to a layer, as fake tensors."""
        if (length, cached) not in self._tours:
            self._tours[length, cached] = self._tour(length, cached=cached)
        return self._tours[length, cached][index]

    def _tour(self, length: int, *, cached: bool) -> dict[int, LayerCall]:
        """Return the arguments of the layers in `_firsts`, by layer index."""
        hidden = torch.zeros(self._rows, length, self._hidden_size)
        calls = recorded_calls(self._base, self._stack, set(self._firsts), hidden, cached=cached)
        return {index: empty_tensors(self._mode, call) for index, call in calls.items()}


class _GroupedProducts(TorchFunctionMode):
    """Mode that replaces a grouped product over experts with a product with the first expert, which costs the same.

    torch rejects fake float32 tensors in grouped products.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch._grouped_mm:  # noqa: SLF001
            rows, experts = args
            return rows @ experts[0]
        return func(*args, **(kwargs or {}))


def _tried(counting: Callable[..., _Found], *arguments: int) -> _Found:
    """Count the costs of a part over `_LENGTHS`, or over `_LONGER` if they are not quadratic there.

    Return {} if the code cannot run on fake tensors, or if the costs are not quadratic over `_LONGER` either.
    """
    try:
        try:
            return counting(_LENGTHS, *arguments)
        except NotQuadratic:
            return counting(_LONGER, *arguments)
    except UNCOUNTABLE:
        return {}


def _growths(lengths: _Lengths, counts: Sequence[Count]) -> _Found:
    return {
        "forward_flops": fit(lengths, [each.forward_flops for each in counts]),
        "backward_flops": fit(lengths, [each.backward_flops for each in counts]),
        "forward_operations": max(each.forward_operations for each in counts),
        "backward_operations": max(each.backward_operations for each in counts),
        "forward_traffic": parabola(lengths, [each.forward_traffic for each in counts]),
        "backward_traffic": parabola(lengths, [each.backward_traffic for each in counts]),
        "activation_bytes": fit(lengths, [each.kept_bytes for each in counts]),
        "boundary_numbers": fit(lengths, [each.output.numel() for each in counts]),
    }


def _output(layer: nn.Module, *arguments: Any, **options: Any) -> Tensor:
    outputs = layer(*arguments, **options)
    hidden: Tensor = outputs[0] if isinstance(outputs, tuple) else outputs
    return hidden


def _numbers(kept: Cache) -> int:
    """Return the number of floating-point scalars in a cache."""
    return sum(
        value.numel()
        for layer in kept.layers
        for value in tree_iter(vars(layer))
        if isinstance(value, Tensor) and value.is_floating_point()
    )
