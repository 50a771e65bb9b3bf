"""The naming scheme in a model's profile gives each stored weight the layer of the stage that holds it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.platform.models.huggingface.small_stages import ENCODERS, LAYERS, SIZES

from share_compute.models.blueprint import Blueprint
from share_compute.models.factory import build_stage, dissect
from share_compute.models.objective import Objective
from share_compute.models.profiles.places import BEFORE
from share_compute.shards import Shard
from share_compute.specification import LoraSpec
from share_compute.specification.layers import LayerSpec

CLASSES = Objective(task="text_classification", classes=3, padding=1)
IMAGES = Objective(task="image_classification", classes=3)
VIT = {**SIZES, "model_type": "vit", "patch_size": 4, "image_size": 8}
MODELS: dict[str, Any] = {
    "declared": {
        "layers": [LayerSpec(type="linear", options={"in_features": 2, "out_features": 2})] * LAYERS,
        "sample_shape": (2,),
    },
    "base": {"config": {**SIZES, "model_type": "llama"}, "objective": Objective(task="embedding", padding=1)},
    "lora": {"config": {**SIZES, "model_type": "llama"}, "lora": LoraSpec(rank=2)},
    "tied": {"config": {**SIZES, "model_type": "llama", "tie_word_embeddings": True}},
    "classifier": {"config": {**SIZES, "model_type": "llama"}, "objective": CLASSES},
    "bert": {"config": {"model_type": "bert", **ENCODERS["bert"]}, "objective": CLASSES},
    "distilbert": {"config": {"model_type": "distilbert", **ENCODERS["distilbert"]}, "objective": CLASSES},
    "vit": {"config": VIT, "objective": IMAGES, "sample_shape": (3, 8, 8)},
}


@pytest.mark.parametrize("kind", MODELS)
def test_a_weight_has_a_layer_of_the_stage_that_stores_it(kind: str) -> None:
    made = Blueprint(**MODELS[kind])
    places = dissect(made).places
    assert places is not None
    for start, stop in ((0, 1), (1, LAYERS - 1), (LAYERS - 1, LAYERS)):
        stage = build_stage(made, Shard("m", start, stop, LAYERS), torch.device("cpu"))
        held = {*range(start, stop), *([BEFORE] if start == 0 else []), *([LAYERS] if stop == LAYERS else [])}
        copied = places.tied if stop == LAYERS else ()
        names = [name for name in stage.persistent() if name not in copied or start == 0]
        assert names
        assert {name: places.layer_of(name) for name in names if places.layer_of(name) not in held} == {}
        assert all(places.of(name) == places.layer_of(name) for name in names)
    assert places.tied == (("model.embed_tokens.weight",) if kind == "tied" else ())


@pytest.mark.parametrize(
    "name", ["layers.4.weight", "layers.x.weight", f"layers.{'9' * 5000}.a", "4.weight", ""]
)
def test_a_foreign_name_has_no_layer(name: str) -> None:
    places = dissect(Blueprint(**MODELS["declared"])).places
    assert places is not None
    assert places.layer_of(name) is None
