"""Stages of Hugging Face causal language models and of classifiers based on them, built with the models' own code.

A stage begins as the whole model with large parameters on the meta device. The modules of other stages are replaced by
`PassThrough`. Then the remaining parameters get memory. The architecture's pipeline plan (``base_model_pp_plan``) names
the embedding, the layers and the modules after them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

from share_compute.errors import UserError
from share_compute.models.adapter_names import is_adapter, stored_name
from share_compute.models.blueprint import Blueprint, TaskHead
from share_compute.models.cells import derive_seed, run_by_cell
from share_compute.models.freezing import Named, freeze, require_sense, trains_before
from share_compute.models.huggingface.hub_configuration import hub_configuration, on_one_line
from share_compute.models.huggingface.parts import (
    EncoderPartNames,
    PartNames,
    head_of,
    kind_of,
    part_names,
    tied_names,
    whole_parts,
)
from share_compute.models.huggingface.ring_attention import present_slice, use_ring_attention
from share_compute.models.objective import Objective
from share_compute.models.profiles.places import BEFORE
from share_compute.models.stage import Stage
from share_compute.shards import Shard

_SMALL = 2**14
"""Size in scalars above which `sketch` puts a parameter on the meta device."""
_HUGE = 2**26
"""Size in scalars above which ``torch.empty`` creates a meta tensor during `sketch`."""
_KINDS = {
    AutoModelForCausalLM: "a causal language model",
    AutoModelForSequenceClassification: "a classifier of texts",
    AutoModelForImageClassification: "a classifier of images",
}


class _HeldElsewhere(UserError, AttributeError):
    """Error: an attribute of a module of another stage was read. It is an AttributeError, so that `hasattr` works."""


class PassThrough(nn.Module):
    """Placeholder for a module of another stage; it returns its first argument."""

    def __init__(self, original: nn.Module | None = None) -> None:
        super().__init__()
        # Some models read plain attributes of a layer, such as its kind of attention, before they call the layer.
        for name, value in vars(original).items() if original is not None else ():
            if not name.startswith("_") and isinstance(value, str | int | float | bool):
                setattr(self, name, value)

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return ``hidden`` unchanged."""
        return hidden

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as failure:
            raise _HeldElsewhere(
                f"this architecture cannot be cut here: a stage needs {name!r} of a module that another stage holds",
                hint="set parallelism.stages: 1, or choose another architecture",
            ) from failure


class StageInput(PassThrough):
    """Placeholder for the last layer before a shard: it returns the stage's input.

    A base model may change its input before the first layer, for example scale embeddings. This placeholder undoes the
    change in later stages.
    """

    inputs: Tensor | None = None
    """Input of the stage, ``[batch, seq, hidden]``, while the stage computes."""

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:  # noqa: ARG002 - the signature of a layer
        """Return the input of the stage."""
        assert self.inputs is not None
        return self.inputs


def hidden_size_of(config: Mapping[str, Any]) -> int | None:
    """Return the size of a token's hidden state; None if the configuration has none.

    Raises:
        UserError: the configuration is invalid.
    """
    size = getattr(hub_configuration(config).get_text_config(), "hidden_size", None)
    return size if isinstance(size, int) else None


