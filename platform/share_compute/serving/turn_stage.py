"""What executes turns: one shard of a model, whatever sort of model it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

import torch
from torch import Tensor

from share_compute.errors import UserError
from share_compute.models.conversion import PretrainedWeights
from share_compute.models.weights import CHUNK_BYTES, WeightFolder, row_ranges, rows_of
from share_compute.planning.partitioning import Shard
from share_compute.serving.quantization import integers_of, is_quantized, scale_name, scale_of, weight_of
from share_compute.serving.turns import Outcome, Turn


class TurnStage(ABC):
    """One shard, ready to compute turns once its weights are there, and fast once it is sealed."""

    shard: Shard
    device: torch.device
    dtype: torch.dtype
    """Of weights and hidden states."""
    hidden_size: int
    """Numbers that the hidden state of a token has."""
    draws: bool
    """Whether tokens come of its model, which the first pool is fed with."""
    is_sealed: bool = False

    # -- weights -------------------------------------------------------------------------------------------------

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Return what has to be filled before `seal`, by stored name."""

    @abstractmethod
    def take_over(self, other: TurnStage) -> dict[str, Tensor]:
        """Take the weights that both have from a stage of the same model, sealed or not, that is not used any more.

        Returns:
            What has to be filled before `seal`, by stored name.
        """

    @abstractmethod
    def seal(self, *, keeps_plain: bool = True) -> None:
        """Make the filled shard fast; nothing can be filled afterwards. May be called again, to make it smaller.

        Args:
            keeps_plain: whether weights that are packed for products of several rows are kept plain too, for those of
                one row: twice the memory.
        """

    def warm_up(self) -> None:
        """Do beforehand what all would wait for at the first request that needs it."""

    @abstractmethod
    def weights_of(self, folder: WeightFolder) -> PretrainedWeights:
        """Return the model's tensors in a folder.

        Raises:
            UserError: they do not belong to the configuration.
        """

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Fill the shard from a local Hugging Face folder, its own tensors alone, and `seal` it.

        Raises:
            UserError: the weights are not there, are damaged, or do not belong to the configuration.
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
                        mend="check that config.json and the weights belong together",
                    )
                if name in scales:
                    scale = scale_of(given, stored)
                    rows_of(scales[name], start, stop).copy_(scale)
                    given = integers_of(given, scale)
                rows.copy_(given)
        self.seal()

    # -- turns ---------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def bytes_per_token(self) -> int:
        """Memory of each position that is kept from turn to turn."""

    @property
    @abstractmethod
    def held_tokens(self) -> int:
        """Positions that are kept now."""

    @abstractmethod
    def clear(self) -> None:
        """Forget all sequences: a new epoch begins."""

    @abstractmethod
    def compute(self, turn: Turn, inputs: Tensor) -> Tensor | tuple[Outcome, ...]:
        """Execute a turn.

        Args:
            turn: what to do.
            inputs: on the first stage ids ``[tokens]``, later what the stage before returned, ``[tokens, hidden]``; on
                any device.

        Returns:
            Hidden states ``[tokens, hidden]``; on the last stage what came of the chunks that end with a result.
        """
