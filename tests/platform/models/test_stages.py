"""Computations of stages: precision, activation checkpointing, frozen parameters. The cut never changes results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING

from share_compute.errors import UserError
from share_compute.models.blueprint import Blueprint
from share_compute.models.devices import require_precision
from share_compute.models.factory import build_stage, dissect
from share_compute.models.losses import loss_sum
from share_compute.models.stage import Stage
from share_compute.shards import Shard
from share_compute.specification import LayerSpec, Precision

CPU = torch.device("cpu")
LAYERS = 4
WHOLE, HALVES, UNEVEN = ((0, 4),), ((0, 2), (2, 4)), ((0, 1), (1, 3), (3, 4))


def language(*, tied: bool = False, **options: Any) -> Blueprint:
    """Return a small model with dropout."""
    config = CONFIG_MAPPING["gpt_neox"](
        hidden_size=32, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=4, vocab_size=64,
        max_position_embeddings=32, hidden_dropout=0.2, attention_dropout=0.1, tie_word_embeddings=tied,
        bos_token_id=0, eos_token_id=0,
    ).to_dict()  # fmt: skip
    return Blueprint(config={**config, "model_type": "gpt_neox"}, **options)


def digits(**options: Any) -> Blueprint:
    layers = (
        LayerSpec(type="linear", options={"in_features": 64, "out_features": 32}),
        LayerSpec(type="gelu"),
        LayerSpec(type="dropout", options={"p": 0.5}),
        LayerSpec(type="linear", options={"in_features": 32, "out_features": 10}),
    )
    return Blueprint(layers=layers, **options)


def samples(blueprint: Blueprint, microbatch: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(microbatch)
    if blueprint.config is not None:
        ids = torch.randint(0, 64, (2, 17), generator=source)
        return ids[:, :-1], ids[:, 1:]
    return torch.rand(4, 64, generator=source), torch.randint(0, 10, (4,), generator=source)


def stages_of(blueprint: Blueprint, cuts: Sequence[tuple[int, int]]) -> list[Stage]:
    stages = [build_stage(blueprint, Shard("m", start, stop, LAYERS), CPU) for start, stop in cuts]
    for stage in stages:
        stage.initialize(1)
        stage.module.train()
    return stages


def gradients(blueprint: Blueprint, cuts: Sequence[tuple[int, int]], scale: float = 1.0) -> dict[str, Tensor]:
    """Train two microbatches at once: both go forward before the first goes backward. Return all gradients."""
    stages = stages_of(blueprint, cuts)
    ways: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for microbatch in (0, 1):
        hidden, _ = samples(blueprint, microbatch)
        ways[microbatch] = []
        for stage in stages:
            if not stage.shard.is_first:
                hidden = hidden.detach().requires_grad_(stage.trains_before)
            stage.prepare_cell(1, 7, microbatch)
            outputs = stage.forward(hidden)
            ways[microbatch].append((hidden, outputs))
            hidden = outputs
    for microbatch in (0, 1):
        _, targets = samples(blueprint, microbatch)
        gradient: Tensor | None = None
        for entering, outputs in reversed(ways[microbatch]):
            torch.manual_seed(99)  # earlier draws of random numbers do not matter
            if gradient is None:
                (loss_sum(outputs, targets) * scale).backward()
            elif outputs.requires_grad:
                outputs.backward(gradient)
            gradient = entering.grad if entering.grad is not None else torch.empty(0)
    return {
        name: parameter.grad
        for stage in stages
        for name, parameter in stage.parameters().items()
        if parameter.grad is not None
    }


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize("make", [language, digits])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_layers_that_are_computed_again_give_the_same_bits(make: Any, precision: Precision) -> None:
    plain = gradients(make(precision=precision), WHOLE)
    again = gradients(make(precision=precision, activation_checkpointing=True), WHOLE)
    assert_equal(plain, again)
    assert all(torch.isfinite(gradient).all() for gradient in plain.values())


@pytest.mark.parametrize("cuts", [HALVES, UNEVEN])
@pytest.mark.parametrize("make", [language, digits])
@pytest.mark.parametrize("options", [{"precision": "bfloat16"}, {"activation_checkpointing": True}])
def test_the_cut_does_not_matter(make: Any, options: dict[str, Any], cuts: Sequence[tuple[int, int]]) -> None:
    assert_equal(gradients(make(**options), WHOLE), gradients(make(**options), cuts))


def test_only_what_enters_a_layer_is_kept() -> None:
    def kept_bytes(blueprint: Blueprint) -> int:
        (stage,) = stages_of(blueprint, WHOLE)
        inputs, _ = samples(blueprint, 0)
        own = {parameter.untyped_storage().data_ptr() for parameter in stage.module.parameters()}
        kept: dict[int, Tensor] = {}

        def save(tensor: Tensor) -> Tensor:
            kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            stage.forward(inputs)
        return sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in own)

    assert kept_bytes(language(activation_checkpointing=True)) < kept_bytes(language()) / 3


@pytest.mark.parametrize(("precision", "dtype"), [("bfloat16", torch.bfloat16), ("float16", torch.float16)])
def test_products_are_in_the_precision_and_weights_are_not(precision: Precision, dtype: torch.dtype) -> None:
    (stage,) = stages_of(language(precision=precision), WHOLE)
    logits = stage.forward(samples(language(), 0)[0])
    assert logits.dtype == dtype
    assert {parameter.dtype for parameter in stage.module.parameters()} == {torch.float32}


def test_low_precision_is_near_float32() -> None:
    exact, rough = gradients(language(), WHOLE), gradients(language(precision="bfloat16"), WHOLE)
    for name, gradient in exact.items():
        assert (
            torch.linalg.vector_norm(rough[name] - gradient) < 0.1 * torch.linalg.vector_norm(gradient) + 1e-3
        )


def test_a_loss_scale_changes_only_the_scale() -> None:
    plain, scaled = gradients(language(), WHOLE), gradients(language(), WHOLE, scale=2.0**16)
    assert_equal(plain, {name: gradient / 2.0**16 for name, gradient in scaled.items()})


def test_a_device_that_cannot_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    with pytest.raises(UserError, match="cuda cannot compute in bfloat16") as caught:
        require_precision("bfloat16", torch.device("cuda"))
    assert "float16" in caught.value.hint


class TestFreezing:
    @pytest.mark.parametrize("cuts", [WHOLE, HALVES, UNEVEN])
    @pytest.mark.parametrize(
        "freeze",
        [("gpt_neox.embed_in.*", "layers[:3]"), ("*.bias",), ("layers[2:]",), ("gpt_neox.embed_in.weight",)],
    )
    def test_what_is_left_has_the_same_gradients(
        self, freeze: tuple[str, ...], cuts: Sequence[tuple[int, int]]
    ) -> None:
        every, some = gradients(language(), WHOLE), gradients(language(freeze=freeze), cuts)
        assert 0 < len(some) < len(every)
        assert_equal({name: every[name] for name in some}, some)
        frozen = {name for name in every if name not in some}
        stages = stages_of(language(freeze=freeze), cuts)
        for stage in stages:
            for name, parameter in stage.parameters().items():
                assert parameter.requires_grad == (name not in frozen)

    def test_gradients_go_back_only_to_what_trains(self) -> None:
        early = stages_of(language(freeze=("gpt_neox.embed_in.*", "layers[:2]")), HALVES)
        assert [stage.trains_before for stage in early] == [False, False]
        late = stages_of(language(freeze=("layers[2:]",)), HALVES)
        assert [stage.trains_before for stage in late] == [False, True]

    def test_a_frozen_embedding_freezes_the_head_that_is_tied_to_it(self) -> None:
        for stage in stages_of(language(tied=True, freeze=("gpt_neox.embed_in.*",)), HALVES):
            shared = stage.parameters()["gpt_neox.embed_in.weight"]
            assert not shared.requires_grad

    def test_declared_layers_freeze_too(self) -> None:
        some = gradients(digits(freeze=("layers[:1]",)), HALVES)
        assert set(some) == {"layers.3.weight", "layers.3.bias"}
        assert not stages_of(digits(freeze=("layers[:1]",)), HALVES)[1].trains_before

    @pytest.mark.parametrize("make", [language, digits])
    def test_patterns_that_mean_nothing_are_reported(self, make: Any) -> None:
        with pytest.raises(
            UserError, match=r"no parameter of the model is meant by 'layers\[9:\]'"
        ) as caught:
            dissect(make(freeze=("layers[9:]",)))
        assert caught.value.hint
        with pytest.raises(UserError, match="leaves nothing to train"):
            dissect(make(freeze=("*",)))

    def test_the_nearest_name_is_named(self) -> None:
        with pytest.raises(UserError, match=r"did you mean 'gpt_neox\.embed_in\.weight'"):
            dissect(language(freeze=("gpt_neox.embed_in.wieght",)))

    def test_the_profile_counts_what_is_frozen(self) -> None:
        freeze = ("gpt_neox.embed_in.*", "layers[:2]")
        whole, profile = dissect(language(tied=True)), dissect(language(tied=True, freeze=freeze))
        assert profile.counted
        assert profile.parameters == whole.parameters
        assert [layer.frozen == layer.parameters for layer in profile.layers] == [True, True, False, False]
        assert [layer.backward_operations > 0 for layer in profile.layers] == [False, False, True, True]
        assert (profile.tied_trains, profile.tied_name) == (False, None)
        assert (whole.tied_trains, whole.tied_name) == (True, "gpt_neox.embed_in.weight")
        assert profile.layers[2] == whole.layers[2]

    def test_frozen_weights_cost_no_products_for_their_gradients(self) -> None:
        whole, profile = dissect(language()), dissect(language(freeze=("layers[1:2]",)))
        frozen, trained = profile.layers[1], whole.layers[1]
        assert frozen.forward_flops == trained.forward_flops
        assert frozen.backward_flops.linear == trained.backward_flops.linear / 2
