"""Requests to a replica's scheduler, with their sampling options."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, field_validator, model_validator

from share_compute.files.strict import StrictModel
from share_compute.specification.token_options import MOST_BIAS, MOST_BIASED_TOKENS

MOST_STOP_TOKENS = 256
"""Maximum number of stop tokens of a sequence: those of the model and those of the request."""
SCHEMA_OPTIONS: Any = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{0,64}"}
"""Options of llguidance for JSON schemas.

They limit each run of whitespace to 64 characters, because a model could generate whitespace without end.
"""
TokenId = Annotated[int, Field(ge=0)]
Bias = Annotated[float, Field(ge=-MOST_BIAS, le=MOST_BIAS)]


class SamplingOptions(StrictModel):
    """Rules for sampling tokens and for ending a sequence."""

    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Divisor of the logits; 0 takes the most probable token."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Total probability that the kept tokens, the most probable ones, must reach; 1 keeps all tokens."""
    top_k: int = Field(default=0, ge=0)
    """Number of most probable tokens to keep; 0 keeps all."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Minimum probability of the tokens to keep, as a fraction of the highest probability; 0 keeps all."""
    repetition_penalty: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Divisor of positive, and factor of negative logits of tokens in prompt or generated text; 1 has no effect."""
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    """Number that is subtracted from a token's logit for each time that the token was generated."""
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    """Number that is subtracted once from the logit of each token that was generated at least once."""
    seed: int = Field(ge=-(2**63), lt=2**63)
    """Seed of the random numbers, which depend only on the seed and the token's position."""
    max_tokens: int = Field(ge=0)
    """Maximum number of tokens to generate, including those in `Generation.emitted`."""
    logit_bias: tuple[tuple[TokenId, Bias], ...] = Field(default=(), max_length=MOST_BIASED_TOKENS)
    """(token id, number added to the token's logit after the penalties); each id occurs once."""
    stop_token_ids: tuple[TokenId, ...] = Field(default=(), max_length=MOST_STOP_TOKENS)
    """Tokens that end the sequence. The drawn stop token is emitted, too."""
    min_tokens: int = Field(default=0, ge=0)
    """Minimum number of tokens to generate before a stop token may be drawn; ignored with ``json_schema`` or
    ``grammar``."""
    logprobs: int | None = Field(default=None, ge=0, le=20)
    """Number of most probable tokens to report with log-probabilities, besides the drawn one; None reports none."""
    json_schema: str | None = None
    """JSON schema that the text follows; "" allows any JSON object, None any text."""
    grammar: str | None = None
    """Grammar that the text follows, in llguidance's dialect of Lark; None allows any text."""

    @property
    def is_constrained(self) -> bool:
        """Whether the text follows a JSON schema or a grammar."""
        return self.json_schema is not None or self.grammar is not None

    @model_validator(mode="after")
    def _has_one_constraint(self) -> Self:
        if self.json_schema is not None and self.grammar is not None:
            raise ValueError("json_schema and grammar exclude each other")
        return self

    @field_validator("logit_bias")
    @classmethod
    def _biased_once(cls, bias: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
        if len({token for token, _ in bias}) < len(bias):
            raise ValueError("a token id occurs twice")
        return bias

    @model_validator(mode="after")
    def _can_stop(self) -> Self:
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens ({self.min_tokens}) must not be more than max_tokens ({self.max_tokens})"
            )
        return self


class Generation(StrictModel):
    """Request to generate one sequence, or to embed one text."""

    sequence: int = Field(ge=0)
    """Number of the sequence; unique among the sequences that have not ended."""
    owner: str
    """Owner of the sequence: id of the API key."""
    prompt: tuple[TokenId, ...]
    """Tokens to continue, or the text to embed."""
    options: SamplingOptions
    """Rules for sampling and stopping."""
    emitted: tuple[TokenId, ...] = ()
    """Tokens that were generated before this request; generation continues after them."""
