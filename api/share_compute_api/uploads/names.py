"""Checks the names of uploaded files."""

from __future__ import annotations

from pathlib import PurePosixPath

from share_compute.errors import UserError
from share_compute.files.field_errors import refused
from share_compute.specification import (
    IMAGE_SUFFIXES,
    ROW_SUFFIXES,
    SPARSE_SUFFIXES,
    TABLE_SUFFIXES,
    TEXT_SUFFIXES,
)
from share_compute_api.schemas.choices import UploadKind

_MOST_BYTES = 1000
_MOST_PART_BYTES = 240
_CODE_SUFFIXES = frozenset({".bin", ".ckpt", ".dill", ".joblib", ".pickle", ".pkl", ".pt", ".pth"})
"""Suffixes of files in Python's pickle format, which can run arbitrary code when they are read."""
DATA_SUFFIXES = tuple(
    dict.fromkeys((*TEXT_SUFFIXES, *ROW_SUFFIXES, *TABLE_SUFFIXES, *IMAGE_SUFFIXES, *SPARSE_SUFFIXES))
)
"""Suffixes of files that an upload of data may contain."""


def checked_path(path: str) -> str:
    """Return a relative path unchanged, if it stays inside an upload's folder on every operating system.

    Raises:
        UserError: the path is absolute, too long, or has a forbidden component or character.
    """
    parts = path.split("/")
    problem = None
    if not path or path.startswith("/"):
        problem = "it must be relative"
    elif any(part in ("", ".", "..") for part in parts):
        problem = "no part of it may be empty, . or .."
    elif "\\" in path or not path.isprintable():
        problem = "it must have neither backslashes nor control characters"
    elif len(path.encode(errors="replace")) > _MOST_BYTES:
        problem = f"it is longer than {_MOST_BYTES} bytes"
    elif any(len(part.encode(errors="replace")) > _MOST_PART_BYTES for part in parts):
        problem = f"a part of it is longer than {_MOST_PART_BYTES} bytes"
    if problem is not None:
        raise UserError(f"no file of an upload can be called {path!r}: {problem}", hint="rename the file")
    return path


def check_suffix(path: str, kind: UploadKind) -> None:
    """Raise UserError if an upload of this kind must not contain a file with the path's suffix."""
    suffix = PurePosixPath(path).suffix.lower()
    if kind == "data" and suffix not in DATA_SUFFIXES:
        what = suffix or "without suffix"
        raise refused(
            "path",
            f"{path} is no file of data ({what}); known: {', '.join(DATA_SUFFIXES)}",
            "save it as one of these",
        )
    if suffix in _CODE_SUFFIXES:
        raise refused(
            "path",
            f"{path} is a pickle, which could run code when it is read",
            "convert it: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder) writes safetensors",
        )