class _HugeOnMeta(TorchFunctionMode):
    """Mode in which ``torch.empty`` puts tensors larger than `_HUGE` on the meta device."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if func is torch.empty:
            sizes = args[0] if len(args) == 1 and not isinstance(args[0], int) else args
            if math.prod(sizes) > _HUGE:
                options = {**options, "device": "meta"}
        return func(*args, **options)


@contextmanager
def _sketching() -> Iterator[None]:
    """Return a context in which models are built with large parameters on the meta device.

    Buffers and small parameters get real values, since checkpoints may lack values that constructors compute, such as
    rotary frequencies.
    """
    register = nn.Module.register_parameter

    def register_sketch(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and parameter.numel() > _SMALL:
            module._parameters[name] = nn.Parameter(  # noqa: SLF001 - as accelerate's init_empty_weights does
                parameter.to("meta"), requires_grad=parameter.requires_grad
            )

    with torch.random.fork_rng(devices=[]), _HugeOnMeta():
        torch.manual_seed(0)
        nn.Module.register_parameter = register_sketch  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            nn.Module.register_parameter = register  # type: ignore[method-assign]


def materialize(model: nn.Module, device: torch.device, *, is_filled_later: bool) -> None:
    """Move a module's real tensors to ``device``, and allocate memory there for its meta parameters.

    Args:
        model: module of a model made by `sketch`.
        device: target device.
        is_filled_later: whether the caller overwrites all of this memory. Otherwise the memory is zeroed, since
            some constructors zero large parameters that no initialization rule covers.
    """
    fresh = torch.empty_like if is_filled_later else torch.zeros_like
    for module in model.modules():
        for name, parameter in module._parameters.items():  # noqa: SLF001
            if parameter is not None and parameter.is_meta:
                filled = nn.Parameter(fresh(parameter, device=device), parameter.requires_grad)
                module._parameters[name] = filled  # noqa: SLF001
    model.to(device)


def sketch(
    config: Mapping[str, Any], dtype: torch.dtype = torch.float32, kind: Any = AutoModelForCausalLM
) -> PreTrainedModel:
    """Return a whole model with its large parameters on the meta device, so that they take no memory.

    Args:
        config: configuration of the model.
        dtype: dtype of the parameters, except those that the architecture keeps in float32.
        kind: auto class of transformers, with a method ``from_config``.

    Raises:
        UserError: the configuration does not describe a model of this kind.
    """
    try:
        with _sketching():
            read = hub_configuration(config)
            text = read.get_text_config()
            if getattr(text, "output_router_logits", False):
                text.output_router_logits = (
                    False  # for the auxiliary loss, which no stage needs or can compute
                )
            model: PreTrainedModel = kind.from_config(read, dtype=dtype, trust_remote_code=False)
    except (
        ValueError,
        TypeError,
        AttributeError,
        RuntimeError,
        LookupError,
        AssertionError,
        ZeroDivisionError,
        StrictDataclassError,
    ) as failure:
        wanted = _KINDS.get(kind, "an encoder")
        raise UserError(
            f"this configuration does not make {wanted}: {on_one_line(failure)}",
            hint="check model.config against the architecture's documentation in transformers",
        ) from failure
    kept = model._get_dtype_plan(dtype)  # noqa: SLF001 - from_pretrained calls it, too
    if kept:
        exact = re.compile("|".join(pattern.replace("*", ".*") for pattern in kept))
        for name, parameter in model.named_parameters():
            if exact.search(name):
                parameter.data = parameter.data.float()
    return model


def task_sketch(
    config: Mapping[str, Any], objective: Objective, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """Return a whole model made by `sketch` with the head for a task; for embeddings, without head and pooler.

    Raises:
        UserError: as in `sketch`.
    """
    model = sketch(config, dtype, kind_of(objective))
    if objective.task == "embedding" and hasattr(model, "pooler"):
        model.pooler = None  # its output is not used
    return model


def whole_sketch(blueprint: Blueprint, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return the whole model of a blueprint, made by `task_sketch`, with the heads of several tasks.

    Raises:
        UserError: as in `sketch`.
    """
    model = task_sketch(blueprint.config or {}, blueprint.whole_objective, dtype)
    for head in _added_heads(blueprint):
        size = model.config.get_text_config().hidden_size
        classes = head.objective.classes or 2  # unknown before the data is read
        model.add_module(head.module, nn.Linear(size, classes, bias=False, device="meta", dtype=dtype))
    return model


def _added_heads(blueprint: Blueprint) -> list[TaskHead]:
    """Return the heads for classes of a model with several tasks."""
    return [head for head in blueprint.heads if blueprint.has_heads and head.objective.has_classes]


