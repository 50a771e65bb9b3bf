"""The profile of a model has the bytes, operations and kept activations of the real modules."""

from __future__ import annotations

import json
import resource
import time
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from share_compute.errors import UserError
from share_compute.models.blueprint import Blueprint
from share_compute.models.factory import build_stage, dissect
from share_compute.models.huggingface import decoder_profile
from share_compute.models.huggingface.decoder import trained_sketch
from share_compute.models.losses import loss_sum
from share_compute.models.profiles.profile import ModelProfile, QuadraticGrowth
from share_compute.models.profiles.profiling import NotQuadratic, count, fit
from share_compute.models.profiles.shape_estimate import ShapeEstimate
from share_compute.shards import Shard
from share_compute.specification import LayerSpec

CPU = torch.device("cpu")
SAMPLES, TOKENS, VOCABULARY = 2, 80, 160
BASE = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
LLAMA = {**BASE, "model_type": "llama"}
GEMMA = {**BASE, "model_type": "gemma2"}
EXPERTS = {
    **BASE, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32
}  # fmt: skip
LARGE = {
    "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 128,
    "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip


def profile_of(config: dict[str, Any]) -> ModelProfile:
    return _profile_of(json.dumps(config))


@cache
def _profile_of(config: str) -> ModelProfile:
    return dissect(Blueprint(config=json.loads(config)))


@pytest.mark.parametrize("config", [LLAMA, GEMMA, EXPERTS], ids=lambda config: str(config["model_type"]))
@pytest.mark.parametrize(("start", "stop"), [(0, 4), (0, 1), (1, 3), (3, 4)])
def test_counts_equal_what_real_stages_take(config: dict[str, Any], start: int, stop: int) -> None:
    profile = profile_of(config)
    assert profile.counted
    stage = build_stage(Blueprint(config=config), Shard("m", start, stop, 4), CPU)
    stage.initialize(1)
    stage.module.train()
    ids = torch.randint(3, VOCABULARY, (SAMPLES, TOKENS))
    inputs = ids if start == 0 else torch.randn(SAMPLES, TOKENS, 64, requires_grad=True)

    def run() -> Tensor:
        outputs = stage.forward(inputs)
        return loss_sum(outputs, ids) if stop == 4 else outputs

    real = count(run, inputs, stage.module)
    parts = list(profile.layers[start:stop])
    parts += [profile.embedding] if start == 0 else []
    parts += [profile.head] if stop == 4 else []
    assert SAMPLES * sum(part.forward_flops.at(TOKENS) for part in parts) == real.forward_flops
    assert SAMPLES * sum(part.backward_flops.at(TOKENS) for part in parts) == real.backward_flops
    # Every stage makes positions and masks, which are counted once.
    own = sum(part.forward_operations for part in parts)
    assert own <= real.forward_operations <= own + 60
    assert sum(part.backward_operations for part in parts) == pytest.approx(
        real.backward_operations, rel=0.15
    )
    kept = SAMPLES * sum(part.activation_bytes.at(TOKENS) for part in parts)
    if stop == 4:  # logits and two gradients, which are not kept for the backward pass
        kept -= 3 * SAMPLES * TOKENS * VOCABULARY * 4
    assert kept == pytest.approx(real.kept_bytes, rel=0.05)


def test_traffic_is_counted_for_kernels_without_products() -> None:
    layer, numbers = profile_of(LLAMA).layers[0], 64 * 4
    assert layer.forward_traffic.quadratic == 0
    # Two norms read and write each row several times, and two residual sums read two rows and write one each.
    assert layer.forward_traffic.linear > (2 * 4 + 2 * 3) * numbers
    assert layer.backward_traffic.linear > layer.forward_traffic.linear
    # Weights are read by products, and the sums of their gradients depend on no token.
    assert layer.forward_traffic.constant + layer.backward_traffic.constant < 4 * layer.parameters


def test_a_matrix_product_takes_two_operations_for_each_parameter_and_token() -> None:
    profile = profile_of(LLAMA)
    norms = 2 * 64
    layer = profile.layers[0]
    assert layer.forward_flops == QuadraticGrowth(0.0, 2.0 * (layer.parameters - norms), 4.0 * 64)
    assert layer.backward_flops == QuadraticGrowth(0.0, 4.0 * (layer.parameters - norms), 10.0 * 64)
    assert layer.boundary_numbers == QuadraticGrowth(0.0, 64.0, 0.0)


def test_of_experts_those_that_a_token_meets_are_counted() -> None:
    two, four = (profile_of({**EXPERTS, "num_experts_per_tok": chosen}) for chosen in (2, 4))
    more = four.layers[0].forward_flops.linear - two.layers[0].forward_flops.linear
    assert more == 2 * 2 * 3 * 64 * 32


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        (LLAMA, 40),
        (EXPERTS, 40),
        ({**BASE, "model_type": "mistral", "sliding_window": 32}, 400),
        (
            {
                **BASE, "model_type": "deepseek_v3", "kv_lora_rank": 16, "q_lora_rank": 32, "qk_rope_head_dim": 16,
                "qk_nope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
                "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_key_value_heads": 4,
            },
            40,
        ),
    ],
    ids=["grouped-queries", "experts", "window", "latent-attention"],
)  # fmt: skip
def test_the_cache_of_generation_is_as_large_as_the_real_one(config: dict[str, Any], tokens: int) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32).eval()
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=torch.zeros(1, tokens, dtype=torch.int64), past_key_values=cache, use_cache=True)
    for layer, kept in zip(profile_of(config).layers, cache.layers, strict=True):
        assert layer.cache_numbers.at(tokens) == kept.keys.numel() + kept.values.numel()


