"""Models of responses and of their output items."""

from __future__ import annotations

from typing import Literal, Self

from share_compute_api.openai.answers import AnswerModel, CachedTokens, TokenLogprob, Usage
from share_compute_api.openai.responses.requests import FlatNamedTool, FlatTool, ReasoningOptions, TextOptions
from share_compute_api.openai.tools.definitions import Mode

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(AnswerModel):
    """Text of a message."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: tuple[()] = ()
    """Always empty."""
    logprobs: list[TokenLogprob]
    """Log-probabilities of the tokens; empty if the request does not include them."""


class OutputMessage(AnswerModel):
    """A message of the model."""

    id: str
    type: Literal["message"] = "message"
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class OutputFunctionCall(AnswerModel):
    """A call of a function by the model."""

    id: str
    type: Literal["function_call"] = "function_call"
    status: ItemStatus
    """incomplete if the arguments are not complete."""
    call_id: str
    name: str
    arguments: str
    """A JSON object, as text."""


class InputTokensDetails(CachedTokens):
    """Input tokens whose computation was skipped because of prefix caching."""

    cache_write_tokens: Literal[0] = 0


class OutputTokensDetails(AnswerModel):
    """Kinds of output tokens."""

    reasoning_tokens: Literal[0] = 0
    """Always 0: reasoning is not distinguished from text."""


class ResponseUsage(AnswerModel):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()
    total_tokens: int

    @classmethod
    def of(cls, usage: Usage) -> Self:
        """Return the token counts in the form of the Responses API."""
        cached = usage.prompt_tokens_details.cached_tokens
        return cls(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=cached),
            output_tokens=usage.completion_tokens,
            total_tokens=usage.total_tokens,
        )


class ResponseFailure(AnswerModel):
    """The error that ended a response."""

    code: Literal["server_error", "rate_limit_exceeded"]
    message: str


class IncompleteDetails(AnswerModel):
    """Reason why a response is incomplete."""

    reason: Literal["max_output_tokens"]
    """The response has the largest number of tokens, or the model's context window is full."""


class ResponseObject(AnswerModel):
    """A response, with the options of its request."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    model: str
    output: list[OutputMessage | OutputFunctionCall]
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    usage: ResponseUsage | None = None
    """Token counts; null until the response is complete."""
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    reasoning: ReasoningOptions
    temperature: float
    text: TextOptions
    tool_choice: Mode | FlatNamedTool
    tools: list[FlatTool]
    top_logprobs: int
    top_p: float
    background: Literal[False] = False
    previous_response_id: None = None
    store: Literal[False] = False
    """Responses are not stored."""
    truncation: Literal["disabled"] = "disabled"