def trained_sketch(
    blueprint: Blueprint, dtype: torch.dtype = torch.float32
) -> tuple[PreTrainedModel, PartNames]:
    """Return a whole model made by `sketch`, with its adapters, and its `PartNames`.

    Frozen parameters do not require gradients.

    Args:
        blueprint: blueprint of the model.
        dtype: dtype of the parameters, as in `sketch`.

    Raises:
        UserError: the configuration does not describe a causal language model, or a classifier, that can be split; a
            frozen or adapted parameter does not exist; or all parameters are frozen.
    """
    model = whole_sketch(blueprint, dtype)
    outline = part_names(model, blueprint.whole_objective)
    if blueprint.whole_objective.has_classes and not isinstance(outline, EncoderPartNames):
        head_of(model, outline)
    if blueprint.lora is not None:
        from share_compute.models.adapters import adapt  # noqa: PLC0415 - slow to import, and only for adapters

        whole = whole_parts(model, outline, blueprint.whole_objective)
        adapt(model, blueprint.lora, outline.places, whole)
    stored = list(_stored_parameters(model))
    require_sense([name for name, _ in stored], blueprint.freeze, outline.places)
    freeze(stored, blueprint.freeze, outline.places)
    return model, outline


def _stored_parameters(model: PreTrainedModel) -> Iterator[Named]:
    tied = tied_names(model)
    for name, parameter in model.named_parameters():
        yield tied.get(name, name), parameter


