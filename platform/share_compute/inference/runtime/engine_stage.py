"""Interface of a stage: one shard of a model, which executes engine steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from share_compute.errors import UserError
from share_compute.inference.runtime.quantization import (
    integers_of,
    is_quantized,
    scale_name,
    scale_of,
    weight_of,
)
from share_compute.inference.scheduler.engine_steps import EngineStep, Outcome
from share_compute.models.storage.weights import CHUNK_BYTES, WeightFolder, row_ranges, rows_of
from share_compute.shards import Shard

if TYPE_CHECKING:
    from share_compute.models.huggingface.conversion import PretrainedWeights


class EngineStage(ABC):
    """One shard of a model, which executes engine steps once its weights are filled."""

    shard: Shard
    device: torch.device
    dtype: torch.dtype
    """Type of hidden states, and of weights that are not quantized."""
    hidden_size: int
    """Size of the hidden state of one token."""
    draws: bool
    """Whether the model generates tokens; False for encoders."""
    is_sealed: bool = False
    """Whether `seal` was called."""

    # -- weights -------------------------------------------------------------------------------------------------

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to fill before `seal`, by stored name.

        A quantized weight has two entries: its int8 values and its scales.
        """

    @abstractmethod
    def take_over(self, other: EngineStage) -> dict[str, Tensor]:
        """Move the weights that both stages hold from ``other`` to this stage.

        Args:
            other: a stage of the same model; it must not be used afterwards.

        Returns:
            The tensors that are still to be filled before `seal`, by stored name.
        """

    @abstractmethod
    def seal(self, *, keeps_plain: bool = True) -> None:
        """Optimize the filled shard for computing; its tensors cannot be filled afterwards.

        A second call with ``keeps_plain=False`` frees all second copies of weights.

        Args:
            keeps_plain: whether both packed and plain weights may be kept, which takes up to twice the memory.
        """

    def warm_up(self) -> None:
        """Do slow preparation work before the first request. The base class does nothing."""

    @abstractmethod
    def weights_of(self, folder: WeightFolder) -> PretrainedWeights:
        """Return a reader of the model's tensors in a folder.

        Raises:
            UserError: the tensors do not belong to the configuration.
        """

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Fill the shard from a local Hugging Face folder, and `seal` it.

        Raises:
            UserError: the weights are missing or damaged, or do not belong to the configuration.
        """
        weights = self.weights_of(WeightFolder(folder))
        tensors = self.tensors()
        scales = {name: tensors.pop(scale_name(name)) for name in list(tensors) if is_quantized(name)}
        for name, tensor in tensors.items():
            stored = weight_of(name) if name in scales else name
            for start, stop in row_ranges(tensor.shape, 4, 32 * CHUNK_BYTES):
                given = weights.read(stored, start, stop)
                rows = rows_of(tensor, start, stop)
                if given.shape != rows.shape:
                    raise UserError(
                        f"{stored} in {folder} has the shape {list(given.shape)} where the configuration wants "
                        f"{list(rows.shape)}",
                        hint="check that config.json and the weights belong together",
                    )
                if name in scales:
                    scale = scale_of(given, stored)
                    rows_of(scales[name], start, stop).copy_(scale)
                    given = integers_of(given, scale)
                rows.copy_(given)
        self.seal()

    # -- engine steps --------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def bytes_per_token(self) -> int:
        """Bytes of memory that the stage keeps for each token from one engine step to the next."""

    @property
    @abstractmethod
    def held_tokens(self) -> int:
        """Number of positions for which the stage keeps memory now."""

    @abstractmethod
    def clear(self) -> None:
        """Forget all sequences, between two epochs."""

    @abstractmethod
    def compute(self, step: EngineStep, inputs: Tensor) -> Tensor | tuple[Outcome, ...]:
        """Execute an engine step.

        Args:
            step: the engine step.
            inputs: on the first stage token ids ``[tokens]``, on later stages the outputs of the previous stage
                ``[tokens, hidden]``; on any device.

        Returns:
            Hidden states ``[tokens, hidden]``; on the last stage the outcomes of the chunks that sample.
        """
