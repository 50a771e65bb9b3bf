"""The layers of a serving stage, which compute with compiled code if the deployment has chosen it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from share_compute.errors import CompilerFailed
from share_compute.inference.runtime.engine_stage import EngineStage
from share_compute.inference.runtime.stage import ServingStage
from share_compute.inference.runtime.streamlining import call_own
from share_compute.models.cells import Forward
from share_compute_actors.compiled.artifacts import Artifacts
from share_compute_actors.compiled.choice import CompiledTimes
from share_compute_actors.compiled.layers import SwitchedLayers, require_compiler
from share_compute_actors.inference.messages import ServingCase, ServingSetup

_COUNTS = (1, 2, 5, 32)
"""Numbers of tokens for which layers are compiled. Torch compiles a single token by itself; the code for two or more
tokens is one for all numbers, which the last two confirm."""


class CompiledStage(SwitchedLayers[Callable[[], Tensor]]):
    """The layers of a stage, which compute with compiled code while `is_on` is true; cases are dry runs of the stage.

    Attention is not compiled, since its shapes change with each engine step. The embedding, the last norm and the head
    are eager.

    Args:
        stage: the sealed stage, on the CPU.
        name: name of the machine, for errors.
        artifacts: compiled code of earlier runs.
    """

    def __init__(self, stage: ServingStage, name: str, artifacts: Artifacts) -> None:
        assert stage.is_sealed
        self._stage = stage
        self._is_warming_up = False
        torch.compiler.reset()  # the limit also counts the code of earlier stages
        stage.dry_run(2, 1)()  # fused layers settle at their first call
        call_own(stage.layers)
        super().__init__(stage.layers, name, artifacts)

    def _replace(self, layer: nn.Module) -> None:
        eager: Forward = layer.forward
        compiled = torch.compile(eager, fullgraph=True)

        def compiled_of(hidden: Tensor, *arguments: Any, **options: Any) -> Any:
            if self._is_warming_up and hidden.shape[1] > 1:
                _mark_dynamic(hidden.shape[1], (hidden, *arguments, *options.values()))
            return compiled(hidden, *arguments, **options)

        layer.forward = self._switched(layer, eager, compiled_of)

    def warm_up(self, cases: Sequence[Callable[[], Tensor]]) -> float:
        """Compile the layers for some dry runs of the stage; see `SwitchedLayers.warm_up`."""
        self._is_warming_up = True
        try:
            return super().warm_up(cases)
        finally:
            self._is_warming_up = False

    def release(self) -> None:
        """Let the layers forget their compiled code, so that they are freed with the stage."""
        for layer in self._stage.layers:
            del layer.forward

    def _results(self, case: Callable[[], Tensor]) -> list[Tensor]:
        return [case()]


class StageCompiler:
    """Compiles the present stage of a member. Create it before torch compiles anything in this process.

    Args:
        setup: parameters of the member.
    """

    def __init__(self, setup: ServingSetup) -> None:
        self._setup = setup
        self._artifacts = Artifacts(machine=setup.name)
        self._compiled: CompiledStage | None = None
        self._stage: EngineStage | None = None
        """The stage of `_compiled`."""
        self._has_compiler = False

    def compare(self, stage: EngineStage, concurrent: int) -> CompiledTimes:
        """Compile a sealed stage, and return the times of an engine step with eager and with compiled code.

        Args:
            stage: the stage.
            concurrent: number of sequences for which there is memory.

        Raises:
            CompilerFailed: the stage cannot be compiled, or its results differ.
        """
        compiled = self._prepared(stage)
        sequences, past = self._setup.measured.sequences, self._setup.measured.past_tokens
        # All sequences are measured, but with fewer past tokens, because the number of sequences determines the
        # compiled code.
        measured = ServingCase(sequences, max(1, past * min(concurrent, sequences) // sequences))
        return compiled.compare(_dry_runs(stage, [measured, *self._cases[1:]]))

    def compile(self, stage: EngineStage) -> None:
        """Let a sealed stage compute with compiled code.

        Raises:
            CompilerFailed: the stage cannot be compiled.
        """
        compiled = self._prepared(stage)
        compiled.warm_up(_dry_runs(stage, self._cases))

    def drop(self) -> None:
        """Let the present stage compute eagerly, and free its compiled code, which would keep the shard in memory."""
        if self._compiled is not None:
            self._compiled.release()
        self._compiled = self._stage = None

    def require(self) -> None:
        """Check that this machine can compile; raise CompilerFailed if not."""
        if not self._has_compiler:
            require_compiler(self._setup.name, self._setup.device)
            self._has_compiler = True

    @property
    def _cases(self) -> list[ServingCase]:
        """Return the engine steps for which layers are compiled.

        They depend only on the deployment, so that all members compile the same code.
        """
        return [ServingCase(count, 1) for count in (self._setup.measured.sequences, *_COUNTS)]

    def _prepared(self, stage: EngineStage) -> CompiledStage:
        self.require()
        if self._compiled is None or self._stage is not stage:
            if not isinstance(stage, ServingStage):
                raise CompilerFailed("the layers of an encoder are not compiled", machine=self._setup.name)
            self._compiled, self._stage = CompiledStage(stage, self._setup.name, self._artifacts), stage
        return self._compiled


def _mark_dynamic(tokens: int, given: Iterable[Any]) -> None:
    """Let torch compile code for any number of tokens, the second dimension of some of a layer's arguments."""
    for one in given:
        if isinstance(one, tuple):
            _mark_dynamic(tokens, one)
        elif isinstance(one, Tensor) and one.dim() > 1 and one.shape[1] == tokens:
            torch._dynamo.maybe_mark_dynamic(one, 1)  # noqa: SLF001 - it has no other name


def _dry_runs(stage: EngineStage, cases: Iterable[ServingCase]) -> list[Callable[[], Tensor]]:
    assert isinstance(stage, ServingStage)
    return [stage.dry_run(case.sequences, case.past_tokens) for case in cases]
