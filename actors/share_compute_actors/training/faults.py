"""The only module through which real jobs use fault injection, which installed packages lack."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

from share_compute.protocol.failures import InjectedFailure
from share_compute.protocol.membership import Worker

Parameters = ParamSpec("Parameters")
Made = TypeVar("Made")


def with_faults(
    plain: Callable[Parameters, Made], failures: Sequence[InjectedFailure], worker: Worker | None = None
) -> Callable[Parameters, Made]:
    """Return ``plain``, or a factory of its subclass that injects failures if there are any.

    Args:
        plain: `Conductor` or `TrainingEngine`.
        failures: the failure script of the attempt.
        worker: the member that runs in this process; None for the coordinator.
    """
    if not failures:
        return plain
    testing = importlib.import_module("share_compute_actors.testing.faulty_training")
    made: Callable[Parameters, Made] = testing.faulty(plain, failures, worker)
    return made
