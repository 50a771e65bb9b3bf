"""The cost model of serving: a formula for the time of tokens, and the tables that the search reads.

A request has P prompt tokens and N new tokens. A pipeline has stages p of one machine each. For a request alone ::

    first token (TTFT) = sum of prompt(p) over all stages + sum of hop(P) over the links between neighbors
    next token (TPOT)  = round(1)

    round(b)   = sum of token(p, b) + sum of hop(b) over the links between neighbors
                 + time to send the token ids from the last stage to the first
    hop(t)     = latency + boundary bytes of t tokens / bandwidth
    prompt(p)  = sum over layers of max(FLOPs of P tokens / FLOP/s, weight bytes / memory bandwidth)
                                    + operations * overhead of one operation
    token(p,b) = sum over layers of max(b * FLOPs of one token / FLOP/s,
                                        (weight bytes + b * cache bytes) / memory bandwidth)
                                    + operations * overhead of one operation

The head computes only the last token of a prompt. The embedding is looked up, so its weights are not read. A token's
FLOPs are the mean over the N new tokens, and its cache is the mean of the caches before and after them. If layers were
timed on a prompt, these times correct both prompt(p) and token(p, b).

With all c concurrent sequences in flight, n = min(stages, c) batches of b = ceil(c / n) sequences circulate. For each N
new tokens of a sequence, one prompt must be processed ::

    step(p)    = token(p, b) + b * prompt(p) / N             one engine step: a stage's work for one batch and one token
    carry(p)   = boundary bytes of b * (1 + P / N) tokens / bandwidth, from stage p to p + 1
    next token = max(round(b), n * step(p), n * carry(p)) over all stages p
    tokens/s   = c / next token

A machine's memory holds weights, the cache of c sequences of P + N tokens, the largest working memory that one of its
layers needs for a chunk of a prompt, and the further processes of a member with several ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from share_compute.device_kinds import KINDS
from share_compute.models.profiles.profile import FLOAT_BYTES, LayerProfile, QuadraticGrowth
from share_compute.planning.cost.layout import Layout, StageLayout
from share_compute.planning.cost.tables import CostTables, sums
from share_compute.planning.network.network import Floats, transfer_s
from share_compute.specification.workload import BYTES, STEP_TOKENS, WEIGHT_BYTES, ServingWorkload

TOKEN_ID_BYTES = 8
PROCESS_BYTES = 480 * 2**20
"""Estimated memory of a process of a member, without its shard and caches."""


@dataclass(frozen=True, eq=False)
class ServingCost(CostTables):
    """Cost model of one deployment on one topology; ``timings`` hold measured times of forwards on one prompt."""

    workload: ServingWorkload

    # -- tables --------------------------------------------------------------------------------------------------

    @cached_property
    def needed_bytes(self) -> Floats:
        """Bytes that layers [start, stop) need ``[layers + 1, layers + 1]``; infinite where stop <= start."""
        number, span = BYTES[self.workload.dtype], self.num_layers + 1
        tokens = self.workload.prompt_tokens + self.workload.new_tokens
        cache = self._of_layers(lambda layer: layer.cache_numbers.at(tokens))
        caches = sums(cache * number * self.workload.concurrent)
        needed = self.held_bytes + caches[None, :] - caches[:, None]
        needed += self.process_bytes
        # Decoders compute long prompts in chunks, and mask what a chunk must not see. Encoders compute whole texts.
        prompt = self.workload.prompt_tokens
        chunk = min(prompt, STEP_TOKENS) if cache.any() else prompt
        mask = chunk * tokens * number if chunk < prompt else 0
        working = (
            self._of_layers(lambda layer: layer.activation_bytes.at(chunk) * number / FLOAT_BYTES) + mask
        )
        for start in range(self.num_layers):
            needed[start, start + 1 :] += np.maximum.accumulate(working[start:])
        needed[np.tril_indices(span)] = np.inf
        return needed

    @cached_property
    def memory_bytes(self) -> Floats:
        """Bytes that a plan may fill on each machine ``[machines]``, without further copies of the embedding.

        Ranks on GPUs each have the whole embedding. Ranks on CPUs share one in main memory.
        """
        copies = BYTES[self.workload.dtype] * self.profile.embedding.parameters * (self.workload.ranks - 1)
        has_copies = [
            bool(machine.devices) and not KINDS[machine.device.kind].uses_main_memory
            for machine in self.topology.contributors
        ]
        return np.maximum(super().memory_bytes - np.where(has_copies, copies, 0), 0.0)

    @property
    def process_bytes(self) -> int:
        """Bytes of the further processes of a member, without their parts of its weights and caches."""
        return (self.workload.ranks - 1) * PROCESS_BYTES

    @cached_property
    def held_bytes(self) -> Floats:
        """Bytes of the weights of layers [start, stop) ``[layers + 1, layers + 1]``."""
        number, weight = BYTES[self.workload.dtype], WEIGHT_BYTES[self.workload.dtype]
        held = self._of_layers(lambda layer: layer.parameters) * weight
        held[0] += self.profile.embedding.parameters * number
        held[-1] += self.profile.head.parameters * weight
        total = sums(held)
        between = total[None, :] - total[:, None]
        between[1:, -1] += self.profile.tied * number  # the second copy of tied weights
        return between

    def packed_bytes(self, start: int, stop: int) -> float:
        """Return the maximum bytes of packed copies of the weights of layers [start, stop).

        Packed copies are reordered for matrix products. With int8 weights, only a tied head has one.
        """
        if self.workload.dtype != "int8":
            return float(self.held_bytes[start, stop])
        return float(self.profile.tied * BYTES[self.workload.dtype]) if stop == self.num_layers else 0.0

    @cached_property
    def request_parts_s(self) -> Floats:
        """Time of the first l layers for a lone request ``[machines, layers + 1]``; infinite if a speed is unknown."""
        return self.prompt_s + self.workload.new_tokens * self.token_s(1)

    @cached_property
    def prompt_s(self) -> Floats:
        """Time of the first l layers for one prompt ``[machines, layers + 1]``; infinite if a speed is unknown."""
        return self.corrected_s(self._prompt_estimates, self.timed("forward"))

    def token_s(self, batch: int) -> Floats:
        """Return the time of the first l layers for one token of each of ``batch`` sequences, shaped as `prompt_s`."""
        prompt, new = self.workload.prompt_tokens, self.workload.new_tokens
        flops = self._flops(lambda growth: (growth.at(prompt + new) - growth.at(prompt)) / new)
        cache = self._of_layers(
            lambda layer: (layer.cache_numbers.at(prompt) + layer.cache_numbers.at(prompt + new)) / 2
        )
        moved = self._weight_bytes + batch * cache * BYTES[self.workload.dtype]
        # Only prompts are timed. The factor that corrects a machine's estimates for prompts is used for tokens, too.
        factors = self.corrections(self._prompt_estimates, self.timed("forward"))
        estimated = self.estimated_s(batch * flops, moved, self._operations) + self._between_ranks_s(batch)
        return sums(estimated * factors)

    def boundary_bytes(self, tokens: float) -> Floats:
        """Return the bytes that ``tokens`` tokens send across a cut before layer l ``[layers + 1]``; 0 at both ends."""
        number = BYTES[self.workload.dtype]
        inner = [tokens * number * layer.boundary_numbers.at(1) for layer in self.profile.layers[:-1]]
        return np.array([0.0, *inner, 0.0])

    @cached_property
    def _prompt_estimates(self) -> Floats:
        """Estimated time of each layer for one prompt ``[machines, layers]``."""
        prompt = self.workload.prompt_tokens
        flops = self._flops(lambda growth: growth.at(prompt))
        return self.estimated_s(flops, self._weight_bytes, self._operations) + self._between_ranks_s(prompt)

    def _between_ranks_s(self, tokens: int) -> Floats:
        """Return the time of the two sums of a layer between ranks on several devices ``[machines, layers]``."""
        crossing = BYTES[self.workload.dtype] * self._of_layers(
            lambda layer: tokens * layer.boundary_numbers.at(1)
        )
        return self.exchanged_s(np.full(self.num_layers, 2.0), crossing)

    @cached_property
    def _weight_bytes(self) -> Floats:
        """Bytes of weights that a forward pass reads in each layer ``[layers]``."""
        read = self._of_layers(lambda layer: layer.parameters)
        read[-1] += self.profile.head.parameters
        read *= WEIGHT_BYTES[self.workload.dtype]
        read[-1] += self.profile.tied * BYTES[self.workload.dtype]
        return read

    @cached_property
    def _operations(self) -> Floats:
        operations = self._of_layers(lambda layer: layer.forward_operations)
        operations[0] += self.profile.embedding.forward_operations
        operations[-1] += self.profile.head.forward_operations
        return operations

    def _flops(self, of: Callable[[QuadraticGrowth], float]) -> Floats:
        flops = self._of_layers(lambda layer: of(layer.forward_flops))
        flops[0] += of(self.profile.embedding.forward_flops)
        flops[-1] += self.profile.head.forward_flops.at(1)
        return flops

    def _of_layers(self, of: Callable[[LayerProfile], float]) -> Floats:
        return np.array([of(layer) for layer in self.profile.layers], dtype=np.float64)

    # -- the formula ---------------------------------------------------------------------------------------------

    def batches(self, stages: int) -> tuple[int, int]:
        """Return (batches in flight, sequences in each batch) for all concurrent sequences on ``stages`` stages."""
        count = min(stages, self.workload.concurrent)
        return count, math.ceil(self.workload.concurrent / count)

    def first_token_s(self, layout: Layout) -> float:
        """Return the time from a prompt to its first token (TTFT), for a request alone."""
        return self._through(layout, self.prompt_s) + self._hops(layout, self.workload.prompt_tokens)

    def next_token_s(self, layout: Layout, *, loaded: bool = False) -> float:
        """Return the time between tokens (TPOT) of a request, in seconds.

        Args:
            layout: stages of one machine each.
            loaded: whether all concurrent sequences are in flight, instead of one request alone.
        """
        count, batch = self.batches(len(layout.stages)) if loaded else (1, 1)
        times = self.token_s(batch)
        first, last = layout.stages[0], layout.stages[-1]
        back = (
            self.network.transfer_s(last.members[0], first.members[0], batch * TOKEN_ID_BYTES)
            if len(layout.stages) > 1
            else 0.0
        )
        trip = self._through(layout, times) + self._hops(layout, batch) + back
        return max(trip, count * self._slowest_step(layout, times, batch)) if loaded else trip

    def tokens_per_s(self, layout: Layout) -> float:
        """Return the tokens per second with all concurrent sequences in flight."""
        each_s = self.next_token_s(layout, loaded=True)
        return self.workload.concurrent / each_s if each_s > 0 else math.inf

    def request_s(self, layout: Layout) -> float:
        """Return the time of one request alone: its TTFT, plus ``new_tokens`` times its TPOT."""
        return self.first_token_s(layout) + self.workload.new_tokens * self.next_token_s(layout)

    def fits(self, layout: Layout) -> bool:
        """Return whether each machine needs at most the memory that a plan may fill on it."""
        return all(
            self.needed_bytes[stage.start, stage.stop] <= self.memory_bytes[machine]
            for stage in layout.stages
            for machine in stage.members
        )

    def _slowest_step(self, layout: Layout, times: Floats, batch: int) -> float:
        new, prompt = self.workload.new_tokens, self.workload.prompt_tokens
        steps = [
            _between(times, stage) + batch * _between(self.prompt_s, stage) / new for stage in layout.stages
        ]
        size = self.boundary_bytes(batch * (1 + prompt / new))
        carries = [
            transfer_s(0.0, self.network.link(before.members[0], after.members[0])[1], size[after.start])
            for before, after in pairwise(layout.stages)
        ]
        return max(*steps, *carries, 0.0)

    def _through(self, layout: Layout, times: Floats) -> float:
        return sum(_between(times, stage) for stage in layout.stages)

    def _hops(self, layout: Layout, tokens: int) -> float:
        size = self.boundary_bytes(tokens)
        return sum(
            self.network.transfer_s(before.members[0], after.members[0], float(size[after.start]))
            for before, after in pairwise(layout.stages)
        )


def _between(times: Floats, stage: StageLayout) -> float:
    machine = stage.members[0]
    return float(times[machine, stage.stop] - times[machine, stage.start])
