"""The synchronizer's answers to branches, and its choice of versions, without Ray."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from safetensors.torch import save_file
from tests.actors.training.rounds.range_world import MACHINES, LocalActor, local_ray
from tests.platform.planning.models import PROFILE
from tests.platform.synchronization.test_ranges import begin, payloads

from share_compute.errors import VerificationFailed
from share_compute.lifecycle.attempt_events import (
    Assignment,
    AttemptEnded,
    AttemptEvent,
    BranchAssignment,
    RoundMerged,
    attempt_events,
)
from share_compute.models.storage.checkpoints import STATE
from share_compute.planning.branches import BranchPlace
from share_compute.specification import parse_job
from share_compute.synchronization.aggregator import Aggregator
from share_compute.synchronization.aggregators import aggregator_of
from share_compute.synchronization.records import BranchRun
from share_compute_actors.group.control_requests import ControlRequests
from share_compute_actors.group.exceptions import Cancelled
from share_compute_actors.training.preparation import suspended
from share_compute_actors.training.rounds import branch_attempt, synchronizer
from share_compute_actors.training.rounds.aggregation import ServerAggregation
from share_compute_actors.training.rounds.beginning import recover, with_servers
from share_compute_actors.training.rounds.messages import BranchMail, BranchReport, BranchUpdates
from share_compute_actors.training.rounds.relocation import Relocation
from share_compute_actors.training.rounds.synchronizer import Synchronizer


class QuietCoordinator:
    """The coordinator of a branch, which keeps the answers of the synchronizer, and ends when it has to."""

    def __init__(self, assignment: Assignment) -> None:
        assert assignment.branch is not None
        self.branch = assignment.branch
        self.machines = {machine.id for machine in assignment.topology.contributors}
        self.updates: list[BranchUpdates] = []
        self.events_so_far: list[AttemptEvent] = []

    def run(self) -> None:
        """Do nothing."""

    def events(self, after: int, _wait_s: float) -> str:
        return attempt_events.dump_json(self.events_so_far[after:]).decode()

    def take_updates(self, updates: str) -> None:
        self.updates.append(BranchUpdates.model_validate_json(updates))

    def suspend(self) -> None:
        failure = suspended("in round 1")
        self._end(AttemptEnded(outcome="failed", reason=str(failure), error={"code": failure.code}))

    def cancel(self) -> None:
        self._end(AttemptEnded(outcome="cancelled", reason="cancelled"))

    def _end(self, ended: AttemptEnded) -> None:
        self.events_so_far.append(ended)


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
    """A synchronizer of two branches in this process, whose contributions are accepted when a test says so.

    A test is a generator, whose parts run whenever the synchronizer polls the place of the merges.
    """

    def __init__(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        aggregation: type[ServerAggregation] = SlowAggregation,
        **policy: Any,
    ) -> None:
        self.events: list[AttemptEvent] = []
        self.folder = folder
        self.actors: dict[int, list[LocalActor]] = {0: [], 1: []}
        """Coordinators of each branch, in the order in which they were started."""
        self.moves: dict[int, BranchPlace] = {}
        """Places to which branches move after the next merge."""
        self.merges: Any = None
        self._requests, self._mail = ControlRequests(), BranchMail()
        self._given = assignment(folder, 0, **(policy or {"quorum": 1, "grace_s": 0, "late": "merge"}))
        self._use_no_ray(monkeypatch, aggregation)
        self.synchronizer = Synchronizer(
            self._given, self.events.append, self._requests, self._mail, self._start_branch
        )

    def _use_no_ray(self, monkeypatch: pytest.MonkeyPatch, aggregation: type[ServerAggregation]) -> None:
        for module in (synchronizer, branch_attempt):
            monkeypatch.setattr(module, "ray", local_ray())

        def recover(_given: Assignment, aggregator: Aggregator, *_: Any) -> int:
            begin(aggregator, validations=[], boundaries={})
            return 0

        def aggregation_of(_given: Assignment, aggregator: Aggregator, *_: Any) -> ServerAggregation:
            self.merges = aggregation(aggregator, self.synchronizer)
            monkeypatch.setattr(self.merges, "poll", self._go_on)
            return cast("ServerAggregation", self.merges)

        places = [BranchPlace(("c0",), (0, 1), 1.0)]
        for name, stand_in in {
            "prepare_data": lambda *_: SimpleNamespace(blueprint=None),
            "dissect": lambda _: PROFILE,
            "place_branches": lambda *_: places,
            "with_servers": lambda given, *_: given.spec,
            "recover": recover,
            "aggregation_of": aggregation_of,
            "workers_of": lambda _: {},
            "members_of": lambda _: (),
        }.items():
            monkeypatch.setattr(synchronizer, name, stand_in)

        def take(_: Relocation, _left: Any) -> dict[int, BranchPlace]:
            moves, self.moves = self.moves, {}
            return moves

        monkeypatch.setattr(Relocation, "take", take)

    def _start_branch(self, given: Assignment) -> LocalActor:
        coordinator = QuietCoordinator(given)
        actor = LocalActor(coordinator)
        self.actors[coordinator.branch.number].append(actor)
        return actor

    def _go_on(self) -> None:
        try:
            next(self._story)
        except StopIteration:
            self._requests.cancelled.set()

    def play(self, story: Iterator[None]) -> None:
        """Run the synchronizer until a story has ended."""
        self._story = story
        with pytest.raises(Cancelled):
            self.synchronizer.run()

    def report(self, branch: int, number: int) -> BranchReport:
        """Report that a contribution is complete, and return the report; it is read after the next `yield`."""
        run = BranchRun(number, branch)
        place = self.folder / f"contribution-{number}-{branch}"
        place.mkdir()
        save_file(payloads(self._given.spec.training, run), place / "model.safetensors")
        report = BranchReport(
            branch=branch,
            start=self.begun(branch).start,
            round=number,
            folder=place,
            samples=10,
            loss=1.0,
            seconds=1.0,
        )
        self._mail.reports.put(report)
        return report

    def begun(self, branch: int) -> BranchAssignment:
        """Return the assignment of the latest coordinator of a branch."""
        coordinator: QuietCoordinator = self.actors[branch][-1].target
        return coordinator.branch

    def answers(self, branch: int) -> list[BranchUpdates]:
        coordinator: QuietCoordinator = self.actors[branch][-1].target
        return coordinator.updates

    @property
    def merged(self) -> list[list[int]]:
        """Numbers of the branches whose contributions each merge contains."""
        merges = [event for event in self.events if isinstance(event, RoundMerged)]
        return [[branch.number for branch in event.branches] for event in merges]

    @property
    def notes(self) -> list[str]:
        return [event.message for event in self.events if event.type == "note"]


@pytest.fixture
def exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Exchange:
    return Exchange(tmp_path, monkeypatch)


@pytest.mark.parametrize("is_pushing", [True, False])
def test_a_branch_that_moves_waits_for_the_merge_of_its_push(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_pushing: bool
) -> None:
    """Otherwise it would train and push the same samples twice."""
    exchange = Exchange(tmp_path, monkeypatch, SlowMerges, kind="parameter_server", staleness="unbounded")

    def story() -> Iterator[None]:
        exchange.report(0, 1)
        yield
        exchange.moves = {1: BranchPlace(("c1",), (1,), 1.0)}
        exchange.merges.finish()  # the coordinator of branch 1 is to save its state and to end
        if is_pushing:
            exchange.report(1, 1)
        for _ in range(3):
            yield
        assert len(exchange.actors[1]) == (1 if is_pushing else 2)
        if is_pushing:
            exchange.merges.finish()
        assert len(exchange.actors[1]) == 2
        assert exchange.actors[1][-1].target.machines == {"c1"}
        assert (exchange.begun(1).start, exchange.begun(1).version) == (2, 2 if is_pushing else 1)
        assert exchange.merged == [[0], [1]] if is_pushing else [[0]]

    exchange.play(story())


def test_a_branch_is_answered_when_its_contribution_is_accepted(exchange: Exchange) -> None:
    """With a quorum of one branch, the round may be merged before that."""

    def story() -> Iterator[None]:
        first, second = exchange.report(0, 1), exchange.report(1, 1)
        yield
        assert exchange.answers(0) == []
        exchange.synchronizer.accept(first, "digest")
        assert exchange.merged == [[0]]
        assert [each.version for each in exchange.answers(0)[0].updates] == [1]
        assert exchange.answers(1) == []
        exchange.synchronizer.accept(second, "digest")
        assert exchange.answers(1)[0].updates[0].version == 1
        assert exchange.notes == []
        third = exchange.report(0, 2)
        yield
        exchange.synchronizer.accept(third, "digest")
        assert sorted(exchange.merged[1]) == [0, 1]  # the late contribution takes part in the next merge

    exchange.play(story())


def test_a_contribution_that_is_lost_after_the_answer_is_in_the_log(exchange: Exchange) -> None:
    def story() -> Iterator[None]:
        first, second = exchange.report(0, 1), exchange.report(1, 1)
        yield
        exchange.synchronizer.accept(first, "digest")
        exchange.synchronizer.request_again(second)
        assert exchange.answers(1)[0].repeats
        assert exchange.notes == []
        exchange.synchronizer.request_again(second)
        assert exchange.notes == [
            "the contribution of branch 1 to round 1 is not used: machines with ranges of the weights lost it"
        ]

    exchange.play(story())


@pytest.mark.parametrize("is_late", [False, True])
def test_what_an_earlier_start_contributed_to_the_open_round_is_not_merged(
    exchange: Exchange, is_late: bool
) -> None:
    def story() -> Iterator[None]:
        second = exchange.report(1, 1)
        first = exchange.report(0, 1) if is_late else None
        yield
        if first is not None:
            exchange.synchronizer.accept(first, "digest")
        exchange.actors[1][0].is_dead = True
        for _ in range(3):
            yield
        assert exchange.begun(1).start == 2
        assert second.folder is not None
        assert second.folder.is_dir() == is_late
        assert any("the branch begins the round again" in note for note in exchange.notes) != is_late

    exchange.play(story())


def test_all_attempts_have_the_number_of_ranges_of_the_first(tmp_path: Path) -> None:
    given = assignment(tmp_path, "auto")
    first = tmp_path / "rounds" / "versions" / "00000000"
    assert with_servers(given, MACHINES, PROFILE).training.synchronization.servers == 0
    first.mkdir(parents=True)
    (first / STATE).write_text(json.dumps({"servers": 3}))
    assert with_servers(given, MACHINES, PROFILE).training.synchronization.servers == 3
    assert with_servers(assignment(tmp_path, 2), MACHINES, PROFILE).training.synchronization.servers == 2


@pytest.mark.parametrize("servers", [0, 2])
def test_training_does_not_begin_again_if_merges_are_recorded(tmp_path: Path, servers: int) -> None:
    given = assignment(tmp_path, servers)
    aggregator = aggregator_of(tmp_path / "rounds", given.spec.training)
    with pytest.raises(VerificationFailed, match="all weights that are stored after 2 merges"):
        recover(given, aggregator, 2, SimpleNamespace(), ())  # type: ignore[arg-type]
    assert not (tmp_path / "rounds").exists()
    begin(aggregator)
    assert recover(given, aggregator, 0, SimpleNamespace(), ()) == 0  # type: ignore[arg-type]
