"""Processes with ranges that are lost, damaged or full, without Ray: the bits stay those of one aggregator."""

from __future__ import annotations

import fcntl
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError
from tests.actors.training.rounds.range_world import LocalActor, RangeWorld

from share_compute.errors import (
    ContributorLost,
    OutOfMemory,
    ShareComputeError,
    Unavailable,
    UserError,
    VerificationFailed,
)
from share_compute.models.storage.weights import WeightFolder
from share_compute.synchronization.ranges import RangeAggregator
from share_compute.synchronization.records import BranchRun
from share_compute_actors.group.exceptions import Cancelled
from share_compute_actors.training.coordinator import branch_ranges
from share_compute_actors.training.coordinator.branch_ranges import BranchRanges, Sent
from share_compute_actors.training.rounds import range_processes, range_server
from share_compute_actors.training.rounds.messages import servers_of_ranges
from share_compute_actors.training.rounds.range_server import new_folder
from share_compute_actors.transport.pieces import PIECES
from share_compute_actors.wire import Undeclared, pack_answer, unpack_answer

Make = Callable[..., RangeWorld]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    def made(codec: str = "int4", outer: str = "nesterov") -> RangeWorld:
        return RangeWorld(tmp_path, monkeypatch, codec, outer)

    return made


@pytest.fixture
def world(make: Make) -> RangeWorld:
    world = make()
    world.group.begin(0)
    world.poll()
    return world


def kill(actor: LocalActor) -> None:
    actor.is_dead = True


@pytest.mark.parametrize("seed", range(3))
def test_merges_have_the_bits_of_one_server_though_machines_are_lost(make: Make, seed: int) -> None:
    world, draw = (
        make(("int4", "none", "topk")[seed % 3], ("nesterov", "adam")[seed % 2]),
        random.Random(seed),
    )
    world.group.begin(0)
    for version in range(1, 5):
        if version > 1:
            kill(draw.choice(world.running(draw.randrange(2))))
        world.round(version)
    assert world.has_the_bits_of_one_server
    assert sum(each.is_dead for each in world.actors.values()) == 3


def copying(folder: str, act: Callable[[], None]) -> Callable[..., None]:
    """Return a hook for `rows` that does something when another process copies from a folder."""

    def hook(asked: str, _extents: bytes) -> None:
        if asked.startswith(folder):
            act()

    return hook


def test_a_server_that_is_lost_while_its_backup_copies_from_it_is_the_one_that_is_lost(
    world: RangeWorld,
) -> None:
    world.round(1)
    server, backup = world.server(0), world.backup(0)
    server.hooks["rows"] = copying("contributions", lambda: kill(server))
    world.round(2)
    assert server.is_dead
    assert not backup.is_dead
    assert world.server(0) is backup
    assert not any("lost all machines" in note for note in world.notes)
    assert world.has_the_bits_of_one_server


def test_a_range_whose_server_is_lost_while_the_only_backup_copies_it_begins_with_the_weights_of_the_server(
    world: RangeWorld,
) -> None:
    world.round(1)
    kill(world.backup(0))
    server = world.server(0)
    server.hooks["rows"] = copying("versions", lambda: kill(server))
    world.round(2)
    assert any("without the state of the outer optimizer" in note for note in world.notes)
    assert world.committed[-1].version == 2


def test_a_copy_that_failed_for_a_moment_is_repeated(world: RangeWorld) -> None:
    failures = [1, 2]
    server = world.server(0)

    def fail(*_: Any) -> None:
        if failures:
            failures.pop()
            raise Unavailable("the network is slow")

    server.hooks["slots"] = server.hooks["rows"] = fail
    before = world.running(0)
    world.round(1)
    assert not failures
    assert world.running(0) == before
    assert world.has_the_bits_of_one_server


