"""A stage that embeds: one shard of an encoder, and on the last one what makes vectors of hidden states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from share_compute.models.conversion import PretrainedWeights
from share_compute.models.encoders import Pooling
from share_compute.models.huggingface_encoder import EncoderShard, encoder_sketch
from share_compute.models.weights import WeightFolder
from share_compute.planning.partitioning import Shard
from share_compute.serving.packing import can_pack, pack
from share_compute.serving.ragged import TextAttention, attend_raggedly, attending
from share_compute.serving.stage import settle_positions
from share_compute.serving.streamlining import call_directly
from share_compute.serving.turn_stage import TurnStage
from share_compute.serving.turns import Chunk, Pooled, Turn


class EncoderStage(TurnStage):
    """One shard of an encoder.

    The texts of a turn lie one after the other in one batch of one row, and each token sees its own text alone. Texts
    of architectures that do not hand their attention to a function are computed one by one.

    Args:
        config: Hugging Face configuration of the whole model, with ``model_type``.
        shard: which part of it this is.
        device: where it is.
        dtype: of weights and hidden states.
        window_tokens: longest text; models that stretch their positions for long texts stretch them for this length.
        pooling: how vectors are made.

    Raises:
        UserError: the configuration makes no encoder.
    """

    draws = False

    def __init__(
        self,
        config: Mapping[str, Any],
        shard: Shard,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        *,
        window_tokens: int,
        pooling: Pooling,
    ) -> None:
        self.shard = shard
        self.device = device
        self.dtype = dtype
        self._config = dict(config)
        self._pooling = pooling
        # Not in inference mode: whoever fills the tensors need not be in it.
        with torch.no_grad():
            self.parts = EncoderShard(config, shard, device, dtype)
            base = self.parts.base
            self._is_ragged = bool(base._supports_attention_backend)  # noqa: SLF001 - as set_attn_implementation asks
            if self._is_ragged:
                attend_raggedly(base)
            settle_positions(base, window_tokens, device)
        self.hidden_size = int(base.config.hidden_size)

    # -- weights -------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Return what has to be filled before `seal`, by stored name."""
        return self.parts.tensors()

    @torch.inference_mode()
    def take_over(self, other: TurnStage) -> dict[str, Tensor]:
        """Take the weights that both have from a stage of the same model, sealed or not, that is not used any more.

        Returns:
            What has to be filled before `seal`, by stored name.
        """
        assert isinstance(other, EncoderStage)
        return self.parts.take_over(other.parts)

    def weights_of(self, folder: WeightFolder) -> PretrainedWeights:
        """Return the model's tensors in a folder."""
        return PretrainedWeights(folder, self._config, encoder_sketch(self._config))

    @torch.inference_mode()
    def seal(self, *, keeps_plain: bool = True) -> None:
        """Make the filled shard fast; see `TurnStage.seal`."""
        for module in self.parts.modules():
            if can_pack(self.dtype, self.device):
                pack(module, keeps_plain=keeps_plain)
            call_directly(module)
        self.is_sealed = True

    # -- turns ---------------------------------------------------------------------------------------------------

    @property
    def bytes_per_token(self) -> int:
        """Nothing is kept from turn to turn."""
        return 0

    @property
    def held_tokens(self) -> int:
        """Nothing is kept from turn to turn."""
        return 0

    def clear(self) -> None:
        """Do nothing: nothing is kept from turn to turn."""

    @torch.inference_mode()
    def compute(self, turn: Turn, inputs: Tensor) -> Tensor | tuple[Pooled, ...]:
        """Execute a turn.

        Args:
            turn: what to do; each chunk is a whole text.
            inputs: on the first stage ids ``[tokens]``, later what the stage before returned, ``[tokens, hidden]``; on
                any device.

        Returns:
            Hidden states ``[tokens, hidden]``; on the last stage the vectors.
        """
        if not turn.chunks:
            return () if self.shard.is_last else inputs.new_empty(0, self.hidden_size, dtype=self.dtype)
        counts = [chunk.count for chunk in turn.chunks]
        hidden = inputs.to(self.device)
        if self.parts.embedding is not None:
            # Text by text: some architectures find positions by looking at all ids of a text.
            embed = self.parts.embedding
            hidden = torch.cat([embed(input_ids=ids[None])[0] for ids in hidden.split_with_sizes(counts)])
        hidden = self._run(hidden, counts)
        return self._pooled(turn.chunks, hidden.split_with_sizes(counts)) if self.shard.is_last else hidden

    def _run(self, hidden: Tensor, counts: list[int]) -> Tensor:
        """Take and return hidden states ``[tokens, hidden]``."""
        base = self.parts.base
        if not self._is_ragged:
            texts = [
                base(inputs_embeds=text[None], return_dict=True)[0][0]
                for text in hidden.split_with_sizes(counts)
            ]
            return torch.cat(texts)
        positions = torch.cat([torch.arange(count, device=self.device) for count in counts])
        with attending(TextAttention(counts)):
            outputs: Tensor = base(
                inputs_embeds=hidden[None], position_ids=positions[None], return_dict=True
            )[0][0]
        return outputs

    def _pooled(self, chunks: Sequence[Chunk], texts: Sequence[Tensor]) -> tuple[Pooled, ...]:
        rows = [text[0].float() if self._pooling.mode == "cls" else text.float().mean(0) for text in texts]
        vectors = torch.stack(rows)
        if self._pooling.is_normalized:
            vectors = normalize(vectors, dim=1)
        return tuple(
            Pooled(chunk.sequence, chunk.count, vector.astype("<f4").tobytes())
            for chunk, vector in zip(chunks, vectors.cpu().numpy(), strict=True)
        )
