"""Job files of sparse models: their fields, and their errors."""

from __future__ import annotations

from typing import Any

import pytest

from share_compute.errors import UserError
from share_compute.specification import SparseJob, parse_any_job, parse_job, parse_submission, with_paths
from share_compute.specification.sparse.models import SPARSE_MODELS

FORMATS = {"matrix_factorization": ("ratings", "r.csv"), "lda": ("bags", "b.txt")}


def job(name: str = "logistic", *, data: dict[str, Any] | None = None, **training: Any) -> dict[str, Any]:
    kind, file = FORMATS.get(name, ("libsvm", "rows.libsvm"))
    return {
        "kind": "sparse",
        "model": {"name": name},
        "data": {"format": kind, "files": [f"/data/{file}"], **(data or {})},
        "training": training,
    }


def read(document: dict[str, Any]) -> SparseJob:
    spec = parse_any_job(document)
    assert isinstance(spec, SparseJob)
    return spec


def refused(document: dict[str, Any]) -> str:
    with pytest.raises(UserError) as caught:
        parse_submission(document)
    assert caught.value.hint
    problems = caught.value.details["fields"]
    return " ".join(f"{one['field']}: {one['problem']}" for one in problems)


@pytest.mark.parametrize("name", SPARSE_MODELS)
def test_each_model_has_defaults(name: str) -> None:
    spec = read(job(name))
    assert spec.model.name == name
    assert spec.is_dual == (name in ("ridge", "svm"))
    assert read(spec.model_dump(mode="json")) == spec


def test_a_job_uses_two_machines_for_each_range_and_one_for_each_worker() -> None:
    assert read(job(workers=5, servers=2)).machines_used == 5
    assert read(job(workers=1, servers=2)).machines_used == 3
    assert read(job("svm", workers=4)).machines_used == 4
    assert read(job(hogwild_threads=4)).machines_used == 1


def test_staleness_may_be_unbounded() -> None:
    assert read(job(staleness="unbounded")).training.bound is None
    assert read(job(staleness=3)).training.bound == 3


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (job(staleness="sometimes"), "give a whole number from 0, or unbounded"),
        (job(staleness=True), "give a whole number from 0, or unbounded"),
        (job(staleness=2, reproducible=True), "give staleness 0"),
        (job(hogwild_threads=4, reproducible=True), "cannot be promised with hogwild_threads"),
        (job(values="int8", reproducible=True), "leave out values"),
        (job(threshold=0.1, reproducible=True), "leave out threshold"),
        (job(hogwild_threads=4, workers=3), "leave out workers, or hogwild_threads"),
        (job("lda", hogwild_threads=4), "needs the sum of all rows"),
        (job("ridge", hogwild_threads=4), "keeps dual variables"),
        (job("svm", staleness="unbounded"), "training.staleness: svm is trained by CoCoA"),
        (job("ridge", values="int8"), "training.values: ridge is trained by CoCoA"),
        (job(target={"metric": "auroc", "value": 0.9}), "auroc is measured on data.validation_files"),
        (job(target={"metric": "duality_gap", "value": 0.9}), "logistic has no duality_gap"),
        (job("ridge", target={"metric": "auroc", "value": 0.9}), "choose duality_gap, validation_loss"),
        (job("svm", target={"metric": "duality_gap", "value": float("nan")}), "training.target.value"),
        (job("logistic", data={"format": "bags"}), "give data.format libsvm"),
        (job("matrix_factorization", data={"files": ["/r.txt"]}), "cannot read ratings of r.txt"),
        (job("matrix_factorization", data={"columns": ["u", "u", "r"]}), "names one column twice"),
        (job(data={"columns": ["u", "i", "r"]}), "for the format ratings only"),
        (job(data={"files": []}), "data.files"),
        (job("logistics"), "did you mean 'logistic'?"),
        (job(threshold=float("nan")), "training.threshold"),
        (job(passes=0), "training.passes"),
        (job(pases=1), "pases"),
    ],
)
def test_what_cannot_be_is_refused_with_its_field(document: dict[str, Any], said: str) -> None:
    assert said in refused(document)


def test_ridge_needs_regularisation() -> None:
    document = job("ridge")
    document["model"]["l2"] = 0
    assert "model.l2" in refused(document)


def test_paths_are_found_and_replaced() -> None:
    spec = with_paths(
        read(job(data={"validation_files": ["/data/v"]})), lambda path, _: path.with_suffix(".new")
    )
    assert [file.name for file in (*spec.data.files, *spec.data.validation_files)] == ["rows.new", "v.new"]


def test_planner_and_simulator_refuse_in_words() -> None:
    with pytest.raises(UserError, match="no plan of stages") as caught:
        parse_job(job())
    assert caught.value.hint
