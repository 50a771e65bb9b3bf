"""Ranges on machines that are lost at any point: each acknowledged contribution is merged exactly once."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from share_compute.synchronization.range_machine import (
    Acknowledge,
    CommitMerge,
    ComputeMerge,
    ContributionArrived,
    ContributionCopied,
    ContributionDropped,
    CopyContribution,
    CopyMerge,
    CopyRange,
    Follow,
    Holder,
    HolderLost,
    MachinesOffered,
    MergeDue,
    RangeCopied,
    RangeEffect,
    RangeEvent,
    RangeMerged,
    RangesFollowed,
    RangesMachine,
    ReleaseRange,
    RestartRound,
    SendAgain,
)
from share_compute.synchronization.records import BranchRun, Contribution, MergeRecord, MergeTerm

RANGES, BRANCHES, ROUNDS = 3, 3, 4


@dataclass
class Files:
    """Files of a range on a machine; the set of merged contributions of each version replaces its weights."""

    versions: dict[int, tuple[str, ...]] = field(default_factory=dict)
    parts: set[str] = field(default_factory=set)


class World:
    """Machines, branches and messages; a schedule draws what happens next, and which machines are lost."""

    def __init__(self, seed: int, losses: int, *, spares_pairs: bool, flips: bool = False) -> None:
        self.draw = random.Random(seed)
        self.losses, self.spares_pairs, self.flips = losses, spares_pairs, flips
        self.changes = seed % 4
        """Number of times that a machine joins, a branch is lost, or the coordinator is replaced."""
        self.machines = [f"m{number}" for number in range(6)]
        self.files: dict[Holder, Files] = {}
        self.digests: dict[tuple[Holder, int], str] = {}
        """Digest of each merge that a machine computed or copied, by version."""
        self.head: list[tuple[tuple[str, ...], ...]] = [((),) * RANGES]
        self.machine = RangesMachine(RANGES, 0)
        self.pending: list[RangeEffect | HolderLost] = []
        self.to_send = [f"1-{branch}" for branch in range(BRANCHES)]
        self.acknowledged: list[str] = []
        self.log: list[str] = []
        self.merging: list[str] = []
        self.restarts = 0
        self.tell(MachinesOffered(tuple(self.machines)))

    def tell(self, event: RangeEvent) -> None:
        for effect in self.machine.handle(event):
            match effect:
                case ReleaseRange():
                    self.files.pop(effect.holder, None)
                case Acknowledge():
                    assert effect.key not in self.acknowledged + self.log
                    self.acknowledged.append(effect.key)
                case SendAgain():
                    self.to_send.append(effect.key)
                case RestartRound():
                    self.restarts += 1
                    self.send_all_again()
                case CommitMerge():
                    self.commit(effect.record)
                case _:
                    self.pending.append(effect)

    def send_all_again(self) -> None:
        open_keys = {f"{self.rounds(branch) + 1}-{branch}" for branch in range(BRANCHES)}
        self.to_send = sorted(key for key in open_keys if int(key.partition("-")[0]) <= ROUNDS)
        self.acknowledged.clear()
        self.merging = []

    def rounds(self, branch: int) -> int:
        return sum(key.endswith(f"-{branch}") for key in self.log)

    def commit(self, record: MergeRecord) -> None:
        keys = [f"{run.round}-{run.branch}" for run in record.runs]
        self.log += keys
        assert self.head[record.version] == (tuple(self.log),) * RANGES
        self.merging = []
        for key in keys:
            number, branch = map(int, key.split("-"))
            if number < ROUNDS:
                self.to_send.append(f"{number + 1}-{branch}")

    def step(self) -> None:
        choices = [self.answer] * len(self.pending) + [self.send] * len(self.to_send)
        if self.acknowledged and not self.merging:
            choices.append(self.merge)
        if self.losses and self.draw.random() < 0.15:
            choices = [self.lose]
        elif self.changes and self.draw.random() < 0.06:
            self.changes -= 1
            choices = [self.join, self.lose_branch, self.replace_coordinator]
        assert choices, "nothing is left to do, and the job has not ended"
        self.draw.choice(choices)()

    def send(self) -> None:
        key = self.to_send.pop(self.draw.randrange(len(self.to_send)))
        servers = self.machine.servers
        if any(
            machine is None or Holder(number, machine) not in self.files
            for number, machine in enumerate(servers)
        ):
            self.to_send.append(key)  # it is sent again when there is another server
            if not self.pending:
                raise AssertionError("a range has no server")
            self.answer()
            return
        for number, machine in enumerate(servers):
            self.files[Holder(number, machine or "")].parts.add(key)
        self.tell(ContributionArrived(key, tuple(machine or "" for machine in servers)))

    def merge(self) -> None:
        self.draw.shuffle(self.acknowledged)
        taken = [self.acknowledged.pop() for _ in range(self.draw.randint(1, len(self.acknowledged)))]
        terms = []
        for key in taken:
            number, branch = map(int, key.split("-"))
            terms.append(MergeTerm(Contribution(BranchRun(number, branch), 1.0, key), 1.0))
        self.merging = taken
        self.tell(MergeDue(MergeRecord(self.machine.version + 1, tuple(terms)), tuple(taken)))

    def lose(self) -> None:
        alive = sorted({holder.machine for holder in self.files})
        self.losses -= 1
        for machine in self.draw.sample(alive, len(alive)):
            lost = [holder for holder in self.files if holder.machine == machine]
            if self.spares_pairs and not all(self.has_other(holder) for holder in lost):
                continue
            if len(self.machines) > 2:
                self.machines.remove(machine)
                self.tell(MachinesOffered(tuple(self.machines)))
            for holder in lost:
                if self.files.pop(holder, None) is not None:
                    self.pending.append(HolderLost(holder))
            return

    def join(self) -> None:
        self.machines.append(f"n{self.changes}")
        self.draw.shuffle(self.machines)
        self.tell(MachinesOffered(tuple(self.machines)))

    def lose_branch(self) -> None:
        """Withdraw a contribution that is not being merged; its branch computes it again."""
        sent = {f"{self.rounds(branch) + 1}-{branch}" for branch in range(BRANCHES)}
        sent -= {*self.to_send, *self.merging}
        key = self.draw.choice(sorted(sent) or [""])
        if int(key.partition("-")[0] or ROUNDS + 1) > ROUNDS:
            return
        if key in self.acknowledged:
            self.acknowledged.remove(key)
        for files in self.files.values():
            files.parts.discard(key)
        self.tell(ContributionDropped(key))
        self.to_send.append(key)

    def replace_coordinator(self) -> None:
        """Continue with the machines that have the newest committed version; a merge may be computed, or followed."""
        version = self.machine.version
        assert self.head[version] == (tuple(self.log),) * RANGES
        del self.head[version + 1 :]
        for effect in self.pending:
            if isinstance(effect, Follow) and self.draw.random() < 0.5:
                self.follow(effect)  # the coordinator dies after the version's files, before their record
        self.pending.clear()
        self.files = {holder: files for holder, files in self.files.items() if version in files.versions}
        self.machine = RangesMachine(RANGES, version, sorted(self.files))
        assert set(self.machine.holders) == set(self.files)
        self.send_all_again()
        self.tell(MachinesOffered(tuple(self.machines)))

    def has_other(self, lost: Holder) -> bool:
        """Return whether another machine has all acknowledged contributions and the newest version of a range."""
        return any(
            holder.range == lost.range
            and holder.machine != lost.machine
            and self.machine.version in files.versions
            and files.parts.issuperset([*self.acknowledged, *self.merging])
            for holder, files in self.files.items()
        )

    def answer(self) -> None:
        effect = self.draw.choice(self.pending)
        if isinstance(effect, (ComputeMerge, CopyMerge, Follow)):  # one after the other on a machine
            at = getattr(effect, "holder", None)
            serial = (each for each in self.pending if isinstance(each, (ComputeMerge, CopyMerge, Follow)))
            effect = next(each for each in serial if getattr(each, "holder", None) == at)
        self.pending.remove(effect)
        match effect:
            case HolderLost():
                self.tell(effect)
            case CopyRange():
                self.copy_range(effect)
            case CopyContribution():
                source = self.files.get(Holder(effect.holder.range, effect.source))
                if source is not None and effect.holder in self.files and effect.key in source.parts:
                    self.files[effect.holder].parts.add(effect.key)
                    self.tell(ContributionCopied(effect.holder, effect.key))
            case ComputeMerge():
                files = self.files.get(effect.holder)
                if files is not None and files.parts.issuperset(keys(effect.record)):
                    before = files.versions[effect.record.version - 1]
                    files.versions[effect.record.version] = (*before, *keys(effect.record))
                    flip = self.flips and self.draw.random() < 0.3
                    digest = f"{files.versions[effect.record.version]}{self.draw.random() if flip else ''}"
                    self.digests[effect.holder, effect.record.version] = digest
                    self.tell(RangeMerged(effect.holder, effect.record, digest))
            case CopyMerge():
                source = self.files.get(Holder(effect.holder.range, effect.source))
                if source is not None and effect.holder in self.files:
                    version = effect.record.version
                    self.files[effect.holder].versions[version] = source.versions[version]
                    digest = self.digests.get((Holder(effect.holder.range, effect.source), version), "")
                    self.digests[effect.holder, version] = digest
                    self.tell(RangeMerged(effect.holder, effect.record, digest))
            case Follow():
                if self.follow(effect):
                    self.tell(RangesFollowed(effect.record))

    def follow(self, effect: Follow) -> bool:
        """Let the control plane's machine follow; return whether all servers were there."""
        version = effect.record.version
        servers = [self.files.get(Holder(*place)) for place in enumerate(effect.servers)]
        if not all(files is not None and version in files.versions for files in servers):
            return False
        del self.head[version:]
        self.head.append(tuple(files.versions[version] for files in servers if files))
        return True

    def copy_range(self, effect: CopyRange) -> None:
        if effect.holder not in self.machine.holders or effect.holder.machine not in self.machines:
            if effect.holder in self.machine.holders:
                self.tell(HolderLost(effect.holder))
            return
        if effect.source is None:
            value = self.head[effect.version][effect.holder.range]
        else:
            source = self.files.get(Holder(effect.holder.range, effect.source))
            if source is None:
                return
            value = source.versions[effect.version]
        self.files[effect.holder] = Files({effect.version: value})
        self.tell(RangeCopied(effect.holder))


