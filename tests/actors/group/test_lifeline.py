"""A process that receives no calls ends itself; one that receives calls does not."""

from __future__ import annotations

import threading
import time

from share_compute_actors.group.lifeline import Lifeline


def test_without_questions() -> None:
    ended = threading.Event()
    Lifeline(0.01, ended.set)
    assert ended.wait(10.0)


def test_with_a_question() -> None:
    ended = threading.Event()
    line = Lifeline(1.0, ended.set)
    enough_s = time.monotonic() + 1.5
    while time.monotonic() < enough_s:
        line.pull()
        assert not ended.wait(0.01)
    line.cut()
