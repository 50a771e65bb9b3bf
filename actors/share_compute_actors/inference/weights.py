"""Actor on the server's host that sends weights to a deployment's members."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import torch
from torch import Tensor

from share_compute.errors import UserError
from share_compute.inference.runtime.quantization import (
    integers_of,
    require_linear_layers,
    scale_of,
    weight_of,
)
from share_compute.models.blueprint import Blueprint
from share_compute.models.configuration import declared_config
from share_compute.models.factory import dissect
from share_compute.models.profiles.cache import cached_profile, stored_profile
from share_compute.models.profiles.profile import ModelProfile
from share_compute.models.storage.weights import WeightFolder
from share_compute.specification import ModelSpec, ServedPrecision
from share_compute_actors.group.answering import answers
from share_compute_actors.machine.stalled import close_stalled_connections
from share_compute_actors.messages import Extent, read_extents
from share_compute_actors.transport.pieces import Piece
from share_compute_actors.unpickling import refuse_pickles
from share_compute_actors.wire import Schema

if TYPE_CHECKING:
    from share_compute.models.huggingface.conversion import PretrainedWeights

_LARGE = frozenset({".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".onnx", ".msgpack"})
"""File name extensions of weight files; these files are not sent with the tokenizer."""
_MOST_FILE_BYTES = 64 * 2**20
_ROWS = 1024
"""Maximum number of rows of a matrix that are read at a time to compute their scales."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The facts about a model that the server needs before it plans the stages."""

    blueprint: Blueprint
    profile: ModelProfile


SERVED: Schema[ServedModel] = Schema(ServedModel)


def known_model(folder: Path, dtype: ServedPrecision, *, embeds: bool) -> ServedModel | None:
    """Return the result of an earlier `ServedWeights.prepare` for the same configuration and weight shapes.

    Return None if there is no such result.

    Raises:
        UserError: there is no model in the folder.
    """
    config = _config(folder)
    profile = stored_profile(_facts(folder, config, dtype, embeds))
    return None if profile is None else ServedModel(Blueprint(config=config), profile)


