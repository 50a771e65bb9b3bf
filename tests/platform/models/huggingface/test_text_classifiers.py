"""Classifiers of texts: equal to those of transformers, cut or whole, and independent of padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.platform.models.huggingface.small_stages import LAYERS, stages, through
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from share_compute.errors import UserError
from share_compute.models.blueprint import Blueprint, blueprint_of
from share_compute.models.factory import build_stage, dissect
from share_compute.models.huggingface.conversion import pretrained_weights
from share_compute.models.huggingface.cut_check import require_causal
from share_compute.models.huggingface.decoder import published_config, sketch
from share_compute.models.huggingface.hub_configuration import check_trainable, hub_configuration
from share_compute.models.losses import loss_sum, selected, target_count
from share_compute.models.objective import Objective
from share_compute.shards import Shard
from share_compute.specification import parse_job

PADDING = 1
NAMES = ("bad", "fair", "good")
OBJECTIVE = Objective(task="text_classification", classes=len(NAMES), padding=PADDING)
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": 8},
    "mixtral": {"num_local_experts": 2, "sliding_window": None},
    "gemma": {"head_dim": 8},
}
LENGTHS = (3, 9, 12)


def job(kind: str, model: dict[str, Any] | None = None) -> Any:
    sizes = {
        "vocab_size": 60, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": LAYERS,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    config = {"model_type": kind, **sizes, **CONFIGS[kind]}
    return parse_job(
        {
            "model": model or {"config": config},
            "data": {"files": ["a.csv"], "labels": {}},
            "training": {"sequence_length": 16},
        }
    )


def blueprint(kind: str, model: dict[str, Any] | None = None) -> Blueprint:
    return blueprint_of(job(kind, model), 60, objective=OBJECTIVE, classes=NAMES)


def samples(width: int) -> tuple[Tensor, Tensor]:
    """Return ids of three texts, padded to ``width``, and their targets."""
    random = torch.Generator().manual_seed(1)
    ids = torch.full((len(LENGTHS), width), PADDING)
    for row, length in enumerate(LENGTHS):
        ids[row, :length] = torch.randint(3, 60, (length,), generator=random)
    return ids, torch.tensor([[row, length - 1] for row, length in enumerate(LENGTHS)])


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_classifier_is_that_of_transformers_cut_or_whole(kind: str) -> None:
    made = blueprint(kind)
    whole = stages(made, 0, LAYERS)
    ids, targets = samples(16)
    theirs = AutoModelForSequenceClassification.from_config(hub_configuration(made.config or {})).eval()
    theirs.load_state_dict(whole[0].persistent(), strict=True)
    expected = theirs(input_ids=ids, attention_mask=(ids != PADDING).long()).logits
    outputs = through(whole, ids)
    found, classes = selected(outputs, targets, OBJECTIVE)
    assert torch.allclose(found, expected, atol=1e-5)
    assert classes.tolist() == [0, 1, 2]
    assert target_count(targets, OBJECTIVE) == 3
    assert loss_sum(outputs, targets, OBJECTIVE).item() == pytest.approx(
        cross_entropy(expected, classes, reduction="sum").item(), abs=1e-5
    )
    assert torch.equal(through(stages(made, 0, 1, 3, LAYERS), ids), outputs)
    require_causal(made.config or {})


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_padding_has_no_part_in_the_loss(kind: str) -> None:
    parts = stages(blueprint(kind), 0, LAYERS)
    sums = []
    for width in (12, 16, 40):
        ids, targets = samples(width)
        sums.append(loss_sum(through(parts, ids), targets, OBJECTIVE).item())
    assert sums == pytest.approx([sums[0]] * 3, abs=1e-5)


def test_padding_has_no_part_in_declared_layers() -> None:
    layers = [
        {"type": "embedding_bag", "options": {"num_embeddings": 60, "embedding_dim": 8}},
        {"type": "linear", "options": {"in_features": 8, "out_features": 3}},
    ]
    made = blueprint("llama", {"layers": layers})
    assert made.layers[0].options["padding_idx"] == PADDING
    stage = build_stage(made, Shard("m", 0, 2, 2), torch.device("cpu"))
    stage.initialize(0)
    found = [loss_sum(stage.forward(ids), targets, OBJECTIVE) for ids, targets in (samples(12), samples(16))]
    assert torch.equal(*found)
    found[0].backward()  # type: ignore[no-untyped-call]
    weight = next(iter(stage.parameters().values()))
    assert weight.grad is not None
    assert not weight.grad[PADDING].any()
    profile = dissect(made)
    assert profile.counted
    wrong = [{"type": "embedding", "options": {"num_embeddings": 60, "embedding_dim": 8, "padding_idx": 7}}]
    with pytest.raises(
        UserError, match=r"layer 0 \(embedding\) has padding_idx 7, but texts are padded with token 1"
    ):
        blueprint("llama", {"layers": wrong})


def test_the_head_is_read_only_if_the_classes_are_the_same(tmp_path: Path) -> None:
    made = blueprint("llama")
    torch.manual_seed(0)
    config = hub_configuration(made.config or {})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "causal")
    classifier = AutoModelForSequenceClassification.from_config(config)
    classifier.save_pretrained(tmp_path / "classifier")
    for folder, added in (("causal", {"score.weight"}), ("classifier", set())):
        loaded = blueprint("llama", {"path": str(tmp_path / folder)})
        weights = pretrained_weights(tmp_path / folder, loaded)
        assert weights.added == added
        assert ("score.weight" in weights.names()) == (not added)
    assert torch.equal(weights.read("score.weight"), classifier.score.weight)
    other = loaded.model_copy(
        update={"config": {**(loaded.config or {}), "id2label": {"0": "x", "1": "y", "2": "z"}}}
    )
    assert pretrained_weights(tmp_path / "classifier", other).added == {"score.weight"}
    last = stages(loaded, 0, 1, LAYERS)[1]
    assert last.added == {"score.weight"}
    before = last.persistent()["score.weight"].clone()
    last.persistent()["score.weight"].zero_()
    last.initialize_added(3)
    assert torch.equal(last.persistent()["score.weight"], before)


def test_the_saved_configuration_is_that_of_a_classifier() -> None:
    made = blueprint("llama")
    saved = published_config(made.config or {}, made.objective)
    assert saved["architectures"] == ["LlamaForSequenceClassification"]
    assert hub_configuration(saved).id2label == dict(enumerate(NAMES))
    assert saved["pad_token_id"] == PADDING


def test_a_classifier_is_planned_like_its_language_model() -> None:
    made = blueprint("llama")
    profile, head = dissect(made), sketch(made.config or {}, kind=AutoModelForSequenceClassification)
    assert profile.counted
    assert profile.no_cut_reason is None
    assert len(profile.layers) == LAYERS
    assert profile.embedding is not None
    total = sum(layer.parameters for layer in (*profile.layers, profile.embedding, profile.head))
    assert total == sum(parameter.numel() for parameter in head.parameters())


def test_architectures_that_cannot_be_classifiers_are_refused() -> None:
    with pytest.raises(UserError, match="'electra' declares no pipeline plan"):
        check_trainable({"model_type": "electra"}, "text_classification")
    with pytest.raises(UserError, match="'bert' declares no pipeline plan"):
        check_trainable({"model_type": "bert"}, "language_model")
    with pytest.raises(UserError, match="'granite' has no head for classes of texts"):
        check_trainable({"model_type": "granite"}, "text_classification")
    check_trainable({"model_type": "granite"})
