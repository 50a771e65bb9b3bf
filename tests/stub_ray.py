"""A stand-in for Ray in one process: calls are futures, and killed actors let their calls fail."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

import pytest
import ray
from ray.exceptions import GetTimeoutError, RayActorError

from share_compute_actors.sparse.messages import (
    FROZEN,
    LOADED,
    REPORT,
    FrozenAnswer,
    LoadedAnswer,
    WorkerReport,
)
from share_compute_actors.wire import COUNT, pack_answer

NODES = [letter * 56 for letter in "abc"]
"""Ids of the cluster's nodes."""
BLOCKED_S = 240
"""Time after which a call without a deadline counts as blocked."""


class StubActor:
    """An actor whose methods are the keyword arguments; a method may return a future."""

    def __init__(self, node: str, **methods: Callable[..., Any]) -> None:
        self.node, self.methods = node, methods
        self.is_dead = False
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.waiting: list[Future[Any]] = []

    def __getattr__(self, name: str) -> Any:
        actor = self

        class Method:
            @staticmethod
            def remote(*arguments: Any, **_: Any) -> Future[Any]:
                return actor.call(name, arguments)

        return Method

    def call(self, name: str, arguments: tuple[Any, ...]) -> Future[Any]:
        self.calls.append((name, arguments))
        answer: Any = None if self.is_dead or name not in self.methods else self.methods[name](*arguments)
        ref = answer if isinstance(answer, Future) else Future[Any]()
        if self.is_dead:
            ref.set_exception(RayActorError(error_msg="it lacked memory"))
        elif ref is not answer:
            ref.set_result(answer)
        self.waiting.append(ref)
        return ref

    def kill(self) -> None:
        self.is_dead = True
        for ref in self.waiting:
            if not ref.done():
                ref.set_exception(RayActorError(error_msg="it lacked memory"))

    def named(self, name: str) -> list[tuple[Any, ...]]:
        """Return the arguments of the calls of a method."""
        return [arguments for method, arguments in self.calls if method == name]


class StubServer(StubActor):
    """A server with the clocks that a test sets."""

    def __init__(self, node: str) -> None:
        self.clocks_of: dict[int, int] = {}
        super().__init__(
            node,
            serve=lambda _number, _term, backup, **_: backup is not None,
            status=lambda: True,
            clocks=lambda _: [list(each) for each in self.clocks_of.items()],
            freeze=lambda *_: pack_answer(FROZEN, FrozenAnswer(4, tuple(self.clocks_of.items()))),
            frozen_part=lambda *_: b"rows",
        )


class StubWorker(StubActor):
    """A worker whose run ends when a test ends it."""

    def __init__(self, node: str) -> None:
        self.training: Future[Any] = Future()
        super().__init__(
            node,
            load_prepared=lambda *_: pack_answer(LOADED, LoadedAnswer(10, 4)),
            hold_prepared=lambda *_: pack_answer(COUNT, 0),
            run=lambda *_: self.training,
            report=lambda: REPORT.pack(report(1, is_done=False)),
        )

    def end(self, clock: int) -> None:
        self.training.set_result(pack_answer(REPORT, report(clock, is_done=True)))


def report(clock: int, *, is_done: bool) -> WorkerReport:
    return WorkerReport(clock, 10 * clock, 1.0 * clock, 7, 7, is_done=is_done)


class StubClass:
    """An actor class whose actors are kept in `made`."""

    def __init__(self, make: Callable[[str], StubActor]) -> None:
        self.make, self.made = make, list[Any]()

    def options(self, scheduling_strategy: Any) -> Any:
        self.node = scheduling_strategy.node_id
        return self

    def remote(self, *_: Any) -> StubActor:
        self.made.append(self.make(self.node))
        made: StubActor = self.made[-1]
        return made


class StubRay:
    """Stand-ins for Ray's functions, and the nodes of the cluster."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.nodes_alive = NODES
        patch.setattr(ray, "get", self.get)
        patch.setattr(ray, "wait", self.wait)
        patch.setattr(ray, "kill", lambda actor: actor.kill())
        patch.setattr(
            ray, "nodes", lambda: [{"NodeID": node, "Alive": node in self.nodes_alive} for node in NODES]
        )

    def get(self, refs: Any, timeout: float | None = None) -> Any:
        if isinstance(refs, list):
            end = time.monotonic() + (BLOCKED_S if timeout is None else timeout)
            return [self._result(ref, max(end - time.monotonic(), 0.0), timeout) for ref in refs]
        return self._result(refs, BLOCKED_S if timeout is None else timeout, timeout)

    def _result(self, ref: Future[Any], wait_s: float, timeout: float | None) -> Any:
        try:
            return ref.result(wait_s)
        except TimeoutError:
            assert timeout is not None, "a call without a deadline is blocked"
            raise GetTimeoutError("no answer in time") from None

    @staticmethod
    def wait(
        refs: list[Any], num_returns: int = 1, timeout: float | None = None
    ) -> tuple[list[Any], list[Any]]:
        end = time.monotonic() + (BLOCKED_S if timeout is None else timeout)
        while sum(ref.done() for ref in refs) < num_returns and (left := end - time.monotonic()) > 0:
            wait([ref for ref in refs if not ref.done()], left, FIRST_COMPLETED)
        ready = [ref for ref in refs if ref.done()][:num_returns]
        return ready, [ref for ref in refs if ref not in ready]
