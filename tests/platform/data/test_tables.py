"""Tables: reading, splitting, encoding, and tables that cannot be used. Real .csv and .parquet files."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import csv, parquet
from sklearn.datasets import load_wine
from sklearn.preprocessing import StandardScaler

from share_compute.data import PreparedData, prepare, table_reading
from share_compute.data.samples import SPLITS
from share_compute.errors import Unavailable, UserError
from share_compute.models.blueprint import Blueprint
from share_compute.models.layers import require_fit
from share_compute.specification import LayerSpec, parse_job

ROWS = [
    {"size": 1.5, "colour": "red", "price": 10.0, "kind": "b"},
    {"size": 2.5, "colour": "blue", "price": 20.0, "kind": "a"},
    {"size": 3.5, "colour": "red", "price": 15.0, "kind": "b"},
    {"size": 0.5, "colour": "green", "price": 40.0, "kind": "a"},
]
CHECKED = {"target": "kind", "features": ["size", "colour"], "categorical": ["colour"]}


def write(file: Path, rows: Any) -> Path:
    if isinstance(rows, list):
        table = pa.Table.from_pylist(rows)
    else:
        table = pa.table(rows) if isinstance(rows, dict) else pa.Table.from_pandas(rows, preserve_index=False)
    if file.suffix == ".csv":
        csv.write_csv(table, file)
    else:
        parquet.write_table(table, file)
    return file


def prepared(
    files: Path | list[Path],
    table: dict[str, Any],
    *,
    task: Any = "tabular_classification",
    loss: Any = None,
    **data: Any,
) -> PreparedData:
    paths = [files] if isinstance(files, Path) else files
    spec = parse_job(
        {
            "task": task,
            "model": {"layers": [{"type": "linear", "options": {"in_features": 1, "out_features": 1}}]},
            "data": {"files": [str(path) for path in paths], "table": table, **data},
            "training": {"loss": loss or {}},
        }
    )
    return prepare(spec, paths[0].parent / "prepared")


def all_of(found: PreparedData, split: Any = "train") -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    return found.samples.take(split, range(found.samples.size(split)))


UNSPLIT: dict[str, Any] = {"validation_fraction": 0, "test_fraction": 0, "shuffle": False}


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_numbers_are_standardized_and_categories_become_zeros_and_ones(tmp_path: Path, suffix: str) -> None:
    file = write(tmp_path / f"a{suffix}", ROWS)
    found = prepared(file, CHECKED, **UNSPLIT)
    inputs, targets = all_of(found)
    order = np.argsort(inputs[:, 0])  # sizes 0.5, 1.5, 2.5, 3.5
    sizes = np.asarray([0.5, 1.5, 2.5, 3.5])
    assert np.allclose(inputs[order, 0], (sizes - sizes.mean()) / sizes.std())
    assert inputs[order, 1:].tolist() == [[0, 1, 0], [0, 0, 1], [1, 0, 0], [0, 0, 1]]  # blue, green, red
    assert targets[order].tolist() == [0, 1, 0, 1]
    assert (inputs.dtype, targets.dtype) == (np.float32, np.int64)
    assert found.sample_shape == (4,)
    assert found.objective is not None
    assert found.objective.classes == 2
    assert found.description is not None
    assert found.description["target"]["categories"] == ("a", "b")


def test_the_encoding_is_learned_from_the_training_split_only(tmp_path: Path) -> None:
    data = load_wine(as_frame=True).frame
    file = write(tmp_path / "wine.csv", data)
    found = prepared(file, {"target": "target"}, validation_fraction=0.2, test_fraction=0.2)
    sizes = [found.samples.size(split) for split in SPLITS]
    assert sizes == [108, 35, 35]
    inputs, _ = all_of(found)
    assert np.allclose(inputs.mean(0), 0, atol=1e-6)
    assert np.allclose(inputs.std(0), 1, atol=1e-5)
    again = [prepared(file, {"target": "target"}, validation_fraction=0.2, test_fraction=0.2) for _ in "12"]
    assert all(np.array_equal(all_of(each, "test")[0], all_of(found, "test")[0]) for each in again)
    # All rows occur once, whichever split they are in.
    raw = data.drop(columns="target").to_numpy()
    seen = np.concatenate([all_of(found, split)[0] for split in SPLITS])
    columns = found.description["columns"] if found.description is not None else []
    means, scales = ([column[name] for column in columns] for name in ("mean", "scale"))
    assert np.allclose(np.sort(seen * scales + means, axis=0), np.sort(raw, axis=0), rtol=1e-5)


def test_splits_may_have_files_of_their_own(tmp_path: Path) -> None:
    data = load_wine(as_frame=True).frame.sample(frac=1, random_state=1)
    parts = [write(tmp_path / f"{at}.parquet", data[at : at + 60]) for at in (0, 60, 120)]
    found = prepared(
        parts[:1], {"target": "target"}, validation_files=[str(parts[1])], test_files=[str(parts[2])]
    )
    scaler = StandardScaler().fit(data[:60].drop(columns="target"))
    for split, rows in zip(SPLITS, (data[:60], data[60:120], data[120:]), strict=True):
        inputs, targets = all_of(found, split)
        expected = scaler.transform(rows.drop(columns="target"))
        if split == "train":
            assert np.allclose(np.sort(inputs, axis=0), np.sort(expected, axis=0), atol=1e-5)
        else:
            assert np.allclose(inputs, expected, atol=1e-5)
            assert targets.tolist() == rows["target"].tolist()


def test_targets_of_regressions_are_standardized_too(tmp_path: Path) -> None:
    file = write(tmp_path / "a.csv", ROWS)
    table = {"target": "price", "features": ["size"]}
    found = prepared(file, table, task="tabular_regression", **UNSPLIT)
    _, targets = all_of(found)
    assert targets.dtype == np.float32
    assert found.objective is not None
    back = np.sort(targets * found.objective.target_scale + found.objective.target_mean)
    assert np.allclose(back, [10, 15, 20, 40])
    assert np.allclose((targets.mean(), targets.std()), (0, 1), atol=1e-6)
    plain = prepared(file, {**table, "scale": "none"}, task="tabular_regression", **UNSPLIT)
    assert sorted(all_of(plain)[1].tolist()) == [10, 15, 20, 40]


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_missing_values_are_refused_filled_or_dropped(tmp_path: Path, suffix: str) -> None:
    rows = [*ROWS, {"size": None, "colour": None, "price": 1.0, "kind": "a"}]
    file = write(tmp_path / f"a{suffix}", rows)
    with pytest.raises(UserError, match=r"column 'size' of data file .*a\.\w+ has no value in row 5"):
        prepared(file, CHECKED, **UNSPLIT)
    filled = all_of(prepared(file, {**CHECKED, "missing": "fill"}, **UNSPLIT))[0]
    assert [0.0] * 4 in filled.tolist()
    unscaled = {**CHECKED, "missing": "fill", "scale": "none"}
    assert [2.0, 0, 0, 0] in all_of(prepared(file, unscaled, **UNSPLIT))[0].tolist()
    dropped = prepared(file, {**CHECKED, "missing": "drop"}, **UNSPLIT)
    assert dropped.samples.size("train") == 4
    assert "1 rows without a value in a feature are left out" in dropped.notes


@pytest.mark.parametrize("value", [0.1, -1e9 / 3, 0.0, 1e37])
def test_a_constant_column_has_the_scale_1(tmp_path: Path, value: float) -> None:
    count = 3001
    rows = {"x": [value] * count, "z": np.arange(count), "y": np.arange(count) % 2}
    found = prepared(write(tmp_path / "a.parquet", rows), {"target": "y"}, **UNSPLIT)
    assert not all_of(found)[0][:, 0].any()
    assert found.description is not None
    assert found.description["columns"][0]["scale"] == 1.0
    other = write(tmp_path / "b.parquet", {"x": [value + 2.0], "z": [0], "y": [0]})
    parts = prepared(tmp_path / "a.parquet", {"target": "y"}, validation_files=[str(other)], test_fraction=0)
    assert all_of(parts, "validation")[0][0, 0] == pytest.approx(value + 2.0 - value)


def test_a_category_that_training_lacks_is_zero_everywhere(tmp_path: Path) -> None:
    training = write(tmp_path / "a.csv", ROWS)
    other = write(tmp_path / "b.csv", [{"size": 1.5, "colour": "pink", "price": 1, "kind": "a"}])
    found = prepared(training, CHECKED, validation_files=[str(other)], test_fraction=0)
    assert all_of(found, "validation")[0][0, 1:].tolist() == [0, 0, 0]


def test_balanced_weights_are_those_of_scikit_learn(tmp_path: Path) -> None:
    from sklearn.utils.class_weight import compute_class_weight

    file = write(tmp_path / "wine.csv", load_wine(as_frame=True).frame)
    found = prepared(file, {"target": "target"}, loss={"class_weights": "balanced"})
    _, targets = all_of(found)
    expected = compute_class_weight("balanced", classes=np.arange(3), y=targets)
    assert found.objective is not None
    assert found.objective.class_weights == pytest.approx(expected)
    with pytest.raises(UserError, match="class_weights has 2 weights, but the data has 3 classes"):
        prepared(file, {"target": "target"}, loss={"class_weights": [1.0, 2.0]})


def test_long_tables_are_read_in_blocks(tmp_path: Path) -> None:
    """The .csv file is longer than a block, and its first text is a category that looks like a number."""
    count = 300_000
    values = np.arange(count)
    rows = {"x": values / 7, "c": np.where(values < count - 1, "1", "last"), "y": values % 2}
    file = write(tmp_path / "long.csv", rows)
    assert file.stat().st_size > 5 << 20
    found = prepared(file, {"target": "y", "categorical": ["c"]}, **UNSPLIT)
    inputs, targets = found.samples.take("train", range(count))
    assert inputs[:, 1:].sum(0).tolist() == [count - 1, 1]
    assert targets.sum() == count // 2


def test_cells_may_have_line_breaks_and_spaces(tmp_path: Path) -> None:
    text = 'size,note,kind\n1,"two\nlines",a\n 2 ,"one, line", b\n3, one, b \n4,one , a\n'
    (tmp_path / "a.csv").write_text(text)
    table = {"target": "kind", "categorical": ["note"]}
    found = prepared(tmp_path / "a.csv", table, **UNSPLIT)
    assert found.description is not None
    assert found.description["columns"][1]["categories"] == ("one", "one, line", "two\nlines")
    assert found.description["target"]["categories"] == ("a", "b")
    (tmp_path / "a.csv").write_text(f"{text}5, NA ,a\n")
    with pytest.raises(UserError, match=r"column 'note' .* has no value in row 5"):
        prepared(tmp_path / "a.csv", table, **UNSPLIT)


def test_long_names_are_clipped(tmp_path: Path) -> None:
    rows = [{**row, "kind": str(row["kind"]) * 900, "n" * 500: "x"} for row in ROWS]
    file = write(tmp_path / "a.csv", rows)
    found = prepared(file, {"target": "kind", "features": ["n" * 500], "categorical": ["n" * 500]}, **UNSPLIT)
    assert all(len(note) < 300 for note in found.notes)
    error = table_error(tmp_path, rows, {"target": "kind", "features": ["n" * 500]})
    assert f"column '{'n' * 77}...' of" in error.message


def table_error(tmp_path: Path, rows: Any, table: dict[str, Any], **options: Any) -> Any:
    with pytest.raises(UserError) as caught:
        prepared(write(tmp_path / "a.csv", rows), table, **options)
    return caught.value


class TestTablesThatCannotBeUsed:
    def test_other_columns_in_the_second_file(self, tmp_path: Path) -> None:
        first = write(tmp_path / "first.csv", ROWS)
        second = write(tmp_path / "second.csv", [{**row, "weight": 1} for row in ROWS])
        with pytest.raises(
            UserError, match=r"second\.csv has other columns than first\.csv: only second\.csv has weight"
        ):
            prepared([first, second], {"target": "kind", "categorical": ["colour"]})
        assert prepared([first, second], CHECKED).samples.size("train") == 8

    def test_a_missing_target_or_feature(self, tmp_path: Path) -> None:
        error = table_error(tmp_path, ROWS, {"target": "knid"})
        assert "has no column 'knid'; did you mean 'kind'?" in error.message
        assert error.hint.startswith("set data.table.target to a column of the file: ")
        error = table_error(tmp_path, ROWS, {"target": "kind", "features": ["sise"]})
        assert "did you mean 'size'?" in error.message
        error = table_error(tmp_path, ROWS, {"target": "kind", "categorical": ["color"]})
        assert "has no column 'color'" in error.message

    def test_all_columns_with_problems_are_named(self, tmp_path: Path) -> None:
        error = table_error(tmp_path, ROWS, {"target": "knid", "categorical": ["color"]})
        target, category = (one["problem"] for one in error.details["fields"])
        assert "no column 'knid'; did you mean 'kind'?" in target
        assert "no column 'color'" in category
        assert "data.table.target" in error.hint
        assert "data.table.categorical" in error.hint
        rows = [{**ROWS[0], "size": None}, {**ROWS[1], "kind": None}]
        error = table_error(tmp_path, rows, {"target": "kind"})
        assert len(error.details["fields"]) == 3, "no number, no value, and no target"

    def test_a_target_without_value(self, tmp_path: Path) -> None:
        error = table_error(tmp_path, [*ROWS, {**ROWS[0], "kind": None}], {**CHECKED, "missing": "fill"})
        assert "the target 'kind'" in error.message
        assert "has no value in row 5" in error.message

    def test_text_in_a_column_of_numbers(self, tmp_path: Path) -> None:
        error = table_error(tmp_path, ROWS, {"target": "kind"})
        assert "column 'colour'" in error.message
        assert "has 'red' in row 1, which is not a number" in error.message
        assert "data.table.categorical" in error.hint
        error = table_error(
            tmp_path, ROWS, {"target": "kind", "features": ["size"]}, task="tabular_regression"
        )
        assert "set task to tabular_classification" in error.hint

    @pytest.mark.parametrize("suffix", [".csv", ".parquet"])
    def test_numbers_that_are_not_finite(self, tmp_path: Path, suffix: str) -> None:
        file = write(tmp_path / f"a{suffix}", [*ROWS, {**ROWS[0], "size": float("inf")}])
        with pytest.raises(UserError, match=r"column 'size' of data file .* is infinite in row 5"):
            prepared(file, CHECKED)
        file = write(tmp_path / f"b{suffix}", [*ROWS, {**ROWS[0], "size": float("nan")}])
        with pytest.raises(UserError, match=r"column 'size' of data file .* has no value in row 5"):
            prepared(file, CHECKED)

    def test_a_class_that_only_validation_has(self, tmp_path: Path) -> None:
        other = write(tmp_path / "b.csv", [{**ROWS[0], "kind": "c"}])
        error = table_error(tmp_path, ROWS, CHECKED, validation_files=[str(other)])
        assert error.message == (
            "class 'c' is in the validation split, but not in the training split: "
            f"column 'kind' of data file {other}"
        )

    def test_one_class(self, tmp_path: Path) -> None:
        error = table_error(tmp_path, [ROWS[0], ROWS[2]], CHECKED, **UNSPLIT)
        assert error.message == "all training samples have the same class, 'b' in column 'kind'"

    def test_no_rows_and_no_table(self, tmp_path: Path) -> None:
        (tmp_path / "a.csv").write_text("size,colour,kind\n")
        with pytest.raises(UserError, match=r"a\.csv has no rows"):
            prepared(tmp_path / "a.csv", CHECKED)
        (tmp_path / "a.csv").write_text("size,colour,kind\n1,red\n")
        with pytest.raises(
            UserError, match=r"a\.csv cannot be read as \.csv: row 1 has 2 cells, and the header has 3$"
        ):
            prepared(tmp_path / "a.csv", CHECKED)
        (tmp_path / "a.parquet").write_text("no parquet")
        with pytest.raises(
            UserError,
            match=r"a\.parquet cannot be read as \.parquet: it is no \.parquet file, or it is damaged$",
        ):
            prepared(tmp_path / "a.parquet", CHECKED)
        (tmp_path / "a.csv").write_text("size,size,kind\n1,1,a\n")
        with pytest.raises(UserError, match=r"has two columns 'size'"):
            prepared(tmp_path / "a.csv", CHECKED)

    @pytest.mark.parametrize(
        ("layers", "problem", "hint"),
        [
            (
                [(14, 3)],
                r"layer 0 does not fit its input of shape \[1, 13\]: it takes 14 numbers \(model\.layers\.0\)$",
                "set model.layers.0.options.in_features to 13",
            ),
            (
                [(13, 8), (9, 3)],
                r"layer 1 does not fit its input of shape \[1, 8\]: it takes 9 numbers \(model\.layers\.1\)$",
                "set model.layers.1.options.in_features to 8",
            ),
            (
                [(13, 4)],
                r"the model's last layer returns \[4\] for each sample",
                "let model.layers end with 3 outputs, one for each class, and flatten the last layer's output",
            ),
        ],
    )
    def test_layers_that_do_not_fit(
        self, tmp_path: Path, layers: list[tuple[int, int]], problem: str, hint: str
    ) -> None:
        file = write(tmp_path / "wine.csv", load_wine(as_frame=True).frame)
        found = prepared(file, {"target": "target"})
        declared = [
            LayerSpec(type="linear", options={"in_features": inputs, "out_features": outputs})
            for inputs, outputs in layers
        ]
        assert found.objective is not None
        assert found.sample_shape is not None
        blueprint = Blueprint(
            layers=tuple(declared), objective=found.objective, sample_shape=found.sample_shape
        )
        with pytest.raises(UserError, match=problem) as refused:
            require_fit(blueprint)
        assert refused.value.hint == hint

    def test_columns_of_other_types(self, tmp_path: Path) -> None:
        rows = [{**row, "day": datetime(2026, 1, 1, tzinfo=UTC)} for row in ROWS]
        file = write(tmp_path / "a.parquet", rows)
        with pytest.raises(UserError, match=r"column 'day' of data file .* has the type timestamp") as caught:
            prepared(file, {"target": "kind", "features": ["day"]})
        assert "leave it out of data.table.features" in (caught.value.hint or "")

    @pytest.mark.parametrize("suffix", [".csv", ".parquet"])
    def test_too_large_numbers(self, tmp_path: Path, suffix: str) -> None:
        file = write(tmp_path / f"a{suffix}", [*ROWS, {**ROWS[0], "size": -2e37}])
        with pytest.raises(UserError, match=r"'size' of data file .* is -2e\+37, beyond 1e\+37, in row 5"):
            prepared(file, CHECKED)

    def test_very_many_columns(self, tmp_path: Path) -> None:
        (tmp_path / "a.csv").write_text(",".join(map(str, range(100_001))) + "\n")
        with pytest.raises(UserError, match=r"a\.csv has 100001 columns; at most 100000 are read"):
            prepared(tmp_path / "a.csv", CHECKED)
        names = [*map(str, range(99_998)), "kind", "kind"]
        (tmp_path / "a.csv").write_text(",".join(names) + "\n")
        with pytest.raises(UserError, match="has two columns 'kind'"):
            prepared(tmp_path / "a.csv", CHECKED)

    @pytest.mark.parametrize("suffix", [".csv", ".parquet"])
    def test_too_many_rows(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
        monkeypatch.setattr(table_reading, "MOST_ROWS", 7)
        files = [write(tmp_path / f"{name}{suffix}", ROWS) for name in "ab"]
        with pytest.raises(UserError, match=r"more than 7 rows, up to data file .*b\.\w+"):
            prepared(files, CHECKED)

    def test_more_rows_than_the_disk_holds(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda _folder: SimpleNamespace(free=95))
        with pytest.raises(
            Unavailable, match=r"the prepared data needs 96 bytes, but the disk of .* has 95 bytes"
        ):
            prepared(write(tmp_path / "a.parquet", ROWS), CHECKED)
        assert not (tmp_path / "prepared" / "table.bin").exists()

    def test_too_many_and_too_long_categories(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        error = table_error(tmp_path, [*ROWS, {**ROWS[0], "colour": "x" * 1001}], CHECKED)
        assert "column 'colour'" in error.message
        assert "a category of 1001 characters in row 5; at most 1000 are read" in error.message
        monkeypatch.setattr(table_reading, "MOST_ALL_CATEGORIES", 6)
        assert prepared(write(tmp_path / "a.csv", ROWS), CHECKED).samples.size("train") == 4
        more = {"target": "kind", "categorical": ["colour", "size"]}
        error = table_error(tmp_path, [{**row, "price": 1} for row in ROWS], more)
        assert error.message == "the features have more than 6 categories together"

    def test_files_that_name_a_path_twice(self, tmp_path: Path) -> None:
        file = write(tmp_path / "a.csv", ROWS)
        with pytest.raises(UserError, match=r"validation_files names .*a\.csv, which data has already"):
            prepared(file, CHECKED, validation_files=[f"{tmp_path}/more/../a.csv"])
        with pytest.raises(UserError, match=r"files names .*a\.csv, which data has already"):
            prepared([file, file], CHECKED)

    def test_what_pyarrow_has_not_implemented(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def batches(*_arguments: Any) -> Any:
            raise pa.ArrowNotImplementedError("no such encoding in pyarrow")

        monkeypatch.setattr(table_reading, "record_batches", batches)
        with pytest.raises(
            UserError, match=r"a\.parquet cannot be read as \.parquet: it has a type that is not read$"
        ):
            prepared(write(tmp_path / "a.parquet", ROWS), CHECKED)
