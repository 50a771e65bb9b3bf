"""Reads which files hold the weights of a model, from its ``model.safetensors.index.json``."""

from __future__ import annotations

from share_compute.errors import UserError
from share_compute.files.plain_yaml import read_json

INDEX = "model.safetensors.index.json"
MOST_WEIGHT_FILES = 1000


def weight_files(text: str, repository: str) -> tuple[str, ...]:
    """Return the names of the files to which an index maps weights, sorted.

    Args:
        text: content of the index.
        repository: name of the model on the Hub, for error messages.

    Raises:
        UserError: the text is no index of safetensors files, or it names more than `MOST_WEIGHT_FILES` files.
    """
    content = read_json(text, INDEX)
    places = content.get("weight_map") if isinstance(content, dict) else None
    names = list(places.values()) if isinstance(places, dict) else []
    if not names or not all(isinstance(name, str) and name.endswith(".safetensors") for name in names):
        raise UserError(
            f"{INDEX} of {repository} does not list the weights",
            hint="name another revision, or another model",
        )
    found = sorted(set(names))
    if len(found) > MOST_WEIGHT_FILES:
        raise UserError(
            f"{INDEX} of {repository} names {len(found)} files; at most {MOST_WEIGHT_FILES} are fetched",
            hint="name another model",
        )
    return tuple(found)
