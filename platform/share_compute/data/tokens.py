"""Writes and reads token files: all tokens of a corpus in one array on disk, with a record of its metadata."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from share_compute.data.reading import TextPiece
from share_compute.errors import Unavailable

TOKENS = "tokens.bin"
RECORD = "tokens.json"
_BATCH_CHARACTERS = 1 << 20


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """Metadata of a token file, written after the file is complete."""

    fingerprint: str
    """Digest of the data and the tokenizer that the tokens were made from."""
    dtype: str
    file_tokens: tuple[int, ...]
    """Number of tokens of each file, in their order."""
    documents: int
    vocab_size: int
    """One more than the tokenizer's largest id."""
    notes: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Number of all tokens."""
        return sum(self.file_tokens)


def read_record(folder: Path, fingerprint: str) -> TokenRecord | None:
    """Return the record of a finished token file with this fingerprint; None if there is none."""
    try:
        raw = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        lists = {name: tuple(raw[name]) for name in ("file_tokens", "notes")}
        record = TokenRecord(**{**raw, **lists})
        size_bytes = (folder / TOKENS).stat().st_size
        whole = size_bytes == record.num_tokens * np.dtype(record.dtype).itemsize
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return record if whole and record.fingerprint == fingerprint else None


def write_record(folder: Path, record: TokenRecord) -> None:
    """Write the record, which marks the token file as complete."""
    with writing(folder):
        part = folder / f"{RECORD}.part"
        part.write_text(json.dumps(asdict(record), indent=1), encoding="utf-8")
        part.replace(folder / RECORD)


def token_dtype(vocab_size: int) -> str:
    """Return the name of the smallest dtype, uint16 or uint32, that holds every id."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def write_tokens(
    folder: Path, pieces: Iterable[TextPiece], tokenizer: Any, dtype: str, files: int
) -> tuple[list[int], int]:
    """Encode all pieces into ``folder``'s token file, each document followed by the end-of-document token.

    Args:
        folder: existing folder.
        pieces: pieces of text in order; iterated once.
        tokenizer: tokenizer of ``transformers``; without an eos token nothing separates documents.
        dtype: dtype that `token_dtype` chose.
        files: number of files from which the pieces come.

    Returns:
        The number of tokens of each file, and the number of documents.

    Raises:
        Unavailable: the file cannot be written; the incomplete file is removed.
    """
    part = folder / f"{TOKENS}.part"
    ending = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    file_tokens, documents = [0] * files, 0
    with writing(folder):
        try:
            with part.open("wb") as file:
                for batch in _batches(pieces):
                    encoded = tokenizer(
                        [piece.text for piece in batch],
                        add_special_tokens=False,
                        return_attention_mask=False,
                        return_token_type_ids=False,
                        verbose=False,
                    )["input_ids"]
                    for piece, ids in zip(batch, encoded, strict=True):
                        row = np.asarray([*ids, *ending] if piece.ends_document else ids, dtype=dtype)
                        # `tofile` is not used, because it hides the reason why a write failed.
                        file.write(row.data)
                        file_tokens[piece.file] += len(row)
                        documents += piece.ends_document
            part.replace(folder / TOKENS)
        finally:
            part.unlink(missing_ok=True)
    return file_tokens, documents


def open_tokens(folder: Path, record: TokenRecord) -> NDArray[Any]:
    """Return the token file as a read-only memory map, shape ``[num_tokens]``."""
    return np.memmap(folder / TOKENS, dtype=record.dtype, mode="r", shape=(record.num_tokens,))


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Translate an OSError in the ``with`` block, for example from a full disk, into `Unavailable`."""
    try:
        yield
    except OSError as failure:
        raise Unavailable(
            f"cannot write to {folder}: {failure.strerror or failure}",
            hint="free some disk space on the server, or let it write there; then resume the job",
        ) from failure


def _batches(pieces: Iterable[TextPiece]) -> Iterator[list[TextPiece]]:
    batch: list[TextPiece] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
