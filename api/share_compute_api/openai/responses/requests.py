"""Model of requests to the Responses API, and their translation into chat requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    PrivateAttr,
    model_validator,
)
from pydantic_core import PydanticCustomError

from share_compute.files.field_errors import cut
from share_compute.files.strict import StrictModel
from share_compute_api.openai.inputs import (
    JsonSchema,
    ResponseFormat,
    StreamOptions,
    small_schema,
    unicode_text,
)
from share_compute_api.openai.requests import UNSUPPORTED, ApiRequest, ChatRequest
from share_compute_api.openai.responses.items import InputMessages, instructed
from share_compute_api.openai.tools.definitions import (
    MOST_TOOLS,
    FunctionDefinition,
    FunctionTool,
    Mode,
    NamedFunction,
    read_choice,
)

MOST_METADATA = 16
_LOGPROBS = "message.output_text.logprobs"
_Text = Annotated[str, AfterValidator(unicode_text)]


class FlatTool(FunctionDefinition):
    """A function that the model may call."""

    type: Literal["function"]

    @property
    def nested(self) -> FunctionTool:
        """The tool in the form of chat requests."""
        return FunctionTool(type="function", function=FunctionDefinition(**self.model_dump(exclude={"type"})))


class FlatNamedTool(NamedFunction):
    """The function that the model must call."""

    type: Literal["function"]


def _tool(value: Any) -> FlatTool:
    kind = value.get("type") if isinstance(value, dict) else type(value).__name__
    if kind != "function":
        message = "this server has no tools of type {kind}; give tools of type function"
        raise PydanticCustomError(UNSUPPORTED, message, {"kind": cut(str(kind))})
    return FlatTool.model_validate(value)


def _choice(value: Any) -> Any:
    return read_choice(value, FlatNamedTool, '{"type": "function", "name": ...}')


def _few(value: Any) -> Any:
    """Refuse a list that is too long, before its entries are validated."""
    if isinstance(value, dict) and len(value) > MOST_METADATA:
        raise ValueError(f"it has {len(value)} entries; at most {MOST_METADATA} are read")
    return value


class TextFormat(StrictModel):
    """Format of the text."""

    model_config = ConfigDict(populate_by_name=True)

    type: Literal["text", "json_object", "json_schema"]
    name: _Text | None = None
    description: _Text | None = None
    schema_: Annotated[dict[str, Any], AfterValidator(small_schema)] | None = Field(
        default=None, alias="schema"
    )
    """JSON schema that the text follows; only for the type json_schema."""
    strict: bool | None = None
    """Accepted, but has no effect: the text always follows the schema."""

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> Self:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError("schema is for type json_schema, which needs it")
        return self

    @property
    def response_format(self) -> ResponseFormat:
        """The format in the form of chat requests."""
        if self.schema_ is None:
            return ResponseFormat(type=self.type)
        return ResponseFormat(type=self.type, json_schema=JsonSchema(schema_=self.schema_))


class TextOptions(StrictModel):
    """Options of the text."""

    format: TextFormat = TextFormat(type="text")
    verbosity: Literal["medium"] | None = None
    """Only the default is supported."""


class ReasoningOptions(StrictModel):
    """Options of reasoning models."""

    effort: Annotated[str, Field(max_length=20), AfterValidator(unicode_text)] | None = None
    """Passed to the chat template, as the template's variable reasoning_effort."""
    summary: Literal["auto"] | None = None
    """Accepted, but has no effect: responses have no summaries."""


