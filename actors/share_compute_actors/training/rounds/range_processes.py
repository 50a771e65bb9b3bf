"""Processes with ranges of the weights: pending calls, heartbeats, and blame for failed copies."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from share_compute.errors import ContributorLost, ShareComputeError, VerificationFailed
from share_compute.synchronization.range_machine import Holder
from share_compute.synchronization.ranges import RangeLayout
from share_compute_actors.group.answering import answered, shard_store_lost
from share_compute_actors.group.naming import member_options, workers_of
from share_compute_actors.group.own_link import OwnLink
from share_compute_actors.training.rounds.range_server import SETUP, STANDING, RangeServer, RangeSetup
from share_compute_actors.wire import NOTHING

BEAT_S = 2.0
"""Interval of heartbeats, in seconds."""
UNRESPONSIVE_S = 60.0
"""Time without a heartbeat after which a process counts as lost, in seconds."""
_START_S = 300.0
"""Time in which a new process answers its first heartbeat, in seconds: its imports are slow."""
_TAKEOVER_S = 120.0
"""Longest wait for the processes of an earlier attempt, in seconds."""
MOST_TRIES = 3
"""Number of attempts at a transfer between two processes that both answer heartbeats."""


class RangeProcess(NamedTuple):
    """The process with a range on a machine."""

    actor: Any
    name: str
    """Name of the actor."""
    first_version: int
    """First version whose update it may have."""
    has_answered: bool = False


@dataclass(slots=True, eq=False)
class RangeCall:
    """A call of a process, or of the process on the server."""

    begin: Callable[[], Any]
    """Calls the method, and returns Ray's reference to the answer."""
    read: Callable[[Any], Any]
    """Returns the answer to a reference; raises the call's error."""
    done: Callable[[Any], None]
    """Handles the answer."""
    failed: Callable[[Exception], None]
    """Handles a `RayError` or a `ShareComputeError`."""
    holders: frozenset[Holder] = frozenset()
    """The called process, and those from which it copies: the call is discarded if one of them is removed."""
    source: Holder | None = None
    """Process from which the called one copies; None for the one on the server."""
    copies: bool = False
    """Whether the called process copies from ``source``."""
    tries: int = 0


@dataclass(slots=True)
class _Beat:
    """A pending heartbeat."""

    ref: Any
    asked_s: float


@dataclass(slots=True, eq=False)
class _Repeat:
    """A failed call; it is repeated if the source of the copy answers a heartbeat."""

    call: RangeCall
    beat: Any


