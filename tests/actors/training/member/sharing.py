"""Members of one stage in threads of this process, each with a share of the optimizer's state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from tests.actors.transport.gloo_links import links
from torch import Tensor

from share_compute.models.blueprint import Blueprint
from share_compute.models.factory import build_stage
from share_compute.protocol.tree import Node, SummationTree
from share_compute.shards import Shard
from share_compute.specification import LayerSpec, TrainingSpec
from share_compute.training.shares import WHOLE, OptimizerShare
from share_compute_actors.training.member.runner import Runner
from share_compute_actors.transport.collective.algorithms import (
    GlooLinks,
    fold,
    start_allgather,
    start_reduce_scatter,
    start_sharded,
)
from share_compute_actors.transport.collective.expression import expression

CPU = torch.device("cpu")
LAYERS = (
    LayerSpec(type="linear", options={"in_features": 13, "out_features": 37}),
    LayerSpec(type="batch_norm1d", options={"num_features": 37}),
    LayerSpec(type="gelu"),
    LayerSpec(type="linear", options={"in_features": 37, "out_features": 37}),
    LayerSpec(type="layer_norm", options={"normalized_shape": 37}),
    LayerSpec(type="linear", options={"in_features": 37, "out_features": 5}),
)
MICROBATCHES = 6
BATCH = 4


class LinkedGroup:
    """The operations of `EpochGroup` that a runner with a share needs, over links of this process."""

    device = CPU

    def __init__(self, linked: GlooLinks) -> None:
        self._links = linked

    def start_reduce_scatter(
        self,
        parts: Sequence[Tensor],
        held: Sequence[Sequence[Node]],
        tree: SummationTree,
        shares: Sequence[slice],
        out: Tensor,
    ) -> Callable[[], None]:
        combine = expression(tree, [node for nodes in held for node in nodes])
        counts = [len(nodes) for nodes in held]
        return start_reduce_scatter(self._links, parts, counts, shares, combine, out)

    def start_allgather(self, tensor: Tensor, shares: Sequence[slice]) -> Callable[[], None]:
        return start_allgather(self._links, tensor, shares)

    def start_allreduce(self, tensor: Tensor) -> Callable[[], None]:
        return start_sharded(self._links, [tensor], [1] * self._links.size, fold(torch.add), tensor)


class SharingStage:
    """Members of one stage that compute steps together; one member without shares is the reference.

    Args:
        members: number of members.
        training: training settings.
        layers: layers of the model.
    """

    def __init__(
        self, members: int, training: dict[str, Any], layers: tuple[LayerSpec, ...] = LAYERS
    ) -> None:
        self.training = TrainingSpec.model_validate(
            {"steps": 40, "batch_size": BATCH * MICROBATCHES, "microbatches": MICROBATCHES, **training}
        )
        self.tree = SummationTree((2, 1, 3))
        self._layers = layers
        self.runners = [
            self._runner(OptimizerShare(rank, members) if members > 1 else WHOLE) for rank in range(members)
        ]
        self.step = 0
        self.held = [self.tree.cover(list(range(MICROBATCHES))[rank::members]) for rank in range(members)]
        for runner, linked in zip(self.runners, links(members) if members > 1 else (None,), strict=True):
            group: Any = None if linked is None else LinkedGroup(linked)
            runner.join(group, 0 if linked is None else linked.rank)

    def _runner(self, share: OptimizerShare) -> Runner:
        shard = Shard("m", 0, len(self._layers), len(self._layers))
        stage = build_stage(Blueprint(layers=self._layers), shard, CPU)
        stage.initialize(3)
        return Runner(stage, self.training, self.tree, share=share)

    def by_all(self, work: Callable[[int, Runner], None]) -> None:
        """Run a function for all members at the same time."""
        with ThreadPoolExecutor(len(self.runners)) as pool:
            list(pool.map(work, range(len(self.runners)), self.runners))

    def prepare(self) -> None:
        """Compute the gradient of the next step."""
        step = self.step + 1

        def one(rank: int, runner: Runner) -> None:
            for microbatch in range(MICROBATCHES)[rank :: len(self.runners)]:
                source = torch.Generator().manual_seed(100 * step + microbatch)
                runner.forward(step, microbatch, torch.rand(BATCH, 13, generator=source))
                runner.backward(microbatch, torch.randint(0, 5, (BATCH,), generator=source))
            runner.reduce(self.held)

        self.by_all(one)

    def update(self, scale: float) -> None:
        """Apply the gradient, without the exchange of weights."""
        self.step += 1
        self.by_all(lambda _, runner: runner.apply(self.step, scale))

    def gather(self) -> None:
        """Exchange the updated weights."""
        if len(self.runners) > 1:
            self.by_all(lambda _, runner: runner.gather())

    def take_step(self, scale: float = 1.0) -> None:
        """Compute and apply one step."""
        self.prepare()
        self.update(scale)
        self.gather()

    def norms(self) -> dict[str, float]:
        """Return the squared norms of all gradients, by name."""
        found: dict[str, float] = {}
        for runner in self.runners:
            assert found.keys().isdisjoint(runner.squared_norms())
            found |= runner.squared_norms()
        return found

    def state(self) -> dict[str, Tensor]:
        """Return the optimizer's state of all members, by name; no two members have the same."""
        found: dict[str, Tensor] = {}
        for runner in self.runners:
            assert found.keys().isdisjoint(runner.state_tensors())
            found |= runner.state_tensors()
        return found
