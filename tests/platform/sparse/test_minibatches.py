"""Minibatches of a worker: they have all rows, and may be in a file."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
from tests.platform.sparse.serial import train_serially

from share_compute.sparse.blocks import RawRows, joined
from share_compute.sparse.minibatches import streamed_minibatches
from share_compute.sparse.models import Logistic
from share_compute.sparse.readers.kept_blocks import KeptBlocks
from share_compute.sparse.rules import FollowTheLeader
from share_compute.sparse.table import RangeTable


def drawn_rows(num_rows: int, seed: int) -> RawRows:
    draw = np.random.default_rng(seed)
    counts = draw.integers(0, 6, num_rows)
    keys = [np.sort(draw.choice(40, count, replace=False)) for count in counts]
    return RawRows(
        np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        np.concatenate(keys).astype(np.uint64),
        draw.normal(size=counts.sum()),
        draw.integers(0, 2, num_rows).astype(float),
    )


def test_only_the_last_minibatch_is_smaller() -> None:
    parts = [drawn_rows(count, count) for count in (7, 40, 3, 25)]
    blocks = list(streamed_minibatches(parts, 16, 0, with_bias=True))
    assert [block.rows for block in blocks] == [16, 16, 16, 16, 11]
    whole = joined(parts)
    assert sum(block.matrix.nnz for block in blocks) == len(whole.keys)
    assert np.concatenate([block.targets for block in blocks]).sum() == whole.targets.sum()
    found = sum(float(block.matrix.data.astype(np.float64).sum()) for block in blocks)
    assert found == pytest.approx(whole.values.sum(), abs=1e-4)


def test_minibatches_in_a_file_give_the_same_bits() -> None:
    parts = [drawn_rows(50, seed) for seed in range(6)]
    digests = []
    for most_bytes in (1 << 30, 5_000, 0):
        table = RangeTable(FollowTheLeader())
        with closing(KeptBlocks(most_bytes)) as blocks:
            for block in streamed_minibatches(parts, 16, 0, with_bias=True):
                blocks.add(block)
            assert blocks.rows == 300
            assert len(blocks) == 19
            list(train_serially(Logistic(), table, blocks, 3))
            with pytest.raises(IndexError):
                blocks[19]
        digests.append(table.digest())
    assert len(set(digests)) == 1
