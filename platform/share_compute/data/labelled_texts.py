"""Makes samples from texts with labels: token ids, padded to ``sequence_length``, in one file on disk.

This module also encodes pairs of texts that belong together.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from share_compute.data.reading import check_files, files_digest
from share_compute.data.row_file import RowFile, open_rows, require_space, write_files, write_record
from share_compute.data.samples import SPLITS, Array, Split
from share_compute.data.splitting import (
    PreparedRows,
    Rows,
    file_of,
    ordered,
    rows_at,
    shown_classes,
    split_rows,
    unknown_class,
    with_classes,
)
from share_compute.data.tokenization import (
    TokenizerSource,
    check_fits,
    find_source,
    has_tokenizer,
    load_tokenizer,
    save_tokenizer,
    train_tokenizer,
    vocabulary_size,
)
from share_compute.data.tokens import writing
from share_compute.errors import UserError
from share_compute.models.configuration import model_vocab_size
from share_compute.models.objective import objective_of
from share_compute.quantities import clipped
from share_compute.specification import TrainJob

if TYPE_CHECKING:
    from share_compute.data.labelled_rows import LabelledText

NAME = "texts"
"""Name of the row file."""
MOST_CLASSES = 10_000
_FORMAT = 3
"""Version of the row file's content, part of every fingerprint. Increase it whenever the content changes."""
_MOST_CHARACTERS = 64
"""Maximum number of characters of a text that are tokenized, for each token of ``sequence_length``."""


@dataclass(frozen=True, slots=True)
class LabelledTextSamples:
    """Padded texts: ids int64 ``[n, seq]``; class and place of the last token, int64 ``[n, 2]``."""

    ids: NDArray[Any] = field(repr=False)
    """Ids of each text, the place of its last token, and the code of its label: int32 ``[texts, seq + 2]``."""
    rows: Mapping[Split, Rows] = field(repr=False)
    """Indices of the texts of each split."""
    places: Rows = field(repr=False)
    """Class of each code of a label."""

    def size(self, split: Split) -> int:
        """Return the number of samples in a split."""
        return len(self.rows[split])

    def take(self, split: Split, indices: Sequence[int] | Rows) -> tuple[Array, Array]:
        """Return inputs int64 ``[n, seq]`` and targets int64 ``[n, 2]``; see `Samples.take`."""
        rows = np.asarray(self.ids[rows_at(self.rows[split], split, indices)], dtype=np.int64)
        return np.ascontiguousarray(rows[:, :-2]), np.stack([self.places[rows[:, -1]], rows[:, -2]], axis=1)


def prepare_texts(spec: TrainJob, folder: Path, progress: Callable[[str, float], None]) -> PreparedRows:
    """Tokenize the texts of a job into one file in ``folder``, and split the texts.

    A later call with the same texts and tokenizer reuses the file.

    Args:
        spec: a job with ``data.labels``.
        folder: folder for the file and the tokenizer; created if it does not exist.
        progress: callback that takes the current activity and the share of it that is done, 0 to 1.

    Raises:
        UserError: the texts or the tokenizer cannot be used.
        Unavailable: a file in ``folder`` cannot be written.
    """
    data = spec.data
    assert data.labels is not None
    file = encoded_rows(spec, folder, progress)
    facts = file.facts
    rows = split_rows(spec, facts["rows"])
    codes, labels = np.asarray(file.rows[:, -1], dtype=np.int64), facts["labels"]
    trained = np.unique(codes[rows["train"]])
    names = ordered(labels[code] for code in trained)
    for split in SPLITS[1:]:
        wrong = np.flatnonzero(~np.isin(codes[rows[split]], trained))
        if wrong.size:
            row = int(rows[split][wrong[0]])
            found = file_of(spec, facts["rows"], row)
            source = f"column {clipped(data.labels.column)!r} of data file {found}"
            raise unknown_class(labels[codes[row]], split, source)
    order = {name: place for place, name in enumerate(names)}
    places = np.asarray([order.get(label, -1) for label in labels], dtype=np.int64)
    samples = LabelledTextSamples(file.rows, rows, places)
    counts = np.bincount(places[codes[rows["train"]]], minlength=len(names))
    source = f"column {clipped(data.labels.column)!r} of data.files"
    objective = objective_of(spec).model_copy(update={"padding": facts["padding"]})
    objective = with_classes(spec, objective, counts, names, source)
    description = {
        "text": {
            "column": data.text_column,
            "pair": data.labels.pair,
            "sequence_length": spec.training.sequence_length,
            "padding": facts["padding"],
        },
        "classes": list(names),
    }
    notes = (*facts["notes"], f"the texts have {len(names)} classes: {shown_classes(names)}")
    return PreparedRows(samples, objective, description, notes, folder / "tokenizer", facts["vocab_size"])


