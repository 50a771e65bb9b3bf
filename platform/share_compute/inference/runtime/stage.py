"""A serving stage: one shard of a causal language model, its KV slots, and on the last stage the sampler."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from share_compute.errors import ShareComputeError
from share_compute.inference.runtime.engine_stage import EngineStage
from share_compute.inference.runtime.fusion import fuse_linears
from share_compute.inference.runtime.kv_slots import KVSlots, LayerCache
from share_compute.inference.runtime.packing import can_pack, pack
from share_compute.inference.runtime.quantization import quantize
from share_compute.inference.runtime.ragged import (
    Attention,
    AttentionChunk,
    Probe,
    attend_raggedly,
    attending,
    cannot_serve,
)
from share_compute.inference.runtime.sampling import Sampler
from share_compute.inference.runtime.streamlining import call_directly, fuse_norms
from share_compute.inference.scheduler.engine_steps import EngineStep, Opening, SampledToken
from share_compute.models.blueprint import Blueprint
from share_compute.models.huggingface.conversion import PretrainedWeights
from share_compute.models.huggingface.decoder import HuggingFaceStage
from share_compute.models.storage.weights import WeightFolder
from share_compute.shards import Shard

_SPARSE = frozenset(
    {"indexed_attention", "compressed_sparse_attention", "heavily_compressed_attention", "minimax_m3_sparse"}
)
"""Layer types with sparse attention."""


class ServingStage(EngineStage):
    """One shard of a causal language model.

    Args:
        config: Hugging Face configuration of the whole model, with ``model_type``.
        shard: part of the model that this stage holds.
        device: device of the shard.
        dtype: type of weights, hidden states, keys and values.
        quantizes: whether the weights of linear layers are int8; see `quantize`.
        window_tokens: maximum length of a sequence in tokens, used by `settle_positions`; None for the length in
            ``config``.
        tokenizer: folder of the tokenizer, for constrained text; None if there is none.

    Raises:
        UserError: the architecture cannot be split into stages, or cannot be served.
    """

    draws = True
    is_first_rank = True
    """Whether this process samples; False in other ranks than the first, if several compute a shard together."""

    def __init__(
        self,
        config: Mapping[str, Any],
        shard: Shard,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        *,
        quantizes: bool = False,
        window_tokens: int | None = None,
        tokenizer: Path | None = None,
    ) -> None:
        self.shard = shard
        self.device = device
        self.dtype = dtype
        self._config = dict(config)
        # no_grad instead of inference mode, so that code outside inference mode can fill the tensors.
        with torch.no_grad():
            blueprint = Blueprint(config=self._config)
            change = quantize if quantizes else None
            self._stage = HuggingFaceStage(blueprint, shard, device, serves_in=dtype, change=change)
            self.module: Any = self._stage.module
            """The model of transformers, in which only this shard's layers compute."""
            whole: Any = self._stage.module.config
            self._text = whole.get_text_config()
            self.hidden_size = int(self._text.hidden_size)
            self._require_plain()
            attend_raggedly(self.module)
            settle_positions(self.module, window_tokens or self._text.max_position_embeddings, device)
            self._slots = KVSlots(self._kept(self._probe()), dtype, device)
        draws = shard.is_last and self.is_first_rank
        self._sampler = Sampler(int(self._text.vocab_size), device, tokenizer) if draws else None

    def _kept(self, caches: list[LayerCache]) -> list[LayerCache]:
        """Return the shapes of the keys and values that this process keeps, given those of the whole layers."""
        return caches

    def _require_plain(self) -> None:
        model_type = self._text.model_type
        if getattr(self.module.config, "is_encoder_decoder", False):
            raise cannot_serve(model_type, "has an encoder")
        if not _SPARSE.isdisjoint(getattr(self._text, "layer_types", None) or ()):
            raise cannot_serve(
                model_type, "has sparse attention, which reads only the tokens that it selects"
            )
        if getattr(self.module, "_is_stateful", False):
            raise cannot_serve(model_type, "keeps a state beside keys and values")
        known = inspect.signature(self.module.base_model.forward).parameters
        if "position_ids" not in known:
            raise cannot_serve(model_type, "takes no positions")

    def _probe(self) -> Any:
        kinds = getattr(self._text, "layer_types", None)
        probe = Probe(
            self._text.model_type, None if kinds is None else kinds[self.shard.start : self.shard.stop]
        )
        if self.shard.is_first:
            inputs = torch.zeros(2, dtype=torch.int64, device=self.device)
        else:
            inputs = torch.zeros(2, self._text.hidden_size, dtype=self.dtype, device=self.device)
        try:
            self._run(probe, inputs, torch.arange(2, device=self.device), [1])
        except (TypeError, KeyError, IndexError, AttributeError) as failure:
            if isinstance(failure, ShareComputeError):
                raise
            reason = f"needs more than attention is given here ({type(failure).__name__}: {failure})"
            raise cannot_serve(self._text.model_type, reason) from failure
        return probe.finish(len(self.shard))

    # -- weights -------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to fill before `seal`, by stored name."""
        return self._stage.persistent()

    @torch.inference_mode()
    def take_over(self, other: EngineStage) -> dict[str, Tensor]:
        """Move the weights that both stages hold from ``other`` to this stage; see `EngineStage.take_over`."""
        assert isinstance(other, ServingStage)
        return self._stage.take_over(other._stage)  # noqa: SLF001 - it is one of ours

    def weights_of(self, folder: WeightFolder) -> PretrainedWeights:
        """Return a reader of the model's tensors in a folder."""
        return PretrainedWeights(folder, self._config)

    @torch.inference_mode()
    def seal(self, *, keeps_plain: bool = True) -> None:
        """Optimize the filled shard for computing; see `EngineStage.seal`."""
        fuse_norms(self.module)
        fuse_linears(self.module)
        if can_pack(self.dtype, self.device):
            pack(self.module, keeps_plain=keeps_plain)
        call_directly(self.module)
        self.is_sealed = True

    def warm_up(self) -> None:
        """Load the tokenizer for constrained text on the last stage."""
        if self._sampler is not None:
            self._sampler.warm_up()

    # -- engine steps --------------------------------------------------------------------------------------------

    @property
    def bytes_per_token(self) -> int:
        """Memory of one position of a KV slot in bytes: keys and values of the shard's layers."""
        return self._slots.bytes_per_token

    @property
    def held_tokens(self) -> int:
        """Capacity of all open KV slots, in positions."""
        return self._slots.held_tokens

    @torch.inference_mode()
    def open(self, opening: Opening) -> None:
        """Open the KV slot of a sequence, and on the last stage create its sampling state.

        Raises:
            UserError: as `Sampler.open`, on the last stage.
        """
        self._slots.open(opening.sequence, opening.capacity_tokens, opening.copy_from, opening.copy_tokens)
        if self._sampler is not None:
            self._sampler.open(opening)

    def close(self, sequence: int) -> None:
        """Free the KV slot of a sequence, and on the last stage its sampling state."""
        self._slots.close(sequence)
        if self._sampler is not None:
            self._sampler.close(sequence)

    def clear(self) -> None:
        """Free all KV slots and sampling states, between two epochs."""
        self._slots.clear()
        if self._sampler is not None:
            self._sampler.clear()

    @torch.inference_mode()
    def compute(self, step: EngineStep, inputs: Tensor) -> Tensor | tuple[SampledToken, ...]:
        """Execute an engine step.

        Args:
            step: the engine step.
            inputs: on the first stage token ids ``[tokens]``, see `EngineStep.input_ids`; on later stages the outputs
                of the previous stage ``[tokens, hidden]``; on any device.

        Returns:
            Hidden states ``[tokens, hidden]``; on the last stage the sampled tokens.

        Raises:
            UserError: as `open`.
        """
        self._change_slots(step)
        if not step.chunks:
            return () if self.shard.is_last else inputs.new_empty(0, self._text.hidden_size, dtype=self.dtype)
        outputs = self._outputs(step, inputs)
        if self._sampler is None:
            return outputs
        return self._sampler.sample(outputs, [chunk for chunk in step.chunks if chunk.samples])

    @property
    def layers(self) -> Sequence[nn.Module]:
        """The layers of the shard, in order."""
        return tuple(self._stage.layers.values())

    @torch.inference_mode()
    def dry_run(self, sequences: int, past_tokens: int) -> Callable[[], Tensor]:
        """Return a function that computes one token of some sequences without the sampler, to measure the layers.

        Tokens, hidden states and past keys and values are random, and the same in each call. The function returns
        hidden states ``[sequences, hidden]``; on the last stage logits ``[sequences, vocabulary]``.

        Args:
            sequences: number of sequences.
            past_tokens: number of earlier tokens of each sequence.
        """
        source = torch.Generator(self.device).manual_seed(0)
        slots = self._slots.spare(sequences, past_tokens + 1)
        for slot in slots:
            for past in slot.between(0, past_tokens):
                past.normal_(generator=source)
        size = (sequences, self.hidden_size)
        inputs = torch.randn(size, generator=source, device=self.device).to(self.dtype)
        if self.shard.is_first:
            vocabulary = int(self._text.vocab_size)
            inputs = torch.randint(vocabulary, size[:1], generator=source, device=self.device)
        positions = torch.full(size[:1], past_tokens, device=self.device)

        @torch.inference_mode()
        def compute() -> Tensor:
            attention = Attention([AttentionChunk(slot, past_tokens, 1) for slot in slots])
            return self._run(attention, inputs, positions, list(range(sequences)))

        return compute

    def _change_slots(self, step: EngineStep) -> None:
        for sequence in step.closes:
            self.close(sequence)
        for growth in step.grows:
            self._slots.grow(growth.sequence, growth.capacity_tokens)
        for opening in step.opens:
            self.open(opening)

    def _outputs(self, step: EngineStep, inputs: Tensor) -> Tensor:
        """Compute the chunks of a step; return the result of `_run`, with a row for each chunk that samples."""
        attention = Attention(
            [AttentionChunk(self._slots[chunk.sequence], chunk.start, chunk.count) for chunk in step.chunks]
        )
        return self._run(
            attention, inputs.to(self.device), _positions(step, self.device), _sampled_rows(step)
        )

    def _run(self, attention: Attention, inputs: Tensor, positions: Tensor, rows: list[int]) -> Tensor:
        """Run the shard on a step's inputs.

        Returns:
            Hidden states ``[tokens, hidden]``; on the last stage the logits ``[len(rows), vocabulary]`` of ``rows``.
        """
        options: dict[str, Any] = {"position_ids": positions[None]}
        if not self.shard.is_last:
            with attending(attention):
                return self._stage.run(inputs[None], **options)[0]
        if self._picks_rows:
            options["logits_to_keep"] = torch.tensor(rows, dtype=torch.int64, device=self.device)
        with attending(attention):
            logits = self._stage.run(inputs[None], **options)[0]
        return logits if self._picks_rows else logits[rows]

    @cached_property
    def _picks_rows(self) -> bool:
        return "logits_to_keep" in inspect.signature(self.module.forward).parameters


