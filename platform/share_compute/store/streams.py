"""Rows of resumable streams: the request of each stream, and its events so far."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal, NamedTuple

from sqlalchemy import ColumnElement, delete, func, select, true, update
from sqlalchemy.orm import Session

from share_compute.store.database.database import Database
from share_compute.store.database.tables import StreamPartRow, StreamRow
from share_compute.store.records import Record

_REMEMBERED = timedelta(hours=1)
"""Time for which the id of an expired stream is kept, so that its owner is told that the stream has expired."""
_MOST_EXPIRED = 20_000
"""Largest number of expired streams whose ids are kept."""


class StreamRecord(Record):
    """A resumable stream of the OpenAI API, without its events."""

    id: str
    owner: str
    """Id of the API key that may read the stream."""
    deployment_id: str
    model: str
    """Name of the deployment."""
    kind: Literal["chat", "completion"]
    request: dict[str, Any] | None
    """Body of the request without the prompt, and with the drawn seed; null after the stream expired."""
    prompts: tuple[tuple[int, ...], ...] | None
    """Token ids of each prompt; null after the stream expired."""
    answer_id: str
    """Value of ``id`` in the chunks."""
    created: int
    """Value of ``created`` in the chunks, in seconds since 1970."""
    tokens: int
    """Tokens of the prompts and answers: the largest possible number until the stream is over, then the real one."""
    is_over: bool = False
    """Whether the answers are complete, or cannot be continued."""
    expired_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """Largest number of unexpired streams, and of their tokens (see `StreamRecord.tokens`)."""

    streams: int = 256
    streams_of_key: int = 32
    tokens: int = 1 << 22
    tokens_of_key: int = 1 << 20


class NewEvents(NamedTuple):
    """Events of a stream that are not stored yet."""

    events: Sequence[Any]
    """The events, as JSON values."""
    tokens: int | None = None
    """Number of tokens of the whole stream if the stream is over, else None."""


class StreamLog:
    """The tables of resumable streams and their events."""

    def __init__(self, database: Database, clock: Callable[[], datetime]) -> None:
        self._database = database
        self._clock = clock

    def create(self, stream: StreamRecord, limits: StreamLimits) -> list[str] | None:
        """Store a new stream; return the ids of the streams that expired to make space for it.

        Only finished streams expire to make space, oldest first. Return None, and change nothing, if there is no space.
        """
        now = self._clock()
        mine, whole = StreamRow.owner == stream.owner, true()
        expired: list[str] = []
        try:
            with self._database.write() as session:
                _make_space(
                    session, stream.tokens, limits.streams_of_key, limits.tokens_of_key, mine, expired, now
                )
                _make_space(session, stream.tokens, limits.streams, limits.tokens, whole, expired, now)
                session.add(StreamRow(**stream.model_dump(mode="python"), stored_at=now, read_at=now))
        except _Full:
            return None
        return expired

    def get(self, stream_id: str) -> StreamRecord | None:
        """Return a stream, which may have expired; None if no stream has this id."""
        with self._database.read() as session:
            row = session.get(StreamRow, stream_id)
            return None if row is None else StreamRecord.model_validate(row)

    def events(self, stream_id: str) -> list[Any]:
        """Return the stored events of a stream, in order."""
        query = select(StreamPartRow.events).where(StreamPartRow.stream_id == stream_id)
        with self._database.read() as session:
            return [event for part in session.scalars(query.order_by(StreamPartRow.number)) for event in part]

    def append(self, news: Mapping[str, NewEvents]) -> None:
        """Store new events of streams, by stream id, in one transaction; skip streams that have expired."""
        now = self._clock()
        with self._database.write() as session:
            for stream_id, new in news.items():
                row = session.get(StreamRow, stream_id)
                if row is None or row.expired_at is not None:
                    continue
                row.read_at = now
                if new.tokens is not None:
                    row.is_over, row.tokens = True, new.tokens
                if new.events:
                    last = select(func.max(StreamPartRow.number)).where(StreamPartRow.stream_id == stream_id)
                    number = (session.scalar(last) or 0) + 1
                    session.add(StreamPartRow(stream_id=stream_id, number=number, events=list(new.events)))

    def touch(self) -> None:
        """Restart the time without a reader for all unexpired streams."""
        with self._database.write() as session:
            session.execute(
                update(StreamRow).where(StreamRow.expired_at.is_(None)).values(read_at=self._clock())
            )

    def expire(self, stream_ids: Collection[str]) -> None:
        """Delete the requests, prompts and events of streams; their ids stay known for an hour."""
        with self._database.write() as session:
            _expire(session, stream_ids, self._clock())

    def expire_unread(self, keep_s: float, but: Collection[str]) -> None:
        """Expire the streams without a reader for ``keep_s`` seconds, except some; forget streams expired long ago."""
        now = self._clock()
        is_old = (StreamRow.expired_at.is_(None), StreamRow.read_at < now - timedelta(seconds=keep_s))
        unread = select(StreamRow.id).where(*is_old, StreamRow.id.not_in(but))
        forgotten = StreamRow.expired_at < now - _REMEMBERED
        newest = select(StreamRow.expired_at).where(StreamRow.expired_at.is_not(None))
        with self._database.read() as session:
            ids = session.scalars(unread).all()
            limit = session.scalar(
                newest.order_by(StreamRow.expired_at.desc()).offset(_MOST_EXPIRED).limit(1)
            )
            if limit is not None:
                forgotten = StreamRow.expired_at <= max(limit, now - _REMEMBERED)
            is_any = session.scalar(select(StreamRow.id).where(forgotten).limit(1)) is not None
        if ids or is_any:
            with self._database.write() as session:
                _expire(session, ids, now)
                session.execute(delete(StreamRow).where(forgotten))


class _Full(Exception):
    """Raised to roll back a transaction if there is no space for a new stream."""


def _make_space(
    session: Session,
    tokens: int,
    most_streams: int,
    most_tokens: int,
    among: ColumnElement[bool],
    expired: list[str],
    now: datetime,
) -> None:
    """Expire streams that are over, until one more stream is within both limits; add their ids to ``expired``."""
    kept = (among, StreamRow.expired_at.is_(None))
    usage = select(func.count(), func.coalesce(func.sum(StreamRow.tokens), 0)).select_from(StreamRow)
    over = select(StreamRow.id).where(*kept, StreamRow.is_over).order_by(StreamRow.stored_at, StreamRow.id)
    while True:
        streams, used = session.execute(usage.where(*kept)).one()
        if streams < most_streams and used + tokens <= most_tokens:
            return
        oldest = session.scalar(over.limit(1))
        if oldest is None:
            raise _Full
        _expire(session, [oldest], now)
        expired.append(oldest)


def _expire(session: Session, stream_ids: Collection[str], now: datetime) -> None:
    session.execute(delete(StreamPartRow).where(StreamPartRow.stream_id.in_(stream_ids)))
    session.execute(
        update(StreamRow)
        .where(StreamRow.id.in_(stream_ids), StreamRow.expired_at.is_(None))
        .values(expired_at=now, request=None, prompts=None, tokens=0, is_over=True)
    )
