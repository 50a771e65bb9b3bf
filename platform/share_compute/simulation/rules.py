"""Cost of a membership change, for example after a machine's death: work that is computed again, and a pause.

A membership change ends the epoch, and committed steps are kept. In the step in progress, a stage recomputes the
microbatches of members that left it. If the stages get other layers, the whole step is recomputed. New members fetch
the state of their layers. One cost is left out: a stage that is interrupted while it sums its gradients recomputes
them.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from share_compute.planning.cost.cost import TrainingCost
from share_compute.planning.cost.layout import Layout, StageLayout
from share_compute.planning.drift import moving


class Downtime(NamedTuple):
    """Time for which no step is computed, by reason, in seconds."""

    noticing_s: float = 0.0
    """Time until the machine's death is detected."""
    planning_s: float = 0.0
    moving_s: float = 0.0
    """Time to send state over links and to start members."""

    @property
    def total_s(self) -> float:
        """The whole pause in seconds."""
        return sum(self)


@dataclass(frozen=True, slots=True)
class Change:
    """A change from one epoch to the next."""

    old: Layout | None
    """Last layout whose members had all their state; None if there is none."""
    new: Layout
    gone: frozenset[int] = frozenset()
    """Machines that died since the old layout had all its state; they need not be members of that layout."""
    is_death: bool = False
    """Whether the change follows a death that had to be detected first."""
    is_search: bool = True
    """Whether the planner searched for a plan; otherwise a spare machine replaces the dead member."""


class Rules(Protocol):
    """Cost of a membership change."""

    def redone(self, in_progress: float, old: Layout, new: Layout | None) -> float:
        """Return the share of the step that is computed again after a death.

        Args:
            in_progress: share of the step that was computed before the death (0 to 1).
            old: layout until the death.
            new: layout after the death; None if the present machines cannot hold the job.
        """

    def pause(self, cost: TrainingCost, change: Change) -> Downtime:
        """Return the pause of training between two epochs."""


@dataclass(frozen=True, slots=True)
class EpochRules:
    """Costs if every membership change starts a new epoch."""

    noticing_s: float = 2.0
    """Time after which an unresponsive machine counts as lost."""
    search_s: float = 5.0
    """Time of a search by the planner."""
    replace_s: float = 0.5
    """Time to put a spare in the place of a similar machine."""
    start_s: float = 1.0
    """Time in which members connect and build their shards."""

    def redone(self, in_progress: float, old: Layout, new: Layout | None) -> float:
        """Return the share of the step that is lost.

        This is ``in_progress`` times the share of a stage's microbatches that belonged to departed members, in the
        stage where this share is largest. If a stage gets other layers, or there is no new layout, all work on the
        step is lost.
        """
        if new is None or _spans(old) != _spans(new):
            return in_progress
        return in_progress * max(_left(*stages) for stages in zip(old.stages, new.stages, strict=True))

    def pause(self, cost: TrainingCost, change: Change) -> Downtime:
        """Return the time to detect the death, to plan, to start members, and to fetch missing state."""
        fetched_s = fetching_s(cost, change.old, change.new, change.gone) if change.old else 0.0
        return Downtime(
            noticing_s=self.noticing_s if change.is_death else 0.0,
            planning_s=self.search_s if change.is_search else self.replace_s,
            moving_s=self.start_s + fetched_s,
        )


def fetching_s(cost: TrainingCost, old: Layout, new: Layout, gone: Container[int]) -> float:
    """Return the time in seconds until all members of a new layout have their state.

    The state of a stage comes from its remaining members. If there are none, it comes from backups on the remaining
    members of the next stage that has any, in cyclic order. If no stage has a remaining member, all state comes from
    the checkpoint, over links as fast as those in the receiver's region.

    Args:
        cost: tables of the job; machine indices are those of its topology.
        old: layout that has the state.
        new: layout that needs the state.
        gone: machines of the old layout that cannot send.
    """
    left = [tuple(member for member in stage.members if member not in gone) for stage in old.stages]
    if not any(left):
        return max(
            cost.network.transfer_s(member, member, cost.carried_bytes(stage.start, stage.stop))
            for stage in new.stages
            for member in stage.members
        )
    senders = [next(filter(None, left[place:] + left[:place])) for place in range(len(left))]
    before = Layout(
        tuple(
            StageLayout(stage.start, stage.stop, members, (1,) * len(members))
            for stage, members in zip(old.stages, senders, strict=True)
        )
    )
    return moving(cost, before, new)[0]


def _spans(layout: Layout) -> list[tuple[int, int]]:
    """Return the layers of each stage, [start, stop)."""
    return [(stage.start, stage.stop) for stage in layout.stages]


def _left(old: StageLayout, new: StageLayout) -> float:
    """Return the share of a stage's microbatches that belonged to members that have left the stage."""
    return sum(
        share for member, share in zip(old.members, old.shares, strict=True) if member not in new.members
    ) / sum(old.shares)
