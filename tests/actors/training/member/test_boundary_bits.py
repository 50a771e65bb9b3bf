"""Gradients have the same bits wherever a model with compressed boundaries is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from share_compute.compression.boundaries import decoded, round_inside
from share_compute.models.blueprint import Blueprint
from share_compute.models.boundary import Boundaries
from share_compute.models.factory import build_stage
from share_compute.models.objective import Objective
from share_compute.models.stage import Stage
from share_compute.protocol.tree import SummationTree
from share_compute.shards import Shard
from share_compute.specification import LayerSpec, TrainingSpec, parse_job
from share_compute.specification.boundaries import FixedBoundaryCompressionSpec
from share_compute_actors.training.member.runner import Runner

CPU = torch.device("cpu")
LLAMA = {
    "model_type": "llama", "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "vocab_size": 50,
}  # fmt: skip
LAYERS = [
    {"type": "linear", "options": {"in_features": 64, "out_features": 40}},
    {"type": "relu"},
    {"type": "dropout", "options": {"p": 0.2}},
    {"type": "linear", "options": {"in_features": 40, "out_features": 10}},
]
VIT = {
    "model_type": "vit", "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": 10,
}  # fmt: skip


def convolution(inputs: int, outputs: int, **options: Any) -> dict[str, Any]:
    given = {"in_channels": inputs, "out_channels": outputs, "kernel_size": 3, "padding": 1, **options}
    return {"type": "conv2d", "options": given}


RESIDUAL: list[dict[str, Any]] = [
    convolution(1, 8),
    {
        "type": "residual",
        "layers": [
            {"type": "batch_norm2d", "options": {"num_features": 8}},
            {"type": "relu"},
            convolution(8, 8),
        ],
    },
    {
        "type": "residual",
        "layers": [convolution(8, 12, stride=2)],
        "projection": [convolution(8, 12, stride=2)],
    },
    {
        "type": "sequential",
        "layers": [
            {"type": "flatten"},
            {"type": "linear", "options": {"in_features": 192, "out_features": 10}},
        ],
    },
]
"""Layers with activations of four dimensions before each but the first."""
BOUNDARIES = FixedBoundaryCompressionSpec(bf16=(1,), int8=(2, 3))
COUNT = 4


def declared(layers: list[dict[str, Any]]) -> tuple[LayerSpec, ...]:
    training = {"steps": 1, "microbatches": 1}
    document = {"model": {"layers": layers}, "data": {"dataset": "digits"}, "training": training}
    found = parse_job(document).model.layers
    assert found is not None
    return found


def blueprints() -> list[Any]:
    source = torch.Generator().manual_seed(0)
    samples, tokens = torch.randn(3, 64, generator=source), torch.randint(50, (3, 16), generator=source)
    llama: Any = LLAMA
    classes, images = torch.tensor([1, 2, 3]), torch.randn(3, 1, 8, 8, generator=source)
    residual = Blueprint(layers=declared(RESIDUAL), sample_shape=(1, 8, 8))
    vit = Blueprint(
        config=VIT, objective=Objective(task="image_classification", classes=10), sample_shape=(1, 8, 8)
    )
    return [
        pytest.param(Blueprint(layers=declared(LAYERS)), samples, classes, id="layers"),
        pytest.param(residual, images, classes, id="residual"),
        pytest.param(
            residual.model_copy(update={"precision": "bfloat16", "activation_checkpointing": True}),
            images,
            classes,
            id="residual-bfloat16-recomputed",
        ),
        pytest.param(vit, images, classes, id="vit"),
        pytest.param(Blueprint(config=llama), tokens, tokens, id="llama"),
        pytest.param(Blueprint(config=llama, precision="bfloat16"), tokens, tokens, id="llama-bfloat16"),
        pytest.param(
            Blueprint(config=llama, activation_checkpointing=True), tokens, tokens, id="llama-recomputed"
        ),
    ]


def stages(blueprint: Blueprint, cuts: tuple[int, ...]) -> list[Stage]:
    made = []
    for start, stop in zip((0, *cuts), (*cuts, COUNT), strict=True):
        stage = build_stage(blueprint, Shard("m", start, stop, COUNT), CPU)
        stage.initialize(0)
        round_inside(stage, BOUNDARIES)
        made.append(stage)
    return made


def trained(blueprint: Blueprint, samples: Tensor, targets: Tensor, cuts: tuple[int, ...]) -> dict[str, Any]:
    """Return the bits of all gradients and the loss after one microbatch that crossed these cuts."""
    training = TrainingSpec(microbatches=1, boundary_compression=BOUNDARIES, precision=blueprint.precision)
    runners = []
    for stage in stages(blueprint, cuts):
        boundaries = Boundaries.of(stage, blueprint, 3, 16, gradients_are_finite=True, compression=BOUNDARIES)
        runners.append(Runner(stage, training, SummationTree((1,)), boundaries=boundaries))

    def carried(source: Runner, target: Runner, cargo: str) -> Tensor:
        kept, wanted = source.kept(cargo, 0), target.expected(cargo)
        assert kept is not None
        assert wanted is not None
        return decoded(source.encoded(cargo, kept), wanted)

    entering = samples
    for place, runner in enumerate(runners):
        if place:
            entering = carried(runners[place - 1], runner, "activation")
        runner.forward(1, 0, entering)
    incoming = targets
    for place in reversed(range(len(runners))):
        if place < len(runners) - 1:
            incoming = carried(runners[place + 1], runners[place], "gradient")
        runners[place].backward(0, incoming)
        runners[place].gradients.settle()
    found: dict[str, Any] = {"loss": runners[-1].losses()}
    for runner in runners:
        for name, parameter in runner.parameters.items():
            assert parameter.grad is not None
            found[name] = parameter.grad.view(torch.int32).tolist()
    return found


@pytest.mark.parametrize(("blueprint", "samples", "targets"), blueprints())
@pytest.mark.parametrize("cuts", [(1,), (2,), (1, 3), (1, 2, 3)])
def test_gradients_have_the_same_bits_wherever_the_model_is_cut(
    blueprint: Blueprint, samples: Tensor, targets: Tensor, cuts: tuple[int, ...]
) -> None:
    whole = trained(blueprint, samples, targets, ())
    assert trained(blueprint, samples, targets, cuts) == whole
