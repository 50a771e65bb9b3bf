"""Folders of pretrained models, read by the names that the model's code uses.

Many architectures store tensors under other names than the model's code uses, or split them differently, for example
into one tensor for each expert. transformers defines the conversions. This module runs a conversion when one of its
tensors is read.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from share_compute.errors import UserError
from share_compute.models.blueprint import Blueprint
from share_compute.models.huggingface.decoder import sketch, whole_sketch
from share_compute.models.huggingface.parts import EncoderPartNames, head_of, part_names
from share_compute.models.storage.weights import WeightFolder


def pretrained_weights(folder: Path, blueprint: Blueprint) -> PretrainedWeights:
    """Open the folder of a pretrained model for a job.

    The head of a classifier is read from the folder only if its config.json has the same classes in the same order.

    Args:
        folder: folder of the model.
        blueprint: blueprint of the job's model, made after its data was read.

    Raises:
        UserError: as for `PretrainedWeights`.
    """
    config = blueprint.config or {}
    model = whole_sketch(blueprint)
    if blueprint.has_heads:
        heads = [head.module for head in blueprint.heads]
        added = [name for name in model.state_dict() if name.partition(".")[0] in heads]
        return PretrainedWeights(WeightFolder(folder), config, model, added)
    if not blueprint.objective.has_classes:
        return PretrainedWeights(WeightFolder(folder), config, model)
    outline = part_names(model, blueprint.objective)
    weights, stored = WeightFolder(folder), json.loads((folder / "config.json").read_text(encoding="utf-8"))
    missing: list[str] = []
    if isinstance(outline, EncoderPartNames):
        names = list(model.state_dict())
        heads = [name for name in names if name.partition(".")[0] in outline.heads]
        # Folders of base models lack the prefix, and some lack the pooler.
        poolers = tuple(f"{outline.prefix}{name}." for name in outline.closing)
        missing = [
            name
            for name in names
            if name.startswith(poolers)
            and name not in weights
            and name.removeprefix(outline.prefix) not in weights
        ]
    else:
        heads = [f"{outline.heads[0]}.{name}" for name, _ in head_of(model, outline).named_parameters()]
    is_known = stored.get("id2label") == config["id2label"] and all(name in weights for name in heads)
    return PretrainedWeights(weights, config, model, missing if is_known else [*missing, *heads])


class PretrainedWeights:
    """The tensors in a folder of a pretrained model, under the names that the model's code uses.

    Args:
        folder: folder of safetensors files.
        config: configuration of the model.
        model: model made by `sketch`; default: the configuration's causal language model.
        added: names of tensors that training adds to the model; they are not read from the folder.

    Raises:
        UserError: the folder lacks tensors that the configuration requires, or the configuration is invalid.
    """

    def __init__(
        self,
        folder: WeightFolder,
        config: Mapping[str, Any],
        model: PreTrainedModel | None = None,
        added: Collection[str] = (),
    ) -> None:
        self.added = frozenset(added)
        """Names of tensors that are not read from the folder."""
        self._folder = folder
        self._model = sketch(config) if model is None else model
        self._recipes: dict[str, tuple[str, WeightConverter | WeightRenaming]] = {}
        self._last: tuple[str, dict[str, Tensor]] = ("", {})
        self._collect(self._model.state_dict())
        tied = set(self._model.all_tied_weights_keys)
        for name in added:
            self._recipes.pop(name, None)
        missing = sorted(set(self._model.state_dict()) - set(self._recipes) - tied - set(added))
        if missing:
            raise UserError(
                f"{folder.folder} lacks {len(missing)} tensors that its config.json asks for, such as {missing[0]}",
                hint="check that config.json and the weights belong together",
            )

    def _collect(self, wanted: Mapping[str, Tensor]) -> None:
        mapping = get_model_conversion_mapping(self._model)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
        prefix = self._model.base_model_prefix
        collected: dict[str, WeightConverter | WeightRenaming] = {}
        for stored in sorted(self._folder.names(), key=dot_natural_key):
            name, pattern = rename_source_key(stored, renamings, converters, prefix, wanted)
            if name not in wanted and stored in wanted:
                name, pattern = rename_source_key(stored, [], [], prefix, wanted)
            if pattern is None:
                recipe = collected.setdefault(name, WeightRenaming(stored, name))
            else:
                recipe = collected.setdefault(name, copy.deepcopy(by_pattern[pattern]))
            recipe.add_tensor(name, stored, pattern or stored, partial(self._folder.read, stored))
        for name, recipe in collected.items():
            for target in recipe.target_patterns:
                # A conversion with several target tensors is keyed by the name of the first target.
                self._recipes[name.replace(recipe.target_patterns[0], target)] = (name, recipe)

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return sorted(self._recipes)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Read rows [start, stop) of one tensor.

        Raises:
            UserError: there is no such tensor.
        """
        if name not in self._recipes:
            return self._folder.read(name, start, stop)  # raises the error for a missing tensor
        key, recipe = self._recipes[name]
        if isinstance(recipe, WeightRenaming):
            return self._folder.read(recipe.source_patterns[0], start, stop)
        if self._last[0] != key:
            self._last = (key, recipe_copy(recipe).convert(key, model=self._model, config=self._model.config))
        value = self._last[1][name]
        tensor: Tensor = value[0] if isinstance(value, list) else value
        return tensor[start:stop]


def recipe_copy(recipe: WeightConverter) -> WeightConverter:
    """Return a copy of a conversion; calling ``convert`` on the copy leaves ``recipe`` unchanged."""
    fresh = copy.copy(recipe)
    fresh.collected_tensors = {
        pattern: list(readers) for pattern, readers in recipe.collected_tensors.items()
    }
    return fresh
