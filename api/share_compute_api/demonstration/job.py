"""The training job of the demonstration, and samples of the trained model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

PROMPTS = ("The value of", "Return the", "This function")
_SAMPLE_TOKENS = 32


def write_job(folder: Path, corpus: Path, *, stages: int, steps: int) -> Path:
    """Write the file of a job that trains a small Llama on ``corpus``; return its path.

    The model has 6 layers (2.8 million parameters), or one layer per stage for more than 6 stages. The job sets the
    number of stages, because the planner would place such a small model on one machine.
    """
    import yaml

    job: dict[str, Any] = {
        "kind": "train",
        "name": "demo",
        "model": {
            "config": {
                "model_type": "llama",
                "vocab_size": 2048,
                "hidden_size": 192,
                "intermediate_size": 512,
                "num_hidden_layers": max(6, stages),
                "num_attention_heads": 6,
                "num_key_value_heads": 2,
                "max_position_embeddings": 256,
                "tie_word_embeddings": True,
            }
        },
        "data": {"files": [str(corpus)], "validation_fraction": 0.01, "test_fraction": 0.0},
        "tokenizer": {"vocab_size": 2048},
        "training": {
            "steps": steps,
            "batch_size": 16,
            "microbatches": 4,
            "sequence_length": 96,
            "optimizer": {"name": "adamw", "learning_rate": 0.004},
            "schedule": {"name": "cosine", "warmup_steps": min(5, steps // 4)},
        },
        "parallelism": {"stages": stages, "members_per_stage": 1},
    }
    file = folder / "demo.yaml"
    file.write_text(yaml.safe_dump(job, sort_keys=False))
    return file


def sample(model_folder: Path, seed: int = 0) -> list[tuple[str, str]]:
    """Generate text with the trained model, loaded by ``transformers``; return (prompt, continuation) pairs."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(seed)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder)
    samples = []
    for prompt in PROMPTS:
        encoded = tokenizer(prompt, return_tensors="pt")
        made = model.generate(
            encoded["input_ids"],
            attention_mask=torch.ones_like(encoded["input_ids"]),
            max_new_tokens=_SAMPLE_TOKENS,
            do_sample=True,
            top_k=20,
            temperature=0.8,
            pad_token_id=tokenizer.eos_token_id or 0,
        )
        continuation = made[0][encoded["input_ids"].shape[1] :]
        samples.append((prompt, tokenizer.decode(continuation, skip_special_tokens=True)))
    return samples
