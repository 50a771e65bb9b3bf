"""Makes samples from pairs of texts that belong together, for embeddings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from share_compute.data.labelled_texts import encoded_rows
from share_compute.data.samples import SPLITS, Array, Split
from share_compute.data.splitting import PreparedRows, Rows, rows_at, split_rows
from share_compute.models.objective import objective_of
from share_compute.specification import TrainJob


@dataclass(frozen=True, slots=True)
class TextPairSamples:
    """Padded pairs of texts: ids int64 ``[n, 2, seq]``, and the places of their last tokens, int64 ``[n, 2]``."""

    ids: NDArray[Any] = field(repr=False)
    """Ids of both texts of each pair, and the places of their last tokens: int32 ``[pairs, 2 * seq + 2]``."""
    rows: Mapping[Split, Rows] = field(repr=False)
    """Indices of the pairs of each split."""

    def size(self, split: Split) -> int:
        """Return the number of samples in a split."""
        return len(self.rows[split])

    def take(self, split: Split, indices: Sequence[int] | Rows) -> tuple[Array, Array]:
        """Return inputs int64 ``[n, 2, seq]`` and targets int64 ``[n, 2]``; see `Samples.take`."""
        rows = np.asarray(self.ids[rows_at(self.rows[split], split, indices)], dtype=np.int64)
        return np.ascontiguousarray(rows[:, :-2]).reshape(len(rows), 2, -1), np.ascontiguousarray(
            rows[:, -2:]
        )


def prepare_pairs(spec: TrainJob, folder: Path, progress: Callable[[str, float], None]) -> PreparedRows:
    """Tokenize a job's pairs of texts into one file in ``folder``, and split the pairs.

    A later call with the same texts and tokenizer reuses the file.

    Args:
        spec: a job with ``data.pairs``.
        folder: folder for the file and the tokenizer; created if it does not exist.
        progress: callback that takes the current activity and the share of it that is done, 0 to 1.

    Raises:
        UserError: the texts or the tokenizer cannot be used.
        Unavailable: a file in ``folder`` cannot be written.
    """
    assert spec.data.pairs is not None
    file = encoded_rows(spec, folder, progress)
    rows, notes = split_rows(spec, file.facts["rows"]), list(file.facts["notes"])
    for split in SPLITS[1:]:
        # The loss of a microbatch of one pair is 0, and its accuracy 1, whatever the model.
        if len(rows[split]) % spec.training.microbatch_size == 1:
            rows[split] = rows[split][:-1]
            notes.append(
                f"the last pair of the {split} split is left out: it would be alone in its microbatch"
            )
    samples = TextPairSamples(file.rows, rows)
    objective = objective_of(spec).model_copy(update={"padding": file.facts["padding"]})
    description = {
        "text": {
            "column": spec.data.text_column,
            "positive": spec.data.pairs.column,
            "sequence_length": spec.training.sequence_length,
            "padding": file.facts["padding"],
        }
    }
    return PreparedRows(
        samples, objective, description, tuple(notes), folder / "tokenizer", file.facts["vocab_size"]
    )
