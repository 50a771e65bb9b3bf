"""Models of the input items of the Responses API, and their translation into the messages of a chat."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import takewhile
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, ConfigDict, Field, PlainValidator, TypeAdapter, model_validator
from pydantic_core import PydanticCustomError

from share_compute.files.field_errors import cut
from share_compute.files.strict import StrictModel
from share_compute_api.openai.inputs import MOST_MESSAGES, text_of_parts
from share_compute_api.openai.requests import UNSUPPORTED, Message
from share_compute_api.openai.tools.definitions import (
    MOST_CALLS,
    CalledFunction,
    CallId,
    FunctionName,
    JsonArguments,
    ToolCall,
)

_PARTS = ("input_text", "output_text", "text")
_OF_ANSWERS = frozenset({"id", "parsed_arguments", "phase", "status"})
"""Fields of items that have no effect: output items have them, and clients send output items back."""
_EMPTY_IN_ANSWERS = frozenset({"async", "caller", "namespace"})
"""Fields of items that are accepted if they are empty."""


class ItemPart(StrictModel):
    """A part of the text of an item; other fields, such as ``annotations``, have no effect."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["input_text", "output_text", "text"]
    text: str


ItemText = Annotated[
    str,
    BeforeValidator(lambda value: text_of_parts(value, _PARTS), json_schema_input_type=str | list[ItemPart]),
]


class _SentBack(StrictModel):
    """Base class of items that may be output items of an earlier response."""

    @model_validator(mode="before")
    @classmethod
    def _leave_out(cls, data: Any) -> Any:
        without_effect = _OF_ANSWERS | {name for name in _EMPTY_IN_ANSWERS if not data.get(name)}
        return {name: value for name, value in data.items() if name not in without_effect}


class MessageItem(_SentBack):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: ItemText


class FunctionCallItem(_SentBack):
    """A call by the model in an earlier response."""

    type: Literal["function_call"]
    call_id: CallId
    name: FunctionName
    arguments: JsonArguments


class FunctionCallOutputItem(_SentBack):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: CallId
    output: ItemText


class ReasoningItem(StrictModel):
    """A model's reasoning; it is accepted and ignored."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["reasoning"]


InputItem: TypeAlias = MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem
_MODELS: dict[str, type[InputItem]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionCallOutputItem,
    "reasoning": ReasoningItem,
}


def _item(value: Any) -> InputItem:
    if not isinstance(value, dict):
        raise ValueError("give an object")  # noqa: TRY004 - pydantic handles no TypeError
    kind = value.get("type", "message")
    model = _MODELS.get(kind) if isinstance(kind, str) else None
    if model is None:
        message = "this server does not read items of type {kind}, only of the types {known}"
        context = {"kind": cut(str(kind)), "known": ", ".join(_MODELS)}
        raise PydanticCustomError(UNSUPPORTED, message, context)
    return model.model_validate(value)


def _items(value: Any) -> Any:
    """Return the items of an input; a text becomes one message of the user."""
    if value in ("", []):
        raise ValueError("it is empty")
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise ValueError("give text, or a list of items")  # noqa: TRY004 - as in `_item`
    if len(value) > MOST_MESSAGES:
        raise ValueError(f"at most {MOST_MESSAGES:,} items are read, these are {len(value):,}")
    return value


_ITEMS: TypeAdapter[tuple[InputItem, ...]] = TypeAdapter(
    Annotated[tuple[Annotated[InputItem, PlainValidator(_item)], ...], Field(fail_fast=True)]
)


@dataclass(slots=True)
class _Draft:
    """A message whose parts are still collected."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    texts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    answered: str | None = None
    """Id of the call whose result the message has."""

    def message(self) -> Message:
        return Message(
            role=self.role,
            content="".join(self.texts),
            tool_calls=tuple(self.calls),
            tool_call_id=self.answered,
        )


class _Conversation:
    """Collects the messages of a chat from items.

    The assistant's texts and calls of one turn become one message, because the results of the calls must follow this
    message.
    """

    def __init__(self) -> None:
        self._drafts: list[_Draft] = []
        self._waiting: dict[str, str] = {}
        """Calls without an output: id -> name of the function."""

    def add(self, item: InputItem, number: int) -> None:
        """Add the item with this number.

        Raises:
            ValueError: the item does not fit the calls before it.
        """
        match item:
            case MessageItem():
                self._add_message(item, number)
            case FunctionCallItem():
                self._add_call(item, number)
            case FunctionCallOutputItem():
                self._add_output(item, number)

    def messages(self) -> tuple[Message, ...]:
        """Return all messages.

        Raises:
            ValueError: a call has no output.
        """
        self._refuse_waiting("the end")
        return tuple(draft.message() for draft in self._drafts)

    def _add_message(self, item: MessageItem, number: int) -> None:
        turn = self._turn
        if item.role == "assistant" and turn is not None and turn.calls:
            turn.texts.append(item.content)
            return
        self._refuse_waiting(f"item {number}")
        self._drafts.append(_Draft(item.role, [item.content]))

    def _add_call(self, item: FunctionCallItem, number: int) -> None:
        turn = self._turn
        if turn is None:
            self._refuse_waiting(f"item {number}")
            turn = _Draft("assistant")
            self._drafts.append(turn)
        if item.call_id in self._waiting:
            raise ValueError(f"item {number}: two calls have the call_id {item.call_id!r}")
        if len(turn.calls) == MOST_CALLS:
            raise ValueError(f"item {number}: at most {MOST_CALLS} calls may follow each other")
        function = CalledFunction(name=item.name, arguments=item.arguments)
        turn.calls.append(ToolCall(id=item.call_id, function=function))
        self._waiting[item.call_id] = item.name

    def _add_output(self, item: FunctionCallOutputItem, number: int) -> None:
        if self._waiting.pop(item.call_id, None) is None:
            raise ValueError(
                f"item {number}: call_id {item.call_id!r} is no id of a function_call in the turn before it, or that "
                "call has an output already"
            )
        self._drafts.append(_Draft("tool", [item.output], answered=item.call_id))

    @property
    def _turn(self) -> _Draft | None:
        """The assistant's message, if it is the last one."""
        return self._drafts[-1] if self._drafts and self._drafts[-1].role == "assistant" else None

    def _refuse_waiting(self, place: str) -> None:
        if self._waiting:
            id_, name = next(iter(self._waiting.items()))
            raise ValueError(
                f"the call {id_!r} of {name} has no output before {place}; add an item function_call_output"
            )


def _messages(value: Any) -> tuple[Message, ...]:
    """Return the messages of a request's input.

    Raises:
        ValueError: an item is wrong, there is no message, or a call and its output do not match.
    """
    items = _ITEMS.validate_python(_items(value))
    if all(isinstance(item, ReasoningItem) for item in items):
        raise ValueError("it has no message")
    conversation = _Conversation()
    for number, item in enumerate(items):
        conversation.add(item, number)
    return conversation.messages()


InputMessages = Annotated[
    tuple[Message, ...],
    PlainValidator(_messages, json_schema_input_type=str | Annotated[list[InputItem], Field(min_length=1)]),
]
"""The messages of a request's input, which is text or a list of items."""


def instructed(instructions: str | None, messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Return the messages with instructions in front, merged with instructions at the beginning of the messages.

    Many chat templates accept a message of the role system only at the beginning.
    """
    if instructions is None:
        return messages
    leading = list(takewhile(lambda message: message.role in ("system", "developer"), messages))
    content = "\n\n".join([instructions, *(message.content for message in leading)])
    return (Message(role="system", content=content), *messages[len(leading) :])
