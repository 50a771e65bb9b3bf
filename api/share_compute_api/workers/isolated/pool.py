"""A small pool of isolated processes that all requests share, with fair scheduling between sources (`Question.source`).

A chat template, a tokenizer file or a JSON schema may take unlimited time and memory, so each is evaluated in a process
with limits on time and memory. A process that reaches a limit is killed and replaced.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import logging
import signal
import threading
from collections import OrderedDict, deque
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar

from pydantic import BaseModel

from share_compute.errors import Busy, ShareComputeError, Unavailable, UserError
from share_compute.quantities import bytes_text
from share_compute_api.workers.isolated.kept import Kept
from share_compute_api.workers.isolated.messages import (
    OUT_OF_MEMORY,
    OUT_OF_MEMORY_STATUS,
    Load,
    OfTokenizer,
    Question,
)
from share_compute_api.workers.isolated.process import IsolatedProcess, OutOfTime, ProcessEnded

_RETRY_AFTER_S = 5
_MOST_KNOWN = 64
_ABORTS = (-signal.SIGABRT, OUT_OF_MEMORY_STATUS, 127)
"""Exit statuses of a process that ran out of memory.

Libraries written in Rust abort when memory runs out. The dynamic linker ends the process with status 127.
"""
_log = logging.getLogger(__name__)
Result = TypeVar("Result", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Limits of the isolated processes and of their queue."""

    processes: int = 2
    memory_bytes: int = 1 << 30
    """Memory limit of a process, in bytes, in addition to the process's own code and libraries (about 75 MB)."""
    time_s: float = 10.0
    """Time limit for a question, in seconds."""
    load_s: float = 20.0
    """Additional time limit for loading a tokenizer, in seconds."""
    waiting_per_source: int = 64
    """Maximum number of waiting questions per source; more are rejected."""
    waiting: int = 512
    """Maximum number of waiting questions in total; more are rejected."""

    @property
    def per_source(self) -> int:
        """Maximum number of processes for one source. If the pool has several, one is reserved for other sources."""
        return max(1, self.processes - 1)


@dataclass(slots=True)
class _PendingQuestion:
    question: Question[Any]
    future: Future[Any]


class _Turns:
    """Queues of waiting questions, one for each source, served round-robin. The caller must hold the pool's lock."""

    def __init__(self, limits: PoolLimits) -> None:
        self._limits = limits
        self._waiting: OrderedDict[str, deque[_PendingQuestion]] = OrderedDict()
        self._running: dict[str, int] = {}

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, pending: _PendingQuestion) -> None:
        """Add a question to its source's queue.

        Raises:
            Busy: too many questions are already waiting.
        """
        mine = self._waiting.setdefault(pending.question.source, deque())
        if len(mine) >= self._limits.waiting_per_source or len(self) >= self._limits.waiting:
            raise Busy(
                f"{len(mine)} requests wait for {pending.question.subject}",
                hint=f"try again in {_RETRY_AFTER_S} s",
                details={"retry_after_s": _RETRY_AFTER_S},
            )
        mine.append(pending)

    def take(self) -> _PendingQuestion | None:
        """Remove and return the next question of a source below its process limit; None if there is no such question.

        The question counts as running until `done` is called for its source.
        """
        for source, waiting in list(self._waiting.items()):
            if self._running.get(source, 0) >= self._limits.per_source:
                continue
            while waiting:
                pending = waiting.popleft()
                if pending.future.set_running_or_notify_cancel():
                    self._waiting.move_to_end(source)
                    self._running[source] = self._running.get(source, 0) + 1
                    return pending
            del self._waiting[source]
        return None

    def done(self, source: str) -> None:
        """Record that a process finished a question of this source."""
        self._running[source] -= 1
        if not self._running[source]:
            del self._running[source]

    def clear(self) -> list[_PendingQuestion]:
        """Remove and return all waiting questions."""
        found = [pending for waiting in self._waiting.values() for pending in waiting]
        self._waiting.clear()
        return found


