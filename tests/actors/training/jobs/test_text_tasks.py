"""Texts with labels on real Ray nodes: losses as in a plain loop with transformers' own classifier, lost machines."""

from __future__ import annotations

import argparse
import decimal
import inspect
import json
import logging
import pickle
import statistics
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.actors.training.jobs.outcomes import (
    losses_of,
    require_no_change_by_a_kill,
    runs_in_layouts,
    succeeded,
    validated,
    weights_of,
)
from tests.ray_nodes import Attempt
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from share_compute.data import StepOrder, prepare
from share_compute.models.blueprint import blueprint_of
from share_compute.models.factory import build_stage
from share_compute.models.huggingface.hub_configuration import hub_configuration
from share_compute.models.objective import Objective
from share_compute.shards import Shard
from share_compute.specification import parse_job
from share_compute.training.metrics import figures_of
from share_compute_actors.training.member.evaluating import evaluated
from share_compute_actors.training.rounds.beginning import initial_shards

pytestmark = [pytest.mark.slow, pytest.mark.exact]

STEPS = 8
LENGTH = 24
LAYOUTS: list[dict[str, Any]] = [{}, {"members_per_stage": 2}, {"stages": 2}]
LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 400, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip

BERT: dict[str, Any] = {
    "model_type": "bert", "vocab_size": 400, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def lines(count: int) -> list[dict[str, str]]:
    """Return lines of Python's own modules, half of them code and half of them prose."""
    modules = (decimal, pickle, statistics, argparse, logging, inspect, json)
    words = [
        line.strip() for module in modules for line in (module.__doc__ or "").splitlines() if len(line) > 25
    ]
    prose = [line for line in words if not {"=", "(", ">"} & set(line)]
    source = inspect.getsource(json.decoder) + inspect.getsource(textwrap)
    code = [line.strip() for line in source.splitlines() if "=" in line or "(" in line]
    half = count // 2
    return [
        {"text": text, "label": label}
        for pair in zip(code[:half], prose[:half], strict=True)
        for text, label in zip(pair, ("code", "prose"), strict=True)
    ]


def written(folder: Path, count: int = 20) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "lines.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in lines(count)))
    return file


def job(
    file: Path, model: dict[str, Any], training: dict[str, Any] | None = None, **parallelism: Any
) -> dict[str, Any]:
    return {
        "task": "text_classification",
        "model": model,
        "data": {"files": [str(file)], "labels": {}, "validation_fraction": 0.2, "test_fraction": 0.2},
        "training": {
            "steps": STEPS,
            "batch_size": 8,
            "microbatches": 2,  # with more threads, the order of sums follows from the first plan
            "sequence_length": LENGTH,
            "optimizer": {"learning_rate": 0.01},
            "schedule": {"name": "constant"},
            **(training or {}),
        },
        "parallelism": {"stages": 1, "members_per_stage": 1, **parallelism},
    }


def declared(vocabulary: int = 400) -> dict[str, Any]:
    return {
        "layers": [
            {"type": "embedding_bag", "options": {"num_embeddings": vocabulary, "embedding_dim": 16}},
            {"type": "relu"},
            {"type": "linear", "options": {"in_features": 16, "out_features": 2}},
        ]
    }


def pretrained(folder: Path) -> dict[str, Any]:
    """Return a folder with a causal language model, whose head for tokens a classifier does not use."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(hub_configuration(LLAMA)).save_pretrained(folder)
    return {"path": str(folder)}


class Declared(nn.Module):
    """The declared layers, with the mean over tokens written out."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(400, 16), nn.Linear(16, 2)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        summed = (self.table(ids) * mask[:, :, None]).sum(1)
        outputs: torch.Tensor = self.head(torch.relu(summed / mask.sum(1, keepdim=True)))
        return outputs


def plain_losses(document: dict[str, Any], folder: Path) -> list[float]:
    """Train with torch and transformers alone, whole batches at a time; only data and initial weights are ours."""
    spec = parse_job(document)
    data = prepare(spec, folder / "data")
    assert data.description is not None
    made = blueprint_of(
        spec, data.vocab_size, objective=data.objective, sample_shape=data.sample_shape,
        classes=data.description["classes"],
    )  # fmt: skip
    layers = len(made.layers) or 2
    start = build_stage(made, Shard("m", 0, layers, layers), torch.device("cpu"))
    start.initialize(spec.training.seed)
    weights = start.persistent()
    model: Any = Declared()
    if made.config is None:
        model.load_state_dict(dict(zip(model.state_dict(), weights.values(), strict=True)))
    else:
        model = AutoModelForSequenceClassification.from_config(hub_configuration(made.config))
        model.load_state_dict(weights)
        if spec.model.path is not None and made.uses_encoder:
            stored = AutoModel.from_pretrained(spec.model.path)
            model.bert.load_state_dict(stored.state_dict())
        elif spec.model.path is not None:
            stored = AutoModelForCausalLM.from_pretrained(spec.model.path)
            model.model.load_state_dict(stored.model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0, betas=(0.9, 0.95))
    order = StepOrder(spec.training.seed, data.samples.size("train"), spec.training.batch_size)
    losses = []
    for step in range(1, STEPS + 1):
        ids, targets = map(torch.tensor, data.samples.take("train", order.indices(step)))
        mask = (torch.arange(LENGTH) <= targets[:, 1:]).float()
        if made.config is None:
            loss = nn.functional.cross_entropy(model(ids, mask), targets[:, 0])
        else:
            loss = model(input_ids=ids, attention_mask=mask, labels=targets[:, 0]).loss
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", ["declared", "folder", pytest.param("config", marks=pytest.mark.thorough)])
def test_losses_and_metrics_do_not_depend_on_the_layout(attempt: Attempt, tmp_path: Path, kind: str) -> None:
    file = written(tmp_path / "data")
    model = {"declared": declared, "config": lambda: {"config": LLAMA}}.get(
        kind,
        lambda: pretrained(tmp_path / "m"),  # type: ignore[no-untyped-call]
    )()
    document = job(file, model)
    runs = runs_in_layouts(attempt, document, tmp_path, LAYOUTS)
    assert losses_of(runs[0]) == pytest.approx(plain_losses(document, tmp_path / "plain"), abs=1e-5)
    result = tmp_path / "2" / "artifacts" / "model"
    assert json.loads((result / "data.json").read_text())["classes"] == ["code", "prose"]
    assert (result / "tokenizer.json").is_file()
    if kind != "declared":
        loaded = AutoModelForSequenceClassification.from_pretrained(result)
        assert loaded.config.id2label == {0: "code", 1: "prose"}
        assert torch.equal(loaded.score.weight, weights_of(tmp_path / "0")["score.weight"])


@pytest.mark.parametrize("kind", ["folder", pytest.param("config", marks=pytest.mark.thorough)])
def test_losses_of_an_encoder_do_not_depend_on_the_layout(
    attempt: Attempt, tmp_path: Path, kind: str
) -> None:
    model: dict[str, Any] = {"config": BERT}
    if kind == "folder":
        torch.manual_seed(0)
        AutoModel.from_config(hub_configuration(BERT)).save_pretrained(tmp_path / "m")
        model = {"path": str(tmp_path / "m")}
    document = job(written(tmp_path / "data"), model)
    if kind == "folder":
        document["tokenizer"] = {"vocab_size": 400}
    runs = runs_in_layouts(attempt, document, tmp_path, LAYOUTS)
    assert losses_of(runs[0]) == pytest.approx(plain_losses(document, tmp_path / "plain"), abs=1e-5)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "2" / "artifacts" / "model")
    assert type(loaded).__name__ == "BertForSequenceClassification"
    assert loaded.config.id2label == {0: "code", 1: "prose"}
    assert torch.equal(loaded.classifier.weight, weights_of(tmp_path / "0")["classifier.weight"])


