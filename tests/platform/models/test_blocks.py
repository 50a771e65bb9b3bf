"""Declared blocks of layers compute the same as plain torch, wherever the model is cut, and refuse wrong input."""

from __future__ import annotations

import inspect
from collections import deque
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from share_compute.errors import UserError
from share_compute.models.blocks import MODULES
from share_compute.models.blueprint import Blueprint, blueprint_of
from share_compute.models.factory import build_stage, dissect
from share_compute.models.layers import require_fit
from share_compute.models.profiles.profiling import count
from share_compute.shards import Shard
from share_compute.specification import parse_job
from share_compute.specification.layers import EMBEDDINGS, OPTIONS, LayerSpec, expanded
from share_compute.training.optimizers import undecayed_parameters

CPU = torch.device("cpu")
RELU = {"type": "relu"}
IMAGES = {"type": "unflatten", "options": {"dim": 1, "unflattened_size": [1, 8, 8]}}


def convolution(inputs: int, outputs: int, **options: Any) -> dict[str, Any]:
    given = {"in_channels": inputs, "out_channels": outputs, "kernel_size": 3, "padding": 1, **options}
    return {"type": "conv2d", "options": given}


def norm(channels: int, groups: int = 4) -> dict[str, Any]:
    return {"type": "group_norm", "options": {"num_groups": groups, "num_channels": channels}}


RESNET = [
    IMAGES,
    convolution(1, 8),
    {
        "type": "repeat",
        "times": 2,
        "layers": [{"type": "residual", "layers": [norm(8), RELU, convolution(8, 8)]}, RELU],
    },
    {
        "type": "residual",
        "layers": [
            {"type": "sequential", "layers": [norm(8), RELU, {"type": "dropout", "options": {"p": 0.3}}]},
            {"type": "repeat", "times": 2, "layers": [convolution(8, 8, groups=2)]},
            convolution(8, 16, stride=2),
        ],
        "projection": [convolution(8, 16, kernel_size=1, padding=0, stride=2)],
    },
    {"type": "adaptive_avg_pool2d", "options": {"output_size": 1}},
    {"type": "flatten"},
    {"type": "linear", "options": {"in_features": 16, "out_features": 10}},
]
LAYERS = 10


def declared(layers: list[dict[str, Any]]) -> Blueprint:
    job = {"model": {"layers": layers}, "data": {"dataset": "digits"}, "training": {"steps": 1}}
    return blueprint_of(parse_job(job), None)


