"""Hogwild on Ray: one process trains with threads that share all rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import ray

from share_compute.errors import VerificationFailed
from share_compute.sparse.blocks import Block
from share_compute.sparse.hogwild import HogwildTraining
from share_compute.sparse.keys import KeyCache
from share_compute.sparse.messages import decode, encode
from share_compute.sparse.minibatches import minibatches_of
from share_compute.sparse.replica import ReplicaSnapshot
from share_compute.sparse.settings import SparseSettings
from share_compute.sparse.snapshots import snapshot_bytes, snapshot_of
from share_compute.sparse.table import RowValues
from share_compute_actors.group.answering import answered, answers
from share_compute_actors.sparse.messages import SETTINGS
from share_compute_actors.sparse.nodes import on_node
from share_compute_actors.sparse.source import PIECE_BYTES, fetched
from share_compute_actors.unpickling import refuse_pickles
from share_compute_actors.wire import COUNT, Content, Natural, Schema, WithContent

WAIT_S = 0.2
"""Longest wait for the answer of the process before the run is watched again, in seconds."""
_NAME = "the process of the threads"


class PassAnswer(NamedTuple):
    """Result of a pass."""

    rows: Natural
    """Rows of data."""
    loss: float
    """Mean loss of the minibatches, each measured before its own update."""


class SnapshotAnswer(NamedTuple):
    """Description of a snapshot; the process keeps it until the next pass."""

    size_bytes: Natural


PASS_DONE: Schema[PassAnswer] = Schema(PassAnswer)
SNAPSHOT: Schema[SnapshotAnswer] = Schema(SnapshotAnswer)
WEIGHTS = WithContent(Schema(Natural))
"""All rows of weights, after their number."""


@ray.remote(num_cpus=0)
class HogwildProcess:
    """Trains with threads.

    Args:
        settings: a packed `SparseSettings`.
    """

    def __init__(self, settings: bytes) -> None:
        refuse_pickles()
        self._settings: SparseSettings = SETTINGS.unpack(settings, "the coordinator")
        self._training: HogwildTraining | None = None
        self._blocks: list[Block] = []
        self._restored = bytearray()
        self._snapshot = b""

    def restore(self, part: bytes) -> None:
        """Add a part of the initial snapshot."""
        self._restored += part

    @answers(COUNT)
    def load(self, files: Sequence[str], source: Any, threads: int) -> int:
        """Fetch the rows, and return their number."""
        settings = self._settings
        self._blocks = [
            block
            for number, file in enumerate(files)
            for block in minibatches_of(
                fetched(source, file),
                settings.batch_size,
                settings.seed + number,
                with_bias=settings.has_bias,
            )
        ]
        restored = snapshot_of(bytes(self._restored)).table if self._restored else None
        self._restored = bytearray()
        model, rule = settings.build_model(), settings.build_rule()
        self._training = HogwildTraining(model, rule, self._blocks, threads, settings.seed, restored)
        return sum(block.rows for block in self._blocks)

    @answers(PASS_DONE)
    def train(self, number: int) -> PassAnswer:
        """Make one pass over the rows; passes count from 0."""
        self._snapshot = b""
        loss = self._loaded().train(number)
        return PassAnswer(sum(block.rows for block in self._blocks), loss)

    @answers(SNAPSHOT)
    def freeze(self) -> SnapshotAnswer:
        """Keep a snapshot of all rows until the next pass."""
        self._snapshot = snapshot_bytes(ReplicaSnapshot(0, {}, frozenset(), (), self._loaded().snapshot()))
        return SnapshotAnswer(len(self._snapshot))

    def part(self, offset: int, size: int) -> bytes:
        """Return a part of the snapshot."""
        return self._snapshot[offset : offset + size]

    @answers(WEIGHTS)
    def weights(self) -> Content:
        """Return the weights of all rows."""
        rows = self._loaded().table().everything()
        return Content(len(rows.places), encode(rows, "float32", with_places=True))

    def _loaded(self) -> HogwildTraining:
        if self._training is None:
            raise VerificationFailed("a process was asked to train before it had rows")
        return self._training


class HogwildRun:
    """Trains one sparse model with threads on one Ray node.

    Args:
        settings: settings of the model.
        files: prepared files.
        node: the Ray node.
        source: actor that serves the rows; see `fetched`.
        threads: number of threads.
        watch: called several times a second while the process reads its rows; its errors end the run.
        restored: initial snapshot, in parts; empty for none.
    """

    def __init__(
        self,
        settings: SparseSettings,
        files: Sequence[str],
        node: str,
        source: Any,
        threads: int,
        watch: Callable[[], None] = lambda: None,
        restored: Iterable[bytes] = (),
    ) -> None:
        there = on_node(node)
        self._width = settings.build_model().width
        self._actor: Any = (
            cast("Any", HogwildProcess).options(scheduling_strategy=there).remote(SETTINGS.pack(settings))
        )
        try:
            for part in restored:
                ray.get(self._actor.restore.remote(part))
            answered(COUNT, self._waited(self._actor.load.remote(list(files), source, threads), watch), _NAME)
        except BaseException:
            self.close()
            raise

    def train(self, number: int, watch: Callable[[], None]) -> PassAnswer:
        """Make one pass over the rows.

        Args:
            number: number of the pass, from 0.
            watch: called several times a second; its errors end the run.
        """
        return answered(PASS_DONE, self._waited(self._actor.train.remote(number), watch), _NAME)

    def snapshot(self) -> Iterator[bytes]:
        """Yield a snapshot of all rows in parts; see `snapshot_bytes`."""
        size_bytes = answered(SNAPSHOT, self._actor.freeze.remote(), _NAME).size_bytes
        for offset in range(0, size_bytes, PIECE_BYTES):
            part = ray.get(self._actor.part.remote(offset, PIECE_BYTES))
            if not isinstance(part, bytes) or len(part) != min(PIECE_BYTES, size_bytes - offset):
                raise VerificationFailed(f"{_NAME} does not keep its snapshot any more")
            yield part

    def weights(self) -> RowValues:
        """Return the weights of all rows."""
        answer = answered(WEIGHTS, self._actor.weights.remote(), _NAME)
        return decode(bytes(answer.content), KeyCache(), self._width)

    def close(self) -> None:
        """End the process."""
        ray.kill(self._actor)

    def _waited(self, call: Any, watch: Callable[[], None]) -> Any:
        while not ray.wait([call], timeout=WAIT_S)[0]:
            watch()
        return call
