"""Error feedback lets biased codecs converge, where they do not without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.platform.compression.codecs import spec_of
from torch import Tensor

from share_compute.compression.factory import codec_of

SIZE = 64
STEPS = 1200
TARGET = torch.linspace(-1, 1, SIZE)


def noise_that_hides_half(source: torch.Generator) -> Tensor:
    """Return zero-mean noise on half of the values, always larger than the gradient of the others."""
    signs = torch.randint(0, 2, (SIZE,), generator=source) * 2 - 1
    return torch.where(torch.arange(SIZE) % 2 == 0, 10.0 * signs, 0.0)


def noise_that_is_skewed(source: torch.Generator) -> Tensor:
    """Return zero-mean noise that is mostly negative, so that the mean of signs is not the sign of the mean."""
    return torch.where(torch.rand(SIZE, generator=source) < 0.25, 3.0, -1.0)


def distance(options: dict[str, Any], noise: Callable[[torch.Generator], Tensor]) -> float:
    """Minimize half the squared distance to `TARGET` by SGD; return the distance of the mean iterate, for each value.

    The mean is taken over the second half of the steps, which removes the noise of the iterates. Values with the noise
    that hides others are not counted.
    """
    codec = codec_of(spec_of(**options), 0)
    state = codec.begin("weight", (SIZE,))
    source = torch.Generator().manual_seed(0)
    weights, mean = torch.zeros(SIZE), torch.zeros(SIZE)
    for step in range(STEPS):
        payload, state = codec.encode(weights - TARGET + noise(source), state)
        weights = weights - 0.05 * codec.decode(payload, (SIZE,))
        if step >= STEPS // 2:
            mean += weights / (STEPS - STEPS // 2)
    quiet = noise(source) == 0
    return float((mean - TARGET)[quiet if quiet.any() else ...].square().mean().sqrt())


@pytest.mark.parametrize(
    ("options", "noise"),
    [
        ({"name": "topk", "density": 0.25, "chunk": SIZE}, noise_that_hides_half),
        ({"name": "topk", "density": 0.25, "chunk": SIZE, "values": "int2"}, noise_that_hides_half),
        ({"name": "sign"}, noise_that_is_skewed),
    ],
)
def test_sgd_converges_with_error_feedback_only(
    options: dict[str, Any], noise: Callable[[torch.Generator], Tensor]
) -> None:
    assert distance({**options, "error_feedback": 1.0}, noise) < 0.12
    assert distance({**options, "error_feedback": None}, noise) > 0.5
