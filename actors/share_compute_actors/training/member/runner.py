"""Computes one member's cells (forward or backward of a microbatch), sums gradients in its stage, updates its weights.

This module does not depend on the events and messages of the step protocol.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Literal, NamedTuple

import torch
from ray.util.collective.types import BroadcastOptions
from torch import Tensor
from torch.nn import Parameter

from share_compute.compression.boundaries import encoded
from share_compute.compression.factory import bucket_codecs
from share_compute.errors import ContributorLost
from share_compute.models.batch_norm import update_statistics
from share_compute.models.boundary import Boundaries, Expected
from share_compute.models.devices import operations
from share_compute.models.losses import loss_sum, training_loss
from share_compute.models.numbers import is_finite
from share_compute.models.stage import Stage
from share_compute.planning.cost.timings import LayerTiming
from share_compute.protocol.collectives import spread
from share_compute.protocol.membership import ShardPart
from share_compute.protocol.tree import Node, SummationTree
from share_compute.specification import TrainingSpec
from share_compute.synchronization.branch import BranchState
from share_compute.training.finiteness import NonFiniteValue, find_nonfinite
from share_compute.training.gradients import GradientBuckets
from share_compute.training.loss_scale import SKIPPED, LossScale, first_loss_scale
from share_compute.training.optimizers import (
    build_optimizer,
    learning_rates,
    optimizer_tensors,
    undecayed_parameters,
)
from share_compute.training.shares import WHOLE, OptimizerShare
from share_compute_actors.training.compiled_layers import CompiledLayers
from share_compute_actors.training.member.evaluating import Evaluates
from share_compute_actors.training.member.layer_timer import LayerTimer
from share_compute_actors.transport.collective.algorithms import GlooLinks
from share_compute_actors.transport.collective.backend import EpochGroup
from share_compute_actors.transport.collective.compressed import start_compressed

_TIMED_STEPS = 3
"""Number of timed steps. Timing starts with an epoch's second step, because the first step includes warm-up."""


class Graph(NamedTuple):
    """Both ends of the autograd graph of a microbatch that has run forward but not yet backward."""

    arrived: Tensor | None
    """Input of the shard; None at the first stage."""
    outputs: Tensor
    """Output of the shard."""


