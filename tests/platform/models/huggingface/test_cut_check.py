"""The check whether a model can be cut computes a small model whole and in stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.platform.models.huggingface.test_models import declared, small_config
from tests.thoroughly import a_few
from transformers import CONFIG_MAPPING
from transformers.models.llama import modeling_llama

from share_compute.models.blueprint import Blueprint
from share_compute.models.factory import dissect
from share_compute.models.huggingface.cut_check import no_cut_reason

REFUSED = {
    "cohere_compass_text": "no small model",
    "deepseek_v2": "no small model",  # its default configuration names no number of experts per token
    "deepseek_v4": "several residual streams",
    "dots1": "no small model",
    "dots3_note_text": "no small model",
    "gemma3n_text": "no small model",
    "gemma4_text": "module that another stage holds",
    "glm_moe_dsa": "sparse attention",
    "hrm_text": "declares no pipeline plan",
    "hy_v4": "sparse attention",
    "longcat_flash": "no small model",
    "ministral": "no small model",  # its default configuration is not complete
    "phi4_multimodal": "no small model",
}
"""Default configurations that cannot be cut, with words of the reason."""


@pytest.mark.slow
@pytest.mark.parametrize("model_type", a_few(declared(), 8))
def test_the_default_configuration_of_an_architecture_is_exact_or_refused_in_words(model_type: str) -> None:
    reason = no_cut_reason({"model_type": model_type})
    if model_type in REFUSED:
        assert reason is not None
        assert REFUSED[model_type] in reason
    else:
        assert reason is None


@pytest.mark.parametrize(
    ("model_type", "options"), [("afmoe", {"mup_enabled": True}), ("granite", {"embedding_multiplier": 12.0})]
)
def test_embeddings_that_the_base_model_scales_are_scaled_once(
    model_type: str, options: dict[str, Any]
) -> None:
    assert no_cut_reason(small_config(model_type, **options)) is None


def test_hidden_states_that_change_between_layers_and_norm_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    compute = modeling_llama.LlamaModel.forward

    def scaled(*args: Any, **options: Any) -> Any:
        outputs = compute(*args, **options)
        outputs.last_hidden_state = outputs.last_hidden_state * 1.5
        return outputs

    monkeypatch.setattr(modeling_llama.LlamaModel, "forward", scaled)
    reason = no_cut_reason(small_config("llama", rms_norm_eps=2e-6))
    assert reason == "its stages do not compute what the whole model computes"


def test_the_settings_of_the_real_model_are_those_of_the_small_one(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    compute = modeling_llama.LlamaModel.forward

    def watched(self: Any, *args: Any, **options: Any) -> Any:
        seen.append(self.config)
        return compute(self, *args, **options)

    monkeypatch.setattr(modeling_llama.LlamaModel, "forward", watched)
    config = {**CONFIG_MAPPING["llama"](num_hidden_layers=80).to_dict(), "attention_bias": True}
    assert no_cut_reason(config) is None
    assert {one.attention_bias for one in seen} == {True}
    assert {one.num_hidden_layers for one in seen} == {4}


def test_random_numbers_go_on_as_if_nothing_had_been_checked() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    assert no_cut_reason(small_config("llama", rms_norm_eps=3e-6)) is None
    assert torch.equal(torch.rand(3), expected)


def test_the_profile_says_why_a_model_is_not_cut() -> None:
    assert dissect(Blueprint(config=small_config("llama"))).no_cut_reason is None
    reason = dissect(Blueprint(config=small_config("glm_moe_dsa"))).no_cut_reason
    assert reason is not None
    assert (
        reason == "it has sparse attention, whose layers pass the tokens that they select to the next layers"
    )
    assert dissect(Blueprint(config=small_config("glm_moe_dsa", num_hidden_layers=1))).no_cut_reason is None
