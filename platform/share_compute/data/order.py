"""Selects the samples of each training step, and of each microbatch in jobs with several tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from share_compute.models.objective import task_of


def keyed_permutation(size: int, *key: int) -> NDArray[np.int64]:
    """Return the permutation of ``range(size)`` that ``key`` determines, as a read-only array of shape ``[size]``."""
    # NumPy guarantees that the raw bits of Philox never change. Generator.permutation may change (NEP 19).
    bits = np.random.Philox(np.random.SeedSequence(key)).random_raw(size)
    order = np.argsort(bits, kind="stable").astype(np.int64, copy=False)
    order.flags.writeable = False
    return order


# Successive steps use the same pass or the next pass, so only a few permutations are cached.
_pass_order = lru_cache(maxsize=4)(keyed_permutation)


@dataclass(frozen=True, slots=True)
class StepOrder:
    """The order in which training visits its samples.

    A pass visits every sample exactly once (other libraries call it an epoch). A batch may span several passes, so no
    sample is dropped. The samples of a step depend only on these fields and the number of the step.

    Branches of a job divide the samples: a step of all branches takes ``branches * batch_size`` consecutive samples, in
    the order of the branches. So the branches together use the samples of one job with the larger batch size.

    Raises:
        ValueError: ``size``, ``batch_size`` or ``branches`` is less than 1, ``seed`` is negative, or the branch does
            not exist.
    """

    seed: int
    size: int
    """Samples in one pass, at least 1."""
    batch_size: int
    """Samples in one step, at least 1."""
    shuffle: bool = True
    """Whether each pass has its own permutation, keyed by seed and pass. If not, samples are visited in index order."""
    branches: int = 1
    """Number of branches, at least 1."""
    branch: int = 0
    """Branch whose samples are selected, from 0."""

    def __post_init__(self) -> None:
        if self.size < 1 or self.batch_size < 1 or self.seed < 0:
            raise ValueError("size and batch_size must be at least 1, seed at least 0")
        if self.branch not in range(self.branches):
            raise ValueError(f"there is no branch {self.branch} of {self.branches}")

    def indices(self, step: int) -> NDArray[np.int64]:
        """Return the indices of the samples of a step, shape ``[batch_size]``.

        Raises:
            ValueError: ``step`` is less than 1; steps are counted from 1.
        """
        pass_number, offset = self.position(step)
        chosen = np.empty(self.batch_size, dtype=np.int64)
        filled = 0
        while filled < self.batch_size:
            count = min(self.size - offset, self.batch_size - filled)
            chosen[filled : filled + count] = self._of_pass(pass_number)[offset : offset + count]
            filled += count
            pass_number, offset = pass_number + 1, 0
        return chosen

    def position(self, step: int) -> tuple[int, int]:
        """Return the pass in which a step starts, counted from 0, and the step's first position in that pass.

        Raises:
            ValueError: ``step`` is less than 1; steps are counted from 1.
        """
        if step < 1:
            raise ValueError(f"steps are counted from 1, not {step}")
        return divmod(((step - 1) * self.branches + self.branch) * self.batch_size, self.size)

    def _of_pass(self, pass_number: int) -> NDArray[np.int64]:
        if not self.shuffle:
            return np.arange(self.size, dtype=np.int64)
        return _pass_order(self.size, self.seed, pass_number)


def task_samples(
    orders: Sequence[StepOrder], microbatches: int, step: int, microbatch: int
) -> NDArray[np.int64]:
    """Return the indices of a microbatch's samples in the training split of its task, shape ``[batch]``.

    Each task visits its samples in its own endless series of passes, microbatch by microbatch. So the samples depend
    only on the seed, the step and the microbatch.

    Args:
        orders: order of each task's samples, with the size of a microbatch as ``batch_size``.
        microbatches: number of microbatches in a step, a multiple of the number of tasks.
        step: number of the step, from 1.
        microbatch: id of the microbatch in the step.
    """
    tasks = len(orders)
    place = ((step - 1) * microbatches + microbatch) // tasks  # microbatches of this task before
    return orders[task_of(microbatch, tasks)].indices(place + 1)


def evaluation_starts(sizes: Sequence[int], microbatch_size: int) -> list[int]:
    """Return the id of each task's first microbatch in an evaluation of a split, and the total number of microbatches.

    Args:
        sizes: number of samples of each task in the split.
        microbatch_size: samples in a microbatch; the last one of each task may have fewer.
    """
    return [0, *accumulate(-(-size // microbatch_size) for size in sizes)]


def evaluated_range(sizes: Sequence[int], microbatch_size: int, microbatch: int) -> tuple[int, range]:
    """Return the task of a microbatch in an evaluation, and its samples in the task's split.

    Ids of microbatches are those of `evaluation_starts`.
    """
    starts = evaluation_starts(sizes, microbatch_size)
    task = next(place for place, stop in enumerate(starts[1:]) if microbatch < stop)
    first = (microbatch - starts[task]) * microbatch_size
    return task, range(first, min(first + microbatch_size, sizes[task]))
