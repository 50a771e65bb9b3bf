"""Checkpoints of a job: find the newest one that is not damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from share_compute.errors import UserError
from share_compute.models.storage.checksums import damage
from share_compute.models.storage.weights import finished_folders, rename_damaged

STATE = "training.json"
"""File in a checkpoint that holds the state of training."""


class Chosen(NamedTuple):
    """Checkpoint that a job continues from."""

    folder: Path | None
    """Folder of the checkpoint; None restarts the job from its first step."""
    notes: tuple[str, ...]
    """Messages for users: the damage of each checkpoint tried before ``folder``, or that no checkpoint is left."""


def newest_whole(wanted: Path) -> Chosen:
    """Return the newest undamaged checkpoint; rename the damaged ones that were tried.

    Args:
        wanted: folder of the last known checkpoint. If it exists, newer checkpoints are not tried.

    Raises:
        UserError: all checkpoints that were tried are damaged.
    """
    there = finished_folders(wanted.parent)
    if wanted in there:
        there = [folder for folder in there if folder.name <= wanted.name]
    notes: list[str] = []
    for folder in reversed(there):
        wrong = damage(folder) or _state_damage(folder)
        if wrong is None:
            return Chosen(folder, tuple(notes))
        notes.append(f"{wrong}; the checkpoint is not used, and lies in {rename_damaged(folder).name}")
    if there:
        raise UserError(
            f"no checkpoint of the job is whole: {'; '.join(notes)}",
            hint=f"put a whole copy of one back into {wanted.parent}, or resume the job to begin with its first step",
        )
    return Chosen(None, (f"no checkpoint is left in {wanted.parent}: the job begins with its first step",))


def _state_damage(folder: Path) -> str | None:
    """Return a message about the damage of the file `STATE`; None if the file is valid JSON."""
    file = folder / STATE
    try:
        json.loads(file.read_bytes())
    except FileNotFoundError:
        return f"{file} is missing"
    except (OSError, ValueError) as failure:
        return f"{file} is damaged: {failure}"
    return None
