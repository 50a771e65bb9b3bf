"""Low-rank adapters (LoRA) of ``peft`` inside the shards of a model.

Stored names are those of the plain model; adapters add ``<matrix>.lora_A.weight`` and ``<matrix>.lora_B.weight``. The
head of a classifier, and the pooler before it, are trained whole: ``peft`` calls these ``modules_to_save``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from share_compute.errors import UserError
from share_compute.models.adapter_names import ADAPTER, SAVED_PREFIX, is_adapter, stored_name
from share_compute.models.cells import derive_seed
from share_compute.models.profiles.places import Places
from share_compute.models.stage import Stage
from share_compute.specification import LoraSpec, Task

_TYPES: Mapping[Task, str] = {
    "embedding": "FEATURE_EXTRACTION",
    "language_model": "CAUSAL_LM",
    "text_classification": "SEQ_CLS",
}
"""Task -> the ``task_type`` of its adapters in ``peft``, which has none for classifiers of images."""


def adapt(model: PreTrainedModel, lora: LoraSpec, places: Places, whole: Sequence[str] = ()) -> None:
    """Add adapters to matrices in the layers of a model, and freeze all other parameters.

    Args:
        model: whole model made by `share_compute.models.huggingface.decoder.sketch`.
        lora: adapters of the job; without targets, all matrices in layers get adapters.
        places: naming scheme of the model's parameters.
        whole: full names of the modules that are trained whole.

    Raises:
        UserError: a name in ``lora.targets`` matches no matrix in the layers.
    """
    inject_adapter_in_model(
        _peft_config(lora, _chosen(model, lora, places)), model, adapter_name=ADAPTER, low_cpu_mem_usage=True
    )
    for name in whole:
        model.get_submodule(name).requires_grad_(requires_grad=True)


@torch.no_grad()
def initialize_adapters(module: nn.Module, seed: int) -> None:
    """Initialize adapters: A with random numbers seeded by (seed, name), and B with zeros."""
    for name, layer in _adapted(module):
        torch.manual_seed(derive_seed(seed, f"{name}.lora_A"))
        nn.init.kaiming_uniform_(layer.lora_A[ADAPTER].weight, a=5**0.5)
        nn.init.zeros_(layer.lora_B[ADAPTER].weight)


def adapter_tensors(stage: Stage) -> dict[str, Tensor]:
    """Return the tensors of adapters, and of modules trained whole, by name in ``adapter_model.safetensors``."""
    return {saved_name(name): tensor for name, tensor in stage.persistent().items() if name in stage.added}


def saved_name(name: str) -> str:
    """Return the name that the tensor with this stored name has in ``adapter_model.safetensors``."""
    return SAVED_PREFIX + name


@torch.no_grad()
def merged_tensors(stage: Stage) -> dict[str, Tensor]:
    """Return the tensors of a stage by stored name, with the adapters merged into the weights."""
    tensors = {name: tensor for name, tensor in stage.persistent().items() if not is_adapter(name)}
    for name, layer in _adapted(stage.module):
        tensors[f"{name}.weight"] = layer.get_base_layer().weight + layer.get_delta_weight(ADAPTER)
    return tensors


def adapter_config(
    lora: LoraSpec,
    model: PreTrainedModel,
    places: Places,
    base: str,
    *,
    task: Task = "language_model",
    whole: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the content of ``adapter_config.json``.

    Args:
        lora: adapters of the job.
        model: whole model made by `share_compute.models.huggingface.decoder.sketch`, without adapters.
        places: naming scheme of the model's parameters.
        base: folder of the model that was adapted.
        task: task of the job.
        whole: full names of the modules that are trained whole.

    Raises:
        UserError: a name in ``lora.targets`` matches no matrix in the layers.
    """
    chosen = _chosen(model, lora, places)
    ends = lora.targets or _ends(chosen)
    # Short names are used unless they match a matrix outside the layers.
    exact = [name for name, _ in _matrices(model) if _is_meant(name, ends)] == chosen
    config = _peft_config(lora, ends if exact else chosen)
    config.base_model_name_or_path = base
    config.inference_mode = True
    config.task_type = _TYPES.get(task)
    config.modules_to_save = list(whole) or None
    said: dict[str, Any] = config.to_dict()  # type: ignore[no-untyped-call]
    return {key: sorted(value) if isinstance(value, set) else value for key, value in said.items()}


def _peft_config(lora: LoraSpec, targets: Sequence[str]) -> LoraConfig:
    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # peft takes any number
        lora_dropout=lora.dropout,
        target_modules=list(targets),
    )


def _chosen(model: nn.Module, lora: LoraSpec, places: Places) -> list[str]:
    """Return the full names of the matrices that get an adapter."""
    inside = [name for name, _ in _matrices(model) if 0 <= places.of(name) < places.num_layers]
    if lora.targets is None:
        return inside
    for target in lora.targets:
        if not any(_is_meant(name, [target]) for name in inside):
            raise UserError(
                f"training.lora.targets: no matrix in the model's layers is called {target!r}",
                hint=f"choose among {', '.join(_ends(inside))}",
            )
    return [name for name in inside if _is_meant(name, lora.targets)]


def _matrices(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]


def _ends(names: Sequence[str]) -> list[str]:
    return sorted({name.rpartition(".")[2] for name in names})


def _is_meant(name: str, ends: Sequence[str]) -> bool:
    return any(name == end or name.endswith(f".{end}") for end in ends)


def _adapted(module: nn.Module) -> list[tuple[str, Any]]:
    """Return (stored name, module) of each adapted matrix."""
    return [(stored_name(name), part) for name, part in module.named_modules() if isinstance(part, LoraLayer)]
