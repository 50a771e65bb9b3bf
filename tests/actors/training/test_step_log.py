"""The step log of a job: the writes of two coordinators, and the content after a crash."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import pytest
from tests.api.playing import laid, step

from share_compute.errors import StaleEpoch, Unavailable
from share_compute.models.blueprint import blueprint_of
from share_compute.models.factory import dissect
from share_compute.planning.planner import solve
from share_compute.protocol.membership import Membership, Resend, ShardPart, fresh
from share_compute.specification import parse_job
from share_compute.topology import Contributor, Device, Topology
from share_compute.training.loss_scale import LossScale
from share_compute_actors.messages import MemberStatus
from share_compute_actors.training.membership.epochs import owners_of, shards_of, stages_of
from share_compute_actors.training.membership.takeover import (
    Takeover,
    fits,
    has_loaded,
    is_whole,
    solution_of,
    state_of,
)
from share_compute_actors.training.shard_store import TrainingState
from share_compute_actors.training.step_log import FILE, GroupFacts, Standing, StepFacts, StepLog

Open = Callable[[int], StepLog]


@pytest.fixture
def step_log(tmp_path: Path) -> Iterator[Open]:
    with ExitStack() as stack:
        yield lambda attempt: stack.enter_context(closing(StepLog(tmp_path, attempt)))


def facts(number: int, factor: float = 1.0) -> StepFacts:
    rate = 0.3 if number == 3 else None
    return StepFacts(step(number), LossScale(factor, clean_steps=number, is_dynamic=True), rate=rate)


def membership(epoch: int) -> Membership:
    owners = (("a", "b"), ("c", "c"))
    return Membership(
        epoch=epoch,
        shards=((0, 2), (2, 5)),
        stages=(("a", "b"), ("c",)),
        owners=owners,
        step=3,
        tasks=fresh(owners),
        resends=(Resend("a", "activation", 0, 0, "c"),),
        forgets=frozenset({"b"}),
        reduced={1: ("c",)},
        backups={"c": "a"},
    )


def committed(step_log: StepLog, last: int, epoch: int = 0) -> int:
    epoch = epoch or step_log.claim().epoch + 1
    step_log.begin_epoch(epoch)
    for number in range(step_log.read().committed + 1, last + 1):
        assert step_log.commit(epoch, number, scale=0.5 * number, facts=facts(number, 2.0**number))
    return epoch


def test_what_is_committed_is_found_again(step_log: Open) -> None:
    first = step_log(1)
    epoch = committed(first, 3)
    first.lay(GroupFacts(membership(epoch), laid("a", "b", "c"), (2, 1), attempt=1))
    first.validated(2, {"validation_loss": 0.25})
    first.close()
    again = step_log(2)
    assert again.read() == (epoch, 3, 1.5, 0, 0.3)
    assert again.claim() == (epoch + 1, 3, 1.5, 0, 0.3)
    assert [one.event.step for one in again.steps(after=1)] == [2, 3]
    assert again.steps(after=2) == [facts(3, 8.0)]
    assert again.updates() == ({1: 0.5, 2: 1.0, 3: 1.5}, {3: 0.3})
    assert again.validations() == ((2, {"validation_loss": 0.25}),)
    group = again.group
    assert group is not None
    assert (group.membership, group.runs, group.attempt) == (membership(epoch), (2, 1), 1)
    assert group.plan == laid("a", "b", "c")


def test_only_the_later_of_two_coordinators_writes(step_log: Open) -> None:
    older, younger = step_log(1), step_log(2)
    epoch = committed(older, 2)
    assert older.is_claimed
    taken = younger.claim()
    assert (older.is_claimed, younger.is_claimed) == (False, True)
    assert taken.committed == 2
    assert older.commit(epoch, 3, 1.0, facts(3)) is None
    assert older.begin_epoch(taken.epoch + 5) is None
    with pytest.raises(StaleEpoch, match="another coordinator"):
        older.lay(GroupFacts(membership(epoch), laid("a"), (1,), attempt=1))
    with pytest.raises(StaleEpoch, match="another coordinator"):
        older.validated(2, {"validation_loss": 0.25})
    with pytest.raises(StaleEpoch, match="another coordinator"):
        older.offend("a", 3, "its shape is [1]", is_grave=True)
    assert younger.validations() == ()
    assert younger.quarantined() == frozenset()
    with pytest.raises(StaleEpoch):
        older.rewind(0)
    with pytest.raises(StaleEpoch):
        older.claim()
    assert younger.read().committed == 2
    assert [one.event.step for one in younger.steps(after=0)] == [1, 2]
    assert younger.begin_epoch(taken.epoch + 1) == (taken.epoch + 1, 2, 1.0, 0, None)
    assert younger.commit(taken.epoch + 1, 3, 1.0, facts(3)) == (taken.epoch + 1, 3, 1.0, 0, 0.3)


def test_a_step_is_committed_once_and_in_its_epoch(step_log: Open) -> None:
    one = step_log(1)
    epoch = committed(one, 1)
    assert one.commit(epoch, 1, 1.0, facts(1)) is None
    assert one.commit(epoch, 3, 1.0, facts(3)) is None
    assert one.commit(epoch - 1, 2, 1.0, facts(2)) is None
    assert one.begin_epoch(epoch) is None
    assert one.read().committed == 1
    assert list(one.updates().scales) == [1]


def test_what_is_long_past_is_not_kept(step_log: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("share_compute_actors.training.step_log.STEPS_KEPT", 2)
    one = step_log(1)
    committed(one, 5)
    assert list(one.updates().scales) == [4, 5]
    assert one.read().committed == 5


def test_members_with_another_choice_of_compiled_code_are_not_found_again(step_log: Open) -> None:
    one = step_log(1)
    epoch = committed(one, 4)
    one.lay(GroupFacts(membership(epoch), laid("a"), (1,), attempt=1))
    one.choose_computation(is_compiled=False)
    assert (one.group, one.is_compiled, one.read().committed) == (None, False, 4)


def test_rewound_to_a_checkpoint(step_log: Open) -> None:
    one = step_log(1)
    epoch = committed(one, 4)
    one.lay(GroupFacts(membership(epoch), laid("a"), (1,), attempt=1))
    one.validated(2, {"validation_loss": 0.5})
    one.validated(4, {"validation_loss": 0.25})
    one.rewind(2)
    assert one.read() == (epoch + 1, 2, 1.0, 0, None)
    assert (one.group, one.validations(), list(one.updates().scales)) == (
        None,
        ((2, {"validation_loss": 0.5}),),
        [1, 2],
    )
    assert one.commit(epoch, 3, 1.0, facts(3)) is None
    committed(one, 3)
    assert [found.event.step for found in one.steps(after=0)] == [1, 2, 3]


def test_rewound_to_a_version_goes_again_through_later_merges_only(step_log: Open) -> None:
    one = step_log(1)
    committed(one, 6)
    for end, base in ((2, 0), (4, 1), (6, 2)):
        assert one.begin_merge(end, base) == base
        one.end_merge(end)
    one.rewind(4, version=1)
    assert one.open_merge == 4  # the merge that makes version 2 was applied after the checkpoint
    assert one.begin_merge(4, 1) == 1
    one.rewind(4, version=2)
    assert one.open_merge is None
    assert one.begin_merge(4, 2) == 2  # not the version with which an earlier round began


@pytest.mark.parametrize("version", [0, 4])
def test_a_file_of_another_shape_is_replaced(tmp_path: Path, step_log: Open, version: int) -> None:
    with closing(sqlite3.connect(tmp_path / FILE)) as older:
        older.execute(f"PRAGMA user_version = {version}")
        older.execute("CREATE TABLE standing (one INTEGER, epoch INTEGER, committed INTEGER, scale REAL)")
        older.execute("INSERT INTO standing VALUES (1, 7, 9, 1.0)")
        older.commit()
    one = step_log(1)
    assert one.read() == (0, 0, 1.0, 0, None)
    assert one.group is None
    committed(one, 1)
    assert step_log(2).read().committed == 1  # a file with this schema is not changed


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"steps.sqlite3 cannot be used") as caught:
        StepLog(tmp_path / "missing", 1)
    assert caught.value.hint


def test_where_training_stands_after_a_takeover(step_log: Open) -> None:
    one = step_log(2)
    beginning = TrainingState(1, LossScale(4.0), ((1, {"validation_loss": 0.75}),))
    committed(one, 1)
    assert state_of(one, beginning) is beginning
    committed(one, 3)
    one.validated(2, {"validation_loss": 0.5})
    one.validated(3, {"validation_loss": 0.25})  # the validation of the last step is repeated
    state = state_of(one, beginning)
    assert state == TrainingState(
        3, facts(3, 8.0).loss_scale, ((1, {"validation_loss": 0.75}), (2, {"validation_loss": 0.5}))
    )


def status(worker: str, step: int, reaches: int, holds: tuple[int, ...] | None) -> MemberStatus:
    return MemberStatus(worker, step, 0, 0, reaches, None if holds is None else ShardPart(*holds))


@pytest.mark.parametrize(
    ("member", "is_fit"),
    [
        (status("a", 2, 2, (0, 2)), True),
        (status("a", 2, 3, (0, 2)), True),  # holds the gradient of the open step
        (status("c", 1, 2, (2, 5)), True),  # was not notified of the commit
        (status("a", 1, 1, (0, 2)), False),  # has no gradient of the committed step
        (status("a", 2, 2, (2, 5)), False),  # died between two plans
        (status("c", 2, 2, None), False),
        (status("d", 2, 2, (0, 2)), False),
        (
            status("a", 2, 2, (0, 2, 0, 2)),
            False,
        ),  # has a share of the optimizer's state, and should have all of it
    ],
)
def test_who_can_be_taken_over(member: MemberStatus, *, is_fit: bool) -> None:
    assert fits(membership(4), committed=2, status=member) is is_fit


@pytest.mark.parametrize(
    ("loaded", "step", "may_go_on"),
    [((0, 2), 2, True), ((0, 2), 1, False), ((2, 5), 2, False), (None, 2, False)],
)
def test_a_member_that_was_about_to_hold_a_shard_can_adopt_it(
    loaded: tuple[int, int] | None, step: int, *, may_go_on: bool
) -> None:
    halfway = MemberStatus(
        "a", 2, 0, 0, 2, ShardPart(2, 5), None if loaded is None else ShardPart(*loaded), step
    )
    assert not fits(membership(4), committed=2, status=halfway)
    assert has_loaded(membership(4), committed=2, status=halfway) is may_go_on


def test_all_shards_must_be_left() -> None:
    whole = membership(4)
    assert is_whole(whole, {"b": None, "c": None})
    assert is_whole(whole, {"a": None})  # keeps a copy for c
    assert not is_whole(whole, {"b": None})
    assert not is_whole(whole, {"c": None})


def test_all_shares_must_be_left() -> None:
    shared = replace(membership(4), shares_optimizer=True, backups={"a": "b", "b": "a", "c": "a"})
    assert fits(shared, committed=2, status=status("b", 2, 2, (0, 2, 1, 2)))
    assert not fits(shared, committed=2, status=status("b", 2, 2, (0, 2, 1, 3)))
    assert is_whole(shared, {"a": None})  # keeps copies for b and c
    assert not is_whole(shared, {"b": None})
    assert not is_whole(replace(shared, backups={"c": "a"}), {"a": None})
    assert is_whole(replace(shared, backups={"c": "a"}), {"a": None, "b": None})


def test_what_is_left_of_a_group_is_a_plan() -> None:
    source = {
        "model": {"layers": [{"type": "linear", "options": {"in_features": 64, "out_features": 64}}] * 4},
        "data": {"dataset": "digits"},
        "training": {"batch_size": 64, "microbatches": 8},
        "parallelism": {"stages": 2, "members_per_stage": 2, "strategy": "uniform"},
    }
    spec, device = parse_job(source), Device("cpu", "cpu", 2**31, {"float32": 1e10})
    machines = tuple(
        Contributor(f"c{number}", f"machine-{number}", (device,), node_id=f"{number}", address="192.0.2.7")
        for number in range(4)
    )
    profile = dissect(blueprint_of(spec, None))
    plan = solve(spec, Topology(machines), profile, 0, {}).plan
    owners = owners_of(plan)
    laid_out = Membership(1, shards_of(plan), stages_of(plan), owners, step=3, tasks=fresh(owners))
    gone = laid_out.stages[1][0]
    left = {worker: object() for worker in laid_out.workers if worker != gone}
    takeover = Takeover(GroupFacts(laid_out, plan, (8,), attempt=1), left)
    topology = Topology(tuple(machine for machine in machines if machine.id in left))
    solution = solution_of(takeover, spec, topology, profile, {})
    assert stages_of(solution.plan) == (laid_out.stages[0], laid_out.stages[1][1:])
    assert [sum(stage.shares) for stage in solution.layout.stages] == [8, 8]
    assert solution.timeline is not None
    assert solution.timeline.step_s > 0


def test_offences_outlive_the_attempt_and_the_second_one_quarantines(tmp_path: Path) -> None:
    with closing(StepLog(tmp_path, 1)) as step_log:
        assert not step_log.offend("ada", 3, "its dtype is float64", is_grave=False)
        assert step_log.quarantined() == frozenset()
    with closing(StepLog(tmp_path, 2)) as step_log:
        assert step_log.offend("ada", 9, "its shape is [1]", is_grave=False)
        assert not step_log.offend("cal", 3, "its dtype is float64", is_grave=False, accuser="ada")
        assert not step_log.offend("cal", 9, "its dtype is float64", is_grave=False, accuser="ada")
        assert step_log.quarantined() == {"ada"}
        assert step_log.offend("ben", 9, "its sum of the gradients is not that of the others", is_grave=True)
        step_log.claim()
        step_log.rewind(2)
        assert step_log.quarantined() == {"ada", "ben"}
        assert step_log.offend("cal", 10, "its shape is [1]", is_grave=False, accuser="ben")


def test_the_generation_of_a_step_is_kept_with_it(tmp_path: Path) -> None:
    with closing(StepLog(tmp_path, 1)) as step_log:
        standing = step_log.claim()
        step_log.commit(standing.epoch, 1, 0.5, None, generation=2)
        assert step_log.read() == Standing(standing.epoch, 1, 0.5, 2)
