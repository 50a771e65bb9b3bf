"""A member keeps what its coordinator has not acknowledged, so that heartbeats can repeat it."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from tests.conftest import wait_for

from share_compute_actors.training.member import unacknowledged
from share_compute_actors.training.member.unacknowledged import Unacknowledged

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]
KEY = bytes(range(240, 256))


@ray.remote(num_cpus=0, concurrency_groups={"mail": 1, "control": 1})
class Receiver:
    """An actor that answers a call when `answer` is called."""

    def __init__(self) -> None:
        self._may_answer = threading.Event()

    @ray.method(concurrency_group="mail")
    def receive(self) -> None:
        self._may_answer.wait(60.0)

    @ray.method(concurrency_group="control")
    def answer(self) -> None:
        self._may_answer.set()


def test_messages_are_repeated_until_they_are_acknowledged(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(unacknowledged, "time", SimpleNamespace(monotonic=lambda: now_s))
    receiver: Any = Receiver.remote()  # type: ignore[attr-defined]
    kept = Unacknowledged()
    kept.add(receiver.receive.remote(), KEY, b"first")
    kept.add(receiver.receive.remote(), KEY, b"second")
    assert kept.overdue() == (), "they were sent a moment ago"
    now_s += 1.0
    assert kept.overdue() == ((KEY, b"first"), (KEY, b"second"))
    ray.get(receiver.answer.remote())
    wait_for(lambda: kept.overdue() == (), "their acknowledgement")
    ray.kill(receiver)


def test_messages_whose_call_failed_are_repeated_until_another_coordinator_calls() -> None:
    receiver: Any = Receiver.remote()  # type: ignore[attr-defined]
    kept = Unacknowledged()
    kept.add(receiver.receive.remote(), KEY, b"lost")
    ray.kill(receiver)
    wait_for(lambda: kept.overdue() == ((KEY, b"lost"),), "the message")
    kept.clear()
    assert kept.overdue() == ()