class ResponsesRequest(ApiRequest):
    """Request for a response. Nothing is stored, so each request has the whole conversation."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"model": "tiny-llama", "input": "Hello!", "instructions": "Be brief.", "stream": True}
            ]
        }
    )
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **ApiRequest.NEUTRAL,
        "background": (None, False),
        "context_management": (None, []),
        "conversation": (None,),
        "previous_response_id": (None,),
        "prompt": (None,),
    }

    input: InputMessages
    """Text of the user, or the items of a conversation."""
    instructions: _Text | None = None
    """Text of the system, before the input."""
    stream: bool | None = None
    """Send events while the response is generated."""
    stream_options: StreamOptions | None = None
    """Accepted, but has no effect: streams always end with the token counts."""
    temperature: float | None = Field(default=None, ge=0, le=2)
    """Sampling temperature; default: 1. With 0, the most probable token is always taken."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    max_output_tokens: int | None = Field(default=None, ge=1, le=2**31)
    """Largest number of tokens of the response; default: the rest of the model's context window."""
    max_tool_calls: int | None = Field(default=None, ge=1)
    """Accepted, but has no effect: it limits calls of hosted tools, which this server does not have."""
    tools: (
        Annotated[
            tuple[Annotated[FlatTool, PlainValidator(_tool, json_schema_input_type=FlatTool)], ...],
            Field(max_length=MOST_TOOLS, fail_fast=True),
        ]
        | None
    ) = None
    """Functions that the model may call."""
    tool_choice: Annotated[
        Mode | FlatNamedTool | None,
        BeforeValidator(_choice, json_schema_input_type=Mode | FlatNamedTool | None),
    ] = None
    """Whether the model may call tools, must, or must call a named one; default: auto."""
    parallel_tool_calls: bool | None = None
    """Allow several calls in one response; default: true, except for a named tool."""
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    truncation: Literal["disabled"] | None = None
    """Only the default is supported: input that is too long is refused."""
    include: (
        Annotated[
            tuple[Literal["message.output_text.logprobs", "reasoning.encrypted_content"], ...],
            Field(max_length=16, fail_fast=True),
        ]
        | None
    ) = None
    """Further parts of the response; reasoning.encrypted_content has no effect, because no reasoning is sent."""
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    """Number of most probable tokens at each position whose log-probabilities are reported."""
    metadata: (
        Annotated[
            dict[
                Annotated[str, Field(max_length=64), AfterValidator(unicode_text)],
                Annotated[str, Field(max_length=512), AfterValidator(unicode_text)],
            ],
            BeforeValidator(_few),
        ]
        | None
    ) = None
    """Up to 16 texts by name; the response repeats them."""
    _chat: ChatRequest = PrivateAttr()

    @property
    def chat(self) -> ChatRequest:
        """The request in the form of a chat request."""
        return self._chat

    @property
    def format(self) -> TextFormat:
        """Format of the text."""
        return TextFormat(type="text") if self.text is None else self.text.format

    @property
    def includes_logprobs(self) -> bool:
        """Whether the response has the log-probabilities of its tokens."""
        return _LOGPROBS in (self.include or ())

    @model_validator(mode="after")
    def _fits(self) -> Self:
        has_tools = bool(self.tools) and self.tool_choice != "none"
        if has_tools and self.format.type != "text":
            raise ValueError("JSON in text.format and tools exclude each other; leave one out")
        if has_tools and self.includes_logprobs:
            raise ValueError(f"{_LOGPROBS} in include and tools exclude each other; leave one out")
        if self.top_logprobs and not self.includes_logprobs:
            raise ValueError(f'top_logprobs needs include: ["{_LOGPROBS}"]')
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is for stream: true")
        return self

    @model_validator(mode="after")
    def _translate(self) -> Self:
        choice: Any = self.tool_choice
        if isinstance(choice, FlatNamedTool):
            choice = {"type": "function", "function": {"name": choice.name}}
        self._chat = ChatRequest(
            model=self.model,
            messages=instructed(self.instructions, self.input),
            stream=self.stream,
            temperature=self.temperature,
            top_p=self.top_p,
            max_completion_tokens=self.max_output_tokens,
            response_format=self.format.response_format,
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
            tools=tuple(tool.nested for tool in self.tools or ()),
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls,
            logprobs=self.includes_logprobs,
            top_logprobs=self.top_logprobs,
        )
        return self
