"""Builds answers of the OpenAI API: pydantic models, which appear in openapi.json, and chunks of streams as dicts."""

from __future__ import annotations

import base64
import secrets
import struct
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict

from share_compute import __version__
from share_compute.files.described import DescribedModel
from share_compute_api.openai.engine import ModelFacts
from share_compute_api.openai.problems import problem_of
from share_compute_api.openai.requests import ChatRequest, TextRequest
from share_compute_api.openai.writing import AnswerPiece, Finish, FullAnswer, ToolCallDelta, Written

if TYPE_CHECKING:
    from share_compute_api.workers.isolated.vocabulary import Vocabulary

FINGERPRINT = f"share-compute-{__version__}"
_LEAST_LOGPROB = -9999.0
"""Lowest log-probability that is reported. It replaces minus infinity, which JSON cannot represent."""


class AnswerModel(DescribedModel):
    """Base class of answers and of their parts."""

    model_config = ConfigDict(frozen=True)


class CachedTokens(AnswerModel):
    """Prompt tokens whose computation was skipped because of prefix caching."""

    cached_tokens: int = 0
    """Number of prompt tokens whose KV cache was copied from a request with the same beginning."""


class Usage(AnswerModel):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int = 0
    total_tokens: int
    prompt_tokens_details: CachedTokens = CachedTokens()

    @classmethod
    def of(cls, prompt_tokens: int, completion_tokens: int = 0, cached_tokens: int = 0) -> Usage:
        """Return the usage; the total is computed from the two counts."""
        return cls(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=CachedTokens(cached_tokens=cached_tokens),
        )


class TopLogprob(AnswerModel):
    """A candidate token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token of the answer, its log-probability, and the most probable candidates at its position."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(AnswerModel):
    """Log-probabilities of the tokens of a chat completion."""

    content: list[TokenLogprob]
    refusal: None = None


class TextLogprobs(AnswerModel):
    """Log-probabilities of the tokens of a text completion."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class FunctionCall(AnswerModel):
    """Function and arguments of a call."""

    name: str
    arguments: str
    """A JSON object, as text."""


class MessageToolCall(AnswerModel):
    """A call of a tool by the model."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall

    @classmethod
    def of(cls, call: ToolCallDelta) -> MessageToolCall:
        """Return a call from its joined parts."""
        assert call.id is not None
        assert call.name is not None
        return cls(id=call.id, function=FunctionCall(name=call.name, arguments=call.arguments))


class ChatMessage(AnswerModel):
    """The model's message."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    """Text of the answer; null if it consists of tool calls."""
    refusal: None = None
    tool_calls: list[MessageToolCall] | None = None
    """Calls of the request's tools; null if there are none."""


class ChatChoice(AnswerModel):
    """One answer to a chat."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish


class TextChoice(AnswerModel):
    """One answer to a prompt."""

    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: Finish


class ChatCompletion(AnswerModel):
    """All answers to a chat."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str = FINGERPRINT
    choices: list[ChatChoice]
    usage: Usage


class TextCompletion(AnswerModel):
    """All answers to all prompts."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str = FINGERPRINT
    choices: list[TextChoice]
    usage: Usage


class Embedding(AnswerModel):
    """One vector."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str
    """Numbers, or base64 of 32-bit floats, little-endian."""


class EmbeddingList(AnswerModel):
    """A vector for each text."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: Usage


class Model(AnswerModel):
    """A model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "share-compute"
    max_model_len: int
    """Maximum number of tokens of a prompt and its answer together."""
    kind: Literal["generate", "embed"]
    has_chat_template: bool
    """Whether the model can be used with `/v1/chat/completions`."""

    @classmethod
    def of(cls, facts: ModelFacts) -> Model:
        """Return the description of a model for clients."""
        return cls(
            id=facts.name,
            created=facts.created,
            max_model_len=facts.window_tokens,
            kind=facts.kind,
            has_chat_template=facts.kind == "generate" and facts.has_chat_template,
        )


class ModelList(AnswerModel):
    """The models that are served."""

    object: Literal["list"] = "list"
    data: list[Model]


