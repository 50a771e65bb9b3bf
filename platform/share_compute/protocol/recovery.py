"""Determines which work of a step remains after members were lost or added.

A cell is the forward or the backward of one microbatch in one stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from share_compute.protocol.membership import Resend, Task, Tasks, Worker, fresh
from share_compute.protocol.messages import Report


@dataclass(frozen=True, slots=True)
class StepRecovery:
    """Remaining work of a step. The fields are those of `Membership`."""

    tasks: Tasks
    resends: tuple[Resend, ...]
    reduced: Mapping[int, tuple[Worker, ...]]
    forgets: frozenset[Worker]


def recover(
    stages: Sequence[Sequence[Worker]],
    owners: Sequence[Sequence[Worker]],
    reports: Mapping[Worker, Report],
    step: int,
    *,
    shares_optimizer: bool = False,
    slices: int = 1,
) -> StepRecovery:
    """Return the remaining cells of a step, the kept tensors that they need, and the results that already count.

    A result that a remaining member holds stays valid, since the weights have not changed. Every other result that is
    still needed is computed again.

    Args:
        stages: remaining members of each stage; no stage is empty.
        owners: member that computes each microbatch in later steps, ``[stages][microbatches]``.
        reports: reports by member, without members that received another shard after their report.
        step: the step; reports of another step are ignored.
        shares_optimizer: whether each member of a stage reduces only its share of the gradient. A reduced gradient then
            counts if all members of the stage have their shares of it.
        slices: number of slices of each sequence. All slices of a sequence are computed together, so the step restarts
            if there are several.
    """
    if slices > 1:
        everybody = frozenset(worker for stage in stages for worker in stage)
        return StepRecovery(fresh(owners), (), {}, everybody)
    held = _Held(stages, reports, step, shares_optimizer=shares_optimizer)
    adds = [
        [
            place not in held.reduced and held.by("summed", place, microbatch) is None
            for microbatch in range(len(row))
        ]
        for place, row in enumerate(owners)
    ]
    tasks = _tasks(owners, held, adds, _backwards(held, adds))
    return StepRecovery(tasks, tuple(_resends(held, tasks)), held.reduced, frozenset(held.forgets))


class _Held:
    """Results of the step that the remaining members hold."""

    def __init__(
        self,
        stages: Sequence[Sequence[Worker]],
        reports: Mapping[Worker, Report],
        step: int,
        *,
        shares_optimizer: bool,
    ) -> None:
        self.forgets: set[Worker] = set()
        self.reduced: dict[int, tuple[Worker, ...]] = {}
        self._reports: list[list[Report]] = []
        for place, stage in enumerate(stages):
            row = [reports[worker] for worker in stage if worker in reports and reports[worker].step == step]
            holders = tuple(report.worker for report in row if report.is_reduced)
            if holders and shares_optimizer and len(holders) < len(stage):
                # Reducing one share has overwritten the sums of the other shares.
                self.forgets.update(holders)
                row = [report for report in row if not report.is_reduced]
                holders = ()
            if holders:
                self.reduced[place] = holders
            else:
                self._count_once(row)
            self._reports.append([report for report in row if report.worker not in self.forgets])

    def _count_once(self, row: Sequence[Report]) -> None:
        """Choose members whose gradient sums share no microbatch; add the other members to ``forgets``.

        After missing an epoch, a member may hold gradients that other members recomputed. On overlap, the member with
        more microbatches is chosen.
        """
        counted: set[int] = set()
        for report in sorted(row, key=lambda report: -len(report.summed)):
            if counted.isdisjoint(report.summed):
                counted |= report.summed
            else:
                self.forgets.add(report.worker)

    def by(
        self, what: Literal["summed", "forwarded", "activations", "gradients"], place: int, microbatch: int
    ) -> Worker | None:
        """Return the first member of stage ``place`` that holds a result of a microbatch; None if no member does."""
        for report in self._reports[place]:
            if microbatch in getattr(report, what):
                return report.worker
        return None


def _backwards(held: _Held, adds: Sequence[Sequence[bool]]) -> list[list[bool]]:
    """Return whether each backward must run, ``[stages][microbatches]``.

    A backward may need a backward of the next stage, so stages are visited from the first to the last.
    """
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
    """Return the tasks of the step: the backwards marked in ``backwards``, and the forwards that are still needed.

    A forward may need a forward of the previous stage, so stages are visited from the last to the first.
    """
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
            elif forward:  # choose the smallest load relative to the share
                worker = min(shares, key=lambda each: ((load[each] + 1) / shares[each], each))
            if forward or backward:
                load[worker] += 1
            holder = held.by("summed", place, microbatch)
            row.append(Task(worker, forward, backward, adds[place][microbatch], holder))
        tasks.append(tuple(row))
    return tuple(reversed(tasks))


def _resends(held: _Held, tasks: Tasks) -> Iterator[Resend]:
    """Yield the kept tensors that remaining cells need from an adjacent stage."""
    for place, row in enumerate(tasks):
        for microbatch, task in enumerate(row):
            if task.forward and place > 0:
                holder = held.by("activations", place - 1, microbatch)
                if holder is not None:
                    yield Resend(holder, "activation", microbatch, place - 1, task.worker)
            if task.backward and place < len(tasks) - 1:
                holder = held.by("gradients", place + 1, microbatch)
                if holder is not None:
                    yield Resend(holder, "gradient", microbatch, place + 1, task.worker)
