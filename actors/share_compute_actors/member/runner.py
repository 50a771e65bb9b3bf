"""Computes one member's cells, sums its gradients with its pool, and updates its weights.

Knows the stage, the gradients and the group of the pool, but not the protocol: `Engine` tells it what to do.
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

from share_compute.errors import ContributorLost
from share_compute.models.blueprint import Stage, loss_sum
from share_compute.models.boundary import Boundaries, Expected
from share_compute.planning.timings import LayerTiming
from share_compute.protocol.tree import Node, SummationTree
from share_compute.specification import TrainingSpec
from share_compute.training.finiteness import Finding, find_nonfinite
from share_compute.training.gradients import GradientBuckets
from share_compute.training.loss_scale import SKIPPED, LossScale, first_loss_scale
from share_compute.training.numbers import is_finite
from share_compute.training.optimizers import build_optimizer, learning_rates, undecayed_parameters
from share_compute_actors.collective.backend import EpochGroup
from share_compute_actors.member.layer_timer import LayerTimer
from share_compute_actors.messages import EvaluationResult

_TIMED_STEPS = 3
"""Steps whose layers are timed, after the first one, which also warms up."""


class Graph(NamedTuple):
    """A microbatch that went forward and not yet backward."""

    arrived: Tensor | None
    """None at the first pool."""
    outputs: Tensor


class Runner:
    """One member at work on one shard.

    Args:
        stage: its shard, with weights.
        training: how the job trains.
        tree: the order in which gradients are added.
        tied: stored name of the parameter that another pool holds too, if there is one.
        boundaries: what may arrive from other stages.
    """

    def __init__(
        self,
        stage: Stage,
        training: TrainingSpec,
        tree: SummationTree,
        tied: str | None = None,
        boundaries: Boundaries | None = None,
    ) -> None:
        self.stage = stage
        self._boundaries = boundaries or Boundaries()
        self._training = training
        self._tree = tree
        self._device = next(stage.module.parameters(), torch.empty(0)).device
        self.parameters = stage.parameters()
        self.gradients = GradientBuckets(self.parameters, tree, training.gradient_fusion)
        trained = [parameter for parameter in self.parameters.values() if parameter.requires_grad]
        self.optimizer = (
            build_optimizer(training.optimizer, trained, undecayed_parameters(stage.module))
            if trained
            else None
        )
        self.loss_scale: LossScale = first_loss_scale(training.precision)
        """Of the next step; who continues is told where it stands."""
        self._last_applied: tuple[int, float] | None = None
        self._learning_rate = learning_rates(training)
        self._timer: LayerTimer | None = None
        self._timed_from: int | None = None
        self._tied: Parameter | None = None
        self._own_tied: Tensor | None = None
        """This pool's own sum of the tied parameter's gradient, before the other's was added."""
        if tied is not None and stage.shard.is_first != stage.shard.is_last:
            self._tied = self.parameters[tied]
        self._graphs: dict[int, Graph] = {}
        self._kept: dict[tuple[str, int], Tensor] = {}
        self._losses: dict[int, Tensor] = {}
        self.targets_per_microbatch = 0
        """0 but at the last pool."""
        self._group: EpochGroup | None = None
        self._rank = 0
        self._reductions: deque[Callable[[], None]] = deque()
        self._held: Sequence[Sequence[Node]] = ()

    def join(self, group: EpochGroup | None, rank: int) -> None:
        """Work with these members of the pool from now on; None when there are no others."""
        self._group, self._rank = group, rank
        self._reductions.clear()

    # -- cells -------------------------------------------------------------------------------------------------------

    def forward(self, step: int, microbatch: int, entering: Tensor, *, keeps_graph: bool = True) -> None:
        """Run one microbatch forward, and keep what the next pool needs.

        Args:
            step: counted from 1.
            microbatch: its id.
            entering: samples at the first pool, else what the pool before made.
            keeps_graph: whether a backward follows.
        """
        arrived: Tensor | None = None
        entering = entering.to(self._device)
        if not self.stage.shard.is_first:
            entering = arrived = entering.requires_grad_(self.stage.trains_before)
        self.stage.module.train()
        self.stage.prepare_cell(self._training.seed, step, microbatch)
        with self._timed("forward") if keeps_graph else torch.no_grad():
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
        """Run one microbatch backward.

        Args:
            microbatch: its id.
            incoming: targets at the last pool, else the gradient of what `forward` returned.
            adds: whether it adds to the gradient; else it only serves the pool before.
            holders: when nothing is added afterwards: which sums each member of the pool will hold. Reductions begin
                inside, bucket by bucket.
        """
        graph = self._graphs.pop(microbatch)
        if adds:
            self.gradients.begin(microbatch)
        if holders is not None and self._group is not None:
            self._held = holders
            self.gradients.watch(self._start_reduction)
        leaf = graph.arrived if graph.arrived is not None and graph.arrived.requires_grad else None
        inputs = None if adds or leaf is None else [leaf]
        if self.stage.shard.is_last:
            with self._timed("backward"):
                loss = loss_sum(graph.outputs, incoming)
                self.targets_per_microbatch = incoming.numel()
                self._losses[microbatch] = loss.detach()
                # Every microbatch has as many targets as every other, so the mean over the step needs no exchange.
                share = loss / (incoming.numel() * self._tree.microbatches)
                if self.loss_scale.factor != 1.0:
                    share = share * self.loss_scale.factor
                if share.requires_grad and (adds or inputs):
                    share.backward(inputs=inputs)  # type: ignore[no-untyped-call]
        elif graph.outputs.requires_grad and (adds or inputs):  # not where nothing is trained so far
            with self._timed("backward"):
                graph.outputs.backward(incoming.to(self._device), inputs=inputs)  # type: ignore[no-untyped-call]
        if adds:
            self.gradients.finish()
        if graph.arrived is not None:
            # The pool before waits for something, also where nothing before this one is trained.
            reached = leaf.grad if leaf is not None else None
            self._kept["gradient", microbatch] = torch.zeros(1) if reached is None else reached

    def kept(self, cargo: str, microbatch: int) -> Tensor | None:
        """Return what a neighbour pool needs: an activation, a gradient or the tied sum; None if there is none."""
        return self._own_tied if cargo == "tied" else self._kept.get((cargo, microbatch))

    # -- what is right ------------------------------------------------------------------------------------------------

    def expected(self, cargo: str) -> Expected | None:
        """Return what a tensor of this kind must be; None where the stage waits for none."""
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
        """Return whether what a cell has just made is finite; what is not in float16 only moves the loss scale."""
        if self.loss_scale.is_dynamic:
            return True
        if kind == "F":
            graph, kept = self._graphs.get(microbatch), self.kept("activation", microbatch)
            outputs = graph.outputs.detach() if graph is not None else kept
            return outputs is None or is_finite(outputs)
        made = (self._losses.get(microbatch), self.kept("gradient", microbatch))
        return all(is_finite(each) for each in made if each is not None) and self.gradients.is_finite

    def spoil_cell(self, kind: Literal["F", "B"], microbatch: int, value: float) -> None:
        """Overwrite what a cell has just made; for tests."""
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
        """Let the reduced gradient be another than that of the stage's other members; for tests."""
        gradient = next(each.grad for each in self.parameters.values() if each.grad is not None)
        gradient.view(-1)[0] += 1.0

    # -- gradients ---------------------------------------------------------------------------------------------------

    def _start_reduction(self, bucket: int) -> None:
        assert self._group is not None
        try:
            wait = self._group.start_tree_sum(
                self.gradients.parts(bucket), self._held, self._tree, out=self.gradients.result(bucket)
            )
        except ContributorLost as failure:  # a backward may be under way: whoever waits for the sum is told
            wait = partial(_raise, failure)
        self._reductions.append(wait)

    @property
    def is_reducing(self) -> bool:
        """Whether reductions are under way, which use up what is held."""
        return bool(self._reductions)

    def reduce(self, holders: Sequence[Sequence[Node]]) -> None:
        """Complete the pool's gradient, and let all its members know all losses.

        Args:
            holders: which sums each member of the pool holds, by rank.

        Raises:
            ContributorLost: somebody died or fell silent; what was held is spoilt.
        """
        if self._group is not None:
            self._held = holders
            for bucket in range(len(self._reductions), len(self.gradients)):
                self._start_reduction(bucket)
            while self._reductions:
                self._reductions.popleft()()
            if self.stage.shard.is_last:
                self._share_losses()
        self._finish_on_device()
        self.gradients.settle()
        self._keep_tied()

    def copy(self, source: int, *, has_it: bool) -> None:
        """Let all members of the pool have the gradient of one that has it.

        Args:
            source: its rank.
            has_it: whether this member has it, too; then nothing changes here, whatever happens.

        Raises:
            ContributorLost: somebody died or fell silent.
        """
        assert self._group is not None
        if has_it:
            self._restore_tied()  # what travels is this pool's own sum
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
        """See sums through, and that nobody ended them: on a GPU, who has waited for one knows only that it began."""
        if self._device.type == "cuda" and self._group is not None:
            torch.cuda.synchronize(self._device)
            self._group.require_whole()

    def _share_losses(self, copying: BroadcastOptions | None = None) -> None:
        assert self._group is not None
        known = torch.zeros(self._tree.microbatches, dtype=torch.float64, device=self._device)
        for microbatch, loss in self._losses.items():
            known[microbatch] = float(loss)
        if copying is None:
            self._group.start_allreduce(known)()  # each is known to one member: sums with zeros are exact
        else:
            self._group.broadcast([known], copying)
        self._losses = dict(enumerate(known))

    def _keep_tied(self) -> None:
        if self._tied is not None and self._own_tied is None:
            assert self._tied.grad is not None
            self._own_tied = self._tied.grad.clone()

    def _restore_tied(self) -> None:
        if self._tied is not None and self._own_tied is not None:
            assert self._tied.grad is not None
            self._tied.grad.copy_(self._own_tied)

    def tie(self, theirs: Tensor) -> None:
        """Add the other pool's sum to the gradient of the parameter that both hold; may be repeated."""
        assert self._tied is not None
        assert self._tied.grad is not None
        self._restore_tied()
        self._tied.grad.add_(theirs.to(self._device))  # a + b = b + a: both pools get the same bits

    def squared_norms(self) -> dict[str, float]:
        """Return the sum of squares of the gradient of each parameter, without the loss scale, by stored name."""
        factor = self.loss_scale.factor
        return {name: square / factor**2 for name, square in self.gradients.squared_norms().items()}

    def losses(self) -> dict[int, float]:
        """Return the summed loss of each microbatch; only the last pool knows them."""
        return {microbatch: float(loss) for microbatch, loss in self._losses.items()}

    def apply(self, step: int, scale: float) -> None:
        """Update the weights with the gradient times ``scale``, unless it is `SKIPPED`, and forget the step.

        Raises:
            UserError: no loss scale makes the gradients finite.
        """
        if self.optimizer is not None and scale != SKIPPED:
            total = scale / self.loss_scale.factor
            if total != 1.0:
                self.gradients.scale(total)
            for group in self.optimizer.param_groups:
                group["lr"] = self._learning_rate(step)
            self.optimizer.step()
        self.loss_scale = self.loss_scale.after(scale, step)
        self._last_applied = step, scale
        self.discard()

    def scale_of(self, step: int) -> float | None:
        """Return what the gradient of the last step that was applied was multiplied by; None of any other."""
        return self._last_applied[1] if self._last_applied and self._last_applied[0] == step else None

    def discard(self) -> None:
        """Forget everything of the open step but the weights."""
        self._graphs.clear()
        self._kept.clear()
        self._losses.clear()
        self._reductions.clear()
        self._own_tied = None
        self.gradients.reset()

    def spoil(self) -> None:
        """Forget the sums, which a reduction without result left half done; what went over boundaries stays."""
        self._reductions.clear()
        self._losses.clear()  # who computes those microbatches again, here or elsewhere, knows them anew
        self._own_tied = None
        self.gradients.spoil()

    # -- timing ------------------------------------------------------------------------------------------------------

    def start_timing(self, step: int) -> None:
        """Time layers from this step on, for a few steps."""
        if self._timer is not None:
            self._timer.finish()
        self._timed_from, self._timer = step, LayerTimer(self.stage.layers, self._device)

    def layer_timings(self, step: int) -> dict[int, LayerTiming] | None:
        """After the last timed step, return what was timed."""
        if self._timer is None or self._timed_from is None:
            return None
        if step < min(self._timed_from + _TIMED_STEPS - 1, self._training.steps):
            return None
        timer, self._timer = self._timer, None
        return timer.finish()

    def _timed(self, way: Literal["forward", "backward"]) -> AbstractContextManager[None]:
        return self._timer.timing(way) if self._timer is not None else nullcontext()

    # -- evaluation --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(
        self,
        own: Sequence[int],
        entering: Callable[[int], Tensor],
        leaving: Callable[[int, Tensor], None],
        targets: Mapping[int, Tensor],
    ) -> EvaluationResult | None:
        """Run microbatches forward only; the last pool returns their loss, the others None.

        Args:
            own: microbatches, in order.
            entering: gives samples, or what the pool before returned.
            leaving: takes what the next pool needs.
            targets: the last pool's.
        """
        self.stage.module.eval()
        total, count, correct = 0.0, 0, 0
        for microbatch in own:
            outputs = self.stage.forward(entering(microbatch).to(self._device))
            if not self.stage.shard.is_last:
                leaving(microbatch, outputs)
                continue
            wanted = targets[microbatch]
            total += float(loss_sum(outputs, wanted))
            count += wanted.numel()
            correct += int((outputs.argmax(-1).to(wanted.device) == wanted).sum())
        return EvaluationResult(total, count, correct) if self.stage.shard.is_last else None

    @torch.no_grad()
    def predict(self, entering: Tensor) -> Tensor:
        """Return what the stage makes of samples, or of what the pool before returned, without dropout."""
        self.stage.module.eval()
        return self.stage.forward(entering.to(self._device))

    def find_nonfinite(
        self, step: int, pool: int, microbatch: int, entering: Tensor, incoming: Tensor | None
    ) -> Finding | None:
        """Run a microbatch again, and return where its numbers stop being finite.

        Args:
            step: open; the weights are those before its update.
            pool: place of this member's.
            microbatch: its id.
            entering: samples at the first pool, else what the pool before made.
            incoming: targets at the last pool, else the gradient of what the stage returns; None where it never came:
                then only the forward is looked at.
        """
        self.stage.module.train()
        self.stage.prepare_cell(self._training.seed, step, microbatch)
        known = torch.tensor(torch.nan) if incoming is None else incoming
        gradient: Tensor | Callable[[Tensor], Tensor] = known.to(self._device)
        if self.stage.shard.is_last and incoming is not None:
            gradient = partial(loss_sum, targets=incoming)
        return find_nonfinite(self.stage, pool, microbatch, entering.to(self._device), gradient)


def _raise(failure: ContributorLost) -> None:
    raise failure
