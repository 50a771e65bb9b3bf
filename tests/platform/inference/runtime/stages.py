"""Small models, the results of transformers for them, and stages that serve them without a scheduler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import cache
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from share_compute.inference.runtime.stage import ServingStage
from share_compute.inference.scheduler.engine_steps import (
    Chunk,
    EngineStep,
    Opening,
    SampledToken,
    SlotGrowth,
)
from share_compute.inference.scheduler.options import SamplingOptions
from share_compute.shards import Shard

CPU = torch.device("cpu")
LAYERS = 3
VOCABULARY = 160
SMALL = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "vocab_size": VOCABULARY, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 2, "head_dim": 16}
WINDOW = 8
"""Shorter than the test texts."""
MODELS: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": GROUPED,
    "mistral": {**GROUPED, "sliding_window": WINDOW},
    "gemma2": {**GROUPED, "sliding_window": WINDOW, "query_pre_attn_scalar": 16},
    "gemma3_text": {**GROUPED, "sliding_window": WINDOW, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
    "phi3": {"num_key_value_heads": 2},
    "gpt_neox": {},
    "mixtral": {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_key_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48, "mlp_only_layers": [1],
    },
    "qwen3_moe": {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gpt_oss": {
        **GROUPED, "sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}  # fmt: skip
"""Plain, biased, normed queries, windows, soft caps, attention sinks, mixtures; with and without grouped heads."""


def small_config(model_type: str) -> dict[str, Any]:
    return {**CONFIG_MAPPING[model_type](**SMALL, **MODELS[model_type]).to_dict(), "model_type": model_type}


def model_of(model_type: str, device: torch.device = CPU) -> Any:
    """Return transformers' model, with weights large enough that logits differ clearly."""
    return _model_of(model_type, device)


@cache
def _model_of(model_type: str, device: torch.device) -> Any:
    if device != CPU:
        return deepcopy(model_of(model_type)).to(device)
    own = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**small_config(model_type)), dtype=torch.float32
    )
    source = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in own.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=source) * 0.3)
    own.generation_config.eos_token_id = None
    return own.requires_grad_(requires_grad=False).eval()


def fill(stage: ServingStage, model: Any, *keeps_plain: bool) -> None:
    state = model.state_dict()
    with torch.no_grad():
        for name, tensor in stage.tensors().items():
            tensor.copy_(state[name])
    for keeps in keeps_plain or (True,):
        stage.seal(keeps_plain=keeps)


def stages_of(
    model_type: str, cuts: Sequence[tuple[int, int]], device: torch.device = CPU, **options: Any
) -> list[ServingStage]:
    model = model_of(model_type)
    made = [
        ServingStage(small_config(model_type), Shard("m", *cut, LAYERS), device, torch.float32, **options)
        for cut in cuts
    ]
    for stage in made:
        fill(stage, model)
    return made


def opening(sequence: int, prompt: Sequence[int], **more: Any) -> Opening:
    """Return an opening; ``more`` has fields of `Opening` or of its options."""
    fields = {name: more.pop(name) for name in ("copy_from", "copy_tokens", "history") if name in more}
    options = SamplingOptions(**{"temperature": 0, "seed": 0, "max_tokens": 64, **more})
    return Opening(sequence, 128, options, **{"history": tuple(prompt), **fields}, prompt_tokens=len(prompt))


def prompt_of(length: int, seed: int = 0) -> list[int]:
    source = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (length,), generator=source).tolist()


class Serving:
    """Runs steps through stages, one after the other.

    Args:
        stages: in their order.
    """

    def __init__(self, stages: Sequence[ServingStage]) -> None:
        self.stages = stages
        self.texts: dict[int, list[int]] = {}
        self.sampled: list[SampledToken] = []
        self._sent: dict[int, int] = {}
        self._steps = 0

    def step(
        self,
        *chunks: Chunk,
        opens: Sequence[Opening] = (),
        closes: Sequence[int] = (),
        grows: Sequence[SlotGrowth] = (),
    ) -> tuple[SampledToken, ...]:
        step = EngineStep(self._steps, 0, 0, tuple(opens), tuple(closes), chunks, tuple(grows))
        self._steps += 1
        given: Any = torch.tensor(
            step.input_ids({sequence: text[-1] for sequence, text in self.texts.items() if text}),
            dtype=torch.int64,
        )
        for stage in self.stages:
            given = stage.compute(step, given)
        for one in given:
            self.texts.setdefault(one.sequence, []).append(one.token)
        self.sampled.extend(given)
        return given

    def run(self, plans: Mapping[Opening, Sequence[int]], count: int) -> dict[int, list[int]]:
        """Prefill prompts in the chunks that ``plans`` gives, while finished prompts decode.

        Returns:
            ``count`` tokens of each sequence.
        """
        self.step(opens=list(plans))
        done = {one.sequence: one.copy_tokens for one in plans}
        pieces = {one.sequence: list(plan) for one, plan in plans.items()}
        histories = {one.sequence: one.history for one in plans}
        self.texts = {one.sequence: [] for one in plans}
        while any(len(text) < count for text in self.texts.values()):
            chunks = []
            for sequence, text in self.texts.items():
                start, left = done[sequence], pieces[sequence]
                if left:
                    size = left.pop(0)
                    tokens = histories[sequence][start : start + size]
                    chunks.append(Chunk(sequence, start, size, tokens, samples=not left))
                elif len(text) < count:
                    size = 1
                    chunks.append(Chunk(sequence, start, 1, None, samples=True))
                else:
                    continue
                done[sequence] += size
            self.step(*chunks)
        return self.texts


@cache
def generated(model_type: str, prompt: tuple[int, ...], count: int, device: torch.device = CPU) -> list[int]:
    """Return the tokens that transformers generates greedily."""
    ids = torch.tensor([prompt], device=device)
    made = model_of(model_type, device).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
    )
    return made[0, len(prompt) :].tolist()
