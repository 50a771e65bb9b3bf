"""Starts an isolated process, sends it questions, and reads its answers."""

from __future__ import annotations

import os
import select
import subprocess
import time
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from share_compute.errors import ShareComputeError, error_of
from share_compute.program import command_of
from share_compute_actors.machine.confine import clean_environment
from share_compute_actors.machine.processes import tied
from share_compute_api.workers.isolated import messages
from share_compute_api.workers.isolated.messages import HEADER, MOST_ANSWER_BYTES, Question, Reply

_START_S = 120.0
_WORKER = "share_compute_api.workers.isolated.worker"
_PIECE_BYTES = 1 << 20
Result = TypeVar("Result", bound=BaseModel)


class ProcessEnded(Exception):
    """Raised when the process can no longer be used.

    Args:
        status: exit status of the process, negative if a signal ended the process; None if the process sent an invalid
            answer and must be killed.
    """

    def __init__(self, status: int | None) -> None:
        super().__init__(status)
        self.status = status


class OutOfTime(Exception):
    """Raised when the process did not answer in time."""


def bare_environment() -> dict[str, str]:
    """Return the environment of a process that reads submitters' files: no credentials, no downloads, one thread."""
    return clean_environment(os.environ) | {
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": "/nonexistent",
        "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",  # about torch, which most of these processes lack on purpose
        "TOKENIZERS_PARALLELISM": "false",
        "RAYON_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


class IsolatedProcess:
    """A process that answers one question at a time; call `kill` at the end.

    Args:
        memory_bytes: memory limit in addition to the process's own code and libraries (Linux).
        has_torch: whether the process has torch, for questions that need it.

    Raises:
        ProcessEnded: the process did not start.
    """

    def __init__(self, memory_bytes: int, *, has_torch: bool = False) -> None:
        arguments = [str(memory_bytes), *(["torch"] if has_torch else [])]
        self._process = subprocess.Popen(
            tied(command_of(_WORKER, *arguments)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=bare_environment(),
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._in, False)
        os.set_blocking(self._out, False)
        try:
            self._receive(time.monotonic() + _START_S)
        except (OutOfTime, ProcessEnded):
            self.kill()
            raise ProcessEnded(self._process.returncode) from None

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    def ask(self, question: Question[Result], timeout_s: float) -> Result:
        """Return the answer to a question.

        Raises:
            OutOfTime: no answer came in time; the process must be killed.
            ProcessEnded: the process ended, or its answer is invalid; the process must be killed.
            ShareComputeError: the error that the process reported.
        """
        deadline = time.monotonic() + timeout_s
        text = question.model_dump_json().encode()
        self._send(HEADER.pack(len(text)) + text, deadline)
        answer = self._receive(deadline)
        try:
            reply = Reply[question.answer].model_validate_json(answer)  # type: ignore[name-defined]
        except ValidationError:
            raise ProcessEnded(None) from None
        if reply.problem is not None:
            raise _error(reply.problem)
        if reply.result is None:
            raise ProcessEnded(None)
        result: Result = reply.result
        return result

    def interrupt(self) -> None:
        """Kill the process from another thread; `ask` then raises ProcessEnded in its own thread."""
        self._process.kill()

    def kill(self) -> None:
        """Kill the process, and close its pipes."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _send(self, data: bytes, deadline: float) -> None:
        rest = memoryview(data)
        while rest:
            self._wait(self._in, select.POLLOUT, deadline)
            try:
                rest = rest[os.write(self._in, rest[:_PIECE_BYTES]) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise ProcessEnded(self._status()) from None

    def _receive(self, deadline: float) -> bytes:
        (size,) = HEADER.unpack(self._read(HEADER.size, deadline))
        if size > MOST_ANSWER_BYTES:
            raise ProcessEnded(None)
        return self._read(size, deadline)

    def _read(self, size: int, deadline: float) -> bytes:
        pieces = []
        while size:
            self._wait(self._out, select.POLLIN, deadline)
            try:
                piece = os.read(self._out, min(size, _PIECE_BYTES))
            except BlockingIOError:
                continue
            if not piece:
                raise ProcessEnded(self._status())
            pieces.append(piece)
            size -= len(piece)
        return b"".join(pieces)

    def _wait(self, file: int, event: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(file, event)
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not poll.poll(left_s * 1000):
            raise OutOfTime

    def _status(self) -> int:
        """Wait up to 10 s for a process that has closed its pipe, then kill it; return the exit status."""
        try:
            return self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def _error(problem: messages.ErrorMessage) -> ShareComputeError:
    return error_of(problem.code, problem.detail, {"hint": problem.hint, "details": problem.details})
