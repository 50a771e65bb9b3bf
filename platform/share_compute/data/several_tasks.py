"""Data of jobs with several tasks: each task has its own data, and all samples have one shape."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from share_compute.data.preparation import PreparedData, Progress, prepare
from share_compute.errors import UserError
from share_compute.models.blueprint import TaskHead
from share_compute.models.objective import Objective, objective_of
from share_compute.specification import TrainJob


def prepared_tasks(
    spec: TrainJob, folder: Path, progress: Progress | None = None
) -> tuple[PreparedData, ...]:
    """Return the data of each task of a job, in the order of the tasks; see `prepare`.

    Args:
        spec: the job.
        folder: folder for the prepared files; tasks after the first have subfolders.
        progress: callback that takes the current activity and the share of it that is done, 0 to 1.

    Raises:
        UserError: the data of a task cannot be used, or samples of two tasks have different shapes.
        Unavailable: a file in ``folder`` cannot be written.
    """
    found: list[PreparedData] = []
    for place, single in enumerate(spec.single_tasks):
        if not spec.tasks:
            return (prepare(single, folder, progress),)
        name = spec.tasks[place].name
        own = folder if not place else folder / f"task-{name}"
        try:
            found.append(prepare(single, own, progress))
        except UserError as failure:
            failure.message = f"task {name}: {failure.message}"
            raise
        inputs = [data.samples.take("train", [0])[0] for data in (found[0], found[-1])]
        shapes = [
            list(data.sample_shape or array.shape[1:])
            for data, array in zip((found[0], found[-1]), inputs, strict=True)
        ]
        if shapes[0] != shapes[1] or inputs[0].dtype != inputs[1].dtype:
            raise UserError(
                f"tasks.{place} ({name}): a sample has the shape {shapes[1]} and {inputs[1].dtype} numbers, but those "
                f"of {spec.tasks[0].name} have {shapes[0]} and {inputs[0].dtype}",
                hint="give all tasks samples of one kind and one shape, because they share the first layers",
            )
    return tuple(found)


def objectives_of(spec: TrainJob, prepared: Sequence[PreparedData]) -> list[Objective]:
    """Return the objective of each task, with the facts about its data."""
    return [
        own.objective or objective_of(single) for single, own in zip(spec.single_tasks, prepared, strict=True)
    ]


def notes_of(spec: TrainJob, prepared: Sequence[PreparedData]) -> tuple[str, ...]:
    """Return the remarks about the data of all tasks, each with the name of its task."""
    if not spec.tasks:
        return prepared[0].notes
    return tuple(
        f"task {task.name}: {note}"
        for task, own in zip(spec.tasks, prepared, strict=True)
        for note in own.notes
    )


def digest_of(prepared: Sequence[PreparedData]) -> str | None:
    """Return `PreparedData.digest`; with several tasks, a digest of all their digests."""
    if len(prepared) == 1:
        return prepared[0].digest
    return hashlib.sha256(json.dumps([own.digest for own in prepared]).encode()).hexdigest()


def described_tasks(heads: Sequence[TaskHead], prepared: Sequence[PreparedData]) -> list[dict[str, Any]]:
    """Return the tasks of a result as JSON, with the head and the encoding of the samples of each."""
    return [
        {
            "name": head.name,
            "task": head.objective.task,
            "loss": head.objective.loss,
            "weight": head.objective.weight,
            "layers": [layer.model_dump(exclude_none=True) for layer in head.layers],
            "data": own.description,
        }
        for head, own in zip(heads, prepared, strict=True)
    ]
