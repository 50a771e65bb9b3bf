"""Returns the first rows of a job's data as training would read them, for a preview before training."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from share_compute.errors import UserError
from share_compute.files.data_preview import Cell, DataPreview, Kind, PreviewColumn
from share_compute.files.plain_files import open_unlinked
from share_compute.files.strict import nearest
from share_compute.quantities import clipped
from share_compute.specification import DataSpec, ImagesSpec, TableSpec, Task

MOST_ROWS = 10
MOST_COLUMNS = 30
"""Maximum number of columns; of a wider table, the first features and the target are shown."""
MOST_CHARACTERS = 400
"""Maximum number of characters of a text; longer texts are cut."""
MOST_SIDE = 64
"""Maximum width and height of the picture of an image, in pixels."""
_MOST_READ = 1 << 20
"""Characters of a .txt file that are read."""


def preview_of(data: DataSpec, task: Task) -> DataPreview:
    """Return the first rows of data.

    All rows are from the first file. The classes of a folder of images take turns. Random changes are left out.

    Args:
        data: the data of a job.
        task: task of the job.

    Raises:
        UserError: the data cannot be used, for the same reasons as in training.
    """
    if data.files is None:
        return _digits()
    if data.table is not None:
        return _table(data.files, data.table, target_is_class=task == "tabular_classification")
    if data.images is not None:
        return _images(data.files[0], data.images)
    if data.text_columns:
        return _texts(data)
    return _plain_text(data.files[0], data.text_column)


def _digits() -> DataPreview:
    from sklearn.datasets import load_digits  # noqa: PLC0415 - heavy

    pixels, labels = load_digits(return_X_y=True)
    rows = [
        (_png(np.uint8(image * 15.9).reshape(1, 8, 8)), str(label))
        for image, label in zip(pixels[:MOST_ROWS], labels[:MOST_ROWS], strict=True)
    ]
    return DataPreview(columns=_image_columns(), rows=tuple(rows))


def _image_columns() -> tuple[PreviewColumn, ...]:
    return (
        PreviewColumn(name="image", kind="image"),
        PreviewColumn(name="class", kind="class", is_target=True),
    )


def _table(files: Sequence[Path], spec: TableSpec, *, target_is_class: bool) -> DataPreview:
    from share_compute.data.table_reading import TableReader, columns_of  # noqa: PLC0415 - imports pyarrow

    reader = TableReader(spec, columns_of(files, spec), target_is_class)
    names = reader.columns
    shown = list(range(len(names)))
    if len(names) > MOST_COLUMNS:
        shown = [*range(MOST_COLUMNS - 1), len(names) - 1]
    found: list[NDArray[np.float64]] = []
    for block in reader.blocks(files[0]):
        found += list(block[: MOST_ROWS - len(found)])
        if len(found) == MOST_ROWS:
            break
    known = {name: list(codes) for name, codes in reader.categories.items()}
    kinds: dict[str, Kind] = {
        name: "number" if name not in known else "class" if name == spec.target else "category"
        for name in names
    }
    columns = tuple(
        PreviewColumn(name=_cut(names[place]), kind=kinds[names[place]], is_target=place == len(names) - 1)
        for place in shown
    )

    def cell(name: str, value: float) -> Cell:
        if np.isnan(value):
            return None
        return _cut(known[name][int(value)]) if name in known else float(value)

    rows = tuple(tuple(cell(names[place], row[place]) for place in shown) for row in found)
    return DataPreview(columns=columns, rows=rows, left_out=len(names) - len(shown))


def _images(source: Path, spec: ImagesSpec) -> DataPreview:
    from share_compute.data.image_files import find_images  # noqa: PLC0415 - imports pyarrow for manifests
    from share_compute.data.images import read_image  # noqa: PLC0415 - images only

    ((classes, _),) = find_images([source])
    named = [[(name, file) for file in classes[name][:MOST_ROWS]] for name in sorted(classes)]
    turns = chain.from_iterable(zip_longest(*named))
    chosen = islice((one for one in turns if one is not None), MOST_ROWS)
    rows = tuple((_png(read_image(file, spec)), _cut(name)) for name, file in chosen)
    return DataPreview(columns=_image_columns(), rows=rows)


def _png(pixels: NDArray[np.uint8]) -> str:
    """Return an image ``[channels, height, width]`` as a PNG file in base64, reduced to `MOST_SIDE` pixels."""
    from PIL import Image  # noqa: PLC0415 - images only

    image = Image.fromarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0))
    image.thumbnail((MOST_SIDE, MOST_SIDE))
    content = io.BytesIO()
    image.save(content, "PNG")
    return base64.b64encode(content.getvalue()).decode("ascii")


def _texts(data: DataSpec) -> DataPreview:
    from share_compute.data.labelled_rows import check_columns, read_labelled  # noqa: PLC0415 - imports pyarrow

    check_columns(data)
    assert data.files is not None
    target = "data.labels.column"
    columns = tuple(
        PreviewColumn(name=_cut(name), kind="class" if field == target else "text", is_target=field == target)
        for field, name in data.text_columns.items()
    )
    rows = []
    for row in _first(read_labelled(data.files[0], data)):
        texts = {"data.text_column": row.text, target: row.label}
        rows.append(tuple(_cut(texts.get(field, row.pair) or "") for field in data.text_columns))
    return DataPreview(columns=columns, rows=tuple(rows))


def _plain_text(file: Path, column: str) -> DataPreview:
    texts = _lines(file) if file.suffix == ".txt" else _documents(file, column)
    name = "text" if file.suffix == ".txt" else _cut(column)
    rows = tuple((_cut(text),) for text in islice(texts, MOST_ROWS))
    return DataPreview(columns=(PreviewColumn(name=name, kind="text"),), rows=rows)


def _lines(file: Path) -> Iterator[str]:
    """Yield the non-empty lines at the beginning of a .txt file."""
    from share_compute.data.table_reading import unreadable  # noqa: PLC0415 - imports pyarrow

    try:
        with open_unlinked(file) as opened, io.TextIOWrapper(opened, "utf-8-sig") as text:
            start = text.read(_MOST_READ)
    except (ValueError, OSError) as failure:
        raise unreadable(file, failure) from failure
    yield from filter(str.strip, start.splitlines())


def _documents(file: Path, column: str) -> Iterator[str]:
    """Yield the documents of a .jsonl or .parquet file: the rows that have text."""
    import pyarrow as pa  # noqa: PLC0415 - heavy

    from share_compute.data.labelled_rows import column_blocks, names_in  # noqa: PLC0415 - imports pyarrow
    from share_compute.data.table_reading import unreadable  # noqa: PLC0415 - imports pyarrow

    known = names_in(file)
    if column not in known:
        guess = nearest(column, known)
        raise UserError(
            f"data file {file} has no column {clipped(column)!r}"
            + (f"; did you mean {clipped(guess)!r}?" if guess else ""),
            hint=f"set data.text_column to a column of the file: {', '.join(map(clipped, known[:20]))}",
        )
    try:
        for block in column_blocks(file, [column]):
            for (value,) in block:
                if value is not None and not isinstance(value, str):
                    raise UserError(
                        f"column {clipped(column)!r} of {file} holds {type(value).__name__}, not text",
                        hint="name a column of strings in data.text_column",
                    )
                if value:
                    yield value
    except (ValueError, OSError, pa.ArrowException) as failure:
        raise unreadable(file, failure) from failure


def _first(blocks: Iterator[list[Any]]) -> Iterator[Any]:
    return islice(chain.from_iterable(blocks), MOST_ROWS)


def _cut(text: str) -> str:
    """Return a text that can be sent as UTF-8, of at most `MOST_CHARACTERS` characters."""
    short = text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - 1] + "…"
    return short.encode("utf-8", "replace").decode()