class Runner(Evaluates):
    """Runs the computations of one member on one shard.

    Args:
        stage: module of the shard, with its weights.
        training: training settings of the job.
        tree: the order in which gradients are added.
        tied: stored name of the parameter that the first and the last stage share; None if there is none.
        boundaries: requirements on activations and gradients from other stages; None if the shard receives none.
        share: the share of the optimizer's state that this member keeps.
    """

    def __init__(
        self,
        stage: Stage,
        training: TrainingSpec,
        tree: SummationTree,
        tied: str | None = None,
        boundaries: Boundaries | None = None,
        share: OptimizerShare = WHOLE,
    ) -> None:
        self.stage = stage
        self._boundaries = boundaries or Boundaries()
        self._training = training
        self._tree = tree
        self._device = next(stage.module.parameters(), torch.empty(0)).device
        self._operations = operations(self._device)
        self.parameters = stage.parameters()
        fusion = training.communication_fusion
        # Members of other stages receive the sum of the tied parameter from the first member of this stage.
        first = () if tied is None else (tied,)
        own_fusion = fusion.allreduce if share.total == 1 else fusion.reducescatter
        self.gradients = GradientBuckets(self.parameters, tree, own_fusion, share, first)
        self._weights = self.gradients.weight_buckets(fusion.allgather)
        self._codecs = bucket_codecs(training, self.gradients.layout)
        """Codec of each bucket; empty if sums are not compressed."""
        own = self.gradients.own_names
        self._statistics = {name: each for name, each in stage.statistics().items() if name in own}
        trained = [
            each for name, each in stage.trained().items() if name in own and name not in self._statistics
        ]
        undecayed = undecayed_parameters(stage.module) if trained else ()
        self.optimizer = build_optimizer(training.optimizer, trained, undecayed) if trained else None
        self.branch: BranchState | None = None
        """State between merges; None if the member belongs to no branch, or before `begin_branch`."""
        self.loss_scale: LossScale = first_loss_scale(training.precision)
        """Loss scale of the first step that is not applied yet; loaded together with the weights."""
        self.compiled: CompiledLayers | None = None
        """Compiled code of the layers; None if they compute eagerly."""
        self._last_applied: tuple[int, float | None, float | None] = (0, None, None)
        self._learning_rate = learning_rates(training)
        self._timer: LayerTimer | None = None
        self._timed_from: int | None = None
        self._tied: Parameter | None = None
        self._own_tied: Tensor | None = None
        """This stage's own sum of the tied parameter's gradient, before the other stage's sum was added."""
        self._sums_tied = tied in own
        """Whether this member has the sum of the tied parameter's gradient."""
        if tied is not None and stage.shard.is_first != stage.shard.is_last:
            self._tied = self.parameters[tied]
        self._graphs: dict[int, Graph] = {}
        self._kept: dict[tuple[str, int], Tensor] = {}
        self._losses: dict[int, Tensor] = {}
        self.targets_per_microbatch = 0
        """Number of targets of one microbatch; 0 before the first backward, and at all stages except the last."""
        self._group: EpochGroup | None = None
        self._rank = 0
        self._reductions: deque[Callable[[], None]] = deque()
        self._held: Sequence[Sequence[Node]] = ()

    def join(self, group: EpochGroup | None, rank: int) -> None:
        """Switch to this process group, and drop pending reductions of the previous group.

        Args:
            group: process group of the stage; None if the stage has no other members.
            rank: rank of this member in the group.
        """
        self._group, self._rank = group, rank
        self._reductions.clear()

    @property
    def part(self) -> ShardPart:
        """The layers of this member, and its share of the optimizer's state for them."""
        return ShardPart(self.stage.shard.start, self.stage.shard.stop, *self.gradients.share)

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the state of the optimizer and of the branch as ``{"<parameter>::<slot>": tensor}``; not copies."""
        found = {} if self.optimizer is None else optimizer_tensors(self.optimizer, self.parameters)
        return found if self.branch is None else found | self.branch.tensors()

    # -- merges ------------------------------------------------------------------------------------------------------

    def begin_branch(self, version: int) -> None:
        """Begin a round of a branch with the present weights; do nothing if the shard trains no parameter.

        Args:
            version: number of merges that the weights include.
        """
        trained = self.stage.trained()
        self.branch = BranchState(self._training, trained, version) if trained else None

    def merge(self, version: int, before: int, payloads: Mapping[str, Tensor], *, closes_round: bool) -> None:
        """Apply an update; see `BranchState.merge`.

        If a round ends and the job resets the inner optimizer, also reset the optimizer's state of changed parameters.
        """
        if self.branch is None:
            return
        changed = self.branch.merge(version, before, payloads, closes_round=closes_round)
        policy = self._training.rounds
        if closes_round and policy is not None and policy.inner_state == "reset":
            assert self.optimizer is not None
            for name in changed:
                self.optimizer.state.pop(self.parameters[name], None)

    # -- cells -------------------------------------------------------------------------------------------------------

    def forward(self, step: int, microbatch: int, entering: Tensor, *, keeps_graph: bool = True) -> None:
        """Run one microbatch forward, and keep the output for the next stage, if there is one.

        Args:
            step: number of the step, from 1.
            microbatch: id of the microbatch.
            entering: inputs of the samples at the first stage, otherwise the output of the previous stage.
            keeps_graph: whether a backward pass follows.
        """
        arrived: Tensor | None = None
        entering = entering.to(self._device)
        if not self.stage.shard.is_first:
            entering = arrived = entering.requires_grad_(self.stage.trains_before)
        if keeps_graph:
            self._merged = None
        self.stage.module.train()
        self.stage.prepare_cell(self._training.seed, step, microbatch)
        # Compiled code without a graph could give other bits than compiled code with a graph.
        without_graph = nullcontext() if self._is_compiled else torch.no_grad()
        with self._timed("forward") if keeps_graph else without_graph:
            outputs = self.stage.forward(entering)
        if keeps_graph:
            self._graphs[microbatch] = Graph(arrived, outputs)
        if not self.stage.shard.is_last:
            self._kept["activation", microbatch] = outputs.detach()

    def backward(
        self,
        microbatch: int,
        incoming: Tensor,
        *,
        adds: bool = True,
        holders: Sequence[Sequence[Node]] | None = None,
    ) -> None:
        """Run one microbatch backward, and keep the gradient for the previous stage, if there is one.

        Args:
            microbatch: id of the microbatch.
            incoming: targets at the last stage, otherwise the gradient of the output of `forward`.
            adds: whether the backward adds to the parameters' gradients; if not, it only computes the
                gradient for the previous stage.
            holders: nodes of the summation tree whose sums each member of the stage holds after this
                backward, by rank. If given, reductions begin during the backward, bucket by bucket. Give it
                only for this member's last cell of the step.
        """
        if adds:
            self.gradients.begin(microbatch)
        if holders is not None and self._group is not None:
            self._held = holders
            self.gradients.watch(self._start_reduction)
        self._run_backward(microbatch, incoming, adds=adds)
        if adds:
            self.gradients.finish()

    def _run_backward(self, microbatch: int, incoming: Tensor, *, adds: bool) -> None:
        graph = self._graphs.pop(microbatch)
        leaf = graph.arrived if graph.arrived is not None and graph.arrived.requires_grad else None
        inputs = None if adds or leaf is None else [leaf]
        if self.stage.shard.is_last:
            with self._timed("backward"):
                loss, count = training_loss(graph.outputs, incoming, self.stage.objective_of(microbatch))
                self.targets_per_microbatch = count
                self._losses[microbatch] = loss.detach()
                # All microbatches have the same number of targets, so the mean over the step needs no exchange.
                share = loss / (count * self._tree.microbatches)
                if self.loss_scale.factor != 1.0:
                    share = share * self.loss_scale.factor
                if share.requires_grad and (adds or inputs):
                    share.backward(inputs=inputs)  # type: ignore[no-untyped-call]
        elif graph.outputs.requires_grad and (adds or inputs):
            # Outputs require no gradient if no layer up to here is trained.
            with self._timed("backward"):
                gradient = incoming.to(self._device, graph.outputs.dtype)  # float32 if it was compressed
                graph.outputs.backward(gradient, inputs=inputs)  # type: ignore[no-untyped-call]
        if graph.arrived is not None:
            # The previous stage waits for a tensor even if nothing before this stage is trained.
            reached = leaf.grad if leaf is not None else None
            self._kept["gradient", microbatch] = torch.zeros(1) if reached is None else reached

    def finish_cell(self) -> None:
        """Wait until a GPU has computed the last cell, so that clocks include its work.

        If reductions have begun, do not wait: they end only when the stage's other members join.
        """
        if not self._reductions:
            self._operations.synchronize()

    def kept(self, cargo: str, microbatch: int) -> Tensor | None:
        """Return a tensor that this member keeps for another stage; None if it keeps no such tensor.

        Args:
            cargo: "activation", "gradient", or "tied" for this stage's gradient sum of the tied parameter.
            microbatch: id of the microbatch; unused for "tied".
        """
        return self._own_tied if cargo == "tied" else self._kept.get((cargo, microbatch))

    def encoded(self, cargo: str, tensor: Tensor) -> Tensor:
        """Return a kept tensor in the form that is sent: compressed, if the job compresses this boundary."""
        if cargo == "tied":
            return tensor
        shard, compression = self.stage.shard, self._training.boundary_compression
        return encoded(tensor, compression.codec(shard.stop if cargo == "activation" else shard.start))

    # -- checks -------------------------------------------------------------------------------------------------------

    def expected(self, cargo: str) -> Expected | None:
        """Return the requirements on a tensor from another stage; None if this stage expects no such tensor.

        Args:
            cargo: kind of the tensor: "activation", "gradient" or "tied".
        """
        match cargo:
            case "activation":
                return self._boundaries.activation
            case "gradient":
                return self._boundaries.gradient
            case "tied" if self._tied is not None:
                checks = not self.loss_scale.is_dynamic
                return Expected(tuple(self._tied.shape), frozenset({self._tied.dtype}), checks)
            case _:
                return None

    def is_cell_finite(self, kind: Literal["F", "B"], microbatch: int) -> bool:
        """Return whether a cell's result is finite.

        Always return True with a dynamic loss scale, because overflow then only skips the step.
        """
        if self.loss_scale.is_dynamic:
            return True
        if kind == "F":
            graph, kept = self._graphs.get(microbatch), self.kept("activation", microbatch)
            outputs = graph.outputs.detach() if graph is not None else kept
            return outputs is None or is_finite(outputs)
        made = (self._losses.get(microbatch), self.kept("gradient", microbatch))
        return all(is_finite(each) for each in made if each is not None) and self.gradients.is_finite

    def spoil_cell(self, kind: Literal["F", "B"], microbatch: int, value: float) -> None:
        """Overwrite the result of a cell with a value; for tests."""
        made = [self.kept("activation" if kind == "F" else "gradient", microbatch)]
        if kind == "F":
            graph = self._graphs.get(microbatch)
            made.append(graph.outputs if graph is not None else None)
        else:
            made += [part for bucket in range(len(self.gradients)) for part in self.gradients.parts(bucket)]
        for tensor in made:
            if tensor is not None:
                tensor.data.fill_(value)

    def deviate(self) -> None:
        """Change the reduced gradient, so that it differs from the gradient of the stage's other members; for tests."""
        gradient = next(each.grad for each in self.parameters.values() if each.grad is not None)
        gradient.view(-1)[0] += 1.0

    # -- gradients ---------------------------------------------------------------------------------------------------

    def _start_reduction(self, bucket: int) -> None:
        assert self._group is not None
        parts, result = self.gradients.parts(bucket), self.gradients.result(bucket)
        try:
            if self.gradients.share.total > 1:
                shares = self.gradients.shares[bucket]
                wait = self._group.start_reduce_scatter(parts, self._held, self._tree, shares, result)
            elif self._codecs:
                wait = self._group.start_compressed_sum(
                    parts, self._held, self._tree, self._codecs[bucket], result
                )
            else:
                wait = self._group.start_tree_sum(parts, self._held, self._tree, out=result)
        except ContributorLost as failure:  # raised later by `reduce`, because a backward may run now
            wait = partial(_raise, failure)
        self._reductions.append(wait)

    @property
    def is_reducing(self) -> bool:
        """Whether reductions have begun, which may still overwrite the sums that this member holds."""
        return bool(self._reductions)

    def reduce(self, holders: Sequence[Sequence[Node]]) -> None:
        """Sum the gradients of the stage's members; at the last stage, also share the losses among them.

        A member with a share of the optimizer's state gets the sum of the gradients of its share.

        Args:
            holders: nodes of the summation tree whose sums each member of the stage holds, by rank; not used
                if the stage has no other members.

        Raises:
            ContributorLost: a member died or became unresponsive, or a halt aborted the process group.
                Afterwards, the sums that this member held are unusable.
        """
        if self._group is not None:
            self._held = holders
            for bucket in range(len(self._reductions), len(self.gradients)):
                self._start_reduction(bucket)
            while self._reductions:
                self._reductions.popleft()()
            if self.stage.shard.is_last:
                self._share_losses()
        elif self._codecs:
            alone, held = GlooLinks(None, 0, 1), [self.gradients.held]
            for bucket, codec in enumerate(self._codecs):
                parts, result = self.gradients.parts(bucket), self.gradients.result(bucket)
                start_compressed(alone, parts, held, self._tree, codec, result, spread("sharded", (0,)))()
        self._finish_on_device()
        self.gradients.settle()
        self._keep_tied()

    def gather(self) -> None:
        """Exchange the updated weights with the stage's other members, each of which updated its share.

        Raises:
            ContributorLost: a member died or became unresponsive, or a halt aborted the process group. Afterwards,
                weights of other shares may lack an update.
        """
        assert self._group is not None
        for bucket in range(len(self._weights)):
            flat = self._weights.packed(bucket)
            try:
                self._group.start_allgather(flat, self._weights.shares[bucket])()
            except ContributorLost:
                self.gradients.drop_spare()
                raise
            self._weights.unpack(bucket, flat)

    def copy(self, source: int, *, has_it: bool) -> None:
        """Take part in copying the gradient sum from one member to the members of the stage that lack it.

        At the last stage, the losses are copied, too.

        Args:
            source: rank of the member that has the sum.
            has_it: whether this member already has the sum. If so, its sum stays valid, even after an error.

        Raises:
            ContributorLost: a member died or became unresponsive, or a halt aborted the process group.
        """
        assert self._group is not None
        if has_it:
            self._restore_tied()  # only this stage's sum is copied, not the other stage's
        else:
            self.gradients.reset()
        options = BroadcastOptions()
        options.root_rank = source
        for bucket in range(len(self.gradients)):
            result = self.gradients.result(bucket)
            is_witness = has_it and self._rank != source
            self._group.broadcast([torch.empty_like(result) if is_witness else result], options)
        if self.stage.shard.is_last:
            self._share_losses(options)
        self._finish_on_device()
        if not has_it:
            self.gradients.settle()
            self._keep_tied()

    def _finish_on_device(self) -> None:
        """Wait until all operations on a GPU are complete, and check that none of the process group has failed.

        This is needed because earlier waits return when the operation is enqueued on the GPU.
        """
        self._operations.synchronize()
        if self._group is not None and self._operations.facts.collectives == "nccl":
            self._group.require_whole()

    def _share_losses(self, copying: BroadcastOptions | None = None) -> None:
        assert self._group is not None
        known = torch.zeros(self._tree.microbatches, dtype=torch.float64, device=self._group.device)
        for microbatch, loss in self._losses.items():
            known[microbatch] = float(loss)
        if copying is None:
            # Exactly one member has the loss of a microbatch. Other members add 0.0, so the sum is exact.
            self._group.start_allreduce(known)()
        else:
            self._group.broadcast([known], copying)
        self._losses = dict(enumerate(known))

    def _keep_tied(self) -> None:
        if self._tied is not None and self._sums_tied and self._own_tied is None:
            assert self._tied.grad is not None
            self._own_tied = self._tied.grad.clone()

    def _restore_tied(self) -> None:
        if self._tied is not None and self._own_tied is not None:
            assert self._tied.grad is not None
            self._tied.grad.copy_(self._own_tied)

    def tie(self, theirs: Tensor) -> None:
        """Add the other stage's sum to the tied parameter's gradient; repeated calls add it only once.

        Do nothing if the parameter belongs to another member's share.
        """
        if not self._sums_tied:
            return
        assert self._tied is not None
        assert self._tied.grad is not None
        self._restore_tied()
        self._tied.grad.add_(theirs.to(self._device))  # a + b = b + a: both stages get the same bits

    def squared_norms(self) -> dict[str, float]:
        """Return the squared norm of each gradient for the optimizer, without the loss scale, by stored name."""
        factor, squares = self.loss_scale.factor, self.gradients.squared_norms()
        return {name: square / factor**2 for name, square in squares.items() if name not in self._statistics}

    def losses(self) -> dict[int, float]:
        """Return the summed loss of each microbatch, times the weight of its task; empty except at the last stage."""
        return {microbatch: float(loss) for microbatch, loss in self._losses.items()}

    def apply(self, step: int, scale: float, rate: float | None = None) -> None:
        """Update the weights, and drop the results of the step.

        Args:
            step: number of the step.
            scale: factor of the gradient, after division by the loss scale; `SKIPPED` leaves the weights unchanged.
            rate: learning rate; None if it depends only on the step.

        Raises:
            UserError: no loss scale makes the gradients finite.
        """
        if scale != SKIPPED:  # before the gradients are scaled
            update_statistics(self.parameters, self._statistics, self._tree.microbatches)
        if self.optimizer is not None and scale != SKIPPED:
            total = scale / self.loss_scale.factor
            if total != 1.0:
                self.gradients.scale(total)
            for group in self.optimizer.param_groups:
                group["lr"] = self._learning_rate(step) if rate is None else rate
            self.optimizer.step()
            if self.branch is not None:
                self.branch.forget_contribution()
        self.loss_scale = self.loss_scale.after(scale, step)
        self._last_applied = step, scale, rate
        self.discard()

    def update_of(self, step: int) -> tuple[float | None, float | None]:
        """Return the update factor and the given learning rate of ``step``; both None unless it was applied last."""
        return self._last_applied[1:] if self._last_applied[0] == step else (None, None)

    def discard(self) -> None:
        """Drop all results of the open step: graphs, kept tensors, losses and gradients. The weights stay."""
        self._graphs.clear()
        self._kept.clear()
        self._losses.clear()
        self._reductions.clear()
        self._own_tied = None
        self.gradients.reset()

    def spoil(self) -> None:
        """Drop the gradient sums and losses after a failed reduction; tensors for other stages stay."""
        self._reductions.clear()
        self._losses.clear()  # members that recompute these microbatches report new losses
        self._own_tied = None
        self.gradients.spoil()

    # -- timing ------------------------------------------------------------------------------------------------------

    def start_timing(self, step: int) -> None:
        """Time the layers from this step on, until `layer_timings` returns their times."""
        if self._timer is not None:
            self._timer.finish()
        self._timed_from, self._timer = step, LayerTimer(self.stage.layers, self._device)

    def layer_timings(self, step: int) -> dict[int, LayerTiming] | None:
        """End the timing after the last timed step, and return each layer's mean times by layer index.

        Return None after any other step.
        """
        if self._timer is None or self._timed_from is None:
            return None
        if step < min(self._timed_from + _TIMED_STEPS - 1, self._training.steps):
            return None
        timer, self._timer = self._timer, None
        return timer.finish()

    @property
    def _is_compiled(self) -> bool:
        return self.compiled is not None and self.compiled.is_on

    def _timed(self, way: Literal["forward", "backward"]) -> AbstractContextManager[None]:
        return self._timer.timing(way) if self._timer is not None else nullcontext()

    # -- numbers that are not finite ---------------------------------------------------------------------------------

    def find_nonfinite(
        self, step: int, place: int, microbatch: int, entering: Tensor, incoming: Tensor | None
    ) -> NonFiniteValue | None:
        """Run a microbatch again, and return where its numbers stop being finite in this shard.

        Return None if they stay finite, or if they are not finite already in ``entering``.

        Args:
            step: number of the open step; the weights lack its update.
            place: index of this member's stage.
            microbatch: id of the microbatch.
            entering: samples at the first stage, otherwise the output of the previous stage.
            incoming: targets at the last stage, otherwise the gradient of the shard's output. If it is
                None (it never arrived) or not finite, only the forward pass is checked.
        """
        self.stage.module.train()
        self.stage.prepare_cell(self._training.seed, step, microbatch)
        known = torch.tensor(torch.nan) if incoming is None else incoming
        gradient: Tensor | Callable[[Tensor], Tensor] = known.to(self._device)
        if self.stage.shard.is_last and incoming is not None:
            gradient = partial(loss_sum, targets=incoming, objective=self.stage.objective)
        with nullcontext() if self.compiled is None else self.compiled.eager():
            return find_nonfinite(self.stage, place, microbatch, entering.to(self._device), gradient)


def _raise(failure: ContributorLost) -> None:
    raise failure
