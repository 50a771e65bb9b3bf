"""Reads the weights of a served model, in the precision of its deployment."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from share_compute.inference.runtime.quantization import (
    integers_of,
    require_linear_layers,
    scale_of,
    weight_of,
)
from share_compute.models.blueprint import Blueprint
from share_compute.models.factory import dissect
from share_compute.models.profiles.cache import cached_profile
from share_compute.models.profiles.profile import ModelProfile
from share_compute.models.storage.weights import WeightFolder
from share_compute.specification import ServedPrecision
from share_compute_actors.inference.served_model import ServedModel, config_of, facts_of
from share_compute_actors.messages import Extent
from share_compute_actors.transport.pieces import Piece

if TYPE_CHECKING:
    from share_compute.models.huggingface.conversion import PretrainedWeights

_ROWS = 1024
"""Maximum number of rows of a matrix that are read at a time to compute their scales."""


class WeightReader:
    """Reads the weights in a model's folder, some rows at a time.

    Args:
        folder: folder with config.json and safetensors files.
        dtype: precision of the deployment.
        embeds: whether the model is an encoder.
    """

    def __init__(self, folder: Path, dtype: ServedPrecision, *, embeds: bool) -> None:
        self._folder = folder
        self._embeds = embeds
        self._precision: ServedPrecision = dtype
        self._quantizes = dtype == "int8"
        self._dtype: torch.dtype = torch.float32 if self._quantizes else getattr(torch, dtype)
        self._scales: dict[tuple[str, int], Tensor] = {}
        """Scales of the ranges of rows that were quantized, by the name of the matrix and the first row."""
        self._opened: PretrainedWeights | None = None
        self._opening = threading.Lock()

    def prepare(self) -> ServedModel:
        """Read the configuration, open the weights, and profile the model.

        Raises:
            UserError: the folder has no model, or one that cannot be served.
        """
        config = config_of(self._folder)
        facts = facts_of(self._folder, config, self._precision, self._embeds)
        return ServedModel(Blueprint(config=config), cached_profile(facts, partial(self._profile, config)))

    def _profile(self, config: dict[str, Any]) -> ModelProfile:
        """Check that the weights can be served with this configuration, and profile the model."""
        self.open()
        if self._embeds:
            from share_compute.models.huggingface.encoder import profile_encoder  # noqa: PLC0415 - slow to import

            return profile_encoder(config)
        if self._quantizes:
            from share_compute.models.huggingface.decoder import sketch  # noqa: PLC0415 - slow to import
            from share_compute.models.huggingface.parts import tied_names  # noqa: PLC0415

            model = sketch(config)
            tied = tied_names(model)
            require_linear_layers(model, {*tied, *tied.values()})
        return dissect(Blueprint(config=config))

    def open(self) -> PretrainedWeights:
        """Return a reader of the model's weight files; open them at the first call in this process. Thread-safe."""
        with self._opening:
            if self._opened is None:
                self._opened = self._open()
            return self._opened

    def _open(self) -> PretrainedWeights:
        from share_compute.models.huggingface.conversion import PretrainedWeights  # noqa: PLC0415 - slow to import

        config, model = config_of(self._folder), None
        if self._embeds:
            from share_compute.models.huggingface.encoder import encoder_sketch  # noqa: PLC0415

            model = encoder_sketch(config)
        return PretrainedWeights(WeightFolder(self._folder), config, model)

    def weights(self, extents: Sequence[Extent]) -> list[Piece]:
        """Return rows of tensors in the deployment's precision, or in float32 if that precision is int8."""
        return [Piece.of_rows(extent.name, self._read(extent).to(self._dtype)) for extent in extents]

    def exact_weights(self, extents: Sequence[Extent]) -> list[Piece]:
        """Return rows of tensors as float32."""
        return [Piece.of_rows(extent.name, self._read(extent).float()) for extent in extents]

    def int8_weights(self, extents: Sequence[Extent]) -> list[Piece]:
        """Quantize rows of matrices, and return the int8 values; `scales` returns the scale of each row."""
        return [Piece.of_rows(extent.name, self._integers(extent)) for extent in extents]

    def scales(self, extents: Sequence[Extent]) -> list[Piece]:
        """Return the float32 scale of each quantized row; int8 values times the scale approximate the row's weights."""
        return [Piece.of_rows(extent.name, torch.cat(list(self._scales_of(extent)))) for extent in extents]

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

    def _read(self, extent: Extent) -> Tensor:
        return self.open().read(*extent)
