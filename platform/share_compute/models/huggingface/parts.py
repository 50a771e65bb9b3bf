"""Names of the parts of Hugging Face models that can be cut, and the class of transformers for each task."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

from share_compute.errors import UserError
from share_compute.models.configuration import ENCODER_LAYERS, is_trainable_encoder
from share_compute.models.huggingface.hub_configuration import no_pipeline_plan
from share_compute.models.image_types import require_image_model
from share_compute.models.objective import Objective
from share_compute.models.profiles.places import BEFORE, Places


class PartNames:
    """Names of a model's parts, from its pipeline plan.

    Args:
        model: the model, made by `sketch`.
        is_base: whether the model is a base model, which has no head.

    Raises:
        UserError: the architecture declares no pipeline plan.
    """

    def __init__(self, model: PreTrainedModel, *, is_base: bool = False) -> None:
        self.base = model.base_model
        plan = getattr(self.base.config, "base_model_pp_plan", None)
        layers = [name for name in plan or () if isinstance(getattr(self.base, name, None), nn.ModuleList)]
        if not plan or not layers or (self.base is model) != is_base:
            raise no_pipeline_plan(model.config.model_type)
        self.embedding = next(name for name, (inputs, _) in plan.items() if "input_ids" in inputs)
        self._order(model, list(plan), layers[0])

    def _order(self, model: PreTrainedModel, order: list[str], layers: str) -> None:
        """Set the names of the parts from the base model's modules in the order of their use."""
        self.layers = layers
        # Plans list modules in the order of use. Some plans omit the dropout after the embedding.
        dropouts = [name for name, child in self.base.named_children() if isinstance(child, nn.Dropout)]
        self.opening = list(dict.fromkeys(order[: order.index(self.layers)] + dropouts))
        self.closing = [name for name in order if name not in (*self.opening, self.layers)]
        self.heads = _heads(model)
        self.prefix = _prefix(model)
        places = Places(
            stack=f"{self.prefix}{self.layers}.",
            num_layers=len(getattr(self.base, self.layers)),
            opening=tuple(f"{self.prefix}{name}." for name in self.opening),
            closing=self._closing(),
        )
        tied = {
            source
            for target, source in tied_names(model).items()
            if (places.of(source), places.of(target)) == (BEFORE, places.num_layers)
        }
        self.places = places.model_copy(update={"tied": tuple(sorted(tied))})

    def _closing(self) -> tuple[str, ...]:
        """Return the name prefixes of the modules after the last layer."""
        return (*(f"{self.prefix}{name}." for name in self.closing), *(f"{name}." for name in self.heads))


class ImagePartNames(PartNames):
    """Names of the parts of a classifier of images, which has no pipeline plan; see `IMAGE_MODELS`."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.base = model.base_model
        self.embedding = "embeddings"
        self._order(model, ["embeddings", "layers", "layernorm"], "layers")


class EncoderPartNames(PartNames):
    """Names of the parts of an encoder of texts, which has no pipeline plan; see `is_trainable_encoder`.

    The name of the layers may have several components.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.base = model.base_model
        self.embedding = "embeddings"
        self.layers = ENCODER_LAYERS[model.config.model_type]
        self.opening = [self.embedding]
        self.closing = [name for name in ("pooler",) if getattr(self.base, name, None) is not None]
        self.heads = _heads(model)
        self.prefix = _prefix(model)
        self.places = Places(
            stack=f"{self.prefix}{self.layers}.",
            num_layers=len(list(self.base.get_submodule(self.layers).children())),
            opening=(f"{self.prefix}{self.embedding}.",),
            closing=self._closing(),
        )


def tied_names(model: PreTrainedModel) -> dict[str, str]:
    """Return the name under which each tied parameter is stored, by the parameter's own name."""
    return dict(getattr(model, "all_tied_weights_keys", None) or {})


def _heads(model: PreTrainedModel) -> list[str]:
    """Return the names of the modules other than the base model; none for a base model."""
    if model.base_model is model:
        return []
    return [name for name, child in model.named_children() if child is not model.base_model]


def _prefix(model: PreTrainedModel) -> str:
    """Return the beginning of the names of all parts of the base model; empty for a base model."""
    name = next(name for name, child in model.named_modules() if child is model.base_model)
    return f"{name}." if name else ""


def kind_of(objective: Objective) -> Any:
    """Return the auto class of transformers for a task: with a head for tokens or for classes, or without a head."""
    match objective.task:
        case "text_classification":
            return AutoModelForSequenceClassification
        case "image_classification":
            return AutoModelForImageClassification
        case "embedding":
            return AutoModel
        case _:
            return AutoModelForCausalLM


def part_names(model: PreTrainedModel, objective: Objective) -> PartNames:
    """Return the names of the parts of a model made by `sketch` for a task.

    Raises:
        UserError: the model cannot be cut.
    """
    if objective.reads_text and is_trainable_encoder(model.config.to_dict()):
        return EncoderPartNames(model)
    if objective.task != "image_classification":
        return PartNames(model, is_base=objective.task == "embedding")
    require_image_model(model.config.to_dict())
    return ImagePartNames(model)


def whole_parts(model: PreTrainedModel, outline: PartNames, objective: Objective) -> tuple[str, ...]:
    """Return the full names of the modules that a classifier adds to a base model: its head, and its pooler if any.

    Folders of pretrained weights may lack these modules. Training with adapters trains them whole. Models other than
    classifiers have no such modules.
    """
    if not objective.has_classes:
        return ()
    heads = [name for name in outline.heads if any(True for _ in getattr(model, name).parameters())]
    poolers = outline.closing if isinstance(outline, EncoderPartNames) else []
    return (*heads, *(f"{outline.prefix}{name}" for name in poolers))


def head_of(model: PreTrainedModel, outline: PartNames) -> nn.Module:
    """Return the head of a classifier made by `sketch`: one linear layer for the hidden state of a token.

    Raises:
        UserError: the architecture has another head.
    """
    head = getattr(model, outline.heads[0]) if len(outline.heads) == 1 else None
    if not isinstance(head, nn.Linear):
        raise UserError(
            f"the classifier of architecture {model.config.model_type!r} ends with "
            f"{', '.join(outline.heads) or 'no module of its own'}, not with one linear layer",
            hint="choose an architecture whose classifier reads the last token, such as llama, qwen3 or mistral",
        )
    return head
