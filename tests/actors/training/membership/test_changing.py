"""Waits and counters of a job while machines join and leave; without Ray."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.actors.training.rounds.range_world import local_ray
from tests.platform.planning.models import PROFILE, job, lan, machine

from share_compute.errors import OutOfMemory, UserError
from share_compute.lifecycle.attempt_events import (
    Assignment,
    AttemptEvent,
    Offer,
    Reformed,
    ReplanAbandoned,
    ReplanProposed,
)
from share_compute.planning.planner import Solution, solve
from share_compute.protocol.membership import Membership, Worker, fresh
from share_compute.shards import Shard
from share_compute.topology import Link, Topology
from share_compute_actors.group.allocator import as_reported, is_out_of_memory
from share_compute_actors.group.backoff import Backoff
from share_compute_actors.group.control_requests import ControlRequests
from share_compute_actors.training.membership import training_group
from share_compute_actors.training.membership.changes import Changes, Recopying
from share_compute_actors.training.membership.joining import replicas_of
from share_compute_actors.training.membership.training_group import TrainingGroup


class Clock:
    """A clock that a test sets."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_copies_that_were_lost_are_begun_anew_later_each_time_they_do_not_last() -> None:
    clock = Clock()
    fleet = Topology(tuple(machine(worker, 1e9) for worker in "abc"))
    stages = (("a",), ("b",), ("c",))
    recopying = Recopying(clock)
    first = recopying.backups(stages, fleet)
    for rest_s in (10.0, 20.0, 40.0):
        assert not recopying.is_due
        recopying.lost("b", lacks_space=False)
        clock.now_s += rest_s - 0.1
        recopying.lost("c", lacks_space=False)  # the copies are made in the same epoch
        assert not recopying.is_due
        clock.now_s += 0.2
        assert recopying.is_due
        recopying.begun()
        assert recopying.backups(stages, fleet) == first
    clock.now_s += 3600.0
    recopying.lost("b", lacks_space=False)
    clock.now_s += 5.1
    assert recopying.is_due


def test_a_copy_that_was_lost_before_another_was_begun_is_not_begun_once_more() -> None:
    clock = Clock()
    recopying = Recopying(clock)
    recopying.lost("b", lacks_space=False, is_restarted=True)
    clock.now_s += 3600.0
    assert not recopying.is_due


def test_a_copy_that_found_no_space_is_requested_from_another_member() -> None:
    fleet = Topology(tuple(machine(worker, 1e9) for worker in "abc"))
    recopying = Recopying(Clock())
    before = recopying.backups((("a",), ("b", "c")), fleet)["a"]
    recopying.lost(before, lacks_space=True)
    assert recopying.backups((("a",), ("b", "c")), fleet)["a"] == ({"b", "c"} - {before}).pop()


def membership(*stages: tuple[tuple[int, int], tuple[str, ...]]) -> Membership:
    shards, members = zip(*stages, strict=True)
    owners = tuple((stage[0],) * 4 for stage in members)
    return Membership(1, shards, members, owners, 3, fresh(owners))


def plan(*stages: tuple[tuple[int, int], tuple[str, ...]]) -> Any:
    found = [
        SimpleNamespace(
            start=start, stop=stop, members=[SimpleNamespace(contributor_id=name) for name in names]
        )
        for (start, stop), names in stages
    ]
    return SimpleNamespace(plan=SimpleNamespace(stages=found))


def alike(_: str) -> str:
    return "cpu"


def test_whoever_is_to_hold_other_layers_follows_those_who_have_them() -> None:
    two = membership(((0, 6), ("a",)), ((6, 12), ("b", "c")))
    assert replicas_of(two, plan(((0, 6), ("a",)), ((6, 12), ("b", "c"))), alike) == {}
    assert replicas_of(two, plan(((0, 6), ("a",)), ((6, 12), ("c",))), alike) == {}
    more = plan(((0, 6), ("a", "d")), ((6, 12), ("b", "e", "c", "f", "g")))
    assert replicas_of(two, more, alike) == {"a": ("d",), "b": ("e", "g"), "c": ("f",)}
    cut_off = [frozenset("be")]
    apart = {"a": ("d",), "b": ("f", "g"), "c": ("e",)}
    assert replicas_of(two, more, alike, cut_off=cut_off) == apart
    moved = plan(((0, 4), ("a",)), ((4, 8), ("d",)), ((8, 12), ("b", "c")))
    assert replicas_of(two, moved, alike) == {"a": ("d",), "b": ("d",)}
    swapped = plan(((0, 6), ("b",)), ((6, 12), ("a", "c")))
    assert replicas_of(two, swapped, alike) == {"a": ("b",), "b": ("a",)}
    one = plan(((0, 12), ("a", "b", "c")))
    assert replicas_of(two, one, alike) == {"a": ("b", "c"), "b": ("a",)}
    assert replicas_of(two, more, lambda worker: "cuda" if worker in "cd" else "cpu") == {
        "b": ("e", "f", "g")
    }


