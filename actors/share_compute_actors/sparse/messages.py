"""Messages between workers and servers of sparse models. Rows follow each header as bytes of `share_compute.sparse`."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

from share_compute.sparse.settings import SparseSettings
from share_compute_actors.wire import Natural, Schema, WithContent

FrozenUse: TypeAlias = Literal["checkpoint", "measuring"]
"""Use of a snapshot that a server keeps."""


class PushHeader(NamedTuple):
    """Header of a push, and of an entry of the log."""

    range: Natural
    worker: Natural
    clock: Natural
    examples: Natural
    is_last: bool
    acknowledged: Natural


class EntryHeader(NamedTuple):
    """Header of an entry that a server sends its backup."""

    term: Natural
    number: Natural
    push: PushHeader


class PushAnswer(NamedTuple):
    """Answer to a push, when it is on server and backup."""

    acknowledged: Natural
    """Last clock of the worker that is on both; 0 if the push was not stored."""
    expected: Natural = 0
    """Clock of a push that is missing; 0 if none is."""
    lacks_keys: bool = False
    """Whether the list of keys has to be sent."""


class PullHeader(NamedTuple):
    """Header of a pull; its content is the wanted places."""

    range: Natural
    worker: Natural
    clock: Natural


class PullAnswer(NamedTuple):
    """Header of the answer to a pull; its content is the rows."""

    lacks_keys: bool
    totals: tuple[float, ...] = ()
    """Sum of the weights of all rows of the range."""
    rows: Natural = 0
    """Number of rows of the range."""


class StoredAnswer(NamedTuple):
    """Answer of a backup."""

    term: Natural
    number: Natural
    is_stored: bool
    lacks_keys: bool = False


class FrozenAnswer(NamedTuple):
    """Description of a snapshot that a server keeps until it is released."""

    size_bytes: Natural
    """Size of the snapshot; 0 if it is for measuring."""
    clocks: tuple[tuple[Natural, Natural], ...]
    """Last clock of each worker in the snapshot, by worker."""


class BagPart(NamedTuple):
    """Counts of a part of a bag of words."""

    file: Natural
    entries: Natural
    first: int
    """First document; -1 if there is none."""
    last: int


class LoadedAnswer(NamedTuple):
    """Rows that a worker read."""

    rows: Natural
    minibatches: Natural
    held: Natural = 0
    """Rows that were held out for measurements."""
    bags: tuple[BagPart, ...] = ()
    """Counts of each part, for bags of words."""


class WorkerReport(NamedTuple):
    """Progress of a worker."""

    clock: Natural
    examples: Natural
    """Rows of data in all its minibatches so far."""
    loss: float
    """Sum of the losses of these rows, each before its own update."""
    sent_bytes: Natural
    received_bytes: Natural
    is_done: bool


SETTINGS: Schema[SparseSettings] = Schema(SparseSettings)
PUSH = WithContent(Schema(PushHeader))
ENTRY = WithContent(Schema(EntryHeader))
PUSHED: Schema[PushAnswer] = Schema(PushAnswer)
PULL = WithContent(Schema(PullHeader))
PULLED = WithContent(Schema(PullAnswer))
STORED: Schema[StoredAnswer] = Schema(StoredAnswer)
FROZEN: Schema[FrozenAnswer] = Schema(FrozenAnswer)
LOADED: Schema[LoadedAnswer] = Schema(LoadedAnswer)
TALLY = WithContent(Schema(Natural))
"""A tally as bytes, after its number of rows."""
REPORT: Schema[WorkerReport] = Schema(WorkerReport)
