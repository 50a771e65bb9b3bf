"""Reads which files hold the weights of a model, from ``model.safetensors.index.json``, and the files' headers."""

from __future__ import annotations

from typing import BinaryIO, Final

from share_compute.errors import UserError
from share_compute.files.plain_yaml import read_json
from share_compute.quantities import bytes_text

INDEX = "model.safetensors.index.json"
MOST_WEIGHT_FILES = 1000
_MOST_HEADER_BYTES: Final = 16 << 20
"""Maximum size of the header of one file of weights, and of all headers of a model together."""
_LENGTH_BYTES: Final = 8
"""Size of the field before the header of a safetensors file, which has the header's length."""


class WeightHeaders:
    """Reads the headers of the safetensors files of one model, whose total size is limited.

    Args:
        hint: hint of the error for headers that are too large.
    """

    def __init__(self, hint: str) -> None:
        self._hint = hint
        self._left_bytes = _MOST_HEADER_BYTES

    def read(self, file: BinaryIO) -> bytes:
        """Return the header of an opened file; afterwards the file's position is at the data.

        Raises:
            UserError: all headers together are too large.
        """
        size = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if size > self._left_bytes:
            raise UserError(
                f"the headers of the weights have more than {bytes_text(_MOST_HEADER_BYTES)}", hint=self._hint
            )
        self._left_bytes -= size
        return file.read(size)


def weight_files(text: str, repository: str) -> tuple[str, ...]:
    """Return the names of the files to which an index maps weights, sorted.

    Args:
        text: content of the index.
        repository: name of the model on the Hub, for error messages.

    Raises:
        UserError: the text is not an index of safetensors files, or it names more than `MOST_WEIGHT_FILES` files.
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
