"""Processes with ranges in this process, without Ray: the code of the group and of its processes is the real one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError
from safetensors.torch import save_file
from tests.platform.synchronization.test_ranges import begin, key_of, payloads, training
from torch import Tensor

from share_compute.models.storage.weights import WeightFolder, rows_of
from share_compute.synchronization.aggregator import Aggregator
from share_compute.synchronization.ranges import FollowingAggregator, divided
from share_compute.synchronization.records import BranchRun, Contribution, MergeRecord, MergeTerm
from share_compute.topology import Contributor, Device, Topology
from share_compute_actors.group import answering, fetching, packed_fetching
from share_compute_actors.group.answering import answered
from share_compute_actors.messages import read_extents
from share_compute_actors.training.rounds import range_group, range_processes, range_server
from share_compute_actors.training.rounds.messages import BranchMail, BranchReport, ContributionPart
from share_compute_actors.training.rounds.range_group import RangeGroup
from share_compute_actors.training.rounds.range_server import (
    RECEIVED,
    RUN,
    SETUP,
    SOURCES,
    RangeServer,
    RemoteSource,
)
from share_compute_actors.transport.pieces import PIECES, Piece
from share_compute_actors.wire import pack_answer

DEVICE = Device("cpu", "cpu", memory_bytes=2**31, flops_per_s={"float32": 1e10})
MACHINES = Topology(
    tuple(
        Contributor(id=f"c{number}", name=f"machine-{number}", devices=(DEVICE,), node_id="n")
        for number in range(4)
    )
)


class LocalRef:
    """The result of a call that has already run."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.value, self.failure = None, None
        try:
            self.value = call()
        except Exception as failure:  # noqa: BLE001 - as Ray passes any on
            self.failure = failure


class LocalActor:
    """Calls an object as Ray calls an actor. ``hooks`` run before the methods of their names."""

    def __init__(self, target: Any, name: str = "") -> None:
        self.target, self.name = target, name
        self.range: int | None = None
        self.is_dead = self.is_stuck = False
        self.hooks: dict[str, Callable[..., Any]] = {}

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: LocalRef(partial(self._call, method, arguments)))

    def _call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        if not self.is_dead and method in self.hooks:
            answer = self.hooks[method](*arguments)
            if answer is not None:
                return answer
        if self.is_dead:
            raise RayActorError
        return getattr(self.target, method)(*arguments)


def local_ray() -> Any:
    def get(ref: LocalRef) -> Any:
        if ref.failure is not None:
            raise ref.failure
        return ref.value

    def kill(actor: LocalActor) -> None:
        actor.is_dead = True

    return SimpleNamespace(
        get=get,
        kill=kill,
        wait=lambda refs, **_: (list(refs), []),
        get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: "h", get_actor_name=lambda: "x"),
    )


class BranchMember:
    """A member that has the payloads of a contribution."""

    def __init__(self, found: dict[str, Tensor]) -> None:
        self._found = found

    def contribution_rows(self, extents: bytes) -> bytes:
        pieces = [
            Piece.of_rows(each.name, rows_of(self._found[each.name], each.start, each.stop))
            for each in read_extents(extents)
        ]
        return pack_answer(PIECES, pieces)


