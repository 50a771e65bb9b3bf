"""Compiled layers: the same bits each time, and one choice for all members of a job."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import programs
from tests.actors.training.jobs.outcomes import require_no_change_by_a_kill
from tests.ray_nodes import Attempt
from torch import nn

from share_compute.errors import CompilerFailed, UserError
from share_compute.lifecycle.attempt_events import AttemptEvent, ComputationChosen
from share_compute.models.blueprint import Blueprint
from share_compute.models.cells import replace_inner, run_by_cell
from share_compute.models.factory import build_stage
from share_compute.protocol.tree import SummationTree
from share_compute.shards import Shard
from share_compute.specification import Compiling, LayerSpec, TrainingSpec, parse_job
from share_compute_actors.compiled.artifacts import Artifacts
from share_compute_actors.compiled.choice import COMPILED_TIMES, CompiledTimes
from share_compute_actors.training.compiled_layers import CompiledLayers, TrainingCase
from share_compute_actors.training.coordinator.computation import choose_computation, give_up_compiling
from share_compute_actors.training.member.runner import Runner
from share_compute_actors.training.step_log import StepLog
from share_compute_actors.wire import Undeclared

LLAMA = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16, "vocab_size": 20,
}  # fmt: skip
IDS = torch.arange(8).reshape(1, 8)
KEY = (0, 1, 0)


@pytest.fixture
def artifacts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Artifacts:
    """Return a folder of artifacts of the test's own."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))  # restored after the test
    return Artifacts()


# -- the code of a layer -----------------------------------------------------------------------------------------------


def test_a_replaced_layer_keeps_its_seed_and_is_recomputed() -> None:
    layer, calls = nn.Dropout(0.5), []
    run_by_cell(layer, 3, lambda: (0, 1, 2), draws=True, recomputes=True)
    inputs = torch.ones(64, requires_grad=True)
    before = layer(inputs)

    def replacement(forward: Any) -> Any:
        return lambda given: (calls.append(given), forward(given))[1]

    replace_inner(layer, replacement)
    outputs = layer(inputs)
    outputs.sum().backward()
    assert torch.equal(outputs, before)
    assert len(calls) == 2  # forward, and again in the backward pass


def test_layers_of_single_operations_stay_eager(artifacts: Artifacts) -> None:
    linear = LayerSpec(type="linear", options={"in_features": 64, "out_features": 10})
    stage = build_stage(Blueprint(layers=(linear,)), Shard("model", 0, 1, 1), torch.device("cpu"))
    stage.initialize(0)
    inputs = torch.rand(2, 64)
    before = stage.forward(inputs)
    CompiledLayers(stage, "ada", artifacts).compare([TrainingCase(KEY, inputs)])  # needs no compiler
    assert torch.equal(stage.forward(inputs), before)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch itself
def test_compiled_layers_compute_the_same_bits_each_time(artifacts: Artifacts) -> None:
    programs.require("g++")
    stage = build_stage(Blueprint(config=LLAMA), Shard("model", 0, 1, 2), torch.device("cpu"))
    stage.initialize(0)
    runner = Runner(stage, TrainingSpec(microbatches=1), SummationTree((1,)))
    runner.compiled = CompiledLayers(stage, "ada", artifacts)
    times = runner.compiled.compare([TrainingCase(KEY, IDS)])
    assert times.warm_up_s > 0
    assert all(
        parameter.grad is None or not parameter.grad.any() for parameter in stage.parameters().values()
    )

    before = runner.compiled.is_on

    def activation(*, keeps_graph: bool) -> torch.Tensor:
        runner.forward(1, 0, IDS, keeps_graph=keeps_graph)
        kept = runner.kept("activation", 0)
        assert kept is not None
        return kept

    assert torch.equal(activation(keeps_graph=True), activation(keeps_graph=False))
    assert before
    assert runner.compiled.is_on


# -- artifacts ---------------------------------------------------------------------------------------------------------


def test_artifacts_of_another_torch_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    artifacts = Artifacts(tmp_path)
    before = artifacts.own_folder()
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    assert artifacts.own_folder() != before
    assert artifacts.own_folder().parent == before.parent == tmp_path


def test_artifacts_are_private(artifacts: Artifacts) -> None:
    with artifacts.used():
        assert artifacts.own_folder().stat().st_mode & 0o077 == 0
    artifacts.folder().chmod(0o777)
    with pytest.raises(CompilerFailed, match="other users of this machine can change"), artifacts.used():
        pass


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CompilerFailed, match="cannot be kept"), Artifacts(tmp_path / "file" / "in").used():
        pass


def test_the_oldest_artifacts_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    artifacts = Artifacts(tmp_path, most_bytes=1300)
    for age, folder in enumerate([tmp_path / "newer", tmp_path / "older", artifacts.own_folder()]):
        folder.mkdir(mode=0o700)
        (folder / "code.so").write_bytes(bytes(600))
        os.utime(folder, (1000 - age, 1000 - age))
    with artifacts.used():
        assert not (tmp_path / "older" / "code.so").exists()
        assert (tmp_path / "newer" / "code.so").exists()
        assert (artifacts.own_folder() / "code.so").exists()  # made first, and used now


# -- the choice --------------------------------------------------------------------------------------------------------


