"""What must be done of an open step after members were lost: the least that gives every pool its whole gradient."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from share_compute.protocol.messages import Report
from share_compute.protocol.roster import Resend, Task, Tasks, Worker


@dataclass(frozen=True, slots=True)
class Recovery:
    """What is left to do of an open step; fields of `Roster`."""

    tasks: Tasks
    resends: tuple[Resend, ...]
    reduced: Mapping[int, tuple[Worker, ...]]
    forgets: frozenset[Worker]


def recover(
    pools: Sequence[Sequence[Worker]],
    owners: Sequence[Sequence[Worker]],
    reports: Mapping[Worker, Report],
    step: int,
) -> Recovery:
    """Return the cells that are left of a step, the kept tensors that they need, and what counts already.

    Gradients that a living member holds stay valid, since the weights have not moved. Of the others, cells are done
    again by members of the same pool. A cell needs what came over its boundaries: where a living member of the
    neighbour pool keeps it, it is sent again; else the neighbour computes it again, without adding to its gradient.

    Args:
        pools: members of each pool that are left; none is empty.
        owners: who should compute each microbatch, ``[pools][microbatches]``.
        reports: what each member holds; leave out members whose shard was brought to them since.
        step: the open step; reports of another say nothing.
    """
    held = _Held(pools, reports, step)
    adds = [
        [
            place not in held.reduced and held.by("summed", place, microbatch) is None
            for microbatch in range(len(row))
        ]
        for place, row in enumerate(owners)
    ]
    tasks = _tasks(owners, held, adds, _backwards(held, adds))
    return Recovery(tasks, tuple(_resends(held, tasks)), held.reduced, frozenset(held.forgets))


class _Held:
    """What members that are left have of the step."""

    def __init__(
        self, pools: Sequence[Sequence[Worker]], reports: Mapping[Worker, Report], step: int
    ) -> None:
        self.forgets: set[Worker] = set()
        self.reduced: dict[int, tuple[Worker, ...]] = {}
        self._reports: list[list[Report]] = []
        for place, pool in enumerate(pools):
            row = [reports[worker] for worker in pool if worker in reports and reports[worker].step == step]
            if holders := tuple(report.worker for report in row if report.is_reduced):
                self.reduced[place] = holders
            else:
                self._count_once(row)
            self._reports.append([report for report in row if report.worker not in self.forgets])

    def _count_once(self, row: Sequence[Report]) -> None:
        """Who was silent for an epoch may have added what others added again: then the one with more is kept."""
        counted: set[int] = set()
        for report in sorted(row, key=lambda report: -len(report.summed)):
            if counted.isdisjoint(report.summed):
                counted |= report.summed
            else:
                self.forgets.add(report.worker)

    def by(
        self, what: Literal["summed", "forwarded", "activations", "gradients"], place: int, microbatch: int
    ) -> Worker | None:
        """Return the first member of a pool that has it."""
        for report in self._reports[place]:
            if microbatch in getattr(report, what):
                return report.worker
        return None


def _backwards(held: _Held, adds: Sequence[Sequence[bool]]) -> list[list[bool]]:
    """Return which backwards are run: pools want gradients from the pool behind, so from the first to the last."""
    backwards = [list(row) for row in adds]
    for place in range(1, len(adds)):
        for microbatch, is_wanted in enumerate(backwards[place - 1]):
            if is_wanted and held.by("gradients", place, microbatch) is None:
                backwards[place][microbatch] = True
    return backwards


def _tasks(
    owners: Sequence[Sequence[Worker]],
    held: _Held,
    adds: Sequence[Sequence[bool]],
    backwards: Sequence[Sequence[bool]],
) -> Tasks:
    """Add the forwards, from the last pool to the first: each wants activations from the one before."""
    last = len(owners) - 1
    tasks: list[tuple[Task, ...]] = []
    for place in range(last, -1, -1):
        load: Counter[Worker] = Counter()
        shares = Counter(owners[place])
        row: list[Task] = []
        for microbatch, owner in enumerate(owners[place]):
            backward = backwards[place][microbatch]
            ready = held.by("forwarded", place, microbatch) if backward else None
            is_wanted = (
                place < last
                and tasks[-1][microbatch].forward
                and held.by("activations", place, microbatch) is None
            )
            forward = is_wanted or (backward and ready is None)
            worker = owner
            if ready is not None:
                worker = ready
            elif forward:  # to whom it delays least: shares say how fast members are
                worker = min(shares, key=lambda each: ((load[each] + 1) / shares[each], each))
            if forward or backward:
                load[worker] += 1
            holder = held.by("summed", place, microbatch)
            row.append(Task(worker, forward, backward, adds[place][microbatch], holder))
        tasks.append(tuple(row))
    return tuple(reversed(tasks))


def _resends(held: _Held, tasks: Tasks) -> Iterator[Resend]:
    """Yield what is kept and needed."""
    for place, row in enumerate(tasks):
        for microbatch, task in enumerate(row):
            if task.forward and place > 0:
                keeper = held.by("activations", place - 1, microbatch)
                if keeper is not None:
                    yield Resend(keeper, "activation", microbatch, place - 1, task.worker)
            if task.backward and place < len(tasks) - 1:
                keeper = held.by("gradients", place + 1, microbatch)
                if keeper is not None:
                    yield Resend(keeper, "gradient", microbatch, place + 1, task.worker)
