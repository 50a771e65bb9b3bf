"""Makes the `Samples` of a job from digits, tables, images, or from text, which it tokenizes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from share_compute.data.images import prepare_images
from share_compute.data.labelled_texts import prepare_texts
from share_compute.data.reading import TextPiece, check_files, files_digest, read_pieces
from share_compute.data.samples import Array, DigitSamples, Samples, Split, SplitSizes, TextSamples
from share_compute.data.tables import prepare_table
from share_compute.data.text_pairs import prepare_pairs
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
from share_compute.data.tokens import (
    RECORD,
    TokenRecord,
    open_tokens,
    read_record,
    token_dtype,
    write_record,
    write_tokens,
    writing,
)
from share_compute.data.transforms import Transforms, transforms_of
from share_compute.errors import UserError
from share_compute.models.configuration import model_vocab_size
from share_compute.models.objective import Objective
from share_compute.specification import DataSpec, TrainJob

_FORMAT = 1
"""Version of the token file's format, part of every fingerprint. Increase it whenever the format changes."""

Progress: TypeAlias = Callable[[str, float], None]
"""Callback that takes the current activity and the share of it that is done, 0 to 1."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of samples, tokens and documents."""

    train: int
    """Number of training samples."""
    validation: int
    test: int
    tokens: int | None = None
    """Number of tokens of the whole corpus; None if the data is not text."""
    documents: int | None = None
    """Number of files (.txt) or of rows with text (.jsonl, .parquet); None if the data is not text."""


@dataclass(frozen=True, slots=True)
class PreparedData:
    """A job's data, ready to train on."""

    samples: Samples
    counts: Counts
    tokenizer_folder: Path | None = None
    """Folder with the tokenizer that made the tokens; None if the data is not text."""
    vocab_size: int | None = None
    """One more than the tokenizer's largest id; None if the data is not text."""
    notes: tuple[str, ...] = ()
    """Remarks for the submitter, e.g. that a split is empty."""
    objective: Objective | None = None
    """Task and loss, with the facts about the data; None if the data is plain text or the digits."""
    sample_shape: tuple[int, ...] | None = None
    """Shape of the inputs of one sample; None if the data is plain text or the digits."""
    description: dict[str, Any] | None = None
    """Encoding of the samples, as JSON, which is saved with the model; None if the data is plain text or the digits."""

    transforms: Transforms | None = None
    """Random changes of the samples; None for none."""

    def take(
        self, split: Split, indices: Sequence[int] | NDArray[np.int64], step: int = 0
    ) -> tuple[Array, Array]:
        """Return inputs and targets of some samples, with the random changes of a training step; see `Samples.take`."""
        inputs, targets = self.samples.take(split, indices)
        if self.transforms is not None:
            inputs = self.transforms.apply(inputs, split, step, indices)
        return inputs, targets

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """Names of the classes, in order. None without classes, and for the digits, whose numbers are their names."""
        facts = self.description or {}
        names = facts.get("classes") or facts.get("target", {}).get("categories")
        return None if names is None else tuple(names)

    @property
    def digest(self) -> str | None:
        """Hexadecimal SHA-256 digest of ``description``; None without one."""
        if self.description is None:
            return None
        return hashlib.sha256(json.dumps(self.description, sort_keys=True).encode()).hexdigest()


def prepare(spec: TrainJob, folder: Path, progress: Progress | None = None) -> PreparedData:
    """Load the data of a job, tokenize it if it is text, write other data into one file, and split the samples.

    Text is tokenized into one file in ``folder``. A later call with the same data and tokenizer reuses this file. The
    splits of text are contiguous, in the order train, validation, test, except splits with their own files.

    Args:
        spec: the job.
        folder: folder for the prepared files and the tokenizer; created if it does not exist.
        progress: callback that takes the current activity and the share of it that is done, 0 to 1.

    Raises:
        UserError: the data or the tokenizer cannot be used, or there is less text than one sample needs.
        Unavailable: a file in ``folder`` cannot be written, for example because the disk is full.
    """
    if spec.data.files is None:
        digits = DigitSamples.load(spec.training.seed, spec.data.validation_fraction, spec.data.test_fraction)
        return PreparedData(digits, _count(digits), notes=_empty_splits(spec.data, digits))
    if not spec.data.is_plain_text:
        return _prepared_rows(spec, folder, progress or (lambda _what, _share: None))
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    record = _tokens_of(spec, folder, progress or (lambda _what, _share: None))
    samples = _chunks(spec, folder, record)
    return PreparedData(
        samples,
        _count(samples, record.num_tokens, record.documents),
        tokenizer_folder=folder / "tokenizer",
        vocab_size=record.vocab_size,
        notes=(*record.notes, *_empty_splits(spec.data, samples)),
        transforms=transforms_of(spec, folder / "tokenizer"),
    )


def _prepared_rows(spec: TrainJob, folder: Path, progress: Progress) -> PreparedData:
    if spec.data.labels is not None:
        found = prepare_texts(spec, folder, progress)
    elif spec.data.pairs is not None:
        found = prepare_pairs(spec, folder, progress)
    elif spec.data.table is not None:
        found = prepare_table(spec, folder, progress)
    else:
        found = prepare_images(spec, folder, progress)
    plain, _ = found.samples.take("train", [0])
    transforms = transforms_of(spec, found.tokenizer_folder)
    inputs = plain if transforms is None else transforms.apply(plain, "train", 1, [0])
    return PreparedData(
        found.samples,
        _count(found.samples),
        tokenizer_folder=found.tokenizer_folder,
        vocab_size=found.vocab_size,
        notes=(*found.notes, *_empty_splits(spec.data, found.samples)),
        objective=found.objective,
        sample_shape=inputs.shape[1:],
        description=found.description,
        transforms=transforms,
    )


