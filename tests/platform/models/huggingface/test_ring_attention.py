"""Attention over slices of a sequence equals attention over the whole sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel

from share_compute.models.huggingface.ring_attention import use_ring_attention
from share_compute.models.huggingface.slices import LocalRing

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 50, "max_position_embeddings": 64,
    },
    "gpt2": {
        "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 50, "n_positions": 64,
        "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    },
    "bert": {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "vocab_size": 50, "max_position_embeddings": 64,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    },
}  # fmt: skip


def computed(
    model: Any, ids: Tensor, weights: Tensor, slices: int | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the outputs, and the gradients of a weighted sum of them; whole sequences for None."""
    model.zero_grad()
    if slices is None:
        output = model(input_ids=ids)[0]
        (output * weights).sum().backward()
    else:
        ring, tokens = LocalRing(range(slices)), ids.shape[1] // slices

        def task(index: int) -> Any:
            own = slice(index * tokens, (index + 1) * tokens)
            places = torch.arange(own.start, own.stop).unsqueeze(0)

            def run() -> Tensor:
                part: Tensor = model(input_ids=ids[:, own], position_ids=places)[0]
                (part * weights[:, own]).sum().backward()
                return part

            return run

        parts = ring.run(slices, {index: task(index) for index in range(slices)})
        output = torch.cat([parts[index] for index in range(slices)], 1)
    return output.detach(), {
        name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None
    }


@pytest.mark.parametrize("slices", [1, 2, 4])
@pytest.mark.parametrize("kind", CONFIGS)
def test_slices_equal_the_whole(kind: str, slices: int) -> None:
    torch.manual_seed(0)
    model = AutoModel.from_config(AutoConfig.for_model(kind, **CONFIGS[kind]))
    ids, weights = torch.randint(0, 50, (2, 16)), torch.randn(2, 16, 32)
    output, gradients = computed(model, ids, weights, None)
    use_ring_attention(model)
    cut, found = computed(model, ids, weights, slices)
    torch.testing.assert_close(cut, output, atol=1e-5, rtol=0)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            found[name], gradient, atol=1e-5 * max(1.0, float(gradient.abs().max())), rtol=0
        )
    whole, _ = computed(model, ids, weights, None)
    torch.testing.assert_close(whole, output, atol=1e-6, rtol=0)
