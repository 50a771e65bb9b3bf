"""Compiled layers of stages that serve, and one choice for all members of a deployment."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests import programs
from tests.platform.inference.runtime.stages import CPU, LAYERS, Serving, opening, prompt_of, small_config

from share_compute.errors import CompilerFailed
from share_compute.inference.runtime.stage import ServingStage
from share_compute.lifecycle.computation import Computation
from share_compute.shards import Shard
from share_compute.specification import ServeJob
from share_compute_actors.compiled.choice import CompiledTimes
from share_compute_actors.inference.compiled_stage import StageCompiler
from share_compute_actors.inference.computation import ComputationChooser
from share_compute_actors.inference.messages import ServingCase

SETUP: Any = SimpleNamespace(name="ada", device="cpu", measured=ServingCase(3, 20))
PROMPTS = {sequence: prompt_of(9 + 7 * sequence, sequence) for sequence in range(3)}
TOKENS = 10


class Members:
    """Members of a replica that measure these times, or fail to compile."""

    def __init__(self, *times: tuple[float, float], failure: str = "") -> None:
        self._times, self._failure = times, failure
        self.is_compiled = False
        self.num_asked = 0

    def compare_compiled(self, workers: Sequence[str], concurrent: int) -> list[CompiledTimes]:  # noqa: ARG002
        self.num_asked += 1
        if self._failure:
            raise CompilerFailed(self._failure)
        assert len(workers) == len(self._times)
        return [CompiledTimes(*pair, 2.0) for pair in self._times]


def spec_of(mode: str, **fields: Any) -> ServeJob:
    return ServeJob.model_validate({"name": "m", "model": {"path": "/m"}, "compile": mode, **fields})


@pytest.mark.parametrize(
    ("mode", "objective", "times", "is_compiled"),
    [
        ("auto", "latency", [(1.3, 1.0)], True),
        ("auto", "latency", [(1.03, 1.0)], False),
        ("auto", "latency", [(1.0, 1.0), (3.0, 2.0)], True),
        ("auto", "throughput", [(3.0, 3.0), (2.0, 1.0)], False),
        ("on", "latency", [(1.0, 1.5)], True),
    ],
)
def test_a_deployment_computes_as_its_objective_suits(
    mode: str, objective: str, times: list[tuple[float, float]], is_compiled: bool
) -> None:
    members: Any = Members(*times)
    chooser = ComputationChooser(spec_of(mode, objective=objective), None, members)
    chooser.propose([str(place) for place in range(len(times))], 4)
    proposal = chooser.proposal
    assert proposal is not None
    assert proposal.is_compiled is is_compiled
    assert proposal.sentence.startswith("compiled: " if is_compiled else "eager")
    assert (chooser.is_chosen, members.is_compiled) == (False, False)  # nothing is stored yet
    chooser.propose(["0"], 4)
    assert members.num_asked == 1
    chooser.follow(proposal)
    assert (chooser.is_chosen, members.is_compiled, chooser.proposal) == (True, is_compiled, None)


def test_a_replica_follows_the_stored_choice_against_its_own() -> None:
    members: Any = Members((1.0, 2.0))
    chooser = ComputationChooser(spec_of("auto"), None, members)
    chooser.propose(["0"], 4)
    chooser.follow(Computation(is_compiled=True, gain=1.5, sentence="compiled"))
    assert members.is_compiled
    chooser.follow(Computation(is_compiled=False, sentence="eager"))  # a repeated message changes nothing
    assert members.is_compiled


def test_a_known_choice_is_not_measured_again() -> None:
    members: Any = Members()
    chooser = ComputationChooser(spec_of("auto"), Computation(is_compiled=True, sentence="compiled"), members)
    assert (chooser.is_chosen, members.is_compiled, members.num_asked) == (True, True, 0)
    assert ComputationChooser(spec_of("off"), None, members).is_chosen


def test_without_a_compiler_the_deployment_is_eager() -> None:
    members: Any = Members(failure="ada: no C++ compiler")
    chooser = ComputationChooser(spec_of("on"), None, members)
    chooser.propose(["0"], 4)
    assert chooser.proposal == Computation(is_compiled=False, sentence="eager, because ada: no C++ compiler")


def stage_of(model_type: str, *, quantizes: bool = False, **wider: Any) -> ServingStage:
    config = {**small_config(model_type), **wider}
    stage = ServingStage(config, Shard("m", 0, LAYERS, LAYERS), CPU, quantizes=quantizes)
    source = torch.Generator().manual_seed(2)
    for name, tensor in stage.tensors().items():
        if tensor.dtype == torch.int8:
            tensor.copy_(torch.randint(-127, 128, tensor.shape, generator=source, dtype=torch.int8))
        else:
            size = 0.002 if name.endswith("scale") else 0.3
            tensor.copy_(torch.rand(tensor.shape, generator=source) * size - (tensor.dim() > 1) * size / 2)
    stage.seal()
    return stage


def texts(stage: ServingStage) -> tuple[dict[int, list[int]], list[float]]:
    """Return the tokens of three sequences whose prefills and lengths differ, and all log-probabilities."""
    serving = Serving([stage])
    plans = {opening(one, prompt, logprobs=0): [5, len(prompt) - 5] for one, prompt in PROMPTS.items()}
    found = serving.run(plans, TOKENS)
    stage.clear()
    return found, [one.logprob or 0.0 for one in serving.sampled]


@pytest.mark.slow
@pytest.mark.exact
@pytest.mark.filterwarnings("ignore")  # of torch itself
@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        pytest.param("llama", {"intermediate_size": 2**14}, id="packed"),
        pytest.param("gemma2", {}, id="two kinds of layers", marks=pytest.mark.thorough),
        pytest.param("llama", {"quantizes": True}, id="int8", marks=pytest.mark.thorough),
    ],
)
def test_compiled_layers_give_the_same_bits_each_time_and_compile_no_engine_step(
    model_type: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs.require("g++")
    folder = str(tmp_path / "compiled")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", folder)  # restored after the test
    from torch._dynamo.utils import counters

    stage = stage_of(model_type, **options)
    eager = texts(stage)
    compiler = StageCompiler(SETUP)
    with torch.inference_mode():
        times = compiler.compare(stage, 3)
    assert times.warm_up_s > 0
    graphs = counters["stats"]["unique_graphs"]
    assert graphs
    compiled = texts(stage)
    assert counters["stats"]["unique_graphs"] == graphs
    if "quantizes" not in options:  # int8 rounds inputs, so their last bits count
        assert compiled[0] == eager[0]
        assert compiled[1] == pytest.approx(eager[1], abs=1e-3)

    # A member that replaces this one loads the artifacts.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", folder)
    other = stage_of(model_type, **options)
    replacement = StageCompiler(SETUP)
    with torch.inference_mode():
        replacement.compile(other)
    assert texts(other) == compiled
    replacement.drop()
    assert texts(other) == eager
