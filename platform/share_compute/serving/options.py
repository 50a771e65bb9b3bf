"""What is asked for: the tokens to go on from, how the next ones are drawn, and when to stop."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from share_compute.strict import StrictModel

TokenId = Annotated[int, Field(ge=0)]


class SamplingOptions(StrictModel):
    """How tokens are drawn, and when a sequence ends."""

    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Logits are divided by it; 0 takes the most probable token."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Only the most probable tokens that together have this probability; 1 leaves all."""
    top_k: int = Field(default=0, ge=0)
    """Only so many of the most probable tokens; 0 leaves all."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Only tokens at least so probable, in parts of the most probable one; 0 leaves all."""
    repetition_penalty: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Of tokens in prompt and text, positive logits are divided by it, negative ones multiplied; 1 does nothing."""
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    """Taken from the logit of a token once for each time that it was generated."""
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    """Taken from the logits of all tokens that were generated."""
    seed: int = Field(ge=-(2**63), lt=2**63)
    """With the position it decides each draw: whatever batch, pool, machine or recovery, the text is the same."""
    max_tokens: int = Field(ge=0)
    """Most tokens to generate, those in `Generation.emitted` among them; 0 computes nothing."""
    stop_token_ids: tuple[TokenId, ...] = ()
    """Tokens that end the sequence; they are emitted, as its last. The model's ends of text, unless to be ignored."""
    min_tokens: int = Field(default=0, ge=0)
    """Tokens generated before a stop token may be drawn."""
    logprobs: int | None = Field(default=None, ge=0, le=20)
    """Log-probabilities of so many of the most probable tokens, beside the drawn one's; None: of none."""
    json_schema: str | None = None
    """The text is JSON of this schema; "": any JSON object; None: any text."""

    @model_validator(mode="after")
    def _can_stop(self) -> Self:
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens ({self.min_tokens}) must not be more than max_tokens ({self.max_tokens})"
            )
        return self


class Generation(StrictModel):
    """One sequence to be generated."""

    sequence: int = Field(ge=0)
    """Unique in a deployment, for as long as it lives."""
    owner: str
    """Whose it is: id of the API key. Owners share a deployment evenly."""
    prompt: tuple[TokenId, ...]
    """Tokens to go on from."""
    options: SamplingOptions
    """How to go on."""
    emitted: tuple[TokenId, ...] = ()
    """Tokens that were generated before: another server began this sequence, and this one goes on after them."""
