"""Codes of any width come back from their bytes, and no bits are between them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from share_compute.compression.packing import MOST_BITS, pack, packed_bytes, unpack


@given(st.integers(0, MOST_BITS), st.integers(0, 70), st.integers(0, 2**32))
def test_codes_come_back(bits: int, count: int, seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (count,), generator=source, dtype=torch.int32)
    given_codes = codes.to(torch.uint8) if bits <= 8 else codes
    packed = pack(given_codes, bits)
    assert (packed.dtype, len(packed)) == (torch.uint8, packed_bytes(count, bits))
    found = unpack(packed, bits, count)
    assert found.dtype == given_codes.dtype
    assert torch.equal(found, given_codes)


@pytest.mark.parametrize(
    ("bits", "codes", "content"),
    [
        (1, [1, 0, 0, 0, 0, 0, 0, 1, 1], "8101"),
        (2, [1, 2, 3, 0, 2], "3902"),
        (4, [1, 15, 7], "f107"),
        (12, [0, 1, 4095, 2048, 7], "001000ff0f800700"),
    ],
)
def test_the_layout_is_fixed(bits: int, codes: list[int], content: str) -> None:
    """Other versions of the program read these bytes."""
    dtype = torch.uint8 if bits <= 8 else torch.int32
    assert bytes(pack(torch.tensor(codes, dtype=dtype), bits).tolist()).hex() == content


def test_columns_are_packed_row_by_row() -> None:
    codes = torch.tensor([[0, 1], [2, 3]], dtype=torch.uint8)
    assert torch.equal(pack(codes.T, 2), pack(torch.tensor([0, 2, 1, 3], dtype=torch.uint8), 2))
