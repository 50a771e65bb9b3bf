"""Models of OpenAI API requests; they define which parameters are supported, ignored or rejected."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from share_compute.files.strict import StrictModel
from share_compute.specification.token_options import TokenOptions
from share_compute_api.openai.inputs import (
    MOST_MESSAGES,
    Content,
    Prompts,
    ResponseFormat,
    Stops,
    StreamOptions,
    TemplateVariables,
)
from share_compute_api.openai.tools.definitions import (
    CallId,
    NamedTool,
    ToolCalls,
    ToolChoice,
    ToolRequest,
    Tools,
    called_names,
)
from share_compute_api.workers.isolated.messages import TemplateOptions

MOST_CHOICES = 128
MOST_INPUTS = 2048
UNSUPPORTED = "unsupported"
"""Type of the validation error for a parameter that is not supported."""
_DEFAULT_COMPLETION_TOKENS = 16
"""Default of ``max_tokens`` for completions in the OpenAI API."""
_HARMLESS = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""Parameters that are accepted and ignored, because they do not change the answer."""
_OF_FRONT_ENDS = frozenset(
    {
        "background_tasks",
        "chat_id",
        "features",
        "filter_ids",
        "id",
        "message_id",
        "model_item",
        "session_id",
        "tool_ids",
        "tool_servers",
        "variables",
    }
)
"""Fields that front ends such as Open WebUI add for their own servers.

The fields are ignored, and a header of the response names them.
"""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "echo": (None, False),
    "function_call": (None, "none", "auto"),
    "functions": (None, []),
    "modalities": (None, ["text"]),
    "moderation": (None,),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "verbosity": (None,),
    "web_search_options": (None,),
}
"""Unsupported parameters -> values that are accepted because they mean "not used"."""


