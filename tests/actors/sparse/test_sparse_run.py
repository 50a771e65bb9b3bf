"""Sparse models on Ray: servers, backups and workers are killed in mid-training."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from sklearn.datasets import dump_svmlight_file

from share_compute.errors import ContributorLost, UserError
from share_compute.sparse.blocks import block_of, joined
from share_compute.sparse.keys import places_of
from share_compute.sparse.measuring.evaluation import evaluated
from share_compute.sparse.measuring.tallies import held_out
from share_compute.sparse.readers.libsvm import libsvm_blocks
from share_compute.sparse.settings import SparseSettings
from share_compute_actors.sparse.checkpoints import CheckpointOptions
from share_compute_actors.sparse.run import RunOptions, SparseRun

ROWS, FEATURES, PASSES, BATCH = 600, 40, 12, 50
CLOCKS = ROWS // BATCH * PASSES


def data(folder: Path) -> list[list[str]]:
    """Write two files with rows of the same planted model, one for each worker."""
    draw = np.random.default_rng(0)
    planted = draw.normal(size=FEATURES) * 2
    files = []
    for number in range(2):
        features = draw.normal(size=(ROWS, FEATURES)) * (draw.random((ROWS, FEATURES)) < 0.2)
        targets = (draw.random(ROWS) < 1 / (1 + np.exp(-features @ planted))).astype(int)
        file = folder / f"part-{number}.libsvm"
        dump_svmlight_file(features, targets, str(file))
        files.append([str(file)])
    return files


def trained(
    files: list[list[str]], nodes: list[Any], kill_at: dict[int, str], **options: Any
) -> tuple[SparseRun, float]:
    """Train, and kill a process when workers have reached a clock; return the run and the mean loss."""
    settings = SparseSettings(
        "logistic", workers=2, ranges=2, passes=PASSES, batch_size=BATCH, l2=1e-3, **options
    )
    ids = [node.node_id for node in nodes]
    run = SparseRun(settings, files, "libsvm", ids[:3], ids[3:])
    todo = dict(kill_at)

    def watch() -> None:
        if not todo or not run.is_settled:
            return
        clock = max(
            (clock for _, clock in ray.get(run.servers[str(run.placed[0][0])].clocks.remote(0))), default=0
        )
        due = min(todo)
        if clock < due:
            return
        match todo.pop(due):
            case "server":
                ray.kill(run.servers[str(run.placed[0][0])])
            case "backup":
                ray.kill(run.servers[str(run.placed[1][1])])
            case "worker":
                ray.kill(run.workers[1].actor)

    reports = run.train(watch)
    assert not todo, "all kills took place"
    assert all(report.is_done for report in reports)
    return run, sum(report.loss for report in reports) / sum(report.examples for report in reports)


def bits(run: SparseRun) -> list[str]:
    """Return the digest of each range; server and backup must agree, and have each push once."""
    found = []
    for copies in run.digests():
        assert len(copies) == 2
        assert copies[0] == copies[1]
        assert copies[0][1] == 2 * CLOCKS, "each push of both workers is in the log once"
        found.append(copies[0][0])
    return found


@pytest.mark.chaos
@pytest.mark.slow
def test_killing_a_server_changes_no_bit(tmp_path: Path, nodes: list[Any]) -> None:
    files = data(tmp_path)
    quiet, loss = trained(files, nodes, {})
    expected = bits(quiet)
    quiet.close()
    assert loss < 0.6
    disturbed, _ = trained(files, nodes, {20: "server"})
    try:
        assert bits(disturbed) == expected
    finally:
        disturbed.close()


@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 2, pytest.param(None, marks=pytest.mark.thorough)])
def test_killing_a_worker_and_a_backup_loses_no_acknowledged_push(
    tmp_path: Path, nodes: list[Any], staleness: int | None
) -> None:
    files = data(tmp_path)
    run, _ = trained(
        files, nodes, {20: "worker", 60: "backup"}, staleness=staleness, value_type="int8", threshold=0.3
    )
    try:
        bits(run)
        weights = run.weights()
        places = places_of(np.arange(FEATURES, dtype=np.uint64))
        assert set(places.tolist()) <= set(weights.places.tolist())
    finally:
        run.close()


@pytest.mark.slow
def test_one_file_is_split_among_workers_without_a_common_disk(tmp_path: Path, nodes: list[Any]) -> None:
    """Workers ask the submitter's machine for their parts; most minibatches are in a temporary file."""
    lists = data(tmp_path)
    file = tmp_path / "all.libsvm"
    file.write_text("".join(Path(part[0]).read_text() for part in lists))
    settings = SparseSettings("logistic", workers=2, ranges=2, passes=PASSES, batch_size=BATCH, l2=1e-3)
    ids = [node.node_id for node in nodes]
    run = SparseRun(
        settings, [[str(file)]], "libsvm", ids[:3], ids[3:], options=RunOptions(memory_bytes=20_000)
    )
    try:
        assert sum(loaded.rows for loaded in run.loaded) == 2 * ROWS
        assert min(loaded.rows for loaded in run.loaded) > 0.9 * ROWS
        reports = run.train()
        assert sum(report.loss for report in reports) / sum(report.examples for report in reports) < 0.6
    finally:
        run.close()
    wrong = tmp_path / "wrong.libsvm"
    wrong.write_text(file.read_text() + "1 3:x\n")
    with pytest.raises(UserError, match=f"wrong.libsvm, line {2 * ROWS + 1}: value 'x' is no number"):
        SparseRun(settings, [[str(wrong)]], "libsvm", ids[:3], ids[3:])


