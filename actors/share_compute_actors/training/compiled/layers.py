"""Compiles the layers of a stage with ``torch.compile``, and measures whether compiled layers are faster.

Each layer is compiled by itself, so a layer computes the same bits in each stage that holds it. Compiled and eager
layers may differ in the last bits. So all members of a job must compute in the same way; see
docs/decisions/0036-one-choice-of-compiled-code-per-job.md.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import torch
from pydantic import Field
from torch import Tensor, nn

from share_compute.errors import CompilerFailed
from share_compute.models.blocks import Heads
from share_compute.models.cells import Forward, replace_inner
from share_compute.models.stage import Stage
from share_compute_actors.training.compiled.artifacts import Artifacts
from share_compute_actors.wire import Schema, Seconds

_PositiveSeconds: TypeAlias = Annotated[float, Field(ge=1e-9, le=1e9)]

LEAST_GAIN = 1.05
"""Least ratio of the eager time to the compiled time with which a job computes with compiled code.

A smaller gain is within the noise of the measurement."""
_MOST_REPEATS = 20
_REPEATED_S = 3.0
"""Time limit for the repeated measurements of one microbatch, in seconds."""
_TOLERANCE = 1e-2
"""Largest difference of compiled and eager results, relative to the largest number of the eager result."""
_MOST_WORDS = 300


@dataclass(frozen=True, slots=True)
class CompiledTimes:
    """Times of one microbatch forward and backward through a stage, in seconds."""

    eager_s: _PositiveSeconds
    compiled_s: _PositiveSeconds
    warm_up_s: Seconds
    """Time until the first compiled microbatch was computed."""


COMPILED_TIMES: Schema[CompiledTimes] = Schema(CompiledTimes)


class CompiledLayers:
    """The layers of a stage, which compute with compiled code while `is_on` is true.

    Only training passes are compiled: they need gradients, so the same code computes a microbatch again after a loss.
    Validations and sample texts are eager, because their shapes vary.

    Args:
        stage: the stage, on the CPU.
        name: name of the machine, for errors.
        artifacts: compiled code of earlier runs.
    """

    def __init__(self, stage: Stage, name: str, artifacts: Artifacts) -> None:
        self._stage = stage
        self._name = name
        self._artifacts = artifacts
        self.is_on = False
        # A layer without children has a single operation, which cannot be fused with others.
        layers = [part for layer in stage.layers.values() for part in _parts(layer) if any(part.children())]
        _configure(len(layers))
        for layer in layers:
            replace_inner(layer, functools.partial(self._switched, layer))

    def _switched(self, layer: nn.Module, eager: Forward) -> Forward:
        compiled = torch.compile(eager, dynamic=False, fullgraph=True)

        @functools.wraps(eager)
        def forward(*arguments: Any, **options: Any) -> Any:
            if not (self.is_on and layer.training and torch.is_grad_enabled()):
                return eager(*arguments, **options)
            with self._translated():
                return compiled(*arguments, **options)

        return forward

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Raise errors of the compiler as `CompilerFailed`."""
        try:
            yield
        except Exception as failure:
            if not _is_of_compiler(failure):
                raise
            # The first line only names the backend, if the backend failed.
            lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
            reason = next((line for line in lines if not line.startswith("backend=")), type(failure).__name__)
            raise CompilerFailed(
                f"the compiler failed on {self._name}: {reason[:_MOST_WORDS]}", machine=self._name
            ) from failure

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Return a context in which the layers compute eagerly."""
        was_on, self.is_on = self.is_on, False
        try:
            yield
        finally:
            self.is_on = was_on

    def warm_up(self, cells: Sequence[tuple[int, Tensor]], key: tuple[int, int]) -> float:
        """Compile the layers for some microbatches, and return the time that this took, in seconds.

        Args:
            cells: id and input of each microbatch; one for each task.
            key: seed and step of the microbatches.

        Raises:
            CompilerFailed: the compiler failed.
        """
        began_s = time.perf_counter()
        self.is_on = True
        with self._artifacts.used():
            for microbatch, inputs in cells:
                self._results(microbatch, inputs, key)
        return time.perf_counter() - began_s

    def compare(self, cells: Sequence[tuple[int, Tensor]], key: tuple[int, int]) -> CompiledTimes:
        """Compile the layers, and compare their results and times with those of eager layers; leave `is_on` true.

        Args:
            cells: id and input of each microbatch; one for each task.
            key: seed and step of the microbatches.

        Raises:
            CompilerFailed: the compiler failed, or compiled layers compute other numbers.
        """
        first = cells[0]
        with self.eager():
            known = [self._results(*cell, key) for cell in cells]
        warm_up_s = self.warm_up(cells, key)
        for cell, wanted in zip(cells, known, strict=True):
            if not all(map(_are_close, wanted, self._results(*cell, key))):
                raise CompilerFailed(f"compiled code computed other numbers on {self._name}")
        eager_s: list[float] = []
        compiled_s: list[float] = []
        until_s = time.perf_counter() + _REPEATED_S
        while len(eager_s) < 2 or (len(eager_s) < _MOST_REPEATS and time.perf_counter() < until_s):
            # Both take turns, so that other load of the machine affects both.
            with self.eager():
                eager_s.append(self._seconds(*first, key))
            compiled_s.append(self._seconds(*first, key))
        return CompiledTimes(min(eager_s), min(compiled_s), warm_up_s)

    def _seconds(self, microbatch: int, inputs: Tensor, key: tuple[int, int]) -> float:
        began_s = time.perf_counter()
        self._results(microbatch, inputs, key)
        return time.perf_counter() - began_s

    def _results(self, microbatch: int, inputs: Tensor, key: tuple[int, int]) -> list[Tensor]:
        """Return the output and the gradients of a microbatch; the parameters' own gradients do not change."""
        stage = self._stage
        stage.module.train()
        stage.prepare_cell(*key, microbatch)
        leaf = inputs.detach()
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


def gain_of(times: Sequence[CompiledTimes]) -> float:
    """Return how many times as fast compiled code is as eager code, for the slowest of some stages."""
    return max(each.eager_s for each in times) / max(each.compiled_s for each in times)


def _are_close(one: Tensor, other: Tensor) -> bool:
    most = float(one.abs().max()) if one.numel() else 0.0
    return one.shape == other.shape and torch.allclose(
        one.float(), other.float(), rtol=_TOLERANCE, atol=_TOLERANCE * most, equal_nan=True
    )


def _is_of_compiler(failure: Exception) -> bool:
    """Return whether an exception comes from torch's compiler, and not from the computation."""
    module = type(failure).__module__
    return module.startswith(("torch._dynamo", "torch._inductor", "torch._functorch"))


def _parts(layer: nn.Module) -> Sequence[nn.Module]:
    """Return the modules to compile in a layer: the layer, or the head of each task."""
    return tuple(layer.chains) if isinstance(layer, Heads) else (layer,)


def _configure(num_layers: int) -> None:
    """Set torch's options for compiling in this process."""
    import torch._dynamo.config as dynamo  # noqa: PLC0415 - slow to import
    import torch._inductor.config as inductor  # noqa: PLC0415 - slow to import

    inductor.compile_threads = 1  # no processes beside this one, which has the threads that the owner lends
    inductor.fx_graph_cache = True
    inductor.fx_graph_remote_cache = False
    inductor.fallback_random = True  # dropout drops the same values as in eager layers
    # Layers of one class share their code, and each may add an entry.
    dynamo.recompile_limit = max(dynamo.recompile_limit, 4 * num_layers)
    dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, 16 * num_layers)
