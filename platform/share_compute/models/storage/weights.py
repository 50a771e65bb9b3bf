"""Safetensors folders in the Hugging Face layout: read single tensors, write in pieces."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from share_compute.errors import Unavailable, UserError
from share_compute.files.durable import sync
from share_compute.models.storage.checksums import CHECKSUMS, Checksums
from share_compute.models.storage.headers import shapes_by_file

CHUNK_BYTES = 2 * 2**20
"""Approximate size of the pieces in which tensors are sent and written, in bytes."""
FILE_BYTES = 2**30
"""Default limit for the tensors in one file, in bytes; a larger tensor has a file of its own."""
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class WeightFolder:
    """The tensors of a local folder of safetensors files.

    Args:
        folder: folder with one or more files ``<stem>*.safetensors``; an index is not read.
        stem: first part of the files' names.

    Raises:
        UserError: the folder has no such safetensors file, or a file is damaged.
    """

    def __init__(self, folder: Path, stem: str = "model") -> None:
        self.folder = folder
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._places: dict[str, Path] = {}
        for file, shapes in shapes_by_file(folder, stem).items():
            self._shapes.update(shapes)
            self._places.update(dict.fromkeys(shapes, file))

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return sorted(self._places)

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def groups(self) -> list[list[str]]:
        """Return the names of the tensors of each file, in the order of the files."""
        found: dict[Path, list[str]] = {}
        for name, file in self._places.items():
            found.setdefault(file, []).append(name)
        return [found[file] for file in sorted(found)]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors, by name."""
        return dict(self._shapes)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Read rows [start, stop) of one tensor; a scalar is read whole.

        Raises:
            UserError: there is no such tensor.
        """
        if name not in self._places:
            raise UserError(
                f"{self.folder} has no tensor {name!r}",
                hint="check that config.json and the weights belong together",
            )
        with safe_open(self._places[name], framework="pt") as opened:
            rows = opened.get_slice(name)
            tensor: Tensor = rows[start:stop] if rows.get_shape() else opened.get_tensor(name)
        return tensor

    def digest(self, names: Iterable[str] | None = None) -> str:
        """Return the SHA-256 of names and tensors in order of name; it does not depend on the split into files.

        Args:
            names: names of the tensors; None for all.
        """
        whole = hashlib.sha256()
        for name in self.names() if names is None else sorted(names):
            whole.update(name.encode())
            whole.update(self.read(name).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return whole.hexdigest()


def row_ranges(
    shape: Sequence[int], itemsize: int, limit_bytes: int = CHUNK_BYTES
) -> list[tuple[int, int | None]]:
    """Return ranges [start, stop) of a tensor's rows, each of at most ``limit_bytes`` but at least one row.

    For a scalar or a tensor without rows, return the single range (0, None).
    """
    if not shape or shape[0] == 0:
        return [(0, None)]
    row_bytes = math.prod(shape[1:]) * itemsize
    rows = max(1, limit_bytes // max(1, row_bytes))
    return [(start, min(start + rows, shape[0])) for start in range(0, shape[0], rows)]


def rows_of(tensor: Tensor, start: int, stop: int | None) -> Tensor:
    """Return rows [start, stop) of a tensor; a scalar is returned whole."""
    return tensor[start:stop] if tensor.dim() else tensor


def batches(sizes: Mapping[str, int], limit_bytes: int) -> Iterator[list[str]]:
    """Yield the names in ``sizes`` (bytes by name) in batches of at most ``limit_bytes``; a larger tensor is alone."""
    names: list[str] = []
    size = 0
    for name, nbytes in sizes.items():
        if names and size + nbytes > limit_bytes:
            yield names
            names, size = [], 0
        names.append(name)
        size += nbytes
    if names:
        yield names


def files(tensors: Mapping[str, Tensor], limit_bytes: int = FILE_BYTES) -> Iterator[dict[str, Tensor]]:
    """Yield named tensors in groups of at most ``limit_bytes``, one per file; a larger tensor is alone in its group."""
    for names in batches({name: tensor.nbytes for name, tensor in tensors.items()}, limit_bytes):
        yield {name: tensors[name] for name in names}


def stream_file(tensors: Mapping[str, Tensor]) -> Iterator[bytes]:
    """Yield a safetensors file in pieces: its header, then rows of about 2 MiB.

    The format (https://github.com/huggingface/safetensors#format): length of the header as 8 bytes, the header as
    JSON, then the tensors' bytes one after the other.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors.values():
        for start, stop in row_ranges(tensor.shape, tensor.element_size()):
            rows = rows_of(tensor.detach(), start, stop)
            yield rows.to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


class FolderWriter:
    """Writer of a folder with checksums; the folder appears under its name only when it is complete.

    Until then, the files are in a hidden folder next to ``target``.

    Args:
        target: path of the complete folder; replaced if it exists.

    Raises:
        Unavailable: the disk is full or cannot be written; the incomplete folder is removed.
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        self._staging = target.with_name(f".{target.name}.partial")
        self._failure: Unavailable | None = None
        self._checksums = Checksums()
        shutil.rmtree(self._staging, ignore_errors=True)
        self._guard(lambda: self._staging.mkdir(parents=True))

    def _guard(self, write: Callable[[], object]) -> None:
        if self._failure is not None:
            raise self._failure
        try:
            write()
        except OSError as failure:
            self.discard()
            self._failure = Unavailable(
                f"cannot write {self.target}: {failure.strerror or failure}",
                hint="free disk space on the server, then resume the job from its last checkpoint",
            )
            raise self._failure from failure

    def write(self, name: str, content: bytes) -> None:
        """Append ``content`` to a file of the folder; create the file, also in a subfolder, if it does not exist."""

        def append() -> None:
            (self._staging / name).parent.mkdir(exist_ok=True)
            with (self._staging / name).open("ab") as file:
                file.write(content)

        self._guard(append)
        self._checksums.add(name, content)

    def write_json(self, name: str, content: object) -> None:
        """Write a JSON file into the folder."""
        self.write(name, (json.dumps(content, indent=2) + "\n").encode())

    def copy(self, files: Iterable[Path]) -> None:
        """Copy files into the folder; they replace files of the same names."""

        def copy(file: Path) -> None:
            self._remove(file.name)
            self.write(file.name, b"")
            with file.open("rb") as opened:
                while block := opened.read(CHUNK_BYTES):
                    self.write(file.name, block)

        for file in files:
            self._guard(partial(copy, file))

    def link(self, files: Iterable[Path]) -> None:
        """Hard-link files of another folder, or copy them if linking fails. Linked files must not change afterwards.

        Subfolders among ``files`` are linked with the files in them.
        """

        def link(file: Path, name: str) -> None:
            if file.is_dir():
                for inside in sorted(file.iterdir()):
                    link(inside, f"{name}/{inside.name}")
                return
            place = self._staging / name
            place.parent.mkdir(exist_ok=True)
            try:
                os.link(file, place)
            except OSError:  # another disk, or a file system without hard links
                shutil.copyfile(file, place)
            self._checksums.add_file(place, name)

        for file in files:
            self._guard(partial(link, file, file.name))

    def finish(self) -> int:
        """Number the weight files as Hugging Face does, write their index and publish the folder.

        Returns:
            Size of the folder in bytes.
        """

        def publish() -> None:
            for stem in ("model", "optimizer"):
                self._number(stem)
            self._join("adapter_model")
            self.write_json(CHECKSUMS, self._checksums.document())
            for path in (*self._staging.rglob("*"), self._staging):
                sync(path)
            old = self.target.with_name(f".{self.target.name}.old")
            shutil.rmtree(old, ignore_errors=True)
            if self.target.exists():
                self.target.rename(old)
            self._staging.rename(self.target)
            sync(self.target.parent)
            shutil.rmtree(old, ignore_errors=True)

        self._guard(publish)
        return sum(file.stat().st_size for file in self.target.rglob("*") if file.is_file())

    def _number(self, stem: str) -> None:
        files = sorted(self._staging.glob(f"{stem}-*.part"))
        places: dict[str, str] = {}
        total = 0
        for number, file in enumerate(files, start=1):
            suffix = f"-{number:05}-of-{len(files):05}" if len(files) > 1 else ""
            final = file.rename(self._staging / f"{stem}{suffix}.safetensors")
            self._checksums.rename(file.name, final.name)
            with safe_open(final, framework="pt") as opened:
                places.update(dict.fromkeys(opened.keys(), final.name))
            with final.open("rb") as opened:
                total += final.stat().st_size - 8 - int.from_bytes(opened.read(8), "little")
        if len(files) > 1:
            self.write_json(
                f"{stem}.safetensors.index.json",
                {"metadata": {"total_size": total}, "weight_map": places},
            )

    def _join(self, stem: str) -> None:
        """Join the files ``<stem>-*.part`` into one safetensors file, since ``peft`` does not read several files."""
        pieces = sorted(self._staging.glob(f"{stem}-*.part"))
        tensors: dict[str, Tensor] = {}
        for piece in pieces:
            tensors.update(load_file(piece))
        for content in stream_file(tensors) if pieces else ():
            self.write(f"{stem}.safetensors", content)
        for piece in pieces:
            self._remove(piece.name)

    def _remove(self, name: str) -> None:
        (self._staging / name).unlink(missing_ok=True)
        self._checksums.remove(name)

    def discard(self) -> None:
        """Remove the incomplete folder."""
        shutil.rmtree(self._staging, ignore_errors=True)


def copy_into(
    tensor: Tensor,
    start: int,
    stop: int | None,
    content: NDArray[np.uint8],
    dtype: torch.dtype = torch.float32,
) -> None:
    """Copy ``content``, the bytes of numbers of ``dtype``, into rows [start, stop) of ``tensor``.

    Raises:
        UserError: ``content`` and these rows differ in their number of scalars.
    """
    rows = rows_of(tensor, start, stop)
    value = torch.from_numpy(content.copy()).view(dtype)
    if value.numel() != rows.numel():
        raise UserError(
            f"the weights have {value.numel()} numbers where the configuration wants {list(rows.shape)}",
            hint="check that config.json and the weights belong together",
        )
    with torch.no_grad():
        rows.copy_(value.reshape(rows.shape))


def sweep_partial(parent: Path) -> None:
    """Remove incomplete and replaced folders that `FolderWriter` left in subfolders of ``parent``.

    If the writer ended before it renamed the new folder, restore the replaced folder.
    """
    for partial_folder in parent.glob("*/.*.partial"):
        shutil.rmtree(partial_folder, ignore_errors=True)
    for old in parent.glob("*/.*.old"):
        target = old.with_name(old.name.removeprefix(".").removesuffix(".old"))
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(target)


def finished_folders(parent: Path) -> list[Path]:
    """Return the finished folders in ``parent``, sorted by name; [] if there is no ``parent``."""
    return sorted(folder for folder in parent.glob("[!.]*") if folder.is_dir())


def prune_folders(parent: Path, kept: int) -> None:
    """Remove the finished folders in ``parent``, except the last ``kept`` (at least 1) in order of name."""
    for folder in finished_folders(parent)[:-kept]:
        shutil.rmtree(folder)


def rename_damaged(folder: Path) -> Path:
    """Rename a damaged folder so that it no longer counts as finished; return its new path."""
    renamed = folder.with_name(f".{folder.name}.damaged")
    shutil.rmtree(renamed, ignore_errors=True)
    return folder.rename(renamed)
