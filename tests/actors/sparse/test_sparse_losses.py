"""Losses, suspension and deadlines of runs of sparse models, with stand-ins for Ray and its actors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.stub_ray import NODES, StubActor, StubClass, StubRay, StubServer, StubWorker

from share_compute.errors import ContributorLost, StaleEpoch, UserError, VerificationFailed
from share_compute.sparse.cocoa import DualProblem
from share_compute.sparse.messages import encode
from share_compute.sparse.readers.kept_blocks import KeptBlocks
from share_compute.sparse.readers.libsvm import libsvm_blocks
from share_compute.sparse.settings import SparseSettings
from share_compute.sparse.table import RowValues
from share_compute_actors.group.exceptions import Cancelled
from share_compute_actors.sparse import checkpoints, dual, losses, statuses, suspension
from share_compute_actors.sparse import run as runs
from share_compute_actors.sparse import worker as rows_worker
from share_compute_actors.sparse.checkpoints import (
    CheckpointOptions,
    DualFacts,
    dual_state,
    newest_dual,
    save_checkpoint,
    save_dual,
)
from share_compute_actors.sparse.dual import (
    PLACES,
    ROUND,
    ROUND_DONE,
    DualRun,
    PlacesHeader,
    RoundAnswer,
)
from share_compute_actors.sparse.losses import MOST_LOSSES, ProcessLosses
from share_compute_actors.sparse.measuring import PassMeasuring
from share_compute_actors.sparse.messages import LOADED, REPORT, SETTINGS
from share_compute_actors.sparse.run import RunOptions, SparseRun
from share_compute_actors.sparse.server import SparseServer
from share_compute_actors.sparse.worker import SparseRowsWorker
from share_compute_actors.wire import Content, pack_answer, unpack_answer

SETTINGS_OF_RUN = SparseSettings("logistic", workers=2, ranges=1, passes=1, batch_size=5)
DEADLINE_S = 240.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(runs, "POLL_S", 0.02)
    monkeypatch.setattr(dual, "WAIT_S", 0.02)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> StubRay:
    return StubRay(monkeypatch)


@pytest.fixture
def new_run(
    stub: StubRay, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Callable[..., SparseRun]]:
    """Make runs with two servers and two workers; node 0 has one of each."""
    assert stub.nodes_alive
    monkeypatch.setattr(runs, "SparseServer", StubClass(StubServer))
    monkeypatch.setattr(runs, "SparseRowsWorker", StubClass(StubWorker))
    file = tmp_path / "rows"
    file.write_text("1 1:1\n")
    made: list[SparseRun] = []

    def make(options: RunOptions | None = None) -> SparseRun:
        files = [[str(file)], [str(file)]]
        made.append(
            SparseRun(SETTINGS_OF_RUN, files, "libsvm", NODES[:2], [NODES[0], NODES[2]], "a source", options)
        )
        return made[-1]

    yield make
    for run in made:
        run.close()


class Script:
    """Calls one function after another, one in each second call of ``watch``."""

    def __init__(self, *steps: Callable[[], object]) -> None:
        self.steps, self.calls = list(steps), 0

    def __call__(self) -> None:
        self.calls += 1
        assert self.calls < 5000, "the run did not end"
        if self.steps and self.calls % 2 == 0:
            self.steps.pop(0)()


def never(*_: Any) -> Future[Any]:
    return Future()


@pytest.mark.parametrize("loss", ["process", "leave"])
def test_the_model_stays_when_a_worker_is_lost_after_its_end(
    new_run: Callable[..., SparseRun], loss: str
) -> None:
    run = new_run()
    first, second = (worker.actor for worker in run.workers)
    script = Script(
        lambda: first.end(4),
        lambda: run.leave(NODES[0]) if loss == "leave" else first.kill(),
        lambda: second.end(4),
    )
    reports = run.train(script)
    assert first.is_dead
    assert [report.clock for report in reports] == [4, 4]
    assert run.returns == 0
    assert [server.is_dead for server in run.servers.values()] == [False] * len(run.servers)


def test_a_lost_worker_does_not_hide_the_reports_of_others(new_run: Callable[..., SparseRun]) -> None:
    run = new_run()
    run.workers[0].actor.kill()
    assert list(run.reports(1.0)) == [1]


def test_a_worker_that_ends_again_and_again_ends_the_run(new_run: Callable[..., SparseRun]) -> None:
    run = new_run()

    def kill() -> None:
        if run.workers[1].restart_at is None:
            run.workers[1].actor.kill()

    with pytest.raises(UserError, match=f"worker 1 ended {MOST_LOSSES} times in sequence") as caught:
        run.train(kill)
    assert "it lacked memory" in caught.value.message
    assert caught.value.hint


def test_lost_machines_and_losses_with_progress_do_not_end_the_run(
    new_run: Callable[..., SparseRun], stub: StubRay
) -> None:
    run, lost = new_run(), list[int]()

    def kill() -> None:
        worker = run.workers[1]
        if worker.task != "run" or worker.restart_at is not None:
            return
        if len(lost) == 4 * MOST_LOSSES:
            for each in run.workers:
                if not each.actor.training.done():
                    each.actor.end(4)
            return
        lost.append(1)
        if len(lost) <= 2 * MOST_LOSSES:
            stub.nodes_alive = [node for node in NODES if node != worker.machine]
        else:
            stub.nodes_alive = NODES
            for server in run.servers.values():
                server.clocks_of[1] = len(lost)
        worker.actor.kill()

    assert len(run.train(kill)) == 2
    assert len(lost) == 4 * MOST_LOSSES


def test_requests_are_seen_while_a_lost_worker_reads_its_rows(new_run: Callable[..., SparseRun]) -> None:
    run = new_run()

    def lose() -> None:
        runs.SparseRowsWorker.make = lambda node: StubActor(node, load_prepared=never)  # type: ignore[attr-defined]
        run.workers[1].actor.kill()

    def cancel() -> None:
        assert run.workers[1].task == "load"
        raise Cancelled

    with pytest.raises(Cancelled):
        run.train(Script(lose, lambda: None, cancel))


def test_requests_are_seen_while_workers_read_their_rows_first(new_run: Callable[..., SparseRun]) -> None:
    runs.SparseRowsWorker.make = lambda node: StubActor(node, load_prepared=never)  # type: ignore[attr-defined]

    def cancel() -> None:
        raise Cancelled

    with pytest.raises(Cancelled):
        new_run(RunOptions(check=cancel))


def test_suspension_saves_a_checkpoint_from_which_another_run_continues(
    new_run: Callable[..., SparseRun], tmp_path: Path
) -> None:
    saved: list[Any] = []
    options = RunOptions(CheckpointOptions(tmp_path / "checkpoints", every_s=1e6), saved.append)
    run = new_run(options)
    for server in run.servers.values():
        server.clocks_of = {0: 3, 1: 2}
    with pytest.raises(ContributorLost, match="suspended after step 3"):
        run.train(Script(lambda: run.suspension.want(is_wanted=True)))
    assert [event.step for event in saved] == [3]
    assert run.returns == 0
    again = new_run(options)
    assert again.saved is not None
    assert again.saved.step == 3
    assert any(server.named("restore") for server in again.servers.values())


def test_suspension_ends_a_run_without_checkpoints_and_one_that_cannot_save(
    new_run: Callable[..., SparseRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run()
    with pytest.raises(ContributorLost, match="suspended without a checkpoint"):
        run.train(Script(lambda: run.suspension.want(is_wanted=True)))
    monkeypatch.setattr(suspension, "SUSPEND_S", 0.1)
    blocked = new_run(RunOptions(CheckpointOptions(tmp_path / "checkpoints", every_s=1e6)))
    for server in blocked.servers.values():
        server.methods["freeze"] = never
    with pytest.raises(ContributorLost, match="suspended without a checkpoint"):
        blocked.train(Script(lambda: blocked.suspension.want(is_wanted=True)))


def test_a_suspension_that_is_taken_back_does_not_end_the_run(
    new_run: Callable[..., SparseRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [0.0]
    monkeypatch.setattr(suspension, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    run = new_run(RunOptions(CheckpointOptions(tmp_path / "checkpoints", every_s=1e6)))
    for server in run.servers.values():
        server.methods["freeze"] = never
    script = Script(
        lambda: run.suspension.want(is_wanted=True),
        lambda: run.suspension.want(is_wanted=False),
        lambda: now_s.append(now_s.pop() + 2 * suspension.SUSPEND_S),
        *[lambda: None] * 5,
        lambda: [worker.actor.end(4) for worker in run.workers],
    )
    assert [report.clock for report in run.train(script)] == [4, 4]
    for server in run.servers.values():
        server.kill()  # otherwise the saver waits for the snapshot


def test_a_run_that_was_ended_does_not_return_to_a_checkpoint(
    new_run: Callable[..., SparseRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(RunOptions(CheckpointOptions(tmp_path / "checkpoints", every_s=0)))

    def watch() -> None:
        if run.saved is not None:
            run.end()
            for server in run.servers.values():
                server.kill()
            monkeypatch.setattr(runs, "POLL_S", 0.0)  # the servers are checked after this call

    with pytest.raises(ContributorLost, match="all copies of range 0 were lost"):
        run.train(watch)
    assert run.returns == 0


def test_a_machine_does_not_leave_while_its_backup_is_on_a_lost_one(
    new_run: Callable[..., SparseRun], stub: StubRay
) -> None:
    run = new_run()
    stub.nodes_alive = NODES[:1]
    assert not run.leave(NODES[0])
    assert not any(server.is_dead for server in run.servers.values())


def test_a_server_without_answers_is_ended_with_the_calls_that_wait_for_it(
    new_run: Callable[..., SparseRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statuses, "STATUS_S", 0.1)
    run = new_run(RunOptions(CheckpointOptions(tmp_path / "checkpoints", every_s=0)))
    server = run.servers[str(run.placed[0][0])]
    server.methods.update(status=never, freeze=never)

    def watch() -> None:
        script()
        if server.is_dead and run.saved is not None:
            for worker in run.workers:
                if not worker.actor.training.done():
                    worker.actor.end(4)

    script = Script()
    assert len(run.train(watch)) == 2
    assert server.is_dead
    assert run.saved is not None, "the other machine has the range, and a checkpoint was saved there"


def test_the_result_comes_from_the_backup_of_a_server_that_is_lost_after_training(
    new_run: Callable[..., SparseRun],
) -> None:
    run = new_run()
    for worker in run.workers:
        worker.actor.end(4)
    run.train()
    server, backup = (run.servers[str(machine)] for machine in run.placed[0])
    rows = RowValues(np.array([3, 8], np.uint64), np.array([[0.5], [2.0]], np.float32))
    backup.methods["rows"] = lambda *_: encode(rows, "float32", with_places=True)
    server.kill()
    found = run.weights()
    assert found.places.tolist() == [3, 8]
    assert found.values.tolist() == [[0.5], [2.0]]


def test_a_checkpoint_gives_up_a_clock_that_never_comes(
    stub: StubRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "LONGEST_FREEZE_S", 0.05)
    server = StubServer(NODES[0])
    server.methods["freeze"] = never
    assert save_checkpoint(CheckpointOptions(tmp_path), SETTINGS_OF_RUN, [server], "") is None
    assert server.named("thaw") == [(0, 2, "checkpoint")]
    assert stub.nodes_alive


def test_a_snapshot_that_is_not_wanted_any_more_is_not_kept() -> None:
    server = SparseServer.__ray_metadata__.modified_class(SETTINGS.pack(SETTINGS_OF_RUN))  # type: ignore[attr-defined]

    async def work() -> None:
        await server.serve(0, 1, None, is_new=True)
        wish = asyncio.ensure_future(server.freeze(0, 5, "checkpoint"))
        await asyncio.sleep(0)
        await server.thaw(0, 5, "checkpoint")
        with pytest.raises(StaleEpoch, match="is not wanted any more"):
            unpack_answer(SETTINGS, await wish, "the server")

    asyncio.run(asyncio.wait_for(work(), DEADLINE_S))


def test_measuring_stops_waiting_when_a_range_has_another_server(stub: StubRay) -> None:
    measuring = PassMeasuring(SETTINGS_OF_RUN, [4, 4], {})
    first, second = StubServer(NODES[0]), StubServer(NODES[1])
    first.methods["freeze"] = never
    try:
        assert not measuring.go_on([first], [])
        measuring.use([second])
        measuring.wait(DEADLINE_S)
        assert measuring.go_on([second], [])
        assert stub.nodes_alive
        # A thread that calls Ray after the stand-in is removed would start a real Ray in this process.
        measuring.wait(DEADLINE_S)
    finally:
        measuring.close()


def test_a_worker_that_had_finished_reports_its_last_minibatch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "rows"
    file.write_text("1 1:1\n0 2:1\n" * 10)
    kept: list[KeptBlocks] = []

    def keep(memory_bytes: int) -> KeptBlocks:
        kept.append(KeptBlocks(memory_bytes))
        return kept[-1]

    monkeypatch.setattr(rows_worker, "KeptBlocks", keep)
    monkeypatch.setattr(rows_worker, "fetched", lambda *_: next(libsvm_blocks(file)))
    worker = SparseRowsWorker.__ray_metadata__.modified_class(SETTINGS.pack(SETTINGS_OF_RUN), 0)  # type: ignore[attr-defined]
    loaded = unpack_answer(LOADED, worker.load_prepared([str(file)], None, 1 << 20), "the worker")
    assert loaded.minibatches == 4
    report = unpack_answer(REPORT, worker.run(4), "the worker")
    assert (report.clock, report.examples, report.is_done) == (4, 0, True)
    for blocks in kept:
        blocks.close()


def dual_run(
    watch: Callable[[], None], make: Callable[[str], StubActor], patch: pytest.MonkeyPatch
) -> DualRun:
    patch.setattr(dual, "DualRowsWorker", StubClass(make))
    return DualRun(DualProblem("hinge", 1e-2, 10, 2), [["x"], ["y"]], NODES[:2], "a source", 0, watch)


def loaded(*_: Any) -> bytes:
    return pack_answer(PLACES, Content(PlacesHeader(5), np.arange(3, dtype=np.uint64).tobytes()))


def test_a_worker_of_cocoa_that_ends_again_and_again_ends_the_run(
    stub: StubRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = dual_run(lambda: None, lambda node: StubActor(node, load=loaded, solve=never), monkeypatch)

    def kill() -> None:
        run.actors[0].kill()

    script = Script(*[kill] * 200)
    with closing(run), pytest.raises(UserError, match=f"worker 0 ended {MOST_LOSSES} times in sequence"):
        list(run.rounds(3, script))
    assert stub.nodes_alive


def solved(packed: bytes) -> bytes:
    """Answer as a worker that adds 1 to all weights and dual variables."""
    header, content = ROUND.unpack(packed, "the run")
    numbers = np.frombuffer(content, np.float64)
    body = np.concatenate([np.full(3, float(header.number)), numbers[3:] + 1]).tobytes()
    return pack_answer(ROUND_DONE, Content(RoundAnswer(1.0, 0.5), body))


def test_an_answer_of_cocoa_with_too_few_numbers_is_refused(
    stub: StubRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(_: bytes) -> bytes:
        return pack_answer(ROUND_DONE, Content(RoundAnswer(1.0, 0.5), bytes(56)))

    run = dual_run(lambda: None, lambda node: StubActor(node, load=loaded, solve=short), monkeypatch)
    with (
        closing(run),
        pytest.raises(
            VerificationFailed, match=f"worker 0 on machine {NODES[0]} answered with 56 bytes, not 64"
        ),
    ):
        list(run.rounds(3, lambda: None))
    assert stub.nodes_alive


def test_a_restored_run_of_cocoa_has_the_states_of_the_whole_run(
    stub: StubRay, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def make(node: str) -> StubActor:
        return StubActor(node, load=loaded, solve=solved)

    problem = DualProblem("hinge", 1e-2, 10, 2)
    options = CheckpointOptions(tmp_path / "checkpoints")
    whole = dual_run(lambda: None, make, monkeypatch)
    expected = []
    for state in whole.rounds(5, lambda: None):
        expected.append((state, whole.weights.tolist(), [each.tolist() for each in whole.duals]))
        if state.rounds == 2:
            save_dual(options, DualFacts(problem, 0, 2, "data"), whole.weights, whole.duals)
    saved, notes = newest_dual(options.folder, problem, 0, "data")
    assert saved is not None
    assert (saved.step, notes) == (2, ())
    again = dual_run(lambda: None, make, monkeypatch)
    again.restore(saved.step, *dual_state(saved, 2))
    found = [
        (state, again.weights.tolist(), [each.tolist() for each in again.duals])
        for state in again.rounds(5, lambda: None)
    ]
    assert found == expected[1:]
    with pytest.raises(UserError, match="other settings"):
        newest_dual(options.folder, replace(problem, l2=1.0), 0, "data")
    with pytest.raises(UserError, match="the data has changed"):
        newest_dual(options.folder, problem, 0, "other")
    with pytest.raises(VerificationFailed, match="other numbers"):
        again.restore(2, np.zeros(4), again.duals)
    assert stub.nodes_alive


def test_a_machine_leaves_cocoa_and_its_worker_moves(stub: StubRay, monkeypatch: pytest.MonkeyPatch) -> None:
    run = dual_run(lambda: None, lambda node: StubActor(node, load=loaded, solve=solved), monkeypatch)
    left = []
    for state in run.rounds(4, lambda: None):
        if state.rounds == 2:
            left = [run.leave(NODES[0]), run.leave(NODES[1]), run.leave("a machine of another job")]
    assert left == [True, False, True]
    assert state.rounds == 4
    assert {actor.node for actor in run.actors} == {NODES[1]}
    assert stub.nodes_alive


def test_the_last_living_machine_does_not_leave_cocoa(stub: StubRay, monkeypatch: pytest.MonkeyPatch) -> None:
    run = dual_run(lambda: None, lambda node: StubActor(node, load=loaded, solve=solved), monkeypatch)
    stub.nodes_alive = [NODES[1]]
    assert not run.leave(NODES[1])
    assert run.leave(NODES[0])


def test_requests_are_seen_while_workers_of_cocoa_read_their_rows(
    stub: StubRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cancel() -> None:
        raise Cancelled

    with pytest.raises(Cancelled):
        dual_run(cancel, lambda node: StubActor(node, load=never), monkeypatch)
    run = dual_run(lambda: None, lambda node: StubActor(node, load=loaded, solve=never), monkeypatch)

    def lose() -> None:
        dual.DualRowsWorker.make = lambda node: StubActor(node, load=never)  # type: ignore[attr-defined]
        run.actors[0].kill()

    with closing(run), pytest.raises(Cancelled):
        list(run.rounds(3, Script(lose, lambda: None, cancel)))
    assert stub.nodes_alive


def test_progress_ends_a_sequence_of_losses() -> None:
    counted = ProcessLosses()
    assert [counted.count(0, progress) for progress in (0, 0, 3, 3, 3, 5)] == [1, 2, 1, 2, 3, 1]
    assert counted.count(1, 0) == 1