@pytest.mark.parametrize("window", [128, 600, 8192])
def test_a_window_of_attention_counts_at_any_length(window: int) -> None:
    profile = profile_of({**BASE, "model_type": "mistral", "sliding_window": window})
    assert profile.counted
    assert profile.layers[0].forward_flops == profile_of(LLAMA).layers[0].forward_flops


def test_layers_of_several_kinds_are_counted_apart() -> None:
    config = {**EXPERTS, "mlp_only_layers": [0, 2]}
    dense, sparse, *_ = layers = profile_of(config).layers
    assert dense.forward_flops != sparse.forward_flops
    assert layers == (dense, sparse, dense, sparse)


def test_nothing_depends_on_the_state_of_the_process() -> None:
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    first = dissect(Blueprint(config=GEMMA))
    assert torch.equal(torch.rand(1), expected)
    with torch.no_grad():
        assert dissect(Blueprint(config=GEMMA)) == first


def test_a_large_model_takes_seconds_and_hardly_any_memory() -> None:
    start, peak = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    profile = dissect(Blueprint(config=LARGE))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 500_000  # KiB; the weights: 400 GB
    assert time.process_time() - start < 30  # about 2
    assert profile.counted
    assert len(profile.layers) == 128
    assert profile.parameters > 100e9


def test_experts_larger_than_any_memory_are_counted() -> None:
    profile = profile_of({**EXPERTS, "num_experts": 512, "hidden_size": 8192, "moe_intermediate_size": 28672})
    assert profile.counted
    assert profile.layers[0].parameters > 300e9


def test_a_profile_travels_as_json() -> None:
    profile = profile_of({**LLAMA, "tie_word_embeddings": True})
    assert profile.tied == VOCABULARY * 64
    assert ModelProfile.model_validate_json(profile.model_dump_json()) == profile


def test_code_that_needs_data_is_estimated() -> None:
    # The code of these experts depends on which of them are used.
    estimated = profile_of({**EXPERTS, "experts_implementation": "eager"})
    counted = profile_of(EXPERTS)
    assert counted.counted
    assert not estimated.counted
    assert estimated.parameters == counted.parameters
    assert estimated.head == counted.head
    for way in ("forward_flops", "backward_flops"):
        found = getattr(counted.layers[0], way).at(512)
        assert getattr(estimated.layers[0], way).at(512) == pytest.approx(found, rel=0.02)


