"""Sparse logistic regression with two workers and one server, against scikit-learn and torch; and bytes with filters.

The data are drawn from a planted model: 20 binary features in each row, of which some are frequent and most are rare.
Times are those of training alone. All sides have their rows in memory, and make the same number of passes.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from _harness import cluster, print_figure
from scipy import sparse
from sklearn.linear_model import SGDClassifier
from sklearn.metrics import log_loss

from share_compute.sparse.blocks import RawRows, block_of
from share_compute.sparse.models import Logistic, probabilities
from share_compute.sparse.results import weights_for
from share_compute.sparse.settings import SparseSettings
from share_compute.sparse.table import RowValues
from share_compute_actors.sparse.run import SparseRun

ENTRIES = 20
L2 = 1e-7
GOAL = 0.5
"""Largest ratio of bytes with filters to bytes without."""
MOST_LOSS = 1.005
"""Largest ratio of losses that counts as equal."""


def drawn(num_rows: int, num_features: int, seed: int) -> RawRows:
    """Return rows of a planted model; feature k is drawn with a density that falls as 1 / sqrt(k)."""
    planted = np.random.default_rng(0).normal(size=num_features)
    draw = np.random.default_rng(seed)
    keys = (num_features * draw.random((num_rows, ENTRIES)) ** 2).astype(np.int64)
    keys.sort(axis=1)
    for column in range(1, ENTRIES):  # no key may occur twice in a row
        keys[:, column] = np.maximum(keys[:, column], keys[:, column - 1] + 1)
    keys = np.minimum(keys, num_features - ENTRIES + np.arange(ENTRIES))
    scores = planted[keys].sum(axis=1) * 3 / np.sqrt(ENTRIES)
    targets = (draw.random(num_rows) < 1 / (1 + np.exp(-scores))).astype(float)
    starts = np.arange(num_rows + 1, dtype=np.int64) * ENTRIES
    return RawRows(starts, keys.ravel().astype(np.uint64), np.ones(keys.size), targets)


def write(rows: RawRows, file: Path) -> None:
    """Write rows in the libsvm format."""
    words = pc.binary_join_element_wise(pa.array(rows.keys).cast(pa.string()), "1", ":")
    lists = pa.ListArray.from_arrays(pa.array(rows.starts, pa.int32()), words)
    targets = pa.array(rows.targets.astype(np.int64)).cast(pa.string())
    lines = pc.binary_join_element_wise(targets, pc.binary_join(lists, " "), " ")
    file.write_text("\n".join(lines.to_pylist()) + "\n")


def matrix(rows: RawRows, num_features: int) -> Any:
    return sparse.csr_matrix(
        (rows.values.astype(np.float32), rows.keys.astype(np.int32), rows.starts.astype(np.int32)),
        shape=(len(rows), num_features),
    )


class Share:
    """Our side: one run for each turn, because training starts anew. Reading the files is not timed."""

    def __init__(self, files: Sequence[Path], nodes: Sequence[str], test: RawRows) -> None:
        self._files, self._nodes, self._test = files, nodes, block_of(test, with_bias=True)

    def turn(self, settings: SparseSettings) -> tuple[float, float, float]:
        """Train; return seconds, loss on the test rows, and bytes of a pass."""
        run = SparseRun(
            settings, [[str(file)] for file in self._files], "libsvm", self._nodes[:1], self._nodes[1:]
        )
        try:
            start = time.perf_counter()
            reports = run.train()
            seconds = time.perf_counter() - start
            moved = sum(report.sent_bytes + report.received_bytes for report in reports) / settings.passes
            return seconds, self._loss(run.weights()), moved
        finally:
            run.close()

    def _loss(self, learned: RowValues) -> float:
        weights = weights_for(learned, self._test.places)
        chances = probabilities(Logistic().scores(self._test, weights))
        return float(log_loss(self._test.targets, chances.astype(np.float64)))


def sgd_turn(train: Any, targets: Any, test: Any, test_targets: Any, passes: int) -> tuple[float, float]:
    """Train scikit-learn's SGDClassifier; return seconds, and the loss on the test rows."""
    model = SGDClassifier(
        loss="log_loss",
        alpha=L2,
        learning_rate="constant",  # its default begins with steps that are far too large for this alpha
        eta0=0.05,
        max_iter=passes,
        tol=None,
        random_state=0,
    )
    start = time.perf_counter()
    model.fit(train, targets)
    seconds = time.perf_counter() - start
    return seconds, float(log_loss(test_targets, model.predict_proba(test)[:, 1]))


