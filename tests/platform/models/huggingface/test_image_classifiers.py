"""Hugging Face models that classify images: wherever they are cut, they compute what the whole model computes."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoConfig, AutoImageProcessor, AutoModelForCausalLM, AutoModelForImageClassification

from share_compute.data.images import read_image
from share_compute.errors import UserError
from share_compute.models.blueprint import Blueprint, blueprint_of
from share_compute.models.boundary import Boundaries
from share_compute.models.factory import build_stage, dissect
from share_compute.models.huggingface.conversion import pretrained_weights
from share_compute.models.huggingface.decoder import published_config, sketch
from share_compute.models.huggingface.hub_configuration import check_trainable, hub_configuration
from share_compute.models.image_types import IMAGE_MODELS, image_processor, require_images
from share_compute.models.losses import loss_sum
from share_compute.models.objective import Objective
from share_compute.models.profiles.profiling import count
from share_compute.shards import Shard
from share_compute.specification import ImagesSpec, Task, TrainJob, parse_job
from share_compute.specification.boundaries import NO_BOUNDARY_COMPRESSION
from share_compute.specification.transforms import CropSpec

CPU = torch.device("cpu")
LAYERS = 3
SHAPE = (3, 16, 8)
CLASSES = ("cat", "dog", "emu", "fox")
OBJECTIVE = Objective(task="image_classification", classes=len(CLASSES))


def config(kind: str = "vit", **options: Any) -> dict[str, Any]:
    return {
        "model_type": kind,
        "hidden_size": 32,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "patch_size": 4,
        **options,
    }


def job(model: dict[str, Any], **training: Any) -> TrainJob:
    channels, height, width = SHAPE
    return parse_job(
        {
            "model": model,
            "data": {"files": ["pets"], "images": {"height": height, "width": width, "channels": channels}},
            "training": {"steps": 1, **training},
        }
    )


def declared(kind: str = "vit", **options: Any) -> Blueprint:
    spec = job({"config": config(kind, **options)})
    return blueprint_of(spec, None, objective=OBJECTIVE, sample_shape=SHAPE, classes=CLASSES)


def computed(blueprint: Blueprint, inputs: Tensor, edges: list[int], *, trains: bool = False) -> Tensor:
    hidden = inputs
    for start, stop in pairwise(edges):
        stage = build_stage(blueprint, Shard("m", start, stop, LAYERS), CPU)
        stage.initialize(5)
        stage.module.train(trains)
        stage.prepare_cell(5, 2, 1)
        hidden = stage.forward(hidden)
    return hidden.detach()


def whole(blueprint: Blueprint) -> Any:
    """Return transformers' own model with the same weights."""
    stage = build_stage(blueprint, Shard("m", 0, LAYERS, LAYERS), CPU)
    stage.initialize(5)
    made = AutoModelForImageClassification.from_config(AutoConfig.for_model(**(blueprint.config or {})))
    made.load_state_dict(stage.persistent())
    return made.eval()


@pytest.mark.parametrize("kind", IMAGE_MODELS)
def test_every_cut_computes_what_the_whole_model_computes(kind: str) -> None:
    blueprint, inputs = declared(kind), torch.rand(3, *SHAPE)
    expected = whole(blueprint)(pixel_values=inputs).logits
    assert expected.shape == (3, len(CLASSES))
    for edges in ([0, 3], [0, 1, 3], [0, 2, 3], [0, 1, 2, 3]):
        assert torch.equal(computed(blueprint, inputs, edges), expected)


def test_dropout_does_not_depend_on_the_cut() -> None:
    blueprint = declared(hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.2)
    inputs = torch.rand(3, *SHAPE)
    uncut = computed(blueprint, inputs, [0, 3], trains=True)
    assert torch.equal(computed(blueprint, inputs, [0, 1, 2, 3], trains=True), uncut)
    assert not torch.equal(computed(blueprint, inputs, [0, 3]), uncut)


