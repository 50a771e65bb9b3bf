"""An embedding stage: one shard of an encoder, and on the last stage the pooling of hidden states into vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from share_compute.inference.runtime.engine_stage import EngineStage
from share_compute.inference.runtime.packing import can_pack, pack
from share_compute.inference.runtime.ragged import TextAttention, attend_raggedly, attending
from share_compute.inference.runtime.stage import settle_positions
from share_compute.inference.runtime.streamlining import call_directly
from share_compute.inference.scheduler.engine_steps import Chunk, EngineStep, Pooled
from share_compute.models.huggingface.conversion import PretrainedWeights
from share_compute.models.huggingface.encoder import EncoderShard, encoder_sketch
from share_compute.models.huggingface.encoder_types import Pooling
from share_compute.models.storage.weights import WeightFolder
from share_compute.shards import Shard


class EncoderStage(EngineStage):
    """One shard of an encoder.

    If the architecture supports a custom attention function, the layers compute all texts of an engine step together.
    Otherwise they compute one text at a time.

    Args:
        config: Hugging Face configuration of the whole model; its ``model_type`` is in
            `encoder_types.ENCODERS`.
        shard: part of the model that this stage holds.
        device: device of the shard.
        dtype: type of weights and hidden states.
        window_tokens: longest text, in tokens; used by `settle_positions`.
        pooling: rule that turns hidden states into vectors.

    Raises:
        UserError: transformers cannot build a model from the configuration.
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
        # no_grad instead of inference mode, so that code outside inference mode can fill the tensors.
        with torch.no_grad():
            self.parts = EncoderShard(config, shard, device, dtype)
            base = self.parts.base
            self._is_ragged = bool(base._supports_attention_backend)  # noqa: SLF001 - set_attn_implementation reads it
            if self._is_ragged:
                attend_raggedly(base)
            settle_positions(base, window_tokens, device)
        self.hidden_size = int(base.config.hidden_size)

    # -- weights -------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to fill before `seal`, by stored name."""
        return self.parts.tensors()

    @torch.inference_mode()
    def take_over(self, other: EngineStage) -> dict[str, Tensor]:
        """Move the weights that both stages hold from ``other`` to this stage; see `EngineStage.take_over`."""
        assert isinstance(other, EncoderStage)
        return self.parts.take_over(other.parts)

    def weights_of(self, folder: WeightFolder) -> PretrainedWeights:
        """Return a reader of the model's tensors in a folder."""
        return PretrainedWeights(folder, self._config, encoder_sketch(self._config))

    @torch.inference_mode()
    def seal(self, *, keeps_plain: bool = True) -> None:
        """Optimize the filled shard for computing; see `EngineStage.seal`."""
        for module in self.parts.modules():
            if can_pack(self.dtype, self.device):
                pack(module, keeps_plain=keeps_plain)
            call_directly(module)
        self.is_sealed = True

    # -- engine steps --------------------------------------------------------------------------------------------

    @property
    def bytes_per_token(self) -> int:
        """Return 0, because an encoder keeps nothing between engine steps."""
        return 0

    @property
    def held_tokens(self) -> int:
        """Return 0, because an encoder keeps nothing between engine steps."""
        return 0

    def clear(self) -> None:
        """Do nothing: an encoder keeps nothing between engine steps."""

    @torch.inference_mode()
    def compute(self, step: EngineStep, inputs: Tensor) -> Tensor | tuple[Pooled, ...]:
        """Execute an engine step.

        Args:
            step: the engine step; each chunk is a whole text.
            inputs: on the first stage token ids ``[tokens]``, on later stages the outputs of the previous stage
                ``[tokens, hidden]``; on any device.

        Returns:
            Hidden states ``[tokens, hidden]``; on the last stage the vectors.
        """
        if not step.chunks:
            return () if self.shard.is_last else inputs.new_empty(0, self.hidden_size, dtype=self.dtype)
        counts = [chunk.count for chunk in step.chunks]
        hidden = inputs.to(self.device)
        if self.parts.embedding is not None:
            # Embed text by text, because some architectures derive positions from all ids of a text.
            embed = self.parts.embedding
            hidden = torch.cat([embed(input_ids=ids[None])[0] for ids in hidden.split_with_sizes(counts)])
        hidden = self._run(hidden, counts)
        return self._pooled(step.chunks, hidden.split_with_sizes(counts)) if self.shard.is_last else hidden

    def _run(self, hidden: Tensor, counts: list[int]) -> Tensor:
        """Apply the layers to hidden states ``[tokens, hidden]``; return the same shape."""
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
