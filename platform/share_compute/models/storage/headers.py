"""Reads the headers of safetensors files. This module does not import torch."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open

from share_compute.errors import UserError


def shapes_by_file(folder: Path, stem: str = "model") -> dict[Path, dict[str, tuple[int, ...]]]:
    """Return {file: {name of a tensor: shape}} for the files ``<stem>*.safetensors`` in a folder.

    Raises:
        UserError: the folder has no such file, or a file is damaged.
    """
    files = sorted(folder.glob(f"{stem}*.safetensors"))
    if not files:
        raise UserError(
            f"{folder} has no {stem}*.safetensors file",
            hint="save the model with save_pretrained, which writes safetensors",
        )
    found: dict[Path, dict[str, tuple[int, ...]]] = {}
    for file in files:
        try:
            with safe_open(file, framework="numpy") as opened:
                found[file] = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
        except SafetensorError as failure:
            raise UserError(f"{file} is damaged: {failure}", hint="copy or download it again") from failure
    return found
