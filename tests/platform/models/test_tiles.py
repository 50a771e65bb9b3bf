"""Blocks that are computed in tiles return the same as whole ones, with the same gradients and less memory."""

from __future__ import annotations

import weakref
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import load_sample_image
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from share_compute.errors import UserError
from share_compute.models.blueprint import Blueprint, blueprint_of
from share_compute.models.factory import build_stage, dissect
from share_compute.models.layers import LayeredStage, note_on_tiles, profile_layers, require_fit
from share_compute.models.tiles import Tiled
from share_compute.shards import Shard
from share_compute.specification import parse_job
from share_compute.specification.layers import LayerSpec, expanded

CPU = torch.device("cpu")
RELU: dict[str, Any] = {"type": "relu"}
POOL: dict[str, Any] = {"type": "max_pool2d", "options": {"kernel_size": 2}}


def convolution(inputs: int, outputs: int, **options: Any) -> dict[str, Any]:
    given = {"in_channels": inputs, "out_channels": outputs, "kernel_size": 3, "padding": 1, **options}
    return {"type": "conv2d", "options": given}


def block(*layers: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequential", "layers": list(layers)}


RESIDUAL: dict[str, Any] = {"type": "residual", "layers": [convolution(16, 16), RELU, convolution(16, 16)]}
DOWN: dict[str, Any] = {
    "type": "residual",
    "layers": [convolution(16, 32, stride=2), {"type": "gelu"}, convolution(32, 32)],
    "projection": [convolution(16, 32, kernel_size=1, padding=0, stride=2)],
}
RESNET = block(convolution(3, 16), RELU, RESIDUAL, RELU, POOL, DOWN, {"type": "tanh"}, POOL)
SMOOTH = block(
    convolution(3, 16),
    {"type": "silu"},
    {"type": "residual", "layers": [convolution(16, 16), {"type": "gelu"}, convolution(16, 16)]},
    {"type": "avg_pool2d", "options": {"kernel_size": 3, "stride": 2, "padding": 1}},
    convolution(16, 32, dilation=2, padding=2),
    {"type": "sigmoid"},
)
HEAD: list[dict[str, Any]] = [
    {"type": "adaptive_avg_pool2d", "options": {"output_size": 1}},
    {"type": "flatten"},
    {"type": "linear", "options": {"in_features": 32, "out_features": 4}},
]


def blueprint(
    layers: list[dict[str, Any]], size: tuple[int, ...], tiles: tuple[int, int] | None
) -> Blueprint:
    specs = tuple(LayerSpec.model_validate(layer) for layer in layers)
    return Blueprint(layers=specs, sample_shape=size, tiles=tiles)


def first_stage(
    layers: list[dict[str, Any]], size: tuple[int, ...], tiles: tuple[int, int] | None
) -> LayeredStage:
    """Return a stage of the first layer alone; its weights do not depend on ``tiles``."""
    stage = LayeredStage(blueprint(layers, size, tiles), Shard("m", 0, 1, len(layers)), CPU)
    stage.initialize(1)
    stage.prepare_cell(1, 1, 0)
    return stage


@cache
def china() -> Tensor:
    """Return a photograph as an image [1, 3, 424, 640]."""
    pixels = np.asarray(load_sample_image("china.jpg"), dtype=np.float32)[:424] / 255
    return torch.tensor(pixels).permute(2, 0, 1)[None].contiguous()


def computed(
    layers: list[dict[str, Any]], inputs: Tensor, tiles: tuple[int, int] | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the output of the first layer, and the gradients of its parameters for a random gradient of the output."""
    stage = first_stage(layers, tuple(inputs.shape[1:]), tiles)
    assert isinstance(stage.layers[0], Tiled) == (tiles is not None)
    stage.module.to(inputs.dtype)
    outputs = stage.forward(inputs)
    torch.manual_seed(2)
    if outputs.requires_grad:
        outputs.backward(torch.randn_like(outputs))  # type: ignore[no-untyped-call]
    gradients = {name: each.grad for name, each in stage.parameters().items() if each.grad is not None}
    assert gradients.keys() == stage.parameters().keys()
    return outputs.detach(), gradients


def require_equal(
    layers: list[dict[str, Any]], inputs: Tensor, tiles: tuple[int, int], tolerance: float
) -> None:
    """Check outputs and gradients in tiles against those of the block as a whole, relative to their largest number."""
    expected, wanted = computed(layers, inputs, None)
    outputs, gradients = computed(layers, inputs, tiles)
    assert outputs.shape == expected.shape
    assert list(gradients) == list(wanted)
    for found, value in ((outputs, expected), *((gradients[name], wanted[name]) for name in wanted)):
        assert float((found - value).abs().max()) <= tolerance * float(value.abs().max())


@pytest.mark.parametrize("tiles", [(2, 2), (1, 4), (4, 1), (4, 5)])
def test_a_photograph_in_tiles_has_the_outputs_and_gradients_of_the_whole(tiles: tuple[int, int]) -> None:
    """In float32, gradients are compared for smooth layers: at the kink of ReLU, rounding may change a gradient."""
    part = china()[..., 200:320, 200:320]
    require_equal([RESNET, *HEAD], part.double(), tiles, 1e-12)
    require_equal([SMOOTH, *HEAD], part, tiles, 1e-5)
    whole, _ = computed([RESNET, *HEAD], china(), None)
    assert torch.allclose(computed([RESNET, *HEAD], china(), tiles)[0], whole, atol=1e-5)


def pairs(least: int, most: int) -> st.SearchStrategy[int | list[int]]:
    """Draw a number, or one for each dimension."""
    return st.one_of(st.integers(least, most), st.lists(st.integers(least, most), min_size=2, max_size=2))


@st.composite
def chains(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Draw layers with all options of windows, for images with 3 channels."""
    channels, layers = 3, list[dict[str, Any]]()
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["conv2d", "max_pool2d", "avg_pool2d", "silu", "residual"]))
        match kind:
            case "conv2d":
                options = {
                    "in_channels": channels,
                    "out_channels": 2 * channels,
                    "kernel_size": draw(pairs(1, 4)),
                    "stride": draw(pairs(1, 3)),
                    "padding": draw(pairs(0, 3)),
                    "dilation": draw(pairs(1, 2)),
                    "groups": draw(st.sampled_from([1, channels])),
                    "bias": draw(st.booleans()),
                }
                channels *= 2
                layers.append({"type": kind, "options": options})
            case "max_pool2d" | "avg_pool2d":
                kernel = draw(st.integers(1, 3))
                options = {"kernel_size": kernel, "padding": draw(st.integers(0, kernel // 2))}
                if draw(st.booleans()):
                    options["stride"] = draw(st.integers(1, 3))
                if kind == "max_pool2d":
                    options["dilation"] = draw(st.integers(1, 2))
                layers.append({"type": kind, "options": options})
            case "residual":
                layers.append(
                    {
                        "type": kind,
                        "layers": [convolution(channels, channels, kernel_size=5, padding=2), RELU],
                    }
                )
            case _:
                layers.append({"type": kind})
    return layers


@given(
    chains(), st.sampled_from([(40, 36), (33, 44)]), st.integers(1, 3), st.integers(1, 4), st.integers(0, 9)
)
def test_tiles_equal_the_whole_with_all_options(
    layers: list[dict[str, Any]], size: tuple[int, int], rows: int, columns: int, seed: int
) -> None:
    torch.manual_seed(seed)
    inputs = torch.randn(2, 3, *size, dtype=torch.float64)
    try:
        require_equal([block(*layers)], inputs, (rows, columns), 1e-10)
    except UserError as failure:
        message = failure.message
    else:
        message = "data.slicing"
    assert any(part in message for part in ("data.slicing", "does not fit", "returns no numbers"))


def test_a_tile_reads_no_more_than_its_halo() -> None:
    layers = [block(convolution(3, 4), RELU, convolution(4, 4, dilation=2, padding=2))]
    cut = first_stage(layers, (3, 16, 24), (2, 3)).layers[0]
    assert isinstance(cut, Tiled)
    boxes = cut.boxes((16, 24))
    assert boxes[0] == ((0, 8), (0, 8))
    assert cut.reads((16, 24), boxes[0]) == (
        (0, 11),
        (0, 11),
    )  # one pixel of the first kernel, two of the second
    assert cut.reads((16, 24), boxes[4]) == ((5, 16), (5, 19))
    assert cut.largest_box((16, 24)) in (boxes[1], boxes[4])
    inputs = torch.randn(1, 3, 16, 24)
    outputs = cut.compute_tile(inputs, boxes[0])
    inputs[..., 11:, :] = torch.nan
    inputs[..., :, 11:] = torch.nan
    assert torch.equal(cut.compute_tile(inputs, boxes[0]), outputs)


class Living(TorchDispatchMode):
    """Mode that measures the most bytes of tensors that exist at a time, without those that existed before."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and count the storages of its results until they are freed."""
        del types
        given = {
            each.untyped_storage().data_ptr()
            for each in tree_iter((args, kwargs))
            if isinstance(each, Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for each in tree_iter(result):
            if (
                isinstance(each, Tensor)
                and (key := each.untyped_storage().data_ptr()) not in self._known | given
            ):
                self._known.add(key)
                self.now += each.untyped_storage().nbytes()
                weakref.finalize(each.untyped_storage(), self._freed, key, each.untyped_storage().nbytes())
        self.most = max(self.most, self.now)
        return result

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def peak(layers: list[dict[str, Any]], inputs: Tensor, tiles: tuple[int, int] | None) -> int:
    """Return the most bytes that a forward and a backward of the first layer take at a time."""
    stage = first_stage(layers, tuple(inputs.shape[1:]), tiles)
    for parameter in stage.parameters().values():
        parameter.grad = torch.zeros_like(parameter)
    with Living() as living:
        stage.forward(inputs).sum().backward()  # type: ignore[no-untyped-call]
    most: int = living.most
    return most


def test_activations_in_two_by_two_tiles_are_at_most_three_tenths() -> None:
    layers = [RESNET, *HEAD]
    whole, cut = (profile_layers(blueprint(layers, (3, 424, 640), tiles)) for tiles in (None, (2, 2)))
    assert whole.counted
    assert cut.counted
    kept = cut.layers[0].activation_bytes.constant + cut.layers[0].recomputed_bytes.constant
    assert 0.24 < kept / whole.layers[0].activation_bytes.constant <= 0.3
    assert whole.layers[0].recomputed_bytes.constant == 0
    assert whole.layers[1:] == cut.layers[1:]
    # The halo is computed several times, and the backward computes the forward again.
    whole_flops, cut_flops = whole.layers[0].forward_flops.constant, cut.layers[0].forward_flops.constant
    assert 1 < cut_flops / whole_flops < 1.1
    again = cut.layers[0].backward_flops.constant - whole.layers[0].backward_flops.constant
    assert again == pytest.approx(whole_flops, rel=0.3)
    assert peak(layers, china(), (2, 2)) <= 0.35 * peak(layers, china(), None)


def test_evaluations_keep_no_activations() -> None:
    stage = first_stage([RESNET, *HEAD], (3, 64, 64), (2, 2))
    whole = first_stage([RESNET, *HEAD], (3, 64, 64), None)
    inputs = torch.rand(2, 3, 64, 64)
    stage.module.eval()
    with torch.no_grad():
        assert torch.allclose(stage.forward(inputs), whole.forward(inputs), atol=1e-5)


@pytest.mark.parametrize(
    "options", [{"precision": "bfloat16"}, {"activation_checkpointing": True}, {"freeze": ["layers.0.*"]}]
)
def test_tiles_go_with_other_options(options: dict[str, Any]) -> None:
    layers = [RESNET, *HEAD]
    found = []
    for tiles in (None, (2, 2)):
        model = blueprint(layers, (3, 64, 64), tiles).model_copy(update=options)
        stage = build_stage(model, Shard("m", 0, 4, 4), CPU)
        stage.initialize(1)
        stage.prepare_cell(1, 1, 0)
        torch.manual_seed(1)
        outputs = stage.forward(torch.rand(2, 3, 64, 64))
        outputs.float().square().sum().backward()  # type: ignore[no-untyped-call]
        found.append([outputs.detach(), *(each.grad for each in stage.trained().values())])
    for one, other in zip(*found, strict=True):
        assert one is not None
        assert other is not None
        assert torch.allclose(one, other, rtol=0.05 if "precision" in options else 1e-4, atol=0.02)


def images(slicing: Any, layers: list[dict[str, Any]] | None = None, **data: Any) -> dict[str, Any]:
    return {
        "model": {"layers": [RESNET, *HEAD] if layers is None else layers},
        "data": {"files": ["pictures"], "images": {"height": 64, "width": 64}, "slicing": slicing, **data},
    }


def test_a_job_is_computed_in_tiles() -> None:
    made = blueprint_of(parse_job(images([1, 1, 2, 4])), None)
    assert made.tiles == (2, 4)
    require_fit(made)
    assert note_on_tiles(made) == (
        "layer 0 is computed in 2 x 4 tiles of 32 x 16 pixels, and each reads at most 41 x 32 pixels"
    )
    assert dissect(made).layers[0].recomputed_bytes.constant > 0
    stage = build_stage(made, Shard("m", 0, len(expanded(made.layers)), 4), CPU)
    assert isinstance(stage.layers[0], Tiled)
    assert "layers.0.layers.2.layers.0.weight" in stage.parameters()
    whole = blueprint_of(parse_job(images("full_batch")), None)
    assert whole.tiles is None
    assert note_on_tiles(whole) is None


NORM = {"type": "batch_norm2d", "options": {"num_features": 3}}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (images([2, 1, 2, 2]), "must begin with 1, 1: microbatches divide the samples"),
        (images([1, 1, 1, 1]), "cuts nothing"),
        (images([1, 1, 3, 2]), "cuts the height of 64 pixels into 3 parts, which does not divide it"),
        (
            images([1, 1, 2, 3], transforms={"crop": {"height": 32, "width": 32}}),
            "the width of 32 pixels into 3 parts",
        ),
        (images([1, 1, 2]), r"data\.slicing"),
        (images([1, 1, 0, 2]), r"data\.slicing"),
        (images([1, 1, 32, 1]), r"data\.slicing"),
        (images([1, 1, 2.0, 2]), r"data\.slicing"),
        (images("tiles"), r"data\.slicing"),
        (
            {"model": {"layers": HEAD[2:]}, "data": {"dataset": "digits", "slicing": [1, 1, 2, 2]}},
            "cuts images: give data.images",
        ),
        (
            images([1, 1, 2, 2], [convolution(3, 16), *HEAD]),
            r"model\.layers\.0 is conv2d: put the convolutions",
        ),
        (
            images([1, 1, 2, 2], [block(*HEAD)]),
            "adaptive_avg_pool2d needs whole images: put it after the block",
        ),
        (
            images([1, 1, 2, 2], [block(convolution(3, 3), block(NORM)), *HEAD]),
            "batch_norm2d needs the statistics of all tiles",
        ),
        (
            images([1, 1, 2, 2], [block({**POOL, "options": {"kernel_size": 2, "ceil_mode": True}}), *HEAD]),
            "max_pool2d has ceil_mode",
        ),
        (
            images(
                [1, 1, 2, 2],
                [
                    block(
                        {
                            "type": "avg_pool2d",
                            "options": {"kernel_size": 3, "padding": 1, "count_include_pad": False},
                        }
                    ),
                    *HEAD,
                ],
            ),
            "avg_pool2d has count_include_pad: false",
        ),
        (
            {**images([1, 1, 2, 2]), "model": {"config": {"model_type": "vit"}}},
            "data.slicing in tiles needs declared layers",
        ),
    ],
)
def test_slicing_that_cannot_be_done_is_refused(document: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_job({**document, "training": {"steps": 1, "microbatches": 1, "batch_size": 4}})


@pytest.mark.parametrize(
    ("layers", "tiles", "message"),
    [
        (
            [convolution(3, 3, kernel_size=31, padding=15)] * 2,
            [1, 1, 4, 1],
            "has 16 pixels of an image's height, and needs 30",
        ),
        (
            [convolution(3, 3, kernel_size=31, padding=15)] * 2,
            [1, 1, 1, 4],
            "has 16 pixels of an image's width, and needs 30",
        ),
        ([POOL] * 5, [1, 1, 4, 1], "the block returns 2 numbers"),
        (
            [convolution(3, 3, kernel_size=[3, 1])],
            [1, 1, 1, 2],
            "padding 1, and its kernel reaches over 1 pixels",
        ),
    ],
)
def test_blocks_that_cannot_be_cut_are_refused(
    layers: list[dict[str, Any]], tiles: list[int], message: str
) -> None:
    made = blueprint_of(parse_job(images(tiles, [block(*layers), *HEAD])), None)
    with pytest.raises(UserError, match=message) as refused:
        dissect(made)
    assert refused.value.hint


def test_a_layer_that_does_not_fit_is_named() -> None:
    made = blueprint_of(
        parse_job(images([1, 1, 2, 2], [block(convolution(3, 8), convolution(4, 8)), *HEAD])), None
    )
    with pytest.raises(UserError, match=r"layer 0\.layers\.1 does not fit its input"):
        require_fit(made)


def test_other_layers_stay_as_they_are() -> None:
    stage = LayeredStage(blueprint([RESNET, *HEAD], (3, 64, 64), (2, 2)), Shard("m", 1, 4, 4), CPU)
    assert not any(isinstance(layer, Tiled) for layer in stage.layers.values())
    assert isinstance(stage.layers[3], nn.Linear)