def torch_turn(
    rows: RawRows, test: RawRows, num_features: int, batch: int, passes: int
) -> tuple[float, float]:
    """Train an EmbeddingBag of width 1 with Adagrad; return seconds, and the loss on the test rows."""
    bag = torch.nn.EmbeddingBag(num_features, 1, mode="sum")
    torch.nn.init.zeros_(bag.weight)
    bias = torch.nn.Parameter(torch.zeros(1))
    optimizers = [torch.optim.Adagrad(bag.parameters(), lr=0.3), torch.optim.Adagrad([bias], lr=0.3)]
    keys = torch.from_numpy(rows.keys.astype(np.int64).reshape(-1, ENTRIES))
    targets = torch.from_numpy(rows.targets.astype(np.float32))
    start = time.perf_counter()
    for pass_number in range(passes):
        order = torch.randperm(len(keys), generator=torch.Generator().manual_seed(pass_number))
        for chosen in torch.split(order, batch):
            scores = bag(keys[chosen])[:, 0] + bias
            loss = torch.nn.functional.binary_cross_entropy_with_logits(scores, targets[chosen])
            for optimizer in optimizers:
                optimizer.zero_grad()
            torch.autograd.backward(loss)
            for optimizer in optimizers:
                optimizer.step()
    seconds = time.perf_counter() - start
    with torch.no_grad():
        scores = bag(torch.from_numpy(test.keys.astype(np.int64).reshape(-1, ENTRIES)))[:, 0] + bias
    return seconds, float(log_loss(test.targets, torch.sigmoid(scores).double().numpy()))


def main() -> None:
    torch.set_num_threads(1)  # its operations are too small for more threads
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smoke run: few rows, one turn")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--features", type=int, default=100_000)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--batch", type=int, default=16_384, help="rows of a minibatch of each worker")
    parser.add_argument("--small-batch", type=int, default=8192, help="the same of torch, and with filters")
    options = parser.parse_args()
    if options.quick:
        options.rows, options.features, options.passes, options.turns = 60_000, 10_000, 2, 1
        options.batch = options.small_batch = 1024
    rows = drawn(options.rows, options.features, 1)
    test = drawn(max(10_000, options.rows // 50), options.features, 2)
    train_matrix, test_matrix = matrix(rows, options.features), matrix(test, options.features)
    settings = SparseSettings(
        "logistic",
        workers=2,
        ranges=1,
        passes=options.passes,
        batch_size=options.batch,
        staleness=2,
        learning_rate=0.3,
        l2=L2,
    )
    plain = replace(settings, batch_size=options.small_batch, caches_keys=False)
    filtered = replace(plain, caches_keys=True, value_type="int8", threshold=1.0)
    times: dict[str, list[float]] = {"ours": [], "sgd": [], "torch": []}
    losses, moved = dict[str, float](), dict[str, float]()
    with tempfile.TemporaryDirectory() as folder, cluster(3) as nodes:
        files = [Path(folder) / f"part-{number}.libsvm" for number in range(2)]
        for number, file in enumerate(files):
            write(rows.part(slice(number, None, 2)), file)
        share = Share(files, nodes, test)
        for _ in range(options.turns):
            seconds, losses["ours"], _ = share.turn(settings)
            times["ours"].append(seconds)
            seconds, losses["sgd"] = sgd_turn(
                train_matrix, rows.targets, test_matrix, test.targets, options.passes
            )
            times["sgd"].append(seconds)
            seconds, losses["torch"] = torch_turn(
                rows, test, options.features, options.small_batch, options.passes
            )
            times["torch"].append(seconds)
        _, losses["plain"], moved["plain"] = share.turn(plain)
        _, losses["filtered"], moved["filtered"] = share.turn(filtered)
    total = options.rows * options.passes
    speeds = {name: total / statistics.median(each) for name, each in times.items()}
    best = "sgd" if speeds["sgd"] > speeds["torch"] else "torch"
    print_figure(
        "examples_per_s",
        ours=speeds["ours"],
        peer=speeds[best],
        peer_name={"sgd": "scikit-learn SGDClassifier", "torch": "torch EmbeddingBag and Adagrad"}[best],
        ratio=statistics.median(a / b for a, b in zip(times[best], times["ours"], strict=True)),
        unit="examples/s",
        sgd=round(speeds["sgd"]),
        torch=round(speeds["torch"]),
        ours_range=[round(total / max(times["ours"])), round(total / min(times["ours"]))],
        log_loss={name: round(losses[name], 4) for name in ("ours", "sgd", "torch")},
        rows=options.rows,
        features=options.features,
        passes=options.passes,
        batch=options.batch,
        turns=options.turns,
    )
    is_equal = losses["filtered"] <= MOST_LOSS * losses["plain"]
    print_figure(
        "bytes_with_filters",
        ours=moved["filtered"],
        peer=moved["plain"],
        peer_name="the same run without filters: float32, lists of keys in each message",
        ratio=GOAL * moved["plain"] / moved["filtered"] if is_equal else 0.0,
        unit="bytes/pass",
        batch=options.small_batch,
        log_loss={name: round(losses[name], 4) for name in ("filtered", "plain")},
        threshold=filtered.threshold,
        value_type=filtered.value_type,
    )


if __name__ == "__main__":
    main()
