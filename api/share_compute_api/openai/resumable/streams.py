"""Resumable streams: their sequences are generated even if no client reads them.

A task collects the sequences of a request into answers. A reader is a position in these answers, so a client can
continue at any position. The sequences' events are also stored, about once a second. After a restart of the server, the
next request for the stream submits its sequences again, with the stored tokens.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from pydantic import ValidationError

from share_compute.errors import Conflict, Gone, NotFound, ShareComputeError, Unavailable
from share_compute.store import ApiKeyRecord, Store, StreamRecord
from share_compute.store.streams import NewEvents, StreamLimits
from share_compute_api.connection import sse
from share_compute_api.connection.notifier import Notifier
from share_compute_api.openai.answer_stream import AnswerStream, failed
from share_compute_api.openai.answers import Shape, shape_of
from share_compute_api.openai.completion import Completion
from share_compute_api.openai.engine import RETRY_AFTER_S, Engines, TextEngine
from share_compute_api.openai.requests import ChatRequest, CompletionRequest, TextRequest
from share_compute_api.openai.resumable.positions import StreamPosition, ahead_of_text
from share_compute_api.openai.resumable.recording import RecordingEngine, read_record
from share_compute_api.openai.tool_use import ToolUse
from share_compute_api.openai.writing import FullAnswer

if TYPE_CHECKING:
    from share_compute_api.workers.isolated.vocabulary import Vocabulary

_SAVE_S = 0.5
"""Seconds between two writes of new events to the store. A restarted server computes later tokens again."""
_ENGINE_S = 5.0
"""Longest wait for the engine of a deployment that begins, in seconds."""
_log = logging.getLogger(__name__)


class ResumableStream:
    """A request whose answers are generated even without readers.

    Args:
        record: the stored stream.
        request: the request, with its seed.
        completion: the sequences of the request, already begun.
        recording: the engine of ``completion``.
        shape: builds the chunks.
        notifier: signals that the server is shutting down.
    """

    def __init__(
        self,
        record: StreamRecord,
        request: TextRequest,
        completion: Completion,
        recording: RecordingEngine,
        shape: Shape,
        notifier: Notifier,
        *,
        is_restored: bool,
    ) -> None:
        self.id = record.id
        self.owner = record.owner
        self.recording = recording
        self.failure: ShareComputeError | None = None
        """Error that ended the stream; None if there is none."""
        self.is_stored_as_over = False
        self._request = request
        self._completion = completion
        self._shape = shape
        self._notifier = notifier
        self._is_restored = is_restored
        self._fixed_tokens = _fixed_tokens(completion, record.request)
        self._answers = [FullAnswer() for _ in range(completion.num_sequences)]
        self._ended: set[int] = set()
        """Indexes of the answers that are complete."""
        self._news = asyncio.Event()
        self._reader: object | None = None
        """Identifies the only reader that may go on; None without a reader."""
        self._unread_since_s = _now_s()
        self._work = asyncio.create_task(self._generate())

    @property
    def is_over(self) -> bool:
        """Whether no more events come."""
        return self.failure is not None or len(self._ended) == len(self._answers)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all prompts, and of all answers so far, for the limits of the store."""
        answers = self._completion.completion_tokens * _weight(self._request)
        return self._fixed_tokens + answers

    def unread_s(self) -> float:
        """Return the time since the last reader left, in seconds; 0 while there is a reader."""
        return 0.0 if self._reader is not None else _now_s() - self._unread_since_s

    async def _generate(self) -> None:
        try:
            async for batch in self._completion.pieces():
                for index, piece in batch:
                    self._answers[index].add(piece)
                    if piece.finish is not None:
                        self._ended.add(index)
                self._notify()
        except ShareComputeError as failure:
            # When the server shuts down, it cancels all sequences; the next server continues this stream.
            if not self._notifier.is_closed:
                self.failure = failure
        finally:
            self._completion.close()
            self._notify()

    async def replayed(self) -> None:
        """Wait until the answers have the text of the stored events."""
        replaying = asyncio.create_task(self.recording.has_replayed.wait())
        await asyncio.wait([self._work, replaying], return_when=asyncio.FIRST_COMPLETED)
        replaying.cancel()

    def _notify(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def end(self, failure: ShareComputeError | None = None) -> None:
        """Cancel the sequences; readers get ``failure`` if it is given."""
        if failure is not None and not self.is_over:
            self.failure = failure
        self._work.cancel()
        await asyncio.gather(self._work, return_exceptions=True)

    def position(self, last_event_id: str | None) -> StreamPosition:
        """Return the position after an event; the start if ``last_event_id`` is None.

        After a restart, a position that the text has not reached is accepted while the answer grows: its last tokens
        may have been sent but not stored.

        Raises:
            UserError: ``last_event_id`` is malformed, or ahead of the text.
        """
        if last_event_id is None:
            return StreamPosition.start(len(self._answers))
        position = StreamPosition.parse(last_event_id, len(self._answers))
        for index, (answer, sent) in enumerate(zip(self._answers, position.answers, strict=True)):
            is_ahead = sent.is_ahead_of(answer) or (sent.has_ended and index not in self._ended)
            if is_ahead and (not self._is_restored or index in self._ended):
                raise ahead_of_text(position)
        if position.has_usage and not self._request.wants_usage:
            raise ahead_of_text(position)
        return position

    def response(self, position: StreamPosition) -> AnswerStream:
        """Return the response that sends the events after a position; the previous reader ends with an error."""
        return AnswerStream(
            self._events(position), self._notifier, lambda: None, self._shape, stream_id=self.id
        )

    async def _events(self, sent: StreamPosition) -> AsyncGenerator[bytes, None]:
        reader = self._reader = object()
        self._notify()
        try:
            while True:
                if self._reader is not reader:
                    yield failed(
                        Conflict(
                            f"another connection reads the stream {self.id} now",
                            hint="read a stream with one connection at a time",
                        ),
                        self._shape,
                    )
                    return
                news = self._news
                if content := b"".join(self._unsent(sent)):
                    yield content
                elif self.failure is not None:
                    yield failed(self.failure, self._shape)
                    return
                elif len(self._ended) == len(self._answers):
                    yield self._last(sent)
                    return
                else:
                    try:
                        async with asyncio.timeout(sse.KEEPALIVE_S):
                            await news.wait()
                    except TimeoutError:
                        yield sse.KEEPALIVE
        except ShareComputeError as failure:
            yield failed(failure, self._shape)
        finally:
            if self._reader is reader:
                self._reader, self._unread_since_s = None, _now_s()

    def _unsent(self, sent: StreamPosition) -> Iterator[bytes]:
        """Yield the events after a position, and advance the position.

        Raises:
            UserError: the position is ahead of a complete answer.
        """
        for index, (answer, own) in enumerate(zip(self._answers, sent.answers, strict=True)):
            if not own.has_begun:
                own.has_begun = True
                for chunk in self._shape.first(index):
                    yield sse.json_event(chunk, id_=str(sent))
            is_complete = index in self._ended
            if is_complete and own.is_ahead_of(answer):
                raise ahead_of_text(sent)
            if own.has_ended:
                continue
            for piece in own.advance(answer, answer.finish if is_complete else None):
                (chunk,) = self._shape.chunks(index, piece)
                yield sse.json_event(chunk, id_=str(sent))

    def _last(self, sent: StreamPosition) -> bytes:
        content = b""
        if self._request.wants_usage and not sent.has_usage:
            sent.has_usage = True
            (chunk,) = self._shape.last(self._completion.usage)
            content = sse.json_event(chunk, id_=str(sent))
        return content + sse.event("[DONE]", id_=str(sent))


class ResumableStreams:
    """All resumable streams of the server; all methods must be called in the event loop's thread.

    Args:
        store: keeps the streams.
        engines: engines of the served models.
        notifier: knows whether the server shuts down.
        keep_s: seconds for which a stream is kept without a reader.
    """

    def __init__(self, store: Store, engines: Engines, notifier: Notifier, keep_s: float) -> None:
        self.limits = StreamLimits()
        """Largest number and size of the streams."""
        self._log = store.streams
        self._deployments = store.deployments
        self._engines = engines
        self._notifier = notifier
        self.keep_s = keep_s
        """Seconds for which a stream is kept without a reader."""
        self._live: dict[str, ResumableStream] = {}
        self._restoring: dict[str, asyncio.Task[ResumableStream]] = {}
        self._unwanted: set[str] = set()
        """Ids of streams that expire with the next write."""
        self._saving = asyncio.Lock()

    # -- requests ----------------------------------------------------------------------------------------------------

    async def begin(
        self,
        request: TextRequest,
        prompts: Sequence[tuple[int, ...]],
        engine: TextEngine,
        vocabulary: Vocabulary,
        owner: str,
        tools: ToolUse | None,
    ) -> ResumableStream | None:
        """Store a request and submit its sequences; return None if the store does not accept it.

        Args:
            request: the request; its seed is drawn if it has none.
            prompts: the request's prompts as token ids.
            engine: generates the sequences.
            vocabulary: the model's vocabulary.
            owner: id of the API key that sent the request.
            tools: tools that the model may call; None if it may call none.

        Raises:
            ShareComputeError: the engine refused the sequences, or a prompt is too long.
        """
        if request.seed is None:
            request = request.model_copy(update={"seed": secrets.randbits(63)})
        stream_id = f"stream-{secrets.token_urlsafe(24)}"
        tools = None if tools is None else tools.seeded(stream_id)
        completion = Completion(request, prompts, engine.facts, vocabulary, owner, tools)
        shape = shape_of(request, vocabulary)
        stored = request.without_prompt().model_dump(mode="json", by_alias=True, exclude_unset=True)
        record = StreamRecord(
            id=stream_id,
            owner=owner,
            deployment_id=engine.facts.deployment_id,
            model=engine.facts.name,
            kind="chat" if isinstance(request, ChatRequest) else "completion",
            request=stored,
            prompts=tuple(prompts),
            answer_id=shape.answer_id,
            created=shape.created,
            tokens=_fixed_tokens(completion, stored) + completion.most_tokens * _weight(request),
        )
        try:
            if not await self._store(record):
                return None
            return await self._start(record, request, completion, RecordingEngine(engine, []), shape)
        except BaseException:
            self._unwanted.add(record.id)
            raise

    async def _store(self, record: StreamRecord) -> bool:
        """Store a new stream; return False if there is no space, or if the store does not accept it."""
        try:
            expired = await asyncio.to_thread(self._log.create, record, self.limits)
        except ShareComputeError as failure:
            _log.warning("a stream is not resumable: %s", failure.message)
            return False
        for stream_id in expired or ():
            self._live.pop(stream_id, None)
        return expired is not None

    async def _start(
        self,
        record: StreamRecord,
        request: TextRequest,
        completion: Completion,
        recording: RecordingEngine,
        shape: Shape,
        *,
        is_restored: bool = False,
    ) -> ResumableStream:
        await completion.begin(recording)
        stream = ResumableStream(
            record, request, completion, recording, shape, self._notifier, is_restored=is_restored
        )
        self._live[stream.id] = stream
        return stream

    async def find(self, stream_id: str, caller: ApiKeyRecord) -> ResumableStream:
        """Return a stream; resubmit its sequences if an earlier server stored the stream.

        Raises:
            NotFound: there is no such stream, or it belongs to another key.
            Gone: the stream has expired, was cancelled, or its model is no longer served.
            UserError: the tools of the request can no longer be used with the model's tokenizer.
            Unavailable: the model does not answer yet.
        """
        live = self._live.get(stream_id)
        if live is not None and not caller.owns(live.owner):
            raise _unknown(stream_id)
        if live is not None and live.failure is None:
            return live
        restoring = self._restoring.get(stream_id)
        if restoring is None:
            record = await self._stored(stream_id, caller)
            restoring = self._restoring.get(stream_id)
            if restoring is None:
                restoring = self._restoring[stream_id] = asyncio.create_task(self._restore(record))
                restoring.add_done_callback(lambda done: self._restored(stream_id, done))
        stream = await asyncio.shield(restoring)
        if not caller.owns(stream.owner):
            raise _unknown(stream_id)
        return stream

    def _restored(self, stream_id: str, task: asyncio.Task[ResumableStream]) -> None:
        del self._restoring[stream_id]
        if not task.cancelled():
            task.exception()  # the requests that wait for the stream report the error

    async def _stored(self, stream_id: str, caller: ApiKeyRecord) -> StreamRecord:
        record = await asyncio.to_thread(self._log.get, stream_id)
        if record is None or not caller.owns(record.owner):
            raise _unknown(stream_id)
        if record.expired_at is not None or stream_id in self._unwanted:
            raise Gone(
                f"the stream {stream_id} has expired: nobody read it for {self.keep_s:g} s, it was cancelled, or "
                "newer streams of its key took its place",
                hint="send the request again; the same seed gives the same text",
            )
        return record

    async def _restore(self, record: StreamRecord) -> ResumableStream:
        live = self._live.pop(record.id, None)
        if live is not None:  # it failed in this server
            await self._save([live])
        engine = await self._engine(record)
        tokenizer = await self._engines.tokenizer(engine)
        kind = ChatRequest if record.kind == "chat" else CompletionRequest
        try:
            request = kind.model_validate(record.request)
        except ValidationError as failure:
            raise Gone(
                f"the stream {record.id} was begun by another version of share-compute",
                hint="send the request again",
            ) from failure
        tools = await ToolUse.prepare(request, engine.facts, tokenizer)
        tools = None if tools is None else tools.seeded(record.id)
        completion = Completion(
            request, record.prompts or (), engine.facts, tokenizer.vocabulary, record.owner, tools
        )
        past = await asyncio.to_thread(self._log.events, record.id)
        recording = RecordingEngine(engine, read_record(past, completion.num_sequences))
        shape = shape_of(request, tokenizer.vocabulary, record.answer_id, record.created)
        stream = await self._start(record, request, completion, recording, shape, is_restored=True)
        await stream.replayed()
        return stream

    async def _engine(self, record: StreamRecord) -> TextEngine:
        engine = self._engines.find(record.model)
        if engine is not None and engine.facts.deployment_id == record.deployment_id:
            return cast("TextEngine", engine)
        deployment = await asyncio.to_thread(self._deployments.by_name, record.model)
        if deployment is None or deployment.id != record.deployment_id:
            raise Gone(
                f"the model {record.model} of this stream is not served any more",
                hint="send the request again; GET /v1/models lists what is served",
            )
        # After a restart of the server, clients may reconnect before the deployment has started.
        engine = await self._engines.wait_for(record.model, record.deployment_id, _ENGINE_S)
        if engine is not None:
            return cast("TextEngine", engine)
        raise Unavailable(
            f"model {record.model} does not answer yet: it is {deployment.state.value}, {deployment.reason}",
            hint=f"try again in {RETRY_AFTER_S} s",
            details={"code": "model_not_ready", "retry_after_s": RETRY_AFTER_S},
        )

    async def cancel(self, stream_id: str, caller: ApiKeyRecord) -> None:
        """Cancel a stream; its reader gets an error.

        Raises:
            NotFound: there is no such stream, or it belongs to another key.
            Gone: the stream has expired, or was cancelled.
        """
        if (restoring := self._restoring.get(stream_id)) is not None:
            await asyncio.wait([restoring])
        live = self._live.get(stream_id)
        if live is None:
            await self._stored(stream_id, caller)
        elif not caller.owns(live.owner):
            raise _unknown(stream_id)
        self._unwanted.add(stream_id)
        if live is not None:
            del self._live[stream_id]
            await live.end(Gone(f"the stream {stream_id} was cancelled", hint="send the request again"))
        await self._save()

    # -- background task ---------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Store new events every second, and let streams expire, until cancelled."""
        # the time without a server does not count as time without readers
        await asyncio.to_thread(self._log.touch)
        while True:
            await asyncio.sleep(_SAVE_S)
            for stream in list(self._live.values()):
                if stream.unread_s() > self.keep_s:
                    self._unwanted.add(stream.id)
                    self._live.pop(stream.id, None)
                    await stream.end()
            # A write in progress must end before `close` makes the last write.
            await asyncio.shield(asyncio.ensure_future(self._save()))
            try:
                kept = (*self._live, *self._restoring)
                await asyncio.to_thread(self._log.expire_unread, self.keep_s, kept)
            except Unavailable as failure:
                _log.warning("expired streams could not be deleted: %s", failure.message)

    async def close(self) -> None:
        """Cancel all sequences, and store their last events."""
        streams = list(self._live.values())
        for task in list(self._restoring.values()):
            task.cancel()
        await asyncio.gather(*(stream.end() for stream in streams))
        await self._save()
        self._live.clear()

    async def _save(self, more: Sequence[ResumableStream] = ()) -> None:
        """Write the new events of all streams, and of ``more``; delete unwanted streams."""
        async with self._saving:
            streams = [*self._live.values(), *more]
            news = {
                stream.id: NewEvents(
                    tuple(stream.recording.unsaved), stream.num_tokens if stream.is_over else None
                )
                for stream in streams
                if stream.recording.unsaved or (stream.is_over and not stream.is_stored_as_over)
            }
            unwanted = tuple(self._unwanted)
            try:
                if news:
                    await asyncio.to_thread(self._log.append, news)
                if unwanted:
                    await asyncio.to_thread(self._log.expire, unwanted)
            except Unavailable as failure:
                _log.warning("resumable streams could not be stored: %s", failure.message)
                return
            for stream in streams:
                if (new := news.get(stream.id)) is not None:
                    del stream.recording.unsaved[: len(new.events)]
                    stream.is_stored_as_over = new.tokens is not None
            self._unwanted.difference_update(unwanted)


def _fixed_tokens(completion: Completion, stored: Mapping[str, Any] | None) -> int:
    """Return the number of tokens of the prompts, plus that of the stored request (four characters per token)."""
    return completion.prompt_tokens + len(json.dumps(stored)) // 4


def _weight(request: TextRequest) -> int:
    """Return the number of tokens for which one token of an answer counts; it is higher with log-probabilities."""
    return 1 if request.top_tokens is None else 1 + request.top_tokens


def _unknown(stream_id: str) -> NotFound:
    return NotFound(
        f"there is no stream {stream_id} that this key may read",
        hint="use the id in the header X-Stream-Id, and the key that sent the request",
    )


def _now_s() -> float:
    return asyncio.get_running_loop().time()