class IsolatedProcesses:
    """Pool of isolated processes that answer questions; thread-safe. Call `close` at the end.

    Args:
        limits: limits of the processes.
    """

    def __init__(self, limits: PoolLimits | None = None) -> None:
        self._limits = limits or PoolLimits()
        self._lock = threading.Lock()
        self._turns = _Turns(self._limits)
        self._runners: list[_Runner] = []
        self._idle: list[_Runner] = []
        self._is_closed = False
        self._known: OrderedDict[tuple[str, str], Any] = OrderedDict()
        """Answers and errors of the last questions that needed torch."""

    def ask(self, question: Question[Result]) -> Result:
        """Return the answer to a question; block until the answer is available.

        Raises:
            Busy: too many questions are already waiting.
            UserError: the submitter's content is wrong, or a limit was reached.
            Unavailable: the server is shutting down, no process can be started, or the process was killed.
        """
        if question.needs_torch:
            return self._remembered(question)
        return self._submit(question).result()

    def _remembered(self, question: Question[Result]) -> Result:
        """Return the answer to a question that needs torch; equal questions, which forms repeat, are asked once."""
        key = (type(question).__name__, hashlib.sha256(question.model_dump_json().encode()).hexdigest())
        with self._lock:
            known = self._known.get(key)
        if known is None:
            try:
                known = self._submit(question).result()
            except UserError as failure:
                if "code" in failure.details:  # a limit was reached
                    raise
                known = copy.copy(failure)  # drop the traceback, whose frames hold the question
            with self._lock:
                self._known[key] = known
                if len(self._known) > _MOST_KNOWN:
                    self._known.popitem(last=False)
        if isinstance(known, UserError):
            raise copy.copy(known)
        answer: Result = known
        return answer

    async def answer(self, question: Question[Result]) -> Result:
        """Return the answer to a question, like `ask`, without blocking the event loop; the call may be cancelled."""
        return await asyncio.wrap_future(self._submit(question))

    @property
    def waiting(self) -> int:
        """Number of questions that wait for a process."""
        with self._lock:
            return len(self._turns)

    def pids(self) -> list[int]:
        """Return the process ids of the running processes."""
        return [pid for runner in list(self._runners) if (pid := runner.pid) is not None]

    def close(self) -> None:
        """End all processes; waiting and running questions fail with `Unavailable`."""
        with self._lock:
            self._is_closed = True
            waiting, runners = self._turns.clear(), list(self._runners)
        for pending in waiting:
            if pending.future.set_running_or_notify_cancel():
                pending.future.set_exception(_ending())
        for runner in runners:
            runner.end()

    def _submit(self, question: Question[Result]) -> Future[Result]:
        pending = _PendingQuestion(question, Future())
        with self._lock:
            if self._is_closed:
                raise _ending()
            self._turns.add(pending)
            if not self._idle and len(self._runners) < self._limits.processes:
                runner = _Runner(self._limits, self._finished)
                self._runners.append(runner)
                self._idle.append(runner)
            self._dispatch()
        return pending.future

    def _finished(self, runner: _Runner, pending: _PendingQuestion) -> None:
        with self._lock:
            self._turns.done(pending.question.source)
            self._idle.append(runner)
            self._dispatch()

    def _dispatch(self) -> None:
        while self._idle and (pending := self._turns.take()) is not None:
            # Prefer a runner that has already loaded the tokenizer. For torch, prefer one without a process, because a
            # process with torch would replace it.
            needs_torch = pending.question.needs_torch
            suits = (
                one for one in self._idle if (one.pid is None if needs_torch else one.knows(pending.question))
            )
            runner = next(suits, self._idle[0])
            self._idle.remove(runner)
            runner.give(pending)


