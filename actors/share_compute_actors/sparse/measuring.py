"""Measures a sparse model at the end of each pass, while training continues."""

from __future__ import annotations

import queue
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError

from share_compute.errors import StaleEpoch
from share_compute.sparse.measuring.evaluation import SparseEvaluation, evaluation_of
from share_compute.sparse.measuring.tallies import merged, tally_from
from share_compute.sparse.settings import SparseSettings
from share_compute_actors.sparse.messages import FROZEN, TALLY
from share_compute_actors.wire import unpack_answer

_WAIT_S = 1.0


class Measurement(NamedTuple):
    """Metrics at the end of a pass."""

    step: int
    """Minibatches in the finished passes of the worker that has most."""
    found: SparseEvaluation


class PassMeasuring:
    """Measures the model on the held-out rows of all workers, in a separate thread.

    At the end of a pass, the servers keep a snapshot. Each worker requests the rows of weights that its held-out rows
    touch, and returns a tally. So no machine needs all weights or all held-out rows.

    Passes that end during a measurement are not measured, except the next one and the last one.

    Args:
        settings: settings of the model.
        minibatches: number of minibatches of each worker in a pass.
        firsts: number of earlier pushes of each worker when training begins.
    """

    def __init__(
        self, settings: SparseSettings, minibatches: Sequence[int], firsts: Mapping[int, int]
    ) -> None:
        self._settings, self._minibatches = settings, minibatches
        self._next = min(self._finished(firsts) + 1, settings.passes)
        self._results: queue.SimpleQueue[Measurement] = queue.SimpleQueue()
        self._pool = ThreadPoolExecutor(1, "measuring")
        self._running: Future[None] | None = None
        self._servers: list[Any] | None = None

    @property
    def is_done(self) -> bool:
        """Whether the last pass was measured, and the results were taken."""
        return self._next > self._settings.passes and self._results.empty()

    def wait(self, timeout_s: float) -> None:
        """Wait for the thread."""
        if self._running is not None:
            wait([self._running], timeout_s)

    def use(self, servers: Sequence[Any]) -> None:
        """Set the servers; the thread stops waiting for any former server."""
        self._servers = list(servers)

    def go_on(self, servers: Sequence[Any], workers: Sequence[Any]) -> bool:
        """Begin, or restart after a loss; return whether a machine was lost since the last call.

        Raises:
            ShareComputeError: a worker failed.
        """
        was_lost = False
        if self._running is not None and self._running.done():
            try:
                self._running.result()
            except (RayError, StaleEpoch):
                was_lost = True
            self._running = None
        if self._running is None and self._next <= self._settings.passes:
            self.use(servers)
            self._running = self._pool.submit(self._measure, list(servers), list(workers))
        return was_lost

    def results(self) -> list[Measurement]:
        """Return new measurements."""
        found = []
        while not self._results.empty():
            found.append(self._results.get())
        return found

    def close(self) -> None:
        """End the thread, once its calls have failed or returned."""
        self._servers = None
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _finished(self, clocks: Mapping[int, int]) -> int:
        """Return the number of passes that all workers have finished."""
        return min(clocks.get(worker, 0) // count for worker, count in enumerate(self._minibatches))

    def _measure(self, servers: list[Any], workers: list[Any]) -> None:
        calls = self._freeze(self._next, servers)
        while self._next <= self._settings.passes:
            number = self._next
            frozen = [unpack_answer(FROZEN, answer, "a server") for answer in self._got(calls, servers)]
            finished = max(number, min(self._finished(dict(answer.clocks)) for answer in frozen))
            # The next pass may end before this pass is measured.
            calls = self._freeze(finished + 1, servers) if finished < self._settings.passes else []
            found = self._measured(number, servers, workers)
            self._results.put(Measurement(finished * max(self._minibatches), found))
            self._next = finished + 1

    def _got(self, calls: list[Any], servers: list[Any]) -> list[Any]:
        """Return the answers, which come at the end of a pass.

        Raises:
            StaleEpoch: a range has another server now, so an answer might never come.
        """
        while ray.wait(calls, num_returns=len(calls), timeout=_WAIT_S)[1]:
            if self._servers != servers:
                raise StaleEpoch("a range has another server now")
        return list(ray.get(calls))

    def _freeze(self, number: int, servers: list[Any]) -> list[Any]:
        clock = number * max(self._minibatches)
        return [server.freeze.remote(index, clock, "measuring") for index, server in enumerate(servers)]

    def _measured(self, number: int, servers: list[Any], workers: list[Any]) -> SparseEvaluation:
        clock = number * max(self._minibatches)
        try:
            answers = ray.get([worker.measure.remote(clock, *servers) for worker in workers])
        finally:
            for index, server in enumerate(servers):
                server.thaw.remote(index, clock, "measuring")
        contents = [unpack_answer(TALLY, answer, "a worker").content for answer in answers]
        tally = merged(tally_from(bytes(content)) for content in contents)
        return evaluation_of(self._settings.build_model(), tally)