def test_a_process_that_can_never_copy_is_lost_and_its_source_is_not(world: RangeWorld) -> None:
    server, backup = world.server(0), world.backup(0)
    backup.hooks["copy_contribution"] = lambda *_: refusal(ContributorLost)
    world.round(1)
    assert backup.is_dead
    assert not server.is_dead
    assert world.has_the_bits_of_one_server


def refusal(kind: type[ShareComputeError | RayActorError]) -> Any:
    raise kind("the process refuses") if issubclass(kind, ShareComputeError) else kind()


@pytest.mark.parametrize("kind", [UserError, OutOfMemory, Unavailable])
def test_an_error_of_one_machine_is_its_loss(world: RangeWorld, kind: type[ShareComputeError]) -> None:
    server = world.server(0)
    server.hooks["merge"] = lambda *_: refusal(kind)
    world.round(1)
    assert server.is_dead
    assert world.has_the_bits_of_one_server


def test_an_error_of_all_machines_of_a_range_ends_the_job(
    world: RangeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RangeAggregator, "merge_range", lambda *_: refusal(UserError))
    with pytest.raises(UserError, match="the process refuses"):
        world.round(1)
    assert not any(each.is_dead for each in world.actors.values())


def test_a_machine_with_a_damaged_update_is_lost(world: RangeWorld) -> None:
    server = world.server(1)
    asked: list[str] = []

    def damage(folder: str, extents: bytes) -> bytes | None:
        if not folder.startswith("updates"):
            return None
        asked.append(folder)
        pieces = unpack_answer(PIECES, server.target.rows(folder, extents), "a server")
        return pack_answer(PIECES, pieces[:-1])

    server.hooks["rows"] = damage
    world.round(1)
    assert server.is_dead
    assert len(asked) == range_processes.MOST_TRIES
    assert world.has_the_bits_of_one_server


def test_a_server_that_cannot_store_contributions_is_lost(world: RangeWorld) -> None:
    server = world.server(0)
    world.mail.accused.put((server.name, "its disk is full"))
    world.mail.accused.put(("another", "its disk is full"))
    world.round(1)
    assert server.is_dead
    assert any("its disk is full" in note for note in world.notes)
    assert world.has_the_bits_of_one_server


