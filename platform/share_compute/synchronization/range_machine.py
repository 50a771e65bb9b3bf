"""The state machine of ranges: it keeps each range of the weights on two machines, and decides when a merge is durable.

Each range has a server and, if there is a second machine, a backup. Both have the newest version of the range, the
state of its outer optimizer, and the open contributions, and both compute each merge.

- A contribution is acknowledged when the servers and backups of all ranges have it. Only then may a merge contain it,
  and only then may its branch forget it.
- A merge is committed when the servers and backups of all ranges have computed the same bits, and the control plane's
  machine has followed with the update.
- If a server is lost, its backup becomes the server, and a new backup is made. Contributions that only the lost server
  had are not acknowledged, so their branches resend them.
- If server and backup are lost together, the range restarts from the last committed version, which the control plane's
  machine has. All branches resend their open contributions. The same happens if a server is lost before a new backup
  has all acknowledged contributions.

So each acknowledged contribution is merged exactly once into each range, unless a range loses both machines. This is
primary-backup replication with repeated computation (state machine approach, Schneider 1990): backups receive
contributions, which are compressed, instead of the state of the outer optimizer, which is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from share_compute.synchronization.records import MergeRecord

Machine: TypeAlias = str
Key: TypeAlias = str
"""Name of a contribution; equal keys stand for equal contributions."""


class Holder(NamedTuple):
    """A range on a machine."""

    range: int
    machine: Machine


@dataclass(frozen=True, slots=True)
class MachinesOffered:
    """From now on, ranges may only be on these machines, best first. Ranges on other machines must move."""

    machines: tuple[Machine, ...]


@dataclass(frozen=True, slots=True)
class HolderLost:
    """A machine lost its range, or does not answer."""

    holder: Holder


@dataclass(frozen=True, slots=True)
class RangeCopied:
    """The answer to `CopyRange`: the machine has the newest version of the range."""

    holder: Holder


@dataclass(frozen=True, slots=True)
class ContributionArrived:
    """A branch has sent each part of its contribution to a machine."""

    key: Key
    machines: tuple[Machine, ...]
    """Machine that has the part, for each range."""


@dataclass(frozen=True, slots=True)
class ContributionCopied:
    """The answer to `CopyContribution`."""

    holder: Holder
    key: Key


@dataclass(frozen=True, slots=True)
class ContributionDropped:
    """A contribution will not be merged."""

    key: Key


@dataclass(frozen=True, slots=True)
class MergeDue:
    """Acknowledged contributions are to be merged. The next event of this type follows after `CommitMerge`."""

    record: MergeRecord
    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class RangeMerged:
    """The answer to `ComputeMerge` or `CopyMerge`."""

    holder: Holder
    record: MergeRecord
    digest: str
    """Digest of all that the merge wrote."""


@dataclass(frozen=True, slots=True)
class RangesFollowed:
    """The answer to `Follow`: the control plane's machine has the version."""

    record: MergeRecord


RangeEvent = (
    MachinesOffered
    | HolderLost
    | RangeCopied
    | ContributionArrived
    | ContributionCopied
    | ContributionDropped
    | MergeDue
    | RangeMerged
    | RangesFollowed
)


@dataclass(frozen=True, slots=True)
class CopyRange:
    """Let a machine hold a range, and copy the version to it."""

    holder: Holder
    source: Machine | None
    """Machine that has the range; None for the control plane's."""
    version: int


@dataclass(frozen=True, slots=True)
class ReleaseRange:
    """Let a machine drop its range."""

    holder: Holder


@dataclass(frozen=True, slots=True)
class CopyContribution:
    """Copy a part of a contribution from the server of a range to its backup."""

    holder: Holder
    source: Machine
    key: Key


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """A contribution is on all servers and backups, so it may be merged."""

    key: Key


@dataclass(frozen=True, slots=True)
class SendAgain:
    """A part of a contribution was lost before it was acknowledged, so the branch must resend it."""

    key: Key


@dataclass(frozen=True, slots=True)
class RestartRound:
    """A range lost acknowledged contributions: forget all contributions, and let the branches resend them."""

    range: int


@dataclass(frozen=True, slots=True)
class ComputeMerge:
    """Compute a merge of a range."""

    holder: Holder
    record: MergeRecord


@dataclass(frozen=True, slots=True)
class CopyMerge:
    """Copy the result of a range's server to its backup, because the backup computed other bits."""

    holder: Holder
    source: Machine
    record: MergeRecord


@dataclass(frozen=True, slots=True)
class Follow:
    """Let the control plane's machine add the update to its weights; this replaces an earlier request."""

    record: MergeRecord
    servers: tuple[Machine, ...]
    """Machine that has the update, for each range."""