def test_estimates_are_near_what_is_counted() -> None:
    for config in (LLAMA, EXPERTS):
        profile = profile_of(config)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
        estimate = ShapeEstimate(model.config)
        pairs = [(estimate.layer(model.model.layers[0]), profile.layers[0])]
        pairs.append((estimate.head(profile.head.parameters, profile.tied), profile.head))
        for guess, counted in pairs:
            for name in ("forward_flops", "backward_flops", "boundary_numbers", "cache_numbers"):
                found = getattr(counted, name).at(512)
                if name != "boundary_numbers" or counted is not profile.head:
                    assert getattr(guess, name).at(512) == pytest.approx(found, rel=0.02), name
            assert guess.parameters == counted.parameters


DIGITS = (
    LayerSpec(type="unflatten", options={"dim": 1, "unflattened_size": [1, 8, 8]}),
    LayerSpec(type="conv2d", options={"in_channels": 1, "out_channels": 8, "kernel_size": 3, "padding": 1}),
    LayerSpec(type="relu"),
    LayerSpec(type="max_pool2d", options={"kernel_size": 2}),
    LayerSpec(type="flatten"),
    LayerSpec(type="linear", options={"in_features": 128, "out_features": 10}),
)


@pytest.mark.parametrize(("start", "stop"), [(0, 6), (0, 2), (2, 5), (5, 6)])
def test_declared_layers_are_counted_for_the_samples_that_they_get(start: int, stop: int) -> None:
    profile = dissect(Blueprint(layers=DIGITS))
    assert profile.counted
    shard = Shard("m", start, stop, 6)
    stage = build_stage(Blueprint(layers=DIGITS), shard, CPU)
    stage.initialize(1)
    shapes = {0: (64,), 2: (8, 8, 8), 5: (128,)}
    inputs = torch.rand(5, *shapes[start]).requires_grad_(start > 0)

    def run() -> Tensor:
        outputs = stage.forward(inputs)
        return loss_sum(outputs, torch.zeros(5, dtype=torch.int64)) if stop == 6 else outputs

    real = count(run, inputs, stage.module)
    parts = [*profile.layers[start:stop], *([profile.head] if stop == 6 else [])]
    assert profile.parameters_of(shard) == sum(tensor.numel() for tensor in stage.module.parameters())
    assert 5 * sum(part.forward_flops.at(1) for part in parts) == real.forward_flops
    assert 5 * sum(part.backward_flops.at(1) for part in parts) == real.backward_flops
    looks = 3 if stop == 6 else 0  # targets are created and used in `run`, which the profile does not contain
    assert sum(part.forward_operations for part in parts) == real.forward_operations - looks
    assert sum(part.backward_operations for part in parts) == real.backward_operations
    if (start, stop) == (0, 6):
        kept = sum(part.activation_bytes.at(1) for part in parts) - 3 * 10 * 4
        assert 5 * kept == pytest.approx(real.kept_bytes, rel=0.05)
    assert all(part.forward_flops.linear == 0 for part in profile.layers)


def test_declared_layers_that_do_not_fit_are_estimated() -> None:
    options = {"in_features": 100, "out_features": 10}
    profile = dissect(Blueprint(layers=(LayerSpec(type="linear", options=options),)))
    assert not profile.counted
    assert profile.layers[0].forward_flops.at(1) == 2 * profile.parameters


def test_growth_is_fitted_exactly_and_checked() -> None:
    def grown(tokens: int) -> int:
        return 5 + 3 * tokens + 2 * tokens * tokens

    lengths = (256, 512, 1024, 768)
    assert fit(lengths, [grown(length) for length in lengths]) == QuadraticGrowth(5.0, 3.0, 2.0)
    with pytest.raises(NotQuadratic):
        fit(lengths, [min(length, 600) for length in lengths])


def test_a_model_without_modules_after_its_layers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def sketch(blueprint: Blueprint) -> tuple[Any, Any]:
        model, outline = trained_sketch(blueprint)
        outline.closing, outline.heads = [], []
        return model, outline

    monkeypatch.setattr(decoder_profile, "trained_sketch", sketch)
    with pytest.raises(UserError, match="LlamaForCausalLM has no module after its layers"):
        decoder_profile.profile_config(Blueprint(config={**BASE, "model_type": "llama"}))
