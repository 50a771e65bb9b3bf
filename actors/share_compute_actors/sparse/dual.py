"""CoCoA on Ray: workers improve the dual variables of their rows; the run adds up their changes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import RayError

from share_compute.errors import ContributorLost, VerificationFailed, first_line
from share_compute.sparse.blocks import Block, block_of, joined
from share_compute.sparse.cocoa import DualProblem, DualWorker, Vector
from share_compute.sparse.keys import Places
from share_compute_actors.group.answering import answered, answers
from share_compute_actors.sparse.losses import ProcessLosses
from share_compute_actors.sparse.nodes import alive, living, on_node
from share_compute_actors.sparse.source import fetched
from share_compute_actors.unpickling import refuse_pickles
from share_compute_actors.wire import Content, Natural, Schema, WithContent

WAIT_S = 0.2
"""Longest wait for an answer of a worker before the run is watched again, in seconds."""


class RoundHeader(NamedTuple):
    """Header of a round; the content is the weights of the worker's places, then its dual variables, as float64."""

    number: Natural
    worker: Natural
    seed: Natural
    passes: Natural
    """Passes over the rows; 0 only measures."""


class RoundAnswer(NamedTuple):
    """Header of an answer; the content is the change for the worker's places, then its new dual variables."""

    primal_sum: float
    dual_sum: float


class PlacesHeader(NamedTuple):
    """Header of a list of places; the content is the places that a worker's rows touch."""

    rows: Natural


PROBLEM: Schema[DualProblem] = Schema(DualProblem)
ROUND = WithContent(Schema(RoundHeader))
ROUND_DONE = WithContent(Schema(RoundAnswer))
PLACES = WithContent(Schema(PlacesHeader))


@ray.remote(num_cpus=0)
class DualRowsWorker:
    """Holds rows of data, and improves their dual variables.

    Args:
        problem: a packed `DualProblem`.
    """

    def __init__(self, problem: bytes) -> None:
        refuse_pickles()
        self._problem = PROBLEM.unpack(problem, "the coordinator")
        self._block: Block | None = None

    @answers(PLACES)
    def load(self, files: Sequence[str], source: Any) -> Content:
        """Fetch the rows, and return the places that they touch."""
        self._block = block_of(joined([fetched(source, file) for file in files]), with_bias=True)
        return Content(PlacesHeader(self._block.rows), self._block.places.tobytes())

    @answers(ROUND_DONE)
    def solve(self, packed: bytes) -> Content:
        """Improve the dual variables, and return the change and the new dual variables."""
        header, content = ROUND.unpack(packed, "the coordinator")
        if self._block is None:
            raise VerificationFailed("a worker was asked to solve before it had rows")
        numbers = np.frombuffer(content, np.float64)
        worker = DualWorker(self._problem, self._block)
        places = len(self._block.places)
        worker.duals = numbers[places:].copy()
        draw = np.random.default_rng((header.seed, header.worker, header.number))
        result = worker.solve(numbers[:places], header.passes, draw)
        body = np.concatenate([result.change, worker.duals]).tobytes()
        return Content(RoundAnswer(result.primal_sum, result.dual_sum), body)


@dataclass(slots=True)
class _Worker:
    files: Sequence[str]
    node: str
    actor: Any
    at: NDArray[np.int64]
    """Index of each of the worker's places among all places."""
    duals: Vector
    has_rows: bool = True
    """Whether the worker's process has loaded its rows."""
    call: Any = None
    """The call that is under way, if there is one."""
    restart_at: float | None = None
    """Time at which another process starts; None if there is one."""


@dataclass(frozen=True, slots=True)
class DualProgress:
    """State of a problem after some rounds."""

    rounds: int
    loss: float
    """Mean loss of a row at these weights, without regularisation."""
    gap: float
    """Bound of the distance of the objective from its optimum."""