@dataclass(slots=True)
class _Encoder:
    """Turns texts with labels into rows of numbers, and assigns codes to the labels.

    Args:
        spec: the job.
        tokenizer: the job's tokenizer.
        padding: id of the padding token.
    """

    spec: TrainJob
    tokenizer: Any
    padding: int
    codes: dict[str, int] = field(default_factory=dict)
    """Code of each label."""
    full: int = 0
    """Number of texts that fill ``sequence_length``."""

    def blocks(self, file: Path) -> Iterator[NDArray[np.int32]]:
        """Yield the rows of a file in blocks ``[texts, seq + 2]``; see `LabelledTextSamples.ids`.

        Raises:
            UserError: the file cannot be used.
        """
        from share_compute.data.labelled_rows import read_labelled  # noqa: PLC0415 - imports pyarrow

        data, before = self.spec.data, 0
        for block in read_labelled(file, data):
            yield self._rows(file, block, before) if data.pairs is None else self._pairs(file, block, before)
            before += len(block)
            if data.labels is not None and len(self.codes) > MOST_CLASSES:
                raise UserError(
                    f"column {clipped(data.labels.column)!r} has more than {MOST_CLASSES} classes, up to {file}",
                    hint="name a column with few different labels in data.labels.column",
                )

    def _rows(self, file: Path, block: Sequence[LabelledText], before: int) -> NDArray[np.int32]:
        """Return ids, the place of the last token and the code of the label: ``[texts, seq + 2]``."""
        texts, pairs = [row.text for row in block], [row.pair or "" for row in block]
        ids, last = self._encoded(file, texts, None if block[0].pair is None else pairs, before)
        codes = [self.codes.setdefault(row.label or "", len(self.codes)) for row in block]
        return np.concatenate([ids, last[:, None], np.asarray(codes, np.int32)[:, None]], axis=1)

    def _pairs(self, file: Path, block: Sequence[LabelledText], before: int) -> NDArray[np.int32]:
        """Return ids of both texts, and the places of their last tokens: ``[pairs, 2 * seq + 2]``."""
        first, last = self._encoded(file, [row.text for row in block], None, before)
        second, last_of_second = self._encoded(file, [row.pair or "" for row in block], None, before)
        return np.concatenate([first, second, last[:, None], last_of_second[:, None]], axis=1)

    def _encoded(
        self, file: Path, texts: Sequence[str], pairs: Sequence[str] | None, before: int
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return padded ids ``[texts, seq]``, and the place of each text's last token ``[texts]``.

        The last token of a text with a label is its last token that is not padding, as in transformers'
        ``AutoModelForSequenceClassification``. In a pair, the last token of a text is the last one in the attention
        mask, as in ``lasttoken`` of sentence-transformers.
        """
        length = self.spec.training.sequence_length
        most = _MOST_CHARACTERS * length
        kept = slice(-most, None) if self.tokenizer.truncation_side == "left" else slice(most)
        encoded = self.tokenizer(
            [text[kept] for text in texts],
            None if pairs is None else [text[kept] for text in pairs],
            truncation="longest_first",
            max_length=length,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )["input_ids"]
        rows = np.full((len(texts), length), self.padding, dtype=np.int32)
        for number, ids in enumerate(encoded):
            if all(token == self.padding for token in ids):
                raise UserError(
                    f"data file {file} has a text without tokens in row {before + number + 1}",
                    hint="remove the row, or name another tokenizer in tokenizer.path",
                )
            rows[number, : len(ids)] = ids
            self.full += len(ids) == length
        if self.spec.data.pairs is not None:
            return rows, np.asarray([len(ids) - 1 for ids in encoded], dtype=np.int32)
        # Tokenizers may append the padding token to each text, as its end-of-text token.
        is_text = rows != self.padding
        last = length - 1 - np.argmax(is_text[:, ::-1], axis=1)
        return rows, last.astype(np.int32)


def encoded_rows(spec: TrainJob, folder: Path, progress: Callable[[str, float], None]) -> RowFile:
    """Return the row file of all texts or pairs; its metadata holds the rows of each file and the labels.

    Rows are those of `LabelledTextSamples`, or of `share_compute.data.text_pairs.TextPairSamples`.

    Args:
        spec: the job.
        folder: folder for the file and the tokenizer.
        progress: callback that takes the current activity and the share of it that is done, 0 to 1.

    Raises:
        UserError: the texts or the tokenizer cannot be used.
        Unavailable: a file in ``folder`` cannot be written.
    """
    from share_compute.data.labelled_rows import check_columns  # noqa: PLC0415 - imports pyarrow

    data, files, length = spec.data, spec.data.all_files, spec.training.sequence_length
    assert data.files is not None
    check_files(files)
    check_columns(data)
    source, limit = find_source(spec), model_vocab_size(spec.model)
    reads = [_FORMAT, files[0].suffix, data.text_columns, length, len(data.files)]
    digest = hashlib.sha256(json.dumps([*reads, files_digest(files), source.digest()]).encode()).hexdigest()
    found = open_rows(folder, NAME, digest)
    if found is not None and has_tokenizer(folder / "tokenizer"):
        check_fits(found.facts["vocab_size"], limit)
        return found
    require_space(folder, 0)
    progress("training the tokenizer" if source.path is None else "loading the tokenizer", 0.0)
    tokenizer = _tokenizer(spec, source)
    vocab_size = vocabulary_size(tokenizer)
    check_fits(vocab_size, limit)
    with writing(folder):
        # If the process ends here, rows of the old tokenizer must not be used with this one.
        (folder / f"{NAME}.json").unlink(missing_ok=True)
    save_tokenizer(tokenizer, folder)
    encoder = _Encoder(spec, tokenizer, _padding(tokenizer, source))
    shape, counts = write_files(folder, NAME, files, encoder.blocks, partial(progress, "tokenizing"))
    notes = []
    if source.vocab_size is not None and vocab_size < source.vocab_size:
        notes.append(f"the text gave a tokenizer of {vocab_size} tokens; {source.vocab_size} were asked for")
    if encoder.full:
        notes.append(
            f"{encoder.full} texts fill training.sequence_length {length}; what is beyond it is left out"
        )
    facts = {
        "labels": list(encoder.codes),
        "rows": counts,
        "vocab_size": vocab_size,
        "padding": encoder.padding,
        "notes": notes,
    }
    return write_record(folder, NAME, digest, "int32", shape, facts)


def _tokenizer(spec: TrainJob, source: TokenizerSource) -> Any:
    """Return the tokenizer of a folder, or one trained on the texts of ``data.files``."""
    if source.path is not None:
        return load_tokenizer(source.path)
    assert source.vocab_size is not None
    return train_tokenizer(_learned(spec), source.vocab_size, pads=True)


def _learned(spec: TrainJob) -> Iterator[str]:
    from share_compute.data.labelled_rows import read_labelled  # noqa: PLC0415 - imports pyarrow

    for file in spec.data.files or ():
        for block in read_labelled(file, spec.data):
            for row in block:
                yield from filter(None, (row.text, row.pair))


def _padding(tokenizer: Any, source: TokenizerSource) -> int:
    """Return the id of the padding token, or of the end-of-text token if there is none."""
    for found in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if found is not None:
            return int(found)
    raise UserError(
        f"the tokenizer in {source.path} has neither a padding token nor an end-of-text token",
        hint="set pad_token in its tokenizer_config.json, or name another folder in tokenizer.path",
    )
