"""Servers of ranges in one event loop: messages are the real ones, and no Ray is started."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from share_compute.errors import StaleEpoch, UserError, VerificationFailed
from share_compute.models.storage.checkpoints import STATE
from share_compute.models.storage.weights import FolderWriter
from share_compute.sparse.keys import KeyCache, digest_of, places_of
from share_compute.sparse.messages import decode, encode
from share_compute.sparse.replica import Push, PushLog
from share_compute.sparse.settings import SparseSettings
from share_compute.sparse.snapshots import snapshot_bytes, snapshot_of
from share_compute.sparse.table import RangeTable, RowValues
from share_compute_actors.sparse.checkpoints import CheckpointFacts, data_digest, newest_checkpoint
from share_compute_actors.sparse.messages import (
    FROZEN,
    PULL,
    PULLED,
    PUSH,
    PUSHED,
    SETTINGS,
    PullHeader,
    PushAnswer,
    PushHeader,
)
from share_compute_actors.sparse.server import SparseServer
from share_compute_actors.wire import Content, unpack_answer

PLACES = np.sort(places_of(np.arange(50, dtype=np.uint64)))
DEADLINE_S = 240


class Handle:
    """Calls a server in the same event loop, as a handle of Ray calls one elsewhere."""

    def __init__(self, server: Any) -> None:
        self._server = server

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._server, name)

        class Method:
            @staticmethod
            def remote(*arguments: Any) -> Any:
                return asyncio.ensure_future(method(*arguments))

        return Method


def server(**options: Any) -> Any:
    settings = SparseSettings("logistic", workers=2, ranges=1, **options)
    return cast("Any", SparseServer).__ray_metadata__.modified_class(SETTINGS.pack(settings))


def packed_push(worker: int, clock: int, *, with_places: bool = True, is_last: bool = False) -> bytes:
    values = np.random.default_rng((worker, clock)).normal(size=(50, 1)).astype(np.float32)
    rows = RowValues(PLACES, values, digest_of(PLACES))
    header = PushHeader(0, worker, clock, 10, is_last, 0)
    return PUSH.pack(Content(header, encode(rows, "float32", with_places=with_places)))


def packed_pull(worker: int, clock: int) -> bytes:
    rows = RowValues(PLACES, np.empty((50, 0), np.float32), digest_of(PLACES))
    return PULL.pack(Content(PullHeader(0, worker, clock), encode(rows, "float32", with_places=False)))


def packed_rows(clock: int) -> bytes:
    """Ask for rows of a snapshot, of which one was never touched."""
    places = np.sort(np.append(PLACES, places_of(np.array([99], np.uint64))))
    rows = RowValues(places, np.empty((51, 0), np.float32))
    return PULL.pack(Content(PullHeader(0, 0, clock), encode(rows, "float32", with_places=True)))


async def pushed(to: Any, *arguments: Any, **options: Any) -> PushAnswer:
    return unpack_answer(PUSHED, await to.push(packed_push(*arguments, **options)), "the server")


async def pair(**options: Any) -> tuple[Any, Any]:
    """Return a server and its whole backup."""
    first, second = server(**options), server(**options)
    assert await first.serve(0, 1, Handle(second), is_new=True)
    return first, second


def finish(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, DEADLINE_S))


def test_pushes_are_on_both_machines_when_they_are_acknowledged() -> None:
    async def work() -> None:
        first, second = await pair(staleness=2)
        assert (await pushed(first, 0, 1, with_places=False)).lacks_keys
        assert await pushed(first, 0, 1) == PushAnswer(1)
        assert await pushed(first, 0, 1) == PushAnswer(1), "a repeated push is acknowledged again"
        assert await pushed(first, 0, 3) == PushAnswer(0, expected=2)
        assert await pushed(first, 0, 2, with_places=False) == PushAnswer(2)
        assert await first.digest(0) == await second.digest(0)
        assert (await first.digest(0))[1] == 2

    finish(work())


def test_an_entry_that_overtakes_another_is_sent_again() -> None:
    """Ray may execute calls of an asynchronous actor in another order."""

    async def work() -> None:
        first, second = await pair(staleness=None)
        store, held, has_overtaken = second.entry, list[bytes](), asyncio.Event()

        async def overtaken(packed: bytes) -> bytes:
            if not held:
                held.append(packed)
                await has_overtaken.wait()
                return bytes(await store(packed))
            answer = bytes(await store(packed))
            has_overtaken.set()
            return answer

        second.entry = overtaken
        answers = await asyncio.gather(pushed(first, 0, 1), pushed(first, 0, 2))
        assert list(answers) == [PushAnswer(1), PushAnswer(2)]
        assert await first.digest(0) == await second.digest(0)

    finish(work())


def test_pulls_wait_for_slower_workers() -> None:
    async def work() -> None:
        first, _ = await pair(staleness=0)
        await pushed(first, 0, 1)
        pulls = [asyncio.ensure_future(first.pull(packed_pull(0, 1))) for _ in range(2)]
        done, _ = await asyncio.wait(pulls, timeout=0.05)
        assert not done
        await pushed(first, 1, 1)
        for each in pulls:
            header, content = unpack_answer(PULLED, await each, "the server")
            assert header.rows == 50
            assert len(content) > 50 * 4

    finish(work())


def test_a_push_and_the_next_pull_are_one_call() -> None:
    async def work() -> None:
        first = server(staleness=1)
        await first.serve(0, 1, None, is_new=True)
        await pushed(first, 0, 1)
        await pushed(first, 1, 1)
        before = unpack_answer(PULLED, await first.pull(packed_pull(0, 1)), "the server")[1]
        answers = await first.push_pull(packed_push(0, 2), packed_pull(0, 2))
        assert unpack_answer(PUSHED, answers[0], "the server") == PushAnswer(2)
        header, rows = unpack_answer(PULLED, answers[1], "the server")
        assert header.rows == 50
        again = unpack_answer(PULLED, await first.pull(packed_pull(0, 2)), "the server")[1]
        assert bytes(rows) == bytes(again) != bytes(before), "the rows have the push"

    finish(work())


def test_a_backup_becomes_the_server_and_has_everything() -> None:
    async def work() -> None:
        _, second = await pair(staleness=1)
        third = server(staleness=1)
        with pytest.raises(StaleEpoch):
            await pushed(second, 0, 1)
        assert await second.serve(0, 2, Handle(third), is_new=False)
        for clock in (1, 2):
            await pushed(second, 0, clock)
            await pushed(second, 1, clock, is_last=clock == 2)
        assert await second.digest(0) == await third.digest(0)
        assert await third.clocks(0) == [[0, 2], [1, 2]]

    finish(work())


def test_a_frozen_snapshot_starts_a_range_elsewhere() -> None:
    async def work() -> None:
        first, _ = await pair(staleness=0)
        for worker in (0, 1):
            await pushed(first, worker, 1)
        frozen = unpack_answer(FROZEN, await first.freeze(0, 1, "checkpoint"), "the server")
        assert frozen.clocks == ((0, 1), (1, 1))
        waiting = asyncio.ensure_future(first.freeze(0, 2, "measuring"))
        await pushed(first, 0, 2)
        assert not waiting.done()
        content = await first.frozen_part(0, 1, 0, frozen.size_bytes)
        await first.thaw(0, 1, "checkpoint")
        assert await first.frozen_part(0, 1, 0, 10) == b""
        other = server(staleness=0)
        half = len(content) // 2
        await other.restore(0, 0, content[:half])
        with pytest.raises(VerificationFailed):
            await other.restore(0, half + 1, content[half:])
        await other.restore(0, half, content[half:])
        await other.serve(0, 1, None, is_new=True)
        assert await other.clocks(0) == [[0, 1], [1, 1]]
        for at in (first, other):
            await pushed(at, 0, 2)
            await pushed(at, 1, 2)
        assert await first.digest(0) == await other.digest(0)
        assert unpack_answer(FROZEN, await waiting, "the server").clocks == ((0, 2), (1, 2))
        answer, rows = unpack_answer(PULLED, await first.frozen_rows(packed_rows(2)), "the server")
        assert answer.rows == 50
        kept = decode(bytes(rows), KeyCache(), 1)
        for worker in (0, 1):
            await pushed(first, worker, 3)
        again = unpack_answer(PULLED, await first.frozen_rows(packed_rows(2)), "the server")[1]
        assert bytes(again) == bytes(rows), "they are those of the snapshot"
        assert (kept.values[kept.places == PLACES[0]] != 0).all()
        assert (kept.values[~np.isin(kept.places, PLACES)] == 0).all()
        with pytest.raises(StaleEpoch):
            unpack_answer(PULLED, await first.frozen_rows(packed_rows(1)), "the server")

    finish(work())


@pytest.mark.parametrize("go_on", [False, True])
def test_workers_that_had_ended_go_on_in_more_passes(go_on: bool) -> None:
    async def work() -> None:
        first, again = server(staleness=0), server(staleness=0)
        await first.serve(0, 1, None, is_new=True)
        await pushed(first, 0, 1, is_last=True)
        await pushed(first, 1, 1)
        size = unpack_answer(FROZEN, await first.freeze(0, 0, "checkpoint"), "the server").size_bytes
        content = await first.frozen_part(0, 0, 0, size)
        await again.restore(0, 0, content, go_on=go_on)
        await again.serve(0, 1, None, is_new=True)
        await pushed(again, 1, 2)
        waiting = asyncio.ensure_future(again.pull(packed_pull(1, 2)))
        if go_on:
            await asyncio.wait([waiting], timeout=0.05)
            assert not waiting.done(), "worker 1 waits for worker 0 if there are more passes"
        else:
            await waiting
        await pushed(again, 0, 2)
        unpack_answer(PULLED, await waiting, "the server")

    finish(work())


def checkpoint(folder: Path, settings: SparseSettings, data: str) -> None:
    writer = FolderWriter(folder / "step-00000004")
    writer.write_json(STATE, asdict(CheckpointFacts(settings, 4, {0: 4, 1: 4}, data)))
    writer.finish()


def test_checkpoints_of_other_data_of_the_same_size_are_refused(tmp_path: Path) -> None:
    settings = SparseSettings("logistic", workers=2, ranges=1, passes=2)
    file = tmp_path / "rows"
    file.write_bytes(b"some rows")
    digest = data_digest([file])
    checkpoint(tmp_path / "checkpoints", settings, digest)
    saved, _ = newest_checkpoint(tmp_path / "checkpoints", settings, digest)
    assert saved is not None
    assert (saved.step, saved.has_fewer_passes) == (4, False)
    file.write_bytes(b"same size")
    with pytest.raises(UserError, match="the data has changed"):
        newest_checkpoint(tmp_path / "checkpoints", settings, data_digest([file]))


def test_a_checkpoint_is_continued_with_more_passes_and_not_with_fewer(tmp_path: Path) -> None:
    settings = SparseSettings("logistic", workers=2, ranges=1, passes=2)
    checkpoint(tmp_path, settings, "data")
    saved, _ = newest_checkpoint(tmp_path, replace(settings, passes=3), "data")
    assert saved is not None
    assert saved.has_fewer_passes
    with pytest.raises(UserError, match="other settings"):
        newest_checkpoint(tmp_path, replace(settings, passes=1), "data")


def test_snapshots_keep_pushes_that_are_not_merged() -> None:
    rule = SparseSettings("logistic", workers=2, ranges=1).build_rule()
    log = PushLog(RangeTable(rule), 2, 0)
    ones = np.ones((50, 1), np.float32)
    log.append(Push(0, 1, 10, RowValues(PLACES, ones)))
    again = log.restored(snapshot_of(snapshot_bytes(log.snapshot())))
    for each in (log, again):
        each.append(Push(1, 1, 10, RowValues(PLACES, 2 * ones)))
        assert each.table.counters.examples == 20
    assert again.table.digest() == log.table.digest()
    assert again.clocks == {0: 1, 1: 1}


@pytest.mark.parametrize("content", [b"", b"x" * 50, snapshot_bytes.__name__.encode()])
def test_damaged_snapshots_are_refused(content: bytes) -> None:
    with pytest.raises(VerificationFailed, match="cannot be read"):
        snapshot_of(content)


def failing_apply(monkeypatch: pytest.MonkeyPatch, failure: Exception) -> asyncio.Event:
    """Let all updates fail; return an event that is set when a process would end."""
    ended = asyncio.Event()

    def apply(*_: object) -> None:
        raise failure

    monkeypatch.setattr(RangeTable, "apply", apply)
    monkeypatch.setattr("share_compute_actors.sparse.server.end_process", ended.set)
    return ended


def test_an_unexpected_error_ends_the_process_and_stores_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        first, second = await pair(staleness=2)
        ended = failing_apply(monkeypatch, MemoryError())
        waiting = asyncio.ensure_future(first.push(packed_push(0, 1)))
        await ended.wait()
        assert (await second.digest(0))[1] == 0, "an entry that was not applied is not in the log"
        assert await second.clocks(0) == []
        waiting.cancel()

    finish(work())


@pytest.mark.parametrize("has_backup", [False, True])
def test_an_update_that_cannot_be_applied_is_reported(
    monkeypatch: pytest.MonkeyPatch, has_backup: bool
) -> None:
    async def work() -> None:
        first, second = server(staleness=2), server(staleness=2)
        await first.serve(0, 1, Handle(second) if has_backup else None, is_new=True)
        ended = failing_apply(monkeypatch, VerificationFailed("not finite"))
        for clock in (1, 2):
            with pytest.raises(VerificationFailed, match="not finite"):
                await pushed(first, 0, clock)
        assert not ended.is_set()

    finish(work())


def test_a_late_pull_does_not_answer_a_later_one() -> None:
    async def work() -> None:
        first, _ = await pair(staleness=0)
        for worker in (0, 1):
            await pushed(first, worker, 1)
        await pushed(first, 0, 2)
        waiting = asyncio.ensure_future(first.pull(packed_pull(0, 2)))
        await asyncio.sleep(0)
        await first.pull(packed_pull(0, 1))
        await asyncio.sleep(0)
        assert not waiting.done(), "worker 1 has not made its second push"
        await pushed(first, 1, 2)
        await waiting

    finish(work())


def test_messages_of_other_workers_and_ranges_are_refused() -> None:
    async def work() -> None:
        first = server(staleness=2)
        await first.serve(0, 1, None, is_new=True)
        with pytest.raises(VerificationFailed, match="worker 77 sent a message, but the job has 2"):
            await pushed(first, 77, 1)
        with pytest.raises(VerificationFailed, match="worker 2 sent"):
            unpack_answer(PULLED, await first.pull(packed_pull(2, 0)), "the server")
        assert await first.clocks(0) == []
        half = SparseSettings("logistic", workers=2, ranges=2)
        other = cast("Any", SparseServer).__ray_metadata__.modified_class(SETTINGS.pack(half))
        await other.serve(0, 1, None, is_new=True)
        with pytest.raises(VerificationFailed, match="worker 1 sent places that are not in range 0"):
            await pushed(other, 1, 1)
        assert (await other.digest(0))[1] == 0

    finish(work())


def test_rows_are_fetched_in_pieces() -> None:
    async def work() -> None:
        first = server(staleness=2)
        await first.serve(0, 1, None, is_new=True)
        await pushed(first, 0, 1)
        found = [decode(await first.rows(0, at, 20), KeyCache(), 1) for at in (0, 20, 40, 60)]
        assert [len(each.places) for each in found] == [20, 20, 10, 0]
        whole = decode(await first.rows(0, 0, 100), KeyCache(), 1)
        assert np.concatenate([each.places for each in found]).tolist() == PLACES.tolist()
        assert np.concatenate([each.values for each in found]).tolist() == whole.values.tolist()

    finish(work())
