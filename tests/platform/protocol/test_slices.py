"""Members of a stage compute the slices of a part of the batch together."""

from __future__ import annotations

from share_compute.protocol.cells import remaining
from share_compute.protocol.member import MemberMachine
from share_compute.protocol.member_events import (
    Compute,
    Computed,
    ComputeFailed,
    Discard,
    Effect,
    Event,
    SendToCoordinator,
)
from share_compute.protocol.membership import Membership, fresh
from share_compute.protocol.messages import Broken, Form, Halt, Report
from share_compute.protocol.recovery import recover

OWNERS = (("a", "a", "a", "a", "b", "b"), ("c", "c", "d", "d", "e", "e"))
"""Three slices of two parts; a member of the first stage was lost."""
FORM = Form(
    Membership(
        1, ((0, 1), (1, 2)), (("a", "b"), ("c", "d", "e")), OWNERS, step=1, tasks=fresh(OWNERS), slices=3
    )
)


def test_all_members_take_the_parts_in_the_same_order() -> None:
    membership = FORM.membership
    orders = {worker: [*map(str, remaining(membership, 1, worker))] for worker in "abcde"}
    assert orders["b"] == ["4F", "5F", "4B", "5B"]
    assert orders["a"] == ["0F", "2F", "1F", "3F", "0B", "2B", "1B", "3B"]
    assert orders["d"] == ["2F", "2B", "3F", "3B"]
    assert membership.holders_of_slices("a") == (0, 0, 1)
    assert membership.together("a", 3) == (1, 3)


def computing(machine: MemberMachine, events: list[Event]) -> list[Effect]:
    found: list[Effect] = []
    for event in events:
        found = machine.handle(event)
    return found


def test_a_member_computes_its_slices_of_a_part_at_once() -> None:
    machine = MemberMachine("a", 0)
    (effect,) = (each for each in computing(machine, [Halt(1, 0, 1.0), FORM]) if isinstance(each, Compute))
    assert effect.microbatches == (0, 2)
    effects = machine.handle(Computed(effect.action))
    assert [each.microbatches for each in effects if isinstance(each, Compute)] == [(1, 3)]


def test_a_step_whose_cells_failed_begins_again() -> None:
    machine = MemberMachine("a", 0)
    (effect,) = (each for each in computing(machine, [Halt(1, 0, 1.0), FORM]) if isinstance(each, Compute))
    machine.handle(Computed(effect.action))
    effects = machine.handle(ComputeFailed())
    assert Discard() in effects
    assert SendToCoordinator(Broken(1, "a")) in effects
    (report,) = machine.handle(Halt(2, 0, 1.0))
    assert isinstance(report, SendToCoordinator)
    assert isinstance(report.message, Report)
    assert not report.message.activations
    left = recover(FORM.membership.stages, OWNERS, {"a": report.message}, 1, slices=3)
    assert left.tasks == fresh(OWNERS)
    assert left.forgets == frozenset("abcde")
