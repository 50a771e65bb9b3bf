"""Pictures of predictions: exact over the whole split, however it is divided, and bounded."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import confusion_matrix

from share_compute.models.objective import Objective
from share_compute.training.metrics import Predictions
from share_compute.training.pictures import MOST_POINTS, picture_of


def part(predicted: list[float], wanted: list[float]) -> Predictions:
    numbers = [np.array(each, np.float32) for each in (predicted, wanted)]
    return Predictions(0.0, len(wanted), 0, *numbers)


@given(
    pairs=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=60),
    cut=st.integers(0, 60),
)
def test_a_confusion_matrix_is_that_of_scikit_learn(pairs: list[tuple[int, int]], cut: int) -> None:
    wanted, predicted = ([float(pair[place]) for pair in pairs] for place in (0, 1))
    objective = Objective(task="tabular_classification", classes=5)
    whole = picture_of([part(predicted, wanted)], objective)
    halves = [part(predicted[:cut], wanted[:cut]), part(predicted[cut:], wanted[cut:])]
    assert whole == picture_of(halves, objective)
    assert whole is not None
    assert whole.confusion is not None
    assert np.array_equal(whole.confusion, confusion_matrix(wanted, predicted, labels=range(5)))
    assert (whole.samples, whole.points, whole.classes) == (len(pairs), None, None)
    named = picture_of(halves, objective, ["a", "b", "c", "d", "e" * 100])
    assert named is not None
    assert named.classes is not None
    assert (named.confusion, named.classes[:4]) == (whole.confusion, ("a", "b", "c", "d"))
    assert len(named.classes[4]) <= 80


@pytest.mark.parametrize("count", [1, 2, MOST_POINTS, 5000])
def test_points_have_the_unit_of_the_target_and_are_few(count: int) -> None:
    wanted = [float(number) for number in range(count)]
    objective = Objective(task="tabular_regression", target_mean=10, target_scale=2)
    found = picture_of([part([each + 1 for each in wanted], wanted)], objective)
    assert found is not None
    assert found.points is not None
    assert len(found.points) == min(count, MOST_POINTS)
    assert found.points[0] == (10.0, 12.0)
    assert found.points[-1] == (10.0 + 2 * (count - 1), 12.0 + 2 * (count - 1))
    assert (found.samples, found.confusion) == (count, None)


def test_too_many_classes_text_and_infinite_numbers_have_none() -> None:
    wide = Objective(task="image_classification", classes=101)
    assert picture_of([part([0], [100])], wide) is None
    assert picture_of([part([], [])], Objective()) is None
    assert picture_of([part([float("inf")], [0])], Objective(task="tabular_regression")) is None