@dataclass(slots=True)
class RangeProcesses:
    """Calls the processes with ranges, and finds lost processes.

    A process that cannot copy does not count as lost, because its source may be lost instead. The call is repeated
    after the source has answered a heartbeat, `MOST_TRIES` times in all. Only then does the copying process count as
    lost.

    Args:
        head: actor with all ranges on the control plane's machine.
        name: returns the name of a machine, for the user.
        address: returns the IP address of a machine.
        lose: called with each lost process and the reason. It must call `remove`.
        own_link: finds out whether this host is cut off from the others.
    """

    head: Any
    name: Callable[[str], str]
    address: Callable[[str], str]
    lose: Callable[[Holder, Exception], None]
    own_link: OwnLink
    _processes: dict[Holder, RangeProcess] = field(default_factory=dict)
    _beats: dict[Holder, _Beat] = field(default_factory=dict)
    _calls: dict[Any, RangeCall] = field(default_factory=dict)
    _repeats: list[_Repeat] = field(default_factory=list)

    def __getitem__(self, holder: Holder) -> RangeProcess:
        return self._processes[holder]

    def __contains__(self, holder: Holder) -> bool:
        return holder in self._processes

    def __iter__(self) -> Iterator[RangeProcess]:
        return iter(list(self._processes.values()))

    def holder_of(self, actor: str) -> Holder | None:
        """Return the range and the machine of the process whose actor has a name; None if there is no such process."""
        found = (holder for holder, process in self._processes.items() if process.name == actor)
        return next(found, None)

    def add(self, holder: Holder, process: RangeProcess) -> None:
        """Watch a process from now on."""
        self._processes[holder] = process

    def remove(self, holder: Holder) -> RangeProcess | None:
        """Forget a process, and all calls to it or to processes that copy from it; return it."""
        self._beats.pop(holder, None)
        self._calls = {ref: call for ref, call in self._calls.items() if holder not in call.holders}
        self._repeats = [each for each in self._repeats if holder not in each.call.holders]
        return self._processes.pop(holder, None)

    def call(self, call: RangeCall) -> None:
        """Call a method; `poll` passes on the answer when it has arrived."""
        call.tries += 1
        self._calls[call.begin()] = call

    def end(self, process: RangeProcess) -> None:
        """Let a removed process delete its files, and kill it."""

        def kill(_: object) -> None:
            ray.kill(process.actor)

        self.call(RangeCall(begin=process.actor.close.remote, read=lambda _: None, done=kill, failed=kill))

    def poll(self) -> None:
        """Handle answers and heartbeats that have arrived since the last call."""
        refs = list(self._calls)
        for ref in ray.wait(refs, num_returns=len(refs), timeout=0)[0] if refs else ():
            call = self._calls.pop(ref, None)
            if call is not None:
                self._read(call, ref)
        self._repeat()
        self._watch()

    def _read(self, call: RangeCall, ref: Any) -> None:
        try:
            answer = call.read(ref)
        except (ContributorLost, VerificationFailed) as failure:
            if not call.copies or call.tries >= MOST_TRIES:
                call.failed(failure)
            else:
                self.repeat(call)
        except (RayError, ShareComputeError) as failure:
            call.failed(failure)
        else:
            call.done(answer)

    def repeat(self, call: RangeCall) -> None:
        """Repeat a call when the source of its copy has answered a heartbeat."""
        if call.source is None:
            self._repeats.append(_Repeat(call, self.head.status.remote()))
        elif call.source in self._processes:
            self._repeats.append(_Repeat(call, self._processes[call.source].actor.status.remote()))

    def _repeat(self) -> None:
        for each in list(self._repeats):
            if each not in self._repeats or not ray.wait([each.beat], timeout=0)[0]:
                continue
            self._repeats.remove(each)
            source = each.call.source
            try:
                answered(NOTHING, each.beat, "the server" if source is None else self.name(source.machine))
            except (RayError, ShareComputeError) as failure:
                if source is None:
                    raise shard_store_lost() from failure
                self.lose(source, failure)
            else:
                self.call(each.call)

    # -- heartbeats ----------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Request heartbeats from all processes; those that do not answer in time are lost."""
        now_s = time.monotonic()
        unresponsive: list[Holder] = []
        for holder, process in list(self._processes.items()):
            if holder not in self._processes:
                continue  # lost while another one was asked
            beat = self._beats.get(holder)
            if beat is None:
                self._beats[holder] = _Beat(process.actor.status.remote(), now_s)
            elif ray.wait([beat.ref], timeout=0)[0]:
                self._hear(holder, beat, now_s)
            elif now_s - beat.asked_s > (UNRESPONSIVE_S if process.has_answered else _START_S):
                unresponsive.append(holder)
        if unresponsive and self._is_cut_off(unresponsive):
            self.own_link.wait()
            now_s = time.monotonic()
            self._beats = {holder: _Beat(beat.ref, now_s) for holder, beat in self._beats.items()}
            return
        for holder in unresponsive:
            self.lose(holder, ContributorLost(f"{self.name(holder.machine)} does not answer"))

    def _hear(self, holder: Holder, beat: _Beat, now_s: float) -> None:
        try:
            answered(NOTHING, beat.ref, self.name(holder.machine))
        except (RayError, ShareComputeError) as failure:
            self.lose(holder, failure)
            return
        self._processes[holder] = self._processes[holder]._replace(has_answered=True)
        if now_s - beat.asked_s >= BEAT_S:
            del self._beats[holder]

    def _is_cut_off(self, unresponsive: list[Holder]) -> bool:
        places = {holder: self.address(holder.machine) for holder in self._processes}
        return self.own_link.has_failed(
            {places[holder] for holder in unresponsive if holder in places}, set(places.values())
        )


def start_process(
    setup: RangeSetup, node_id: str, group: str, attempt: int, first_version: int
) -> RangeProcess:
    """Start a process for a range.

    Args:
        setup: its parameters.
        node_id: Ray node of its machine.
        group: name of the group of the job's processes with ranges.
        attempt: number of the attempt at the job.
        first_version: first version whose update it may have.
    """
    options = member_options(group, setup.worker, attempt)
    actor = RangeServer.options(  # type: ignore[attr-defined]
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False), **options
    ).remote(SETUP.pack(setup))
    return RangeProcess(actor, options["name"], first_version)


def take_over(group: str, version: int, layouts: Sequence[RangeLayout]) -> dict[Holder, RangeProcess]:
    """Return the processes of an earlier attempt that have a version; kill the others.

    Args:
        group: name of the group of the job's processes with ranges.
        version: number of merges that are recorded.
        layouts: the parameters of each range.
    """
    actors = workers_of(group)
    calls = {actor.standing.remote(version): actor for actor in actors}
    ready, _ = ray.wait(list(calls), num_returns=len(calls), timeout=_TAKEOVER_S) if calls else ([], [])
    found: dict[Holder, RangeProcess] = {}
    for ref, actor in calls.items():
        try:
            standing = answered(STANDING, ref, "a machine with a range") if ref in ready else None
        except (RayError, ShareComputeError):
            standing = None
        holder = None if standing is None else Holder(standing.number, actors[actor])
        if (
            standing is None
            or holder is None
            or holder in found
            or not standing.has_version
            or holder.range >= len(layouts)
            or set(standing.names) != set(layouts[holder.range].names)
        ):
            ray.kill(actor)
            continue
        found[holder] = RangeProcess(actor, standing.actor, version + 1)
    return found
