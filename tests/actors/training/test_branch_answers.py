"""The synchronizer's answers to branches, and its choice of versions, without Ray."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import save_file
from tests.actors.training.range_world import MACHINES, LocalActor, local_ray
from tests.platform.planning.models import PROFILE
from tests.platform.synchronization.test_ranges import begin, payloads

from share_compute.errors import VerificationFailed
from share_compute.lifecycle.attempt_events import Assignment, AttemptEnded, AttemptEvent
from share_compute.models.storage.checkpoints import STATE
from share_compute.planning.branches import BranchPlace
from share_compute.specification import parse_job
from share_compute.synchronization.aggregators import aggregator_of
from share_compute.synchronization.records import BranchRun
from share_compute.synchronization.rounds import RoundsMachine
from share_compute_actors.group.control_requests import ControlRequests
from share_compute_actors.training.preparation import suspended
from share_compute_actors.training.rounds import beginning, branch_attempt, synchronizer
from share_compute_actors.training.rounds.aggregation import ServerAggregation
from share_compute_actors.training.rounds.beginning import recover, with_servers
from share_compute_actors.training.rounds.branch_attempt import BranchAttempt
from share_compute_actors.training.rounds.messages import BranchMail, BranchReport, BranchUpdates
from share_compute_actors.training.rounds.synchronizer import Synchronizer
from share_compute_actors.training.step_log import StepLog


class QuietCoordinator:
    """The coordinator of a branch, which keeps the answers of the synchronizer."""

    def __init__(self) -> None:
        self.updates: list[BranchUpdates] = []

    def run(self) -> None:
        """Do nothing."""

    def events(self, *_: Any) -> str:
        return "[]"

    def take_updates(self, updates: str) -> None:
        self.updates.append(BranchUpdates.model_validate_json(updates))


class SlowAggregation(ServerAggregation):
    """Merges on the server, but accepts contributions only when a test says so."""

    def take(self, report: BranchReport) -> None:
        """Do nothing: the contribution is not on all machines yet."""


class SlowMerges(ServerAggregation):
    """Merges on the server, but only when a test says so."""

    def merge(self, *merge: Any) -> None:
        """Do nothing before `finish`."""
        self._pending = merge

    def finish(self) -> None:
        """Compute and commit the merge."""
        super().merge(*self._pending)


def assignment(folder: Path, servers: int | str, **options: Any) -> Assignment:
    policy = {"kind": "local", "branches": 2, "every": 5, "servers": servers, **options}
    spec = parse_job(
        {
            "model": {"config": {"model_type": "llama"}},
            "data": {"files": ["/a.txt"]},
            "training": {"steps": 20, "batch_size": 4, "sequence_length": 32, "synchronization": policy},
        }
    )
    return Assignment(job_id="job", attempt=1, spec=spec, topology=MACHINES, folder=folder, checkpoint=None)


class Exchange:
    """A synchronizer of two branches whose contributions are accepted late."""

    def __init__(
        self,
        folder: Path,
        step_log: StepLog,
        aggregation: type[ServerAggregation] = SlowAggregation,
        **policy: Any,
    ) -> None:
        self.events: list[AttemptEvent] = []
        self.folder = folder
        given = assignment(folder, 0, **(policy or {"quorum": 1, "grace_s": 0, "late": "merge"}))
        made = Synchronizer(
            given,
            self.events.append,
            ControlRequests(),
            BranchMail(),
            lambda _: LocalActor(QuietCoordinator()),
        )
        made._aggregator = aggregator_of(folder / "rounds", given.spec.training)
        begin(made._aggregator)
        made._step_log = step_log
        made._machine = RoundsMachine(made._policy, 4)
        made._state = {"step": 0, "validations": []}
        made._aggregation = aggregation(made._aggregator, made)
        made._relocation = SimpleNamespace(take=lambda _: {})  # type: ignore[assignment]
        for number in range(2):
            branch = BranchAttempt(number, BranchPlace(("c0",), (number,), 1.0), made._start_branch)
            made._branches.append(branch)
            branch.begin(made._assignment_of(branch))
        self.synchronizer = made

    def report(self, branch: int, number: int) -> BranchReport:
        """Report that a contribution is complete, and return the report."""
        run = BranchRun(number, branch)
        place = self.folder / f"contribution-{number}-{branch}"
        place.mkdir()
        save_file(payloads(self.synchronizer._assignment.spec.training, run), place / "model.safetensors")
        report = BranchReport(
            branch=branch,
            start=self.synchronizer._branches[branch].starts,
            round=number,
            folder=place,
            samples=10,
            loss=1.0,
            seconds=1.0,
        )
        self.synchronizer._on_report(report)
        return report

    def answers(self, branch: int) -> list[BranchUpdates]:
        coordinator: QuietCoordinator = self.synchronizer._branches[branch]._actor.target
        return coordinator.updates

    @property
    def notes(self) -> list[str]:
        return [event.message for event in self.events if event.type == "note"]


@pytest.fixture
def exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Exchange]:
    for module in (synchronizer, branch_attempt):
        monkeypatch.setattr(module, "ray", local_ray())
    with closing(StepLog(tmp_path, 1)) as step_log:
        step_log.claim()
        yield Exchange(tmp_path, step_log)


@pytest.mark.parametrize("is_pushing", [True, False])
def test_a_branch_that_moves_waits_for_the_merge_of_its_push(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_pushing: bool
) -> None:
    """Otherwise it would train and push the same samples twice."""
    for module in (synchronizer, branch_attempt):
        monkeypatch.setattr(module, "ray", local_ray())
    monkeypatch.setattr(synchronizer, "members_of", lambda _: [object()])
    with closing(StepLog(tmp_path, 1)) as step_log:
        step_log.claim()
        exchange = Exchange(tmp_path, step_log, SlowMerges, kind="parameter_server", staleness="unbounded")
        moving, place = exchange.synchronizer._branches[1], BranchPlace(("c1",), (1,), 1.0)
        if is_pushing:
            exchange.report(1, 1)
        moving.moves_to = place
        lost = suspended("in round 1")
        ended = AttemptEnded(outcome="failed", reason=str(lost), error={"code": lost.code})
        moving.has_ended = True
        assert exchange.synchronizer._on_ended(moving, ended) is None
        assert (moving.place, moving.has_ended, moving.starts) == (place, is_pushing, 1 if is_pushing else 2)
        if is_pushing:
            exchange.synchronizer._merges.finish()  # type: ignore[attr-defined]
        assert (moving.has_ended, moving.starts, moving.base) == (False, 2, 1 if is_pushing else 0)
        assert [run.branch for run in exchange.synchronizer._machine._merged] == [1] * is_pushing


def test_a_branch_is_answered_when_its_contribution_is_accepted(exchange: Exchange) -> None:
    """With a quorum of one branch, the round may be merged before that."""
    first, second = exchange.report(0, 1), exchange.report(1, 1)
    assert exchange.answers(0) == []
    exchange.synchronizer.accept(first, "digest")
    assert exchange.synchronizer._machine.version == 1
    assert [each.version for each in exchange.answers(0)[0].updates] == [1]
    assert exchange.answers(1) == []
    exchange.synchronizer.accept(second, "digest")
    assert exchange.answers(1)[0].updates[0].version == 1
    assert exchange.synchronizer._machine.has(second.run)


def test_a_contribution_that_is_lost_after_the_answer_is_in_the_log(exchange: Exchange) -> None:
    first, second = exchange.report(0, 1), exchange.report(1, 1)
    exchange.synchronizer.accept(first, "digest")
    exchange.synchronizer.request_again(second)
    assert exchange.answers(1)[0].repeats
    assert exchange.notes == []
    exchange.synchronizer.request_again(second)
    assert exchange.notes == [
        "the contribution of branch 1 to round 1 is not used: machines with ranges of the weights lost it"
    ]


@pytest.mark.parametrize("is_late", [False, True])
def test_what_an_earlier_start_contributed_to_the_open_round_is_not_merged(
    exchange: Exchange, is_late: bool
) -> None:
    second = exchange.report(1, 1)
    if is_late:
        exchange.synchronizer.accept(exchange.report(0, 1), "digest")
    exchange.synchronizer._begin_again(exchange.synchronizer._branches[1])
    assert (second.run in exchange.synchronizer._contributions) == is_late
    assert any("the branch begins the round again" in note for note in exchange.notes) != is_late


def test_all_attempts_have_the_number_of_ranges_of_the_first(tmp_path: Path) -> None:
    given = assignment(tmp_path, "auto")
    first = tmp_path / "rounds" / "versions" / "00000000"
    assert with_servers(given, MACHINES, PROFILE).training.synchronization.servers == 0
    first.mkdir(parents=True)
    (first / STATE).write_text(json.dumps({"servers": 3}))
    assert with_servers(given, MACHINES, PROFILE).training.synchronization.servers == 3
    assert with_servers(assignment(tmp_path, 2), MACHINES, PROFILE).training.synchronization.servers == 2


@pytest.mark.parametrize("servers", [0, 2])
def test_training_does_not_begin_again_if_merges_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, servers: int
) -> None:
    given = assignment(tmp_path, servers)
    aggregator = aggregator_of(tmp_path / "rounds", given.spec.training)
    state: Mapping[str, Any] = {"step": 0}
    monkeypatch.setattr(beginning, "initial_shards", lambda *_: iter(()))
    monkeypatch.setattr(beginning, "_beginning_of_all", lambda *_: state)
    with pytest.raises(VerificationFailed, match="all weights that are stored after 2 merges"):
        recover(given, aggregator, 2, SimpleNamespace(), ())  # type: ignore[arg-type]
    assert not (tmp_path / "rounds").exists()
    begin(aggregator)
    assert recover(given, aggregator, 0, SimpleNamespace(), ()) == 0  # type: ignore[arg-type]