class Plain(nn.Module):
    """The same network in plain torch, without dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 8, 3, padding=1)
        self.bodies = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(4, 8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)) for _ in range(2)
        )
        self.down = nn.Sequential(
            nn.GroupNorm(4, 8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, padding=1, groups=2),
            nn.Conv2d(8, 8, 3, padding=1, groups=2),
            nn.Conv2d(8, 16, 3, padding=1, stride=2),
        )
        self.projection = nn.Conv2d(8, 16, 1, stride=2)
        self.last = nn.Linear(16, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs.view(-1, 1, 8, 8))
        for body in self.bodies:
            hidden = (hidden + body(hidden)).relu()
        hidden = self.down(hidden) + self.projection(hidden)
        logits: Tensor = self.last(hidden.mean((2, 3)))
        return logits


def computed(inputs: Tensor, edges: list[int]) -> Tensor:
    hidden = inputs
    for start, stop in pairwise(edges):
        stage = build_stage(declared(RESNET), Shard("m", start, stop, LAYERS), CPU)
        stage.initialize(1)
        stage.prepare_cell(1, 3, 0)
        hidden = stage.forward(hidden)
    return hidden


def test_blocks_compute_what_plain_torch_computes() -> None:
    stage = build_stage(declared(RESNET), Shard("m", 0, LAYERS, LAYERS), CPU)
    stage.initialize(1)
    stage.module.eval()
    names = list(stage.parameters())
    assert "layers.2.layers.2.weight" in names
    assert "layers.4.layers.2.weight" in names
    assert "layers.6.layers.0.layers.0.weight" in names
    assert "layers.6.projection.0.weight" in names
    plain, inputs = Plain(), torch.rand(5, 64)
    plain.load_state_dict(dict(zip(plain.state_dict(), stage.persistent().values(), strict=True)))
    assert torch.allclose(stage.forward(inputs), plain(inputs), atol=1e-6)
    values = stage.parameters()
    assert not torch.equal(values["layers.2.layers.2.weight"], values["layers.4.layers.2.weight"])


@pytest.mark.parametrize("cuts", [[], [2], [3, 6], list(range(1, LAYERS))])
def test_a_cut_between_blocks_changes_no_bit(cuts: list[int]) -> None:
    inputs = torch.rand(5, 64)
    assert torch.equal(computed(inputs, [0, *cuts, LAYERS]), computed(inputs, [0, LAYERS]))


def test_each_layer_after_the_repetition_has_a_profile() -> None:
    blueprint = declared(RESNET)
    profile = dissect(blueprint)
    assert profile.counted
    assert len(profile.layers) == LAYERS == len(expanded(blueprint.layers))
    assert expanded(blueprint.layers)[4].field == "model.layers.2.layers.0"
    stage = build_stage(blueprint, Shard("m", 0, LAYERS, LAYERS), CPU)
    assert profile.parameters == sum(each.numel() for each in stage.parameters().values())
    inputs = torch.rand(3, 64)
    real = count(lambda: stage.forward(inputs), inputs, stage.module)
    assert 3 * sum(layer.forward_flops.at(1) for layer in profile.layers) == real.forward_flops


def test_weights_of_norms_do_not_decay() -> None:
    stage = build_stage(declared(RESNET), Shard("m", 0, LAYERS, LAYERS), CPU)
    kept = set(undecayed_parameters(stage.module))
    decayed = {name for name, parameter in stage.parameters().items() if parameter not in kept}
    assert len(decayed) == 8
    assert all(stage.parameters()[name].dim() > 1 for name in decayed)


def nested(depth: int) -> dict[str, Any]:
    return RELU if depth == 0 else {"type": "sequential", "layers": [nested(depth - 1)]}


def repeated(times: Any, *layers: dict[str, Any]) -> dict[str, Any]:
    return {"type": "repeat", "times": times, "layers": list(layers or (RELU,))}


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nested(100), r"^model\.layers\.1(\.layers\.0){8}\.layers: at most 8 blocks may be nested"),
        (repeated(0), r"model\.layers\.1\.times: must be at least 1"),
        *(
            (repeated(times), r"model\.layers\.1\.times: must be a whole number")
            for times in ("3", 3.0, True)
        ),
        (
            repeated("150", repeated("150", repeated("150"))),
            r"model\.layers\.1\..*times: must be a whole number",
        ),
        (repeated(10**9), r"model\.layers\.1\.times: must be at most 10000"),
        (repeated(5000, RELU, RELU), r"model\.layers: more than 10000 layers are given"),
        (repeated(101, repeated(100)), r"model\.layers: more than 10000 layers are given"),
        ({"type": "repeat", "layers": [RELU]}, r"model\.layers\.1: repeat needs times"),
        ({"type": "residual", "layers": []}, r"model\.layers\.1: residual needs layers"),
        ({"type": "sequential"}, r"model\.layers\.1: sequential needs layers"),
        ({"type": "relu", "layers": [RELU]}, r"model\.layers\.1: relu has no layers"),
        ({"type": "relu", "times": 2}, r"model\.layers\.1: times is for repeat only"),
        ({"type": "residual", "layers": [RELU], "options": {"p": 1}}, "residual takes no options"),
        ({"type": "sequential", "layers": [RELU], "projection": [RELU]}, "projection is for residual only"),
        (
            {"type": "residual", "layers": [RELU, {"type": "rleu"}]},
            r"model\.layers\.1\.layers\.1\.type: unknown layer type 'rleu'",
        ),
    ],
)
def test_wrong_blocks_are_refused_with_their_field(layer: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        declared([IMAGES, layer])


def test_the_number_of_layers_is_bounded_after_their_validation() -> None:
    blocks = repeated(101, repeated(100))
    with pytest.raises(UserError, match=r"model\.layers: more than 10000 layers"):
        parse_job({"model": {"layers": deque([blocks])}, "data": {"dataset": "digits"}})
    with pytest.raises(UserError, match=r"model\.layers: more than 10000 layers"):
        expanded([LayerSpec.model_validate(blocks)])
    assert len(expanded([LayerSpec.model_validate(repeated(100, repeated(100)))])) == 10_000


def test_blocks_may_be_nested_to_the_limit() -> None:
    require_fit(declared([nested(8), {"type": "linear", "options": {"in_features": 64, "out_features": 10}}]))


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (
            {"type": "residual", "layers": [convolution(1, 8)]},
            r"layer 1: the layers return \[1, 8, 8, 8\], and the shortcut \[1, 1, 8, 8\] \(model\.layers\.1\)",
        ),
        (
            {"type": "residual", "layers": [{"type": "sequential", "layers": [convolution(2, 2)]}]},
            r"layer 1\.layers\.0\.layers\.0 does not fit .* \(model\.layers\.1\.layers\.0\.layers\.0\)",
        ),
        (convolution(1, 4, kernel_size=11), r"spans 11 x 11 positions, and the padded image has 10 x 10"),
        (convolution(1, 4, groups=3), r"layer 1 \(conv2d\) has wrong options: .* divisible by groups"),
        (convolution(1, 4, kernel_size=0), r"has wrong options: kernel_size is 0"),
        (convolution(1, 4, stride=[1, 0]), r"has wrong options: stride is \[1, 0\]"),
        (norm(4, groups=3), r"divisible by num_groups"),
        (norm(4), r"layer 1 does not fit its input of shape \[1, 1, 8, 8\]"),
        ({"type": "max_pool2d", "options": {"kernel_size": 9}}, "spans 9 x 9 positions"),
        ({"type": "max_pool2d", "options": {"kernel_size": []}}, "layer 1 "),
        (convolution(1, 4, kernel_size=[3, 3, 3]), "layer 1 "),
        (convolution(1, 4, padding=[]), "layer 1 "),
        (convolution(1, 4, kernel_size=3.5), r"kernel_size is 3\.5"),
        ({"type": "flatten", "options": {"start_dim": [1]}}, "layer 1 "),
        ({"type": "flatten", "options": {"start_dim": 1.5}}, "layer 1 "),
        ({"type": "layer_norm", "options": {"normalized_shape": []}}, "layer 1 "),
        ({"type": "unflatten", "options": {"dim": 1, "unflattened_size": 3}}, "layer 1 "),
        ({"type": "unflatten", "options": {"dim": [1], "unflattened_size": [3]}}, "layer 1 "),
        ({"type": "adaptive_avg_pool2d", "options": {"output_size": [1, 1, 1]}}, "layer 1 "),
        ({"type": "avg_pool2d", "options": {"kernel_size": 9}}, r"does not fit .*\(model\.layers\.1\)"),
        ({"type": "adaptive_avg_pool2d", "options": {"output_size": 0}}, "output_size is 0"),
        ({"type": "max_pool2d", "options": {"kernel_size": 2, "return_indices": True}}, "return_indices"),
        ({"type": "relu", "options": {"inplace": True}}, "cannot have inplace"),
        (convolution(1, 4, device=0), "cannot have device: the plan chooses"),
    ],
)
def test_layers_that_do_not_fit_are_refused_with_their_field(layer: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        require_fit(declared([IMAGES, layer]))


@pytest.mark.parametrize("kind", ["embedding", "embedding_bag"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_norm", 1.0),
        ("norm_type", 1.0),
        ("scale_grad_by_freq", True),
        ("sparse", True),
        ("include_last_offset", True),
        ("_weight", 1),
        ("_freeze", True),
    ],
)
def test_embeddings_have_no_option_that_depends_on_the_plan(kind: str, name: str, value: Any) -> None:
    layer = {"type": kind, "options": {"num_embeddings": 9, "embedding_dim": 4, name: value}}
    with pytest.raises(UserError, match=rf"model\.layers\.0: {kind} has no option '{name}'"):
        declared([layer])


@pytest.mark.parametrize("kind", ["embedding", "embedding_bag"])
def test_a_padding_token_that_does_not_exist_is_a_wrong_option(kind: str) -> None:
    layer = {"type": kind, "options": {"num_embeddings": 9, "embedding_dim": 4, "padding_idx": 999}}
    with pytest.raises(UserError, match=rf"layer 0 \({kind}\) has wrong options: .*num_embeddings"):
        dissect(declared([layer]))


def test_a_lack_of_memory_is_no_misfit(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Tensor:
        raise torch.OutOfMemoryError("out of memory")

    stage = build_stage(declared(RESNET), Shard("m", 0, LAYERS, LAYERS), CPU)
    stage.initialize(1)
    monkeypatch.setattr(nn.functional, "relu", fails)
    with pytest.raises(torch.OutOfMemoryError):
        stage.forward(torch.rand(5, 64))


@pytest.mark.parametrize("kind", sorted({*OPTIONS} - {*EMBEDDINGS}))
def test_options_of_layers_are_the_arguments_of_their_modules(kind: str) -> None:
    text = {"dtype", "padding_mode", "approximate", "args", "kwargs"}  # a job file gives no text
    given = {*inspect.signature(MODULES[kind]).parameters} - text
    assert given <= {*OPTIONS[kind]}