def keys(record: MergeRecord) -> list[str]:
    return [f"{run.round}-{run.branch}" for run in record.runs]


@pytest.mark.parametrize("spares_pairs", [True, False], ids=["one-of-two", "any"])
@pytest.mark.parametrize("flips", [False, True], ids=["same-bits", "other-bits"])
def test_each_acknowledged_contribution_is_merged_exactly_once(*, spares_pairs: bool, flips: bool) -> None:
    check_schedules(range(300), spares_pairs=spares_pairs, flips=flips)


@pytest.mark.thorough
@pytest.mark.parametrize("spares_pairs", [True, False], ids=["one-of-two", "any"])
@pytest.mark.parametrize("flips", [False, True], ids=["same-bits", "other-bits"])
def test_the_same_holds_under_ten_thousand_schedules(
    pytestconfig: pytest.Config, *, spares_pairs: bool, flips: bool
) -> None:
    seeds = range(300, 300 + (pytestconfig.getoption("--schedules") or 2500))
    check_schedules(seeds, spares_pairs=spares_pairs, flips=flips)


def check_schedules(seeds: range, *, spares_pairs: bool, flips: bool) -> None:
    """Play schedules with losses of machines, branches and the coordinator."""
    restarts = 0
    for seed in seeds:
        world = World(seed, losses=seed % 5, spares_pairs=spares_pairs, flips=flips)
        steps = 0
        while len(world.log) < BRANCHES * ROUNDS:
            world.step()
            steps += 1
            assert steps < 5000, f"schedule {seed} does not end"
        assert sorted(world.log) == sorted(
            f"{number + 1}-{branch}" for number in range(ROUNDS) for branch in range(BRANCHES)
        )
        for holder, files in world.files.items():
            if world.machine.version in files.versions and holder in world.machine.holders:
                assert files.versions[world.machine.version] == tuple(world.log)
        restarts += world.restarts
    assert restarts == 0 if spares_pairs else restarts > 0


