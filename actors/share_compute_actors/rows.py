"""A member's samples: fetched from the library by step and microbatch, the next step's ahead of time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, TypeVar

import ray
import torch
from numpy.typing import NDArray
from ray.exceptions import RayActorError, RayTaskError
from torch import Tensor

from share_compute.errors import ShareComputeError, Unavailable

Answer = TypeVar("Answer")
Part = Literal["inputs", "targets"]


def library_lost() -> Unavailable:
    """Return the error for a library actor that died."""
    return Unavailable(
        "the library process on the server died",
        mend="look for lack of memory on the server, then resume the job",
    )


def ask_library(call: Callable[[], Answer]) -> Answer:
    """Return what ``call`` returns; what the library raises on purpose comes out as it was raised.

    Raises:
        ShareComputeError: the library raised it.
        Unavailable: the library died.
    """
    try:
        return call()
    except RayTaskError as failure:
        if isinstance(failure.cause, ShareComputeError):
            raise failure.cause from failure
        raise
    except RayActorError as failure:
        raise library_lost() from failure


class Rows:
    """Samples of one part.

    Args:
        library: actor that has them.
        part: what is wanted of each sample.
    """

    def __init__(self, library: Any, part: Part) -> None:
        self._library = library
        self._part = part
        self._asked: dict[tuple[int, int], Any] = {}
        """By step and microbatch: the call that brings them, with others."""

    def expect(self, step: int, microbatches: Collection[int]) -> None:
        """Ask for samples that will be needed, so that they travel meanwhile."""
        missing = [microbatch for microbatch in microbatches if (step, microbatch) not in self._asked]
        if missing:
            call = self._library.train_rows.remote(step, missing, self._part)
            self._asked.update({(step, microbatch): call for microbatch in missing})

    def take(self, step: int, microbatch: int) -> Tensor:
        """Return the samples of one microbatch, ``[batch, ...]``.

        Raises:
            Unavailable: the library died.
        """
        self.expect(step, [microbatch])
        try:
            rows: Mapping[int, NDArray[Any]] = ray.get(self._asked[step, microbatch])
        except RayActorError as failure:
            raise library_lost() from failure
        return torch.tensor(rows[microbatch])

    def forget(self, step: int) -> None:
        """Drop what belongs to this step and those before."""
        self._asked = {key: call for key, call in self._asked.items() if key[0] > step}
