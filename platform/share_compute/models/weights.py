"""Safetensors folders in the Hugging Face layout: single tensors read, pieces written, nothing half-written shown."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as load_bytes
from safetensors.torch import save as save_bytes
from torch import Tensor

from share_compute.errors import Unavailable, UserError

INDEX = "model.safetensors.index.json"
PIECE_BYTES = 64 * 2**20
"""Tensors travel and are written in files of about this size, so that nobody needs memory for a second shard."""


class WeightFolder:
    """The tensors of a local folder of safetensors files.

    Args:
        folder: holds ``<stem>.safetensors``, or pieces with an index.
        stem: first part of the files' names.

    Raises:
        UserError: no safetensors there, or a file is damaged.
    """

    def __init__(self, folder: Path, stem: str = "model") -> None:
        self.folder = folder
        files = sorted(folder.glob(f"{stem}*.safetensors"))
        if not files:
            raise UserError(
                f"{folder} has no {stem}*.safetensors file",
                mend="save the model with save_pretrained, which writes safetensors",
            )
        self._places: dict[str, Path] = {}
        for file in files:
            try:
                with safe_open(file, framework="pt") as opened:
                    self._places.update(dict.fromkeys(opened.keys(), file))
            except SafetensorError as failure:
                raise UserError(
                    f"{file} is damaged: {failure}", mend="copy or download it again"
                ) from failure

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return sorted(self._places)

    def read(self, name: str) -> Tensor:
        """Read one tensor; nothing else of its file is loaded.

        Raises:
            UserError: there is no such tensor.
        """
        if name not in self._places:
            raise UserError(
                f"{self.folder} has no tensor {name!r}",
                mend="check that config.json and the weights belong together",
            )
        with safe_open(self._places[name], framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
        return tensor

    def pack(self, name: str) -> bytes:
        """Read one tensor as a safetensors message of its own."""
        message: bytes = save_bytes({name: self.read(name)})
        return message


def unpack(message: bytes) -> dict[str, Tensor]:
    """Read a safetensors message."""
    tensors: dict[str, Tensor] = load_bytes(message)
    return tensors


def pieces(tensors: Mapping[str, Tensor], limit_bytes: int = PIECE_BYTES) -> Iterator[dict[str, Tensor]]:
    """Split named tensors into groups of about ``limit_bytes``; a larger single tensor makes a group alone."""
    group: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if group and size + tensor.nbytes > limit_bytes:
            yield group
            group, size = {}, 0
        group[name] = tensor
        size += tensor.nbytes
    if group:
        yield group


def pack(tensors: Mapping[str, Tensor]) -> bytes:
    """Make a safetensors message; tensors are copied to the CPU."""
    ready = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    message: bytes = save_bytes(ready, metadata={"format": "pt"})
    return message


class FolderWriter:
    """Writes a folder under a hidden name and shows it under its own only when it is whole.

    Args:
        target: the finished folder; replaced if it exists.

    Raises:
        Unavailable: the disk is full or cannot be written; nothing half-written stays.
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        self._staging = target.with_name(f".{target.name}.partial")
        shutil.rmtree(self._staging, ignore_errors=True)
        self._guard(lambda: self._staging.mkdir(parents=True))

    def _guard(self, write: object) -> None:
        try:
            write()  # type: ignore[operator]
        except OSError as failure:
            self.discard()
            raise Unavailable(
                f"cannot write {self.target}: {failure.strerror or failure}",
                mend="free disk space, then resume the job from its last checkpoint",
            ) from failure

    def write(self, name: str, content: bytes) -> None:
        """Write one file of the folder."""
        self._guard(lambda: (self._staging / name).write_bytes(content))

    def write_json(self, name: str, content: object) -> None:
        """Write one JSON file of the folder."""
        self.write(name, (json.dumps(content, indent=2) + "\n").encode())

    def copy(self, files: Iterable[Path]) -> None:
        """Copy files into the folder."""
        for file in files:
            self._guard(lambda file=file: shutil.copy2(file, self._staging / file.name))

    def finish(self) -> int:
        """Number the weight files as Hugging Face does, write their index, show the folder; return its bytes."""

        def publish() -> None:
            for stem in ("model", "optimizer"):
                self._number(stem)
            for file in self._staging.iterdir():
                with file.open("rb") as opened:
                    os.fsync(opened.fileno())
            old = self.target.with_name(f".{self.target.name}.old")
            shutil.rmtree(old, ignore_errors=True)
            if self.target.exists():
                self.target.rename(old)
            self._staging.rename(self.target)
            shutil.rmtree(old, ignore_errors=True)

        self._guard(publish)
        return sum(file.stat().st_size for file in self.target.iterdir())

    def _number(self, stem: str) -> None:
        files = sorted(self._staging.glob(f"{stem}-*.part"))
        places: dict[str, str] = {}
        total = 0
        for number, file in enumerate(files, start=1):
            suffix = f"-{number:05}-of-{len(files):05}" if len(files) > 1 else ""
            final = file.rename(self._staging / f"{stem}{suffix}.safetensors")
            with safe_open(final, framework="pt") as opened:
                places.update(dict.fromkeys(opened.keys(), final.name))
            total += final.stat().st_size
        if len(files) > 1:
            self.write_json(
                f"{stem}.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": places}
            )

    def discard(self) -> None:
        """Remove what was written so far."""
        shutil.rmtree(self._staging, ignore_errors=True)


def copy_into(tensor: Tensor, value: Tensor) -> None:
    """Copy ``value`` into ``tensor``; raises UserError when the shapes differ."""
    if tensor.shape != value.shape:
        raise UserError(
            f"the weights have shape {list(value.shape)} where the configuration wants {list(tensor.shape)}",
            mend="check that config.json and the weights belong together",
        )
    with torch.no_grad():
        tensor.copy_(value)


def prune_folders(parent: Path, kept: int) -> None:
    """Remove all finished folders in ``parent`` but the ``kept`` whose names sort last."""
    finished = sorted(
        folder for folder in parent.iterdir() if folder.is_dir() and not folder.name.startswith(".")
    )
    for folder in finished[:-kept]:
        shutil.rmtree(folder)