@pytest.mark.slow
def test_the_model_is_measured_at_the_end_of_each_pass(tmp_path: Path, nodes: list[Any]) -> None:
    """Workers measure their held-out rows, and rows of another file; the metrics are those of all rows together."""
    lists = data(tmp_path)
    validation = tmp_path / "validation.libsvm"
    validation.write_text("".join(Path(lists[1][0]).read_text().splitlines(keepends=True)[:100]))
    settings = SparseSettings(
        "logistic",
        workers=2,
        ranges=2,
        passes=3,
        batch_size=BATCH,
        l2=1e-3,
        validation_fraction=0.25,
    )
    ids = [node.node_id for node in nodes]
    events: list[Any] = []
    options = RunOptions(report=events.append, validation=(str(validation),))
    run = SparseRun(settings, [lists[0]], "libsvm", ids[:3], ids[3:], options=options)
    try:
        minibatches = max(loaded.minibatches for loaded in run.loaded)
        run.train()
        assert [event.step for event in events] == [minibatches, 2 * minibatches, 3 * minibatches]
        assert events[2].loss < events[0].loss
        rows = next(iter(libsvm_blocks(Path(lists[0][0]))))
        held = rows.part(np.flatnonzero(held_out(rows, 0.25, settings.seed)))
        assert len(held) == sum(loaded.held for loaded in run.loaded)
        others = next(iter(libsvm_blocks(validation)))
        block = block_of(joined([held, others]), with_bias=True)
        expected = evaluated(settings.build_model(), run.weights(), [block])
        found = events[2]
        assert (found.loss, found.accuracy, found.auroc) == (
            expected.loss,
            expected.accuracy,
            expected.auroc,
        )
    finally:
        run.close()


@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, pytest.param(2, marks=pytest.mark.thorough)])
def test_losing_server_and_backup_together_returns_to_the_checkpoint(
    tmp_path: Path, nodes: list[Any], staleness: int
) -> None:
    files = data(tmp_path)
    settings = SparseSettings(
        "logistic", workers=2, ranges=2, passes=PASSES, batch_size=BATCH, l2=1e-3, staleness=staleness
    )
    ids = [node.node_id for node in nodes]
    expected = None
    if staleness == 0:
        quiet = SparseRun(settings, files, "libsvm", ids[:3], ids[3:])
        quiet.train()
        expected = bits(quiet)
        quiet.close()
    events: list[Any] = []
    options = RunOptions(CheckpointOptions(tmp_path / "checkpoints", every_s=0), events.append)
    run = SparseRun(settings, files, "libsvm", ids[:3], ids[3:], options=options)
    killed: list[int] = []

    def watch() -> None:
        if run.saved is None or not run.saved.step or killed or not run.is_settled:
            return
        killed.append(run.saved.step)
        for machine in run.placed[0]:
            ray.kill(run.servers[str(machine)])

    try:
        reports = run.train(watch)
        assert all(report.is_done for report in reports)
        assert killed
        assert killed[0] < CLOCKS, "training was on when both were lost"
        assert run.returns == 1
        assert f"step-{killed[0]:08}" in [event.path.name for event in events if event.step == killed[0]]
        found = bits(run)
        assert expected is None or found == expected
    finally:
        run.close()
    stopped = SparseRun(settings, files, "libsvm", ids[:3], ids[3:], options=options)

    def stop() -> None:
        raise ContributorLost("suspended")

    with closing(stopped), pytest.raises(ContributorLost, match="suspended"):
        stopped.train(stop)
    assert stopped.returns == 0, "a request to stop is no loss"
    again = SparseRun(settings, files, "libsvm", ids[:3], ids[3:], options=options)
    try:
        assert again.saved is not None
        assert again.saved.step > 0, "another run of the job continues from the checkpoint"
        again.train()
        assert expected is None or bits(again) == expected
    finally:
        again.close()
