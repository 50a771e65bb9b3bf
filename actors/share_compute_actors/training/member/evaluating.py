"""Evaluates a stage: runs microbatches forward only, and measures the outputs of the last stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import Parameter

from share_compute.models.losses import loss_sum, selected, similarities, target_count
from share_compute.models.objective import Objective
from share_compute.models.stage import Stage
from share_compute.training.metrics import TOP
from share_compute_actors.messages import NUMBER, EvaluationResult


def evaluated(outputs: Tensor, targets: Tensor, objective: Objective, most_outputs: int) -> EvaluationResult:
    """Return the loss and the predictions of a microbatch.

    Args:
        outputs: outputs of the model, ``[batch, ...]``.
        targets: targets of the samples; see `loss_sum`.
        objective: task and loss.
        most_outputs: maximum number of a classifier's outputs that are returned for each sample; more are left out.
    """
    loss, count = float(loss_sum(outputs, targets, objective)), target_count(targets, objective)
    if objective.task == "language_model":
        return EvaluationResult(loss, count)
    if objective.task == "embedding":
        nearest = similarities(selected(outputs, targets, objective)[0], objective).argmax(1)
        return EvaluationResult(loss, count, predicted=_packed(nearest), wanted=_packed(torch.arange(count)))
    outputs, targets = selected(outputs, targets, objective)
    scores, wanted = outputs.float().cpu(), _packed(targets)
    if not objective.has_classes:
        return EvaluationResult(loss, count, predicted=_packed(scores), wanted=wanted)
    classes = scores.shape[1]
    predicted = (scores[:, 0] > 0).long() if classes == 1 else scores.argmax(1)
    best = scores.topk(min(TOP, classes)).indices
    return EvaluationResult(
        loss,
        count,
        in_top_5=int((best == targets.cpu()[:, None]).any(1).sum()),
        predicted=_packed(predicted),
        wanted=wanted,
        scores=_packed(scores) if classes <= most_outputs else b"",
    )


class Evaluates:
    """Mixin of a runner that computes evaluations, with the trained weights or with merged ones."""

    stage: Stage
    parameters: dict[str, Parameter]
    _device: torch.device
    _merged: tuple[int, dict[str, Tensor]] | None = None
    """Step and weights of `show_merged`."""

    def show_merged(self, step: int, weights: dict[str, Tensor]) -> None:
        """Compute evaluations with other weights until the next step is trained.

        Args:
            step: number of the last step that was applied.
            weights: the merged weights of all branches, by stored name.
        """
        self._merged = (
            step,
            {name: value.to(self._device, self.parameters[name].dtype) for name, value in weights.items()},
        )

    @property
    def shown_step(self) -> int | None:
        """Step after which `show_merged` was called; None if evaluations use the trained weights."""
        return None if self._merged is None else self._merged[0]

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Set the parameters to the weights for evaluations inside the context."""
        self.stage.module.eval()
        self._exchange_merged()
        try:
            yield
        finally:
            self._exchange_merged()

    def _exchange_merged(self) -> None:
        for name, value in self._merged[1].items() if self._merged is not None else ():
            own = self.parameters[name].detach()  # other ranks may share its memory
            for target, source in ((own, value.clone()), (value, own.clone())):
                target.copy_(source)

    @torch.no_grad()
    def evaluate(
        self,
        own: Sequence[int],
        entering: Callable[[int], Tensor],
        leaving: Callable[[int, Tensor], None],
        targets: Mapping[int, Tensor],
        most_outputs: int,
    ) -> dict[int, EvaluationResult]:
        """Run microbatches forward only; return their results at the last stage, and nothing at other stages.

        Args:
            own: ids of the microbatches, in order.
            entering: returns the input of a microbatch: samples at the first stage, otherwise the output of
                the previous stage.
            leaving: receives each microbatch and its output, except at the last stage.
            targets: targets by microbatch; used only at the last stage.
            most_outputs: maximum number of a classifier's outputs that are returned for each sample; more are left out.
        """
        found: dict[int, EvaluationResult] = {}
        for microbatch in own:
            arrived = entering(microbatch).to(self._device)
            with self._evaluating():
                outputs = self.stage.forward(arrived)
            if not self.stage.shard.is_last:
                leaving(microbatch, outputs)
                continue
            found[microbatch] = evaluated(outputs, targets[microbatch], self.stage.objective, most_outputs)
        return found

    @torch.no_grad()
    def predict(self, entering: Tensor) -> Tensor:
        """Return the shard's output for samples, or for the output of the previous stage, without dropout."""
        with self._evaluating():
            return self.stage.forward(entering.to(self._device))


def _packed(values: Tensor) -> bytes:
    return values.detach().cpu().reshape(-1).numpy().astype(NUMBER).tobytes()
