"""Jobs that end at a metric are refused if their validations can never have this metric."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from share_compute.data import prepare
from share_compute.data.samples import DigitSamples
from share_compute.errors import UserError
from share_compute.models.objective import objective_of
from share_compute.specification import parse_job
from share_compute.training import metric_checks
from share_compute.training.metric_checks import require_metrics
from share_compute_actors.training.shard_store import require_unchanged

LAYERS = {"layers": [{"type": "linear", "options": {"in_features": 1, "out_features": 1}}]}


def write(file: Path, rows: Sequence[tuple[float, Any]]) -> str:
    file.write_text("x,y\n" + "".join(f"{x},{y}\n" for x, y in rows))
    return str(file)


def check(
    folder: Path, metric: str, *, validation: Sequence[tuple[float, Any]], regression: bool = False
) -> None:
    """Check a job on ten rows of two classes."""
    training = [(number, number % 2) for number in range(10)]
    data: dict[str, Any] = {
        "files": [write(folder / "a.csv", training)],
        "table": {"target": "y"},
        "test_fraction": 0,
    }
    if validation:
        data["validation_files"] = [write(folder / "b.csv", validation)]
    for ending in (
        {"early_stopping": {"metric": metric}},
        {"target": {"metric": metric, "value": 0.5}},
        {"schedule": {"name": "reduce_on_plateau", "options": {"metric": metric}}},
    ):
        spec = parse_job(
            {
                "task": "tabular_regression" if regression else "tabular_classification",
                "model": LAYERS,
                "data": data,
                "training": {"validate_every": 1, **ending},
            }
        )
        prepared = prepare(spec, folder / "prepared")
        assert prepared.objective is not None
        require_metrics(spec, prepared.objective, prepared.samples)


TWO: Sequence[tuple[float, Any]] = [(1, 0), (2, 1)]


def test_metrics_that_are_defined(tmp_path: Path) -> None:
    for metric in ("validation_loss", "accuracy", "f1", "auroc"):
        check(tmp_path, metric, validation=TWO)
    for metric in ("rmse", "mae", "r2"):
        check(tmp_path, metric, validation=TWO, regression=True)


def test_metrics_that_are_never_defined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        UserError, match="top_5_accuracy is never defined: the data has 2 classes, and it needs"
    ):
        check(tmp_path, "top_5_accuracy", validation=TWO)
    with pytest.raises(UserError, match=r"auroc is never defined: .* samples of only 1 of 2 classes"):
        check(tmp_path, "auroc", validation=[*TWO[:1], *TWO[:1]])
    with pytest.raises(UserError, match="r2 is never defined: the validation split has one sample"):
        check(tmp_path, "r2", validation=TWO[:1], regression=True)
    with pytest.raises(UserError, match=r"early_stopping needs .*, but the validation split is empty"):
        check(tmp_path, "accuracy", validation=[])
    monkeypatch.setattr(metric_checks, "MOST_SCORES", 3)
    with pytest.raises(
        UserError, match="auroc is never defined: 2 samples with 2 outputs are more than 3 outputs"
    ):
        check(tmp_path, "auroc", validation=TWO)


def test_classes_of_the_digits() -> None:
    spec = parse_job(
        {
            "model": LAYERS,
            "data": {"dataset": "digits"},
            "training": {"validate_every": 1, "target": {"metric": "auroc", "value": 1}},
        }
    )
    require_metrics(spec, objective_of(spec), DigitSamples.load(0, 0.05, 0.05))
    with pytest.raises(UserError, match=r"samples of only \d of 10 classes"):
        require_metrics(spec, objective_of(spec), DigitSamples.load(0, 0.002, 0.05))


def test_a_checkpoint_of_other_data_is_refused(tmp_path: Path) -> None:
    def digest(rows: Sequence[tuple[float, Any]]) -> str | None:
        spec = parse_job(
            {
                "task": "tabular_classification",
                "model": LAYERS,
                "data": {"files": [write(tmp_path / "a.csv", rows)], "table": {"target": "y"}},
            }
        )
        return prepare(spec, tmp_path / "prepared").digest

    rows: Sequence[tuple[float, Any]] = [(1, "a"), (2, "b"), (4, "a"), (8, "b")]
    state = {"train_samples": 4, "data": digest(rows)}
    assert state["data"] is not None
    require_unchanged(state, 4, digest(rows))
    require_unchanged({"train_samples": 4}, 4, None)
    for edited in ([(3, "a"), *rows[1:]], [(1, "c"), (2, "b"), (4, "c"), (8, "b")]):
        with pytest.raises(UserError, match="the data has changed: its encoding"):
            require_unchanged(state, 4, digest(edited))
    with pytest.raises(UserError, match="the data has changed: 5 training samples now, 4 at the checkpoint"):
        require_unchanged(state, 5, digest(rows))