class RangeWorld:
    """A group of two ranges on four machines, with the server's weights and those of one aggregator alone."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, codec: str, outer: str) -> None:
        self.actors: dict[str, LocalActor] = {}
        self.folder = folder
        self._use_no_ray(monkeypatch)
        self.spec = training(codec, outer)
        self.head = FollowingAggregator(folder / "rounds", self.spec)
        self.alone = Aggregator(folder / "alone", self.spec)
        for each in (self.head, self.alone):
            begin(each)
        self.mail = BranchMail()
        self.notes: list[str] = []
        self.accepted: dict[BranchRun, BranchReport] = {}
        self.again: list[BranchRun] = []
        self.committed: list[MergeRecord] = []
        self.is_merging = False
        policy = self.spec.rounds
        assert policy is not None
        self.group = RangeGroup(
            SimpleNamespace(  # type: ignore[arg-type]
                job_id="job",
                attempt=1,
                spec=SimpleNamespace(training=self.spec),
                folder=folder,
                topology=MACHINES,
            ),
            self.head,
            divided(self.head.layout, policy, 4, 2),
            self,  # type: ignore[arg-type]
            self.mail,
            lambda message, _: self.notes.append(message),
            SimpleNamespace(),  # type: ignore[arg-type]
        )

    def _use_no_ray(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fake = local_ray()
        for module in (range_group, range_server, range_processes, packed_fetching, answering, fetching):
            monkeypatch.setattr(module, "ray", fake)
        for name in ("refuse_pickles", "close_stalled_connections"):
            monkeypatch.setattr(range_server, name, lambda: None)
        monkeypatch.setattr(range_server, "Lifeline", lambda: SimpleNamespace(pull=lambda: None))
        monkeypatch.setattr(range_server, "temporary_folder", lambda: self.folder)
        raw = RangeServer.__ray_metadata__.modified_class  # type: ignore[attr-defined]

        def options(**given: Any) -> Any:
            def remote(setup: bytes) -> LocalActor:
                actor = LocalActor(raw(setup), given.get("name", "head"))
                actor.range = SETUP.unpack(setup, "the coordinator").number
                self.actors[actor.name] = actor
                return actor

            return SimpleNamespace(remote=remote)

        self.own_link = SimpleNamespace(has_failed=lambda *_: False, wait=lambda: None)
        for module in (range_group, range_processes):
            monkeypatch.setattr(module, "RangeServer", SimpleNamespace(options=options))
            monkeypatch.setattr(module, "NodeAffinitySchedulingStrategy", lambda *_, **__: None)
        monkeypatch.setattr(range_group, "OwnLink", lambda *_: self.own_link)
        monkeypatch.setattr(range_processes, "workers_of", lambda _: {})
        monkeypatch.setattr(range_processes, "BEAT_S", 0.0)

    # -- the listener's methods ----------------------------------------------------------------------------------------

    def accept(self, report: BranchReport, _digest: str) -> None:
        self.accepted[report.run] = report

    def request_again(self, report: BranchReport) -> None:
        self.again.append(report.run)

    def restart_round(self, why: str) -> None:
        self.notes.append(why)
        self.again += self.accepted
        self.accepted.clear()
        self.is_merging = False

    def commit(self, record: MergeRecord, _distance: float | None) -> None:
        """Merge the same contributions on one aggregator, and check that the weights are the same."""
        folders = {}
        for run in record.runs:
            folders[run] = self.folder / f"contribution-{key_of(run)}"
            folders[run].mkdir()
            save_file(payloads(self.spec, run), folders[run] / "model.safetensors")
        self.alone.merge(record, folders, {"step": 0})
        self.committed.append(record)
        self.accepted.clear()
        self.is_merging = False
        self.group.prune(record.version, record.version - 1, [])

    @property
    def has_the_bits_of_one_server(self) -> bool:
        version = self.committed[-1].version
        digests = {WeightFolder(each.version_folder(version)).digest() for each in (self.head, self.alone)}
        return len(digests) == 1

    # -- what the synchronizer and the branches do ---------------------------------------------------------------------

    def poll(self, times: int = 12) -> None:
        for _ in range(times):
            self.group.poll()

    def server(self, number: int) -> LocalActor:
        """Return the process that is the server of a range."""
        return self.actors[self.mail.servers[number].actor]

    def backup(self, number: int) -> LocalActor:
        server = self.server(number)
        return next(each for each in self.running(number) if each is not server)

    def running(self, number: int) -> list[LocalActor]:
        return [
            each
            for each in self.actors.values()
            if each.name != "head" and not each.is_dead and each.range == number
        ]

    def send(self, run: BranchRun) -> bool:
        """Send a contribution to the servers of all ranges; return whether none of them was lost."""
        found = payloads(self.spec, run)
        key, member = f"{key_of(run)}-1", LocalActor(BranchMember(found))
        sources = SOURCES.pack((RemoteSource("a", "a", tuple(found)),))
        parts = []
        for server in self.mail.servers:
            call = self.actors[server.actor].receive.remote(key, RUN.pack(run), sources, member)
            try:
                received = answered(RECEIVED, call, "a server")
            except RayActorError:
                return False
            parts.append(
                ContributionPart(
                    actor=server.actor,
                    machine=server.machine,
                    digest=received.digest,
                    size_bytes=received.size_bytes,
                )
            )
        report = BranchReport(
            branch=run.branch,
            start=1,
            round=run.round,
            key=key,
            parts=tuple(parts),
            samples=10,
            loss=1.0,
            seconds=1.0,
        )
        self.group.take(report)
        return True

    def merge(self, version: int) -> None:
        """Have the accepted contributions merged."""
        runs = sorted(self.accepted)
        terms = tuple(MergeTerm(Contribution(run, 1.0, "digest"), 0.5) for run in runs)
        self.is_merging = True
        self.group.merge(MergeRecord(version, terms), dict(self.accepted), {"step": version})

    def round(self, version: int, *, polls: int = 12) -> None:
        """Send the contributions of both branches, also those that are lost, and merge them."""
        self.again = [BranchRun(version, branch) for branch in range(2)]
        for _ in range(30):
            self.poll(polls)
            if self.committed and self.committed[-1].version == version:
                return
            waiting, self.again = self.again, []
            self.again += [run for run in waiting if not self.mail.servers or not self.send(run)]
            self.poll(polls)
            if len(self.accepted) == 2 and not self.is_merging:
                self.merge(version)
        raise AssertionError(self.notes)
