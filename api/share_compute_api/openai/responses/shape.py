"""Builds responses of the Responses API, and the events of their streams."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from share_compute_api.openai.answers import TokenLogprob, Usage, logprobs_of
from share_compute_api.openai.problems import problem_of
from share_compute_api.openai.responses.objects import (
    IncompleteDetails,
    ItemStatus,
    OutputFunctionCall,
    OutputMessage,
    OutputText,
    ResponseFailure,
    ResponseObject,
    ResponseUsage,
)
from share_compute_api.openai.responses.requests import ReasoningOptions, ResponsesRequest, TextOptions
from share_compute_api.openai.writing import AnswerPiece, Finish, FullAnswer, ToolCallDelta, Written

if TYPE_CHECKING:
    from share_compute_api.workers.isolated.vocabulary import Vocabulary


@dataclass(slots=True)
class _Message:
    """A message that is being generated."""

    id: str
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def part(self) -> OutputText:
        return OutputText(text="".join(self.texts), logprobs=self.logprobs)

    def item(self, status: ItemStatus) -> OutputMessage:
        return OutputMessage(id=self.id, status=status, content=[self.part()])


@dataclass(slots=True)
class _Call:
    """A call that is being generated."""

    id: str
    call_id: str
    name: str
    parts: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        return "".join(self.parts)

    def item(self, status: ItemStatus) -> OutputFunctionCall:
        return OutputFunctionCall(
            id=self.id, status=status, call_id=self.call_id, name=self.name, arguments=self.arguments
        )


class ResponsesShape:
    """Builds the answer of /v1/responses to one request, as a whole or as events of a stream; each object is used once.

    Args:
        request: the request.
        vocabulary: the model's vocabulary.
    """

    has_kinds = True

    def __init__(self, request: ResponsesRequest, vocabulary: Vocabulary) -> None:
        self.answer_id = _new_id("resp")
        self.created = int(time.time())
        self._vocabulary = vocabulary
        self._includes_tokens = request.includes_logprobs
        self._facts = {
            "id": self.answer_id,
            "created_at": self.created,
            "model": request.model,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "reasoning": request.reasoning or ReasoningOptions(),
            "temperature": 1 if request.temperature is None else request.temperature,
            "text": request.text or TextOptions(),
            "tool_choice": request.tool_choice or "auto",
            "tools": list(request.tools or ()),
            "top_logprobs": request.top_logprobs or 0,
            "top_p": 1 if request.top_p is None else request.top_p,
        }
        self._num_events = 0
        self._items: list[OutputMessage | OutputFunctionCall] = []
        """Complete output items."""
        self._open: _Message | _Call | None = None
        """The output item that is being generated."""
        self._finish: Finish | None = None

    def whole(self, answers: Sequence[FullAnswer], usage: Usage) -> ResponseObject:
        """Return the whole response, for a request that is not streamed."""
        (answer,) = answers
        for piece in _pieces(answer):
            self.chunks(0, piece)
        return self._ended(usage)

    def first(self, index: int) -> list[dict[str, Any]]:
        """Return the events that begin a stream."""
        del index  # a response has one answer
        response = self._response("in_progress")
        return [self._response_event(kind, response) for kind in ("created", "in_progress")]

    def chunks(self, index: int, piece: AnswerPiece) -> list[dict[str, Any]]:
        """Return the events for the next piece of the text."""
        del index
        # Parts without a name continue the call that began before this piece.
        continued = list(takewhile(lambda call: call.name is None, piece.calls))
        events = [event for call in continued for event in self._continue_call(call)]
        if piece.text or piece.tokens:
            events += self._add_text(piece.text, piece.tokens)
        for call in piece.calls[len(continued) :]:
            events += self._continue_call(call) if call.name is None else self._begin_call(call)
        if piece.finish is not None:
            if not self._items and self._open is None:
                events += self._begin_message()
            events += self._close(is_cut=piece.finish == "length")
            self._finish = piece.finish
        return events

    def last(self, usage: Usage) -> list[dict[str, Any]]:
        """Return a list with the event that contains the whole response."""
        response = self._ended(usage)
        return [self._response_event(response.status, response)]

    def failed(self, failure: Exception) -> list[dict[str, Any]]:
        """Return a list with the event that reports a failure and contains the output so far."""
        problem = problem_of(failure)
        is_busy = problem.status == HTTPStatus.TOO_MANY_REQUESTS
        error = ResponseFailure(
            code="rate_limit_exceeded" if is_busy else "server_error", message=problem.message
        )
        return [self._response_event("failed", self._response("failed", error=error))]

    # -- output items ------------------------------------------------------------------------------------------------

    def _begin_message(self) -> Iterator[dict[str, Any]]:
        yield from self._close()
        self._open = _Message(_new_id("msg"))
        yield self._item_event("added", self._open.item("in_progress").model_copy(update={"content": []}))
        yield self._part_event("content_part.added", part=self._open.part().model_dump())

    def _add_text(self, text: str, tokens: Sequence[Written]) -> Iterator[dict[str, Any]]:
        if not isinstance(self._open, _Message):
            yield from self._begin_message()
        assert isinstance(self._open, _Message)
        logprobs = logprobs_of(tokens, self._vocabulary) if self._includes_tokens else []
        self._open.texts.append(text)
        self._open.logprobs += logprobs
        yield self._part_event(
            "output_text.delta", delta=text, logprobs=[logprob.model_dump() for logprob in logprobs]
        )

    def _begin_call(self, call: ToolCallDelta) -> Iterator[dict[str, Any]]:
        assert call.id is not None
        assert call.name is not None
        yield from self._close()
        self._open = _Call(_new_id("fc"), call.id, call.name)
        yield self._item_event("added", self._open.item("in_progress"))
        if call.arguments:
            yield from self._continue_call(call)

    def _continue_call(self, call: ToolCallDelta) -> Iterator[dict[str, Any]]:
        assert isinstance(self._open, _Call)
        self._open.parts.append(call.arguments)
        yield self._open_event("function_call_arguments.delta", delta=call.arguments)

    def _close(self, *, is_cut: bool = False) -> Iterator[dict[str, Any]]:
        """End the open item, if there is one.

        Args:
            is_cut: whether the response ends here because it reached its maximum number of tokens.
        """
        match self._open:
            case _Message() as message:
                part = message.part().model_dump()
                yield self._part_event("output_text.done", text=part["text"], logprobs=part["logprobs"])
                yield self._part_event("content_part.done", part=part)
                item: OutputMessage | OutputFunctionCall = message.item(
                    "incomplete" if is_cut else "completed"
                )
            case _Call() as call:
                item = call.item("completed" if _is_json(call.arguments) else "incomplete")
                yield self._open_event(
                    "function_call_arguments.done", name=call.name, arguments=call.arguments
                )
            case None:
                return
        yield self._item_event("done", item)
        self._items.append(item)
        self._open = None

    # -- events ------------------------------------------------------------------------------------------------------

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        number = self._num_events
        self._num_events += 1
        return {"type": f"response.{kind}", "sequence_number": number, **fields}

    def _response_event(self, kind: str, response: ResponseObject) -> dict[str, Any]:
        return self._event(kind, response=response.model_dump(by_alias=True))

    def _item_event(self, kind: str, item: OutputMessage | OutputFunctionCall) -> dict[str, Any]:
        return self._event(f"output_item.{kind}", output_index=len(self._items), item=item.model_dump())

    def _open_event(self, kind: str, **fields: Any) -> dict[str, Any]:
        assert self._open is not None
        return self._event(kind, item_id=self._open.id, output_index=len(self._items), **fields)

    def _part_event(self, kind: str, **fields: Any) -> dict[str, Any]:
        return self._open_event(kind, content_index=0, **fields)

    # -- responses ---------------------------------------------------------------------------------------------------

    def _ended(self, usage: Usage) -> ResponseObject:
        counted = ResponseUsage.of(usage)
        if self._finish == "length":
            details = IncompleteDetails(reason="max_output_tokens")
            return self._response("incomplete", incomplete_details=details, usage=counted)
        return self._response("completed", usage=counted)

    def _response(self, status: str, **fields: Any) -> ResponseObject:
        unfinished = [] if self._open is None else [self._open.item("incomplete")]
        return ResponseObject(**self._facts, status=status, output=[*self._items, *unfinished], **fields)


def _pieces(answer: FullAnswer) -> Iterator[AnswerPiece]:
    """Yield a whole answer as pieces: the text before each call, and the call."""
    start = 0
    for call, offset in zip(answer.calls, answer.call_offsets, strict=True):
        yield AnswerPiece(text=answer.text[start:offset], calls=(call,))
        start = offset
    yield AnswerPiece(text=answer.text[start:], tokens=tuple(answer.tokens), finish=answer.finish)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(24)}"
