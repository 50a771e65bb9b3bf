"""Facts about a served model, found without torch if the model was served before."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from share_compute.errors import UserError
from share_compute.models.blueprint import Blueprint
from share_compute.models.configuration import declared_config
from share_compute.models.profiles.cache import stored_profile
from share_compute.models.profiles.profile import ModelProfile
from share_compute.models.storage.headers import shapes_by_file
from share_compute.specification import ModelSpec, ServedPrecision
from share_compute_actors.wire import Schema


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The facts about a model that the server needs before it plans the stages."""

    blueprint: Blueprint
    profile: ModelProfile


SERVED: Schema[ServedModel] = Schema(ServedModel)


def known_model(folder: Path, dtype: ServedPrecision, *, embeds: bool) -> ServedModel | None:
    """Return the result of an earlier `ServedWeights.prepare` for the same configuration and weight shapes.

    Return None if there is no such result.

    Raises:
        UserError: there is no model in the folder.
    """
    config = config_of(folder)
    profile = stored_profile(facts_of(folder, config, dtype, embeds))
    return None if profile is None else ServedModel(Blueprint(config=config), profile)


def config_of(folder: Path) -> dict[str, Any]:
    """Return the config.json of a folder; raise UserError if it names no model type."""
    config = declared_config(ModelSpec(path=folder))
    if not isinstance(config.get("model_type"), str):
        raise UserError(
            f"{folder / 'config.json'} names no model_type", hint="give a folder that save_pretrained wrote"
        )
    return config


def facts_of(folder: Path, config: dict[str, Any], dtype: ServedPrecision, embeds: bool) -> dict[str, Any]:
    """Return the facts that determine the profile of a folder's model, and whether the model can be served."""
    by_file = shapes_by_file(folder).values()
    shapes = {name: shape for shapes in by_file for name, shape in shapes.items()}
    return {"config": config, "dtype": dtype, "embeds": embeds, "weights": shapes}