def test_a_member_that_will_keep_a_copy_of_other_layers_follows_those_who_have_them() -> None:
    one = plan(((0, 3), ("a",)), ((3, 12), ("b",)))
    two = replace(membership(((0, 6), ("a",)), ((6, 12), ("b",))), backups={"a": "b", "b": "a"})
    heirs = {"a": ((3, 12),), "b": ((0, 3),)}
    assert replicas_of(two, one, alike) == {"a": ("b",)}
    assert replicas_of(two, one, alike, heirs) == {"a": ("b",), "b": ("a",)}
    # The copy of this shard already exists.
    assert replicas_of(two, plan(((0, 6), ("a",)), ((6, 12), ("b",))), alike, {"b": ((0, 6),)}) == {}


def test_lack_of_memory_is_reported_with_what_there_was() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**58)
    assert is_out_of_memory(caught.value)
    reported = as_reported(caught.value)
    assert isinstance(reported, OutOfMemory)
    assert reported.taken_bytes > 10 * 2**20
    assert not is_out_of_memory(RuntimeError("shapes differ"))
    assert "shapes differ" in as_reported(RuntimeError("shapes differ")).message


def test_an_operation_that_no_gpu_repeats_is_named() -> None:
    torch.use_deterministic_algorithms(mode=True)
    try:
        with pytest.raises(RuntimeError) as caught:
            torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))
    finally:
        torch.use_deterministic_algorithms(mode=False)
    reported = as_reported(caught.value)
    assert isinstance(reported, UserError)
    assert "operation put_ gives other numbers in each run" in reported.message
    assert reported.hint


NOBODY: Any = None
LAN = {names: lan(*map(machine, names)) for names in ("a", "ab", "ac", "abc")}


def solution(names: str) -> Solution:
    return solve(job(stages=1, members_per_stage=len(names)), LAN[names], PROFILE, 0, {})