@dataclass(frozen=True, slots=True)
class CommitMerge:
    """Store the record in the durable log. This is the commit point."""

    record: MergeRecord


RangeEffect = (
    CopyRange
    | ReleaseRange
    | CopyContribution
    | Acknowledge
    | SendAgain
    | RestartRound
    | ComputeMerge
    | CopyMerge
    | Follow
    | CommitMerge
)


@dataclass(slots=True)
class _Copy:
    """A range on one machine."""

    machine: Machine
    is_whole: bool = False
    """Whether the machine has the newest version."""
    has: set[Key] = field(default_factory=set)
    """Contributions of which it has the part."""
    expects: set[Key] = field(default_factory=set)
    """Contributions whose part is being copied to it."""
    is_computing: bool = False
    digest: str | None = None
    """Digest of the merge that is under way; None before it is computed."""


class RangesMachine:
    """State machine for the ranges of one job: decides which machines hold them, and the work of these machines.

    Args:
        ranges: number of ranges.
        version: number of merges that are recorded.
        holders: machines that hold this version from an earlier attempt.
    """

    def __init__(self, ranges: int, version: int, holders: Sequence[Holder] = ()) -> None:
        self.version = version
        """Number of merges that are recorded."""
        self._ranges: list[list[_Copy]] = [
            [_Copy(holder.machine, is_whole=True) for holder in holders if holder.range == number][:2]
            for number in range(ranges)
        ]
        """The server of each range, and its backup if there is one."""
        self._machines: tuple[Machine, ...] = ()
        self._arrived: dict[Key, None] = {}
        """Contributions that are not acknowledged, in order of arrival."""
        self._acknowledged = set[Key]()
        """Contributions that are acknowledged and not merged."""
        self._record: MergeRecord | None = None
        self._keys: tuple[Key, ...] = ()
        self._is_following = False

    @property
    def servers(self) -> tuple[Machine | None, ...]:
        """Machine of the server of each range; None for a range without a server."""
        return tuple(copies[0].machine if copies else None for copies in self._ranges)

    @property
    def are_servers_whole(self) -> bool:
        """Whether each range has a server that holds its newest version."""
        return all(copies and copies[0].is_whole for copies in self._ranges)

    @property
    def holders(self) -> tuple[Holder, ...]:
        """All machines with ranges; the server of each range comes before its backup."""
        return tuple(Holder(number, copy.machine) for number, copy in self._all())

    def handle(self, event: RangeEvent) -> list[RangeEffect]:
        """Process one event, and return the effects to carry out, in order."""
        effects: list[RangeEffect] = []
        match event:
            case MachinesOffered():
                self._machines = event.machines
            case HolderLost():
                effects += self._lose(event.holder)
            case ContributionArrived():
                self._arrived.setdefault(event.key)
                for number, machine in enumerate(event.machines):
                    copy = self._copy(Holder(number, machine))
                    if copy is not None:
                        copy.has.add(event.key)
            case ContributionDropped():
                self._forget([event.key])
            case MergeDue():
                self._record, self._keys = event.record, event.keys
            case RangesFollowed():
                effects += self._commit(event.record)
            case RangeCopied() | ContributionCopied() | RangeMerged():
                copy = self._copy(event.holder)
                if copy is not None:
                    self._note(copy, event)
        return effects + list(self._due())

    def _note(self, copy: _Copy, event: RangeCopied | ContributionCopied | RangeMerged) -> None:
        match event:
            case RangeCopied():
                copy.is_whole = True
            case ContributionCopied():
                if event.key in copy.expects:
                    copy.expects.discard(event.key)
                    copy.has.add(event.key)
            case RangeMerged():
                if copy.is_computing and event.record == self._record:
                    copy.is_computing, copy.digest = False, event.digest

    def _all(self) -> Iterator[tuple[int, _Copy]]:
        for number, copies in enumerate(self._ranges):
            for copy in copies:
                yield number, copy

    def _copy(self, holder: Holder) -> _Copy | None:
        return next((copy for copy in self._ranges[holder.range] if copy.machine == holder.machine), None)

    def _lose(self, holder: Holder) -> Iterator[RangeEffect]:
        copies, lost = self._ranges[holder.range], self._copy(holder)
        if lost is None:
            return
        self._remove(copies, lost)
        missing = self._acknowledged & lost.has
        if copies and not copies[0].is_whole:  # its source is gone
            yield ReleaseRange(Holder(holder.range, copies[0].machine))
            copies.clear()
        if copies:
            missing -= copies[0].has
        if not missing:
            return
        yield RestartRound(holder.range)
        self._record, self._keys, self._is_following = None, (), False
        self._arrived.clear()
        self._acknowledged.clear()
        for _, copy in self._all():
            copy.has.clear()
            copy.expects.clear()
            copy.is_computing, copy.digest = False, None

    def _remove(self, copies: list[_Copy], copy: _Copy) -> None:
        copies.remove(copy)
        self._is_following = False  # the update may now have to come from another machine
        for other in copies:  # the merge may have waited for files of the removed machine
            other.is_computing = False
            other.expects.clear()

    def _forget(self, keys: Sequence[Key]) -> None:
        for key in keys:
            self._arrived.pop(key, None)
            self._acknowledged.discard(key)
        for _, copy in self._all():
            copy.has.difference_update(keys)
            copy.expects.difference_update(keys)

    def _commit(self, record: MergeRecord) -> Iterator[RangeEffect]:
        if not self._is_following or record != self._record:
            return
        self.version, self._record, self._is_following = record.version, None, False
        self._forget(self._keys)
        self._keys = ()
        for _, copy in self._all():
            copy.digest = None
        yield CommitMerge(record)

    # -- what is due ---------------------------------------------------------------------------------------------------

    def _due(self) -> Iterator[RangeEffect]:
        for number in range(len(self._ranges)):
            yield from self._leave(number)
            yield from self._fill(number)
            yield from self._copy_contributions(number)
        yield from self._acknowledge()
        if self._record is not None:
            yield from self._merge(self._record)

    def _leave(self, number: int) -> Iterator[RangeEffect]:
        """Release a machine that is no longer offered, if the other machine of the range has all needed data."""
        copies = self._ranges[number]
        for copy in reversed(copies[:]):
            others = [other for other in copies if other is not copy and other.is_whole]
            if copy.machine in self._machines or not others:
                continue
            if self._acknowledged & copy.has <= others[0].has:
                self._remove(copies, copy)
                yield ReleaseRange(Holder(number, copy.machine))

    def _fill(self, number: int) -> Iterator[RangeEffect]:
        """Let a free machine become the server or the backup of a range that lacks one."""
        copies = self._ranges[number]
        if len(copies) > 1 or (copies and not copies[0].is_whole):
            return
        machine = self._free(number)
        if machine is not None:
            source = copies[0].machine if copies else None
            copies.append(_Copy(machine))
            self._is_following = False  # the new machine must compute the merge, too
            yield CopyRange(Holder(number, machine), source, self.version)

    def _free(self, number: int) -> Machine | None:
        """Return the least loaded machine without this range; servers count twice."""
        used = {copy.machine for copy in self._ranges[number]}
        work = dict.fromkeys(self._machines, 0)
        for copies in self._ranges:
            for weight, copy in zip((2, 1), copies, strict=False):
                if copy.machine in work:
                    work[copy.machine] += weight
        free = [machine for machine in self._machines if machine not in used]
        return min(free, key=lambda machine: work[machine], default=None)

    def _is_settled(self, number: int) -> bool:
        """Return whether a range has a server and a backup, as far as enough machines exist."""
        copies = self._ranges[number]
        is_full = len(copies) == 2 or (len(copies) == 1 and self._free(number) is None)
        return is_full and all(copy.is_whole for copy in copies)

    def _copy_contributions(self, number: int) -> Iterator[RangeEffect]:
        for server, backup in zip(self._ranges[number], self._ranges[number][1:], strict=False):
            if backup.is_whole:
                wanted = self._acknowledged | self._arrived.keys()
                for key in sorted((server.has & wanted) - backup.has - backup.expects):
                    backup.expects.add(key)
                    yield CopyContribution(Holder(number, backup.machine), server.machine, key)

    def _acknowledge(self) -> Iterator[RangeEffect]:
        for key in list(self._arrived):
            if any(copies and key not in copies[0].has for copies in self._ranges):
                self._arrived.pop(key)
                yield SendAgain(key)
            elif all(
                self._is_settled(number) and all(key in copy.has for copy in copies)
                for number, copies in enumerate(self._ranges)
            ):
                self._arrived.pop(key)
                self._acknowledged.add(key)
                yield Acknowledge(key)

    def _merge(self, record: MergeRecord) -> Iterator[RangeEffect]:
        are_done = True
        for number, copies in enumerate(self._ranges):
            for copy in copies:
                may = copy.is_whole and copy.has.issuperset(self._keys)
                if may and copy.digest is None and not copy.is_computing:
                    copy.is_computing = True
                    yield ComputeMerge(Holder(number, copy.machine), record)
            digests = [copy.digest for copy in copies]
            if None not in digests and len(set(digests)) > 1:
                server, backup = copies
                backup.is_computing, backup.digest = True, None
                yield CopyMerge(Holder(number, backup.machine), server.machine, record)
                digests.append(None)
            are_done = are_done and self._is_settled(number) and None not in digests
        if are_done and not self._is_following:
            self._is_following = True
            yield Follow(record, tuple(copies[0].machine for copies in self._ranges))
