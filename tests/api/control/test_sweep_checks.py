"""Checks of all trials of a sweep: each question is asked once, and the time is limited."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from share_compute.errors import UserError
from share_compute.specification import SweepJob, parse_any_job
from share_compute_api.submission.sweeps import check_sweep, trial_of
from share_compute_api.workers.isolated.messages import CheckModel, ModelSizes

CONFIG = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


class Processes:
    """Processes that accept all models, and count the questions."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def ask(self, question: Any) -> Any:
        assert isinstance(question, CheckModel)
        self.asked.append(question.config["num_hidden_layers"])
        return ModelSizes(layers=2)


@pytest.fixture
def job(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "mine.txt").write_text("mine " * 100)
    return {"model": {"config": CONFIG}, "data": {"files": [str(tmp_path / "mine.txt")]}}


def sweep(job: dict[str, Any], fields: dict[str, Any]) -> SweepJob:
    found = parse_any_job({"kind": "sweep", "job": job, "fields": fields})
    assert isinstance(found, SweepJob)
    return found


def test_a_question_that_several_trials_have_is_asked_once(job: dict[str, Any]) -> None:
    processes = Processes()
    layers = {"model.config.num_hidden_layers": {"values": [2, 3]}}
    check_sweep(sweep(job, {"parallelism.stages": {"values": [1, 2]}, **layers}), processes)
    assert processes.asked == [2, 3]


def test_checks_of_a_sweep_end_in_time(job: dict[str, Any]) -> None:
    spec, processes = sweep(job, {"model.config.num_hidden_layers": {"values": [2, 3]}}), Processes()
    with pytest.raises(UserError, match="checks of the 2 trials take longer than 0 s"):
        check_sweep(spec, processes, most_s=0)
    assert processes.asked == []


def test_a_trial_has_the_model_of_its_sweep(job: dict[str, Any]) -> None:
    """A whole ``model`` without names of files replaces a model that the Hub, or a folder, has."""
    model = {"hub": "org/a", "revision": "main"}
    spec = sweep({**job, "model": model}, {"model": {"values": [{"config": CONFIG}]}})
    with pytest.raises(UserError, match="would change the files"):
        trial_of(spec, 1)
