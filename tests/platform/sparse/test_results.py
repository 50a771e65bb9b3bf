"""Results of sparse models as files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.platform.sparse.serial import train_serially

from share_compute.errors import VerificationFailed
from share_compute.sparse.blocks import RawRows, block_of
from share_compute.sparse.keys import places_of
from share_compute.sparse.results import load_rows, save_rows, weights_for
from share_compute.sparse.settings import SparseModelName, SparseSettings
from share_compute.sparse.table import RangeTable, RowValues


def rows_of(model: SparseModelName) -> RawRows:
    keys = np.array([0, 3, 0, 9, 5, 3], np.uint64)
    is_second = np.tile([False, True], 3) if model == "matrix_factorization" else None
    return RawRows(np.array([0, 2, 4, 6]), keys, np.ones(6), np.array([1.0, 0.0, 1.0]), is_second)


@pytest.mark.parametrize("model", ["logistic", "factorization_machine", "matrix_factorization", "topics"])
def test_results_are_read_as_they_were_written(tmp_path: Path, model: SparseModelName) -> None:
    settings = SparseSettings(model, workers=1, ranges=1, factors=3, documents=3, l2=0.01)
    table = RangeTable(settings.build_rule())
    block = block_of(rows_of(model), with_bias=settings.has_bias)
    losses = list(train_serially(settings.build_model(), table, [block], passes=5))
    assert np.isfinite(losses).all()
    rows = table.everything()
    if settings.has_bias:  # the factors of the bias are used nowhere
        rows.values[rows.places == block.places[block.bias], 1:] = 0
    pieces = [RowValues(rows.places[at : at + 2], rows.values[at : at + 2]) for at in (0, 2, 4)]
    assert save_rows(tmp_path / "weights.safetensors", settings, pieces) == len(rows.places)
    assert [file.name for file in tmp_path.iterdir()] == ["weights.safetensors"]
    found, again = load_rows(tmp_path / "weights.safetensors")
    assert found == settings
    assert again.places.tolist() == rows.places.tolist()
    assert again.values.tolist() == rows.values.tolist()
    assert weights_for(again, block.places).tolist() == rows.values.tolist()
    assert not weights_for(again, places_of(np.array([77], np.uint64))).any()


def test_files_name_keys_and_not_places(tmp_path: Path) -> None:
    settings = SparseSettings("logistic", workers=1, ranges=1)
    table = RangeTable(settings.build_rule())
    block = block_of(rows_of("logistic"), with_bias=True)
    list(train_serially(settings.build_model(), table, [block], passes=5))
    save_rows(tmp_path / "weights.safetensors", settings, [table.everything()])
    arrays = load_file(tmp_path / "weights.safetensors")
    assert arrays["keys"].tolist() == [0, 3, 5, 9]
    assert arrays["weights"].shape == (4, 1)
    assert arrays["weights"][3, 0] < 0 < arrays["weights"][2, 0]
    assert arrays["bias"].shape == (1,)


@pytest.mark.parametrize("content", [None, b"", b"{}" * 20])
def test_other_files_are_refused(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "weights.safetensors"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(VerificationFailed, match=r"weights\.safetensors is not the result"):
        load_rows(file)
