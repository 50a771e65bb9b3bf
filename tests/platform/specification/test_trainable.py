"""Configurations that cannot be trained are refused before a job is queued, in the words of the project."""

from __future__ import annotations

from typing import Any

import pytest

from share_compute.errors import UserError
from share_compute.models.huggingface.hub_configuration import check_trainable

ODD = {"hidden_size": 100, "num_attention_heads": 3, "num_hidden_layers": 2}
UNEQUAL = "model.config is wrong: hidden_size 100 is not a multiple of num_attention_heads 3"


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"model_type": "llama", **ODD, "num_key_value_heads": 3}, UNEQUAL),
        ({"model_type": "mistral", **ODD, "num_key_value_heads": 3}, UNEQUAL),
        ({"model_type": "gpt2", "n_embd": 100, "n_head": 3}, UNEQUAL),
        (
            {"model_type": "llama", "hidden_size": 66, "num_attention_heads": 2, "num_key_value_heads": 2},
            "the width of a head, hidden_size / num_attention_heads, must be even",
        ),
        ({"model_type": "llama", "hidden_size": "big"}, "hidden_size must be a whole number, not 'big'"),
        ({"model_type": "llama", "hidden_size": 0}, "hidden_size is 0"),
        ({"model_type": "t5"}, "architecture 't5' is no causal language model"),
        ({"model_type": "lama"}, "unknown model_type 'lama'"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused(config: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError) as caught:
        check_trainable(config)
    assert problem in caught.value.message
    assert caught.value.hint


def test_a_configuration_with_very_many_unknown_keys_is_read() -> None:
    many = {f"no_such_key_{number}": 1 for number in range(10_000)}
    check_trainable({"model_type": "llama", **many, "x" * 100_000: 1})
    with pytest.raises(UserError, match="did you mean 'hidden_size'"):
        check_trainable({"model_type": "llama", "hidden_sise": 64, **many})


def test_an_image_model_needs_whole_heads_too() -> None:
    with pytest.raises(UserError, match="100 is not a multiple of num_attention_heads 3"):
        check_trainable({"model_type": "vit", **ODD}, "image_classification")


def test_a_width_of_heads_of_its_own_needs_no_multiple() -> None:
    check_trainable({"model_type": "qwen3", **ODD, "num_key_value_heads": 3, "head_dim": 32})
