"""Data that cannot be used, from the terminal: one error with the place and a hint, and no sentence of a library."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image
from tests.api.conftest import Plane
from tests.platform.data.test_images import bomb

LINEAR = {"type": "linear", "options": {"in_features": 1, "out_features": 2}}
LIBRARIES = re.compile(
    r"pyarrow|Arrow|pandas|PIL|Pillow|numpy|torch\.|pydantic|Traceback|codec|include_columns|Errno|straddl|thrift|"
    r"magic bytes|Row #|truncated|tile cannot|Decompression|Expecting|invalid literal",
)
TABLE = "size,kind\n1,a\n2,b\n"
Make = Callable[[Path], dict[str, Any]]


def job(task: str | None = None, **data: Any) -> dict[str, Any]:
    return {**({"task": task} if task else {}), "model": {"layers": [LINEAR]}, "data": data}


def table(folder: Path, *texts: str | bytes, target: str = "kind", **data: Any) -> dict[str, Any]:
    files = []
    for place, text in enumerate(texts):
        file = folder / f"{place}.csv"
        file.write_bytes(text.encode() if isinstance(text, str) else text)
        files.append(str(file))
    return job("tabular_classification", files=files, table={"target": target}, **data)


def image(folder: Path, write: Callable[[Path], Any]) -> dict[str, Any]:
    (folder / "pictures" / "a").mkdir(parents=True)
    write(folder / "pictures" / "a" / "one.png")
    return job(files=[str(folder / "pictures")], images={"height": 8, "width": 8})


def cut_off(file: Path) -> None:
    Image.effect_noise((64, 64), 90).save(file)
    file.write_bytes(file.read_bytes()[:-500])


def sparse(folder: Path, text: str, model: str = "logistic") -> dict[str, Any]:
    form, name = ("ratings", "rows.csv") if model == "matrix_factorization" else ("libsvm", "rows.txt")
    (folder / name).write_text(text)
    return {
        "kind": "sparse",
        "model": {"name": model},
        "data": {"format": form, "files": [str(folder / name)]},
    }


def sweep(**fields: Any) -> dict[str, Any]:
    digits = job(dataset="digits") | {"training": {"steps": 20, "validate_every": 5}}
    return {"kind": "sweep", "job": digits, "fields": fields}


def measured(metric: str) -> dict[str, Any]:
    target = {"metric": metric, "value": 0.5}
    return job(dataset="digits") | {"training": {"validate_every": 1, "target": target}}


CASES: dict[str, tuple[str, Make, str]] = {
    "an image that is no image": (
        "preview-data",
        lambda folder: image(folder, lambda file: file.write_text("no image")),
        r"a/one\.png cannot be read as an image: it is no PNG or JPEG",
    ),
    "an image that is cut off": (
        "preview-data",
        lambda folder: image(folder, cut_off),
        r"a/one\.png cannot be read as an image: it is cut off or damaged",
    ),
    "an image of zero size": (
        "preview-data",
        lambda folder: image(folder, lambda file: bomb(file, 0, 8)),
        r"a/one\.png cannot be read as an image: it is damaged, or has no pixels",
    ),
    "an image of 20,000 x 20,000": (
        "preview-data",
        lambda folder: image(folder, lambda file: bomb(file, 20_000, 20_000)),
        r"a/one\.png has 400000000 pixels; at most 67108864 are read",
    ),
    "other columns in the second file": (
        "submit",
        lambda folder: table(folder, TABLE, "size,weight,kind\n1,2,a\n"),
        r"1\.csv has other columns than 0\.csv: only 1\.csv has weight",
    ),
    "a missing target": (
        "submit",
        lambda folder: table(folder, TABLE, target="knid"),
        r"0\.csv has no column 'knid'; did you mean 'kind'",
    ),
    "a target without a value": (
        "preview-data",
        lambda folder: table(folder, TABLE + "3,\n"),
        r"the target 'kind' of data file \S+0\.csv has no value in row 3",
    ),
    "a row with too few cells": (
        "preview-data",
        lambda folder: table(folder, TABLE + "3\n"),
        r"0\.csv cannot be read as \.csv: row 3 has 1 cell, and the header has 2",
    ),
    "NaN features": (
        "preview-data",
        lambda folder: table(folder, TABLE + "nan,a\n"),
        r"column 'size' of data file \S+0\.csv has no value in row 3",
    ),
    "another encoding": (
        "preview-data",
        lambda folder: table(folder, (TABLE + "3,caf\xe9\n").encode("latin-1")),
        r"0\.csv cannot be read as \.csv: it is not UTF-8 text",
    ),
    "an empty file": ("submit", lambda folder: table(folder, ""), r"0\.csv is empty"),
    "an empty folder": (
        "submit",
        lambda folder: job(files=[str(folder)], images={"height": 8, "width": 8}),
        r"data\.files: \S+ has no folders of classes",
    ),
    "negative ids": (
        "submit",
        lambda folder: sparse(folder, "user,item,rating\n1,2,3\n1,-2,3\n", "matrix_factorization"),
        r"rows\.csv, line 3: column 'item': key -2 is negative",
    ),
    "keys beyond 2^63": (
        "submit",
        lambda folder: sparse(folder, f"1 3:1\n0 {1 << 63}:1\n"),
        r"rows\.txt, line 2: key 9223372036854775808 is not below 2\^63",
    ),
    "NaN values of sparse rows": (
        "submit",
        lambda folder: sparse(folder, "1 3:nan\n"),
        r"rows\.txt, line 1: a value is NaN",
    ),
    "no column of ratings": (
        "submit",
        lambda folder: sparse(folder, "user,item,stars\n1,2,3\n", "matrix_factorization"),
        r"rows\.csv has no column 'rating'",
    ),
    "a sweep of a million points": (
        "submit",
        lambda _: sweep(**{"training.seed": {"integers": [1, 10**6]}}),
        r"1,000,000 points",
    ),
    "a metric that the task has not": (
        "submit",
        lambda _: measured("rmse"),
        r"training\.target\.metric rmse is no metric of image_classification",
    ),
    "a name of the Hub that cannot exist": (
        "submit",
        lambda _: {"model": {"hub": "../etc"}, "data": {"files": ["/data/a.txt"]}},
        r"model\.hub",
    ),
}


@pytest.mark.slow
def test_data_that_cannot_be_used_is_refused_in_our_words(plane: Plane, run: Any, tmp_path: Path) -> None:
    wrong = []
    for case, (command, make, message) in CASES.items():
        folder = tmp_path / "_".join(re.findall(r"\w+", case))
        folder.mkdir()
        done = run(command, "-", text=yaml.safe_dump(make(folder)))
        first, *hints = done.stderr.strip().splitlines() or [""]
        is_clear = first.startswith("error:") and hints and not LIBRARIES.search(done.stderr)
        if done.returncode != 2 or not is_clear or not re.search(message, first):
            wrong.append((case, done.returncode, done.stderr))
    assert wrong == []
    assert plane.store.jobs.page()[0] == []
