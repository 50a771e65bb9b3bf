"""Placement of ranges as a state machine: the machines of the server and of the backup of each range."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServersOffered:
    """From now on, only these machines may hold ranges. Ranges on other machines move, if their machine is not lost."""

    machines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReplicaLost:
    """A machine lost its replica of a range."""

    range: int
    machine: str


@dataclass(frozen=True, slots=True)
class BackupWhole:
    """The backup of a range has everything that the server had when the term began."""

    range: int
    term: int


PlacementEvent = ServersOffered | ReplicaLost | BackupWhole


@dataclass(frozen=True, slots=True)
class StartReplica:
    """Start an empty replica on a machine."""

    range: int
    machine: str
    term: int
    is_server: bool


@dataclass(frozen=True, slots=True)
class GiveRole:
    """Make a replica the server of a range in a new term."""

    range: int
    server: str
    term: int
    backup: str | None


@dataclass(frozen=True, slots=True)
class AnnounceServer:
    """Announce the server of a range to all workers."""

    range: int
    server: str
    term: int


@dataclass(frozen=True, slots=True)
class EndReplica:
    """End a replica."""

    range: int
    machine: str


@dataclass(frozen=True, slots=True)
class RangeGone:
    """No machine holds a range any more, so the job must return to its last checkpoint."""

    range: int


PlacementEffect = StartReplica | GiveRole | AnnounceServer | EndReplica | RangeGone


@dataclass(slots=True)
class _Placed:
    term: int = 0
    server: str | None = None
    backup: str | None = None
    is_backup_whole: bool = False
    is_gone: bool = False


class ReplicaPlacement:
    """Decides where the replicas of all ranges are.

    Args:
        ranges: number of ranges.
    """

    def __init__(self, ranges: int) -> None:
        self._ranges = [_Placed() for _ in range(ranges)]
        self._machines: tuple[str, ...] = ()

    @property
    def servers(self) -> tuple[str | None, ...]:
        """Machine of the server of each range."""
        return tuple(placed.server for placed in self._ranges)

    @property
    def backups(self) -> tuple[str | None, ...]:
        """Machine of the backup of each range, even if the backup is incomplete."""
        return tuple(placed.backup for placed in self._ranges)

    @property
    def is_settled(self) -> bool:
        """Whether each range has a server, and a whole backup if there is a machine for one."""
        return all(
            placed.server is not None
            and (placed.is_backup_whole or (placed.backup is None and self._free(placed) is None))
            for placed in self._ranges
        )

    def handle(self, event: PlacementEvent) -> list[PlacementEffect]:
        """Process one event, and return the effects to carry out, in order."""
        effects: list[PlacementEffect] = []
        match event:
            case ServersOffered():
                self._machines = event.machines
                for number, placed in enumerate(self._ranges):
                    lost = [
                        each for each in (placed.server, placed.backup) if each and each not in self._machines
                    ]
                    for machine in lost:
                        effects += self._lose(number, machine)
            case ReplicaLost():
                effects += self._lose(event.range, event.machine)
            case BackupWhole():
                placed = self._ranges[event.range]
                placed.is_backup_whole = placed.is_backup_whole or placed.term == event.term
        effects += self._start_servers()
        for number in range(len(self._ranges)):
            effects += self._fill(number)
        return effects

    def _lose(self, number: int, machine: str) -> Iterator[PlacementEffect]:
        placed = self._ranges[number]
        if machine == placed.server:
            yield EndReplica(number, machine)
            # The machine of the backup may be lost in the same event.
            if not placed.is_backup_whole or placed.backup not in self._machines:
                if placed.backup is not None:
                    yield EndReplica(number, placed.backup)
                placed.server, placed.backup, placed.is_gone = None, None, True
                yield RangeGone(number)
                return
            placed.server, placed.backup, placed.is_backup_whole = placed.backup, None, False
            yield from self._new_term(number)
        elif machine == placed.backup:
            yield EndReplica(number, machine)
            placed.backup, placed.is_backup_whole = None, False
            yield from self._new_term(number)

    def _new_term(self, number: int) -> Iterator[PlacementEffect]:
        """Begin a term with the present server, and with a new backup if there is a machine for it."""
        placed = self._ranges[number]
        assert placed.server is not None
        placed.term += 1
        placed.backup = self._free(placed)
        placed.is_backup_whole = False
        if placed.backup is not None:
            yield StartReplica(number, placed.backup, placed.term, is_server=False)
        yield GiveRole(number, placed.server, placed.term, placed.backup)
        yield AnnounceServer(number, placed.server, placed.term)

    def _start_servers(self) -> Iterator[PlacementEffect]:
        for number, placed in enumerate(self._ranges):
            if placed.server is None and not placed.is_gone and self._machines:
                placed.server = self._least_loaded(self._machines)
                yield StartReplica(number, placed.server, placed.term, is_server=True)

    def _fill(self, number: int) -> Iterator[PlacementEffect]:
        """Begin a term if a new server has no term yet, or if there is a machine for a missing backup."""
        placed = self._ranges[number]
        if placed.server is None:
            return
        if not placed.term or (placed.backup is None and self._free(placed) is not None):
            yield from self._new_term(number)

    def _free(self, placed: _Placed) -> str | None:
        free = [machine for machine in self._machines if machine not in (placed.server, placed.backup)]
        return self._least_loaded(free) if free else None

    def _least_loaded(self, machines: Sequence[str]) -> str:
        """Return the machine with the least work; a server counts twice."""
        work = dict.fromkeys(machines, 0)
        for placed in self._ranges:
            for weight, machine in ((2, placed.server), (1, placed.backup)):
                if machine in work:
                    work[machine] += weight
        return min(machines, key=lambda machine: work[machine])