@pytest.mark.parametrize("kind", IMAGE_MODELS)
def test_costs_are_those_of_real_stages(kind: str) -> None:
    blueprint = declared(kind)
    profile = dissect(blueprint)
    assert profile.counted
    assert profile.no_cut_reason is None
    inputs, targets = torch.rand(2, *SHAPE), torch.zeros(2, dtype=torch.int64)
    stages = [build_stage(blueprint, Shard("m", *edge, LAYERS), CPU) for edge in ((0, 1), (1, 3))]
    assert profile.parameters == sum(each.numel() for stage in stages for each in stage.parameters().values())
    first, last = stages
    for stage in stages:
        stage.initialize(0)
    hidden = first.forward(inputs).detach()
    real = count(lambda: loss_sum(last.forward(hidden), targets, OBJECTIVE), hidden, last.module)
    parts = [*profile.layers[1:], profile.head]
    assert 2 * sum(part.forward_flops.at(1) for part in parts) == real.forward_flops
    assert profile.layers[0].boundary_numbers.at(1) == hidden[0].numel()


def test_boundaries_have_the_shape_of_hidden_states() -> None:
    blueprint = declared()
    first = build_stage(blueprint, Shard("m", 0, 2, LAYERS), CPU)
    first.initialize(0)
    expected = Boundaries.of(
        first, blueprint, 3, 128, gradients_are_finite=True, compression=NO_BOUNDARY_COMPRESSION
    )
    assert expected.gradient is not None
    assert expected.gradient.misfit(first.forward(torch.rand(3, *SHAPE))) is None


def saved(folder: Path, classes: tuple[str, ...], **options: Any) -> Any:
    """Write a model with random weights as transformers does, and return it."""
    labels: dict[str, Any] = {
        "id2label": dict(enumerate(classes)),
        "label2id": {name: at for at, name in enumerate(classes)},
    }
    size: dict[str, Any] = {"image_size": [16, 8], "num_channels": 3}
    torch.manual_seed(0)
    made = AutoModelForImageClassification.from_config(
        AutoConfig.for_model(**config(**size, **labels, **options))
    )
    made.save_pretrained(folder)
    return made.eval()


@pytest.mark.parametrize("has_head", [True, False])
def test_a_folder_is_read_with_its_head_or_gets_a_new_one(tmp_path: Path, has_head: bool) -> None:
    peer = saved(tmp_path, CLASSES if has_head else ("left", "right"))
    spec = job({"path": str(tmp_path)})
    blueprint = blueprint_of(spec, None, objective=OBJECTIVE, sample_shape=SHAPE, classes=CLASSES)
    weights = pretrained_weights(tmp_path, blueprint)
    assert weights.added == (frozenset() if has_head else {"classifier.weight", "classifier.bias"})
    inputs, hidden = torch.rand(2, *SHAPE), torch.empty(0)
    for start, stop in ((0, 2), (2, 3)):
        stage = build_stage(blueprint, Shard("m", start, stop, LAYERS), CPU)
        stage.initialize_added(1)
        with torch.no_grad():
            for name, tensor in stage.persistent().items():
                if name in weights.names():
                    tensor.copy_(weights.read(name))
        stage.module.eval()
        hidden = stage.forward(inputs if start == 0 else hidden)
    assert hidden.shape == (2, len(CLASSES))
    if has_head:
        assert torch.equal(hidden, peer(pixel_values=inputs).logits)


def test_results_are_folders_of_transformers() -> None:
    blueprint = declared()
    published = published_config(blueprint.config or {}, OBJECTIVE)
    assert published["architectures"] == ["ViTForImageClassification"]
    assert published["id2label"] == {"0": "cat", "1": "dog", "2": "emu", "3": "fox"}
    assert (published["image_size"], published["num_channels"]) == ([16, 8], 3)


def test_transformers_prepares_images_as_the_job_did(tmp_path: Path) -> None:
    spec = job({"config": config()}).data.images
    assert spec is not None
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps(image_processor(spec, None)))
    pixels = np.random.default_rng(0).integers(0, 256, (16, 8, 3), dtype=np.uint8)
    found = AutoImageProcessor.from_pretrained(tmp_path)(Image.fromarray(pixels), return_tensors="pt")
    expected = (torch.tensor(pixels).permute(2, 0, 1) / 255 - 0.5) / 0.5
    assert torch.allclose(found.pixel_values[0], expected, atol=1e-6)
    file.write_text(json.dumps(image_processor(spec, CropSpec(height=8, width=4))))
    cut = AutoImageProcessor.from_pretrained(tmp_path)(Image.fromarray(pixels), return_tensors="pt")
    assert torch.allclose(cut.pixel_values[0], expected[:, 4:12, 2:6], atol=1e-6)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P"])
