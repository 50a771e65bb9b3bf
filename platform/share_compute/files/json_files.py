"""Reads JSON files of models, which are untrusted, with a limit on their size."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import TypeVar

from share_compute.errors import UserError
from share_compute.quantities import bytes_text

MOST_JSON_BYTES = 1 << 20
"""Default maximum size of a file in bytes."""
_KINDS = {dict: "object", list: "array"}
Kind = TypeVar("Kind", dict, list)  # type: ignore[type-arg]  # the values are of any type


def read_json_file(
    file: Path, kind: type[Kind], *, most_bytes: int = MOST_JSON_BYTES, shown: str | None = None
) -> Kind:
    """Return the content of a JSON file.

    Args:
        file: the file.
        kind: type that the content must have.
        most_bytes: maximum size of the file.
        shown: name of the file for errors; by default its path's name.

    Raises:
        UserError: the file cannot be read, is too large, is not valid JSON, or has another type of content.
    """
    shown = file.name if shown is None else shown
    try:
        found = json.loads(_text(file, shown, most_bytes))
    except OSError as failure:
        raise UserError(
            f"{shown} cannot be read: {failure.strerror}", hint="fix or replace the file"
        ) from failure
    except (ValueError, RecursionError) as failure:
        raise UserError(f"{shown} cannot be read: {failure}", hint="fix or replace the file") from failure
    if not isinstance(found, kind):
        raise UserError(f"{shown} is not a JSON {_KINDS[kind]}", hint="fix or replace the file")
    return found


def _text(file: Path, shown: str, most_bytes: int) -> bytes:
    status = file.stat()
    if stat.S_ISFIFO(status.st_mode):  # opening it would wait for its other end
        raise UserError(f"{shown} is a pipe", hint="replace it by a file")
    if status.st_size > most_bytes:
        raise UserError(
            f"{shown} has {bytes_text(status.st_size)}; at most {bytes_text(most_bytes)} are read",
            hint="use the files that the model was published with",
        )
    with file.open("rb") as opened:
        text = opened.read(most_bytes + 1)
    if len(text) > most_bytes:
        raise UserError(f"{shown} grows while it is read", hint="wait until it is complete")
    return text