def test_rounds_begin_with_the_weights_of_the_folder_and_a_new_head(tmp_path: Path) -> None:
    model = pretrained(tmp_path / "m")
    document = job(written(tmp_path / "data"), model)
    spec = parse_job(document)
    data = prepare(spec, tmp_path / "prepared")
    made = blueprint_of(spec, data.vocab_size, objective=data.objective, classes=("code", "prose"))
    facts: Any = SimpleNamespace(blueprint=made)
    begun = {name: value for shard in initial_shards(spec, facts) for name, value in shard.trained.items()}
    stored = AutoModelForCausalLM.from_pretrained(model["path"]).model.state_dict()
    assert {name.removeprefix("model.") for name in begun} == {*stored, "score.weight"}
    assert all(torch.equal(begun[f"model.{name}"], value) for name, value in stored.items())
    assert begun["score.weight"].std() > 0


def test_the_nearest_text_of_a_microbatch_is_predicted() -> None:
    objective = Objective(task="embedding", loss="info_nce")
    outputs = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9], [1.0, 0.1], [-1.0, 0.0]])
    result = evaluated(outputs, torch.zeros(3, 2, dtype=torch.int64), objective, 0)
    assert result.fits(objective, 3)
    assert not result.fits(objective, 6)
    assert result.predictions().predicted.tolist() == [0, 1, 0]
    assert figures_of([result.predictions()], objective)["accuracy"] == pytest.approx(2 / 3)


