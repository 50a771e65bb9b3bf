"""A serving stage that several ranks compute together, led by the first rank.

Each rank runs the model's own code on all hidden states, with its part of the linear layers and its own KV heads. The
first rank also draws the tokens. It sends each engine step to the other ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from share_compute.inference.runtime.fusion import fuse_linears
from share_compute.inference.runtime.kv_slots import KVSlots, LayerCache
from share_compute.inference.runtime.packing import can_pack, pack
from share_compute.inference.runtime.sampling import Sampler
from share_compute.inference.runtime.stage import ServingStage
from share_compute.inference.runtime.streamlining import call_directly, fuse_norms
from share_compute.inference.runtime.tensor_parallel import RankGroup, SharedTensors, TensorPlan
from share_compute.inference.scheduler.engine_steps import EngineStep, SampledToken
from share_compute.shards import Shard

_MAIN_MEMORY = torch.device("cpu")


class TensorStage(ServingStage):
    """One rank's part of a shard.

    The caller places the tensors of all ranks in shared memory (`shared_tensors`), fills them once, and then calls
    `seal` on each rank.

    Args:
        config: as in `ServingStage`.
        shard: as in `ServingStage`; the whole stage, which all ranks compute together.
        group: the ranks.
        dtype: as in `ServingStage`.
        quantizes: as in `ServingStage`.
        window_tokens: as in `ServingStage`.
        tokenizer: as in `ServingStage`; for the first rank.
        device: this rank's device, to which `seal` moves its part. Until then, tensors are in main memory.

    Raises:
        UserError: as in `ServingStage`, or the ranks cannot divide the layers.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        shard: Shard,
        group: RankGroup,
        dtype: torch.dtype = torch.float32,
        *,
        quantizes: bool = False,
        window_tokens: int | None = None,
        tokenizer: Path | None = None,
        device: torch.device = _MAIN_MEMORY,
    ) -> None:
        self._group = group
        self.is_first_rank = group.rank == 0
        self._tied_head: tuple[Tensor, ...] = ()
        self._own_device = device
        super().__init__(
            config,
            shard,
            _MAIN_MEMORY,
            dtype,
            quantizes=quantizes,
            window_tokens=window_tokens,
            tokenizer=tokenizer,
        )
        if device != _MAIN_MEMORY:
            self._slots = KVSlots(self._plan.caches, dtype, device)
            if self._sampler is not None:
                self._sampler = Sampler(int(self._text.vocab_size), device, tokenizer)

    def _kept(self, caches: list[LayerCache]) -> list[LayerCache]:
        self._plan = TensorPlan(self.module, self._stage.layers, caches, self._group.count)
        return self._plan.caches

    def shared_tensors(self) -> SharedTensors:
        """Return the tensors that all ranks have before `seal`."""
        return SharedTensors(self.module, self._stage.layers.values())

    @torch.inference_mode()
    def seal(self, *, keeps_plain: bool = True) -> None:
        """Keep this rank's part of the filled shard, and optimize it for computing; see `EngineStage.seal`.

        The shared memory of a layer is not used anymore when each rank has sealed the layer.
        """
        packs = can_pack(self.dtype, self._own_device)
        for layer in self._stage.layers.values():
            if not self.is_sealed:
                self._plan.cut_layer(layer, self._group)
                layer.to(self._own_device)
                fuse_norms(layer)
                fuse_linears(layer)
            if packs:
                pack(layer, keeps_plain=keeps_plain)
        if not self.is_sealed:
            tied = self._plan.cut_head(self._group, self._stage.tied if self.shard.is_first else {})
            self._tied_head = () if tied is None else (tied,)
            self.module.to(self._own_device)
            self.device = self._own_device
        fuse_norms(self.module)
        if packs:
            pack(self.module, keeps_plain=keeps_plain, shared=self._tied_head)
        call_directly(self.module)
        self.is_sealed = True

    @property
    def bytes_per_token(self) -> int:
        """Memory of one position of a KV slot in all ranks together, in bytes."""
        return super().bytes_per_token * self._group.count


class OtherRanks(Protocol):
    """The other ranks, as the first rank uses them."""

    def seal(self, *, keeps_plain: bool) -> None:
        """Make all other ranks seal the stage, without waiting."""

    def compute(self, step: EngineStep, inputs: Tensor) -> None:
        """Give all other ranks an engine step with its inputs, without waiting."""

    def clear(self) -> None:
        """Make all other ranks free all KV slots, without waiting."""

    def wait(self) -> None:
        """Wait until all other ranks have sealed the stage."""

    def computing(self) -> AbstractContextManager[None]:
        """Return a context in which all ranks compute; it translates their failures."""


class LeadingStage(TensorStage):
    """The first rank's part of a shard, which makes the others compute as well.

    Args:
        config: as in `TensorStage`.
        shard: as in `TensorStage`.
        group: as in `TensorStage`.
        dtype: as in `TensorStage`.
        others: the other ranks.
        options: keyword arguments of `TensorStage`.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        shard: Shard,
        group: RankGroup,
        dtype: torch.dtype,
        others: OtherRanks,
        **options: Any,
    ) -> None:
        super().__init__(config, shard, group, dtype, **options)
        self._others = others

    def seal(self, *, keeps_plain: bool = True) -> None:
        """Seal the parts of all ranks, and wait for them."""
        with self._others.computing():
            self._others.seal(keeps_plain=keeps_plain)
            super().seal(keeps_plain=keeps_plain)
        self._others.wait()

    def clear(self) -> None:
        """Free all KV slots and sampling states of all ranks."""
        super().clear()
        with self._others.computing():
            self._others.clear()

    @torch.inference_mode()
    def compute(self, step: EngineStep, inputs: Tensor) -> Tensor | tuple[SampledToken, ...]:
        """Execute an engine step on all ranks; see `ServingStage.compute`.

        Raises:
            ContributorLost: a rank ended, or was unresponsive for too long.
        """
        if not step.chunks:
            with self._others.computing():
                self._others.compute(step, inputs)
        return super().compute(step, inputs)

    def _outputs(self, step: EngineStep, inputs: Tensor) -> Tensor:
        # All slots are open and all samplers are ready at this point, so an error in a request cannot reach the other
        # ranks.
        with self._others.computing():
            self._others.compute(step, inputs)
            return super()._outputs(step, inputs)
