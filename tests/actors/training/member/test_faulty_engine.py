"""A member's engine with injected faults fails as the script says, and otherwise works as the plain engine."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from typing import NoReturn

import pytest
import torch

from share_compute.errors import ShareComputeError
from share_compute.protocol.failures import FailureKind, InjectedFailure
from share_compute.protocol.member import MemberMachine
from share_compute.protocol.messages import Halt, ToCoordinator
from share_compute.protocol.points import Point
from share_compute.protocol.tree import SummationTree
from share_compute.specification import TrainingSpec
from share_compute_actors.messages import StepFigures
from share_compute_actors.testing.fault_injection import FaultInjector
from share_compute_actors.testing.faulty_training import FaultyEngine
from share_compute_actors.training.backups.copies import Copies
from share_compute_actors.training.backups.copy_quota import CopyQuota
from share_compute_actors.training.member.engine import TrainingEngine


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
        parts = machine, tree, self._notify, copies, lambda _: None
        self.engine = (
            TrainingEngine(*parts)
            if failures is None
            else FaultyEngine(FaultInjector(failures, "ann"), *parts)
        )

    def _notify(self, message: ToCoordinator | ShareComputeError, _: StepFigures | None) -> None:
        self.reported.put(message)

    def answers(self, wait_s: float) -> list[str]:
        """Halt the member, and return the kinds of its answers until none comes for this time."""
        self.engine.receive(Halt(1, committed=0))
        kinds = []
        while True:
            try:
                kinds.append(type(self.reported.get(timeout=wait_s)).__name__)
            except queue.Empty:
                return kinds


@pytest.mark.parametrize("failures", [None, ()])
def test_without_failures_both_engines_answer_alike(failures: Sequence[InjectedFailure] | None) -> None:
    member = Member(failures)
    assert member.answers(2.0) == ["Report"]
    assert member.engine.order(lambda: 7) == 7


@pytest.mark.parametrize(
    ("failure", "answers"),
    [
        (InjectedFailure(FailureKind.drop, Point.report_sending), []),
        (InjectedFailure(FailureKind.duplicate, Point.report_sending), ["Report"] * 2),
        (InjectedFailure(FailureKind.delay, Point.report_sending, duration_s=0.2), ["Report"]),
    ],
)
def test_a_report_goes_wrong(failure: InjectedFailure, answers: list[str]) -> None:
    assert Member([failure]).answers(2.0) == answers


def test_a_member_that_is_cut_off_receives_and_sends_nothing_meanwhile() -> None:
    member = Member([InjectedFailure(FailureKind.partition, Point.halt_received, duration_s=1.0)])
    assert member.answers(0.5) == []  # its report is lost in the cut that the first halt began
    assert member.engine.progress() == (-1, -1)
    assert member.answers(2.0) == ["Report"]