class Shape(Protocol):
    """Builds the answers of one route, whole or as chunks of a stream."""

    has_kinds: bool
    """Whether each chunk has a ``type``, which names its event; such a stream ends without ``[DONE]``."""
    answer_id: str
    """Value of ``id`` in the answer."""
    created: int
    """Value of ``created`` in the answer, in seconds since 1970."""

    def whole(self, answers: Sequence[FullAnswer], usage: Usage) -> BaseModel:
        """Return the whole answer, for a request that is not streamed."""

    def first(self, index: int) -> list[dict[str, Any]]:
        """Return the first chunks of one sequence's stream."""

    def chunks(self, index: int, piece: AnswerPiece) -> list[dict[str, Any]]:
        """Return the chunks for the next piece of a sequence's text."""

    def last(self, usage: Usage) -> list[dict[str, Any]]:
        """Return the chunks at the end of a stream; they report the usage if the client wants it."""

    def failed(self, failure: Exception) -> list[dict[str, Any]]:
        """Return the chunks that end a stream after a failure."""


class _Shape:
    """Common parts of `ChatShape` and `TextShape`.

    Args:
        prefix: beginning of the answer's id.
        kind: value of a chunk's ``object``.
        request: the request.
        vocabulary: the model's vocabulary.
        answer_id: id of the answer; default: a random one.
        created: time of the answer's creation, in seconds since 1970; default: now.
    """

    has_kinds = False

    def __init__(
        self,
        prefix: str,
        kind: str,
        request: TextRequest,
        vocabulary: Vocabulary,
        answer_id: str | None,
        created: int | None,
    ) -> None:
        self._vocabulary = vocabulary
        self._wants_usage = request.wants_usage
        self._includes_tokens = request.top_tokens is not None
        self.answer_id = answer_id or f"{prefix}-{secrets.token_hex(12)}"
        self.created = int(time.time()) if created is None else created
        self._facts = {"id": self.answer_id, "created": self.created, "model": request.model}
        self._chunk = {**self._facts, "object": kind, "system_fingerprint": FINGERPRINT}
        # In the OpenAI API, every chunk has the field `usage` if the stream reports usage.
        self._usage: dict[str, Any] = {"usage": None} if self._wants_usage else {}

    def _framed(self, choice: dict[str, Any]) -> dict[str, Any]:
        return {**self._chunk, "choices": [choice], **self._usage}

    def last(self, usage: Usage) -> list[dict[str, Any]]:
        """Return a list with the chunk that reports the usage; an empty list if the client does not want it."""
        return [{**self._chunk, "choices": [], "usage": usage.model_dump()}] if self._wants_usage else []

    def failed(self, failure: Exception) -> list[dict[str, Any]]:
        """Return a list with the error."""
        return [problem_of(failure).body()]


class ChatShape(_Shape):
    """Builds the answers of /v1/chat/completions."""

    def __init__(
        self,
        request: TextRequest,
        vocabulary: Vocabulary,
        answer_id: str | None = None,
        created: int | None = None,
    ) -> None:
        super().__init__("chatcmpl", "chat.completion.chunk", request, vocabulary, answer_id, created)

    def whole(self, answers: Sequence[FullAnswer], usage: Usage) -> ChatCompletion:
        """Return the whole answer, for a request that is not streamed."""
        choices = [
            ChatChoice(
                index=index,
                message=ChatMessage(
                    content=answer.text or None if answer.calls else answer.text,
                    tool_calls=[MessageToolCall.of(call) for call in answer.calls] or None,
                ),
                logprobs=self._logprobs(answer.tokens),
                finish_reason=answer.finish,
            )
            for index, answer in enumerate(answers)
        ]
        return ChatCompletion(**self._facts, choices=choices, usage=usage)

    def first(self, index: int) -> list[dict[str, Any]]:
        """Return a list with the chunk that sets the message's role to "assistant"."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        return [self._framed({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})]

    def chunks(self, index: int, piece: AnswerPiece) -> list[dict[str, Any]]:
        """Return the chunks for the next piece of a sequence's text."""
        logprobs = self._logprobs(piece.tokens) if piece.tokens else None
        deltas: list[dict[str, Any]] = [{"content": piece.text}] if piece.text else []
        deltas += [{"tool_calls": [_delta(call)]} for call in piece.calls]
        if not deltas:
            deltas.append({"content": ""} if piece.finish is None else {})
        last = len(deltas) - 1
        return [
            self._framed(
                {
                    "index": index,
                    "delta": delta,
                    "logprobs": logprobs.model_dump() if logprobs and place == 0 else None,
                    "finish_reason": piece.finish if place == last else None,
                }
            )
            for place, delta in enumerate(deltas)
        ]

    def _logprobs(self, tokens: Sequence[Written]) -> ChatLogprobs | None:
        return ChatLogprobs(content=logprobs_of(tokens, self._vocabulary)) if self._includes_tokens else None