def _chunks(spec: TrainJob, folder: Path, record: TokenRecord) -> TextSamples:
    """Cut the tokens in a folder into samples, and split them.

    Args:
        spec: the job.
        folder: folder with the token file.
        record: record of the token file.

    Raises:
        UserError: the files of a split have less text than one sample needs.
    """
    data, length = spec.data, spec.training.sequence_length
    totals, firsts = dict[str, int](), dict[str, int]()
    place = first = 0
    for name in ("files", "validation_files", "test_files"):
        files: tuple[Path, ...] | None = getattr(data, name)
        if files is None:
            continue
        found = sum(record.file_tokens[place : place + len(files)])
        totals[name], firsts[name] = TextSamples.count(found, length), first
        place, first = place + len(files), first + found
        if totals[name] < 1:
            raise UserError(
                f"data.{name} has {found} tokens; one sample of sequence_length {length} needs {length + 1}",
                hint="give more text, or a smaller training.sequence_length",
                details={"tokens": found, "needed": length + 1},
            )
    drawn = SplitSizes.of(
        totals["files"],
        0.0 if data.validation_files is not None else data.validation_fraction,
        0.0 if data.test_files is not None else data.test_fraction,
    )
    sizes = SplitSizes(
        drawn.train,
        totals.get("validation_files", drawn.validation),
        totals.get("test_files", drawn.test),
    )
    drawn_test = (drawn.train + drawn.validation) * length
    starts: dict[Split, int] = {"test": firsts.get("test_files", drawn_test)}
    if data.validation_files is not None:
        starts["validation"] = firsts["validation_files"]
    return TextSamples(open_tokens(folder, record), length, sizes, starts)


def _tokens_of(spec: TrainJob, folder: Path, progress: Progress) -> TokenRecord:
    files = spec.data.all_files
    check_files(files)
    source = find_source(spec)
    limit = model_vocab_size(spec.model)
    fingerprint = _fingerprint(spec.data, files, source)
    found = read_record(folder, fingerprint)
    if found is not None and has_tokenizer(folder / "tokenizer"):
        check_fits(found.vocab_size, limit)
        return found

    def pieces(what: str, own: Sequence[Path]) -> Iterator[TextPiece]:
        progress(what, 0.0)
        for piece in read_pieces(own, spec.data.text_column):
            progress(what, piece.read)
            yield piece
        progress(what, 1.0)

    return _tokenize(spec.data, source, limit, fingerprint, folder, pieces)


def _tokenize(
    data: DataSpec,
    source: TokenizerSource,
    limit: int | None,
    fingerprint: str,
    folder: Path,
    pieces: Callable[[str, Sequence[Path]], Iterator[TextPiece]],
) -> TokenRecord:
    with writing(folder):
        (folder / RECORD).unlink(missing_ok=True)
    notes: list[str] = []
    if source.path is not None:
        tokenizer = load_tokenizer(source.path)
    else:
        assert source.vocab_size is not None
        assert data.files is not None
        training = pieces("training the tokenizer", data.files)
        tokenizer = train_tokenizer((piece.text for piece in training), source.vocab_size)
    vocab_size = vocabulary_size(tokenizer)
    check_fits(vocab_size, limit)
    if source.vocab_size is not None and vocab_size < source.vocab_size:
        notes.append(f"the text gave a tokenizer of {vocab_size} tokens; {source.vocab_size} were asked for")
    if tokenizer.eos_token_id is None:
        notes.append("the tokenizer has no end-of-text token: documents run into each other")
    save_tokenizer(tokenizer, folder)
    dtype = token_dtype(vocab_size)
    files = data.all_files
    file_tokens, documents = write_tokens(folder, pieces("tokenizing", files), tokenizer, dtype, len(files))
    record = TokenRecord(fingerprint, dtype, tuple(file_tokens), documents, vocab_size, tuple(notes))
    write_record(folder, record)
    return record


def _fingerprint(data: DataSpec, files: tuple[Path, ...], source: TokenizerSource) -> str:
    column = None if files[0].suffix == ".txt" else data.text_column
    facts: list[Any] = [_FORMAT, files[0].suffix, column, files_digest(files), source.digest()]
    if source.vocab_size is not None and data.files != files:
        facts.append(len(data.files or ()))  # the tokenizer is trained on these
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _count(samples: Samples, tokens: int | None = None, documents: int | None = None) -> Counts:
    return Counts(
        samples.size("train"),
        samples.size("validation"),
        samples.size("test"),
        tokens=tokens,
        documents=documents,
    )


def _empty_splits(data: DataSpec, samples: Samples) -> tuple[str, ...]:
    wanted: tuple[tuple[Split, float, bool], ...] = (
        ("validation", data.validation_fraction, data.validation_files is None),
        ("test", data.test_fraction, data.test_files is None),
    )
    return tuple(
        f"the {split} split is empty: {fraction:g} of the samples is less than one"
        for split, fraction, is_drawn in wanted
        if is_drawn and fraction > 0 and samples.size(split) == 0
    )
