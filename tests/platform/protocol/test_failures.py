"""Scripts of failures."""

from __future__ import annotations

from typing import Any

import pytest

from share_compute.errors import UserError
from share_compute.protocol.failures import FailureKind, FailureScript, InjectedFailure
from share_compute.protocol.points import Point


def test_each_failure_happens_once_where_and_when_it_was_requested() -> None:
    kill = InjectedFailure(FailureKind.kill, Point.cell_done, "b", step=2, occurrence=2)
    script = FailureScript([kill])
    assert script.passes(Point.cell_done, "a", 2) == []
    assert script.passes(Point.cell_done, "b", 1) == []
    assert script.passes(Point.cell_starting, "b", 2) == []
    assert script.passes(Point.cell_done, "b", 2) == []
    assert script.passes(Point.cell_done, "b", 2) == [kill]
    assert script.passes(Point.cell_done, "b", 2) == []
    assert script.waiting == ()


def test_whoever_comes_first_is_meant_where_nobody_is_named() -> None:
    drop = InjectedFailure(FailureKind.drop, Point.commit_sending)
    script = FailureScript([drop])
    assert script.waiting == (drop,)
    assert script.passes(Point.commit_sending, None, 7) == [drop]


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"kind": FailureKind.drop, "point": Point.cell_done}, "nothing is sent at cell_done"),
        ({"kind": FailureKind.kill, "point": Point.planning, "worker": "a"}, "coordinator"),
        ({"kind": FailureKind.stop, "point": Point.cell_done}, "stop of 0"),
        ({"kind": FailureKind.kill, "point": Point.cell_done, "duration_s": 1.0}, "kill of 1"),
        ({"kind": FailureKind.kill, "point": Point.cell_done, "occurrence": 0}, "occurrence 0"),
        ({"kind": FailureKind.kill, "point": Point.cell_done, "peers": frozenset("a")}, "no peers"),
    ],
)
def test_what_does_not_go_together_is_refused(given: dict[str, Any], what: str) -> None:
    with pytest.raises(UserError, match=what) as refusal:
        InjectedFailure(**given)
    assert refusal.value.hint
