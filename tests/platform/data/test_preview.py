"""The first rows of data, as training would read them."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from share_compute.data.preview import MOST_CHARACTERS, MOST_COLUMNS, MOST_ROWS, MOST_SIDE, preview_of
from share_compute.errors import UserError
from share_compute.files.data_preview import DataPreview
from share_compute.specification import DataSpec, Task


def preview(task: Task = "language_model", **data: Any) -> DataPreview:
    return preview_of(DataSpec.model_validate(data), task)


def kinds(found: DataPreview) -> list[tuple[str, str, bool]]:
    return [(column.name, column.kind, column.is_target) for column in found.columns]


def opened(cell: Any) -> Any:
    return Image.open(io.BytesIO(base64.b64decode(cell)))


def test_tables_have_numbers_categories_and_the_target(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text(
        "age,town,left_out,label\n" + "".join(f"{n}, Bonn ,x,{n % 2}\n" for n in range(20)) + "NA,Ulm,x,1\n"
    )
    table = {"target": "label", "features": ["town", "age"], "categorical": ["town"], "missing": "fill"}
    found = preview("tabular_classification", files=[file], table=table)
    assert kinds(found) == [("town", "category", False), ("age", "number", False), ("label", "class", True)]
    assert len(found.rows) == MOST_ROWS
    assert found.rows[1] == ("Bonn", 1.0, "1")
    number = preview("tabular_regression", files=[file], table=table)
    assert kinds(number)[-1] == ("label", "number", True)
    assert number.rows[1][-1] == 1.0
    file.write_text("age,town,label\n,Ulm,1\n")
    assert preview("tabular_regression", files=[file], table=table).rows == (("Ulm", None, 1.0),)


def test_wide_tables_are_cut_to_their_first_features_and_the_target(tmp_path: Path) -> None:
    names = [f"c{place}" for place in range(500)]
    parquet.write_table(pa.table({name: [1.5] for name in names}), tmp_path / "wide.parquet")
    found = preview("tabular_regression", files=[tmp_path / "wide.parquet"], table={"target": "c0"})
    assert len(found.columns) == len(found.rows[0]) == MOST_COLUMNS
    assert (found.columns[0].name, found.columns[-1].name, found.left_out) == ("c1", "c0", 500 - MOST_COLUMNS)


def test_images_are_small_pictures_of_all_classes_in_turn(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for number in range(8):
            pixels = np.full((300, 200, 3), 20 * number, np.uint8)
            Image.fromarray(pixels).save(tmp_path / name / f"{number}.png")
    images = {"height": 100, "width": 200}
    found = preview("image_classification", files=[tmp_path], images=images)
    assert kinds(found) == [("image", "image", False), ("class", "class", True)]
    assert [row[1] for row in found.rows] == ["cat", "dog"] * 5
    picture = opened(found.rows[2][0])
    assert (picture.format, picture.mode, picture.size) == ("PNG", "RGB", (MOST_SIDE, MOST_SIDE // 2))
    assert picture.getpixel((0, 0)) == (20, 20, 20)
    grey = preview("image_classification", files=[tmp_path], images={**images, "channels": 1})
    assert opened(grey.rows[0][0]).mode == "L"


def test_digits_are_shown() -> None:
    found = preview("image_classification", dataset="digits")
    assert [row[1] for row in found.rows] == [str(digit) for digit in range(10)]
    assert opened(found.rows[0][0]).size == (8, 8)


def test_texts_have_labels_and_pairs(tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    rows = [{"text": "x" * 2000, "label": number, "other": "y"} for number in range(12)]
    file.write_text("\n".join(map(json.dumps, rows)))
    found = preview("text_classification", files=[file], labels={"pair": "other"})
    assert kinds(found) == [("text", "text", False), ("label", "class", True), ("other", "text", False)]
    assert len(found.rows) == MOST_ROWS
    assert found.rows[3] == ("x" * (MOST_CHARACTERS - 1) + "…", "3", "y")
    found = preview("embedding", files=[file], pairs={"column": "other"})
    assert kinds(found) == [("text", "text", False), ("other", "text", False)]
    assert found.rows[0][1] == "y"


def test_plain_text_is_shown_by_lines_or_documents(tmp_path: Path) -> None:
    text = tmp_path / "corpus.txt"
    text.write_text("\ufefffirst\n\n" + "more\n" * 30, encoding="utf-8")
    assert preview(files=[text]).rows == (("first",), *[("more",)] * 9)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"body": "a"}\n{"body": ""}\n{"other": 1}\n{"body": "b"}\n')
    assert preview(files=[rows], text_column="body").rows == (("a",), ("b",))
    parquet.write_table(pa.table({"body": ["a", None, "b"]}), tmp_path / "rows.parquet")
    assert preview(files=[tmp_path / "rows.parquet"], text_column="body").rows == (("a",), ("b",))


def test_half_characters_do_not_break_the_answer(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "\\ud800 half"}\n')
    assert preview(files=[file]).rows == (("? half",),)


@pytest.mark.parametrize(
    ("name", "content", "data", "task", "problem"),
    [
        ("a.csv", b"x,y\n1,2\n", {"table": {"target": "z"}}, "tabular_regression", "has no column 'z'"),
        (
            "a.csv",
            b"x,y\nred,2\n",
            {"table": {"target": "y"}},
            "tabular_regression",
            "'red' in row 1, which is not a number",
        ),
        ("a.csv", b"x,y\n,2\n", {"table": {"target": "y"}}, "tabular_regression", "has no value in row 1"),
        ("a.csv", b"text,label\n,1\n", {"labels": {}}, "text_classification", "has no text in row 1"),
        ("a.jsonl", b'{"text": 3}\n', {}, "language_model", "holds int, not text"),
        ("a.jsonl", b'{"txt": "a"}\n', {}, "language_model", "did you mean 'txt'"),
        ("a.txt", b"\xff\xfe\xfa", {}, "language_model", "cannot be read"),
        ("a.parquet", b"nonsense", {}, "language_model", "cannot be read"),
    ],
)
def test_data_that_cannot_be_read_is_refused(
    tmp_path: Path, name: str, content: bytes, data: dict[str, Any], task: Task, problem: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=problem):
        preview(task, files=[tmp_path / name], **data)
