"""``share-compute tune``: the order of the runs, the file that it writes, and its sentences on numerics."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from tests.api.conftest import Plane

from share_compute.errors import FetchUnderWay, ShareComputeError, UserError
from share_compute.lifecycle.attempt_events import (
    AttemptEnded,
    AttemptEvent,
    ComputationChosen,
    StepCommitted,
)
from share_compute.lifecycle.states import JobState
from share_compute.specification import TrainJob, parse_job
from share_compute_api.client.client import Client
from share_compute_api.client.tuning import (
    WARM_UP,
    TunedSettings,
    TuningJobs,
    TuningRun,
    best_of,
    fixed_settings,
    short_job,
    tune,
)
from share_compute_api.terminal.fetching import once_fetched


def job(digits: dict[str, Any], **training: Any) -> TrainJob:
    return parse_job({**digits, "training": {"steps": 500, "batch_size": 64, **training}})


class Machines:
    """Machines with a known step time: 8 microbatches and 2 threads are the fastest.

    Args:
        bfloat16: factor of the step time in bfloat16.
        compiled: factor of the step time of compiled code; None if the machines cannot compile.
    """

    def __init__(self, bfloat16: float = 0.5, compiled: float | None = 0.8) -> None:
        self._bfloat16, self._compiled = bfloat16, compiled

    def measure(self, settings: TunedSettings) -> TuningRun:
        microbatches, threads = settings.microbatches or 2, settings.threads or 8
        slow = abs(microbatches.bit_length() - 4) + abs(threads.bit_length() - 2)
        factor = self._bfloat16 if settings.precision == "bfloat16" else 1.0
        is_compiled = settings.compile == "on" and self._compiled is not None
        # Machines that cannot compile are faster by chance here.
        factor *= 1.0 if settings.compile == "off" else self._compiled or 0.9
        return TuningRun(
            settings,
            (1 + slow) * factor,
            microbatches=microbatches,
            threads=threads,
            is_compiled=is_compiled,
        )


def values(runs: list[TuningRun]) -> list[tuple[int | None, int | None, str]]:
    return [(run.microbatches, run.threads, run.settings.precision) for run in runs]


def test_settings_are_measured_one_after_another(digits: dict[str, Any]) -> None:
    runs = list(tune(job(digits), Machines().measure))
    assert values(runs) == [
        (2, 8, "float32"),
        (4, 8, "float32"),
        (8, 8, "float32"),
        (16, 8, "float32"),
        (8, 4, "float32"),
        (8, 2, "float32"),
        (8, 1, "float32"),
        (8, 2, "bfloat16"),
        (8, 2, "bfloat16"),
    ]
    assert [run.settings.compile for run in runs] == ["off"] * 8 + ["on"]
    assert best_of(runs).settings == TunedSettings(8, 2, "bfloat16", "on")


def test_compiled_code_is_chosen_only_if_it_ran_and_was_faster(digits: dict[str, Any]) -> None:
    for machines, chosen in (
        (Machines(), "on"),
        (Machines(compiled=1.1), "off"),
        (Machines(compiled=None), "off"),
    ):
        runs = list(tune(job(digits), machines.measure, ["compile"]))
        assert [run.settings.compile for run in runs] == ["off", "on"]
        assert best_of(runs).settings.compile == chosen
    runs = list(tune(job(digits, compile="on"), Machines(compiled=1.1).measure, ["compile"]))
    assert [run.settings.compile for run in runs] == ["on", "off"]
    assert best_of(runs) is runs[1]


def test_settings_that_the_job_excludes_are_kept(digits: dict[str, Any]) -> None:
    assert "auto measures" in fixed_settings(job(digits, compile="auto"))["compile"]
    llama = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 512}
    for parallelism, fixed in (({"sequence": 2}, {"precision", "compile"}), ({"tensor": 2}, {"compile"})):
        spec = parse_job(
            {"model": {"config": llama}, "data": {"files": ["a.txt"]}, "parallelism": parallelism}
        )
        assert fixed_settings(spec).keys() == fixed


def test_a_setting_is_kept_unless_another_value_is_faster(digits: dict[str, Any]) -> None:
    runs = list(
        tune(job(digits, microbatches=8), Machines(bfloat16=0.99).measure, ["microbatches", "precision"])
    )
    assert values(runs) == [(8, 8, "float32"), (16, 8, "float32"), (4, 8, "float32"), (8, 8, "bfloat16")]
    assert best_of(runs) is runs[0]


def test_failed_runs_are_not_chosen(digits: dict[str, Any]) -> None:
    def measure(settings: TunedSettings) -> TuningRun:
        if settings.precision == "bfloat16":
            return TuningRun(settings, None, "no")
        return Machines().measure(settings)

    runs = list(tune(job(digits), measure, ["precision"]))
    assert best_of(runs) is runs[0]
    with pytest.raises(UserError, match="does not run: no"):
        list(tune(job(digits), lambda settings: TuningRun(settings, None, "no")))


def test_what_changes_the_task_is_kept(digits: dict[str, Any]) -> None:
    layers = [{"type": "batch_norm1d", "options": {"num_features": 64}}, *digits["model"]["layers"]]
    spec = parse_job({**digits, "model": {"layers": layers}, "training": {"microbatches": 2}})
    assert fixed_settings(spec) == {"microbatches": "batch_norm1d has the statistics of each microbatch"}
    assert {run.microbatches for run in tune(spec, Machines().measure)} == {2}


def test_a_run_is_the_job_with_few_steps(digits: dict[str, Any]) -> None:
    spec = job(
        digits,
        validate_every=5,
        early_stopping={},
        schedule={"name": "cosine", "warmup_steps": 100},
    )
    short = parse_job(TunedSettings(4, 2, "bfloat16").document(short_job(spec, 15)))
    assert (short.training.steps, short.training.validate_every, short.training.early_stopping) == (
        15,
        None,
        None,
    )
    assert (short.training.microbatches, short.parallelism.threads) == (4, 2)
    assert short.training.optimizer == spec.training.optimizer
    assert short.tags == ("tuning",)


def test_a_run_waits_until_the_model_is_fetched(
    digits: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    answers = iter([FetchUnderWay("1 of 2 GiB", hint="wait"), UserError("too large", hint="no")])

    class Server:
        def submit(self, spec: TrainJob) -> Any:
            assert spec.tags == ("tuning",)
            raise next(answers)

    lines: list[str] = []
    send = partial(once_fetched, as_json=False, note=lines.append)
    jobs = TuningJobs(cast("Client", Server()), job(digits), 12, lines.append, send)
    run = jobs.measure(TunedSettings(2, None, "float32"))
    assert (run.step_s, run.problem) == (None, "too large")
    assert lines == [
        "the job is measured with microbatches 2, threads as lent, float32, compile off",
        "1 of 2 GiB",
    ]


@pytest.fixture
def attempts(plane: Plane) -> Iterator[None]:
    """Run queued jobs to their end, with steps of 1 s, or half of it in bfloat16, and half of it with compiled code."""
    is_over = threading.Event()

    def run() -> None:
        while not is_over.wait(0.05):
            for queued in plane.store.jobs.queued(["train"]):
                try:
                    finish(plane, queued.id)
                except ShareComputeError:
                    continue  # the command deleted the job

    thread = threading.Thread(target=run)
    thread.start()
    yield
    is_over.set()
    thread.join()


def finish(plane: Plane, job_id: str) -> None:
    record = plane.store.jobs.begin(job_id, [])
    plane.store.jobs.move(job_id, JobState.running, "running", attempt=record.attempt)
    training = record.training.training
    seconds = 0.5 if training.precision == "bfloat16" else 1.0
    begun: list[AttemptEvent] = []
    if training.compile == "on":
        seconds /= 2
        begun.append(ComputationChosen(is_compiled=True, gain=2.0, sentence="compiled: 2.00 times as fast"))
    steps = [
        StepCommitted(
            step=step,
            loss=1.0,
            learning_rate=0.1,
            gradient_norm=None,
            samples=16,
            tokens=16,
            seconds=60.0 if step <= WARM_UP else seconds,
            tokens_per_s=1.0,
        )
        for step in range(1, training.steps + 1)
    ]
    plane.store.progress.record(
        job_id, record.attempt, [*begun, *steps, AttemptEnded(outcome="succeeded", reason="over")]
    )


@pytest.mark.slow
@pytest.mark.usefixtures("attempts")
def test_the_command_writes_the_fastest_settings(
    plane: Plane, digits: dict[str, Any], run: Callable[..., Any], tmp_path: Path
) -> None:
    file, output = tmp_path / "job.yaml", tmp_path / "fast.yaml"
    file.write_text(yaml.safe_dump(digits))
    done = run("tune", str(file), "--output", str(output), COLUMNS="80")
    assert done.returncode == 0, done.stderr
    assert (
        "training.precision changes from float32 to bfloat16: layers compute with fewer digits" in done.stdout
    )
    assert "training.compile changes from off to on: compiled and eager code round differently" in done.stdout
    assert "run 3 take 25% of the time of run 1" in done.stdout
    assert "Computation of run 3: compiled: 2.00 times as fast." in done.stdout
    assert "the job is measured with microbatches as planned" in done.stderr
    written = parse_job(output.read_text())
    assert (written.training.precision, written.training.compile) == ("bfloat16", "on")
    assert written.training.steps == digits["training"]["steps"]
    kept = json.loads(run("tune", str(file), "--keep", "precision", "--keep", "compile", "--json").stdout)
    assert (len(kept["runs"]), kept["changes"]) == (1, [])
    assert plane.store.jobs.page()[0] == []
    assert run("tune", str(file), "--keep", "nonsense").returncode == 2
    unwritable = run("tune", str(file), "--output", str(tmp_path / "missing" / "fast.yaml"))
    assert (unwritable.returncode, "cannot be written" in unwritable.stderr) == (8, True)
    assert "measuring" not in unwritable.stderr
    digits["training"] |= {"synchronization": {"kind": "local", "branches": 2, "every": 1}}
    file.write_text(yaml.safe_dump(digits))
    refused = run("tune", str(file)).stderr
    assert "tune measures steps" in refused
    assert "tune it with training.synchronization {kind: allreduce}" in refused
