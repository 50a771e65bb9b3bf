"""Jobs whose sequences are cut into slices, and jobs that cannot have this."""

from __future__ import annotations

from typing import Any

import pytest

from share_compute.errors import UserError
from share_compute.models.huggingface.cut_check import require_slices
from share_compute.specification import parse_job

LLAMA = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
DIGITS = {
    "model": {"layers": [{"type": "linear", "options": {"in_features": 64, "out_features": 10}}]},
    "data": {"dataset": "digits"},
}


def job(
    training: dict[str, Any] | None = None, changes: dict[str, Any] | None = None, **parallelism: Any
) -> Any:
    return {
        "model": {"config": LLAMA},
        "data": {"files": ["a.txt"]},
        "training": {"sequence_length": 128, **(training or {})},
        "parallelism": {"sequence": 4, **parallelism},
        **(changes or {}),
    }


def test_each_stage_has_a_machine_for_each_slice() -> None:
    spec = parse_job(job(stages=2))
    assert spec.parallelism.machines_needed == 8
    assert spec.with_microbatches(8).training.microbatches == 2
    assert parse_job(job(sequence=1)).parallelism.machines_needed == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (job({"sequence_length": 130}), "training.sequence_length 130 is not a multiple of"),
        (job({"compile": "auto"}), "needs training.compile off, and it is auto"),
        (job({"precision": "bfloat16"}), "needs training.precision float32, and it is bfloat16"),
        (job({"synchronization": {"kind": "local", "branches": 2}}), r"synchronization \{kind: allreduce\}"),
        (job({"lora": {"rank": 4, "dropout": 0.1}}, {"model": {"path": "llama"}}), "training.lora.dropout 0"),
        (job(tensor=2), "together with parallelism.tensor"),
        (job(optimizer="sharded"), "together with parallelism.optimizer sharded"),
        (job(members_per_stage=2), "together with parallelism.members_per_stage"),
        (job(changes=DIGITS), "needs a Hugging Face language model without tasks"),
    ],
)
def test_impossible_jobs_name_the_field(given: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        parse_job(given)
    assert "parallelism.sequence 4" in caught.value.message


@pytest.mark.parametrize(
    "config", [LLAMA, {**LLAMA, "model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 8}]
)
def test_sliced_architectures(config: dict[str, Any]) -> None:
    require_slices(config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**LLAMA, "attention_dropout": 0.1}, "attention_dropout is 0.1"),
        ({"model_type": "mistral", "sliding_window": 64}, "attention in windows of 64 tokens"),
        ({"model_type": "gemma2"}, "sliding_attention"),
        ({**LLAMA, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "positions of type dynamic"),
        (
            {"model_type": "bloom", "hidden_dropout": 0.0, "attention_dropout": 0.0},
            "no small model of this configuration",
        ),
    ],
)
def test_other_architectures_are_refused_in_words(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        require_slices(config)
    assert caught.value.message.startswith("parallelism.sequence: ")
    assert caught.value.hint