class DualRun:
    """Solves one problem on Ray nodes. All state is in this process, so that a lost worker loses one round of work.

    Args:
        problem: the problem.
        files: prepared files of each worker.
        nodes: Ray nodes on which workers run, in turn.
        source: actor that serves the files; see `fetched`.
        seed: seed of the order of rows.
        watch: called several times a second while workers read their rows; its errors end the run.
    """

    def __init__(
        self,
        problem: DualProblem,
        files: Sequence[Sequence[str]],
        nodes: Sequence[str],
        source: Any,
        seed: int,
        watch: Callable[[], None] = lambda: None,
    ) -> None:
        self._problem, self._nodes, self._source, self._seed = problem, list(nodes), source, seed
        self.moved_bytes = 0
        """Bytes of weights and dual variables in messages from and to the workers."""
        self.first = 0
        """Rounds that were finished when this run began."""
        self.finished = 0
        """Rounds that are in `weights` and `duals` while ``watch`` is called."""
        self._packed = PROBLEM.pack(problem)
        self._losses = ProcessLosses()
        self._workers: list[_Worker] = []
        for number, names in enumerate(files):
            node = nodes[number % len(nodes)]
            worker = _Worker(names, node, self._new_actor(node), np.empty(0, np.int64), np.zeros(0))
            self._workers.append(worker)
        calls = [self._load(worker) for worker in self._workers]
        while ray.wait(calls, num_returns=len(calls), timeout=WAIT_S)[1]:
            watch()
        parts: list[Places] = []
        for worker, call in zip(self._workers, calls, strict=True):
            answer = answered(PLACES, call, "a worker")
            worker.duals = np.zeros(answer.header.rows)
            parts.append(np.frombuffer(answer.content, np.uint64).copy())
        self.places: Places = np.unique(np.concatenate(parts))
        """All places, in their order."""
        for worker, places in zip(self._workers, parts, strict=True):
            worker.at = np.searchsorted(self.places, places)
        self.weights: Vector = np.zeros(len(self.places))
        """Weights of all places."""

    @property
    def actors(self) -> list[Any]:
        """Processes of the workers."""
        return [worker.actor for worker in self._workers]

    def restore(self, rounds: int, weights: Vector, duals: Sequence[Vector]) -> None:
        """Begin with the state after some rounds.

        Args:
            rounds: number of finished rounds.
            weights: weight of each place.
            duals: dual variables of each worker.

        Raises:
            VerificationFailed: there are more or fewer numbers than places and rows.
        """
        sizes = [len(weights), *map(len, duals)]
        if sizes != [len(self.weights), *(len(worker.duals) for worker in self._workers)]:
            raise VerificationFailed(
                "the checkpoint has other numbers of keys or rows than the data", hint="submit a new job"
            )
        self.first, self.weights = rounds, weights
        for worker, each in zip(self._workers, duals, strict=True):
            worker.duals = each

    @property
    def duals(self) -> list[Vector]:
        """Dual variables of each worker."""
        return [worker.duals for worker in self._workers]

    def leave(self, node: str) -> bool:
        """Stop using a machine; return False if it is the last one."""
        if node in self._nodes:
            if not living(each for each in self._nodes if each != node):
                return False
            self._nodes.remove(node)
            for worker in self._workers:
                if worker.node == node:
                    ray.kill(worker.actor)  # it repeats its round elsewhere
        return True

    def rounds(self, count: int, watch: Callable[[], None]) -> Iterator[DualProgress]:
        """Run rounds up to a number; yield the state after each round; a restored run first yields the restored state.

        Args:
            count: number of rounds, including those that were finished before.
            watch: called several times a second; its errors end the run.

        Raises:
            ContributorLost: no machine is left.
            UserError: the process of a worker ended too often.
            VerificationFailed: a worker answered with numbers that are not finite.
        """
        problem = self._problem
        for number in range(self.first, count + 1):
            self.finished = number
            # The sums belong to the weights at the beginning of a round, so the last round only measures.
            answers_of = self._round(number, 1 if number < count else 0, watch)
            primal = sum(header.primal_sum for header, _ in answers_of)
            dual = sum(header.dual_sum for header, _ in answers_of)
            if number:
                yield DualProgress(number, primal / problem.rows, problem.gap(self.weights, primal, dual))
            for worker, (_, numbers) in zip(self._workers, answers_of, strict=True):
                if not np.isfinite(numbers).all():
                    raise VerificationFailed(
                        "a worker's update is not finite", hint="scale the features, or raise model.l2"
                    )
                self.weights[worker.at] += problem.scale * numbers[: len(worker.at)]
                worker.duals = numbers[len(worker.at) :]

    def close(self) -> None:
        """End all processes."""
        for worker in self._workers:
            ray.kill(worker.actor)

    def _round(self, number: int, passes: int, watch: Callable[[], None]) -> list[tuple[RoundAnswer, Vector]]:
        for index, worker in enumerate(self._workers):
            worker.call = self._solve(index, number, passes)
        found = dict[int, tuple[RoundAnswer, Vector]]()
        while len(found) < len(self._workers):
            watch()  # `watch` may leave machines, or find that the remaining machines lack memory
            self._restart_when_due()
            calls = {
                worker.call: index for index, worker in enumerate(self._workers) if worker.call is not None
            }
            if calls:
                ready, _ = ray.wait(list(calls), num_returns=len(calls), timeout=WAIT_S)
            else:
                time.sleep(WAIT_S)
                ready = []
            for ref in ready:
                index = calls[ref]
                worker = self._workers[index]
                worker.call = None
                try:
                    if worker.has_rows:
                        answer = answered(ROUND_DONE, ref, f"worker {index}")
                        found[index] = answer.header, self._numbers(index, answer.content)
                    else:
                        answered(PLACES, ref, f"worker {index}")
                        worker.has_rows, worker.call = True, self._solve(index, number, passes)
                except RayError as failure:
                    self._lose(index, number, failure)
        return [found[index] for index in range(len(self._workers))]

    def _numbers(self, index: int, content: bytes | memoryview) -> Vector:
        """Return the changes of weights and the dual variables in the answer of a worker.

        Raises:
            VerificationFailed: there are more or fewer numbers than the worker has.
        """
        worker = self._workers[index]
        wanted = len(worker.at) + len(worker.duals)
        if len(content) != 8 * wanted:
            raise VerificationFailed(
                f"worker {index} on machine {worker.node} answered with {len(content)} bytes, not {8 * wanted}"
            )
        self.moved_bytes += len(content)
        return np.frombuffer(content, np.float64).copy()

    def _solve(self, index: int, number: int, passes: int) -> Any:
        worker = self._workers[index]
        body = np.concatenate([self.weights[worker.at], worker.duals]).tobytes()
        self.moved_bytes += len(body)
        return worker.actor.solve.remote(
            ROUND.pack(Content(RoundHeader(number, index, self._seed, passes), body))
        )

    def _lose(self, index: int, number: int, failure: RayError) -> None:
        """Restart a lost worker; the worker continues with the dual variables of the last round."""
        worker, delay_s = self._workers[index], 0.0
        ray.kill(worker.actor)
        if worker.node in alive(self._nodes):
            delay_s = self._losses.restart_delay_s(index, number, failure)
        worker.restart_at = time.monotonic() + delay_s

    def _restart_when_due(self) -> None:
        for worker in self._workers:
            if worker.restart_at is None or worker.restart_at > time.monotonic():
                continue
            used = Counter(each.node for each in self._workers if each is not worker)
            # Workers stay as evenly distributed as `require_memory` expects.
            worker.node = min(alive(self._nodes), key=lambda node: used[node])
            worker.restart_at, worker.has_rows = None, False
            worker.actor = self._new_actor(worker.node)
            worker.call = self._load(worker)

    def _new_actor(self, node: str) -> Any:
        return cast("Any", DualRowsWorker).options(scheduling_strategy=on_node(node)).remote(self._packed)

    def _load(self, worker: _Worker) -> Any:
        return worker.actor.load.remote(list(worker.files), self._source)


def lost(failure: RayError) -> ContributorLost:
    """Return the error for processes that were lost together."""
    return ContributorLost(
        f"the job's processes were lost: {first_line(failure)}", hint="it is started again"
    )
