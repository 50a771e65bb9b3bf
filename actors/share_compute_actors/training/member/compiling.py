"""Remote methods of a member for compiled code."""

from __future__ import annotations

from functools import partial
from typing import Any

import ray
import torch

from share_compute.errors import CompilerFailed
from share_compute.models.boundary import numbers_in
from share_compute.protocol.member import MemberMachine
from share_compute_actors.compiled.artifacts import Artifacts
from share_compute_actors.compiled.choice import COMPILED_TIMES, CompiledTimes
from share_compute_actors.compiled.layers import require_compiler
from share_compute_actors.group.answering import answers
from share_compute_actors.messages import MemberSetup
from share_compute_actors.training.compiled_layers import CompiledLayers, TrainingCase
from share_compute_actors.training.member.engine import TrainingEngine
from share_compute_actors.training.member.runner import Runner
from share_compute_actors.training.member.samples import Rows
from share_compute_actors.wire import NOTHING


class CompilesLayers:
    """Mixin with a member's methods for compiled code."""

    _machine: MemberMachine
    _engine: TrainingEngine
    _runner: Runner | None
    _setup: MemberSetup
    _shard_store: Any
    _artifacts: Artifacts
    _compiles: bool
    """Whether the layers of the next shard are compiled, too."""

    @ray.method(concurrency_group="orders")
    @answers(COMPILED_TIMES)
    def compare_compiled(self) -> CompiledTimes:
        """Compile the layers of the shard, and return the times of a microbatch with eager and with compiled code.

        Raises:
            CompilerFailed: the layers cannot be compiled, or their results differ.
            ShardStoreLost: the shard store, which has the samples, died.
        """
        return self._engine.order(self._compare)

    def _compare(self) -> CompiledTimes:
        assert self._runner is not None
        step = self._machine.applied
        layers = self._prepared(self._runner)
        return layers.compare(self._cases(self._runner, step))

    @ray.method(concurrency_group="orders")
    @answers(NOTHING)
    def choose_computation(self, is_compiled: bool) -> None:
        """Compute with compiled or eager code from now on, also after a change of the shard."""
        self._engine.order(partial(self._choose, is_compiled=is_compiled))

    def _choose(self, *, is_compiled: bool) -> None:
        self._compiles = is_compiled
        if self._runner is not None and self._runner.compiled is not None:
            self._runner.compiled.is_on = is_compiled

    def _compile(self, runner: Runner, step: int) -> None:
        """Compile the layers of a shard that the member has loaded.

        Args:
            runner: the shard, with its weights.
            step: last step whose update the weights include.

        Raises:
            CompilerFailed: the layers cannot be compiled.
            ShardStoreLost: the shard store, which has the samples, died.
        """
        self._prepared(runner).warm_up(self._cases(runner, step))

    def _require_compiler(self) -> None:
        """Check that this machine can compile layers.

        Raises:
            CompilerFailed: this machine cannot compile layers.
        """
        require_compiler(self._setup.name, self._setup.device)

    def _prepared(self, runner: Runner) -> CompiledLayers:
        if runner.compiled is None:
            self._require_compiler()
            runner.compiled = CompiledLayers(runner.stage, self._setup.name, self._artifacts)
        return runner.compiled

    def _cases(self, runner: Runner, step: int) -> list[TrainingCase]:
        """Return a microbatch of each task, with random numbers in place of activations."""
        training, stage = self._setup.training, runner.stage
        keys = [(training.seed, step, microbatch) for microbatch in range(len(stage.objectives))]
        if stage.shard.is_first:
            rows = Rows(self._shard_store, "inputs")
            following = min(step + 1, training.steps)
            return [TrainingCase(key, rows.take(following, key[2])) for key in keys]
        expected = runner.expected("activation")
        if expected is None or expected.shape is None:
            raise CompilerFailed("the model does not say how many numbers pass between its layers")
        drawn = torch.randn(expected.shape, generator=torch.Generator().manual_seed(training.seed))
        dtypes = sorted(numbers_in(training.precision), key=str)
        return [TrainingCase(key, drawn.to(dtype)) for key in keys for dtype in dtypes]
