"""A member's samples: fetched from the library by step and microbatch, the next step's ahead of time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, TypeVar

import ray
import torch
from numpy.typing import NDArray
from ray.exceptions import ObjectLostError, RayActorError
from torch import Tensor

from share_compute.errors import LibraryLost
from share_compute_actors.wire import Packs, unpack_answer

Answer = TypeVar("Answer")
Part = Literal["inputs", "targets"]


def library_lost() -> LibraryLost:
    """Return the error for a library actor that died."""
    return LibraryLost(
        "the library process on the server died",
        mend="look for lack of memory on the server, then resume the job",
    )


def ask_library(schema: Packs[Answer], asked: Any) -> Answer:
    """Wait for what the library answers to the coordinator, and return it.

    Args:
        schema: of what the method returns.
        asked: the reference that the call gave.

    Raises:
        ShareComputeError: the library raised it.
        LibraryLost: the library died.
    """
    try:
        return unpack_answer(schema, ray.get(asked), "the library")
    except RayActorError as failure:
        raise library_lost() from failure


class Rows:
    """Samples of one part.

    Args:
        library: actor that has them.
        part: what is wanted of each sample.
        tell_lost: told when the library died; who wants samples then waits for another one. None: it fails.
    """

    def __init__(
        self, library: Any, part: Part, tell_lost: Callable[[LibraryLost], None] | None = None
    ) -> None:
        self._library = library
        self._part = part
        self._tell_lost = tell_lost
        self._changed = threading.Condition()
        self._asked: dict[tuple[int, int], tuple[Any, Any]] = {}
        """By step and microbatch: who was asked, and the call that brings them, with others."""

    def use(self, library: Any) -> None:
        """Ask another library from now on; may be called from any thread."""
        with self._changed:
            self._library = library
            self._changed.notify_all()

    def expect(self, step: int, microbatches: Collection[int]) -> None:
        """Ask for samples that will be needed, so that they travel meanwhile."""
        missing = [microbatch for microbatch in microbatches if (step, microbatch) not in self._asked]
        if missing:
            library = self._library
            call = library.train_rows.remote(step, missing, self._part)
            self._asked.update({(step, microbatch): (library, call) for microbatch in missing})

    def take(self, step: int, microbatch: int) -> Tensor:
        """Return the samples of one microbatch, ``[batch, ...]``.

        Raises:
            LibraryLost: the library died, and nobody waits for another one.
        """
        while True:
            self.expect(step, [microbatch])
            library, call = self._asked[step, microbatch]
            try:
                rows: Mapping[int, NDArray[Any]] = ray.get(call)
            except (RayActorError, ObjectLostError) as failure:
                self._asked.clear()
                self._await_other(library, failure)
            else:
                return torch.tensor(rows[microbatch])

    def _await_other(self, lost: Any, failure: RayActorError | ObjectLostError) -> None:
        if self._tell_lost is None:
            raise library_lost() from failure
        with self._changed:
            if self._library is lost:  # inside, so that who brings another one is not told of the one before
                self._tell_lost(library_lost())
            self._changed.wait_for(lambda: self._library is not lost)

    def forget(self, step: int) -> None:
        """Drop what belongs to this step and those before."""
        self._asked = {key: call for key, call in self._asked.items() if key[0] > step}
