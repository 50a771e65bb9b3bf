"""The rules of the simulator against the simulated world, where the real state machines recover from the same death."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from tests.simulated_world.scenario import Scenario
from tests.simulated_world.world import World

from share_compute.planning.cost.layout import Layout, StageLayout
from share_compute.protocol.failures import FailureKind, InjectedFailure
from share_compute.protocol.member import MemberMachine
from share_compute.protocol.member_events import Computed, Effect, Event
from share_compute.protocol.membership import Membership, Worker
from share_compute.protocol.points import Point
from share_compute.simulation.rules import EpochRules

LAYERS, RUNS = 6, (2, 2, 2, 2)
CELLS = 2 * sum(RUNS)
"""Cells of one stage in one step."""
STEPS, KILLED_IN, DEAD = 3, 2, "a"
SEEDS = 60
NAMES = "abcdef"


class Cell(NamedTuple):
    """One cell that a member of the world computed, in the epoch of a membership."""

    worker: Worker
    membership: Membership
    step: int

    @property
    def shard(self) -> tuple[int, int]:
        return self.membership.shards[self.membership.stage_of(self.worker)]


class Death(NamedTuple):
    """One death in the world: the cells of its step before and after it."""

    before: list[Cell]
    after: list[Cell]

    @property
    def layouts(self) -> tuple[Layout, Layout]:
        """Layouts before and after the death; machines are indices into `NAMES`."""
        return layout(self.before[-1].membership), layout(self.after[-1].membership)


def layout(membership: Membership) -> Layout:
    stages = zip(membership.shards, membership.stages, membership.owners, strict=True)
    return Layout(
        tuple(
            StageLayout(*shard, tuple(map(NAMES.index, stage)), tuple(map(owners.count, stage)))
            for shard, stage, owners in stages
        )
    )


def watched(cells: list[Cell]) -> type[MemberMachine]:
    """Return a class of members that note their cells."""

    class Watched(MemberMachine):
        latest: Membership | None = None

        def handle(self, event: Event) -> list[Effect]:
            self.latest = self.membership or self.latest  # a member that is halted ends its cell first
            if isinstance(event, Computed) and self.latest is not None:
                cells.append(Cell(self.worker, self.latest, self.applied + 1))
            return super().handle(event)

    return Watched


def deaths(machines: int, stages: int) -> Iterator[Death]:
    """Yield deaths of a member at several moments of a step; runs with a third epoch in that step are left out."""
    for seed in range(SEEDS):
        cells: list[Cell] = []
        kill = InjectedFailure(FailureKind.kill, Point.cell_done, DEAD, KILLED_IN, occurrence=2 + seed % 6)
        scenario = Scenario(
            seed, machines, stages, layers=LAYERS, runs=RUNS, pauses=(STEPS,), failures=(kill,)
        )
        outcome = World(scenario, new_member=watched(cells)).run()
        step = [cell for cell in cells if cell.step == KILLED_IN]
        epochs = sorted({cell.membership.epoch for cell in step})
        before = [cell for cell in step if cell.membership.epoch == epochs[0]]
        if not outcome.unmet and len(epochs) == 2 and DEAD in before[0].membership.workers:
            after = [cell for cell in step if cell.membership.epoch == epochs[1]]
            if any(cell.worker == DEAD for cell in before) and DEAD not in after[0].membership.workers:
                yield Death(before, after)


@pytest.mark.parametrize(("machines", "stages"), [(2, 1), (4, 2), (5, 2), (6, 3)])
def test_only_cells_of_members_that_left_their_stage_are_computed_again(machines: int, stages: int) -> None:
    ruled, measured = [], []
    for death in deaths(machines, stages):
        old, new = death.layouts
        done = Counter(cell.shard for cell in death.before)
        # A stage that is interrupted while it sums its gradients computes them again; the rules leave that out.
        if old.stages[0].stop != new.stages[0].stop or max(done.values()) == CELLS:
            continue
        again = []
        for before, after in zip(old.stages, new.stages, strict=True):
            lost = [NAMES[member] for member in before.members if member not in after.members]
            cells = [cell for cell in death.before + death.after if cell.shard == before[:2]]
            again.append(len(cells) - CELLS)
            assert 0 <= again[-1] <= sum(cell.worker in lost for cell in cells if cell in death.before)
        last = max(place for place, cell in enumerate(death.before) if cell.worker == DEAD)
        shard = death.before[last].shard
        at_death = sum(cell.shard == shard for cell in death.before[: last + 1])
        ruled.append(EpochRules().redone(at_death / CELLS, old, new))
        measured.append(max(again) / CELLS)
    assert len(ruled) >= SEEDS / 4
    assert sum(ruled) == pytest.approx(sum(measured), rel=0.2)


def test_all_cells_are_computed_again_if_stages_get_other_layers() -> None:
    count = 0
    for death in deaths(machines=2, stages=2):
        old, new = death.layouts
        if len(new.stages) == 1:
            count += 1
            assert len(death.after) == CELLS
            assert EpochRules().redone(0.4, old, new) == 0.4
    assert count >= SEEDS / 4
