"""Fault injection into messages between real processes, and gradients on which members disagree."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from share_compute.errors import UserError
from share_compute.protocol.failures import FailureKind, InjectedFailure
from share_compute.protocol.member import MemberMachine
from share_compute.protocol.member_events import Missed, SendToCoordinator
from share_compute.protocol.membership import Membership, fresh
from share_compute.protocol.messages import Broken, Form, Halt
from share_compute.protocol.points import RECEIVED, SENDING, Point
from share_compute_actors.testing import message_faults
from share_compute_actors.testing.fault_injection import FaultInjector, require_carried_out
from share_compute_actors.testing.message_faults import MessageFaults

POINT = Point.prepared_sending
ANN, BOB, CAT = "c-ann", "c-bob", "c-cat"


def failure(kind: FailureKind, duration_s: float = 0.0) -> InjectedFailure:
    return InjectedFailure(kind, POINT, duration_s=duration_s)


class Wire:
    """Records the messages that are sent."""

    def __init__(self) -> None:
        self.came: list[str] = []
        self.faults = MessageFaults()

    def sends(self, what: str) -> Callable[[], None]:
        return lambda: self.came.append(what)

    def send(self, what: str, *failures: InjectedFailure, to: str | None = ANN) -> None:
        self.faults.send(to, self.sends(what), failures, self.sends(f"damaged {what}"))

    def wait(self) -> None:
        """Wait until no message is in transit."""
        while self.faults.flush() is not None:
            time.sleep(0.01)


def test_messages_go_wrong_as_the_script_says() -> None:
    wire = Wire()
    wire.send("whole")
    wire.send("lost", failure(FailureKind.drop))
    wire.send("double", failure(FailureKind.duplicate))
    wire.send("bits", InjectedFailure(FailureKind.corrupt, Point.tensor_sending))
    wire.send("late", failure(FailureKind.delay, 0.05))
    wire.send("after")
    assert wire.came == ["whole", "double", "double", "damaged bits", "after"]
    wire.wait()
    assert wire.came[5:] == ["late"]


def test_one_message_is_overtaken_by_the_next_to_the_same_target() -> None:
    wire = Wire()
    wire.send("first", failure(FailureKind.reorder))
    wire.send("to another", to=BOB)
    wire.send("second")
    wire.send("third")
    assert wire.came == ["to another", "second", "first", "third"]
    wire.wait()
    assert len(wire.came) == 4  # it is not sent again after its time


def test_a_message_that_nothing_overtakes_goes_on_after_a_while() -> None:
    wire = Wire()
    wire.send("alone", failure(FailureKind.reorder), to=None)
    assert wire.came == []
    wire.wait()
    assert wire.came == ["alone"]
    wire.send("of an epoch that is over", failure(FailureKind.delay, 0.01))
    wire.faults.forget()
    assert wire.faults.flush() is None
    assert wire.came == ["alone"]


def test_a_partition_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr(message_faults, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    injector = FaultInjector(
        [InjectedFailure(FailureKind.partition, Point.cell_done, duration_s=0.05, peers=frozenset({BOB}))],
        ANN,
    )
    assert injector.passes(Point.cell_done, 1) == []
    faults = injector.messages
    assert [faults.is_cut(other) for other in (BOB, CAT, None)] == [True, False, False]
    came: list[str] = []
    faults.send(BOB, lambda: came.append("lost"))
    faults.cut(InjectedFailure(FailureKind.partition, Point.cell_done, duration_s=0.1))
    assert all(faults.is_cut(other) for other in (BOB, CAT, None))
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(faults.wait_while_cut)
        assert not waiting.done()
        now_s[0] += 0.2
        waiting.result(60)
    assert not any(faults.is_cut(other) for other in (BOB, CAT, None))
    faults.send(BOB, lambda: came.append("there"))
    assert came == ["there"]


@pytest.mark.parametrize("point", list(Point), ids=lambda point: point.name)
def test_processes_can_die_at_every_point_and_words_go_wrong_at_all_of_theirs(point: Point) -> None:
    require_carried_out(
        [InjectedFailure(FailureKind.kill, point), InjectedFailure(FailureKind.stop, point, duration_s=1.0)]
    )
    if point.is_sending:
        assert point in (Point.tensor_sending, Point.log_sending) or point in SENDING.values()
        require_carried_out([InjectedFailure(FailureKind.drop, point)])


def test_every_message_has_a_point_for_its_sender_and_its_receiver() -> None:
    assert SENDING.keys() == RECEIVED.keys()
    for kind in SENDING:
        assert {SENDING[kind].role, RECEIVED[kind].role} == {"member", "coordinator"}


def test_what_only_the_simulated_world_knows_is_refused() -> None:
    for refused in (
        InjectedFailure(FailureKind.corrupt, Point.commit_sending),
        InjectedFailure(FailureKind.partition, Point.planning, duration_s=1.0),
    ):
        with pytest.raises(UserError, match="is not carried out in real processes"):
            require_carried_out([refused])


ROSTER = Membership(
    epoch=3,
    shards=((0, 1), (1, 2)),
    stages=((ANN, BOB, CAT), ("c-dan",)),
    owners=((ANN, BOB), ("c-dan", "c-dan")),
    step=1,
    tasks=fresh(((ANN, BOB), ("c-dan", "c-dan"))),
)


def test_a_member_that_misses_a_tensor_requests_another_epoch() -> None:
    machine = MemberMachine("c-dan", 0)
    assert machine.handle(Missed(0)) == []
    machine.handle(Halt(3, 0))
    assert machine.handle(Missed(3)) == []  # tensors that are missing now are sent again anyway
    machine.handle(Form(ROSTER))
    assert machine.handle(Missed(2)) == []
    assert machine.handle(Missed(3)) == [SendToCoordinator(Broken(3, "c-dan"))]
