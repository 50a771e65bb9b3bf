"""Schedule reduce_on_plateau: equal to torch's, a function of the validations alone, refused where it cannot work."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from share_compute.errors import UserError
from share_compute.specification import Metric, PlateauOptions, TrainJob, parse_job
from share_compute.specification.task import RISING
from share_compute.training.plateau import Plateau

METRICS: tuple[Metric, ...] = ("validation_loss", "accuracy", "rmse")
values = st.lists(st.none() | st.floats(-10, 10) | st.sampled_from([0.0, 0.5, 1.0]), max_size=40)
options = st.builds(
    PlateauOptions,
    metric=st.sampled_from(METRICS),
    factor=st.floats(0.05, 0.999),
    patience=st.integers(0, 4),
    threshold=st.sampled_from([0.0, 1e-4, 0.1, 1.0]),
    threshold_mode=st.sampled_from(["rel", "abs"]),
    cooldown=st.integers(0, 4),
    min_lr=st.sampled_from([0.0, 1e-3, 0.2]),
)


@given(chosen=options, seen=values, rate=st.floats(1e-6, 1.0))
def test_it_is_what_torch_does(chosen: PlateauOptions, seen: list[float | None], rate: float) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=rate)
    peer = ReduceLROnPlateau(
        optimizer,
        mode="max" if chosen.metric in RISING else "min",
        **chosen.model_dump(exclude={"metric"}),
    )
    state = Plateau(chosen, rate)
    for value in seen:
        peer.step(float("nan") if value is None else value)
        state = state.after({} if value is None else {chosen.metric: value})
        assert state.rate == optimizer.param_groups[0]["lr"]


@given(chosen=options, seen=values, cut=st.integers(0, 40))
def test_a_resumed_job_has_the_same_state(chosen: PlateauOptions, seen: list[float | None], cut: int) -> None:
    validations: list[tuple[int, dict[Metric, float]]] = [
        (step, {} if value is None else {chosen.metric: value}) for step, value in enumerate(seen)
    ]
    state = Plateau(chosen, 0.5)
    resumed = state.after_all(validations[:cut]).after_all(validations[cut:])
    assert resumed == state.after_all(validations)


def job(options: dict[str, Any], **training: Any) -> TrainJob:
    layers = [{"type": "linear", "options": {"in_features": 64, "out_features": 10}}]
    schedule = {"name": "reduce_on_plateau", "options": options}
    return parse_job(
        {
            "model": {"layers": layers},
            "data": {"dataset": "digits"},
            "training": {"validate_every": 2, "schedule": schedule, **training},
        }
    )


def test_options_are_those_of_torch() -> None:
    found = job(
        {"metric": "accuracy", "factor": 0.5, "patience": 0, "min_lr": 1e-5}
    ).training.schedule.plateau
    assert found == PlateauOptions(metric="accuracy", factor=0.5, patience=0, min_lr=1e-5)
    assert parse_job(job({}).model_dump(mode="json")) == job({})


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"metric": "rmse"}, "training.schedule.options.metric rmse is no metric of image_classification"),
        ({"metric": "acuracy"}, "options.metric"),
        ({"factor": 1.0}, "options.factor"),
        ({"factor": "half"}, "options.factor"),
        ({"patience": 1.5}, "options.patience"),
        ({"patience": -1}, "options.patience"),
        ({"threshold_mode": "relative"}, "options.threshold_mode"),
        ({"min_lr": -1.0}, "options.min_lr"),
        ({"patient": 3}, "did you mean 'patience'"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        job(options)


def test_options_with_which_the_rate_cannot_change_are_refused() -> None:
    with pytest.raises(UserError, match=r"options\.min_lr 0\.1 must be below optimizer\.learning_rate 0\.1"):
        job({"min_lr": 0.1}, optimizer={"learning_rate": 0.1})
    job({"min_lr": 0.09}, optimizer={"learning_rate": 0.1})
    for every in (4, 5):
        with pytest.raises(UserError, match=rf"validate_every {every} must be below steps 4"):
            job({}, validate_every=every, steps=4)
    job({}, validate_every=3, steps=4)
    with pytest.raises(UserError, match=r"options\.threshold 1 must be below 1: validation_loss cannot fall"):
        job({"threshold": 1})
    for options in ({"threshold_mode": "abs"}, {"metric": "accuracy"}):
        job({"threshold": 1, **options})


def test_it_needs_validations_of_common_weights() -> None:
    with pytest.raises(UserError, match=r"schedule\.name reduce_on_plateau needs validate_every"):
        job({}, validate_every=None)
    rounds = {"kind": "local", "branches": 2, "every": 2}
    with pytest.raises(
        UserError, match=r"schedule\.name reduce_on_plateau needs synchronization \{kind: allr"
    ):
        job({}, synchronization=rounds)
    layers = [{"type": "linear", "options": {"in_features": 64, "out_features": 10}}]
    schedule = {"name": "reduce_on_plateau"}
    with pytest.raises(UserError, match=r"training\.schedule needs samples to validate on"):
        parse_job(
            {
                "model": {"layers": layers},
                "data": {"dataset": "digits", "validation_fraction": 0},
                "training": {"validate_every": 2, "schedule": schedule},
            }
        )