class _Runner:
    """A thread that owns one isolated process; the process ends with the thread."""

    def __init__(self, limits: PoolLimits, finished: Any) -> None:
        self._limits = limits
        self._finished = finished
        self._inbox: SimpleQueue[_PendingQuestion | None] = SimpleQueue()
        self._process: IsolatedProcess | None = None
        self._loaded: Kept[object] = Kept()
        self._sources: set[str] = set()
        """Sources of the questions that the process was asked; two of them, if there are more."""
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name="isolated-process", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """Process id; None if no process runs."""
        process = self._process
        return process.pid if process is not None and process.is_running else None

    def knows(self, question: Question[Any]) -> bool:
        """Return whether a question's tokenizer is loaded. Call only from the runner's thread, or while it is idle."""
        return isinstance(question, OfTokenizer) and self._loaded.has(question.folder, question.version)

    def give(self, pending: _PendingQuestion) -> None:
        """Pass a question to the runner's thread."""
        self._inbox.put(pending)

    def end(self) -> None:
        """End the process, even if it is answering a question, and join the thread."""
        self._has_ended = True
        process = self._process
        if process is not None:
            with suppress(ProcessLookupError):
                process.interrupt()
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (pending := self._inbox.get()) is not None:
            try:
                pending.future.set_result(self._answer(pending.question))
            except BaseException as failure:  # noqa: BLE001 - reported to the caller
                pending.future.set_exception(failure)
            self._finished(self, pending)
        self._drop()

    def _answer(self, question: Question[Result]) -> Result:
        """Return the answer to a question.

        If a process runs out of memory or dies, and has answered questions of other sources, what these left in it may
        be the cause. The question is then asked once more, in a new process.
        """
        if self._process is not None and not self._process.is_running:
            self._drop()  # the process ended while it was idle, so no question is the cause
        while True:
            is_shared = not question.needs_torch and not self._sources <= {question.source}
            try:
                return self._ask(question)
            except UserError as failure:
                if not (is_shared and failure.details.get("code") == OUT_OF_MEMORY):
                    raise
                self._drop()
            except OutOfTime:
                self._drop()
                raise self._too_slow(question) from None
            except ProcessEnded as ended:
                self._drop()
                if self._has_ended:
                    raise _ending() from None
                if not is_shared:
                    raise self._died(question, ended.status) from None
            _log.info("%s of %s: asked again in a new process", question.subject, question.source)

    def _ask(self, question: Question[Result]) -> Result:
        if self._has_ended:
            raise _ending()
        if question.needs_torch:
            return self._ask_with_torch(question)
        if self._process is None:
            self._process = _started(self._limits)
            if self._has_ended:  # `end` found no process to interrupt
                raise _ending()
        if len(self._sources) < 2:
            self._sources.add(question.source)
        # `get` marks the tokenizer as used, as the process itself does. Both then evict the same tokenizer.
        if isinstance(question, OfTokenizer) and not self._loaded.get(question.folder, question.version):
            self._loaded.forget(question.folder)
            self._process.ask(Load(folder=question.folder, version=question.version), self._limits.load_s)
            self._loaded.put(question.folder, question.version, object())
        return self._process.ask(question, self._limits.time_s)

    def _ask_with_torch(self, question: Question[Result]) -> Result:
        """Ask a process with torch, and end it afterwards, because it takes several times the memory of the others."""
        self._drop()
        self._process = _started(self._limits, has_torch=True)
        if self._has_ended:  # `end` found no process to interrupt
            raise _ending()
        try:
            answer = self._process.ask(question, self._limits.time_s)
        except ShareComputeError:
            self._drop()
            raise
        self._drop()
        return answer

    def _drop(self) -> None:
        process, self._process, self._loaded, self._sources = self._process, None, Kept(), set()
        if process is not None:
            process.kill()

    def _too_slow(self, question: Question[Any]) -> UserError:
        _log.warning("%s of %s took too long and was ended", question.subject, question.source)
        return UserError(
            f"{question.subject} took more than {self._limits.time_s:g} s on this request, or "
            f"{self._limits.load_s:g} s to load",
            hint=question.hint,
            details={"code": "too_much_time"},
        )

    def _died(self, question: Question[Any], status: int | None) -> ShareComputeError:
        _log.warning("the process for %s of %s ended: %s", question.subject, question.source, status)
        if status in _ABORTS:
            return UserError(
                f"{question.subject} took more than {bytes_text(self._limits.memory_bytes)} of memory "
                "on this request",
                hint=question.hint,
                details={"code": OUT_OF_MEMORY},
            )
        if status == -signal.SIGKILL:
            return Unavailable(
                f"the process for {question.subject} was killed; the server may be out of memory",
                hint="try again",
            )
        return UserError(
            f"{question.subject} made its process crash",
            hint="use the files that the model was published with",
        )


def _started(limits: PoolLimits, *, has_torch: bool = False) -> IsolatedProcess:
    try:
        return IsolatedProcess(limits.memory_bytes, has_torch=has_torch)
    except (ProcessEnded, OSError) as failure:
        _log.exception("a process for tokenizers does not start")
        raise Unavailable(
            "the server cannot start a process for tokenizers", hint="look into its log, and try again"
        ) from failure


def _ending() -> Unavailable:
    return Unavailable("the server ends", hint="ask again in a while")