class HuggingFaceStage(Stage):
    """One shard of a causal language model, or of a classifier or an embedding model based on one.

    Args:
        blueprint: blueprint of the whole model.
        shard: part of the model that this stage holds.
        device: device of the shard.
        serves_in: dtype of the weights if the stage is for inference only; None for training.
        change: function that modifies the model before memory is allocated. Its arguments are the model and the
            names of all tied weights.

    Raises:
        UserError: as in `trained_sketch`, or the device cannot compute in the blueprint's precision.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        shard: Shard,
        device: torch.device,
        serves_in: torch.dtype | None = None,
        *,
        change: Callable[[PreTrainedModel, Set[str]], None] | None = None,
    ) -> None:
        super().__init__(blueprint, shard, device)
        model, outline = trained_sketch(blueprint, serves_in or torch.float32)
        tied = tied_names(model)
        self.trains_before = not shard.is_first and trains_before(
            _stored_parameters(model), shard.start, outline.places
        )
        self._is_adapted = blueprint.lora is not None
        objective = blueprint.whole_objective
        self._head = outline.heads[0] if objective.has_classes else None
        """Name of a classifier's head; None for other models."""
        self._task_heads = {
            place: head.module
            for place, head in enumerate(blueprint.heads)
            if head in _added_heads(blueprint)
        }
        """Name of the head of each of several tasks that has classes, by the index of the task."""
        self._embeds = objective.task == "embedding"
        self._pooling = blueprint.pooling
        self._new = (*whole_parts(model, outline, objective), *self._task_heads.values())
        """Names of the modules that folders of pretrained weights may lack."""
        self._keep(model, outline)
        if change is not None:
            change(model, {*tied, *tied.values()})
        materialize(model, device, is_filled_later=serves_in is not None)
        present = set(model.state_dict())
        for target, source in tied.items():
            if target in present and source in present:  # `materialize` allocated both separately
                owner, _, leaf = target.rpartition(".")
                setattr(model.get_submodule(owner), leaf, model.get_parameter(source))
        self.tied = {target: source for target, source in tied.items() if target in present}
        self.module = model
        self._model = model
        self._base = outline.base
        self._stack = outline.layers
        if serves_in is None:
            self._follow_cells(blueprint, outline)
        else:
            model.requires_grad_(requires_grad=False).eval()

    def _follow_cells(self, blueprint: Blueprint, outline: PartNames) -> None:
        draws = any(
            ("drop" in name or "jitter" in name) and isinstance(value, float) and value > 0
            for name, value in vars(self._model.config).items()
        ) or (blueprint.lora is not None and blueprint.lora.dropout > 0)
        for place, layer in self.layers.items():
            run_by_cell(
                layer, place, lambda: self._cell, draws=draws, recomputes=blueprint.activation_checkpointing
            )
        if draws and self.shard.is_first:
            self._seed_opening(outline)

    def _keep(self, model: PreTrainedModel, outline: PartNames) -> None:
        layers = getattr(outline.base, outline.layers)
        for index in range(len(layers)):
            if not self.shard.start <= index < self.shard.stop:
                placeholder = StageInput if index == self.shard.start - 1 else PassThrough
                layers[index] = placeholder(layers[index])
        if not self.shard.is_first:
            for name in outline.opening:
                setattr(outline.base, name, PassThrough())
        if not self.shard.is_last:
            for name in outline.closing:
                setattr(outline.base, name, PassThrough())
            for name in outline.heads:
                setattr(model, name, PassThrough())

    def _seed_opening(self, outline: PartNames) -> None:
        def seed(module: nn.Module, _args: Any, _kwargs: Any) -> None:
            if module.training:
                torch.manual_seed(derive_seed(*self._cell, BEFORE))

        for name in outline.opening:
            getattr(outline.base, name).register_forward_pre_hook(seed, with_kwargs=True)

    @property
    def layers(self) -> dict[int, nn.Module]:
        """The shard's layers, by their index in the whole model."""
        stack = getattr(self._base, self._stack)
        return {index: stack[index] for index in range(self.shard.start, self.shard.stop)}

    def cut_sequences(self) -> None:
        """Let `compute` take a slice of each sequence in `computing_slice`; see `ring_attention`."""
        use_ring_attention(self._model)

    def take_over(self, other: HuggingFaceStage) -> dict[str, Tensor]:
        """Move the modules that both stages hold from ``other`` to this stage; ``other`` must not be used afterwards.

        Args:
            other: another stage of the same model.

        Returns:
            The tensors that were not moved, by stored name; the caller must load their values.
        """
        taken: set[int] = set()
        for holder, others in zip(self._holders(), other._holders(), strict=True):
            given = dict(others.named_children())
            for name, child in list(holder.named_children()):
                if child in self._holders() or not _is_whole(child) or not _is_whole(given[name]):
                    continue
                if self._is_tied_here(child):
                    continue  # the next loop sets tied weights
                holder.register_module(name, given[name])
                taken |= {tensor.data_ptr() for tensor in given[name].state_dict().values()}
        for target, source in self.tied.items():
            owner, _, leaf = target.rpartition(".")
            if self._holds(source) and self._is_tied_here(self._model.get_submodule(owner)):
                setattr(self._model.get_submodule(owner), leaf, self._model.get_parameter(source))
        return {name: tensor for name, tensor in self.persistent().items() if tensor.data_ptr() not in taken}

    def _holders(self) -> tuple[nn.Module, nn.Module, nn.Module]:
        """Return the modules whose children may be in different stages: the model, its base, and the list of layers."""
        return self._model, self._base, getattr(self._base, self._stack)

    def _holds(self, name: str) -> bool:
        return not isinstance(self._model.get_submodule(name.rpartition(".")[0]), PassThrough)

    def _is_tied_here(self, module: nn.Module) -> bool:
        """Return whether a module's weight is tied to a parameter that is also in this stage."""
        names = {name for name, child in self._model.named_modules() if child is module}
        return any(
            target.rpartition(".")[0] in names and self._holds(source) for target, source in self.tied.items()
        )

    def compute(self, inputs: Tensor) -> Tensor:
        """Return the outputs of the shard for one microbatch.

        Inputs are ids ``[batch, seq]`` (first shard) or hidden states ``[batch, seq, hidden]``. Outputs are hidden
        states, or logits (last shard): ``[batch, seq, vocabulary]``, ``[batch, seq, classes]`` for a classifier. For
        embeddings, the last shard returns hidden states, too. The first shard then takes ids of pairs of texts,
        ``[pairs, 2, seq]``, and other tensors have a row for each text.
        """
        return self.run(inputs.flatten(0, 1) if self._embeds and self.shard.is_first else inputs)

    def run(self, inputs: Tensor, **options: Any) -> Tensor:
        """Compute as `compute` does, with ``options`` for the model (last shard) or its base model (other shards)."""
        name = "input_ids" if self.shard.is_first else "inputs_embeds"
        own = present_slice()
        if own is not None:
            tokens = inputs.shape[1]
            places = torch.arange(own.index * tokens, (own.index + 1) * tokens, device=inputs.device)
            options = {**options, "position_ids": places.unsqueeze(0)}
        entry = None if self.shard.is_first else getattr(self._base, self._stack)[self.shard.start - 1]
        if entry is not None:
            entry.inputs = inputs
        try:
            head = self._task_heads.get(self.task, self._head)
            if self.shard.is_last and head is None and not self._embeds:
                logits: Tensor = self.module(
                    **{name: inputs}, use_cache=False, return_dict=True, **options
                ).logits
                return logits
            hidden: Tensor = self._base(**{name: inputs}, use_cache=False, return_dict=True, **options)[0]
            if self.shard.is_last and head is not None:
                # transformers would derive the last token from the ids, which only the first stage has.
                hidden = getattr(self._model, head)(hidden)
            return hidden
        finally:
            if entry is not None:
                entry.inputs = None

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Initialize each module by the architecture's own rule, with random numbers seeded by (seed, module name)."""
        sources = {
            target.rpartition(".")[0]: source.rpartition(".")[0] for target, source in self.tied.items()
        }
        whole = sketch(self._model.config.to_dict()) if sources and not self.shard.is_first else None
        for name, module in self.module.named_modules():
            own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            if not own or isinstance(module, PassThrough):
                continue
            stored = self.stored_name(name)
            torch.manual_seed(derive_seed(seed, stored))
            if stored in sources:
                if whole is None:
                    continue  # the embedding is in this stage and is initialized already
                # Initialize a tied head with the embedding's rule and seed, so that both have the same values.
                twin = whole.get_submodule(sources[stored]).to_empty(device=own[0].device)
                torch.manual_seed(derive_seed(seed, sources[stored]))
                self._model._init_weights(twin)  # noqa: SLF001 - the architecture's rule has no public name
                module.weight.copy_(twin.weight)
            else:
                self._model._init_weights(module)  # noqa: SLF001
        self.initialize_added(seed)

    @torch.no_grad()
    def initialize_added(self, seed: int) -> None:
        """Initialize the tensors that training adds to this stage: adapters, or a classifier's head with its pooler."""
        for name, module in self.module.named_modules():
            if self._is_new(name) and (module._parameters or module._buffers):  # noqa: SLF001 - own tensors
                torch.manual_seed(derive_seed(seed, name))
                self._model._init_weights(module)  # noqa: SLF001
        if self._is_adapted:
            from share_compute.models.adapters import initialize_adapters  # noqa: PLC0415

            initialize_adapters(self.module, seed)

    @property
    def added(self) -> frozenset[str]:
        """Stored names of the tensors of adapters, and of a classifier's head with its pooler."""
        return frozenset(
            name
            for name in self.persistent()
            if self._is_new(name) or (self._is_adapted and is_adapter(name))
        )

    def _is_new(self, name: str) -> bool:
        return any(name == part or name.startswith(f"{part}.") for part in self._new)

    def stored_name(self, name: str) -> str:
        """Return the name under which a tensor of `module` is stored; for a tied tensor, the name of its source.

        Stored names lack the parts that ``peft`` inserts.
        """
        if self._is_adapted:
            name = stored_name(name)
        return super().stored_name(name)


def _is_whole(module: nn.Module) -> bool:
    return not isinstance(module, PassThrough)


def published_config(config: Mapping[str, Any], objective: Objective) -> dict[str, Any]:
    """Return the config.json of a trained model: ``config`` with the model's class and ``dtype`` float32."""
    kind = kind_of(objective)._model_mapping[type(hub_configuration(config))]  # noqa: SLF001 - no public name
    rest = {key: value for key, value in config.items() if key != "torch_dtype"}
    return {**rest, "architectures": [kind.__name__], "dtype": "float32"}
