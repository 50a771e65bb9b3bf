"""Compiles layers with ``torch.compile``, and measures whether compiled layers are faster.

Each layer is compiled separately, so it computes the same bits in each stage that holds it. Compiled and eager layers
may differ in the last bits. So all members of a job or deployment must compute in the same way; see
docs/decisions/0036-one-choice-of-compiled-code-per-job.md.
"""

from __future__ import annotations

import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from share_compute.device_kinds import KINDS, DeviceKind
from share_compute.errors import CompilerFailed
from share_compute.models.cells import Forward
from share_compute_actors.compiled.artifacts import Artifacts
from share_compute_actors.compiled.choice import CompiledTimes
from share_compute_actors.machine.preflight import check_compiler

_MOST_REPEATS = 20
_REPEATED_S = 3.0
"""Time limit for the repeated measurements of one case, in seconds."""
_TOLERANCE = 1e-2
"""Largest difference of compiled and eager results, relative to the largest number of the eager result."""
_MOST_WORDS = 300

Case = TypeVar("Case")
"""Inputs with which layers are compiled and measured."""


class SwitchedLayers(ABC, Generic[Case]):
    """Layers that compute with compiled code while `is_on` is true.

    Args:
        layers: the layers, on the CPU.
        name: name of the machine, for errors.
        artifacts: compiled code of earlier runs.
    """

    def __init__(self, layers: Sequence[nn.Module], name: str, artifacts: Artifacts) -> None:
        self._name = name
        self._artifacts = artifacts
        self.is_on = False
        _configure(len(layers))
        for layer in layers:
            self._replace(layer)

    @abstractmethod
    def _replace(self, layer: nn.Module) -> None:
        """Replace the computation of a layer by the result of `_switched`."""

    @abstractmethod
    def _results(self, case: Case) -> list[Tensor]:
        """Compute a case; return the tensors that compiled and eager code must agree on."""

    def _applies(self, layer: nn.Module) -> bool:  # noqa: ARG002 - subclasses read it
        """Return whether a call of a layer may use compiled code."""
        return True

    def _switched(self, layer: nn.Module, eager: Forward, compiled: Forward) -> Forward:
        """Return a function that computes a layer with compiled code while `is_on` is true, else with eager code."""

        @functools.wraps(eager)
        def forward(*arguments: Any, **options: Any) -> Any:
            if not (self.is_on and self._applies(layer)):
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
            # Without its details, a failure of the backend would only name the backend in the first line.
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

    def warm_up(self, cases: Sequence[Case]) -> float:
        """Compile the layers for some cases, and return the time that this took, in seconds; leave `is_on` true.

        Raises:
            CompilerFailed: the compiler failed.
        """
        began_s = time.perf_counter()
        self.is_on = True
        with self._artifacts.used():
            for case in cases:
                self._results(case)
        return time.perf_counter() - began_s

    def compare(self, cases: Sequence[Case]) -> CompiledTimes:
        """Compile the layers, and compare their results and times with those of eager layers; leave `is_on` true.

        Args:
            cases: cases for which the layers are compiled. The first is measured.

        Raises:
            CompilerFailed: the compiler failed, or compiled layers give other results.
        """
        first = cases[0]
        with self.eager():
            known = [self._results(case) for case in cases]
        warm_up_s = self.warm_up(cases)
        for case, wanted in zip(cases, known, strict=True):
            if not all(map(_are_close, wanted, self._results(case))):
                raise CompilerFailed(
                    f"compiled code computed other numbers on {self._name}", machine=self._name
                )
        eager_s: list[float] = []
        compiled_s: list[float] = []
        until_s = time.perf_counter() + _REPEATED_S
        while len(eager_s) < 2 or (len(eager_s) < _MOST_REPEATS and time.perf_counter() < until_s):
            # Both alternate, so that other load of the machine affects both.
            with self.eager():
                eager_s.append(self._seconds(first))
            compiled_s.append(self._seconds(first))
        return CompiledTimes(min(eager_s), min(compiled_s), warm_up_s)

    def _seconds(self, case: Case) -> float:
        began_s = time.perf_counter()
        self._results(case)
        return time.perf_counter() - began_s


def require_compiler(name: str, device: DeviceKind) -> None:
    """Check that this machine can compile layers.

    Args:
        name: name of the machine, for errors.
        device: device on which the machine computes.

    Raises:
        CompilerFailed: this machine cannot compile layers.
    """
    if KINDS[device].is_gpu:
        raise CompilerFailed(f"{name} computes on a GPU, and only CPUs use compiled code", machine=name)
    found = check_compiler()
    if found.state != "ok":
        raise CompilerFailed(f"{name} cannot compile: {found.text}", hint=found.hint, machine=name)


def _are_close(one: Tensor, other: Tensor) -> bool:
    most = float(one.abs().max()) if one.numel() else 0.0
    return one.shape == other.shape and torch.allclose(
        one.float(), other.float(), rtol=_TOLERANCE, atol=_TOLERANCE * most, equal_nan=True
    )


def _is_of_compiler(failure: Exception) -> bool:
    """Return whether an exception comes from torch's compiler, and not from the computation."""
    module = type(failure).__module__
    return module.startswith(("torch._dynamo", "torch._inductor", "torch._functorch"))


def _configure(num_layers: int) -> None:
    """Set torch's options for compiling in this process."""
    import torch._dynamo.config as dynamo  # noqa: PLC0415 - slow to import
    import torch._inductor.config as inductor  # noqa: PLC0415 - slow to import

    inductor.compile_threads = 1  # this process uses all threads that the owner lends
    inductor.fx_graph_cache = True
    inductor.fx_graph_remote_cache = False
    inductor.fallback_random = True  # dropout drops the same values as in eager layers
    # Layers of one class share their code, and each layer may add an entry to the code cache.
    dynamo.recompile_limit = max(dynamo.recompile_limit, 4 * num_layers)
    dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, 16 * num_layers)
