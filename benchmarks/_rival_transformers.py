"""Process of transformers; see `_rival_loop`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from _rival_loop import Prepare, Settings, answer_requests
from transformers import AutoModelForCausalLM


def start(settings: Settings) -> Prepare:
    """Load the model; return the function that prepares a call of `generate`."""
    torch.set_num_threads(settings.threads)
    model = AutoModelForCausalLM.from_pretrained(settings.folder, dtype=torch.float32).eval()

    def prepare(prompts: list[list[int]], new: int) -> Callable[[], list[list[int]]]:
        tokens = torch.tensor(prompts)

        @torch.inference_mode()
        def generate() -> list[list[int]]:
            texts = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=new,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            answers: list[list[int]] = texts[:, tokens.shape[1] :].tolist()
            return answers

        return generate

    return prepare


if __name__ == "__main__":
    answer_requests(start)
