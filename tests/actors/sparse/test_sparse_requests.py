"""Requests to attempts at jobs with sparse models, with stand-ins for Ray: drains, suspensions, lost machines."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.stub_ray import NODES, StubActor, StubClass, StubRay, StubServer, StubWorker, report

from share_compute.errors import ContributorLost, UserError
from share_compute.lifecycle.attempt_events import AttemptEnded, AttemptEvent, SparseAssignment, Validated
from share_compute.sparse.jobs import worker_memory_bytes
from share_compute.sparse.table import RowValues
from share_compute.specification import SparseJob, parse_any_job
from share_compute.topology import Contributor, Device, Topology
from share_compute_actors.group.control_requests import ControlRequests
from share_compute_actors.sparse import attempt as attempts
from share_compute_actors.sparse import dual, hogwild, nodes, suspension
from share_compute_actors.sparse import run as runs
from share_compute_actors.sparse.attempt import SparseAttempt
from share_compute_actors.sparse.dual import PLACES, ROUND, ROUND_DONE, PlacesHeader, RoundAnswer
from share_compute_actors.sparse.hogwild import PASS_DONE, PassAnswer
from share_compute_actors.wire import COUNT, Content, pack_answer

ROWS = 10


class WatchedEvent(threading.Event):
    """An event that calls a function when it is read, and fails if it is read too often."""

    def __init__(self, watch: Callable[[], object]) -> None:
        super().__init__()
        self.watch, self.calls = watch, 0

    def is_set(self) -> bool:
        self.calls += 1
        assert self.calls < 500, "the attempt did not end"
        self.watch()
        return super().is_set()


class Trial:
    """Attempts at one job on two machines.

    Args:
        folder: folder of the job.
    """

    def __init__(self, folder: Path, model: dict[str, Any], **training: Any) -> None:
        self.folder = folder
        self.requests, self.events = ControlRequests(), list[AttemptEvent]()
        file = folder / "rows.libsvm"
        file.write_text("".join(f"{row % 2} 1:1 {2 + row % 2}:1\n" for row in range(ROWS)))
        data = {"files": [str(file)], "validation_files": [str(file)] if "target" in training else []}
        spec = parse_any_job({"kind": "sparse", "model": model, "data": data, "training": training})
        assert isinstance(spec, SparseJob)
        self.spec = spec

    def make(
        self, watch: Callable[[], object] = lambda: None, *, memory_bytes: int = 1 << 30, machines: int = 2
    ) -> AttemptEnded:
        """Make an attempt; ``watch`` is called whenever the attempt looks for a cancellation."""
        device = Device("cpu", "cpu", memory_bytes=memory_bytes, flops_per_s={"float32": 1e10})
        topology = Topology(
            tuple(
                Contributor(id=name, name=name, devices=(device,), node_id=node, address="127.0.0.1")
                for name, node in zip("ab"[:machines], NODES, strict=False)
            )
        )
        self.requests, self.events = ControlRequests(), []
        self.requests.cancelled = WatchedEvent(watch)
        assignment = SparseAssignment(
            job_id="job-test",
            attempt=1,
            spec=self.spec,
            topology=topology,
            folder=self.folder,
            checkpoint_every_s=1e6,
        )
        return SparseAttempt(assignment, self.events.append, self.requests, "a source").make()

    def drain(self, *names: str) -> None:
        for name in names:
            self.requests.leave(name)

    def of(self, kind: str) -> list[Any]:
        return [event for event in self.events if event.type == kind]


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> StubRay:
    monkeypatch.setattr(runs, "POLL_S", 0.02)
    monkeypatch.setattr(nodes, "KEPT_S", 0.0)
    for module in (dual, hogwild):
        monkeypatch.setattr(module, "WAIT_S", 0.02)
    return StubRay(monkeypatch)


def test_nodes_are_listed_once_a_second_at_most(stub: StubRay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "KEPT_S", 1000.0)
    living = nodes.LivingNodes(NODES[:2])
    assert living.now() == NODES[:2]
    stub.nodes_alive = [NODES[1], NODES[2]]
    assert living.now() == NODES[:2]
    assert living.now(afresh=True) == NODES[1:2]
    monkeypatch.setattr(nodes, "KEPT_S", 0.0)
    stub.nodes_alive = NODES
    assert living.now() == NODES[:2]


def never(*_: Any) -> Future[Any]:
    return Future()


class StubRounds:
    """Workers of CoCoA that answer rounds up to a number.

    Args:
        patch: puts them into the place of the actor class.
        last: number of the last round that is answered.
    """

    def __init__(self, patch: pytest.MonkeyPatch, last: int) -> None:
        self.last, self.waiting = last, list[tuple[bytes, Future[Any]]]()
        self.actors = StubClass(lambda node: StubActor(node, load=self.load, solve=self.solve))
        patch.setattr(dual, "DualRowsWorker", self.actors)

    @property
    def is_stuck(self) -> bool:
        return len(self.waiting) == 2

    @staticmethod
    def load(*_: Any) -> bytes:
        places = np.arange(3, dtype=np.uint64).tobytes()
        return pack_answer(PLACES, Content(PlacesHeader(ROWS // 2), places))

    def solve(self, packed: bytes) -> Any:
        header, content = ROUND.unpack(packed, "the run")
        if header.number > self.last:
            self.waiting.append((packed, Future()))
            return self.waiting[-1][1]
        numbers = np.frombuffer(content, np.float64)
        body = np.concatenate([np.full(3, header.number + 1.0), numbers[3:] + 1]).tobytes()
        return pack_answer(ROUND_DONE, Content(RoundAnswer(float(header.number), 0.5), body))

    def go_on(self) -> None:
        """Answer the waiting calls and all further ones."""
        self.last = 1000
        for packed, answer in self.waiting:
            if not answer.done():
                answer.set_result(self.solve(packed))
        self.waiting.clear()


@pytest.mark.parametrize("how", ["drain", "suspend"])
@pytest.mark.parametrize("rounds", [2, 5], ids=["in the midst", "in the last measurement"])
def test_cocoa_saves_the_last_round_at_once(
    stub: StubRay, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str, rounds: int
) -> None:
    assert stub.nodes_alive
    trial, workers = Trial(tmp_path, {"name": "svm"}, passes=5), StubRounds(monkeypatch, rounds - 1)

    def ask() -> None:
        if workers.is_stuck and how == "drain":
            trial.drain("a", "b")
        elif workers.is_stuck:
            trial.requests.suspended.set()

    with pytest.raises(ContributorLost, match=f"suspended after step {rounds}"):
        trial.make(ask)
    assert [event.step for event in trial.of("checkpoint")] == [rounds]
    assert [event.step for event in trial.of("step")] == list(range(1, rounds))
    assert len(workers.actors.made) == 2, "no worker moved to the last machine"
    losses = {event.step: event.loss for event in trial.of("step")}
    workers.go_on()
    assert "solved in 5 rounds" in trial.make().reason
    assert trial.of("started")[0].first_step == rounds + 1
    assert [event.step for event in trial.of("step")] == list(range(rounds, 6))
    losses |= {event.step: event.loss for event in trial.of("step")}
    assert losses == {step: 2 * step / ROWS for step in range(1, 6)}


def test_cocoa_without_a_finished_round_ends_at_once(
    stub: StubRay, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert stub.nodes_alive
    trial, workers = Trial(tmp_path, {"name": "svm"}, passes=5), StubRounds(monkeypatch, -1)
    with pytest.raises(ContributorLost, match="suspended without a checkpoint"):
        trial.make(lambda: trial.drain("a", "b") if workers.is_stuck else None)
    assert not trial.of("checkpoint")


def test_the_drain_of_the_last_living_machine_saves_a_checkpoint(
    stub: StubRay, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trial, workers = Trial(tmp_path, {"name": "svm"}, passes=5), StubRounds(monkeypatch, 1)

    def ask() -> None:
        if workers.is_stuck:
            stub.nodes_alive = [NODES[1]]
            trial.drain("b")

    with pytest.raises(ContributorLost, match="suspended after step 2"):
        trial.make(ask)
    assert [event.step for event in trial.of("checkpoint")] == [2]


@pytest.mark.parametrize("how", ["drain", "loss"])
def test_cocoa_ends_with_a_checkpoint_if_the_machines_that_are_left_lack_memory(
    stub: StubRay, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str
) -> None:
    trial, workers = Trial(tmp_path, {"name": "svm"}, passes=5), StubRounds(monkeypatch, 1)

    def ask() -> None:
        if workers.is_stuck and how == "drain":
            trial.drain("a")
        elif workers.is_stuck:
            stub.nodes_alive = [NODES[1]]
            workers.actors.made[0].kill()

    with pytest.raises(ContributorLost, match="suspended after step 2"):
        trial.make(ask, memory_bytes=3000)
    assert "machine b lends 2.9 KiB of memory" in trial.of("note")[-1].message
    assert len(workers.actors.made) == 2, "no worker moved to the machine with too little memory"


def test_a_worker_of_cocoa_moves_if_memory_suffices(
    stub: StubRay, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert stub.nodes_alive
    trial, workers = Trial(tmp_path, {"name": "svm"}, passes=5), StubRounds(monkeypatch, 1)

    def ask() -> None:
        if len(workers.actors.made) == 3:
            workers.go_on()
        elif workers.is_stuck:
            trial.drain("a")

    assert "solved in 5 rounds" in trial.make(ask).reason
    assert {actor.node for actor in workers.actors.made[2:]} == {NODES[1]}
    assert [event.machines for event in trial.of("ranges-placed")] == [("a", "b"), ("b",)]


def hogwild_process(patch: pytest.MonkeyPatch, asked: Callable[[int], object], last: int = 1000) -> None:
    """Put a process in the place of the actor class: it makes passes up to a number, and calls ``asked`` first."""

    def train(number: int) -> Any:
        asked(number)
        return never() if number > last else pack_answer(PASS_DONE, PassAnswer(ROWS, 0.5))

    made = StubClass(lambda node: StubActor(node, load=lambda *_: pack_answer(COUNT, ROWS), train=train))
    patch.setattr(hogwild, "HogwildProcess", made)
    patch.setattr(hogwild.HogwildRun, "snapshot", lambda _: iter([b"rows"]))


def test_hogwild_saves_a_checkpoint_after_the_pass_in_which_its_machine_drains(
    stub: StubRay, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert stub.nodes_alive
    trial = Trial(tmp_path, {"name": "logistic"}, passes=5, hogwild_threads=1)
    hogwild_process(monkeypatch, lambda number: trial.drain("a") if number == 1 else None)
    with pytest.raises(ContributorLost, match="suspended after step 2"):
        trial.make(machines=1)
    assert [event.step for event in trial.of("checkpoint")] == [2]


def test_a_pass_of_hogwild_that_takes_too_long_is_given_up(
    stub: StubRay, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert stub.nodes_alive
    monkeypatch.setattr(suspension, "SUSPEND_S", 0.1)
    trial = Trial(tmp_path, {"name": "logistic"}, passes=5, hogwild_threads=1)
    hogwild_process(monkeypatch, lambda number: trial.drain("a") if number == 1 else None, last=0)
    with pytest.raises(ContributorLost, match="suspended before the next checkpoint"):
        trial.make(machines=1)


@pytest.fixture
def servers(stub: StubRay, monkeypatch: pytest.MonkeyPatch) -> StubClass:
    """Servers and workers of runs, as stand-ins; return the workers."""
    assert stub.nodes_alive
    workers = StubClass(StubWorker)
    monkeypatch.setattr(runs, "SparseServer", StubClass(StubServer))
    monkeypatch.setattr(runs, "SparseRowsWorker", workers)
    return workers


def test_a_run_with_servers_saves_a_checkpoint_when_all_machines_drain(
    servers: StubClass, tmp_path: Path
) -> None:
    trial = Trial(tmp_path, {"name": "logistic"}, passes=5)

    def ask() -> None:
        if len(servers.made) == 2 and all(worker.named("run") for worker in servers.made):
            trial.drain("a", "b")

    with pytest.raises(ContributorLost, match="suspended after step 0"):
        trial.make(ask)
    assert len(trial.of("checkpoint")) == 1
    assert len(servers.made) == 2, "no worker moved to the last machine"


def test_a_run_with_servers_ends_if_the_machines_that_are_left_lack_memory(
    servers: StubClass, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trial = Trial(tmp_path, {"name": "logistic"}, passes=5)
    needed = worker_memory_bytes

    def required(settings: Any, machines: Any, rows: int) -> int:
        if len(machines) == 1:
            raise UserError("machine b lends too little memory")
        return needed(settings, machines, rows)

    monkeypatch.setattr(attempts, "worker_memory_bytes", required)
    with pytest.raises(ContributorLost, match="suspended after step 0"):
        trial.make(lambda: trial.drain("a") if len(servers.made) == 2 else None)
    assert "machine b lends too little memory" in trial.of("note")[-1].message
    assert len(servers.made) == 2


@pytest.mark.parametrize(
    ("is_done", "text"), [(True, "in 5 passes"), (False, "in less than all passes")], ids=["last", "earlier"]
)
def test_the_reason_says_whether_all_passes_were_made_before_the_target(
    stub: StubRay, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_done: bool, text: str
) -> None:
    class ReachedRun:
        """A run whose validation reaches the target."""

        saved, notes, returns = None, (), 0

        def __init__(self, *arguments: Any) -> None:
            self.options = arguments[-1]

        def train(self, _: Any) -> list[Any]:
            self.options.report(Validated(split="validation", step=5, loss=0.1, accuracy=0.9))
            return [report(5, is_done=is_done)] * 2

        def pieces(self) -> list[RowValues]:
            return [RowValues(np.array([3], np.uint64), np.array([[0.5]], np.float32))]

        def close(self) -> None:
            pass

    assert stub.nodes_alive
    monkeypatch.setattr(attempts, "SparseRun", ReachedRun)
    trial = Trial(tmp_path, {"name": "logistic"}, passes=5, target={"metric": "accuracy", "value": 0.8})
    reason = trial.make().reason
    assert reason.startswith("accuracy 0.9 reached the target 0.8 after step 5; ")
    assert text in reason