def test_a_branch_reports_servers_that_fail_and_returns_defects_of_its_contribution(
    world: RangeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(branch_ranges, "ray", range_processes.ray)
    accused: list[str] = []
    synchronizer = LocalActor(
        SimpleNamespace(
            accuse_range_server=lambda actor, _: accused.append(actor),
            range_servers=lambda: servers_of_ranges.dump_json(world.mail.servers[:1]),
        )
    )
    cancelled = threading.Event()
    cancelled.set()  # a branch that waits for another server of the range ends
    members = SimpleNamespace(
        ask=lambda *_: {"a": ("weight",)}, name=str, handle=lambda _: None, wait=lambda _: None
    )
    pause = SimpleNamespace(at_pause=lambda ask: ask(), membership=SimpleNamespace(stages=(("a",),)))
    branch: Any = BranchRanges(
        SimpleNamespace(job_id="job", attempt=1, branch=SimpleNamespace(number=0, start=1)),  # type: ignore[arg-type]
        SimpleNamespace(  # type: ignore[arg-type]
            synchronizer=synchronizer, requests=SimpleNamespace(cancelled=cancelled)
        ),
        members,  # type: ignore[arg-type]
        pause,  # type: ignore[arg-type]
        SimpleNamespace(),  # type: ignore[arg-type]
    )

    def send(kind: type[ShareComputeError | RayActorError]) -> Sent:
        server = LocalActor(SimpleNamespace(receive=lambda *_: refusal(kind)))
        monkeypatch.setattr(branch_ranges, "named_member", lambda *_: server)
        sent: Sent = branch.send(1, None)
        return sent

    for kind in (Unavailable, UserError, OutOfMemory, Undeclared):
        with pytest.raises(Cancelled):
            send(kind)
    assert accused == [world.mail.servers[0].actor] * 4
    with pytest.raises(Cancelled):
        send(RayActorError)
    assert send(VerificationFailed).fault == "the process refuses"
    assert send(ContributorLost).fault == "the process refuses"
    assert accused == [world.mail.servers[0].actor] * 4


def test_a_part_in_a_process_that_was_replaced_on_its_machine_is_sent_again(world: RangeWorld) -> None:
    run = BranchRun(1, 0)
    taken: list[Any] = []
    take, world.group.take = world.group.take, taken.append  # type: ignore[method-assign]
    world.send(run)
    world.group.take = take  # type: ignore[method-assign]
    part = taken[0].parts[0]
    old = taken[0].model_copy(
        update={"parts": (part.model_copy(update={"actor": "before"}), *taken[0].parts[1:])}
    )
    world.group.take(old)
    world.poll()
    assert world.again == [run]
    assert run not in world.accepted


def test_no_process_is_lost_while_the_network_of_the_server_is_cut(
    world: RangeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[int] = []
    world.own_link.has_failed = lambda *_: not waits
    world.own_link.wait = lambda: waits.append(1)
    cut = list(world.running(0))
    fake = range_processes.ray

    def wait(refs: list[Any], **_: Any) -> Any:
        return ([], refs) if not waits else (refs, [])

    monkeypatch.setattr(range_processes, "ray", SimpleNamespace(**{**vars(fake), "wait": wait}))
    monkeypatch.setattr(range_processes, "UNRESPONSIVE_S", -1.0)
    world.poll(2)
    assert waits == [1]
    world.poll()
    assert not any(each.is_dead for each in cut)


def test_a_suspension_keeps_the_state_of_all_ranges(world: RangeWorld) -> None:
    world.round(1)
    world.round(2)
    world.group.close(is_over=True, keeps=True)
    kept = WeightFolder(world.head.outer_folder(2))
    assert kept.digest() == WeightFolder(world.alone.outer_folder(2)).digest()


def test_a_suspension_while_servers_copy_keeps_the_state_of_the_last_one(make: Make) -> None:
    world = make()
    before = WeightFolder(world.head.outer_folder(0)).digest()
    world.group.begin(0)  # the answers to all copies are still unread
    world.group.close(is_over=True, keeps=True)
    assert WeightFolder(world.head.outer_folder(0)).digest() == before


def test_state_on_the_server_that_does_not_fit_is_not_used(make: Make) -> None:
    world = make()
    for file in world.head.outer_folder(0).glob("model*"):
        file.unlink()
    world.group.begin(0)
    world.round(1)
    assert any("without the state of the outer optimizer" in note for note in world.notes)
    assert not any("was lost:" in note for note in world.notes)


def test_no_state_is_reported_as_lost_if_there_is_none(make: Make) -> None:
    world = make("none", "sgd")
    world.group.begin(0)
    world.round(1)
    for number in range(2):
        for actor in world.running(number):
            kill(actor)
    world.round(2)
    assert not any("without the state" in note for note in world.notes), world.notes
    assert world.has_the_bits_of_one_server


def test_folders_of_ended_processes_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(range_server, "temporary_folder", lambda: tmp_path)
    first = new_folder()
    left, parent = first.parent / "left", first.parent
    left.mkdir()
    (left / "file").touch()
    target = tmp_path / "target"
    target.mkdir()
    (parent / "link").symlink_to(target)
    second = new_folder()
    assert first.is_dir()
    assert second.is_dir()
    assert first != second
    assert not left.exists()
    assert target.is_dir()
    assert parent.stat().st_mode & 0o077 == 0
    descriptor = os.open(first / "lock", os.O_RDWR)
    with pytest.raises(OSError, match="unavailable"):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(descriptor)


def test_a_link_in_place_of_the_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(range_server, "temporary_folder", lambda: tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / f"share-compute-ranges-{os.getuid()}").symlink_to(tmp_path / "other")
    with pytest.raises(Unavailable, match="is a link"):
        new_folder()
