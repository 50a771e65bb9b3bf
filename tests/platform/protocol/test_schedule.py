"""The schedule: complete, in order, equal to 1F1B for one member a stage, and free of deadlock for any stages."""

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from tests.platform.protocol.schedules import peak_in_flight

from share_compute.protocol.schedule import (
    Action,
    blocks,
    even_shares,
    global_order,
    one_forward_one_backward,
    windows,
)

stage_sizes = st.lists(st.integers(1, 5), min_size=1, max_size=6)


@st.composite
def stage_shares(draw: st.DrawFn) -> list[tuple[int, ...]]:
    """Stages of members with any shares of 1 to 16 microbatches."""
    microbatches = draw(st.integers(1, 16))
    stages = []
    for _ in range(draw(st.integers(1, 6))):
        members = draw(st.integers(1, min(5, microbatches)))
        cuts = sorted(draw(st.permutations(range(1, microbatches)))[: members - 1])
        stages.append(tuple(stop - start for start, stop in pairwise([0, *cuts, microbatches])))
    return stages


def all_actions(shares: Sequence[Sequence[int]]) -> dict[tuple[int, int], list[Action]]:
    return {
        (stage, member): one_forward_one_backward(shares, stage, member)
        for stage, members in enumerate(shares)
        for member in range(len(members))
    }


def test_two_stages_follow_the_textbook() -> None:
    first, last = all_actions([[4], [4]]).values()
    assert " ".join(map(str, first)) == "0F 1F 0B 2F 1B 3F 2B 3B"
    assert " ".join(map(str, last)) == "0F 0B 1F 1B 2F 2B 3F 3B"


@given(st.integers(1, 64), st.integers(1, 12))
def test_even_shares_differ_by_at_most_one(microbatches: int, members: int) -> None:
    shares = even_shares(microbatches, members)
    assert sum(shares) == microbatches
    assert max(shares) - min(shares) <= 1


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_blocks_are_contiguous_and_the_order_visits_every_microbatch_once(shares: list[int]) -> None:
    owned = blocks(shares)
    assert [len(block) for block in owned] == shares
    assert [microbatch for block in owned for microbatch in block] == list(range(sum(shares)))
    assert sorted(global_order(shares)) == list(range(sum(shares)))


@given(st.integers(1, 40), st.integers(1, 8))
def test_members_that_are_alike_take_turns(microbatches: int, members: int) -> None:
    shares = even_shares(microbatches, members)
    owner = {microbatch: place for place, block in enumerate(blocks(shares)) for microbatch in block}
    turns = [owner[microbatch] for microbatch in global_order(shares)]
    assert turns == [place % members for place in range(microbatches)]


def test_a_faster_member_has_its_turns_evenly_spread() -> None:
    assert global_order([6, 2]) == [0, 1, 6, 2, 3, 4, 7, 5]


@given(stage_shares())
def test_every_cell_is_computed_once_and_nobody_waits_for_ever(shares: list[tuple[int, ...]]) -> None:
    actions = all_actions(shares)
    done: set[tuple[str, int, int]] = set()
    place = dict.fromkeys(actions, 0)
    moved = True
    while moved:
        moved = False
        for (stage, member), own in actions.items():
            while place[stage, member] < len(own):
                action = own[place[stage, member]]
                upstream = stage == 0 or ("F", stage - 1, action.microbatch) in done
                downstream = stage == len(shares) - 1 or ("B", stage + 1, action.microbatch) in done
                if not (upstream if action.kind == "F" else downstream):
                    break
                assert (action.kind, stage, action.microbatch) not in done
                done.add((action.kind, stage, action.microbatch))
                place[stage, member] += 1
                moved = True
    assert len(done) == 2 * len(shares) * sum(shares[0])


@given(stage_sizes)
def test_windows_never_grow_towards_the_last_stage(sizes: list[int]) -> None:
    ahead = windows(sizes)
    assert ahead == sorted(ahead, reverse=True)
    assert ahead[-1] == 0


@given(st.integers(1, 6), st.integers(1, 16))
def test_single_members_keep_as_many_microbatches_as_stages_follow(stages: int, microbatches: int) -> None:
    for stage in range(stages):
        own = one_forward_one_backward([[microbatches]] * stages, stage, 0)
        assert peak_in_flight(own) == min(stages - stage, microbatches)