def _positions(step: EngineStep, device: torch.device) -> Tensor:
    if step.num_tokens == len(step.chunks):
        return torch.tensor([chunk.start for chunk in step.chunks], device=device)
    runs = [torch.arange(chunk.start, chunk.start + chunk.count) for chunk in step.chunks]
    return torch.cat(runs).to(device)


def _sampled_rows(step: EngineStep) -> list[int]:
    """Return, for each chunk with `samples` set, the row of its last token in the step's inputs."""
    stops = accumulate(chunk.count for chunk in step.chunks)
    return [stop - 1 for chunk, stop in zip(step.chunks, stops, strict=True) if chunk.samples]


def settle_positions(model: nn.Module, window_tokens: int, device: torch.device) -> None:
    """Fix the rotary frequencies of a model for ``window_tokens``.

    Some models (dynamic NTK, longrope) derive these frequencies from the longest text of a batch. Here a batch contains
    texts of unrelated requests, so the results of one request would depend on the others.
    """
    last = torch.tensor([[window_tokens - 1]], device=device)
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str) and ("dynamic" in kinds or kinds == "longrope"):
            module(torch.empty(1, device=device), last)
            module.rope_type = "default"  # type: ignore[assignment]
        elif isinstance(kinds, dict):
            for name, kind in kinds.items():
                if "dynamic" in kind or kind == "longrope":
                    module(torch.empty(1, device=device), last, name)
            module.rope_type = dict.fromkeys(kinds, "default")  # type: ignore[assignment]