class ApiRequest(StrictModel):
    """Base class of the requests."""

    model_config = ConfigDict(allow_inf_nan=False)

    model: str = Field(min_length=1, max_length=200)
    """Name of a deployment."""
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = _NEUTRAL
    """Unsupported parameters -> values that are accepted because they mean "not used"."""
    _ignored: tuple[str, ...] = PrivateAttr(default=())

    @property
    def ignored(self) -> tuple[str, ...]:
        """Sorted names of the fields in the request that a front end added and that have no effect."""
        return self._ignored

    @model_validator(mode="wrap")
    @classmethod
    def _leave_out(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(data, dict):
            return handler(data)
        known = cls.model_fields
        refused = [
            InitErrorDetails(
                type=PydanticCustomError(UNSUPPORTED, "this server does not do it; leave it out"),
                loc=(name,),
                input=data[name],
            )
            for name, neutral in cls.NEUTRAL.items()
            if name in data and name not in known and data[name] not in neutral
        ]
        if refused:
            raise ValidationError.from_exception_data(cls.__name__, refused)
        without_effect = _HARMLESS | _OF_FRONT_ENDS | cls.NEUTRAL.keys()
        request = handler(
            {name: value for name, value in data.items() if name in known or name not in without_effect}
        )
        request._ignored = tuple(sorted(data.keys() & _OF_FRONT_ENDS))  # noqa: SLF001 - this class made it
        return request


class TextRequest(TokenOptions, ApiRequest):
    """Parameters that chat and text completions share."""

    stream: bool | None = None
    """Send the text as it is generated, as server-sent events."""
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    """Sampling temperature; default: 1. With 0, the most probable token is always taken."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=2**31)
    """Sample only from this number of most probable tokens; 0 and -1 mean no limit."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    """Sample only from tokens that have at least this fraction of the highest probability."""
    repetition_penalty: float | None = Field(default=None, gt=0, le=100)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    """Seed of the sampling; default: random."""
    n: int | None = Field(default=None, ge=1, le=MOST_CHOICES)
    """Number of answers to each prompt."""
    stop: Stops = ()
    """Strings before which an answer ends."""
    ignore_eos: bool | None = None
    """Continue past the model's end-of-text tokens."""
    response_format: ResponseFormat | None = None
    max_tokens: int | None = Field(default=None, ge=0, le=2**31)

    @model_validator(mode="after")
    def _options_of_streams(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is for stream: true")
        return self

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the token counts of the request."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def without_prompt(self) -> Self:
        """Return a copy with an empty prompt, for storing the request together with the tokens of its prompts."""
        return self

    @property
    def choices(self) -> int:
        """Number of answers to each prompt."""
        return self.n or 1

    @property
    def most_tokens(self) -> int | None:
        """Requested maximum number of tokens in an answer; None if the request names none."""
        return self.max_tokens

    @property
    def default_tokens(self) -> int | None:
        """Maximum number of tokens in an answer if the request names none; None to allow the whole context window."""
        return None

    @property
    def top_tokens(self) -> int | None:
        """Number of most likely tokens whose log-probabilities are reported at each position.

        The sampled token is reported in addition. None if no log-probabilities are reported.
        """
        return None


class Message(StrictModel):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = ""
    name: str | None = Field(default=None, max_length=200)
    """Name of the speaker, for chat templates that use it."""
    tool_calls: ToolCalls = ()
    """Calls of the assistant."""
    tool_call_id: CallId | None = None
    """Id of the call whose result a message of the role tool has."""

    @model_validator(mode="before")
    @classmethod
    def _leave_out(cls, data: Any) -> Any:
        """Remove fields that only answers have, because clients send earlier answers back unchanged."""
        if not isinstance(data, dict):
            return data
        without_effect = _OF_PACKAGES | {name for name in _ANSWERED if not data.get(name)}
        return {name: value for name, value in data.items() if name not in without_effect}

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        if "content" not in self.model_fields_set and self.role != "assistant":
            raise ValueError("content is missing")
        return self

    @model_validator(mode="after")
    def _tools_where_they_belong(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls is for the role assistant")
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("tool_call_id is missing: name the call whose result this is")
        if self.role != "tool" and self.tool_call_id is not None:
            raise ValueError("tool_call_id is for the role tool")
        return self

    def for_template(self, function: str | None = None) -> dict[str, Any]:
        """Return the message for a chat template, with the role ``developer`` replaced by ``system``.

        Args:
            function: name of the called function, for a message of the role tool that has no name.
        """
        role = "system" if self.role == "developer" else self.role
        name = self.name or function
        optional = {
            "name": name,
            "tool_call_id": self.tool_call_id,
            "tool_calls": [call.for_template() for call in self.tool_calls] or None,
        }
        given = {key: value for key, value in optional.items() if value is not None}
        return {"role": role, "content": self.content, **given}


_ANSWERED = frozenset({"annotations", "audio", "function_call", "refusal", "tool_call_id", "tool_calls"})
"""Fields of messages that are accepted for all roles if they are empty."""
_OF_PACKAGES = frozenset({"parsed", "provider_specific_fields"})
"""Fields that the packages ``openai`` and ``litellm`` add to answers; they repeat the content."""


class ChatRequest(TextRequest):
    """Request to continue a conversation."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"model": "tiny-llama", "messages": [{"role": "user", "content": "Hello!"}], "stream": True}
            ]
        }
    )

    messages: Annotated[tuple[Message, ...], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]
    max_completion_tokens: int | None = Field(default=None, ge=1, le=2**31)
    """Newer name of max_tokens; takes precedence over it."""
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    chat_template_kwargs: TemplateVariables | None = None
    """Values of the chat template's own variables, such as enable_thinking."""
    reasoning_effort: str | None = Field(default=None, max_length=20)
    """Passed to the chat template, as the template's variable reasoning_effort."""
    add_generation_prompt: bool | None = None
    """Let the model begin a new answer; default: true, unless continue_final_message is true."""
    continue_final_message: bool | None = None
    """Let the model continue the last message instead of beginning a new answer."""
    tools: Tools | None = None
    """Functions that the model may call."""
    tool_choice: ToolChoice = None
    """Whether the model may call tools, must, or must call a named one; default: auto."""
    parallel_tool_calls: bool | None = None
    """Allow several calls in one answer; default: true, except for a named tool."""

    @model_validator(mode="after")
    def _begins_or_continues(self) -> Self:
        if self.add_generation_prompt and self.continue_final_message:
            raise ValueError("add_generation_prompt and continue_final_message exclude each other")
        return self

    @field_validator("messages")
    @classmethod
    def _calls_have_results(cls, value: tuple[Message, ...]) -> tuple[Message, ...]:
        called_names(value)
        return value

    @field_validator("tool_choice")
    @classmethod
    def _choice_is_in_tools(cls, value: Any, info: ValidationInfo) -> Any:
        if "tools" not in info.data:  # these fields are wrong, which is reported separately
            return value
        names = [tool.function.name for tool in info.data["tools"] or ()]
        if isinstance(value, NamedTool) and value.function.name not in names:
            raise ValueError(f"{value.function.name} is not in tools")
        if value == "required" and not names:
            raise ValueError("required needs tools")
        return value

    @model_validator(mode="after")
    def _tools_fit(self) -> Self:
        is_json = self.response_format is not None and self.response_format.grammar is not None
        if is_json and self.tool_request is not None:
            raise ValueError("response_format and tools exclude each other; leave one out")
        return self

    @property
    def tool_request(self) -> ToolRequest | None:
        """Tools that the model may call; None if it may call none."""
        tools, choice = self.tools or (), self.tool_choice
        if not tools or choice == "none":
            return None
        if isinstance(choice, NamedTool):
            tools = tuple(tool for tool in tools if tool.function.name == choice.function.name)
        is_named = isinstance(choice, NamedTool)
        return ToolRequest(
            tools=tools,
            is_required=is_named or choice == "required",
            is_single=is_named or self.parallel_tool_calls is False,
            is_streamed=bool(self.stream),
        )

    @property
    def template_messages(self) -> tuple[dict[str, Any], ...]:
        """The messages for the chat template."""
        called = called_names(self.messages)
        return tuple(message.for_template(called.get(number)) for number, message in enumerate(self.messages))

    def without_prompt(self) -> Self:
        """Return a copy with an empty conversation."""
        return self.model_copy(update={"messages": (Message(role="user", content=""),)})

    @property
    def template_options(self) -> TemplateOptions:
        """Options for the chat template."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        continues = bool(self.continue_final_message)
        begins = not continues if self.add_generation_prompt is None else self.add_generation_prompt
        return TemplateOptions(
            variables={**effort, **(self.chat_template_kwargs or {})},
            add_generation_prompt=begins,
            continue_final_message=continues,
            tools=tuple(tool.for_template() for tool in self.tools or ()) if self.tool_request else (),
        )

    @model_validator(mode="after")
    def _top_of_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self

    @property
    def most_tokens(self) -> int | None:
        """Requested maximum number of tokens in an answer; None if the request names none."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def top_tokens(self) -> int | None:
        """Number of most likely tokens to report, besides the sampled token; None to report no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(TextRequest):
    """Request to continue a text."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"model": "tiny-llama", "prompt": "Once upon a time", "max_tokens": 32}]
        }
    )

    prompt: Prompts
    """One prompt or several: text or token ids."""
    logprobs: int | None = Field(default=None, ge=0, le=20)
    best_of: int | None = None
    """Not supported; if given, it must be equal to n."""

    @field_validator("prompt")
    @classmethod
    def _few(cls, value: tuple[Any, ...]) -> tuple[Any, ...]:
        if len(value) > MOST_CHOICES:
            raise ValueError(f"at most {MOST_CHOICES} prompts go into one request, these are {len(value)}")
        return value

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        if self.best_of is not None and self.best_of != self.choices:
            raise ValueError(
                "best_of: this server does not choose among answers; leave it out, or make it equal to n"
            )
        if self.choices * len(self.prompt) > MOST_CHOICES:
            raise ValueError(f"n times the number of prompts is more than {MOST_CHOICES}")
        return self

    def without_prompt(self) -> Self:
        """Return a copy with an empty prompt."""
        return self.model_copy(update={"prompt": ("",)})

    @property
    def default_tokens(self) -> int | None:
        """Maximum number of tokens in an answer if the request names none."""
        return _DEFAULT_COMPLETION_TOKENS

    @property
    def top_tokens(self) -> int | None:
        """Number of most likely tokens to report, besides the sampled token; None to report no log-probabilities."""
        return self.logprobs


class EmbeddingRequest(ApiRequest):
    """Request to turn text into vectors."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"model": "tiny-encoder", "input": ["a text", "another one"]}]}
    )

    input: Prompts
    """One text or several: text or token ids."""
    encoding_format: Literal["float", "base64"] | None = None
    """base64 encodes 32-bit floats, little-endian."""
    dimensions: int | None = Field(default=None, ge=1)
    """Must be equal to the number of dimensions of the model's vectors."""

    @field_validator("input")
    @classmethod
    def _few(cls, value: tuple[Any, ...]) -> tuple[Any, ...]:
        if len(value) > MOST_INPUTS:
            raise ValueError(f"at most {MOST_INPUTS} texts go into one request, these are {len(value)}")
        return value
