"""Process of vLLM's CPU build; see `_rival_loop`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from _rival_loop import Prepare, Settings, answer_requests

_BLOCK_TOKENS = 128
"""Number of tokens in a block of vLLM's KV cache on CPUs."""


def start(settings: Settings) -> Prepare:
    """Load and compile the model; return the function that prepares a call of `LLM.generate`."""
    folder = Path(settings.folder)
    # Compiled code contains the number of threads, so processes with other numbers must not find it.
    os.environ.update(
        OMP_NUM_THREADS=str(settings.threads),
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_CACHE_ROOT=str(folder / f"vllm-{settings.threads}"),
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
    )
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    config = json.loads((folder / "config.json").read_text())
    head = config["hidden_size"] // config["num_attention_heads"]
    token_bytes = 2 * 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * head
    cached = max(settings.tokens, settings.window) + settings.sequences * _BLOCK_TOKENS
    model = LLM(
        model=settings.folder,
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=settings.window,
        max_num_seqs=settings.sequences,
        kv_cache_memory_bytes=token_bytes * cached,
        enable_prefix_caching=False,
    )

    def prepare(prompts: list[list[int]], new: int) -> Callable[[], list[list[int]]]:
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        options = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)

        def generate() -> list[list[int]]:
            answers = model.generate(inputs, options, use_tqdm=False)
            return [list(answer.outputs[0].token_ids) for answer in answers]

        return generate

    return prepare


if __name__ == "__main__":
    answer_requests(start)
