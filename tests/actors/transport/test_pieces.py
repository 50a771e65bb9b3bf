"""Pieces of a snapshot in transit: sealed, and requested again if they are damaged; without Ray."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from safetensors.torch import load

from share_compute.errors import ContributorLost
from share_compute_actors.training.member.saving import copied
from share_compute_actors.transport.pieces import Piece, Pieces, take_all

PARTS = {
    "model": {"a": torch.rand(700, 1000), "b": torch.rand(3)},
    "optimizer": {"a::step": torch.tensor(4.0)},
}


def fetched(ask: Callable[[int], Piece | None]) -> dict[str, bytes]:
    written: dict[str, bytes] = {}

    def write(name: str, content: bytes) -> None:
        written[name] = written.get(name, b"") + content

    take_all("machine-1", 2, ask, write)
    return written


def whole() -> dict[str, bytes]:
    return fetched(Pieces(PARTS, place=2).give)


def test_the_pieces_of_a_snapshot_are_its_files() -> None:
    written = whole()
    assert list(written) == ["model-0002-0000.part", "optimizer-0002-0000.part"]
    for content, tensors in zip(written.values(), PARTS.values(), strict=True):
        found = load(content)
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_a_piece_that_was_damaged_on_its_way_is_requested_again() -> None:
    pieces = Pieces(PARTS, place=2)
    numbers: list[int] = []

    def ask(number: int) -> Piece | None:
        piece = pieces.give(number)
        numbers.append(number)
        if piece is None or numbers.count(number) > number % 3:
            return piece
        content = np.array(piece.content)
        content[-1] ^= 8
        return piece._replace(content=content) if number % 2 else piece._replace(name="model-0000-0000.part")

    assert fetched(ask) == whole()
    assert [numbers.count(number) for number in range(3)] == [1, 2, 3]


def test_a_machine_whose_pieces_are_always_damaged_is_named() -> None:
    def ask(number: int) -> Piece:
        return Piece("model-0002-0000.part", np.zeros(4, dtype=np.uint8), seal=number)

    with pytest.raises(ContributorLost, match=r"the state of machine-1 arrived damaged 3 times") as lost:
        fetched(ask)
    assert lost.value.machine == "machine-1"
    assert lost.value.hint


def test_a_copy_stays_what_it_was() -> None:
    weights = torch.ones(4)
    copy = copied({"model": {"a": weights}}, lent_bytes=0)
    assert copy is not None
    weights.zero_()
    assert copy["model"]["a"].tolist() == [1.0] * 4


def test_without_space_there_is_no_copy() -> None:
    assert copied(PARTS, lent_bytes=1) is None
    huge = torch.empty(2**58, dtype=torch.uint8, device="meta")
    assert copied({"model": {"a": huge}}, lent_bytes=0) is None
