"""A language model that a second task shares, on real Ray nodes: losses as in a plain loop, lost machines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.actors.training.jobs.outcomes import (
    losses_of,
    require_no_change_by_a_kill,
    runs_in_layouts,
    validated,
    weights_of,
)
from tests.actors.training.jobs.test_text_tasks import LAYOUTS, LENGTH, STEPS, lines, pretrained, written
from tests.ray_nodes import Attempt
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from share_compute.data import StepOrder
from share_compute.data.order import task_samples
from share_compute.data.several_tasks import objectives_of, prepared_tasks
from share_compute.data.tokenization import train_tokenizer
from share_compute.models.blueprint import blueprint_of
from share_compute.models.factory import build_stage
from share_compute.shards import Shard
from share_compute.specification import parse_job

pytestmark = [pytest.mark.slow, pytest.mark.exact]

WEIGHT = 0.5


def shared(folder: Path, training: dict[str, Any] | None = None, **parallelism: Any) -> dict[str, Any]:
    """Return a job that trains a folder's model to continue texts, and to tell code from prose."""
    texts = [row["text"] for row in lines(60)]
    (folder / "texts.txt").write_text("\n".join(texts))
    train_tokenizer(texts, 400).save_pretrained(folder / "tokenizer")
    splits = {"validation_fraction": 0.2, "test_fraction": 0.2}
    labelled = {"files": [str(written(folder / "data", 40))], "labels": {}, **splits}
    return {
        "model": pretrained(folder / "m"),
        "tokenizer": {"path": str(folder / "tokenizer")},
        "data": {"files": [str(folder / "texts.txt")], **splits},
        "tasks": [{"name": "text"}, {"name": "kind", "weight": WEIGHT, "data": labelled}],
        "training": {
            "steps": STEPS,
            "batch_size": 8,
            "microbatches": 2,
            "sequence_length": LENGTH,
            "optimizer": {"learning_rate": 0.01},
            "schedule": {"name": "constant"},
            **(training or {}),
        },
        "parallelism": {"stages": 1, "members_per_stage": 1, **parallelism},
    }


def plain_losses(document: dict[str, Any], folder: Path) -> list[float]:
    """Train with torch and transformers alone; data, order and the initial weights of the new head are ours."""
    spec = parse_job(document)
    prepared = prepared_tasks(spec, folder)
    made = blueprint_of(spec, prepared[0].vocab_size, objectives=objectives_of(spec, prepared))
    stage = build_stage(made, Shard("m", 0, 2, 2), torch.device("cpu"))
    stage.initialize_added(spec.training.seed)
    model: Any = AutoModelForCausalLM.from_pretrained(spec.model.path, dtype=torch.float32)
    head = torch.nn.Linear(32, 2, bias=False)
    head.load_state_dict({"weight": stage.persistent()["head_kind.weight"]})
    trained = [*model.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(trained, lr=0.01, weight_decay=0.0, betas=(0.9, 0.95))
    count, size = spec.training.microbatches, spec.training.microbatch_size
    assert count == 2
    orders = [StepOrder(spec.training.seed, each.samples.size("train"), size) for each in prepared]
    losses = []
    for step in range(1, STEPS + 1):
        (ids, tokens), (texts, wanted) = (
            map(torch.tensor, each.samples.take("train", task_samples(orders, count, step, task)))
            for task, each in enumerate(prepared)
        )
        of_text = cross_entropy(model(input_ids=ids).logits.flatten(0, 1), tokens.flatten())
        hidden = model.model(input_ids=texts).last_hidden_state
        of_kind = cross_entropy(head(hidden[torch.arange(len(texts)), wanted[:, 1]]), wanted[:, 0])
        loss = (of_text + WEIGHT * of_kind) / 2
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_losses_are_those_of_a_plain_loop_in_every_layout(attempt: Attempt, tmp_path: Path) -> None:
    document = shared(tmp_path)
    runs = runs_in_layouts(attempt, document, tmp_path, LAYOUTS)
    assert losses_of(runs[0]) == pytest.approx(plain_losses(document, tmp_path / "plain"), abs=1e-5)
    step: Any = next(event for event in runs[0] if event.type == "step")
    assert step.loss == pytest.approx((step.tasks["text.loss"] + WEIGHT * step.tasks["kind.loss"]) / 2)
    assert {"text.perplexity", "kind.accuracy", "kind.f1"} < validated(runs[0], "test").tasks.keys()
    assert {event.task for event in runs[0] if event.type == "pictured"} == {"kind"}
    result = tmp_path / "2" / "artifacts" / "model"
    loaded: Any = AutoModelForCausalLM.from_pretrained(result)
    weights = weights_of(tmp_path / "0")
    assert weights["head_kind.weight"].shape == (2, 32)
    assert torch.equal(loaded.lm_head.weight, weights["lm_head.weight"])
    described = json.loads((result / "tasks.json").read_text())
    assert [(task["name"], task["task"]) for task in described] == [
        ("text", "language_model"),
        ("kind", "text_classification"),
    ]
    assert described[1]["data"]["classes"] == ["code", "prose"]


@pytest.mark.chaos
@pytest.mark.thorough
def test_a_kill_changes_no_bit(attempt: Attempt, tmp_path: Path, nodes: list[Any]) -> None:
    document = shared(tmp_path, {"steps": 200, "microbatches": 4, "validate_every": 50}, stages=2)
    require_no_change_by_a_kill(attempt, document, tmp_path, nodes[1])