class Members:
    """Members of a job that measure these times, or fail to compile."""

    def __init__(self, *times: tuple[float, float], failure: str = "") -> None:
        self._times, self._failure = times, failure
        self.is_compiled: bool | None = None
        self.was_asked = False

    def compare_compiled(self) -> dict[str, CompiledTimes]:
        self.was_asked = True
        if self._failure:
            raise CompilerFailed(self._failure)
        return {f"c{place}": CompiledTimes(*pair, 2.0) for place, pair in enumerate(self._times)}

    def choose_computation(self, *, is_compiled: bool) -> None:
        self.is_compiled = is_compiled


@pytest.fixture
def step_log(tmp_path: Path) -> Iterator[StepLog]:
    with closing(StepLog(tmp_path, 1)) as log:
        log.claim()
        yield log


def chosen(mode: Compiling, members: Any, step_log: StepLog) -> str:
    """Return the reported sentence; empty if nothing was reported."""
    reports: list[AttemptEvent] = []
    choose_computation(mode, members, step_log, reports.append)
    sentences = [event.sentence for event in reports if isinstance(event, ComputationChosen)]
    assert len(sentences) == len(reports) <= 1
    return "".join(sentences)


@pytest.mark.parametrize(
    ("mode", "times", "is_compiled"),
    [
        ("auto", [(1.3, 1.0)], True),
        ("auto", [(1.3, 1.0), (3.0, 3.1)], False),
        ("auto", [(1.01, 1.0)], False),
        ("on", [(1.0, 1.5)], True),
    ],
)
def test_all_members_compute_as_suits_the_slowest(
    mode: Compiling, times: Sequence[tuple[float, float]], is_compiled: bool, step_log: StepLog
) -> None:
    members = Members(*times)
    sentence = chosen(mode, members, step_log)
    assert sentence.startswith("compiled" if is_compiled else "eager")
    assert members.is_compiled is step_log.is_compiled is is_compiled


@pytest.mark.parametrize("times", [(0.0, 1.0), (1.0, 0.0), (1e300, 1e-9)])
def test_times_without_a_gain_are_refused(times: tuple[float, float]) -> None:
    with pytest.raises(Undeclared):
        COMPILED_TIMES.unpack(COMPILED_TIMES.pack(CompiledTimes(*times, 1.0)), "ada")


def test_off_asks_no_member(step_log: StepLog) -> None:
    members = Members()
    assert chosen("off", members, step_log) == ""
    assert (members.was_asked, members.is_compiled, step_log.is_compiled) == (False, None, None)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"parallelism": {"tensor": 2}}, "tensor 2 needs training.compile off"),
        (
            {"training": {"synchronization": {"kind": "local", "every": 5, "branches": 2}}},
            "branches compute eagerly",
        ),
        ({"training": {"compile": "fast"}}, "compile"),
    ],
)
def test_jobs_that_cannot_be_compiled_are_refused(fields: dict[str, Any], problem: str) -> None:
    document = {
        "model": {"config": LLAMA},
        "data": {"files": ["a.txt"]},
        **fields,
        "training": {"steps": 10, "compile": "auto", **fields.get("training", {})},
    }
    with pytest.raises(UserError) as refused:
        parse_job(document)
    assert problem in str(refused.value.details) + refused.value.message


def test_without_a_compiler_all_members_are_eager(step_log: StepLog) -> None:
    members = Members(failure="ada: no C++ compiler")
    assert chosen("on", members, step_log) == "eager, because ada: no C++ compiler"
    assert members.is_compiled is step_log.is_compiled is False


def test_a_later_attempt_keeps_the_choice(step_log: StepLog) -> None:
    chosen("auto", Members((2.0, 1.0)), step_log)
    assert chosen("auto", slower := Members((1.0, 2.0)), step_log).startswith("compiled: 0.50 times")
    assert slower.is_compiled
    step_log.rewind(0)
    assert step_log.is_compiled


def test_a_compiler_that_fails_later_makes_the_rest_eager(step_log: StepLog) -> None:
    chosen("auto", Members((2.0, 1.0)), step_log)
    reports: list[Any] = []
    give_up_compiling(CompilerFailed("the compiler failed on ada: no space"), step_log, reports.append)
    assert "differ in the last bits" in reports[0].sentence
    assert "no space" in reports[0].sentence
    members = Members((2.0, 1.0))
    assert chosen("auto", members, step_log) == ""
    assert (members.was_asked, members.is_compiled) == (False, False)


# -- real nodes --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.exact
@pytest.mark.chaos
def test_a_compiled_job_has_the_same_weights_after_a_loss(
    attempt: Attempt, nodes: list[Any], tmp_path: Path
) -> None:
    programs.require("g++")
    hidden = {"in_features": 32, "out_features": 32}
    block = {"type": "residual", "layers": [{"type": "linear", "options": hidden}, {"type": "gelu"}]}
    document = {
        "name": "compiled",
        "model": {
            "layers": [
                {"type": "linear", "options": {"in_features": 64, "out_features": 32}},
                block,
                block,
                {"type": "linear", "options": {"in_features": 32, "out_features": 10}},
            ]
        },
        "data": {"dataset": "digits"},
        "training": {"steps": 300, "batch_size": 16, "microbatches": 4, "compile": "on"},
        "parallelism": {"stages": 2, "members_per_stage": 1},
    }
    choices: list[list[str]] = []

    def watched(*arguments: Any, **options: Any) -> list[AttemptEvent]:
        events = attempt(*arguments, **options)
        choices.append([event.sentence[:8] for event in events if isinstance(event, ComputationChosen)])
        return events

    require_no_change_by_a_kill(watched, document, tmp_path, nodes[0])
    assert choices == [["compiled"], ["compiled"]]
