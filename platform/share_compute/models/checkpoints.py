"""The checkpoints of a job: which of them are whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from share_compute.errors import UserError
from share_compute.models.checksums import damage
from share_compute.models.weights import finished_folders, set_aside

STATE = "training.json"
"""In a checkpoint: where training stood."""


class Chosen(NamedTuple):
    """What a job continues from."""

    folder: Path | None
    """None: it begins anew."""
    notes: tuple[str, ...]
    """What is wrong with newer ones, for people."""


def newest_whole(wanted: Path) -> Chosen:
    """Return the checkpoint that a job continues from; those that are damaged are set aside.

    Args:
        wanted: its last one, as far as the control plane knows. If it is damaged, the next older one is taken. If it
            is not there any more, it made room for newer ones.

    Raises:
        UserError: all that are there are damaged.
    """
    there = finished_folders(wanted.parent)
    if wanted in there:
        there = [folder for folder in there if folder.name <= wanted.name]
    notes: list[str] = []
    for folder in reversed(there):
        wrong = damage(folder) or _state_damage(folder)
        if wrong is None:
            return Chosen(folder, tuple(notes))
        notes.append(f"{wrong}; the checkpoint is not used, and lies in {set_aside(folder).name}")
    if there:
        raise UserError(
            f"no checkpoint of the job is whole: {'; '.join(notes)}",
            mend=f"put a whole copy of one back into {wanted.parent}, or resume the job to begin with its first step",
        )
    return Chosen(None, (f"no checkpoint is left in {wanted.parent}: the job begins with its first step",))


def _state_damage(folder: Path) -> str | None:
    """Return what is wrong with `STATE`, which folders without checksums have, too."""
    file = folder / STATE
    try:
        json.loads(file.read_bytes())
    except FileNotFoundError:
        return f"{file} is missing"
    except ValueError as failure:
        return f"{file} is damaged: {failure}"
    return None
