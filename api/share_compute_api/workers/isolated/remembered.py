"""Caches answers of isolated processes during the check of a submission with many similar jobs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel

from share_compute_api.workers.isolated.messages import Question

Result = TypeVar("Result", bound=BaseModel)


class Asks(Protocol):
    """Answers questions about submitters' content; `IsolatedProcesses` is an example."""

    def ask(self, question: Question[Result]) -> Result:
        """Return the answer to a question; block until the answer is available."""
        ...


class RememberedAnswers:
    """Asks each different question once, until a deadline.

    Args:
        processes: the processes that answer.
        limit_s: time from now in which questions are asked, in seconds. The answer to a question that was asked in time
            is awaited.
        out_of_time: returns the error that is raised after this time.
    """

    def __init__(self, processes: Asks, limit_s: float, out_of_time: Callable[[], Exception]) -> None:
        self._processes = processes
        self._deadline = time.monotonic() + limit_s
        self._out_of_time = out_of_time
        self._answers: dict[tuple[type[Any], str], Any] = {}

    def require_time(self) -> None:
        """Raise the given error if the time is over."""
        if time.monotonic() >= self._deadline:
            raise self._out_of_time()

    def ask(self, question: Question[Result]) -> Result:
        """Return the answer to a question, from memory if the question was answered before.

        Raises:
            Exception: the given error, if the time is over, and all errors of the processes.
        """
        key = (type(question), question.model_dump_json())
        if key not in self._answers:
            self.require_time()
            self._answers[key] = self._processes.ask(question)
        found: Result = self._answers[key]
        return found
