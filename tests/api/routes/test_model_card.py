"""Model cards of results: front matter, curve, machines, and nothing that belongs to the server alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from huggingface_hub import ModelCard
from safetensors.numpy import save_file
from tests.api.conftest import Plane
from tests.api.playing import falling_step

from share_compute.data.tokenization import train_tokenizer
from share_compute.lifecycle.attempt_events import (
    ArtifactSaved,
    AttemptEnded,
    AttemptEvent,
    Validated,
)
from share_compute.lifecycle.states import JobState

LLAMA = {"model_type": "llama", "vocab_size": 300, "hidden_size": 16, "intermediate_size": 32,
         "num_hidden_layers": 2, "num_attention_heads": 2}  # fmt: skip


def trained(plane: Plane, http: httpx.Client, job: dict[str, Any], *, steps: int = 3) -> str:
    """Submit a job, report its end, and return its id; its results are ``model`` and ``step-00000002``."""
    answer = http.post("/jobs", json=job)
    assert answer.status_code == 201, answer.text
    job_id = str(answer.json()["id"])
    store, folder = plane.store, plane.settings.data_folder / "jobs" / job_id
    saved: list[AttemptEvent] = []
    for name in ("model", "step-00000002"):
        (folder / name).mkdir(parents=True)
        (folder / name / "model.safetensors").write_bytes(b"weights")
        saved.append(ArtifactSaved(name=name, path=folder / name, size_bytes=7))
    store.jobs.begin(job_id, [])
    store.jobs.move(job_id, JobState.running, "running", attempt=1)
    events = [
        *map(falling_step, range(1, steps + 1)),
        Validated(split="validation", step=2, loss=0.25, accuracy=0.5),
    ]
    ended = AttemptEnded(outcome="succeeded", reason="done")
    test = Validated(split="test", step=steps, loss=0.125, accuracy=0.75)
    store.progress.record(job_id, 1, [*events, *saved, test, ended])
    return job_id


def card(http: httpx.Client, job_id: str, name: str = "model") -> ModelCard:
    answer = http.get(f"/jobs/{job_id}/artifacts/{name}/files/README.md")
    assert answer.status_code == 200
    listed = http.get(f"/jobs/{job_id}/artifacts/{name}").json()["files"]
    assert {"path": "README.md", "size_bytes": len(answer.content)} in listed
    return ModelCard(answer.text)


def evaluated(found: ModelCard) -> dict[str, float]:
    (model,) = found.data.to_dict()["model-index"]
    (result,) = model["results"]
    return {metric["type"]: metric["value"] for metric in result["metrics"]}


def test_a_result_has_a_card_with_its_data_settings_curve_and_metrics(
    plane: Plane, http: httpx.Client, digits: dict[str, Any]
) -> None:
    job_id = trained(plane, http, digits)
    found = card(http, job_id)
    assert found.data.to_dict()["pipeline_tag"] == "image-classification"
    assert evaluated(found) == {"loss": 0.125, "accuracy": 0.75}
    assert "| 2 | 0.5 | 0.25 | 0.5 |" in found.text
    assert "| 3 | 0.3333 |" in found.text
    assert "digits" in found.text
    assert "steps: 3" in found.text


def test_the_card_of_a_checkpoint_ends_at_its_step(
    plane: Plane, http: httpx.Client, digits: dict[str, Any]
) -> None:
    found = card(http, trained(plane, http, digits), "step-00000002")
    assert evaluated(found) == {"loss": 0.25, "accuracy": 0.5}
    assert "| 3 |" not in found.text
    assert "checkpoint of step 2" in found.text


def test_a_long_curve_is_thinned_out(plane: Plane, http: httpx.Client, digits: dict[str, Any]) -> None:
    found = card(http, trained(plane, http, digits, steps=1000))
    rows = [line for line in found.text.splitlines() if line.startswith("| ") and line[2].isdigit()]
    assert len(rows) <= 41
    assert rows[0].startswith("| 1 |")
    assert rows[-1].startswith("| 1000 |")


@pytest.mark.parametrize(
    ("card_of_base", "licence"),
    [
        ("---\nlicense: apache-2.0\n---\n# A model", "apache-2.0"),
        ("---\nlicense: [mit, gpl]\n---\n", None),
        ("---\nlicense: &a [*a]\n---\n", None),
        ("no front matter", None),
        (None, None),
    ],
)
def test_the_licence_is_that_of_the_base_model(
    card_of_base: str | None, licence: str | None, plane: Plane, http: httpx.Client, tmp_path: Path
) -> None:
    folder = tmp_path / "secret-place" / "base"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(LLAMA))
    save_file({"weight": np.zeros(2, np.float32)}, folder / "model.safetensors")
    if card_of_base is not None:
        (folder / "README.md").write_text(card_of_base)
    (tmp_path / "corpus.txt").write_text("some text\n" * 100)
    job = {
        "model": {"path": str(folder)},
        "data": {"files": [str(tmp_path / "corpus.txt")]},
        "training": {"steps": 3, "sequence_length": 16},
        "then": {"serve": {"name": "served"}},
    }
    found = card(http, trained(plane, http, job))
    assert found.data.to_dict().get("license") == licence
    assert "corpus.txt" in found.text
    assert "secret-place" not in str(found)
    assert str(tmp_path) not in str(found)


def test_the_card_of_a_shared_language_model_names_the_heads_for_classes(
    plane: Plane, http: httpx.Client, tmp_path: Path
) -> None:
    train_tokenizer(["some text"], 300).save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "corpus.txt").write_text("some text\n" * 100)
    (tmp_path / "labelled.csv").write_text("text,label\n" + "good,yes\nbad,no\n" * 20)
    labelled = {"files": [str(tmp_path / "labelled.csv")], "labels": {}}
    job = {
        "model": {"config": LLAMA},
        "tokenizer": {"path": str(tmp_path / "tokenizer")},
        "data": labelled,
        "tasks": [{"name": "mood"}, {"name": "text", "data": {"files": [str(tmp_path / "corpus.txt")]}}],
        "training": {"steps": 3, "sequence_length": 16, "batch_size": 8, "microbatches": 2},
    }
    found = card(http, trained(plane, http, job))
    assert found.data.to_dict()["pipeline_tag"] == "text-generation"
    assert "AutoModelForCausalLM.from_pretrained" in found.text
    assert "also have `head_mood.weight`:" in found.text
    assert "share-compute serve" not in found.text
    encoder = {
        "model_type": "bert",
        "vocab_size": 300,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    answer = http.post("/jobs", json={**job, "model": {"config": encoder}})
    assert answer.status_code == 422
    assert "architecture 'bert' declares no pipeline plan" in answer.text
    assert "model.config" in answer.text


@pytest.mark.parametrize(
    ("task", "outputs", "answer"),
    [("tabular_regression", 1, "115.0\n"), ("tabular_classification", 2, "yes\n")],
)
def test_the_card_of_a_table_has_code_that_predicts_a_row(
    plane: Plane, http: httpx.Client, tmp_path: Path, task: str, outputs: int, answer: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "a.csv").write_text("size,colour,target\n" + "1,red,1\n2,blue,0\n" * 10)
    table = {"target": "target", "categorical": ["colour"]}
    layers = [{"type": "linear", "options": {"in_features": 3, "out_features": outputs}}, {"type": "relu"}]
    job = {
        "task": task,
        "model": {"layers": layers},
        "data": {"files": [str(tmp_path / "a.csv")], "table": table},
        "training": {"steps": 3},
    }
    code = card(http, trained(plane, http, job)).text.split("~~~~python\n")[1].split("~~~~")[0]
    numbers = {"name": "size", "categories": None, "mean": 10.0, "scale": 2.0, "fill": 14.0}
    colours = {"name": "colour", "categories": ["blue", "red"], "mean": 0.0, "scale": 1.0, "fill": 0.0}
    target = {"categories": ["no", "yes"][:outputs], "mean": 100.0, "scale": 3.0}
    (tmp_path / "data.json").write_text(json.dumps({"columns": [numbers, colours], "target": target}))
    weights = np.array([[2, 9, 1], [3, 9, 0]], np.float32)[:outputs]
    bias = np.zeros(outputs, np.float32)
    save_file({"layers.0.weight": weights, "layers.0.bias": bias}, tmp_path / "model.safetensors")
    code = code.replace('"FOLDER"', repr(str(tmp_path))).replace(
        "# put your values here", '| {"colour": "red"}'
    )
    exec(code, {})
    assert capsys.readouterr().out == answer
