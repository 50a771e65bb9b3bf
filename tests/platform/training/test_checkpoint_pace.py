"""Checkpoints by time: their interval, and how it grows with their cost."""

from __future__ import annotations

import pytest

from share_compute.training.checkpoint_pace import CheckpointPace


def test_the_first_is_due_after_one_interval() -> None:
    pace = CheckpointPace(180.0, begun_s=1000.0)
    assert not pace.is_due(1179.9)
    assert pace.is_due(1180.0)


def test_one_that_was_made_for_another_reason_puts_the_next_off() -> None:
    pace = CheckpointPace(180.0, begun_s=0.0).began(170.0)
    assert not pace.is_due(340.0)
    assert pace.is_due(350.0)


@pytest.mark.parametrize(
    ("paused_s", "writing_s", "period_s"),
    [(1.0, 10.0, 180.0), (30.0, 30.0, 600.0), (1.0, 100.0, 400.0), (60.0, 1000.0, 4000.0)],
)
def test_costly_ones_come_less_often(paused_s: float, writing_s: float, period_s: float) -> None:
    begun_s = 500.0
    pace = CheckpointPace(180.0, 0.0).began(begun_s).paused(paused_s).written(begun_s + writing_s)
    assert pace.period_s == pytest.approx(period_s)
    assert paused_s <= 0.05 * pace.period_s + 1e-9
    # A cheap checkpoint afterwards restores the interval.
    assert pace.began(9000.0).paused(0.1).written(9001.0).period_s == 180.0
