"""Encoders that classify texts: equal to those of transformers, cut or whole, and independent of padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.platform.models.huggingface.small_stages import ENCODERS, LAYERS, SIZES, stages, through
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModel, AutoModelForSequenceClassification

from share_compute.errors import UserError
from share_compute.models.blueprint import Blueprint, blueprint_of
from share_compute.models.factory import dissect
from share_compute.models.huggingface.conversion import pretrained_weights
from share_compute.models.huggingface.decoder import published_config
from share_compute.models.huggingface.hub_configuration import check_trainable, hub_configuration
from share_compute.models.objective import Objective
from share_compute.specification import parse_job

PADDING = 1
NAMES = ("bad", "fair", "good")
OBJECTIVE = Objective(task="text_classification", classes=len(NAMES), padding=PADDING)
LENGTHS = (3, 9, 12)


def job(model: dict[str, Any], labels: dict[str, Any] | None = None, **training: Any) -> Any:
    return parse_job(
        {
            "model": model,
            "data": {"files": ["a.csv"], "labels": labels or {}},
            "training": {"sequence_length": 16, **training},
        }
    )


def blueprint(kind: str, folder: Path | None = None, **training: Any) -> Blueprint:
    config = {"model_type": kind, **ENCODERS[kind]}
    spec = job({"config": config} if folder is None else {"path": str(folder)}, **training)
    return blueprint_of(spec, 60, objective=OBJECTIVE, classes=NAMES)


def samples(width: int = 16) -> Tensor:
    """Return ids of three texts, padded to ``width``."""
    random = torch.Generator().manual_seed(1)
    ids = torch.full((len(LENGTHS), width), PADDING)
    for row, length in enumerate(LENGTHS):
        ids[row, :length] = torch.randint(3, 60, (length,), generator=random)
    return ids


@pytest.mark.parametrize("kind", ENCODERS)
def test_an_encoder_is_that_of_transformers_cut_or_whole(kind: str) -> None:
    made = blueprint(kind)
    check_trainable(made.config or {}, "text_classification")
    whole = stages(made, 0, LAYERS)
    ids = samples()
    theirs = AutoModelForSequenceClassification.from_config(hub_configuration(made.config or {})).eval()
    theirs.load_state_dict(whole[0].persistent(), strict=True)
    expected = theirs(input_ids=ids, attention_mask=(ids != PADDING).long()).logits
    assert torch.allclose(through(whole, ids), expected, atol=1e-5)
    for edges in ((0, 1, LAYERS), (0, 1, 3, LAYERS), tuple(range(LAYERS + 1))):
        assert torch.equal(through(stages(made, *edges), ids), through(whole, ids))
    assert torch.allclose(through(whole, samples(40)), expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_and_dropout_do_not_depend_on_the_cut(kind: str, checkpointing: bool) -> None:
    made = blueprint(kind, activation_checkpointing=checkpointing)
    found: list[dict[str, Tensor]] = []
    for edges in ((0, LAYERS), (0, 2, 3, LAYERS)):
        parts = stages(made, *edges)
        carried = samples()
        for part in parts:
            part.module.train()
            part.prepare_cell(1, 5, 2)
            carried = part.forward(carried)
        cross_entropy(carried, torch.tensor([0, 1, 2])).backward()  # type: ignore[no-untyped-call]
        gradients = {name: each.grad for part in parts for name, each in part.parameters().items()}
        found.append({name: each for name, each in gradients.items() if each is not None})
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(each, found[1][name]) for name, each in found[0].items())


def test_heads_are_read_only_if_the_classes_are_the_same(tmp_path: Path) -> None:
    made = blueprint("bert")
    config = hub_configuration(made.config or {})
    torch.manual_seed(0)
    AutoModel.from_config(config).save_pretrained(tmp_path / "base")
    AutoModel.from_config(config, add_pooling_layer=False).save_pretrained(tmp_path / "unpooled")
    classifier = AutoModelForSequenceClassification.from_config(config)
    classifier.save_pretrained(tmp_path / "classifier")
    head = {"classifier.weight", "classifier.bias"}
    pooler = {"bert.pooler.dense.weight", "bert.pooler.dense.bias"}
    for name, added in (("base", head), ("unpooled", head | pooler), ("classifier", set[str]())):
        weights = pretrained_weights(tmp_path / name, blueprint("bert", tmp_path / name))
        assert weights.added == added
        assert set(weights.names()) == set(classifier.state_dict()) - added
    assert torch.equal(weights.read("classifier.weight"), classifier.classifier.weight)
    (last,) = stages(made, 2, LAYERS)
    assert last.added == head | pooler
    before = {name: tensor.clone() for name, tensor in last.persistent().items()}
    for name in last.added:
        last.persistent()[name].zero_()
    last.initialize_added(3)
    assert all(torch.equal(tensor, before[name]) for name, tensor in last.persistent().items())


@pytest.mark.parametrize("kind", ENCODERS)
def test_an_encoder_is_planned_layer_by_layer(kind: str) -> None:
    made = blueprint(kind)
    profile = dissect(made)
    assert len(profile.layers) == LAYERS
    assert profile.embedding is not None
    assert profile.no_cut_reason is None
    (whole,) = stages(made, 0, LAYERS)
    total = sum(layer.parameters for layer in (*profile.layers, profile.embedding, profile.head))
    assert total == sum(parameter.numel() for parameter in whole.parameters().values())
    frozen = dissect(blueprint(kind, freeze=["layers[:2]"]))
    assert [layer.frozen > 0 for layer in frozen.layers] == [True, True, False, False]


def test_the_saved_configuration_is_that_of_a_classifier() -> None:
    made = blueprint("roberta")
    saved = published_config(made.config or {}, made.objective)
    assert saved["architectures"] == ["RobertaForSequenceClassification"]
    assert saved["pad_token_id"] == PADDING


def test_what_encoders_cannot_do_is_refused() -> None:
    bert = job({"config": {"model_type": "bert", **SIZES}}, {"pair": "second"})
    with pytest.raises(UserError, match=r"data\.labels\.pair: architecture 'bert' .* token types"):
        blueprint_of(bert, 60, objective=OBJECTIVE, classes=NAMES)
    roberta = {"config": {"model_type": "roberta", **SIZES}}
    blueprint_of(job(roberta, {"pair": "second"}), 60, objective=OBJECTIVE, classes=NAMES)
    with pytest.raises(UserError, match="sequence_length 63 is longer than the model's window of 62 tokens"):
        blueprint_of(job(roberta, sequence_length=63), 60, objective=OBJECTIVE, classes=NAMES)
    decoder = {"model_type": "bert", "is_decoder": True}
    with pytest.raises(UserError, match="declares no pipeline plan"):
        check_trainable(decoder, "text_classification")