def test_transformers_prepares_images_of_any_kind_as_the_job_did(tmp_path: Path, mode: str) -> None:
    spec = job({"config": config()}).data.images
    assert spec is not None
    random = np.random.default_rng(0).integers(0, 256, (40, 30, 4), dtype=np.uint8)
    image = Image.fromarray(random, "RGBA").convert("RGB" if mode == "P" else "RGBA").convert(mode)
    image.save(tmp_path / "a.png")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(image_processor(spec, None)))
    with Image.open(tmp_path / "a.png") as opened:
        theirs = AutoImageProcessor.from_pretrained(tmp_path)(opened, return_tensors="np")["pixel_values"][0]
    ours = (read_image(tmp_path / "a.png", spec) / 255 - 0.5) / 0.5
    assert np.abs(ours - theirs).max() < 0.03


def test_transformers_prepares_grey_images_as_the_job_did(tmp_path: Path) -> None:
    spec = ImagesSpec(height=20, width=15, channels=1)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 30), dtype=np.uint8))
    image.save(tmp_path / "a.png")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(image_processor(spec, None)))
    theirs = AutoImageProcessor.from_pretrained(tmp_path)(image, return_tensors="np")["pixel_values"][0]
    ours = (read_image(tmp_path / "a.png", spec) / 255 - 0.5) / 0.5
    assert np.abs(ours - theirs).max() < 0.03


def require(shape: tuple[int, ...], **options: Any) -> None:
    require_images(hub_configuration(config(**options)).to_dict(), shape)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_size": 16, "num_channels": 3}, r"samples have 16 x 8 pixels, and the model takes 16 x 16"),
        ({"image_size": [16, 8], "num_channels": 1}, "samples have 3 channels, and the model takes 1"),
        ({"image_size": [16, 8], "patch_size": 16}, "patches of 16 x 16 do not fill its images of 16 x 8"),
        ({"image_size": [16, 8], "patch_size": 3}, "patches of 3 x 3 do not fill"),
        ({"image_size": [16, 8], "patch_size": 0}, "patches of 0 x 0 do not fill"),
        ({"image_size": [16, 8], "patch_size": [4, 4, 4]}, "patch_size of the model has 3 numbers"),
        ({"image_size": 10**9}, "the model takes 1000000000 x 1000000000"),
    ],
)
def test_samples_of_another_size_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        require(SHAPE, **options)
    with pytest.raises(UserError, match=message):  # also when a plan is made, before the job is queued
        dissect(declared(**options))


@pytest.mark.parametrize(
    ("task", "kind"),
    [("image_classification", "vit"), ("language_model", "llama"), ("language_model", "gpt2")],
)
@pytest.mark.parametrize("layers", [1_001, 10**6, 10**12, 1e6])
def test_models_of_very_many_layers_are_refused_before_they_are_made(
    task: Task, kind: str, layers: float
) -> None:
    name = "n_layer" if kind == "gpt2" else "num_hidden_layers"
    with pytest.raises(
        UserError, match=rf"{name} is {layers}; at most 1000 are possible".replace("+", r"\+")
    ):
        check_trainable({"model_type": kind, name: layers}, task)
    check_trainable({"model_type": "vit", "num_hidden_layers": 1_000}, "image_classification")


@pytest.mark.parametrize("kind", [AutoModelForImageClassification, AutoModelForCausalLM])
def test_an_unknown_activation_is_a_wrong_configuration(kind: Any) -> None:
    model = config("vit" if kind is AutoModelForImageClassification else "llama", hidden_act="nope")
    with pytest.raises(UserError, match=r"this configuration does not make a .*nope"):
        sketch(model, kind=kind)
    if kind is AutoModelForImageClassification:
        with pytest.raises(
            UserError, match="this configuration does not make a classifier of images: 'nope'"
        ):
            dissect(declared(hidden_act="nope"))


@pytest.mark.parametrize("kind", ["llama", "resnet", "bert"])
def test_other_architectures_are_refused(kind: str) -> None:
    with pytest.raises(UserError, match="no classifier of images that can be cut"):
        check_trainable({"model_type": kind}, "image_classification")
    with pytest.raises(UserError):
        dissect(declared(kind))


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"lora": {}}, r"training\.lora adapts a pretrained model"),
        ({"samples": {"every": 1, "prompts": ["a"]}}, r"training\.samples: .* makes no text"),
        ({"target": {"metric": "perplexity", "value": 1}, "validate_every": 1}, "is no metric of image_classification"),
    ],
)  # fmt: skip
def test_options_of_language_models_are_refused(training: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        job({"config": config()}, **training)
