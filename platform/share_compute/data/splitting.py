"""Splits rows of tables, and images, into training, validation and test; checks their classes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from share_compute.data.order import keyed_permutation
from share_compute.data.samples import SPLITS, Samples, Split, SplitSizes
from share_compute.errors import UserError
from share_compute.models.objective import Objective
from share_compute.quantities import clipped
from share_compute.specification import TrainJob

_SPLIT_KEY = 0x7461626C
"""Part of the key of the permutation that splits the rows, to distinguish it from those of `StepOrder`."""

Rows: TypeAlias = NDArray[np.int64]
"""Indices of rows."""


@dataclass(frozen=True, slots=True)
class PreparedRows:
    """The samples of tables or images, and the facts about them that training needs."""

    samples: Samples
    objective: Objective
    description: dict[str, Any]
    """Encoding of the columns, or size and scale of the images, and the classes; as JSON, for users of the model."""
    notes: tuple[str, ...]
    tokenizer_folder: Path | None = None
    """Folder with the tokenizer of texts with labels; None for other data."""
    vocab_size: int | None = None
    """One more than the tokenizer's largest id; None without a tokenizer."""


def rows_at(rows: Rows, split: Split, indices: Sequence[int] | Rows) -> Rows:
    """Return the rows of some samples of a split.

    Args:
        rows: rows of the split.
        split: name of the split, for errors.
        indices: places of the samples in the split.

    Raises:
        IndexError: an index is not in ``range(len(rows))``.
    """
    chosen = np.asarray(indices, dtype=np.int64)
    if chosen.size and chosen.min() < 0:
        raise IndexError(f"asked for sample {chosen.min()} of the {split} split")
    found: Rows = rows[chosen]
    return found


def split_rows(spec: TrainJob, counts: Sequence[int]) -> dict[Split, Rows]:
    """Return the rows of each split.

    A split with its own files has all rows of these files; the rows of other splits are drawn at random.

    Args:
        spec: the job.
        counts: number of rows of each of the job's files, in the order of `DataSpec.all_files`.

    Raises:
        UserError: the training split is empty.
    """
    data = spec.data
    assert data.files is not None
    ends = np.cumsum([0, *counts])
    first = len(data.files)
    second = first + len(data.validation_files or ())
    drawn, validation, test = (int(ends[place]) for place in (first, second, len(counts)))
    sizes = SplitSizes.of(
        drawn,
        0.0 if data.validation_files is not None else data.validation_fraction,
        0.0 if data.test_files is not None else data.test_fraction,
    )
    order = keyed_permutation(drawn, _SPLIT_KEY, spec.training.seed)
    rows: dict[Split, Rows] = {}
    for split in SPLITS:
        region = sizes.range_of(split)
        rows[split] = order[region.start : region.stop]
    if data.validation_files is not None:
        rows["validation"] = np.arange(drawn, validation)
    if data.test_files is not None:
        rows["test"] = np.arange(validation, test)
    if not len(rows["train"]):
        raise UserError(
            f"data.files have {drawn} usable samples, too few for a training split",
            hint="give more samples, or smaller fractions for validation and test",
        )
    return rows


def file_of(spec: TrainJob, counts: Sequence[int], row: int) -> Path:
    """Return the file, folder or manifest that has a row.

    Args:
        spec: the job.
        counts: number of rows of each of the job's files, as for `split_rows`.
        row: index of the row among the rows of all files.
    """
    return spec.data.all_files[int(np.searchsorted(np.cumsum(counts), row, side="right"))]


def with_classes(
    spec: TrainJob, objective: Objective, counts: NDArray[np.int64], names: Sequence[str], source: str
) -> Objective:
    """Return an objective with the number of classes, and with the class weights that the job specifies.

    Args:
        spec: the job.
        objective: task and loss.
        counts: number of training samples of each class.
        names: name of each class.
        source: source of the classes, for errors.

    Raises:
        UserError: there is only one class, or the number of weights is not the number of classes.
    """
    wanted, classes = spec.training.loss.class_weights, len(counts)
    if classes < 2:
        raise UserError(
            f"all training samples have the same class, {shown_classes(names)} in {source}",
            hint="give samples of two classes at least",
        )
    weights: tuple[float, ...] | None = None
    if wanted == "balanced":
        # The mean weight of a training sample is 1, as in scikit-learn's compute_class_weight.
        weights = tuple(float(counts.sum() / (classes * count)) for count in counts)
    elif wanted is not None:
        if len(wanted) != classes:
            raise UserError(
                f"training.loss.class_weights has {len(wanted)} weights, but the data has {classes} classes",
                hint="give one weight for each class, in the order of the job's log",
            )
        weights = wanted
    return objective.model_copy(update={"classes": classes, "class_weights": weights})


def ordered(names: Iterable[str]) -> tuple[str, ...]:
    """Sort categories or classes: as numbers if all are finite numbers, else as text."""
    found = sorted(names)
    try:
        numbers = [float(name) for name in found]
    except ValueError:
        return tuple(found)
    # NaN has no place in an order.
    if not all(map(math.isfinite, numbers)):
        return tuple(found)
    return tuple(name for _, name in sorted(zip(numbers, found, strict=True)))


def shown_classes(names: Sequence[str]) -> str:
    """Return the first 20 names as one text, each quoted and of at most 80 characters."""
    return ", ".join(repr(clipped(name)) for name in names[:20])


def unknown_class(name: str, split: Split, source: str) -> UserError:
    """Return the error for a class that training lacks.

    Args:
        name: name of the class.
        split: split with the class.
        source: column and file with the class, for the message.
    """
    return UserError(
        f"class {clipped(name)!r} is in the {split} split, but not in the training split: {source}",
        hint="give training samples of this class; a fraction is drawn anew with another training.seed",
    )
