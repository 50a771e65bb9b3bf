"""Decisions that follow from the numbers of a step that all members prepared; without Ray."""

from __future__ import annotations

import pytest

from share_compute.protocol.messages import Prepared
from share_compute.specification import TrainingSpec
from share_compute.training.loss_scale import NotFinite
from share_compute_actors.training.coordinator.verdict import global_norm, judge

TRAINING = TrainingSpec(steps=1, batch_size=4)


def prepared(**squares: float) -> dict[str, Prepared]:
    return {"c0": Prepared(1, "c0", 1, squares, {0: 1.0})}


def test_each_parameter_counts_once() -> None:
    both = {**prepared(first=9.0, tied=16.0), "c1": Prepared(1, "c1", 1, {"tied": 16.0})}
    assert global_norm(both) == 5.0


@pytest.mark.parametrize("square", [1e308, float("inf"), float("nan")])
def test_a_norm_that_is_no_number_is_not_committed(square: float) -> None:
    with pytest.raises(NotFinite):
        judge(prepared(first=square, second=square), TRAINING, 1)
