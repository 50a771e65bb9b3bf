"""Sends a result to a repository of the Hugging Face Hub."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path, PurePath

from share_compute.errors import Conflict
from share_compute_api.hub.problems import translated

_ADAPTER_CONFIG = "adapter_config.json"


@dataclass(frozen=True, slots=True)
class Pushed:
    """A result that is on the Hub."""

    repository: str
    """Name of the repository with its owner."""
    url: str
    """Address of the repository."""
    commit: str
    """Hash of the commit that has the result."""
    is_private: bool
    """Whether only its owner sees the repository."""


def push(
    folder: Path, repository: str, message: str, *, is_public: bool, revision: str | None = None
) -> Pushed:
    """Send a folder to a model repository of the Hub, which is made if it does not exist.

    The token comes from ``HF_TOKEN`` or `hf auth login`.

    Args:
        folder: the folder, with a model card.
        repository: name of the repository; without an owner, that of the token's account.
        message: message of the commit.
        is_public: whether the repository may be public. A new repository is then public.
        revision: branch that gets the commit, in a repository that exists; default: main.

    Raises:
        Conflict: the repository exists and is public, and ``is_public`` is not set.
        NotAuthorized, NotFound, Unavailable, UserError: see `translated`.
    """
    from huggingface_hub import HfApi

    api = HfApi(library_name="share-compute")
    with translated(repository, uses_token=True):
        if revision is not None:
            # A new repository has only the branch main. So a missing branch must raise an error before an empty
            # repository is made.
            own = repository if "/" in repository else f"{api.whoami()['name']}/{repository}"
            api.model_info(own, revision=revision)
        name = api.create_repo(repository, private=not is_public, exist_ok=True).repo_id
        is_private = bool(api.model_info(name).private)
        if not (is_private or is_public):
            raise Conflict(
                f"{name} is public, so everybody would see the result",
                hint="pass --public, name another repository, or make it private on the Hub",
            )
        commit = api.upload_folder(
            repo_id=name, folder_path=folder, commit_message=message, revision=revision
        )
        return Pushed(name, f"{api.endpoint}/{name}", commit.oid, is_private)


def without_foreign_paths(folder: Path, base_model: str | None) -> None:
    """Replace the path of the base model in ``adapter_config.json`` by a name; do nothing without such a file.

    Args:
        folder: folder of a result.
        base_model: name of the base model on the Hub; None for the name of its folder.
    """
    file = folder / _ADAPTER_CONFIG
    if not file.is_file():
        return
    config = json.loads(file.read_text(encoding="utf-8"))
    known = str(config.get("base_model_name_or_path") or "")
    if base_model is None and not PurePath(known).is_absolute():
        return
    config["base_model_name_or_path"] = base_model or PurePath(known).name
    file.write_text(json.dumps(config, indent=2), encoding="utf-8")
