"""Actor on the server's host that sends weights to a deployment's members.

The server of a replica imports this module. To keep this import fast, only the process of the actor imports torch.
Members that an earlier server left need no weights, so the actor imports torch only when a member requests weights, or
some time after its start. Otherwise the import would take processor time from their streams.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import ray

from share_compute.errors import UserError
from share_compute.specification import ServedPrecision
from share_compute_actors.group.answering import answers
from share_compute_actors.inference.served_model import SERVED, ServedModel
from share_compute_actors.machine.stalled import close_stalled_connections
from share_compute_actors.messages import read_extents
from share_compute_actors.unpickling import refuse_pickles

if TYPE_CHECKING:
    from share_compute_actors.inference.weight_reader import WeightReader
    from share_compute_actors.transport.pieces import Piece

_LARGE = frozenset({".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".onnx", ".msgpack"})
"""File name extensions of weight files; these files are not sent with the tokenizer."""
_MOST_FILE_BYTES = 64 * 2**20
_OPEN_AFTER_S = 15.0
"""Time after its start at which the actor opens the weights, if no member has asked for any, in seconds."""


@ray.remote(num_cpus=0, concurrency_groups={"weights": 1})
class ServedWeights:
    """Sends the weights in a model's folder, some rows at a time, and the files of its tokenizer.

    Args:
        folder: folder with config.json and safetensors files.
        dtype: precision of the deployment.
        embeds: whether the model is an encoder.
    """

    def __init__(self, folder: Path, dtype: ServedPrecision, *, embeds: bool = False) -> None:
        refuse_pickles()
        close_stalled_connections()
        self._folder = folder
        self._dtype: ServedPrecision = dtype
        self._embeds = embeds
        self._reader: WeightReader | None = None
        self._lock = threading.Lock()
        timer = threading.Timer(_OPEN_AFTER_S, self._open)
        timer.daemon = True
        timer.start()

    @ray.method(concurrency_group="weights")
    @answers(SERVED)
    def prepare(self) -> ServedModel:
        """Read the configuration, open the weights, and profile the model.

        Raises:
            UserError: the folder has no model, or one that cannot be served.
        """
        return self._weights().prepare()

    @ray.method(concurrency_group="weights")
    def open(self) -> None:
        """Open the model's weight files now, before members request rows."""
        self._open()

    def _open(self) -> None:
        with suppress(UserError):  # calls for rows raise it again
            self._weights().open()

    def _weights(self) -> WeightReader:
        """Return the reader of the weights; create it at the first call."""
        from share_compute_actors.inference.weight_reader import WeightReader  # noqa: PLC0415 - loads torch

        with self._lock:
            if self._reader is None:
                self._reader = WeightReader(self._folder, self._dtype, embeds=self._embeds)
            return self._reader

    @ray.method(concurrency_group="weights")
    def weights(self, extents: bytes) -> list[Piece]:
        """Return rows of tensors in the deployment's precision, or in float32 if that precision is int8."""
        return self._weights().weights(read_extents(extents))

    @ray.method(concurrency_group="weights")
    def exact_weights(self, extents: bytes) -> list[Piece]:
        """Return rows of tensors as float32."""
        return self._weights().exact_weights(read_extents(extents))

    @ray.method(concurrency_group="weights")
    def int8_weights(self, extents: bytes) -> list[Piece]:
        """Quantize rows of matrices, and return the int8 values; `scales` returns the scale of each row."""
        return self._weights().int8_weights(read_extents(extents))

    @ray.method(concurrency_group="weights")
    def scales(self, extents: bytes) -> list[Piece]:
        """Return the float32 scale of each quantized row; int8 values times the scale approximate the row's weights."""
        return self._weights().scales(read_extents(extents))

    @ray.method(concurrency_group="weights")
    def tokenizer_files(self) -> dict[str, bytes]:
        """Return the contents of the folder's small files, without weights and hidden files, by name.

        Return an empty dict if no name begins with ``tokenizer``.
        """
        files = [file for file in self._folder.iterdir() if _is_small(file)]
        if not any(file.name.startswith("tokenizer") for file in files):
            return {}
        return {file.name: file.read_bytes() for file in files}


def _is_small(file: Path) -> bool:
    is_shown = file.is_file() and not file.name.startswith(".")
    return is_shown and file.suffix not in _LARGE and file.stat().st_size <= _MOST_FILE_BYTES
