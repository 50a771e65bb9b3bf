"""Losses equal torch's own, and metrics equal those of scikit-learn, however a split is divided."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics
from torch.nn import functional

from share_compute.errors import UserError
from share_compute.models.losses import loss_sum
from share_compute.models.objective import Objective
from share_compute.training.metrics import Predictions, figures_of
from share_compute_actors.messages import NUMBER
from share_compute_actors.training.member.evaluating import evaluated
from share_compute_actors.training.member.schemas import EVALUATION
from share_compute_actors.wire import Undeclared


def classes(loss: Any = "cross_entropy", count: int | None = None, **options: Any) -> Objective:
    return Objective(task="tabular_classification", loss=loss, classes=count, **options)


def drawn(rows: int, outputs: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(rows, outputs, generator=generator)
    return scores, torch.randint(max(outputs, 2), (rows,), generator=generator)


class TestLosses:
    def test_cross_entropy_with_smoothing_and_weights(self) -> None:
        scores, wanted = drawn(50, 4)
        smooth = loss_sum(scores, wanted, classes(label_smoothing=0.1))
        assert torch.equal(
            smooth, functional.cross_entropy(scores, wanted, reduction="sum", label_smoothing=0.1)
        )
        weights = (1.0, 0.5, 2.0, 3.0)
        weighted = loss_sum(scores, wanted, classes(count=4, class_weights=weights))
        expected = functional.cross_entropy(scores, wanted, weight=torch.tensor(weights), reduction="sum")
        assert torch.allclose(weighted, expected)

    def test_binary_cross_entropy(self) -> None:
        scores, wanted = drawn(50, 1)
        expected = functional.binary_cross_entropy_with_logits(scores[:, 0], wanted.float(), reduction="sum")
        assert torch.allclose(loss_sum(scores, wanted, classes("bce", 2)), expected)
        scores, wanted = drawn(50, 3)
        truth = functional.one_hot(wanted, 3).float()
        expected = functional.binary_cross_entropy_with_logits(scores, truth) * 50
        assert torch.allclose(loss_sum(scores, wanted, classes("bce", 3)), expected)

    def test_hinge(self) -> None:
        scores, wanted = drawn(50, 1)
        expected = metrics.hinge_loss(wanted.numpy(), scores[:, 0].numpy()) * 50
        assert float(loss_sum(scores, wanted, classes("hinge", 2))) == pytest.approx(expected, rel=1e-6)
        scores, wanted = drawn(50, 3)
        expected = functional.multi_margin_loss(scores, wanted, reduction="sum")
        assert torch.allclose(loss_sum(scores, wanted, classes("hinge", 3)), expected)

    def test_regression(self) -> None:
        outputs, wanted = torch.randn(9, 1), torch.randn(9)
        for name, loss in (("mse", functional.mse_loss), ("mae", functional.l1_loss)):
            objective = Objective(task="tabular_regression", loss=name)
            assert torch.equal(
                loss_sum(outputs, wanted, objective), loss(outputs[:, 0], wanted, reduction="sum")
            )

    @pytest.mark.parametrize(
        ("outputs", "objective", "hint"),
        [
            (torch.zeros(4, 3), classes(count=4), "end with 4 outputs, one for each class"),
            (torch.zeros(4, 1), classes(count=2), "end with 2 outputs, one for each class"),
            (torch.zeros(4, 3), classes("bce", 2), "end with 1 or 2 outputs for 2 classes"),
            (torch.zeros(4, 2, 1), classes(count=2), "end with 2 outputs"),
            (
                torch.zeros(4, 2),
                Objective(task="tabular_regression", loss="mse"),
                "1 output for a regression",
            ),
        ],
    )
    def test_outputs_that_do_not_fit(self, outputs: torch.Tensor, objective: Objective, hint: str) -> None:
        with pytest.raises(UserError, match="the model's last layer returns") as caught:
            loss_sum(outputs, torch.zeros(4, dtype=torch.int64), objective)
        assert hint in (caught.value.hint or "")


def parts_of(
    scores: torch.Tensor, wanted: torch.Tensor, objective: Objective, size: int
) -> list[Predictions]:
    return [
        evaluated(scores[at : at + size], wanted[at : at + size], objective, 100).predictions()
        for at in range(0, len(wanted), size)
    ]


class TestMetrics:
    def test_of_many_classes(self) -> None:
        scores, wanted = drawn(500, 7)
        objective = classes(count=7)
        found = figures_of(parts_of(scores, wanted, objective, 500), objective)
        guess, truth = scores.argmax(1).numpy(), wanted.numpy()
        odds = scores.double().softmax(1).numpy()
        assert found == {
            "validation_loss": pytest.approx(float(functional.cross_entropy(scores, wanted)), rel=1e-6),
            "accuracy": metrics.accuracy_score(truth, guess),
            "top_5_accuracy": metrics.top_k_accuracy_score(truth, odds, k=5),
            "f1": metrics.f1_score(truth, guess, average="macro"),
            "auroc": pytest.approx(metrics.roc_auc_score(truth, odds, multi_class="ovr"), abs=1e-12),
        }
        for size in (1, 64):
            again = figures_of(parts_of(scores, wanted, objective, size), objective)
            assert {**again, "validation_loss": 0} == {**found, "validation_loss": 0}
            assert again["validation_loss"] == pytest.approx(found["validation_loss"], rel=1e-6)

    @pytest.mark.parametrize(
        ("loss", "outputs"), [("cross_entropy", 2), ("bce", 1), ("hinge", 1), ("bce", 2)]
    )
    def test_of_two_classes(self, loss: str, outputs: int) -> None:
        scores, wanted = drawn(200, outputs)
        objective = classes(loss, 2)
        found = figures_of(parts_of(scores, wanted, objective, 64), objective)
        margin = scores[:, 0] if outputs == 1 else scores[:, 1] - scores[:, 0]
        truth = wanted.numpy()
        assert found["accuracy"] == metrics.accuracy_score(truth, (margin > 0).numpy())
        assert found["auroc"] == pytest.approx(
            metrics.roc_auc_score(truth, margin.double().numpy()), abs=1e-12
        )
        assert "top_5_accuracy" not in found

    def test_of_regressions_have_the_unit_of_the_target(self) -> None:
        objective = Objective(task="tabular_regression", loss="mae", target_mean=100.0, target_scale=20.0)
        outputs, wanted = torch.randn(90, 1), torch.randn(90)
        found = figures_of(parts_of(outputs, wanted, objective, 32), objective)
        guess, truth = outputs[:, 0].double().numpy() * 20 + 100, wanted.double().numpy() * 20 + 100
        assert found["rmse"] == metrics.root_mean_squared_error(truth, guess)
        assert found["mae"] == metrics.mean_absolute_error(truth, guess)
        assert found["r2"] == metrics.r2_score(truth, guess)

    def test_an_undefined_area_is_left_out(self) -> None:
        scores, wanted = drawn(20, 3)
        objective = classes(count=3)
        found = figures_of(parts_of(scores, wanted.clamp(max=1), objective, 20), objective)
        assert "auroc" not in found
        assert "f1" in found

    def test_too_many_outputs_are_not_sent(self) -> None:
        scores, wanted = drawn(20, 8)
        objective = classes(count=8)
        result = evaluated(scores, wanted, objective, 7)
        assert result.scores == b""
        found = figures_of([result.predictions()], objective)
        assert found["accuracy"] == metrics.accuracy_score(wanted, scores.argmax(1))
        assert {"top_5_accuracy", "f1"} <= found.keys()
        assert "auroc" not in found

    def test_results_that_the_task_does_not_have_are_recognised(self) -> None:
        scores, wanted = drawn(4, 3)
        objective = classes(count=3)
        result = evaluated(scores, wanted, objective, 9)
        assert result.fits(objective, 4)
        assert not result.fits(objective, 5)
        assert not result.fits(Objective(), 4)
        assert not replace(result, predicted=b"", wanted=b"", scores=b"").fits(objective, 4)
        assert replace(result, in_top_5=4).fits(objective, 4)
        assert not replace(result, in_top_5=5).fits(objective, 4)
        for wrong in (-1, 0.5, 3, np.nan, np.inf):
            numbers = np.full(4, wrong, NUMBER).tobytes()
            assert not replace(result, wanted=numbers).fits(objective, 4)
            assert not replace(result, predicted=numbers).fits(objective, 4)
        assert replace(result, scores=b"").fits(objective, 4)
        assert not replace(result, scores=bytes(4 * 4 * 4)).fits(objective, 4)
        assert replace(result, scores=np.full(12, -np.inf, NUMBER).tobytes()).fits(objective, 4)
        assert result.fits(classes(), 4)  # the number of classes is unknown, but not that of the scores
        assert not replace(result, wanted=np.full(4, 3, NUMBER).tobytes()).fits(classes(), 4)
        with pytest.raises(ValueError, match="not those of the targets"):
            replace(result, targets=5)
        received = EVALUATION.unpack(EVALUATION.pack({7: result}), "ada")
        assert received == {7: result}
        forged = EVALUATION.pack({7: result}).replace(b'"targets":4', b'"targets":5')
        with pytest.raises(Undeclared, match="not those of the targets"):
            EVALUATION.unpack(forged, "ada")

    def test_one_output_fits_two_classes_of_some_losses(self) -> None:
        scores, wanted = drawn(4, 1)
        assert evaluated(scores, wanted, classes("bce", 2), 9).fits(classes("bce", 2), 4)
        assert not evaluated(scores, wanted, classes("bce", 2), 9).fits(classes(count=2), 4)

    def test_numbers_are_finite_unless_the_loss_is_not(self) -> None:
        objective = Objective(task="tabular_regression", loss="mae")
        outputs, wanted = torch.tensor([[1.0], [torch.nan]]), torch.ones(2)
        diverged = evaluated(outputs, wanted, objective, 9)
        assert diverged.fits(objective, 2)
        assert not np.isfinite(figures_of([diverged.predictions()], objective)["validation_loss"])
        assert not replace(diverged, loss_sum=1.0).fits(objective, 2)
        assert not replace(diverged, loss_sum=1.0, predicted=diverged.wanted, scores=bytes(8)).fits(
            objective, 2
        )

    @pytest.mark.parametrize("outputs", [2, 3])
    def test_areas_of_high_scores_do_not_saturate(self, outputs: int) -> None:
        """Softmax rounds the probabilities of such scores to 0 and 1, where their order is lost."""
        high = 1000.0 + torch.arange(8.0)
        scores = torch.stack([high * 0, *[high * (place + 1) for place in range(outputs - 1)]], dim=1)
        wanted = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
        if outputs == 3:
            scores = torch.stack([high, -high, high * 2], dim=1)
            wanted = torch.tensor([0, 1, 0, 1, 0, 2, 2, 2])
        objective = classes(count=outputs)
        found = figures_of(parts_of(scores, wanted, objective, 3), objective)
        if outputs == 2:
            assert found["auroc"] == 1.0
        else:
            margins = [
                scores[:, one] - torch.cat([scores[:, :one], scores[:, one + 1 :]], 1).logsumexp(1)
                for one in range(3)
            ]
            areas = [metrics.roc_auc_score(wanted == one, margins[one]) for one in range(3)]
            assert found["auroc"] == pytest.approx(np.mean(areas))
            odds = scores.double().softmax(1)
            assert found["auroc"] != pytest.approx(metrics.roc_auc_score(wanted, odds, multi_class="ovr"))

    def test_of_language_models(self) -> None:
        parts = [
            Predictions(3.0, 2, 0, np.empty(0), np.empty(0)),
            Predictions(1.0, 2, 0, np.empty(0), np.empty(0)),
        ]
        assert figures_of(parts, Objective()) == {"validation_loss": 1.0, "perplexity": np.e}