class PlayedGroup(TrainingGroup):
    """A group whose members a test declares; no process is started, and all replicas have caught up."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.declared = {"a"}
        self.invited: set[str] = set()

    @property
    def workers(self) -> frozenset[Worker]:
        return frozenset(self.declared)

    def invite(self, shards: Mapping[Worker, Shard], topology: Topology) -> None:
        self.offer(topology)
        self.invited |= shards.keys()

    def query_caught_up(self, followers: Collection[Worker]) -> dict[Any, Worker]:
        return {object(): worker for worker in followers}

    def is_affirmed(self, worker: Worker, _: Any) -> bool:
        return worker in self.declared


class Story:
    """The changes of a job on machine a, which other machines may join; no process is started."""

    def __init__(self, folder: Path) -> None:
        assignment = Assignment(job_id="job", attempt=1, spec=job(stages=1), topology=LAN["a"], folder=folder)
        self.group = PlayedGroup(assignment, NOBODY, NOBODY, NOBODY, threading.Event(), (4,), None, print)
        self.requests = ControlRequests()
        self.reported: list[AttemptEvent] = []
        self.changes = Changes(self.group, self.requests, self.reported.append)

    def propose(self, step: int, names: str) -> ReplanProposed:
        better = solution(names)
        proposed = ReplanProposed(
            step=step, plan=better.plan, current_step_s=2, gain_s=9, move_cost_s=1, sentence="it pays"
        )
        self.changes.propose(better, proposed)
        return proposed

    def offer(self, names: str, answers: int | None = None) -> None:
        self.requests.offer(Offer(topology=LAN[names], answers=answers))

    def are_due(self, *followers: str) -> bool:
        return self.changes.are_due(self.membership(*followers))

    def membership(self, *followers: str) -> Membership:
        owners = (("a",) * 4,)
        following = {"a": followers} if followers else {}
        return Membership(1, ((0, 12),), (("a",),), owners, 3, fresh(owners), followers=following)

    def reformed(self, *followers: str) -> tuple[str, ...]:
        """Form an epoch; return the machines that are then reported as expected."""
        event = Reformed(epoch=1, step=3, plan=solution("a").plan, seconds=0, recomputed=0, sentence="")
        self.changes.report_reformed(event, self.membership(*followers))
        reported = self.reported.pop()
        assert isinstance(reported, Reformed)
        return reported.expected


@pytest.fixture
def story(tmp_path: Path) -> Story:
    return Story(tmp_path)


def test_dead_links_are_those_of_the_latest_offer(story: Story) -> None:
    assert story.changes.cut_off == ()
    links = (Link.dead("b", "a"), Link.dead("a", "b"), Link.dead("b", "c"))
    offered = Topology(LAN["ab"].contributors, links)
    story.group.offer(LAN["ab"])
    story.requests.offer(Offer(topology=offered))
    assert story.changes.cut_off == (("a", "b"),)
    # A machine that the job must leave still gives its layers to other members.
    story.requests.offer(Offer(topology=Topology(LAN["a"].contributors, links)))
    assert story.changes.cut_off == (("a", "b"),)


def test_no_member_is_started_before_its_machine_is_the_jobs(story: Story) -> None:
    story.offer("ab")
    story.propose(5, "ab")
    proposed = story.propose(7, "ab")
    story.offer("ab", answers=5)
    assert not story.are_due()
    assert (story.reported[-1], story.group.invited) == (proposed, set())
    story.offer("ab", answers=7)
    assert not story.are_due()
    assert story.group.invited == {"b"}


def test_a_plan_whose_machine_is_not_to_be_had_is_given_up(story: Story) -> None:
    story.offer("ab")
    proposed = story.propose(7, "ab")
    story.offer("a", answers=7)
    assert not story.are_due()
    assert story.reported == [proposed, ReplanAbandoned(reason="the job cannot have b")]
    story.offer("ab")
    assert not story.are_due()
    assert len(story.reported) == 2


def test_a_plan_whose_machine_leaves_is_given_up(story: Story) -> None:
    story.offer("ab")
    proposed = story.propose(7, "ab")
    story.requests.leave("b")
    assert not story.are_due()
    assert story.reported == [proposed, ReplanAbandoned(reason="the job must do without b")]


def test_a_plan_whose_machine_is_lost_is_given_up_even_if_that_is_soon_back(story: Story) -> None:
    story.offer("abc")
    story.propose(7, "ab")
    story.changes.lost("c")
    assert story.changes.under_way() is not None
    story.changes.lost("b")
    assert story.changes.under_way() is None
    story.changes.backoff = Backoff(5.0, 600.0, 30.0)
    assert not story.are_due()
    assert story.reported[-1] == ReplanAbandoned(reason="b was lost")


def test_the_newest_plan_counts(story: Story) -> None:
    story.offer("ab")
    first = story.propose(7, "ab")
    story.requests.leave("b")
    assert story.changes.expected == frozenset()
    second = story.propose(8, "ac")
    story.offer("ac")
    assert not story.are_due()
    assert story.reported == [first, second]
    assert story.changes.expected == {"a", "c"}


def test_a_plan_whose_machines_are_there_outlasts_an_epoch_that_was_planned_without_them(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_group, "ray", local_ray())
    story.group.offer(LAN["ab"])
    story.offer("ab", answers=7)
    story.propose(7, "ab")
    story.group.declared.add("b")
    assert story.are_due()
    assert story.changes.replicas(story.membership()) == {"a": ("b",)}
    assert story.changes.take_solution({"a", "b"}) is None
    assert story.are_due("b")  # the replica has caught up
    assert story.changes.take_solution({"a"}) is None
    assert story.changes.expected == {"a", "b"}
    assert story.changes.take_solution({"a", "b"}) is not None
    assert story.changes.expected == frozenset()


def test_who_follows_a_member_is_expected_until_an_epoch_does_without(story: Story) -> None:
    story.offer("ab")
    story.propose(7, "ab")
    assert story.reformed() == ("b",)
    story.group.declared.add("b")
    assert story.reformed("b") == ("b",)
    story.group.declared.remove("b")
    story.offer("a", answers=7)
    assert story.are_due("b")  # the primary has to be notified
    assert story.reformed("b") == ("b",)  # the epoch was already being formed
    assert story.are_due("b")
    assert story.reformed() == ()
    assert not story.are_due()
    assert not any(isinstance(event, ReplanAbandoned) for event in story.reported)
