"""Hugging Face models that classify images, on real Ray nodes: losses as in a plain loop, whatever the layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from tests.actors.training.jobs.outcomes import losses_of, runs_in_layouts, succeeded, validated, weights_of
from tests.ray_nodes import Attempt
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForImageClassification

from share_compute.data import StepOrder, prepare
from share_compute.models.blueprint import blueprint_of
from share_compute.models.factory import build_stage
from share_compute.shards import Shard
from share_compute.specification import parse_job

pytestmark = [pytest.mark.slow, pytest.mark.exact]

STEPS = 8
LAYERS = 3
VIT = {
    "model_type": "vit",
    "hidden_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "patch_size": 2,
}


def pictures(folder: Path) -> Path:
    """Write scikit-learn's digits as PNG images, with one folder for each class, and return the folder."""
    digits = load_digits()
    for number, (pixels, digit) in enumerate(zip(digits.images, digits.target, strict=True)):
        place = folder / f"digit {digit}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels * 15).astype(np.uint8)).save(place / f"{number}.png")
    return folder


def job(data: Path, model: dict[str, Any], training: dict[str, Any], **parallelism: Any) -> dict[str, Any]:
    return {
        "model": model,
        "data": {
            "files": [str(data)],
            "images": {"height": 8, "width": 8, "channels": 1},
            "validation_fraction": 0.2,
            "test_fraction": 0.2,
        },
        "training": {
            "steps": STEPS,
            "batch_size": 32,
            "microbatches": 2,  # with more threads, the order of sums follows from the first plan
            "schedule": {"name": "constant"},
            "optimizer": {"learning_rate": 0.003},
            **training,
        },
        "parallelism": {"stages": 1, "members_per_stage": 1, **parallelism},
    }


def plain_losses(document: dict[str, Any], folder: Path) -> list[float]:
    """Train transformers' own model whole; only the data and the initial weights are ours."""
    spec = parse_job(document)
    data = prepare(spec, folder / "data")
    classes = (data.description or {})["classes"]
    blueprint = blueprint_of(
        spec, None, objective=data.objective, sample_shape=data.sample_shape, classes=classes
    )
    start = build_stage(blueprint, Shard("m", 0, LAYERS, LAYERS), torch.device("cpu"))
    start.initialize(spec.training.seed)
    model: Any = AutoModelForImageClassification.from_config(AutoConfig.for_model(**(blueprint.config or {})))
    model.load_state_dict(start.persistent())
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003, weight_decay=0.0, betas=(0.9, 0.95))
    order = StepOrder(spec.training.seed, data.samples.size("train"), spec.training.batch_size)
    losses = []
    for step in range(1, STEPS + 1):
        inputs, targets = map(torch.tensor, data.samples.take("train", order.indices(step)))
        loss = cross_entropy(model(pixel_values=inputs).logits, targets)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_losses_of_a_vision_transformer_do_not_depend_on_the_layout(attempt: Attempt, tmp_path: Path) -> None:
    data = pictures(tmp_path / "pictures")
    document = job(data, {"config": VIT}, {})
    layouts: list[dict[str, Any]] = [{}, {"stages": 2}, {"stages": 3}, {"members_per_stage": 2}]
    runs = runs_in_layouts(attempt, document, tmp_path, layouts)
    assert losses_of(runs[0]) == pytest.approx(plain_losses(document, tmp_path / "plain"), abs=1e-5)


@pytest.mark.thorough
def test_a_result_is_fine_tuned_from_its_folder(attempt: Attempt, tmp_path: Path) -> None:
    """Train on digits, read the result with transformers, and continue from it, with its head and with a new one."""
    data = pictures(tmp_path / "pictures")
    training = {"steps": 300, "batch_size": 64}
    trained = succeeded(attempt(job(data, {"config": VIT}, training, stages=2), folder=tmp_path / "first"))
    assert validated(trained, "test").accuracy >= 0.9
    folder = tmp_path / "first" / "artifacts" / "model"
    model: Any = AutoModelForImageClassification.from_pretrained(folder)
    assert model.config.id2label == {digit: f"digit {digit}" for digit in range(10)}
    assert all(
        torch.equal(model.state_dict()[name], each) for name, each in weights_of(tmp_path / "first").items()
    )

    tuning = {"steps": 2, "optimizer": {"learning_rate": 1e-9}}
    same = succeeded(attempt(job(data, {"path": str(folder)}, tuning), folder=tmp_path / "same"))
    assert validated(same, "test").accuracy == validated(trained, "test").accuracy
    for digit in range(5, 10):
        (data / f"digit {digit}").rename(tmp_path / f"digit {digit}")
    fewer = {"steps": 30, "optimizer": {"learning_rate": 0.003}, "freeze": ["vit.*"]}
    tuned = succeeded(attempt(job(data, {"path": str(folder)}, fewer, stages=2), folder=tmp_path / "fewer"))
    assert any("head is new" in event.message for event in tuned if event.type == "note")
    assert validated(tuned, "test").accuracy >= 0.9
    weights, before = weights_of(tmp_path / "fewer"), weights_of(tmp_path / "first")
    assert weights["classifier.weight"].shape == (5, 48)
    assert all(torch.equal(each, before[name]) for name, each in weights.items() if name.startswith("vit."))
