"""The state machine of rounds, under drawn schedules of contributions, losses and time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from share_compute.specification import TrainingSpec
from share_compute.specification.synchronization import (
    BranchesSpec,
    ElasticSpec,
    LocalSpec,
    ParameterServerSpec,
)
from share_compute.synchronization.records import BranchRun, Contribution, MergeRecord, MergeTerm
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


def a_record(version: int, branches: int = 3) -> MergeRecord:
    contributions = [contributed(version, branch).contribution for branch in range(branches)]
    return MergeRecord(version, tuple(MergeTerm(each, 1 / branches) for each in contributions))


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
        assert machine.handle(TimeRead(150.0)) == []  # without a quorum there is no grace period
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

    @pytest.mark.parametrize("kind", ["local", "parameter_server"])
    def test_a_late_contribution_can_be_dropped(self, kind: str) -> None:
        options = {"quorum": 2, "grace_s": 0.0, "late": "drop"}
        spec = local(**options) if kind == "local" else ParameterServerSpec(branches=3, **options)
        machine = RoundsMachine(spec, 5)
        machine.handle(contributed(1, 0))
        record = only_record(machine.handle(contributed(1, 1)))
        assert reason(machine.handle(contributed(1, 2))) == "it is late"
        machine.handle(MergeRecorded(record))
        assert reason(machine.handle(contributed(1, 2))) == "it is late"


class TestSynchronousParameterServer:
    def test_a_dead_worker_holds_the_others_no_longer_than_the_grace_period(self) -> None:
        machine = RoundsMachine(ParameterServerSpec(branches=3, quorum=2, grace_s=10.0), 3)
        for number in (1, 2, 3):
            assert machine.handle(TimeRead(100.0 * number)) == []
            machine.handle(contributed(number, 0))
            assert machine.handle(contributed(number, 1)) == []
            assert machine.handle(TimeRead(100.0 * number + 9.0)) == []
            record = only_record(machine.handle(TimeRead(100.0 * number + 10.0)))
            assert coefficients(record) == {(number, 0): 0.5, (number, 1): 0.5}
            machine.handle(MergeRecorded(record))
            assert machine.rounds_done == number
            assert not machine.has_to_wait(0) or machine.is_over
            assert machine.updates(BranchRun(number, 0)) == range(number, number + 1)
        assert machine.is_over

    def test_a_late_push_is_scaled_by_its_age_and_its_branch_skips_to_the_open_round(self) -> None:
        machine = RoundsMachine(ParameterServerSpec(branches=3, quorum=2, grace_s=0.0), 5)
        for number in (1, 2):
            machine.handle(contributed(number, 0))
            machine.handle(MergeRecorded(only_record(machine.handle(contributed(number, 1)))))
        assert machine.handle(contributed(1, 2)) == []
        assert machine.updates(BranchRun(1, 2)) == range(1, 3)
        machine.handle(contributed(3, 0))
        found = coefficients(only_record(machine.handle(contributed(3, 1))))
        assert found == pytest.approx({(1, 2): 1 / 7, (3, 0): 3 / 7, (3, 1): 3 / 7})


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
        machine = RoundsMachine(local(), 5, [a_record(1)])
        assert reason(machine.handle(contributed(1, 0))) == "it is a duplicate"

    def test_none_is_used_after_the_last_round(self) -> None:
        machine = RoundsMachine(local(), 1, [a_record(1)])
        assert machine.is_over
        assert reason(machine.handle(contributed(1, 0))) == "the last round is merged"


POLICIES: dict[str, dict[str, Any]] = {
    "local": {"kind": "local", "grace_s": 5.0},
    "local, late ones dropped": {"kind": "local", "grace_s": 5.0, "late": "drop"},
    "elastic": {"kind": "elastic", "grace_s": 5.0, "rate": 0.2},
    "gossip": {"kind": "gossip", "grace_s": 5.0},
    "synchronous": {"kind": "parameter_server", "staleness": 0, "grace_s": 5.0},
    "synchronous, late ones dropped": {
        "kind": "parameter_server",
        "staleness": 0,
        "grace_s": 5.0,
        "late": "drop",
    },
    "bounded": {"kind": "parameter_server", "staleness": 2},
    "unbounded": {"kind": "parameter_server", "staleness": "unbounded"},
}


def policy(name: str, branches: int, **options: Any) -> BranchesSpec:
    document = {"branches": branches, "every": 2, **POLICIES[name], **options}
    found = TrainingSpec.model_validate({"steps": 8, "synchronization": document}).rounds
    assert found is not None
    return found


class World:
    """Branches that train one round after another, islands that die, and a coordinator that is replaced."""

    def __init__(self, spec: BranchesSpec, rounds: int, *, has_ranges: bool = False) -> None:
        self.spec, self.rounds, self.has_ranges = spec, rounds, has_ranges
        self.machine = RoundsMachine(spec, rounds)
        self.bases = dict.fromkeys(range(spec.branches), 0)
        """Version with which each branch trains, or whose next version it waits for."""
        self.trains = dict.fromkeys(range(spec.branches), True)
        self.samples = dict.fromkeys(range(spec.branches), 0)
        """Round of its own samples that each branch trains, from 0."""
        self.pushed: dict[BranchRun, int] = {}
        """Round of the samples of each run."""
        self.kept: dict[int, Contributed] = {}
        """Contributions that branches have announced and for which they have no updates yet."""
        self.waiting: set[int] = set()
        """Branches that lost their islands and wait for others before they begin again."""
        self.moving: set[int] = set()
        """Branches that have saved their state, and begin again on an island that joined."""
        self.log: list[MergeRecord] = []
        self.pending: list[MergeRecord] = []
        self.ignored: list[BranchRun] = []
        self.now_s = 0.0

    @property
    def merged(self) -> list[BranchRun]:
        return [run for record in self.log for run in record.runs]

    def contribute(self, branch: int) -> None:
        """Let a branch that trains finish its round."""
        if self.trains[branch] and not self.machine.is_over:
            self.trains[branch] = False
            event = contributed(self.bases[branch] + 1, branch)
            self.kept[branch] = event
            self.pushed.setdefault(event.contribution.run, self.samples[branch])
            self._announce(branch)

    def _announce(self, branch: int) -> None:
        self._take(self.machine.handle(TimeRead(self.now_s)))
        if not self.machine.has(self.kept[branch].contribution.run):
            self._take(self.machine.handle(self.kept[branch]))
        self.answer()

    def answer(self) -> None:
        """Let all branches continue that may continue."""
        for branch, event in list(self.kept.items()):
            versions = self.machine.updates(event.contribution.run)
            if versions is None or self.machine.is_over:
                continue
            assert versions.stop - 1 <= self.machine.version
            if not self.spec.keeps_own_weights:
                assert versions.start == self.bases[branch] + 1
                assert versions.stop - 1 == self.machine.version
            del self.kept[branch]
            self._begin(branch, versions.stop - 1)
        for branch in list(self.waiting):
            self._begin_again(branch)

    def join(self, branch: int) -> None:
        """Let a branch move to an island that joined: it saves its state, in a round or while it waits for a merge."""
        if self.trains[branch]:
            self.trains[branch] = False
            self.moving.add(branch)
        elif branch in self.kept:
            self._announce(branch)

    def arrive(self) -> None:
        """Let branches that move begin: with their state, or with the newest weights if it is for a merged round."""
        for branch in list(self.moving):
            if self.machine.is_over or self.machine.has_to_wait(branch):
                continue
            self.moving.remove(branch)
            base = self.bases[branch]
            if self.spec.skips_missed and base < self.machine.version:
                self.machine.withdraw(branch)
                self._begin(branch, self.machine.version)
            else:
                assert self.machine.last_round(branch) <= base + 1
                self.trains[branch] = True

    def _begin(self, branch: int, version: int) -> None:
        self._check_staleness(branch)
        self.bases[branch], self.trains[branch] = version, True
        self.samples[branch] = self.machine.clock(branch)

    def _check_staleness(self, branch: int) -> None:
        spec = self.spec
        if isinstance(spec, ParameterServerSpec) and spec.staleness != "unbounded" and spec.quorum is None:
            clocks = [sum(run.branch == each for run in self.merged) for each in range(spec.branches)]
            assert clocks[branch] - min(clocks) <= spec.staleness

    def lose(self, branch: int) -> None:
        """Let a branch lose its island: another one begins with the weights that the server has of it."""
        while self.pending and not self.has_ranges:  # the server merges before it handles the next event
            self.store()
        self.kept.pop(branch, None)
        self.moving.discard(branch)
        self.machine.withdraw(branch)
        self.trains[branch] = False
        self.waiting.add(branch)
        self._begin_again(branch)

    def _begin_again(self, branch: int) -> None:
        if self.machine.is_over or self.machine.has_to_wait(branch):
            return
        self.waiting.remove(branch)
        version = self.machine.version
        if self.spec.keeps_own_weights:
            own = [record.version for record in self.log for run in record.runs if run.branch == branch]
            version = max(own, default=0)
        self._begin(branch, version)

    def repeat(self, run: BranchRun) -> None:
        self._take(self.machine.handle(contributed(*run)))

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self._take(self.machine.handle(TimeRead(self.now_s)))

    def store(self) -> None:
        """Store the pending record: the merge is committed."""
        record = self.pending.pop()
        self.log.append(record)
        self._take(self.machine.handle(MergeRecorded(record)))
        self.answer()

    def restart(self, *, is_stored: bool) -> None:
        """Replace the coordinator, before or after the commit of a pending merge; branches announce again."""
        if is_stored:
            self.log += self.pending
        self.pending.clear()
        self.machine = RoundsMachine(self.spec, self.rounds, self.log)
        for branch in list(self.kept):
            if branch in self.kept:  # an answer for another branch may also have concerned this one
                self._announce(branch)

    def lose_range(self) -> None:
        """Let a range lose its server and its backup: no contribution that is not merged is left.

        Branches that wait for a merge announce theirs again; contributions of branches that have continued are lost.
        """
        self.pending.clear()
        self.machine.restart_round()
        for branch in list(self.kept):
            if branch in self.kept:
                self._announce(branch)
        self.answer()

    def _take(self, effects: list[RoundEffect]) -> None:
        for effect in effects:
            if not isinstance(effect, RecordMerge):
                self.ignored.append(effect.run)
                continue
            record = effect.record
            assert record.version == self.machine.version + 1
            assert list(record.runs) == sorted(set(record.runs))
            assert not set(record.runs) & set(self.merged)
            skips = self.spec.skips_missed
            there = {run.branch for run in record.runs if run.round == record.version or not skips}
            assert len(there) >= self.spec.needed
            factors = [term.coefficient for term in record.terms]
            if isinstance(self.spec, ElasticSpec):
                assert all(0 < factor <= self.spec.rate for factor in factors)
            elif self.spec.merges_apart:
                assert set(factors) == {1 / self.spec.branches}
            else:
                assert sum(factors) == pytest.approx(1.0)
            self.pending.append(record)
        assert len(self.pending) <= 1

    def finish(self) -> None:
        """End the job without the branches that it does not need, whatever happened before."""
        needed = self.spec.branches if self.spec.merges_apart else self.spec.needed
        self.arrive()
        for _ in range(3 * self.rounds * self.spec.branches + 3):
            for branch in range(needed):
                self.contribute(branch)
            self.wait(self.spec.patience_s)
            if self.pending:
                self.store()
            self.arrive()
        assert self.machine.is_over


def test_a_clock_that_goes_backwards_neither_ends_nor_prolongs_a_grace_period() -> None:
    machine = RoundsMachine(LocalSpec(branches=3, quorum=2, grace_s=60.0), 2)
    assert machine.handle(TimeRead(1000.0)) == []
    assert machine.handle(contributed(1, 0)) == machine.handle(contributed(1, 1)) == []
    for now_s in (5.0, 1059.0, -1e9, 1059.9):
        assert machine.handle(TimeRead(now_s)) == []
    (merge,) = machine.handle(TimeRead(1060.0))
    assert isinstance(merge, RecordMerge)
    assert merge.record.runs == (BranchRun(1, 0), BranchRun(1, 1))


MOMENTS = [
    "contribute",
    "contribute",
    "repeat",
    "wait",
    "store",
    "lose",
    "join",
    "arrive",
    "restart",
    "restart after the commit",
    "lose a range",
]


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_each_contribution_is_merged_once_and_no_round_is_held(name: str, data: st.DataObject) -> None:
    check_schedule(name, data)


@pytest.mark.thorough
@pytest.mark.parametrize("name", POLICIES)
def test_the_same_holds_under_ten_thousand_schedules(name: str, pytestconfig: pytest.Config) -> None:
    """All policies together have ten thousand schedules, unless ``--schedules`` has the number for each of them."""

    @settings(max_examples=pytestconfig.getoption("--schedules") or 1500, deadline=None)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        check_schedule(name, data)

    check()


def check_schedule(name: str, data: st.DataObject) -> None:
    """Play a drawn schedule with a policy."""
    branches = data.draw(st.integers(2, 4))
    options = {}
    if POLICIES[name].get("staleness", 0) == 0:
        options["quorum"] = data.draw(st.none() | st.integers(1, branches))
    has_ranges = POLICIES[name]["kind"] in ("local", "parameter_server") and data.draw(st.booleans())
    world = World(policy(name, branches, **options), rounds=4, has_ranges=has_ranges)
    play(world, data.draw(st.lists(st.sampled_from(MOMENTS), min_size=10, max_size=60)), data.draw)
    if isinstance(world.spec, ParameterServerSpec) and world.spec.quorum is None:
        # Each branch pushes each of its rounds exactly once, and none is ignored.
        clocks = Counter(run.branch for run in world.merged)
        assert set(clocks.values()) == {world.rounds}
        assert not world.ignored
        trained = Counter((run.branch, world.pushed[run]) for run in world.merged)
        assert set(trained.values()) == {1}, trained


def play(world: World, moments: list[str], draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
    """Play a schedule with a loss at any point, and then end the job."""
    of_a_branch = {"contribute": world.contribute, "lose": world.lose, "join": world.join}
    of_all = {
        "arrive": world.arrive,
        "restart": partial(world.restart, is_stored=False),
        "restart after the commit": partial(world.restart, is_stored=True),
    }
    for moment in moments:
        match moment:
            case "repeat" if world.merged:
                world.repeat(draw(st.sampled_from(world.merged)))
                if world.ignored:
                    world.ignored.pop()
            case "wait":
                world.wait(draw(st.floats(0, 10)))
            case "store" if world.pending:
                world.store()
            case "lose a range" if world.has_ranges:
                world.lose_range()
            case _ if moment in of_a_branch:
                of_a_branch[moment](draw(st.integers(0, world.spec.branches - 1)))
            case _ if moment in of_all:
                of_all[moment]()
    if world.pending:
        world.store()
    world.finish()
