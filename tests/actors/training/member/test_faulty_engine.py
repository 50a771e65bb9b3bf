"""A member's engine with injected faults fails as the script says, and otherwise works as the plain engine."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

import pytest
import torch
from tests.conftest import DEADLINE_S, wait_for

from share_compute.errors import ShareComputeError
from share_compute.protocol.failures import FailureKind, InjectedFailure
from share_compute.protocol.member import MemberMachine
from share_compute.protocol.messages import Halt, Report, ToCoordinator
from share_compute.protocol.points import Point
from share_compute.protocol.tree import SummationTree
from share_compute.specification import TrainingSpec
from share_compute_actors.messages import StepFigures
from share_compute_actors.testing.fault_injection import FaultInjector
from share_compute_actors.testing.faulty_training import FaultyEngine
from share_compute_actors.training.backups.copies import Copies
from share_compute_actors.training.backups.copy_quota import CopyQuota
from share_compute_actors.training.member.engine import TrainingEngine

UNEXPECTED_S = 0.5
"""Time in which a report arrives that must not."""


def _unreachable(*_: object) -> NoReturn:
    raise AssertionError("these members have no backups")


class Member:
    """An engine, and what it tells the coordinator.

    Args:
        failures: the failures to inject; None for an engine without any.
    """

    def __init__(self, failures: Sequence[InjectedFailure] | None) -> None:
        self.reported: queue.SimpleQueue[ToCoordinator | ShareComputeError] = queue.SimpleQueue()
        training = TrainingSpec(steps=1, microbatches=2)
        copies = Copies(
            "ann", training, torch.device("cpu"), self.reported.put, CopyQuota(0), reach=_unreachable
        )
        machine, tree = MemberMachine("ann", -1), SummationTree((2,))
        self.injector = FaultInjector(failures or (), "ann")
        parts = machine, tree, self._notify, copies, lambda _: None
        self.engine = TrainingEngine(*parts) if failures is None else FaultyEngine(self.injector, *parts)

    def _notify(self, message: ToCoordinator | ShareComputeError, _: StepFigures | None) -> None:
        self.reported.put(message)

    def halt(self) -> None:
        self.engine.receive(Halt(1, committed=0))

    def reports(self, expected: int) -> int:
        """Return the number of its reports: wait for as many as are expected, and briefly for another one."""
        received = 0
        with suppress(queue.Empty):
            while True:
                report = self.reported.get(timeout=DEADLINE_S if received < expected else UNEXPECTED_S)
                assert isinstance(report, Report)
                received += 1
        return received


@pytest.mark.parametrize("failures", [None, ()])
def test_without_failures_both_engines_answer_alike(failures: Sequence[InjectedFailure] | None) -> None:
    member = Member(failures)
    member.halt()
    assert member.reports(1) == 1
    assert member.engine.order(lambda: 7) == 7


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (InjectedFailure(FailureKind.drop, Point.report_sending), 0),
        (InjectedFailure(FailureKind.duplicate, Point.report_sending), 2),
        (InjectedFailure(FailureKind.delay, Point.report_sending, duration_s=0.2), 1),
    ],
)
def test_a_report_goes_wrong(failure: InjectedFailure, expected: int) -> None:
    member = Member([failure])
    member.halt()
    assert member.reports(expected) == expected


def test_a_member_that_is_cut_off_receives_and_sends_nothing_meanwhile() -> None:
    member = Member([InjectedFailure(FailureKind.partition, Point.halt_received, duration_s=1.0)])
    member.halt()
    wait_for(lambda: member.injector.messages.is_cut(None), "the cut, which the halt begins")
    assert member.engine.progress() == (-1, -1)
    assert member.reports(0) == 0, "the report was lost in the cut"
    member.halt()
    assert member.reports(1) == 1
