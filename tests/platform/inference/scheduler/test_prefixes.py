"""Common first tokens of sequences are found, and no others are taken for them."""

from __future__ import annotations

import sys

from hypothesis import given
from hypothesis import strategies as st
from tests.platform.inference.scheduler.world import generation

from share_compute.inference.scheduler.live_sequence import LiveSequence
from share_compute.inference.scheduler.prefixes import BLOCK, add_keys
from share_compute.inference.scheduler.slot_ledger import Prefix, SlotLedger

# Few different tokens, in long runs: common prefixes of all lengths.
runs = st.lists(st.tuples(st.integers(0, 1), st.integers(1, 40)), min_size=1, max_size=4).map(
    lambda pieces: [token for token, length in pieces for _ in range(length)]
)


def live(sequence: int, tokens: list[int]) -> LiveSequence:
    return LiveSequence(generation(sequence, tuple(tokens)), sequence, 8, 128)


def common(one: list[int], other: list[int]) -> int:
    return next(
        (place for place, (left, right) in enumerate(zip(one, other, strict=False)) if left != right),
        min(len(one), len(other)),
    )


@given(st.lists(st.tuples(runs, st.floats(0, 1), st.booleans()), max_size=6), runs)
def test_the_longest_beginning_is_found_but_for_a_part_of_a_block(
    there: list[tuple[list[int], float, bool]], wanted: list[int]
) -> None:
    ledger = SlotLedger(10_000)
    written = {}
    for sequence, (tokens, part, ends) in enumerate(there):
        written[sequence] = round(part * len(tokens))
        ledger.open(live(sequence, tokens), None)
        ledger.write(sequence, written[sequence])
        if ends:
            ledger.retire(sequence)
    ready = {
        sequence: min(common(there[sequence][0], wanted[:-1]), written[sequence])
        for sequence in written
        if sequence in ledger
    }
    found = ledger.find(live(99, wanted))
    if found is None:
        assert max(ready.values(), default=0) < BLOCK
        return
    assert found.num_tokens == ready[found.sequence] < len(wanted)
    if not found.is_growing:
        assert found.num_tokens > max(ready.values()) - BLOCK


@given(runs, st.integers(0, 160))
def test_keys_do_not_depend_on_how_the_tokens_came(tokens: list[int], first: int) -> None:
    at_once: list[int] = []
    add_keys(at_once, tokens)
    one_by_one: list[int] = []
    for length in range(min(first, len(tokens)), len(tokens) + 1):
        add_keys(one_by_one, tokens[:length])
    assert one_by_one == at_once
    assert len(at_once) == len(tokens) // BLOCK


def test_an_emptied_ledger_has_nothing_left() -> None:
    ledger = SlotLedger(100)
    one = live(1, [5] * 40)
    ledger.open(one, None)
    ledger.write(1, 40)
    ledger.retire(1)
    ledger.drop_cached()
    assert ledger.take_closes() == (1,)
    assert (ledger.used_tokens, ledger.cached_tokens) == (0, 0)
    assert ledger.find(live(2, [5] * 40)) is None
    assert 1 not in ledger


def test_what_a_step_copies_from_is_not_closed_by_it() -> None:
    ledger = SlotLedger(140)
    for sequence, token in ((1, 5), (2, 6)):
        ledger.open(live(sequence, [token] * 40), None)  # 47 positions each
        ledger.write(sequence, 40)
        ledger.retire(sequence)
    copies = live(3, [5] * 30)  # 37 positions
    assert ledger.open(copies, ledger.find(copies)) == (1, 29)
    assert not ledger.fits(57)
    assert ledger.fits(56)
    needs_slot = live(4, [6] * 33)  # 40 positions: only the slot to copy from can be closed
    assert ledger.open(needs_slot, ledger.find(needs_slot)) == (None, 0)
    assert ledger.take_closes() == (2,)


def test_equal_hashes_of_other_tokens_are_not_taken_for_a_common_beginning() -> None:
    ledger = SlotLedger(100)
    twin = 5 + sys.hash_info.modulus
    assert hash(twin) == hash(5)
    ledger.open(live(1, [5] * 40), None)
    ledger.write(1, 40)
    assert ledger.find(live(2, [twin] * 40)) is None
    assert ledger.find(live(3, [5] * 40)) == Prefix(1, 39, is_growing=False)
