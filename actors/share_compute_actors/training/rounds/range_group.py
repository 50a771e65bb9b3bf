"""Merges on machines of the job: the synchronizer's interface to the processes with ranges of the weights."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from share_compute.errors import (
    ContributorLost,
    ShareComputeError,
    UserError,
    VerificationFailed,
)
from share_compute.lifecycle.attempt_events import Assignment
from share_compute.lifecycle.branch_ids import ranges_id
from share_compute.planning.ranges import range_machines
from share_compute.quantities import listed
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
from share_compute.synchronization.ranges import FollowingAggregator, RangeDigests, RangeLayout
from share_compute.synchronization.records import BranchRun, MergeRecord
from share_compute.topology import Contributor, Topology
from share_compute_actors.group.answering import answered, shard_store_lost
from share_compute_actors.group.own_link import OwnLink
from share_compute_actors.training.rounds.aggregation import MergeListener
from share_compute_actors.training.rounds.messages import BranchMail, BranchReport, RangeAddress
from share_compute_actors.training.rounds.range_processes import (
    BEAT_S,
    MOST_TRIES,
    RangeCall,
    RangeProcess,
    RangeProcesses,
    start_process,
    take_over,
)
from share_compute_actors.training.rounds.range_server import (
    DIGESTS,
    FOLLOWED,
    PAYLOADS,
    RECEIVED,
    RECORD,
    RUN,
    SERVER,
    SETUP,
    SOURCES,
    FollowedRange,
    RangeServer,
    RangeSetup,
    RemoteSource,
)
from share_compute_actors.wire import FLAG, NAMES, NOTHING, Packs

_KEEP_S = 120.0
"""Longest wait for the state of the outer optimizer at the end of an attempt, in seconds."""
_MOST_LOSSES = 3
"""Number of losses of ranges on one machine between two merges after which it gets no other one before the next."""


class RangeGroup:
    """Keeps ranges of the weights on machines of the job, and makes these machines merge.

    Args:
        assignment: the job.
        aggregator: the weights on the server.
        layouts: the parameters of each range.
        listener: receives the results.
        mail: sends the branches the addresses of the ranges' servers.
        note: called with each line for the job's log, and its level.
        cancelled: event that is set when the job is cancelled.
    """

    def __init__(
        self,
        assignment: Assignment,
        aggregator: FollowingAggregator,
        layouts: Sequence[RangeLayout],
        listener: MergeListener,
        mail: BranchMail,
        note: Callable[[str, Literal["info", "warning"]], None],
        cancelled: threading.Event,
    ) -> None:
        self._assignment = assignment
        self._aggregator = aggregator
        self._layouts = layouts
        self._listener = listener
        self._mail = mail
        self._note = note
        self._cancelled = cancelled
        self._topology = assignment.topology
        self._known: dict[str, Contributor] = {}
        """All machines that were offered, by id."""
        self._places = {name: number for number, each in enumerate(layouts) for name in each.names}
        self._effects: deque[RangeEffect] = deque()
        self._is_busy = False
        self._losses = Counter[str]()
        self._lost_names: dict[int, str] = {}
        """Machine that was the server of a range when it was lost, by range, until there is another one."""
        self._reports: dict[str, BranchReport] = {}
        """Reports of contributions that are not merged, by key."""
        self._unused: list[str] = []
        """Contributions whose files are not needed any more."""
        self._merging: MergeRecord | None = None
        """Record of the open merge."""
        self._weights: dict[Holder, str] = {}
        """Digest of the weights that the open merge computed."""
        self._refusals: dict[Holder, UserError] = {}
        """Errors with which processes refused to compute the open merge."""
        self._failures = Counter[Holder]()
        """Number of times that the server could not load the update of the open merge."""
        self._facts: Mapping[str, Any] = {}
        self._payloads: dict[int, dict[str, tuple[int, str]]] = {}
        """`BranchUpdate.payloads` of each version whose updates are kept."""
        self._following: Follow | None = None
        self._processes: RangeProcesses | None = None

    def begin(self, version: int) -> None:
        """Start the processes, or take over those of an earlier attempt.

        Args:
            version: number of merges that are recorded.
        """
        training = self._assignment.spec.training.model_dump_json()
        head = RangeSetup(0, "", training, folder=str(self._assignment.folder / "rounds"))
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        server = RangeServer.options(scheduling_strategy=here).remote(  # type: ignore[attr-defined]
            SETUP.pack(head)
        )
        own_link = OwnLink(self._cancelled, lambda message: self._note(message, "warning"))
        self._processes = RangeProcesses(server, self._name, self._address, self._lose, own_link)
        found = take_over(ranges_id(self._assignment.job_id), version, self._layouts)
        for holder, process in found.items():
            self._processes.add(holder, process)
        self._machine = RangesMachine(len(self._layouts), version, sorted(found))
        self.offer(self._topology, ())
        names = [self._name(machine) for machine in self._machine.servers if machine is not None]
        self._note(f"ranges of the weights are merged on {listed(names)}", "info")

    # -- the synchronizer's calls --------------------------------------------------------------------------------------

    def take(self, report: BranchReport) -> None:
        """See `Aggregation.take`."""
        if report.fault:
            self._listener.refuse(report, VerificationFailed(report.fault))
            return
        for earlier in list(self._reports.values()):
            if earlier.run == report.run and earlier.key != report.key:
                self.drop(earlier)  # of an earlier start of the branch
        self._reports[report.key] = report
        # The process that replaced a lost process on the same machine lacks the lost process's parts.
        machines = (
            part.machine if self._all.holder_of(part.actor) == Holder(number, part.machine) else ""
            for number, part in enumerate(report.parts)
        )
        self._tell(ContributionArrived(report.key, tuple(machines)))

    def drop(self, report: BranchReport) -> None:
        """See `Aggregation.drop`."""
        self._unused.append(report.key)
        if self._reports.pop(report.key, None) is not None:
            self._tell(ContributionDropped(report.key))

    def merge(
        self, record: MergeRecord, reports: Mapping[BranchRun, BranchReport], facts: Mapping[str, Any]
    ) -> None:
        """See `Aggregation.merge`."""
        self._facts, self._merging = dict(facts), record
        self._weights.clear()
        self._refusals.clear()
        self._failures.clear()
        self._tell(MergeDue(record, tuple(reports[run].key for run in record.runs)))

    def offer(self, topology: Topology, leaving: Collection[str]) -> None:
        """See `Aggregation.offer`."""
        self._topology = topology
        self._known |= {machine.id: machine for machine in topology.contributors}
        self._losses.clear()
        self._leaving = frozenset(leaving)
        self._offer()

    def _offer(self) -> None:
        usable = [
            machine
            for machine in range_machines(self._topology)
            if machine not in self._leaving and self._losses[machine] < _MOST_LOSSES
        ]
        if not usable:
            raise ContributorLost(
                "no machine is left for the ranges of the weights",
                hint="let a machine join, or set training.synchronization.servers to 0",
            )
        self._tell(MachinesOffered(tuple(usable)))

    def sources(self, version: int) -> tuple[tuple[RangeAddress, ...], dict[str, tuple[int, str]]]:
        """See `Aggregation.sources`."""
        payloads = self._payloads.get(version)
        servers = self._mail.servers
        have = all(
            self._all[Holder(number, server.machine)].first_version <= version
            for number, server in enumerate(servers)
        )
        return (servers, payloads) if payloads is not None and servers and have else ((), {})

    def prune(self, version: int, oldest_base: int, loading: Iterable[int]) -> None:
        """See `Aggregation.prune`."""
        self._aggregator.prune(version, oldest_base, loading)
        self._payloads = {each: found for each, found in self._payloads.items() if each > oldest_base}
        for process in self._all:
            process.actor.prune.remote(version, oldest_base, NAMES.pack(tuple(self._unused)))
        self._unused.clear()

    def poll(self) -> None:
        """See `Aggregation.poll`."""
        while not self._mail.accused.empty():
            actor, reason = self._mail.accused.get()
            holder = self._all.holder_of(actor)
            if holder is not None:
                self._lose(holder, ContributorLost(reason))
        self._all.poll()

    @property
    def _all(self) -> RangeProcesses:
        assert self._processes is not None
        return self._processes

    def _lose(self, holder: Holder, failure: Exception) -> None:
        if holder not in self._all:
            return
        if self._machine.servers[holder.range] == holder.machine:
            self._lost_names[holder.range] = self._name(holder.machine)
        if isinstance(failure, ShareComputeError):
            where = self._name(holder.machine)
            self._note(f"range {holder.range} of the weights on {where}: {failure.message}", "warning")
        process = self._remove(holder)
        assert process is not None
        ray.kill(process.actor)
        self._losses[holder.machine] += 1
        if self._losses[holder.machine] == _MOST_LOSSES:
            self._offer()
        self._tell(HolderLost(holder))
        self._judge(holder.range)

    def _remove(self, holder: Holder) -> RangeProcess | None:
        self._weights.pop(holder, None)
        self._refusals.pop(holder, None)
        self._failures.pop(holder, None)
        return self._all.remove(holder)

    def _refuse(self, holder: Holder, record: MergeRecord, failure: Exception) -> None:
        """Handle a merge that a process refused to compute. Numbers that are not finite are an error of the job."""
        if not isinstance(failure, UserError):
            self._lose(holder, failure)
        elif record == self._merging:
            self._refusals[holder] = failure
            self._judge(holder.range)

    def _judge(self, number: int) -> None:
        """Compare the machines of a range after a process refused to compute the open merge.

        Raises:
            UserError: all of them refuse it.
        """
        holders = [holder for holder in self._machine.holders if holder.range == number]
        refused = [holder for holder in holders if holder in self._refusals]
        if refused and any(holder in self._weights for holder in holders):
            for holder in refused:
                if holder in self._refusals:
                    self._lose(holder, self._refusals[holder])
        elif refused and len(refused) == len(holders):
            raise self._refusals[refused[0]]

    # -- what the machine decides --------------------------------------------------------------------------------------

    def _tell(self, event: RangeEvent) -> None:
        """Pass an event to the machine, and carry out its effects and those of the events that follow."""
        before = self._machine.servers
        self._effects.extend(self._machine.handle(event))
        self._report_servers(before)
        if self._is_busy:
            return
        self._is_busy = True
        try:
            # there may be no effect, for example if processes of an earlier attempt hold all ranges
            self._publish()
            while self._effects:
                effect = self._effects.popleft()
                if not isinstance(effect, (Acknowledge, SendAgain)) or effect.key in self._reports:
                    self._carry_out(effect)
                self._publish()
        finally:
            self._is_busy = False

    def _report_servers(self, before: tuple[str | None, ...]) -> None:
        for number, (old, new) in enumerate(zip(before, self._machine.servers, strict=True)):
            if new is not None and new != old and (old is not None or number in self._lost_names):
                lost = self._lost_names.pop(number, None)
                why = f"{self._name(old or '')} leaves" if lost is None else f"{lost} was lost"
                self._note(f"range {number} of the weights is now on {self._name(new)}: {why}", "info")

    def _servers(self) -> list[Holder]:
        """Return the servers of the ranges, if their processes run."""
        places = enumerate(self._machine.servers)
        holders = [Holder(number, machine) for number, machine in places if machine is not None]
        return [holder for holder in holders if holder in self._all]

    def _publish(self) -> None:
        """Announce the machines of the ranges to the branches."""
        known = [(holder, self._all[holder]) for holder in self._servers()]
        addresses = tuple(
            RangeAddress(actor=process.name, machine=holder.machine, name=self._name(holder.machine))
            for holder, process in known
        )
        self._mail.servers = addresses if len(addresses) == len(self._layouts) else ()

    def _carry_out(self, effect: RangeEffect) -> None:
        match effect:
            case CopyRange():
                self._copy_range(effect)
            case ReleaseRange():
                self._release(effect.holder)
            case CopyContribution():
                self._copy_contribution(effect)
            case Acknowledge():
                report = self._reports[effect.key]
                digest = hashlib.sha256("".join(part.digest for part in report.parts).encode()).hexdigest()
                self._listener.accept(report, digest)
            case SendAgain():
                self._listener.request_again(self._reports.pop(effect.key))
            case RestartRound():
                self._reports.clear()
                self._following = self._merging = None
                self._refusals.clear()
                self._listener.restart_round(
                    f"range {effect.range} of the weights lost all machines that had it or its contributions"
                )
            case ComputeMerge():
                self._compute(effect)
            case CopyMerge():
                where, source = self._name(effect.holder.machine), self._name(effect.source)
                self._note(f"{where} computes other bits than {source}: it copies them", "info")
                read = partial(self._answered, effect.holder, DIGESTS)
                done = partial(self._merged, effect.holder, effect.record)
                self._copy(effect, "copy_merge", (effect.record.version,), read, done)
            case Follow():
                self._follow(effect)
            case CommitMerge():
                self._commit(effect.record)

    def _commit(self, record: MergeRecord) -> None:
        for run in record.runs:
            key = next(key for key, report in self._reports.items() if report.run == run)
            del self._reports[key]
            self._unused.append(key)
        are_excluded = max(self._losses.values(), default=0) >= _MOST_LOSSES
        self._losses.clear()
        self._merging = None
        if are_excluded:
            self._offer()
        self._listener.commit(record, None)

    def _copy(
        self,
        effect: CopyRange | CopyContribution | CopyMerge,
        method: str,
        arguments: Sequence[Any],
        read: Callable[[Any], Any],
        done: Callable[[Any], None],
    ) -> None:
        """Call a method that copies from another process; do nothing if one of both is lost, as the machine then hears.

        Args:
            effect: names the process that copies, and its source.
            method: name of the method.
            arguments: its first arguments; the source follows.
            read: returns the answer to a reference.
            done: handles the answer.
        """
        if effect.source is None:
            origin, source, actor = None, RemoteSource("the server", SERVER, ()), self._all.head
        else:
            origin = Holder(effect.holder.range, effect.source)
            source, actor = self._source(origin)
        if actor is None or effect.holder not in self._all:
            return
        called = getattr(self._all[effect.holder].actor, method)
        self._all.call(
            RangeCall(
                begin=lambda: called.remote(*arguments, SOURCES.pack((source,)), actor),
                read=read,
                done=done,
                failed=partial(self._lose, effect.holder),
                holders=frozenset({effect.holder} if origin is None else {effect.holder, origin}),
                source=origin,
                copies=True,
            )
        )

    def _answered(self, holder: Holder, schema: Packs[Any], ref: Any) -> Any:
        return answered(schema, ref, self._name(holder.machine))

    def _source(self, holder: Holder) -> tuple[RemoteSource, Any]:
        """Return a process as the source of its range, and its actor; None for the actor if it is lost."""
        source = RemoteSource(self._name(holder.machine), holder.machine, self._layouts[holder.range].names)
        return source, self._all[holder].actor if holder in self._all else None

    def _copy_range(self, effect: CopyRange) -> None:
        holder = effect.holder
        machine = self._topology[holder.machine]
        setup = RangeSetup(
            number=holder.range,
            worker=machine.id,
            training=self._assignment.spec.training.model_dump_json(),
            layout=self._layouts[holder.range],
            limits=(machine.upload_bytes_per_s, machine.download_bytes_per_s),
        )
        group, attempt = ranges_id(self._assignment.job_id), self._assignment.attempt
        self._all.add(holder, start_process(setup, machine.node_id, group, attempt, effect.version + 1))
        read = partial(self._answered, holder, FLAG)
        self._copy(effect, "copy", (effect.version,), read, partial(self._copied, effect))

    def _copied(self, effect: CopyRange, answer: bool) -> None:
        if not answer:
            self._note(
                f"range {effect.holder.range} of the weights continues after merge {effect.version} without the state "
                "of the outer optimizer and of the codec, which was lost with its machines",
                "warning",
            )
        self._tell(RangeCopied(effect.holder))

    def _release(self, holder: Holder) -> None:
        process = self._remove(holder)
        if process is not None:
            self._all.end(process)

    def _copy_contribution(self, effect: CopyContribution) -> None:
        report = self._reports.get(effect.key)
        if report is None:
            return
        expected = report.parts[effect.holder.range].digest

        def read(ref: Any) -> None:
            if self._answered(effect.holder, RECEIVED, ref).digest != expected:
                raise VerificationFailed(f"a part of the contribution of branch {report.branch} was damaged")

        arguments = effect.key, RUN.pack(report.run)
        self._copy(
            effect, "copy_contribution", arguments, read,
            lambda _: self._tell(ContributionCopied(effect.holder, effect.key)),
        )  # fmt: skip

    def _compute(self, effect: ComputeMerge) -> None:
        holder, record = effect.holder, effect.record
        if holder not in self._all:
            return
        keys = {report.run: key for key, report in self._reports.items()}
        named = NAMES.pack(tuple(keys[run] for run in record.runs))
        called = self._all[holder].actor.merge
        self._all.call(
            RangeCall(
                begin=lambda: called.remote(RECORD.pack(record), named),
                read=partial(self._answered, holder, DIGESTS),
                done=partial(self._merged, holder, record),
                failed=partial(self._refuse, holder, record),
                holders=frozenset({holder}),
            )
        )

    def _merged(self, holder: Holder, record: MergeRecord, digests: RangeDigests) -> None:
        if record == self._merging:
            self._weights[holder] = digests.weights
            self._refusals.pop(holder, None)
        self._tell(RangeMerged(holder, record, f"{digests.weights} {digests.others}"))
        self._judge(holder.range)

    def _follow(self, effect: Follow) -> None:
        self._following = effect
        holders = [Holder(number, machine) for number, machine in enumerate(effect.servers)]
        found = [self._source(holder) for holder in holders]
        if any(actor is None for _, actor in found):
            return  # the state machine receives an event about the lost process
        followed = [
            FollowedRange(source, self._weights[holder])
            for holder, (source, _) in zip(holders, found, strict=True)
        ]
        arguments = json.dumps(self._facts).encode(), FOLLOWED.pack(tuple(followed))
        actors, head = [actor for _, actor in found], self._all.head
        self._all.call(
            RangeCall(
                begin=lambda: head.follow.remote(effect.record.version, *arguments, *actors),
                read=lambda ref: answered(PAYLOADS, ref, "the server"),
                done=partial(self._followed, effect),
                failed=partial(self._not_followed, effect),
            )
        )

    def _followed(self, effect: Follow, payloads: dict[str, str]) -> None:
        if effect is self._following:
            self._following = None
            self._payloads[effect.record.version] = {
                name: (self._places[name], digest) for name, digest in payloads.items()
            }
            self._tell(RangesFollowed(effect.record))

    def _not_followed(self, effect: Follow, failure: Exception) -> None:
        """Make the server follow again; a machine whose update the server cannot load or use counts as lost.

        Raises:
            ShareComputeError: the server itself has failed.
        """
        if isinstance(failure, RayError):
            raise shard_store_lost() from failure
        assert isinstance(failure, ShareComputeError)
        place = failure.details.get("range")
        if place is None:
            raise failure
        if effect is not self._following:
            return  # of a machine that was lost meanwhile
        holder = Holder(int(place), effect.servers[int(place)])
        self._failures[holder] += 1
        if isinstance(failure, VerificationFailed) or self._failures[holder] >= MOST_TRIES:
            self._lose(holder, failure)
        elif holder in self._all:
            # If the machine was lost, its heartbeat shows it, and the update is loaded from another machine.
            status = self._all[holder].actor.status.remote
            self._all.call(
                RangeCall(
                    begin=status,
                    read=partial(self._answered, holder, NOTHING),
                    done=lambda _: self._follow(effect) if effect is self._following else None,
                    failed=partial(self._lose, holder),
                    holders=frozenset({holder}),
                )
            )

    # -- the end -------------------------------------------------------------------------------------------------------

    def _name(self, machine: str) -> str:
        return self._known[machine].name if machine in self._known else machine

    def _address(self, machine: str) -> str:
        return self._known[machine].address if machine in self._known else ""

    def close(self, *, is_over: bool, keeps: bool) -> None:
        """See `Aggregation.close`."""
        if self._processes is None:
            return
        if is_over and keeps:
            self._keep()
        if is_over:
            refs = [process.actor.close.remote() for process in self._processes]
            ray.wait(refs, num_returns=len(refs), timeout=BEAT_S) if refs else None
            for process in self._processes:
                ray.kill(process.actor)
        ray.kill(self._processes.head)

    def _keep(self) -> None:
        """Copy the state of the outer optimizer to the server, so that another attempt continues with it."""
        holders = self._servers()
        found = [self._source(holder) for holder in holders]
        if len(found) < len(self._layouts) or not self._machine.are_servers_whole:
            return  # the server may have the state already
        packed = SOURCES.pack(tuple(source for source, _ in found))
        ref = self._all.head.keep_outer.remote(self._machine.version, packed, *(actor for _, actor in found))
        try:
            if ray.wait([ref], timeout=_KEEP_S)[0]:
                answered(NOTHING, ref, "the server")
        except (RayError, ShareComputeError) as failure:
            self._note(f"the state of the outer optimizer was not saved: {failure}", "warning")
