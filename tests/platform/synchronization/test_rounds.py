"""The state machine of rounds, under drawn schedules of contributions, losses and time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from share_compute.specification.synchronization import LocalSpec
from share_compute.synchronization.records import BranchRun, Contribution, MergeRecord
from share_compute.synchronization.rounds import (
    Contributed,
    ContributionIgnored,
    MergeRecorded,
    RecordMerge,
    RoundEffect,
    RoundsMachine,
    TimeRead,
)


def local(**options: Any) -> LocalSpec:
    return LocalSpec.model_validate({"branches": 3, "every": 2, **options})


def contributed(number: int, branch: int, weight: float = 1.0) -> Contributed:
    return Contributed(Contribution(BranchRun(number, branch), weight, f"{number}/{branch}"))


def only_record(effects: list[RoundEffect]) -> MergeRecord:
    (effect,) = effects
    assert isinstance(effect, RecordMerge)
    return effect.record


def reason(effects: list[RoundEffect]) -> str:
    (effect,) = effects
    assert isinstance(effect, ContributionIgnored)
    return effect.reason


def coefficients(record: MergeRecord) -> Mapping[tuple[int, int], float]:
    return {tuple(term.contribution.run): term.coefficient for term in record.terms}


class TestOneRound:
    def test_the_order_of_contributions_does_not_change_the_record(self) -> None:
        records = []
        for order in ((0, 1, 2), (2, 0, 1)):
            machine = RoundsMachine(local(), 5)
            effects = [machine.handle(contributed(1, branch)) for branch in order]
            assert effects[:2] == [[], []]
            records.append(only_record(effects[2]))
        assert records[0] == records[1]
        assert [run.branch for run in records[0].runs] == [0, 1, 2]
        assert sum(coefficients(records[0]).values()) == pytest.approx(1.0)

    def test_without_a_quorum_it_waits_for_ever(self) -> None:
        machine = RoundsMachine(local(grace_s=1.0), 5)
        machine.handle(contributed(1, 0))
        machine.handle(contributed(1, 1))
        assert machine.handle(TimeRead(1e9)) == []
        assert machine.missing([BranchRun(1, 0), BranchRun(1, 1)]) == (2,)

    def test_with_a_quorum_it_waits_for_the_grace_period(self) -> None:
        machine = RoundsMachine(local(quorum=2, grace_s=10.0), 5)
        machine.handle(TimeRead(100.0))
        machine.handle(contributed(1, 0))
        assert machine.handle(TimeRead(150.0)) == []  # the quorum is not there: no grace period
        assert machine.handle(contributed(1, 2)) == []
        assert machine.handle(TimeRead(159.0)) == []
        assert machine.handle(TimeRead(120.0)) == []  # clocks that go back change nothing
        assert coefficients(only_record(machine.handle(TimeRead(160.0)))) == {(1, 0): 0.5, (1, 2): 0.5}

    def test_a_late_contribution_goes_into_the_next_merge_with_less_weight(self) -> None:
        machine = RoundsMachine(local(quorum=2, grace_s=0.0), 5)
        machine.handle(contributed(1, 0))
        record = only_record(machine.handle(contributed(1, 1)))
        assert machine.handle(contributed(1, 2)) == []  # while the merge is being stored
        machine.handle(MergeRecorded(record))
        assert machine.version == 1
        machine.handle(contributed(2, 0))
        found = coefficients(only_record(machine.handle(contributed(2, 1))))
        assert found == {(1, 2): 0.2, (2, 0): 0.4, (2, 1): 0.4}

    def test_a_late_contribution_can_be_dropped(self) -> None:
        machine = RoundsMachine(local(quorum=2, grace_s=0.0, late="drop"), 5)
        machine.handle(contributed(1, 0))
        record = only_record(machine.handle(contributed(1, 1)))
        assert reason(machine.handle(contributed(1, 2))) == "it is late"
        machine.handle(MergeRecorded(record))
        assert reason(machine.handle(contributed(1, 2))) == "it is late"


class TestBadContributions:
    @pytest.mark.parametrize(
        ("event", "expected"),
        [
            (contributed(2, 0), "round 1 is open"),
            (contributed(0, 0), "round 1 is open"),
            (contributed(1, 3), "branch 3 is unknown"),
            (contributed(1, -1), "branch -1 is unknown"),
            (contributed(1, 0, 0.0), "its weight is 0.0"),
            (contributed(1, 0, float("nan")), "its weight is nan"),
            (contributed(1, 0, float("inf")), "its weight is inf"),
        ],
    )
    def test_they_are_ignored(self, event: Contributed, expected: str) -> None:
        assert reason(RoundsMachine(local(), 5).handle(event)) == expected

    def test_one_that_was_merged_is_a_duplicate_for_later_coordinators_as_well(self) -> None:
        machine = RoundsMachine(local(), 5, version=1, merged=[BranchRun(1, branch) for branch in range(3)])
        assert reason(machine.handle(contributed(1, 0))) == "it is a duplicate"

    def test_none_is_used_after_the_last_round(self) -> None:
        machine = RoundsMachine(local(), 1, version=1)
        assert machine.is_over
        assert reason(machine.handle(contributed(1, 0))) == "the last round is merged"


class World:
    """A machine with branches that may be slow, and a log that may answer late."""

    def __init__(self, spec: LocalSpec, rounds: int) -> None:
        self.spec, self.rounds = spec, rounds
        self.machine = RoundsMachine(spec, rounds)
        self.bases = dict.fromkeys(range(spec.branches), 0)
        self.merged: list[BranchRun] = []
        self.pending: list[MergeRecord] = []
        self.now_s = 0.0

    def contribute(self, branch: int) -> None:
        self._take(self.machine.handle(contributed(self.bases[branch] + 1, branch)))

    def repeat(self, run: BranchRun) -> None:
        self._take(self.machine.handle(contributed(*run)))

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self._take(self.machine.handle(TimeRead(self.now_s)))

    def store(self, fast: set[int]) -> None:
        """Store the pending record; only the fast branches begin with the new version."""
        record = self.pending.pop()
        self.merged += record.runs
        self._take(self.machine.handle(MergeRecorded(record)))
        self.bases.update(dict.fromkeys(fast, self.machine.version))

    def restart(self) -> None:
        """Replace the coordinator; the contributions that wait are announced again, or lost."""
        self.pending.clear()
        self.machine = RoundsMachine(self.spec, self.rounds, self.machine.version, self.merged)
        self.wait(0.0)

    def _take(self, effects: list[RoundEffect]) -> None:
        for effect in effects:
            if isinstance(effect, RecordMerge):
                record = effect.record
                assert record.version == self.machine.version + 1
                assert sum(run.round == record.version for run in record.runs) >= self.spec.needed
                assert list(record.runs) == sorted(set(record.runs))
                assert not set(record.runs) & set(self.merged)
                assert sum(term.coefficient for term in record.terms) == pytest.approx(1.0)
                self.pending.append(record)
        assert len(self.pending) <= 1

    def finish(self) -> None:
        """A round ends once the quorum is there and the grace period is over, whatever happened before."""
        while not self.machine.is_over:
            for branch in range(self.spec.needed):
                self.bases[branch] = self.machine.version
                self.contribute(branch)
            self.wait(self.spec.grace_s)
            self.store(set())


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_each_contribution_is_merged_at_most_once_and_no_round_is_held(data: st.DataObject) -> None:
    branches = data.draw(st.integers(1, 4))
    quorum = data.draw(st.none() | st.integers(1, branches))
    late = data.draw(st.sampled_from(["merge", "drop"]))
    world = World(local(branches=branches, quorum=quorum, grace_s=5.0, late=late), rounds=4)
    for _ in range(data.draw(st.integers(10, 60))):
        match data.draw(st.sampled_from(["contribute", "repeat", "wait", "store", "restart"])):
            case "contribute":
                world.contribute(data.draw(st.integers(0, branches - 1)))
            case "repeat" if world.merged:
                world.repeat(data.draw(st.sampled_from(world.merged)))
            case "wait":
                world.wait(data.draw(st.floats(0, 10)))
            case "store" if world.pending:
                world.store(data.draw(st.sets(st.integers(0, branches - 1))))
            case "restart":
                world.restart()
    if world.pending:
        world.store(set())
    world.finish()
