"""What the step protocol makes of a death: the seam where its state machine will drive the simulation.

`EpochRules` are the rules of today at the level of steps and epochs. Every change of members ends the epoch; a death
loses the step in progress, which is done again; committed steps stay; what the dead machine held is fetched again.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from share_compute.planning.cost import TrainingCost
from share_compute.planning.drift import moving
from share_compute.planning.layout import Layout, PoolLayout


class Pause(NamedTuple):
    """Why no step is computed for a while, and how long; in seconds."""

    noticing_s: float = 0.0
    """Until the death is known."""
    planning_s: float = 0.0
    moving_s: float = 0.0
    """State on its way over links, and members that start."""

    @property
    def total_s(self) -> float:
        """All of it."""
        return sum(self)


@dataclass(frozen=True, slots=True)
class Change:
    """From one epoch to the next."""

    old: Layout | None
    """None at the first start."""
    new: Layout
    gone: frozenset[int] = frozenset()
    """Members of the old layout that died since it was laid."""
    is_death: bool = False
    """Whether somebody had to notice it first."""
    is_search: bool = True
    """Whether the planner searched, instead of putting a spare into the place of the dead."""


class Rules(Protocol):
    """What a change of members costs."""

    def redone(self, in_progress: float) -> float:
        """Return how much of the step in progress is lost, given how much of it was done (0 to 1)."""

    def pause(self, cost: TrainingCost, change: Change) -> Pause:
        """Return how long training stands still between two epochs."""


@dataclass(frozen=True, slots=True)
class EpochRules:
    """Every change of members starts a new epoch."""

    noticing_s: float = 3.0
    """Health checks of 1 s that fail three times."""
    search_s: float = 5.0
    """The planner's search, and the job's way through the control plane."""
    replace_s: float = 0.5
    """A spare in the place of a machine like it."""
    start_s: float = 1.0
    """Members connect and build their shards."""

    def redone(self, in_progress: float) -> float:
        """Lose the whole step in progress."""
        return in_progress

    def pause(self, cost: TrainingCost, change: Change) -> Pause:
        """Notice, plan, and fetch what new holders lack."""
        fetched_s = fetching_s(cost, change.old, change.new, change.gone) if change.old else 0.0
        return Pause(
            noticing_s=self.noticing_s if change.is_death else 0.0,
            planning_s=self.search_s if change.is_search else self.replace_s,
            moving_s=self.start_s + fetched_s,
        )


def fetching_s(cost: TrainingCost, old: Layout, new: Layout, gone: Container[int]) -> float:
    """Return how long it takes until all members of a new layout have their state.

    What a pool held comes from those of its members that are left, or else from its buddy: a member of the next pool
    that is left. When nobody is, everything comes from the checkpoint, over links like those of the receiver's region.

    Args:
        cost: tables of the job; indices of machines are its topology's.
        old: where the state is.
        new: where it must be.
        gone: machines of the old layout that cannot send.
    """
    left = [tuple(member for member in pool.members if member not in gone) for pool in old.pools]
    if not any(left):
        return max(
            cost.network.transfer_s(member, member, cost.carried_bytes(pool.start, pool.stop))
            for pool in new.pools
            for member in pool.members
        )
    senders = [next(filter(None, left[place:] + left[:place])) for place in range(len(left))]
    before = Layout(
        tuple(
            PoolLayout(pool.start, pool.stop, members, (1,) * len(members))
            for pool, members in zip(old.pools, senders, strict=True)
        )
    )
    return moving(cost, before, new)[0]
