"""A member rejects a tensor of another member: which of the two is excluded, and by which further evidence."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from tests.simulated_world.network import Weather
from tests.simulated_world.scenario import Scenario
from tests.simulated_world.world import World

from share_compute.protocol.coordinator import (
    Assemble,
    Blame,
    Continue,
    CoordinatorMachine,
    Disputed,
    Effect,
    Expel,
    Lost,
    MembershipPlanned,
    PlanMembership,
    Recorded,
    SendToMember,
    StartOver,
    Suspect,
    WriteStepLog,
)
from share_compute.protocol.doubts import UNBELIEVED, quarantines
from share_compute.protocol.failures import FailureKind, InjectedFailure
from share_compute.protocol.membership import Membership, fresh
from share_compute.protocol.messages import Broken, Form, Formed, Prepared, Rejected, Report, TensorLabel
from share_compute.protocol.points import Point

FOLLOWER = "f"
WHAT = "its dtype is float64"


class Epochs:
    """A coordinator whose members answer at once; a stage for each member, or one for all, and a machine that joins."""

    def __init__(self, workers: Collection[str], *, is_one_stage: bool = False) -> None:
        self.machine = CoordinatorMachine(0, 0)
        self.is_one_stage = is_one_stage
        self.reduced: set[str] = set()
        """Members that report that they hold the sum of the open step."""
        self.forms: list[Form] = []
        self.plans: list[PlanMembership] = []
        self.machine.handle(Continue(9))
        self.run(self.machine.handle(Assemble(frozenset(workers))))

    def run(self, effects: list[Effect]) -> list[Effect]:
        """Answer until the members compute; return the other effects of the coordinator."""
        waiting, others = list(effects), []
        while waiting:
            effect = waiting.pop(0)
            match effect:
                case WriteStepLog(epoch=epoch, step=None):
                    waiting += self.machine.handle(Recorded(epoch, self.machine.committed))
                    for worker in sorted(self.machine.workers):
                        waiting += self.machine.handle(self._report(epoch, worker))
                case WriteStepLog(epoch=epoch, step=int(step)):
                    waiting += self.machine.handle(Recorded(epoch, step))
                case PlanMembership(epoch=epoch, reports=reports, without=without):
                    self.plans.append(effect)
                    workers = sorted(reports.keys() - without)
                    stages = (tuple(workers),) if self.is_one_stage else tuple((each,) for each in workers)
                    shards = tuple((place, place + 1) for place in range(len(stages)))
                    tasks = fresh(stages)
                    membership = Membership(
                        epoch, shards, stages, stages, self.machine.committed + 1, tasks,
                        followers={workers[0]: (FOLLOWER,)},
                    )  # fmt: skip
                    waiting += self.machine.handle(MembershipPlanned(Form(membership)))
                    for worker in workers:
                        waiting += self.machine.handle(Formed(epoch, worker))
                case SendToMember(message=Form() as form):
                    self.forms.append(form)
                case SendToMember():
                    pass
                case _:
                    others.append(effect)
        return others

    def _report(self, epoch: int, worker: str) -> Report:
        generation = self.forms[-1].generation if self.forms else 0
        committed, is_reduced = self.machine.committed, worker in self.reduced
        return Report(epoch, worker, committed, committed + 1, is_reduced=is_reduced, generation=generation)

    def reject(self, accuser: str, source: str, *, is_certain: bool = True) -> list[Effect]:
        label = TensorLabel(self.machine.committed + 1, "activation", 0, 0)
        rejected = Rejected(self.machine.epoch, accuser, source, label, WHAT, is_certain)
        return self.run(self.machine.handle(rejected))

    def prepare(self, **digests: str) -> list[Effect]:
        effects: list[Effect] = []
        for worker in sorted(self.machine.workers):
            step, digest = self.machine.committed + 1, digests.get(worker, "")
            effects += self.machine.handle(Prepared(self.machine.epoch, worker, step, digest=digest))
        return self.run(effects)


def test_the_word_of_one_member_costs_another_its_place_and_says_whose_it_is() -> None:
    epochs = Epochs("abc")
    assert epochs.reject("b", "a") == [Blame("a", 1, WHAT, accuser="b"), Expel("a")]
    assert epochs.machine.workers == {"b", "c"}


def test_the_next_word_of_the_same_member_costs_its_own_place() -> None:
    epochs = Epochs("abcd")
    epochs.reject("b", "a")
    epochs.prepare()
    (expelled,) = epochs.reject("b", "c")
    assert expelled == Expel("b", f"{UNBELIEVED}: {WHAT}")
    assert epochs.machine.workers == {"c", "d"}
    assert epochs.reject("d", "c") == [Blame("c", 2, WHAT, accuser="d"), Expel("c")]


def test_a_member_that_rejects_its_own_result_is_no_accuser() -> None:
    epochs = Epochs("abcd")
    assert epochs.reject("a", "a") == [Blame("a", 1, WHAT), Expel("a")]
    assert epochs.reject("b", "c")[0] == Blame("c", 1, WHAT, accuser="b")


def test_what_another_machine_computes_well_still_rests_on_the_word_of_the_accuser() -> None:
    """The step without the suspect is finite, whether the suspect or the accuser was wrong."""
    epochs = Epochs("abc")
    assert epochs.reject("b", "a", is_certain=False) == [Suspect("a", 1, WHAT, accuser="b")]
    blames = [effect for effect in epochs.prepare() if isinstance(effect, Blame)]
    assert blames == [Blame("a", 1, WHAT, accuser="b")]


def test_a_member_that_names_a_stranger_is_at_fault_at_once() -> None:
    epochs = Epochs("abc")
    what = "it rejected a tensor of 'nobody', which has no part in this epoch"
    assert epochs.reject("b", "nobody") == [Blame("b", 1, what), Expel("b")]
    assert epochs.machine.workers == {"a", "c"}
    assert epochs.machine.phase == "stepping"


def test_a_machine_that_is_about_to_join_can_be_accused() -> None:
    epochs = Epochs("abc")
    assert epochs.reject("a", FOLLOWER) == [Blame(FOLLOWER, 1, WHAT, accuser="a"), Expel(FOLLOWER)]
    assert epochs.machine.workers == {"a", "b", "c"}


@pytest.mark.parametrize(
    ("accuser", "earlier", "ends"),
    [
        ("a", [], False),
        (None, [], False),
        ("a", ["a"], False),
        ("a", ["a", "a"], False),
        ("a", ["b"], True),
        ("a", ["a", "b"], True),
        ("a", [None], True),
        (None, ["a"], True),
        (None, [None], True),
    ],
)
def test_a_quarantine_takes_more_than_the_word_of_one_member(
    accuser: str | None, earlier: list[str | None], ends: bool
) -> None:
    assert quarantines(accuser, earlier) is ends


def test_a_member_that_copies_a_sum_in_a_dispute_has_no_answer_of_its_own() -> None:
    """Otherwise the others agree with it, seem to have changed their answers, and count as wrong."""
    epochs = Epochs("ab", is_one_stage=True)
    assert epochs.prepare(a="right", b="wrong") == [StartOver(1, frozenset("ab"))]
    epochs.reduced = {"b"}
    epochs.run(epochs.machine.handle(Broken(epochs.machine.epoch, "a")))
    assert not any(report.is_reduced for report in epochs.plans[-1].reports.values())
    assert [form.generation for form in epochs.forms] == [0, 0, 1, 1, 2, 2]
    assert epochs.prepare(a="right", b="wrong") == [Disputed(1, frozenset("ab"))]


def test_nobody_wins_a_dispute_by_the_loss_of_its_opponent() -> None:
    epochs = Epochs("ab", is_one_stage=True)
    epochs.prepare(a="right", b="wrong")
    epochs.run(epochs.machine.handle(Lost("a")))
    assert epochs.prepare(b="wrong") == [Disputed(1, frozenset("ab"))]


def test_a_third_member_that_a_member_in_dispute_gave_its_weights_does_not_vote_for_it() -> None:
    epochs = Epochs("ab", is_one_stage=True)
    epochs.prepare(a="right", b="wrong")
    epochs.run(epochs.machine.handle(Assemble(frozenset("bc"))))
    assert epochs.prepare(b="wrong", c="wrong") == [Disputed(1, frozenset("abc"))]


@pytest.mark.parametrize("seed", range(20))
def test_a_liar_has_one_other_member_left_out_and_nobody_quarantined(seed: int) -> None:
    lies = tuple(
        InjectedFailure(FailureKind.accuse, Point.tensor_received, "d", step=step, occurrence=occurrence)
        for step in (1, 2, 3)
        for occurrence in (1, 2)
    )
    scenario = Scenario(
        seed=seed, machines=4, stages=2, runs=(2, 2), weather=Weather(delay_s=0.001), failures=lies
    )
    world = World(scenario)
    outcome = world.run()
    assert sum(outcome.blamed.values()) == 1
    assert not world.banned
