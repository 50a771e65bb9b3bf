"""Models of the tools in chat requests, and of the calls and results in a conversation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol, TypeAlias

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationError, model_validator

from share_compute.files.strict import StrictModel
from share_compute_api.openai.inputs import shallow_object, small_schema, unicode_text

MOST_TOOLS = 128
MOST_TOOLS_CHARACTERS = 1 << 18
"""Largest length of all tools of a request together, written as JSON."""
MOST_CALLS = 128
"""Largest number of calls in one message."""
FunctionName: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
CallId: TypeAlias = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(unicode_text)]


def _object_schema(value: dict[str, Any]) -> dict[str, Any]:
    if value.get("type", "object") != "object":
        raise ValueError("the arguments of a function are an object: the schema's type must be object")
    return small_schema(value)


def _json_object(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError) as failure:
        raise ValueError(f"the arguments are not valid JSON: {failure}") from failure
    if not isinstance(found, dict):
        raise ValueError("the arguments must be a JSON object")  # noqa: TRY004 - pydantic handles no TypeError
    shallow_object(found)
    return text or "{}"


JsonArguments = Annotated[str, BeforeValidator(_json_object, json_schema_input_type=str)]
"""Arguments of a call: a JSON object, as text."""


class FunctionDefinition(StrictModel):
    """A function that the model may call."""

    name: FunctionName
    description: Annotated[str, AfterValidator(unicode_text)] | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(_object_schema)] | None = None
    """JSON schema of the arguments, an object; default: any object."""
    strict: bool | None = None
    """Constrain each call so that its arguments follow the schema."""

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        """JSON schema of the arguments; its type is object."""
        return {"type": "object", **(self.parameters or {})}


class FunctionTool(StrictModel):
    """A tool; functions are the only supported type."""

    type: Literal["function"]
    function: FunctionDefinition

    def for_template(self) -> dict[str, Any]:
        """Return the tool for a chat template, with all fields that templates read."""
        function = self.function
        parameters = {"type": "object", "properties": {}, **(function.parameters or {})}
        described = {"description": function.description or "", "parameters": parameters}
        return {"type": "function", "function": {"name": function.name, **described}}


class NamedFunction(StrictModel):
    """Name of a function."""

    name: FunctionName


class NamedTool(StrictModel):
    """The function that the model must call."""

    type: Literal["function"]
    function: NamedFunction


def read_choice(value: Any, named: type[BaseModel], example: str) -> Any:
    """Return a tool choice; a wrong one causes a single error instead of one for each alternative.

    Args:
        value: value in the request.
        named: model of the choice that names a function.
        example: such a choice, for the error.

    Raises:
        ValueError: the value is not a choice.
    """
    try:
        if isinstance(value, dict):
            return named.model_validate(value)
    except ValidationError as failure:
        raise ValueError(f'give "none", "auto", "required", or {example}') from failure
    if value not in (None, "none", "auto", "required"):
        raise ValueError(f'give "none", "auto", "required", or {example}')
    return value


def _choice(value: Any) -> Any:
    return read_choice(value, NamedTool, '{"type": "function", "function": {"name": ...}}')


Mode: TypeAlias = Literal["none", "auto", "required"]
ToolChoice = Annotated[
    Mode | NamedTool | None, BeforeValidator(_choice, json_schema_input_type=Mode | NamedTool | None)
]


def _tools(value: tuple[FunctionTool, ...]) -> tuple[FunctionTool, ...]:
    names = [tool.function.name for tool in value]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"two tools have the name {twice}")
    size = sum(len(tool.model_dump_json()) for tool in value)
    if size > MOST_TOOLS_CHARACTERS:
        raise ValueError(f"they have {size} characters; at most {MOST_TOOLS_CHARACTERS} are read")
    return value


Tools = Annotated[
    tuple[FunctionTool, ...], Field(max_length=MOST_TOOLS, fail_fast=True), AfterValidator(_tools)
]


class CalledFunction(StrictModel):
    """Function and arguments of a call."""

    name: FunctionName
    arguments: JsonArguments
    """A JSON object, as text."""

    @model_validator(mode="before")
    @classmethod
    def _leave_out(cls, data: Any) -> Any:
        """Remove the field that the ``openai`` package adds to answers that it parsed."""
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if name != "parsed_arguments"}


class ToolCall(StrictModel):
    """A call in an earlier answer of the model."""

    id: CallId
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None
    """Position of the call in its message; has no effect."""

    def for_template(self) -> dict[str, Any]:
        """Return the call for a chat template; the arguments are an object, as transformers defines it."""
        function = {"name": self.function.name, "arguments": json.loads(self.function.arguments)}
        return {"id": self.id, "type": "function", "function": function}


ToolCalls = Annotated[tuple[ToolCall, ...], Field(max_length=MOST_CALLS, fail_fast=True)]


class ToolMessage(Protocol):
    """The fields of a message that concern tools."""

    @property
    def role(self) -> str:
        """Role of the speaker."""

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """Calls of the message, by an assistant only."""

    @property
    def tool_call_id(self) -> str | None:
        """Id of the call that the message answers, by a tool only."""


def called_names(messages: Sequence[ToolMessage]) -> dict[int, str]:
    """Return the name of the function whose result each tool message has, by the message's index.

    Raises:
        ValueError: a call has no result, a result belongs to no call before it, or an id is used twice.
    """
    found: dict[int, str] = {}
    waiting: dict[str, str] = {}
    for number, message in enumerate(messages):
        if message.role == "tool":
            name = waiting.pop(message.tool_call_id or "", None)
            if name is None:
                raise ValueError(
                    f"message {number}: tool_call_id {message.tool_call_id!r} is no id of a call in the "
                    "assistant's message before it, or that call has a result already"
                )
            found[number] = name
            continue
        _refuse_waiting(waiting, number)
        waiting = {call.id: call.function.name for call in message.tool_calls}
        if len(waiting) < len(message.tool_calls):
            raise ValueError(f"message {number}: two calls have the same id")
    _refuse_waiting(waiting, len(messages))
    return found


def _refuse_waiting(waiting: dict[str, str], number: int) -> None:
    if waiting:
        id_, name = next(iter(waiting.items()))
        raise ValueError(
            f"the call {id_!r} of {name} has no result before message {number}; "
            "add a message with the role tool"
        )


@dataclass(frozen=True, slots=True)
class ToolRequest:
    """Tools that a request lets the model call."""

    tools: tuple[FunctionTool, ...]
    """The tools that may be called; a named choice leaves one."""
    is_required: bool
    """Whether the answer must be a call."""
    is_single: bool
    """Whether the answer has at most one call."""
    is_streamed: bool

    @property
    def names(self) -> frozenset[str]:
        """Names of the functions that may be called."""
        return frozenset(tool.function.name for tool in self.tools)

    def is_constrained(self, tool: FunctionTool) -> bool:
        """Return whether the arguments of a tool's calls must follow its schema."""
        return self.is_required or bool(tool.function.strict)