def test_a_machine_that_joins_becomes_the_backup_and_may_take_over_from_one_that_leaves() -> None:
    machine = RangesMachine(1, 7)
    one, other = Holder(0, "one"), Holder(0, "other")
    assert machine.handle(MachinesOffered(("one",))) == [CopyRange(one, None, 7)]
    assert machine.handle(RangeCopied(one)) == []
    assert machine.handle(ContributionArrived("key", ("one",))) == [Acknowledge("key")]
    assert machine.handle(MachinesOffered(("other",))) == [CopyRange(other, "one", 7)]
    assert machine.handle(RangeCopied(other)) == [CopyContribution(other, "one", "key")]
    assert machine.handle(ContributionCopied(other, "key")) == [ReleaseRange(one)]
    assert machine.servers == ("other",)


def test_a_contribution_whose_part_was_lost_is_sent_again() -> None:
    machine = RangesMachine(1, 0, (Holder(0, "one"), Holder(0, "other")))
    machine.handle(MachinesOffered(("one", "other")))
    assert machine.handle(ContributionArrived("key", ("one",))) == [
        CopyContribution(Holder(0, "other"), "one", "key")
    ]
    assert machine.handle(HolderLost(Holder(0, "one"))) == [
        CopyRange(Holder(0, "one"), "other", 0),
        SendAgain("key"),
    ]
