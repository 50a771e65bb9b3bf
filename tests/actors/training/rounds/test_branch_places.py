"""Machines on which a branch continues when it has lost some of its own, without Ray."""

from __future__ import annotations

from typing import Any

import pytest

from share_compute.errors import ContributorLost
from share_compute.planning.branches import BranchPlace
from share_compute_actors.training.rounds.branch_attempt import BranchAttempt, other_place


def branches_on(
    *places: tuple[str, ...], trained: tuple[int, ...] = (), waiting: tuple[int, ...] = ()
) -> list[BranchAttempt]:
    """Return branches on these machines; ``trained`` ones have a coordinator, ``waiting`` ones get one later."""

    def start(_assignment: Any) -> None:
        raise AssertionError("no coordinator is needed")

    made = [
        BranchAttempt(number, BranchPlace(machines, (number,), 1.5), start)
        for number, machines in enumerate(places)
    ]
    for number in trained:
        made[number].has_ended = False
    for number in waiting:
        made[number].begins_later = lambda: None
    return made


def place(branches: list[BranchAttempt], *left: str, holds: bool = True) -> BranchPlace:
    """Return the place of the first branch, which lost machines; ``holds`` says whether the others hold the model."""
    return other_place(branches[0], branches, left, lambda _: holds, "machine a was lost")


def test_the_island_with_the_fewest_branches_is_used() -> None:
    branches = branches_on(("a",), ("b", "c"), ("b", "c"), ("d",), trained=(1, 2, 3))
    assert place(branches, "a", "b", "c", "d") == BranchPlace(("d",), (0, 3), 1.5)
    assert place(branches, "b", "c") == BranchPlace(("b", "c"), (0, 1, 2), 1.5)


def test_branches_without_a_coordinator_have_machines_as_well() -> None:
    """Branches that are too far ahead wait without a coordinator, and branches that succeeded have none."""
    places = ("a",), ("b",), ("c",), ("c",)
    all_wait = branches_on(*places, waiting=(1, 2, 3))
    assert place(all_wait, "b", "c") == BranchPlace(("b",), (0, 1), 1.5)
    one_trains = branches_on(*places, trained=(2,), waiting=(1, 3))
    assert place(one_trains, "b", "c") == BranchPlace(("c",), (0, 2, 3), 1.5)
    succeeded = branches_on(*places)
    assert place(succeeded, "b", "c") == BranchPlace(("b",), (0,), 1.5)


def test_the_rest_of_the_own_island_is_used_if_it_can_hold_the_model() -> None:
    trained = branches_on(("a", "b"), ("c",), trained=(1,))
    assert place(trained, "b", "c") == BranchPlace(("b",), (0,), 1.5)
    assert place(trained, "b", "c", holds=False) == BranchPlace(("c",), (0, 1), 1.5)
    assert place(trained, "a", "b", "c") == BranchPlace(("c",), (0, 1), 1.5)  # the loss is not known yet
    waiting = branches_on(("a", "b"), ("c",), waiting=(1,))
    assert place(waiting, "b", "c") == BranchPlace(("b",), (0,), 1.5)


def test_branches_that_shared_an_island_share_the_rest_of_it() -> None:
    branches = branches_on(("a", "b"), ("a", "b"), ("c",), trained=(1, 2))
    branches[0].place = place(branches, "b", "c")
    assert branches[0].place == BranchPlace(("b",), (0, 1), 1.5)
    second = other_place(branches[1], branches, ("b", "c"), lambda _: True, "machine a was lost")
    assert second.machines == ("b",)


def test_without_a_whole_island_the_rest_of_the_own_one_is_used() -> None:
    branches = branches_on(("a", "b"), ("c", "d"))
    assert place(branches, "b", "c").machines == ("b",)
    assert place(branches, "e", "c").machines == ("c", "e")


def test_a_job_without_machines_says_what_to_do() -> None:
    with pytest.raises(ContributorLost, match="machine a was lost") as failure:
        place(branches_on(("a",), ("b",)))
    assert "let a machine join" in failure.value.hint
