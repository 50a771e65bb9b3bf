"""Stages: together they equal the whole model bit for bit, for every architecture that can be cut."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.thoroughly import a_few
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from share_compute.errors import ShareComputeError, UserError
from share_compute.models.blueprint import Blueprint
from share_compute.models.factory import build_stage, dissect
from share_compute.models.huggingface.conversion import PretrainedWeights
from share_compute.models.losses import loss_sum
from share_compute.models.storage.weights import WeightFolder, copy_into, row_ranges
from share_compute.shards import Shard
from share_compute.specification import LayerSpec

CPU = torch.device("cpu")
COMMON = [
    "cohere", "gemma", "gemma2", "gemma3_text", "gpt_neox", "granite", "llama", "mistral", "mixtral", "olmo2", "phi",
    "phi3", "qwen2", "qwen3", "smollm3", "starcoder2",
]  # fmt: skip
CARRY_STATE_ACROSS_LAYERS = {
    "bailing_hybrid", "cohere_compass_text", "deepseek_v4", "gemma3n_text", "gemma4_text", "glm_moe_dsa", "hrm_text",
    "hy_v4", "kimi_linear",
}  # fmt: skip
"""Architectures that declare a plan but pass more than hidden states between layers: they are refused."""
NO_SMALL_CONFIGURATION = {"dots1", "dots3_note_text", "longcat_flash", "phi4_multimodal"}
"""Their configurations cannot be made small by the fields below."""
SMALL = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 160, "max_position_embeddings": 64, "head_dim": 16, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1, "kv_lora_rank": 16,
    "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "first_k_dense_replace": 1,
    "shared_expert_intermediate_size": 32, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 160,
}  # fmt: skip


def small_config(model_type: str, **options: Any) -> dict[str, Any]:
    kind = CONFIG_MAPPING[model_type]
    known = set(inspect.signature(kind.__init__).parameters) | set(getattr(kind, "__dataclass_fields__", {}))
    if "kv_lora_rank" in known:
        known -= {"head_dim", "num_key_value_heads"}  # latent attention derives them
    config = kind(**{name: value for name, value in SMALL.items() if name in known} | options).to_dict()
    return {**config, "model_type": model_type}


def declared() -> list[str]:
    return sorted(
        name
        for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if name in CONFIG_MAPPING and getattr(CONFIG_MAPPING[name], "base_model_pp_plan", None)
    )


REST = sorted(set(declared()) - set(COMMON) - CARRY_STATE_ACROSS_LAYERS - NO_SMALL_CONFIGURATION)


def assert_composes(config: dict[str, Any]) -> None:
    blueprint = Blueprint(config=config)
    profile = dissect(blueprint)
    count = len(profile.layers)
    edges = [(0, count), (0, 1), (1, count - 1), (count - 1, count)]
    whole, *parts = (build_stage(blueprint, Shard("m", start, stop, count), CPU) for start, stop in edges)
    for stage in (whole, *parts):
        stage.initialize(3)
        stage.module.eval()
    ids = torch.randint(3, 160, (2, 24))
    own = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32).eval()
    own.load_state_dict(whole.module.state_dict())
    with torch.no_grad():
        expected = own(input_ids=ids).logits
        hidden = ids
        for stage in parts:
            hidden = stage.forward(hidden)
        assert torch.equal(whole.forward(ids), expected)
        assert torch.equal(hidden, expected)
    assert profile.counted
    assert profile.parameters == sum(tensor.numel() for tensor in own.parameters())
    for stage in (whole, *parts):
        held = sum(tensor.numel() for tensor in stage.module.parameters())
        assert profile.parameters_of(stage.shard) == held


@pytest.mark.parametrize("model_type", COMMON)
def test_common_architectures_compose_bit_for_bit(model_type: str) -> None:
    assert_composes(small_config(model_type))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", a_few(REST, 8))
def test_every_architecture_with_a_plan_composes_bit_for_bit(model_type: str) -> None:
    assert_composes(small_config(model_type))


@pytest.mark.parametrize("model_type", ["gemma4_text", "hrm_text"])
def test_architectures_that_cannot_be_cut_are_refused(model_type: str) -> None:
    with pytest.raises(ShareComputeError) as caught:
        assert_composes(small_config(model_type))
    assert caught.value.hint


def test_an_architecture_without_plan_is_refused() -> None:
    config = AutoConfig.for_model("gpt2", n_layer=2, n_embd=32, n_head=2).to_dict()
    with pytest.raises(UserError, match="declares no pipeline plan"):
        dissect(Blueprint(config=config))


@pytest.mark.parametrize(
    "wrong",
    [
        {"hidden_size": "a"},
        {"hidden_size": -64},
        {"hidden_size": 0},
        {"num_attention_heads": 3},
        {"rms_norm_eps": "small"},
    ],
)
def test_a_wrong_configuration_is_the_users_to_fix(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError) as caught:
        dissect(Blueprint(config={**small_config("llama"), **wrong}))
    assert caught.value.hint


def test_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(UserError, match="unknown model_type 'lama'"):
        dissect(Blueprint(config={"model_type": "lama"}))


def test_a_tied_head_starts_as_the_embedding_and_is_stored_once() -> None:
    blueprint = Blueprint(config=small_config("llama", tie_word_embeddings=True))
    first = build_stage(blueprint, Shard("m", 0, 2, 4), CPU)
    last = build_stage(blueprint, Shard("m", 2, 4, 4), CPU)
    first.initialize(5)
    last.initialize(5)
    name = dissect(blueprint).tied_name
    assert name is not None
    assert torch.equal(first.parameters()[name], last.parameters()[name])
    assert "lm_head.weight" not in last.persistent()


def assert_loads_what_transformers_saved(config: dict[str, Any], folder: Path) -> None:
    saved = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32).eval()
    # Constructors leave some tensors uninitialized, but the compared tensors must be numbers.
    with torch.no_grad():
        for parameter in saved.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.02)
        saved.get_input_embeddings().weight[0] = (
            0  # the row of the padding token, which some models set to zero when they load
        )
    saved.save_pretrained(folder)
    weights = PretrainedWeights(WeightFolder(folder), config)
    count = config["num_hidden_layers"]
    ids = torch.randint(3, 160, (2, 24))
    hidden = ids
    for start, stop in ((0, count // 2), (count // 2, count)):
        stage = build_stage(Blueprint(config=config), Shard("m", start, stop, count), CPU)
        for name, tensor in stage.persistent().items():
            for first, end in row_ranges(tensor.shape, 4, limit_bytes=5000):
                rows = weights.read(name, first, end).float().contiguous()
                copy_into(tensor, first, end, rows.reshape(-1).view(torch.uint8).numpy())
        stage.module.eval()
        with torch.no_grad():
            hidden = stage.forward(hidden)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        assert torch.equal(hidden, loaded(input_ids=ids).logits)


@pytest.mark.parametrize("model_type", COMMON)
def test_common_architectures_load_what_transformers_saved(model_type: str, tmp_path: Path) -> None:
    assert_loads_what_transformers_saved(small_config(model_type), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", a_few(REST, 8))
def test_every_architecture_with_a_plan_loads_what_transformers_saved(
    model_type: str, tmp_path: Path
) -> None:
    assert_loads_what_transformers_saved(small_config(model_type), tmp_path)


def test_tied_weights_load(tmp_path: Path) -> None:
    assert_loads_what_transformers_saved(small_config("qwen3", tie_word_embeddings=True), tmp_path)


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**small_config("llama"))).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="lacks"):
        PretrainedWeights(WeightFolder(tmp_path), small_config("llama", num_hidden_layers=6))


def test_dropout_depends_on_the_cell_alone() -> None:
    config = small_config("gpt_neox", hidden_dropout=0.3)
    ids = torch.randint(3, 160, (2, 24))

    def run(cuts: list[tuple[int, int]], noise: int) -> torch.Tensor:
        hidden = ids
        for start, stop in cuts:
            stage = build_stage(Blueprint(config=config), Shard("m", start, stop, 4), CPU)
            stage.initialize(1)
            stage.module.train()
            torch.manual_seed(noise)
            stage.prepare_cell(1, 7, 0)
            hidden = stage.forward(hidden)
        return hidden.detach()

    assert torch.equal(run([(0, 4)], 1), run([(0, 1), (1, 3), (3, 4)], 2))


def test_declared_layers_compose_and_train() -> None:
    layers = (
        LayerSpec(type="linear", options={"in_features": 64, "out_features": 32}),
        LayerSpec(type="relu"),
        LayerSpec(type="dropout", options={"p": 0.5}),
        LayerSpec(type="linear", options={"in_features": 32, "out_features": 10}),
    )
    blueprint = Blueprint(layers=layers)
    whole, first, last = (
        build_stage(blueprint, Shard("m", start, stop, 4), CPU) for start, stop in ((0, 4), (0, 2), (2, 4))
    )
    for stage in (whole, first, last):
        stage.initialize(2)
        stage.prepare_cell(2, 1, 0)
    inputs, targets = torch.rand(8, 64), torch.randint(0, 10, (8,))
    logits = whole.forward(inputs)
    assert torch.equal(logits, last.forward(first.forward(inputs)))
    loss_sum(logits, targets).backward()
    assert all(parameter.grad is not None for parameter in whole.module.parameters())


def test_wrong_layer_options_name_the_layer() -> None:
    with pytest.raises(UserError, match=r"layer 0 \(linear\) lacks out_features"):
        dissect(Blueprint(layers=(LayerSpec(type="linear", options={"in_features": 3}),)))


def test_layers_that_do_not_fit_name_the_layer() -> None:
    layers = tuple(
        LayerSpec(type="linear", options={"in_features": size, "out_features": 10}) for size in (64, 11)
    )
    stage = build_stage(Blueprint(layers=layers), Shard("m", 0, 2, 2), CPU)
    with pytest.raises(UserError, match="layer 1 does not fit"):
        stage.forward(torch.rand(2, 64))
