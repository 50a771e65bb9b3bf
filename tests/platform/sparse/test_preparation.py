"""Rows are read once, checked, and divided among workers; models are measured on other rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score
from tests.platform.sparse.serial import read_prepared

from share_compute.errors import Unavailable, UserError, VerificationFailed
from share_compute.sparse import preparation
from share_compute.sparse.blocks import RawRows, block_of, joined
from share_compute.sparse.jobs import (
    check_first_rows,
    dual_problem_of,
    require_memory,
    settings_of,
    target_kind,
    worker_memory_bytes,
)
from share_compute.sparse.keys import PlaceCounter, places_of
from share_compute.sparse.measuring.evaluation import dual_evaluated, evaluated, of_classes
from share_compute.sparse.models import Logistic, MatrixFactorization
from share_compute.sparse.preparation import Targets, deal_out, measured_blocks, read_rows
from share_compute.sparse.progress import RunProgress, WorkerProgress
from share_compute.sparse.readers.prepared import rows_bytes, rows_of
from share_compute.sparse.settings import SparseSettings
from share_compute.sparse.table import RowValues
from share_compute.sparse.topics import TopicModel
from share_compute.specification import SparseJob, parse_any_job
from share_compute.topology import Contributor, Device

COLUMNS = ("user", "item", "rating")


def spec_of(name: str, file: Path, kind: str = "libsvm", **training: object) -> SparseJob:
    spec = parse_any_job(
        {
            "kind": "sparse",
            "model": {"name": name},
            "data": {"format": kind, "files": [str(file)]},
            "training": training,
        }
    )
    assert isinstance(spec, SparseJob)
    return spec


def libsvm(folder: Path, rows: int) -> Path:
    file = folder / "rows.libsvm"
    file.write_text("".join(f"{row % 2} {row}:1 {row + 100}:{row / 8}\n" for row in range(rows)))
    return file


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_each_row_goes_to_one_worker(tmp_path: Path, workers: int) -> None:
    rows = read_rows([libsvm(tmp_path, 20)], "libsvm", COLUMNS, Targets("zero_one"))
    prepared = deal_out(rows, workers, tmp_path)
    assert prepared.num_rows == 20
    assert prepared.mean == 0.5
    for worker, names in enumerate(prepared.files):
        found = joined(read_prepared(tmp_path, names))
        assert found.keys[::2].tolist() == list(range(worker, 20, workers))
        assert found.values[1::2].tolist() == [row / 8 for row in range(worker, 20, workers)]
        assert found.targets.tolist() == [row % 2 for row in range(worker, 20, workers)]
        assert prepared.minibatches(worker, 4) == -(-len(found) // 4)


def test_rows_of_several_blocks_are_dealt_out_in_turn(tmp_path: Path) -> None:
    rows = read_rows([libsvm(tmp_path, 7), libsvm(tmp_path, 7)], "libsvm", COLUMNS, Targets("zero_one"))
    prepared = deal_out(rows, 3, tmp_path)
    found = [joined(read_prepared(tmp_path, names)).keys[::2].tolist() for names in prepared.files]
    assert found == [[0, 3, 6, 2, 5], [1, 4, 0, 3, 6], [2, 5, 1, 4]]


def test_rows_of_many_workers_do_not_wait_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "MOST_BUFFERED", 40)
    rows = read_rows([libsvm(tmp_path, 9)] * 3, "libsvm", COLUMNS, Targets("zero_one"))
    prepared = deal_out(rows, 3, tmp_path)
    assert [len(names) for names in prepared.files] == [2, 2, 2]
    found = [joined(read_prepared(tmp_path, names)).keys[::2].tolist() for names in prepared.files]
    assert found == [list(range(worker, 9, 3)) * 3 for worker in range(3)]


def test_the_disk_is_not_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "KEPT_FREE_BYTES", 1 << 60)
    rows = read_rows([libsvm(tmp_path, 20)], "libsvm", COLUMNS, Targets("zero_one"))
    with pytest.raises(Unavailable, match="do not fit on the disk"):
        deal_out(rows, 2, tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))


def test_keys_are_counted_about(tmp_path: Path) -> None:
    rows = read_rows([libsvm(tmp_path, 20)] * 2, "libsvm", COLUMNS, Targets("zero_one"))
    assert deal_out(rows, 2, tmp_path).keys == 40
    counter = PlaceCounter()
    for first in range(0, 100_000, 1000):
        counter.add(places_of(np.arange(first, first + 2000, dtype=np.uint64)))
    assert counter.count == pytest.approx(101_000, rel=0.06)


def machines(count: int, gib: int) -> list[Contributor]:
    return [
        Contributor(f"c{number}", f"box-{number}", (Device("cpu", "cpu", gib << 30),))
        for number in range(count)
    ]


@pytest.mark.parametrize(
    ("name", "training", "hint"),
    [("svm", {"workers": 4}, "training.workers"), ("logistic", {"hogwild_threads": 2}, "hogwild_threads")],
)
def test_workers_that_do_not_fit_are_refused(
    tmp_path: Path, name: str, training: dict[str, Any], hint: str
) -> None:
    spec = spec_of(name, libsvm(tmp_path, 40), **training)
    rows = read_rows(spec.data.files, "libsvm", COLUMNS, Targets(target_kind(spec)))
    workers = training.get("workers", 1)
    prepared = deal_out(rows, workers, tmp_path)
    assert sum(prepared.entries) == 80
    require_memory(spec, machines(2, 1), prepared)
    large = replace(prepared, entries=(25_000_000,) * workers)
    require_memory(spec, machines(4, 2), large)
    with pytest.raises(
        UserError, match=r"box-0 lends 1.0 GiB of memory, but its part of .* entries"
    ) as caught:
        require_memory(spec, machines(1, 1), replace(prepared, entries=(30_000_000,) * workers))
    assert hint in (caught.value.hint or "")


def test_ranges_that_do_not_fit_are_refused() -> None:
    settings = SparseSettings("factorization_machine", workers=4, ranges=1, factors=8)
    with pytest.raises(
        UserError, match=r"machine box-0 lends 8.0 GiB.*100000000 rows of weights needs"
    ) as caught:
        worker_memory_bytes(settings, machines(2, 8), 100_000_000)
    assert "training.servers" in (caught.value.hint or "")
    assert worker_memory_bytes(settings, machines(2, 64), 1000) == 2 << 30
    small = worker_memory_bytes(settings, machines(1, 1), 1000)
    assert (1 << 30) / 8.1 < small < (1 << 30) / 8, "four workers share half of what the range leaves"
    assert worker_memory_bytes(settings, machines(4, 1), 1000) > 3.9 * small


def test_fewer_rows_than_workers_are_refused(tmp_path: Path) -> None:
    rows = read_rows([libsvm(tmp_path, 2)], "libsvm", COLUMNS, Targets("zero_one"))
    with pytest.raises(UserError, match="2 rows for 3 workers"):
        deal_out(rows, 3, tmp_path)


def test_kinds_of_entries_survive() -> None:
    rows = RawRows(
        np.array([0, 2]),
        np.array([1, 1], np.uint64),
        np.ones(2),
        np.array([4.5]),
        np.array([False, True]),
    )
    found = rows_of(rows_bytes(rows))
    assert found.is_second is not None
    assert found.is_second.tolist() == [False, True]
    assert block_of(found).places.tolist() == block_of(rows).places.tolist()
    with pytest.raises(VerificationFailed):
        rows_of(rows_bytes(rows)[:-1])


@pytest.mark.parametrize(
    ("kind", "written", "expected"),
    [
        ("zero_one", [-1, 1], [0, 1]),
        ("zero_one", [0, 1], [0, 1]),
        ("signs", [0, 1], [-1, 1]),
        ("numbers", [2.5, -7], [2.5, -7]),
    ],
)
def test_classes_get_the_numbers_of_the_model(kind: str, written: list[float], expected: list[float]) -> None:
    rows = RawRows(np.arange(3), np.arange(2, dtype=np.uint64), np.ones(2), np.array(written, float))
    assert Targets(kind).converted(rows, Path("a")).targets.tolist() == expected  # type: ignore[arg-type]


def test_a_third_class_is_refused_also_in_a_later_block(tmp_path: Path) -> None:
    file = tmp_path / "rows.libsvm"
    file.write_text("1 1:1\n0 1:1\n")
    other = tmp_path / "more.libsvm"
    other.write_text("-1 1:1\n")
    rows = read_rows([file, other], "libsvm", COLUMNS, Targets("zero_one"))
    with pytest.raises(UserError, match=r"more.libsvm has targets -1, 0, 1") as caught:
        list(rows)
    assert "0 and 1" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1 -3:1\n", "line 1: key -3 is negative"),
        ("1 9223372036854775808:1\n", "line 1: key 9223372036854775808 is not below 2^63"),
        ("1 3:nan\n", "line 1: a value is NaN"),
        ("2 3:1\n", "has targets 2"),
    ],
)
def test_first_rows_are_checked_before_a_job_is_queued(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "rows.libsvm"
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        check_first_rows(spec_of("logistic", file))
    assert said in caught.value.message
    assert caught.value.hint


def test_settings_follow_from_job_and_rows(tmp_path: Path) -> None:
    ratings = tmp_path / "ratings.csv"
    ratings.write_text("user,item,rating\n1,1,4\n2,1,5\n")
    spec = spec_of("matrix_factorization", ratings, "ratings", staleness="unbounded")
    rows = read_rows([ratings], "ratings", COLUMNS, Targets(target_kind(spec)))
    settings = settings_of(spec, deal_out(rows, 2, tmp_path))
    assert (settings.model, settings.mean, settings.staleness) == ("matrix_factorization", 4.5, None)
    bags = tmp_path / "docword.txt"
    bags.write_text("3\n2\n3\n1 1 2\n2 1 1\n3 2 1\n")
    spec = spec_of("lda", bags, "bags")
    prepared = deal_out(read_rows([bags], "bags", COLUMNS, Targets(target_kind(spec))), 2, tmp_path)
    assert (settings_of(spec, prepared).model, settings_of(spec, prepared).documents) == ("topics", 3)
    file = libsvm(tmp_path, 6)
    spec = spec_of("svm", file)
    prepared = deal_out(read_rows([file], "libsvm", COLUMNS, Targets(target_kind(spec))), 2, tmp_path)
    assert (dual_problem_of(spec, prepared).loss, dual_problem_of(spec, prepared).rows) == ("hinge", 6)


def test_metrics_of_classes_equal_those_of_scikit_learn() -> None:
    draw = np.random.default_rng(0)
    targets = (draw.random(200) < 0.4).astype(float)
    scores = np.round(draw.normal(size=200) + targets, 1)  # rounded, so that there are ties
    found = of_classes(0.5, scores, targets)
    assert found.auroc == pytest.approx(roc_auc_score(targets, scores))
    assert found.accuracy == np.mean((scores > 0) == (targets > 0))
    assert of_classes(0.5, scores, np.ones(200)).auroc is None


def test_models_are_measured_also_with_unknown_keys(tmp_path: Path) -> None:
    [block] = measured_blocks(
        read_rows([libsvm(tmp_path, 6)], "libsvm", COLUMNS, Targets("zero_one")), with_bias=True
    )
    known = RowValues(block.places[::2], np.ones((len(block.places[::2]), 1), np.float32))
    weights = np.zeros((len(block.places), 1), np.float32)
    weights[::2] = 1
    found = evaluated(Logistic(), known, [block])
    assert found.loss == pytest.approx(Logistic().loss(block, weights) / 6)
    empty = RowValues(np.empty(0, np.uint64), np.empty((0, 1), np.float32))
    assert evaluated(Logistic(), empty, [block]).loss == pytest.approx(np.log(2))
    found = dual_evaluated("squared", block.places, np.zeros(len(block.places)), [block])
    assert found.rmse == pytest.approx(np.sqrt(0.5))
    assert found.mae == pytest.approx(0.5)
    assert dual_evaluated("hinge", block.places, np.zeros(len(block.places)), [block]).loss == 1.0


def test_ratings_and_topics_are_measured(tmp_path: Path) -> None:
    ratings = tmp_path / "ratings.csv"
    ratings.write_text("user,item,rating\n1,1,4\n2,1,6\n")
    [block] = measured_blocks(read_rows([ratings], "ratings", COLUMNS, Targets("numbers")), with_bias=False)
    empty = RowValues(np.empty(0, np.uint64), np.empty((0, 3), np.float32))
    found = evaluated(MatrixFactorization(2, mean=5.0), empty, [block])
    assert (found.rmse, found.mae, found.loss) == (1.0, 1.0, 0.5)
    bags = tmp_path / "docword.txt"
    bags.write_text("2\n2\n2\n1 1 2\n2 2 1\n")
    blocks = measured_blocks(read_rows([bags], "bags", COLUMNS, Targets("none")), with_bias=False)
    places = np.unique(np.concatenate([block.places for block in blocks]))
    rows = RowValues(places, np.array([[10, 0.1], [0.1, 10]], np.float32))
    found = evaluated(TopicModel(2, 0.1, 0.1), rows, blocks)
    assert found.perplexity is not None
    assert 1 < found.perplexity < 4


def test_progress_counts_the_slowest_worker_and_survives_a_restart() -> None:
    progress = RunProgress([10, 12])
    assert progress.total_steps == 12
    assert progress.next_step() is None
    progress.seen(0, WorkerProgress(4, 40, 20.0))
    assert progress.next_step() is None
    progress.seen(1, WorkerProgress(3, 30, 15.0))
    step = progress.next_step()
    assert step is not None
    assert (step.step, step.examples, step.loss) == (3, 70, 0.5)
    assert progress.next_step() is None
    progress.seen(1, WorkerProgress(5, 10, 3.0))  # another process of worker 1
    step = progress.next_step()
    assert step is not None
    assert (step.step, step.examples, step.loss) == (4, 10, 0.3)
    progress.seen(0, WorkerProgress(10, 100, 50.0))
    progress.seen(1, WorkerProgress(12, 80, 24.0))
    step = progress.next_step()
    assert step is not None
    assert step.step == 12
