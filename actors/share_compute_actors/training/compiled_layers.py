"""The layers of a training stage, which compute with compiled code if the job has chosen it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from share_compute.models.blocks import Heads
from share_compute.models.cells import Forward, replace_inner
from share_compute.models.stage import Stage
from share_compute_actors.compiled.artifacts import Artifacts
from share_compute_actors.compiled.layers import SwitchedLayers


@dataclass(frozen=True, slots=True)
class TrainingCase:
    """One microbatch forward and backward."""

    key: tuple[int, int, int]
    """Seed, step and id of the microbatch."""
    inputs: Tensor


class CompiledLayers(SwitchedLayers[TrainingCase]):
    """The layers of a stage, which compute with compiled code while `is_on` is true.

    Only training passes are compiled: they need gradients, and the same code then recomputes a microbatch after a loss.
    Validations and sample texts are eager, because their shapes vary.

    Args:
        stage: the stage, on the CPU.
        name: name of the machine, for errors.
        artifacts: compiled code of earlier runs.
    """

    def __init__(self, stage: Stage, name: str, artifacts: Artifacts) -> None:
        self._stage = stage
        # A layer without children has a single operation, which cannot be fused with others.
        layers = [part for layer in stage.layers.values() for part in _parts(layer) if any(part.children())]
        super().__init__(layers, name, artifacts)

    def _replace(self, layer: nn.Module) -> None:
        def replacement(eager: Forward) -> Forward:
            return self._switched(layer, eager, torch.compile(eager, dynamic=False, fullgraph=True))

        replace_inner(layer, replacement)

    def _applies(self, layer: nn.Module) -> bool:
        return layer.training and torch.is_grad_enabled()

    def _results(self, case: TrainingCase) -> list[Tensor]:
        """Return the output and the gradients of a microbatch; the parameters' own gradients do not change."""
        stage = self._stage
        stage.module.train()
        stage.prepare_cell(*case.key)
        leaf = case.inputs.detach()
        if leaf.is_floating_point() and stage.trains_before:
            leaf.requires_grad_()
        outputs = stage.forward(leaf)
        wanted: list[Tensor] = [each for each in stage.parameters().values() if each.requires_grad]
        wanted += [leaf] if leaf.requires_grad else []
        found: Sequence[Tensor | None] = ()
        if outputs.requires_grad and wanted:
            gradient = torch.full_like(outputs, 1 / outputs.numel())
            with self._translated():  # the backward pass is compiled when it first runs
                found = torch.autograd.grad(outputs, wanted, gradient, allow_unused=True)
        return [outputs.detach(), *(each for each in found if each is not None)]


def _parts(layer: nn.Module) -> Sequence[nn.Module]:
    """Return the modules to compile in a layer: the layer, or the head of each task."""
    return tuple(layer.chains) if isinstance(layer, Heads) else (layer,)
