"""Sends files and tensors between actors in pieces with checksums; damaged pieces are fetched again."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from share_compute.errors import ContributorLost
from share_compute.models.storage.weights import CHUNK_BYTES, files, stream_file
from share_compute_actors.wire import Content, Natural, Schema, WithContent, undeclared

TRIES = 3
"""Number of attempts to fetch a piece that arrives damaged."""


class Piece(NamedTuple):
    """Some bytes of one file, or of one tensor."""

    name: str
    content: NDArray[np.uint8]
    seal: int
    """XXH3-64 of name and content, computed before the transfer."""

    @classmethod
    def sealed(cls, name: str, content: NDArray[np.uint8]) -> Piece:
        """Return a piece with its checksum."""
        return cls(name, content, _seal(name, content))

    @classmethod
    def of_rows(cls, name: str, rows: Tensor) -> Piece:
        """Return the bytes of some rows of a tensor as a piece with its checksum."""
        return cls.sealed(name, rows.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())

    @property
    def is_whole(self) -> bool:
        """Whether name and content still match the checksum."""
        return self.seal == _seal(self.name, self.content)


class PieceSchema:
    """Encodes pieces as bytes, so that receivers unpickle nothing. None marks the end of the pieces."""

    _frame = WithContent(Schema(tuple[str, int] | None))

    def pack(self, message: Piece | None) -> bytes:
        """Return a piece, or the mark of the end, as bytes."""
        if message is None:
            return self._frame.pack(Content(None, b""))
        return self._frame.pack(Content((message.name, message.seal), message.content.data))

    def unpack(self, data: Any, sender: str) -> Piece | None:
        """Return the piece that `pack` wrote; see `share_compute_actors.wire.Packs`."""
        header, content = self._frame.unpack(data, sender)
        return None if header is None else Piece(header[0], np.frombuffer(content, np.uint8), header[1])


PIECE = PieceSchema()


class PiecesSchema:
    """Encodes several pieces as bytes, so that receivers unpickle nothing."""

    _frame = WithContent(Schema(tuple[tuple[str, int, Natural], ...]))

    def pack(self, message: Sequence[Piece]) -> bytes:
        """Return pieces as bytes."""
        header = tuple((piece.name, piece.seal, piece.content.nbytes) for piece in message)
        return self._frame.pack(Content(header, b"".join(piece.content.data for piece in message)))

    def unpack(self, data: Any, sender: str) -> list[Piece]:
        """Return the pieces that `pack` wrote; see `share_compute_actors.wire.Packs`."""
        header, content = self._frame.unpack(data, sender)
        if sum(size for _, _, size in header) != len(content):
            raise undeclared(sender, f"{len(content)} bytes of pieces, not as many as it names")
        found = []
        begin = 0
        for name, seal, size in header:
            found.append(Piece(name, np.frombuffer(content[begin : begin + size], np.uint8), seal))
            begin += size
        return found


PIECES = PiecesSchema()

Answer = TypeVar("Answer", Piece, Piece | None)


def _seal(name: str, content: NDArray[np.uint8]) -> int:
    return xxhash.xxh3_64_intdigest(content.data, seed=xxhash.xxh3_64_intdigest(name.encode()))


class Pieces:
    """The pieces of the files that one member writes into a checkpoint or artifact folder, made on demand.

    Args:
        parts: first part of the file's name (one of `_STEMS`) -> stored name of the tensor -> tensor.
        place: index of the snapshot among those of the folder.
    """

    def __init__(self, parts: Mapping[str, Mapping[str, Tensor]], place: int) -> None:
        self._rest = _cut(parts, place)
        self._given = -1
        self._last: Piece | None = None

    def give(self, number: int) -> Piece | None:
        """Return a piece, or None after the last one.

        Args:
            number: index of the piece, from 0: either the next piece, or the last returned piece again.
        """
        if number != self._given:
            assert number == self._given + 1, f"piece {number} was asked for after {self._given}"
            self._last, self._given = next(self._rest, None), number
        return self._last


_STEMS = ("model", "optimizer", "adapter_model")
"""Allowed first parts of the names of files that members write."""


def _is_part(name: str, place: int) -> bool:
    stem, _, rest = name.rpartition(f"-{place:04}-")
    return stem in _STEMS and re.fullmatch(r"[0-9]{4,8}\.part", rest) is not None


def _cut(parts: Mapping[str, Mapping[str, Tensor]], place: int) -> Iterator[Piece]:
    for stem, tensors in parts.items():
        for number, group in enumerate(files(tensors)):
            name = f"{stem}-{place:04}-{number:04}.part"
            for content in _joined(stream_file(group)):
                yield Piece.sealed(name, np.frombuffer(content, dtype=np.uint8))


def _joined(contents: Iterable[bytes]) -> Iterator[bytes]:
    """Join small contents, up to about `CHUNK_BYTES`, because each piece costs a round trip."""
    held: list[bytes] = []
    for content in contents:
        if held and sum(map(len, held)) + len(content) > CHUNK_BYTES:
            yield b"".join(held)
            held = []
        held.append(content)
    if held:
        yield b"".join(held)


def whole(ask: Callable[[], Answer], damaged: ContributorLost) -> Answer:
    """Fetch a piece until its checksum matches; return the piece, or None after the last piece.

    Args:
        ask: fetches the piece.
        damaged: error to raise if the piece arrives damaged `TRIES` times.
    """
    for _ in range(TRIES):
        piece = ask()
        if piece is None or piece.is_whole:
            return piece
    raise damaged


def take_all(
    machine: str, place: int, ask: Callable[[int], Piece | None], write: Callable[[str, bytes], None]
) -> None:
    """Fetch all pieces and write them; fetch a damaged piece again.

    Args:
        machine: name of the machine that sends the pieces.
        place: index of the snapshot among those of the folder.
        ask: returns a piece by its number; None after the last piece.
        write: appends bytes to the file with the given name.

    Raises:
        ContributorLost: a piece arrived damaged at each attempt.
        Undeclared: a piece belongs to a file that a member of this stage must not send.
    """
    damaged = ContributorLost(
        f"a piece of the state of {machine} arrived damaged {TRIES} times",
        machine=machine,
        hint="check memory and network of that machine; the job continues from its last checkpoint",
    )
    for number in count():
        piece = whole(partial(ask, number), damaged)
        if piece is None:
            return
        if not _is_part(piece.name, place):
            raise undeclared(machine, f"a piece of a file named {piece.name[:80]!r}")
        write(piece.name, piece.content.tobytes())
