"""The schedule: complete, in order, the textbook's for one member a pool, and free of deadlock for any pools."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from share_compute.training.schedule import (
    Action,
    blocks,
    global_order,
    one_forward_one_backward,
    peak_in_flight,
    windows,
)

pool_sizes = st.lists(st.integers(1, 5), min_size=1, max_size=6)


def all_actions(sizes: Sequence[int], microbatches: int) -> dict[tuple[int, int], list[Action]]:
    return {
        (pool, member): one_forward_one_backward(sizes, pool, share, microbatches)
        for pool, size in enumerate(sizes)
        for member, share in enumerate(blocks(microbatches, size))
    }


def test_two_pools_follow_the_textbook() -> None:
    first, last = all_actions([1, 1], 4).values()
    assert " ".join(map(str, first)) == "0F 1F 0B 2F 1B 3F 2B 3B"
    assert " ".join(map(str, last)) == "0F 0B 1F 1B 2F 2B 3F 3B"


@given(st.integers(1, 64), st.integers(1, 12))
def test_blocks_are_contiguous_and_even(microbatches: int, members: int) -> None:
    shares = blocks(microbatches, members)
    assert [microbatch for share in shares for microbatch in share] == list(range(microbatches))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(st.integers(1, 40), st.integers(1, 8))
def test_global_order_visits_every_microbatch_once(microbatches: int, widest: int) -> None:
    assert sorted(global_order(microbatches, widest)) == list(range(microbatches))


@given(pool_sizes, st.integers(1, 16))
def test_every_cell_is_computed_once_and_nobody_waits_for_ever(sizes: list[int], microbatches: int) -> None:
    actions = all_actions(sizes, microbatches)
    done: set[tuple[str, int, int]] = set()
    place = dict.fromkeys(actions, 0)
    moved = True
    while moved:
        moved = False
        for (pool, member), own in actions.items():
            while place[pool, member] < len(own):
                action = own[place[pool, member]]
                upstream = pool == 0 or ("F", pool - 1, action.microbatch) in done
                downstream = pool == len(sizes) - 1 or ("B", pool + 1, action.microbatch) in done
                if not (upstream if action.kind == "F" else downstream):
                    break
                assert (action.kind, pool, action.microbatch) not in done
                done.add((action.kind, pool, action.microbatch))
                place[pool, member] += 1
                moved = True
    assert len(done) == 2 * len(sizes) * microbatches


@given(pool_sizes)
def test_windows_never_grow_towards_the_last_pool(sizes: list[int]) -> None:
    ahead = windows(sizes)
    assert ahead == sorted(ahead, reverse=True)
    assert ahead[-1] == 0


@given(st.integers(1, 6), st.integers(1, 16))
def test_single_members_keep_as_many_microbatches_as_pools_follow(pools: int, microbatches: int) -> None:
    for pool in range(pools):
        own = one_forward_one_backward([1] * pools, pool, range(microbatches), microbatches)
        assert peak_in_flight(own) == min(pools - pool, microbatches)
