"""Allowed serving options, and the fields that refusals name."""

from __future__ import annotations

import math

import pytest
from pydantic import ValidationError
from tests.platform.inference.scheduler.world import generation

from share_compute.inference.scheduler.options import Generation, SamplingOptions

LEAST = {"seed": 1, "max_tokens": 4}


def test_the_least_that_must_be_said() -> None:
    options = SamplingOptions(**LEAST)
    assert (options.temperature, options.top_p, options.top_k, options.logprobs) == (1.0, 1.0, 0, None)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("frequency_penalty", 3),
        ("presence_penalty", -3),
        ("seed", 2**63),
        ("max_tokens", -1),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", tuple(range(257))),
        ("logit_bias", ((1, 100.5),)),
        ("logit_bias", ((1, math.nan),)),
        ("logit_bias", ((-1, 1.0),)),
        ("logit_bias", ((1, 1.0), (1, 2.0))),
        ("logit_bias", tuple((token, 1.0) for token in range(301))),
        ("min_tokens", 5),
        ("logprobs", 21),
    ],
)
def test_refusals_name_the_field(field: str, value: object) -> None:
    with pytest.raises(ValidationError, match=field):
        SamplingOptions.model_validate({**LEAST, field: value})


def test_options_are_the_same_after_a_transfer() -> None:
    options = SamplingOptions(**LEAST, logit_bias=((3, -100), (5, 0.25)), stop_token_ids=(7,), min_tokens=2)
    assert SamplingOptions.model_validate_json(options.model_dump_json()) == options


def test_a_mistyped_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ValidationError, match="did you mean 'temperature'"):
        SamplingOptions.model_validate({**LEAST, "temprature": 1})


@pytest.mark.parametrize("field", ["prompt", "emitted"])
def test_tokens_are_numbers_from_zero(field: str) -> None:
    requested = generation(0).model_dump() | {field: (3, -1)}
    with pytest.raises(ValidationError, match=field):
        Generation.model_validate(requested)
