"""Options that name tokens by their ids or count tokens, for requests of the OpenAI API and for batches.

Whether a model has tokens with these ids is checked where its vocabulary is known.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainSerializer

from share_compute.specification.base import SpecModel

MOST_BIASED_TOKENS = 300
MOST_BIAS = 100
"""Largest absolute value of a bias."""
MOST_STOP_IDS = 64
_MOST_ID_DIGITS = 10
_SHOWN_CHARACTERS = 40


def are_token_ids(value: Any) -> bool:
    """Return whether a value is a list of integers that are at least 0; tuples count as lists."""
    return isinstance(value, list | tuple) and all(type(item) is int and item >= 0 for item in value)


def _stop_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    if not are_token_ids(value):
        raise ValueError("give a list of token ids")
    if len(value) > MOST_STOP_IDS:
        raise ValueError(f"at most {MOST_STOP_IDS} stop token ids are looked for, these are {len(value)}")
    return tuple(dict.fromkeys(value))


def _bias(value: Any) -> tuple[tuple[int, float], ...]:
    """Return (token id, bias) of each entry, sorted by id."""
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise ValueError("give an object of token ids with their biases")  # noqa: TRY004 - pydantic handles no TypeError
    if len(value) > MOST_BIASED_TOKENS:
        raise ValueError(f"at most {MOST_BIASED_TOKENS} tokens can have a bias, these are {len(value)}")
    found: dict[int, float] = {}
    for key, bias in value.items():
        token = _biased_id(key)
        if token in found:  # YAML distinguishes the keys 5 and "5"
            raise ValueError(f"token id {token} has two biases")
        found[token] = _one_bias(key, bias)
    return tuple(sorted(found.items()))


def _biased_id(key: Any) -> int:
    digits = str(key)
    # A leading zero is refused, so that no id occurs twice.
    is_id = digits.isascii() and digits.isdecimal() and len(digits) <= _MOST_ID_DIGITS
    if not is_id or str(int(digits)) != digits:
        raise ValueError(f"{digits[:_SHOWN_CHARACTERS]!r} is not a token id")
    return int(digits)


def _one_bias(key: Any, bias: Any) -> float:
    if not isinstance(bias, int | float) or isinstance(bias, bool) or not -MOST_BIAS <= bias <= MOST_BIAS:
        raise ValueError(f"the bias of token id {key} must be a number from -{MOST_BIAS} to {MOST_BIAS}")
    return float(bias)


def _bias_object(bias: tuple[tuple[int, float], ...]) -> dict[str, float]:
    """Return biases in the form of a request, so that stored requests and jobs can be read again."""
    return {str(token): value for token, value in bias}


StopTokenIds = Annotated[
    tuple[int, ...],
    BeforeValidator(
        _stop_ids,
        json_schema_input_type=Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=MOST_STOP_IDS)]
        | None,
    ),
]
LogitBias = Annotated[
    tuple[tuple[int, float], ...],
    BeforeValidator(
        _bias,
        json_schema_input_type=Annotated[
            dict[str, Annotated[float, Field(ge=-MOST_BIAS, le=MOST_BIAS)]],
            Field(max_length=MOST_BIASED_TOKENS),
        ]
        | None,
    ),
    PlainSerializer(_bias_object),
]
"""(token id, bias) of each entry, sorted by id."""


class TokenOptions(SpecModel):
    """Options of sampling, of the end of an answer and of its text that name or count tokens."""

    stop_token_ids: StopTokenIds = ()
    """Ids of tokens that end an answer, in addition to the model's end-of-text tokens; their text is left out."""
    min_tokens: int | None = Field(default=None, ge=0, le=2**31)
    """Number of tokens before which no stop token and no stop string ends an answer; no effect on JSON."""
    skip_special_tokens: bool | None = None
    """Leave special tokens out of the text; default: true."""
    logit_bias: LogitBias = Field(default=(), json_schema_extra={"default": {}})
    """Numbers from -100 to 100, added to the logits of tokens; the keys are token ids."""
