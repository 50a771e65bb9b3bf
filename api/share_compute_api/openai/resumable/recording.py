"""Records the events of one request's sequences, and replays the events of an earlier record.

A record is a list of small JSON arrays, one for each event; the first item of each is the index of the sequence:

| array | event |
|---|---|
| [index, token, log-probability, [[token, log-probability], ...], cached tokens] | `Emitted` |
| [index, "stop" or "length"] | `Finished` |
| [index, null] | the reader ended the sequence, because its text was complete |
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import Field, TypeAdapter, ValidationError

from share_compute.errors import VerificationFailed
from share_compute.inference.scheduler.events import Emitted, Finished
from share_compute.inference.scheduler.options import Generation
from share_compute_api.openai.engine import ModelFacts, Stream, StreamEvent, TextEngine

_Count = Annotated[int, Field(ge=0)]
RecordedToken: TypeAlias = tuple[_Count, _Count, float | None, tuple[tuple[int, float], ...], _Count]
RecordedEnd: TypeAlias = tuple[_Count, Literal["stop", "length"] | None]
Record: TypeAlias = list[RecordedToken | RecordedEnd]
_RECORD: TypeAdapter[Record] = TypeAdapter(Record)
_REPLAYED_AT_ONCE = 256
"""Number of events that are replayed before other tasks run."""


def read_record(events: Sequence[Any], num_sequences: int) -> Record:
    """Return the record that the store kept for a request with this number of sequences.

    Raises:
        VerificationFailed: the events are not such a record.
    """
    try:
        record = _RECORD.validate_python(events)
    except ValidationError as failure:
        raise VerificationFailed(f"a stored stream is damaged: {failure.errors()[0]['msg']}") from failure
    if any(event[0] >= num_sequences for event in record):
        raise VerificationFailed("a stored stream is damaged: it has events of unknown sequences")
    return record


class RecordingEngine:
    """Engine that records the events of one request.

    Args:
        engine: generates the tokens.
        past: events of an earlier run of the same request. They are replayed first, and generation continues after
            them.
    """

    def __init__(self, engine: TextEngine, past: Record) -> None:
        self._engine = engine
        self._past = past
        self.unsaved: Record = []
        """New events that were not stored yet; the owner of the object removes them."""
        self.has_replayed = asyncio.Event()
        """Set when the reader of the stream has processed the events of the past, and waits for new ones."""

    @property
    def facts(self) -> ModelFacts:
        """Facts about the model."""
        return self._engine.facts

    async def generate(self, generations: Sequence[Generation]) -> Stream:
        """Submit the sequences that have not ended in the past; see `TextEngine.generate`."""
        tokens: list[list[int]] = [[] for _ in generations]
        ended: set[int] = set()
        replayed: list[StreamEvent] = []
        for event in self._past:
            index, sequence = event[0], generations[event[0]].sequence
            if len(event) == 5:
                _, token, logprob, top, cached = event
                replayed.append(Emitted(sequence, len(tokens[index]), token, logprob, top, cached))
                tokens[index].append(token)
                continue
            ended.add(index)
            if event[1] is not None:
                replayed.append(Finished(sequence, event[1], len(tokens[index])))
        rest = [
            generation.model_copy(update={"emitted": tuple(tokens[index])})
            for index, generation in enumerate(generations)
            if index not in ended
        ]
        stream = await self._engine.generate(rest) if rest else None
        indexes = {generation.sequence: index for index, generation in enumerate(generations)}
        return _RecordedStream(stream, indexes, ended, replayed, self)


class _RecordedStream:
    """Events of the past, followed by those of a stream, which are recorded; see `engine.Stream`."""

    def __init__(
        self,
        stream: Stream | None,
        indexes: dict[int, int],
        ended: set[int],
        replayed: list[StreamEvent],
        recording: RecordingEngine,
    ) -> None:
        self._stream = stream
        self._indexes = indexes
        self._ended = ended
        self._replayed = replayed
        self._num_replayed = 0
        self._record = recording.unsaved
        self._has_replayed = recording.has_replayed

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Sequence[StreamEvent]:
        start = self._num_replayed
        if start < len(self._replayed):
            await asyncio.sleep(0)
            self._num_replayed = start + _REPLAYED_AT_ONCE
            return self._replayed[start : self._num_replayed]
        self._has_replayed.set()
        if self._stream is None:
            raise StopAsyncIteration
        events = await anext(self._stream)
        for event in events:
            index = self._indexes[event.sequence]
            if isinstance(event, Emitted):
                self._record.append((index, event.token, event.logprob, event.top, event.cached_tokens))
            elif isinstance(event, Finished) and event.reason != "cancelled":
                self._ended.add(index)
                self._record.append((index, event.reason))
        return events

    def complete(self, sequence: int) -> None:
        index = self._indexes[sequence]
        if index not in self._ended:
            self._ended.add(index)
            self._record.append((index, None))
        if self._stream is not None:
            self._stream.complete(sequence)

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
