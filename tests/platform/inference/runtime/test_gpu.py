"""Serving stages on a GPU: their tokens and vectors are those of transformers on the same GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.platform.inference.runtime import encoders
from tests.platform.inference.runtime.stages import (
    CPU,
    MODELS,
    VOCABULARY,
    Serving,
    generated,
    opening,
    prompt_of,
    stages_of,
)
from torch import nn

from share_compute.inference.runtime.quantization import Int8Linear, integers_of, scale_of
from share_compute.inference.runtime.sampling import Sampler
from share_compute.inference.scheduler.engine_steps import Chunk, SlotGrowth
from share_compute.models.huggingface.encoder_types import ENCODERS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]
GPU = torch.device("cuda")
CUTS = [(0, 1), (1, 3)]
PROMPTS = {1: prompt_of(19, 1), 2: prompt_of(3, 2), 3: prompt_of(12, 3)}
PIECES = {1: [7, 9, 3], 2: [3], 3: [1, 11]}
"""Prompts are cut into chunks, and run beside tokens of sequences that decode."""
COUNT = 10
RULES: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9},
    {"temperature": 1.1, "top_k": 20},
    {"temperature": 0.8, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 1.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "logprobs": 3},
    {"temperature": 0, "presence_penalty": 0.5, "logit_bias": ((7, -100.0), (8, 2.0))},
]


@pytest.mark.parametrize("model_type", MODELS)
def test_greedy_tokens_are_those_of_transformers(model_type: str) -> None:
    expected = {
        sequence: generated(model_type, tuple(prompt), COUNT, GPU) for sequence, prompt in PROMPTS.items()
    }
    serving = Serving(stages_of(model_type, CUTS, GPU))
    assert {stage.device.type for stage in serving.stages} == {"cuda"}
    alone = serving.run({opening(1, PROMPTS[1]): [len(PROMPTS[1])]}, COUNT)[1]
    assert alone == expected[1]
    serving.step(closes=[1])
    plans = {opening(sequence, prompt): PIECES[sequence] for sequence, prompt in PROMPTS.items()}
    assert serving.run(plans, COUNT) == expected


def test_slots_grow_and_prefixes_are_taken_over() -> None:
    serving = Serving(stages_of("llama", CUTS, GPU))
    prompt = prompt_of(9)
    serving.step(
        Chunk(1, 0, 9, tuple(prompt), samples=True), opens=[replace(opening(1, prompt), capacity_tokens=10)]
    )
    serving.step(Chunk(1, 9, 1, None, samples=True))
    serving.step(Chunk(1, 10, 1, None, samples=True), grows=[SlotGrowth(1, 30)])
    assert serving.texts[1] == generated("llama", tuple(prompt), COUNT, GPU)[:3]
    longer = [*prompt, *prompt_of(6, 5)]
    copied = serving.run({opening(2, longer, copy_from=1, copy_tokens=9): [2, 4]}, COUNT)[2]
    assert copied == generated("llama", tuple(longer), COUNT, GPU)


def test_the_sampler_draws_as_on_a_processor() -> None:
    logits = 4 * torch.randn(len(RULES), VOCABULARY, generator=torch.Generator().manual_seed(4))
    drawn = []
    for device in (CPU, GPU):
        sampler = Sampler(VOCABULARY, device)
        for number, rules in enumerate(RULES):
            sampler.open(opening(number, [3, 5, 7], **{"seed": number, **rules}))
        tokens = []
        for start in range(3, 40):
            chunks = [Chunk(number, start, 1, None, samples=True) for number in range(len(RULES))]
            tokens.append([one.token for one in sampler.sample(logits.roll(start, 1).to(device), chunks)])
        drawn.append(tokens)
    assert drawn[0] == drawn[1]


@torch.inference_mode()
def test_products_of_integers_are_near_those_of_floats() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(172, 97)
    made = Int8Linear(plain)
    scale = scale_of(plain.weight.detach())
    made.int8 = nn.Parameter(integers_of(plain.weight.detach(), scale), requires_grad=False)
    made.int8_scale = nn.Parameter(scale, requires_grad=False)
    plain, made = plain.to(GPU), made.to(GPU)
    for rows in (1, 16, 200):
        inputs = torch.randn(1, rows, 172, device=GPU)
        expected, found = plain(inputs), made(inputs)
        assert (found.shape, found.dtype, found.device.type) == (expected.shape, expected.dtype, "cuda")
        assert float((found - expected).norm() / expected.norm()) < 0.015


@pytest.mark.parametrize("model_type", ENCODERS)
def test_vectors_are_those_of_transformers(model_type: str) -> None:
    texts = [encoders.text_of(length, length) for length in (19, 3, 1, 40)]
    expected = torch.stack([encoders.hidden_states(model_type, text, GPU).mean(0) for text in texts])
    stages = [encoders.filled(encoders.stage_of(model_type, cut, device=GPU), model_type) for cut in CUTS]
    torch.testing.assert_close(encoders.vectors(stages, texts), expected.cpu(), atol=1e-5, rtol=0)