@ray.remote(num_cpus=0, concurrency_groups={"weights": 1})
class ServedWeights:
    """Reads the weights in a model's folder, some rows at a time, and the files of its tokenizer.

    Args:
        folder: folder with config.json and safetensors files.
        dtype: precision of the deployment.
        embeds: whether the model is an encoder.
    """

    def __init__(self, folder: Path, dtype: ServedPrecision, *, embeds: bool = False) -> None:
        refuse_pickles()
        close_stalled_connections()
        self._folder = folder
        self._embeds = embeds
        self._precision: ServedPrecision = dtype
        self._quantizes = dtype == "int8"
        self._dtype: torch.dtype = torch.float32 if self._quantizes else getattr(torch, dtype)
        self._scales: dict[tuple[str, int], Tensor] = {}
        """Scales of the ranges of rows that were quantized, by the name of the matrix and the first row."""
        self._opened: PretrainedWeights | None = None

    @ray.method(concurrency_group="weights")
    @answers(SERVED)
    def prepare(self) -> ServedModel:
        """Read the configuration, open the weights, and profile the model.

        Raises:
            UserError: the folder has no model, or one that cannot be served.
        """
        config = _config(self._folder)
        facts = _facts(self._folder, config, self._precision, self._embeds)
        return ServedModel(Blueprint(config=config), cached_profile(facts, partial(self._profile, config)))

    def _profile(self, config: dict[str, Any]) -> ModelProfile:
        """Check that the weights can be served with this configuration, and profile the model."""
        self._weights()
        if self._embeds:
            from share_compute.models.huggingface.encoder import profile_encoder  # noqa: PLC0415 - slow to import

            return profile_encoder(config)
        if self._quantizes:
            from share_compute.models.huggingface.decoder import sketch, tied_names  # noqa: PLC0415 - slow to import

            model = sketch(config)
            tied = tied_names(model)
            require_linear_layers(model, {*tied, *tied.values()})
        return dissect(Blueprint(config=config))

    @ray.method(concurrency_group="weights")
    def open(self) -> None:
        """Open the model's weight files now, before members ask for rows."""
        with suppress(UserError):  # calls for rows raise it again
            self._weights()

    def _weights(self) -> PretrainedWeights:
        """Return a reader of the model's weight files; open them at the first call in this process."""
        if self._opened is None:
            from share_compute.models.huggingface.conversion import PretrainedWeights  # noqa: PLC0415 - slow to import

            config, model = _config(self._folder), None
            if self._embeds:
                from share_compute.models.huggingface.encoder import encoder_sketch  # noqa: PLC0415

                model = encoder_sketch(config)
            self._opened = PretrainedWeights(WeightFolder(self._folder), config, model)
        return self._opened

    @ray.method(concurrency_group="weights")
    def weights(self, extents: bytes) -> list[Piece]:
        """Return rows of tensors in the deployment's precision, or in float32 if that precision is int8."""
        return [
            Piece.of_rows(extent.name, self._read(extent).to(self._dtype)) for extent in read_extents(extents)
        ]

    @ray.method(concurrency_group="weights")
    def exact_weights(self, extents: bytes) -> list[Piece]:
        """Return rows of tensors as float32."""
        return [Piece.of_rows(extent.name, self._read(extent).float()) for extent in read_extents(extents)]

    @ray.method(concurrency_group="weights")
    def int8_weights(self, extents: bytes) -> list[Piece]:
        """Quantize rows of matrices, and return the int8 values; `scales` returns the scale of each row."""
        return [Piece.of_rows(extent.name, self._integers(extent)) for extent in read_extents(extents)]

    @ray.method(concurrency_group="weights")
    def scales(self, extents: bytes) -> list[Piece]:
        """Return the float32 scale of each quantized row; int8 values times the scale approximate the row's weights."""
        return [
            Piece.of_rows(extent.name, torch.cat(list(self._scales_of(extent))))
            for extent in read_extents(extents)
        ]

    def _integers(self, extent: Extent) -> Tensor:
        name = weight_of(extent.name)
        rows = self._read(extent._replace(name=name))
        scale = self._scales[name, extent.start] = scale_of(rows, name)
        return integers_of(rows, scale)

    def _scales_of(self, extent: Extent) -> Iterator[Tensor]:
        """Yield the scales of rows in order; unknown scales are computed from the weights, some rows at a time."""
        name, start, stop = weight_of(extent.name), extent.start, extent.stop
        assert stop is not None
        while start < stop:
            scale = self._scales.get((name, start))
            if scale is None:
                scale = scale_of(self._read(Extent(name, start, min(stop, start + _ROWS))), name)
            yield scale[: stop - start]
            start += len(scale)

    @ray.method(concurrency_group="weights")
    def tokenizer_files(self) -> dict[str, bytes]:
        """Return the contents of the folder's small files, without weights and hidden files, by name.

        Return an empty dict if no name begins with ``tokenizer``.
        """
        files = [file for file in self._folder.iterdir() if _is_small(file)]
        if not any(file.name.startswith("tokenizer") for file in files):
            return {}
        return {file.name: file.read_bytes() for file in files}

    def _read(self, extent: Extent) -> Tensor:
        return self._weights().read(*extent)


def _config(folder: Path) -> dict[str, Any]:
    config = declared_config(ModelSpec(path=folder))
    if not isinstance(config.get("model_type"), str):
        raise UserError(
            f"{folder / 'config.json'} names no model_type", hint="give a folder that save_pretrained wrote"
        )
    return config


def _facts(folder: Path, config: dict[str, Any], dtype: ServedPrecision, embeds: bool) -> dict[str, Any]:
    """Return the facts that determine whether the model in a folder can be served, and its profile."""
    shapes = WeightFolder(folder).shapes()
    return {"config": config, "dtype": dtype, "embeds": embeds, "weights": shapes}


def _is_small(file: Path) -> bool:
    is_shown = file.is_file() and not file.name.startswith(".")
    return is_shown and file.suffix not in _LARGE and file.stat().st_size <= _MOST_FILE_BYTES