class TextShape(_Shape):
    """Builds the answers of /v1/completions."""

    def __init__(
        self,
        request: TextRequest,
        vocabulary: Vocabulary,
        answer_id: str | None = None,
        created: int | None = None,
    ) -> None:
        super().__init__("cmpl", "text_completion", request, vocabulary, answer_id, created)
        self._includes_top = bool(request.top_tokens)

    def whole(self, answers: Sequence[FullAnswer], usage: Usage) -> TextCompletion:
        """Return the whole answer, for a request that is not streamed."""
        choices = [
            TextChoice(
                index=index,
                text=answer.text,
                logprobs=self._logprobs(answer.tokens),
                finish_reason=answer.finish,
            )
            for index, answer in enumerate(answers)
        ]
        return TextCompletion(**self._facts, choices=choices, usage=usage)

    def first(self, index: int) -> list[dict[str, Any]]:
        """Return an empty list, because a completion's stream begins with its text."""
        del index
        return []

    def chunks(self, index: int, piece: AnswerPiece) -> list[dict[str, Any]]:
        """Return the chunks for the next piece of a sequence's text."""
        logprobs = self._logprobs(piece.tokens) if piece.tokens else None
        choice = {
            "index": index,
            "text": piece.text,
            "logprobs": logprobs and logprobs.model_dump(),
            "finish_reason": piece.finish,
        }
        return [self._framed(choice)]

    def _logprobs(self, tokens: Sequence[Written]) -> TextLogprobs | None:
        if not self._includes_tokens:
            return None
        emitted = [written.emitted for written in tokens]
        top = [{self._text(id_): _finite(logprob) for id_, logprob in one.top} for one in emitted]
        return TextLogprobs(
            tokens=[self._text(one.token) for one in emitted],
            token_logprobs=[_finite(one.logprob) for one in emitted],
            top_logprobs=top if self._includes_top else None,
            text_offset=[written.offset for written in tokens],
        )

    def _text(self, id_: int) -> str:
        return _token_text(self._vocabulary.token_bytes(id_))


def _delta(call: ToolCallDelta) -> dict[str, Any]:
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def shape_of(
    request: TextRequest, vocabulary: Vocabulary, answer_id: str | None = None, created: int | None = None
) -> Shape:
    """Return the shape of the answers to a request; without ``answer_id`` and ``created``, they are new."""
    kind = ChatShape if isinstance(request, ChatRequest) else TextShape
    return kind(request, vocabulary, answer_id, created)


def logprobs_of(tokens: Sequence[Written], vocabulary: Vocabulary) -> list[TokenLogprob]:
    """Return the log-probabilities of tokens and of the most probable candidates at their positions."""
    return [
        TokenLogprob(
            **_token_fields(written.emitted.token, written.emitted.logprob, vocabulary),
            top_logprobs=[TopLogprob(**_token_fields(*pair, vocabulary)) for pair in written.emitted.top],
        )
        for written in tokens
    ]


def _token_fields(id_: int, logprob: float | None, vocabulary: Vocabulary) -> dict[str, Any]:
    own = vocabulary.token_bytes(id_)
    return {"token": _token_text(own), "logprob": _finite(logprob), "bytes": list(own)}


def _token_text(own: bytes) -> str:
    return own.decode(errors="replace")


def _finite(logprob: float | None) -> float:
    return _LEAST_LOGPROB if logprob is None else max(_LEAST_LOGPROB, logprob)


def vector(index: int, numbers: Sequence[float], *, as_base64: bool) -> Embedding:
    """Return one vector in the encoding that the client requested."""
    if not as_base64:
        return Embedding(index=index, embedding=list(numbers))
    packed = struct.pack(f"<{len(numbers)}f", *numbers)
    return Embedding(index=index, embedding=base64.b64encode(packed).decode())
