"""Computes several slices of a sequence in one process, each on its own thread.

Only one of these threads computes at a time, in the order of slices: a thread runs until its attention needs tensors of
the other slices. So the results do not depend on the scheduling of threads. One slice needs no thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from torch import Tensor

from share_compute.models.huggingface.ring_attention import SequenceSlice, computing_slice

_T = TypeVar("_T")
Outgoing = Mapping[int, Sequence[Tensor]]
"""Tensors by the index of their slice."""
Exchange = Callable[[Outgoing], dict[int, list[Tensor]]]
"""Function that gives the tensors of this process's slices to the next slice each, and returns those that they get."""


def among_themselves(given: Outgoing) -> dict[int, list[Tensor]]:
    """Exchange the tensors of all slices; all slices must be in this process."""
    count = len(given)
    return {index: [each.clone() for each in given[(index - 1) % count]] for index in given}


class _Ended(Exception):
    """Another slice of this process has failed."""


class LocalRing:
    """The slices of this process on the ring of all slices.

    Args:
        indices: indices of the slices of this process.
        exchange: called for each turn of the ring, with the tensors of all these slices.
    """

    def __init__(self, indices: Sequence[int], exchange: Exchange = among_themselves) -> None:
        self._indices = sorted(indices)
        self._exchange = exchange
        self._changed = threading.Condition()
        self._given: dict[int, Sequence[Tensor]] = {}
        self._taken: dict[int, list[Tensor]] = {}
        self._running: int | None = self._indices[0]
        """Index of the slice whose thread computes."""
        self._failed = False
        self._resume: Callable[[int], None] = lambda _: None

    def turn(self, index: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        """See `Ring.turn`."""
        self._given[index] = tensors
        if index == self._indices[-1]:
            self._taken = self._exchange(self._given)
            self._given = {}
        if not self.is_single:
            self._pass_on(index)
            self._await(index)
        return self._taken.pop(index)

    def _pass_on(self, index: int) -> None:
        with self._changed:
            place = self._indices.index(index) + 1
            self._running = self._indices[place % len(self._indices)]
            self._changed.notify_all()

    def _await(self, index: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._failed or self._running == index)
            if self._failed:
                raise _Ended
        self._resume(index)

    @property
    def is_single(self) -> bool:
        """Whether this process has one slice."""
        return len(self._indices) == 1

    def run(
        self,
        count: int,
        tasks: Mapping[int, Callable[[], _T]],
        resume: Callable[[int], None] = lambda _: None,
    ) -> dict[int, _T]:
        """Run the task of each slice of this process in `computing_slice`; return their results by index.

        Args:
            count: number of slices of the sequence.
            tasks: tasks by index of the slice. All of them call attention equally often.
            resume: called with the index of a slice each time that its task begins or continues.

        Raises:
            Exception: the error of the first task that failed.
        """
        self._resume = resume
        if self.is_single:
            (index,) = self._indices
            resume(index)
            with computing_slice(SequenceSlice(index, count, self)):
                return {index: tasks[index]()}
        self._running, self._failed = self._indices[0], False
        found: dict[int, _T] = {}
        errors: list[BaseException] = []

        def compute(index: int) -> None:
            try:
                self._await(index)
                with computing_slice(SequenceSlice(index, count, self)):
                    found[index] = tasks[index]()
                self._pass_on(index)
            except _Ended:
                pass
            except BaseException as failure:  # noqa: BLE001 - raised again below
                with self._changed:
                    errors.append(failure)
                    self._failed = True
                    self._changed.notify_all()

        threads = [
            threading.Thread(target=compute, args=(index,), name=f"slice-{index}", daemon=True)
            for index in self._indices
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return found