def test_embeddings_do_not_depend_on_the_layout(attempt: Attempt, tmp_path: Path) -> None:
    rows = [{"text": f"the number {number}", "positive": f"{number} is a number"} for number in range(60)]
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    training = {"steps": 60, "batch_size": 16, "optimizer": {"learning_rate": 0.02}}
    document = job(file, declared(), training)
    document |= {"task": "embedding", "data": {"files": [str(file)], "pairs": {}, "test_fraction": 0.2}}
    document["model"]["layers"][-1]["options"]["out_features"] = 16
    runs = runs_in_layouts(attempt, document, tmp_path, LAYOUTS)
    assert losses_of(runs[0])[-1] < losses_of(runs[0])[0] / 2
    assert validated(runs[0], "test").accuracy > 1 / 8  # that of a guess, in microbatches of 8 pairs


@pytest.mark.chaos
def test_a_kill_leaves_the_same_weights_and_metrics(
    attempt: Attempt, tmp_path: Path, nodes: list[Any]
) -> None:
    file = written(tmp_path / "data")
    document = job(file, {"config": LLAMA}, {"steps": 300, "microbatches": 4, "validate_every": 50}, stages=2)
    require_no_change_by_a_kill(attempt, document, tmp_path, nodes[1])


@pytest.mark.chaos
@pytest.mark.thorough
def test_a_kill_leaves_the_same_weights_of_an_encoder_with_dropout(
    attempt: Attempt, tmp_path: Path, nodes: list[Any]
) -> None:
    file = written(tmp_path / "data")
    config = {name: value for name, value in BERT.items() if "dropout" not in name}
    document = job(
        file, {"config": config}, {"steps": 200, "microbatches": 4, "validate_every": 50}, stages=2
    )
    require_no_change_by_a_kill(attempt, document, tmp_path, nodes[1])


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["declared", "config"])
def test_code_is_told_from_prose(attempt: Attempt, tmp_path: Path, kind: str) -> None:
    file = written(tmp_path / "data", 140)
    model = declared() if kind == "declared" else {"config": LLAMA}
    rate = 0.01 if kind == "declared" else 0.003
    training = {"steps": 80, "batch_size": 16, "optimizer": {"learning_rate": rate}}
    document = job(file, model, training, stages=2)
    document["data"]["validation_fraction"] = 0
    found = validated(succeeded(attempt(document)), "test")
    assert found.accuracy >= 0.92
    assert found.auroc >= 0.95
