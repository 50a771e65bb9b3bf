"""Readers of sparse data: the rows that they read, and their errors."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from sklearn.datasets import dump_svmlight_file, load_svmlight_file

from share_compute.errors import UserError
from share_compute.sparse.blocks import RawRows
from share_compute.sparse.readers.bags import BagCounts, bag_blocks, bag_header
from share_compute.sparse.readers.libsvm import libsvm_blocks
from share_compute.sparse.readers.parts import FilePart, split_files
from share_compute.sparse.readers.ratings import ratings_blocks, write_triples


def joined(blocks: list[RawRows]) -> RawRows:
    starts = [np.zeros(1, np.int64)]
    for block in blocks:
        starts.append(block.starts[1:] + starts[-1][-1])
    keys, values, targets = (
        np.concatenate([getattr(block, name) for block in blocks]) for name in ("keys", "values", "targets")
    )
    return RawRows(np.concatenate(starts), keys, values, targets)


def written(folder: Path, text: str, name: str = "data.libsvm") -> Path:
    file = folder / name
    file.write_text(text)
    return file


@pytest.mark.parametrize("block_bytes", [200, 1 << 20])
def test_libsvm_is_read_as_scikit_learn_reads_it(tmp_path: Path, block_bytes: int) -> None:
    draw = np.random.default_rng(0)
    features = draw.normal(size=(200, 20)) * (draw.random((200, 20)) < 0.3)
    with io.BytesIO() as content:
        dump_svmlight_file(features, draw.integers(0, 2, 200), content, comment="made here")
        (tmp_path / "data.libsvm").write_bytes(content.getvalue())
    expected, targets = load_svmlight_file(str(tmp_path / "data.libsvm"), zero_based=True)
    blocks = list(libsvm_blocks(tmp_path / "data.libsvm", max(block_bytes, 400)))
    assert len(blocks) > 1 or block_bytes > 400
    rows = joined(blocks)
    assert rows.targets.tolist() == targets.tolist()
    assert rows.starts.tolist() == expected.indptr.tolist()
    assert rows.keys.tolist() == expected.indices.tolist()
    np.testing.assert_array_equal(rows.values, expected.data)


def test_unsorted_keys_are_sorted_and_large_keys_are_exact(tmp_path: Path) -> None:
    text = f"+1 7:2 3:1e-2 {(1 << 63) - 1}:-4\n\n-1 # empty\n0.5 5:.5"
    rows = joined(list(libsvm_blocks(written(tmp_path, text))))
    assert rows.keys.tolist() == [3, 7, (1 << 63) - 1, 5]
    assert rows.values.tolist() == [0.01, 2, -4, 0.5]
    assert rows.starts.tolist() == [0, 3, 3, 4]
    assert rows.targets.tolist() == [1, -1, 0.5]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("1 -3:1", "key -3 is negative"),
        (f"1 {1 << 63}:1", "is not below 2^63"),
        (f"1 {10**30}:1", "is not below 2^63"),
        ("1 3:nan", "a value is NaN"),
        ("1 3:inf", "beyond"),
        ("1 3:1e300", "beyond"),
        ("1 3:2e19", "beyond"),
        ("nan 3:1", "the target: a value is NaN"),
        ("1 3:1 3:2", "key 3 occurs twice"),
        ("1 x:1", "'x' is no whole number"),
        ("1 3:x", "'x' is no number"),
        ("1 3: 4", "'' is no number"),
        ("1 3:4:5", "'4:5' is no number"),
        ("1 :4", "'' is no whole number"),
        ("1 3", "has no colon"),
        ("1 1.5:2", "is no whole number"),
        ("3:1", "the target: value '3:1' is no number"),
        ("1 qid:3 1:1", "qid is not read"),
    ],
)
def test_wrong_lines_of_libsvm_are_named(tmp_path: Path, line: str, told: str) -> None:
    file = written(tmp_path, f"# a comment\n1 1:1\n{line}\n1 2:1\n")
    with pytest.raises(UserError) as caught:
        list(libsvm_blocks(file))
    assert f"{file}, line 3: " in caught.value.message
    assert told in caught.value.message
    assert caught.value.hint


def test_a_line_that_is_too_long_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path, "1 1:1\n1 " + " ".join(f"{key}:1" for key in range(1000)))
    with pytest.raises(UserError, match="line 2: it is longer than 100 bytes"):
        list(libsvm_blocks(file, 100))


@pytest.mark.parametrize("text", ["0:0 0\n", "0 1:2:3 4\n", "0 1 2:3:4\n", "1 2:3\n4:5 6\n"])
def test_each_entry_has_one_colon_and_a_target_has_none(tmp_path: Path, text: str) -> None:
    file = tmp_path / "rows.libsvm"
    file.write_text(text)
    with pytest.raises(UserError, match="line"):
        list(libsvm_blocks(file))


@given(st.text(alphabet="01.:- \n+e#xq", max_size=60))
@settings(max_examples=500, deadline=None)
def test_any_text_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    """The fast parser accepts only what the plain rule accepts: a target, then key:value words."""
    file = tmp_path_factory.getbasetemp() / "any.libsvm"
    file.write_text(text)
    try:
        blocks = list(libsvm_blocks(file))
    except UserError:
        return
    plain = [line.partition("#")[0].split() for line in text.splitlines()]
    lines = [line for line in plain if line]
    if not lines:
        assert blocks == []
        return
    rows = joined(blocks)
    assert rows.targets.tolist() == [float(line[0]) for line in lines]
    pairs = [
        sorted((int(word.split(":")[0]), float(word.split(":")[1])) for word in line[1:]) for line in lines
    ]
    assert list(zip(rows.keys.tolist(), rows.values.tolist(), strict=True)) == [
        each for line in pairs for each in line
    ]


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_ratings_are_read(tmp_path: Path, suffix: str) -> None:
    table: dict[str, list[Any]] = {
        "rating": [4.5, 1.0, 3.0],
        "user": [7, 0, 7],
        "item": [7, (1 << 63) - 1, 1],
        "time": [1, 2, 3],
    }
    file = tmp_path / f"ratings.{suffix}"
    if suffix == "csv":
        lines = [",".join(table), *(",".join(map(str, row)) for row in zip(*table.values(), strict=True))]
        file.write_text("\n".join(lines))
    else:
        parquet.write_table(pa.table({**table, "item": pa.array(table["item"], pa.uint64())}), file)
    [rows] = ratings_blocks(file)
    assert rows.targets.tolist() == table["rating"]
    assert rows.keys.reshape(-1, 2).tolist() == [
        list(pair) for pair in zip(table["user"], table["item"], strict=True)
    ]
    assert rows.is_second is not None
    assert rows.is_second.reshape(-1, 2).tolist() == [[False, True]] * 3


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("-1,2,3", "column 'user': key -1 is negative"),
        (f"1,{1 << 63},3", "column 'item': key 9223372036854775808 is not below 2^63"),
        ("1,2,nan", "column 'rating': a value is NaN"),
        ("1,2,", "column 'rating': value '' is no number"),
        ("1,2.5,3", "column 'item': key '2.5' is no whole number"),
        ("ann,2,3", "column 'user': key 'ann' is no whole number"),
        ("1,2", "it has 2 cells, and the header has 3"),
        ("1,2,3,4", "it has 4 cells, and the header has 3"),
    ],
)
def test_wrong_ratings_are_named(tmp_path: Path, line: str, told: str) -> None:
    file = written(tmp_path, f"user,item,rating\n1,1,1\n{line}\n", "ratings.csv")
    with pytest.raises(UserError) as caught:
        list(ratings_blocks(file))
    assert f"{file}, line 3: {told}" in caught.value.message


def test_ratings_without_a_column_are_refused(tmp_path: Path) -> None:
    file = written(tmp_path, "user,item,stars\n1,1,1\n", "ratings.csv")
    with pytest.raises(UserError, match=r"ratings\.csv has no column 'rating'$") as caught:
        list(ratings_blocks(file))
    assert "data.columns" in str(caught.value.hint)
    misspelt = written(tmp_path, "user,item,ratings\n1,1,1\n", "misspelt.csv")
    with pytest.raises(UserError, match="has no column 'rating'; did you mean 'ratings'"):
        list(ratings_blocks(misspelt))
    negative = tmp_path / "ratings.parquet"
    parquet.write_table(pa.table({"user": [1, -5], "item": [1, 1], "rating": [1.0, 2.0]}), negative)
    with pytest.raises(UserError, match="line 2: column 'user': key -5 is negative"):
        list(ratings_blocks(negative))


@pytest.mark.parametrize("block_bytes", [12, 1 << 20])
def test_bags_of_words_are_read(tmp_path: Path, block_bytes: int) -> None:
    file = written(tmp_path, "3\n9\n5\n1 4 2\n1 2 1\n2 9 3\n5 1 1\n5 2 7\n", "docword.txt")
    rows = joined(list(bag_blocks(file, block_bytes)))
    assert rows.starts.tolist() == [0, 2, 3, 5]
    assert rows.keys.tolist() == [2, 4, 9, 1, 2]
    assert rows.values.tolist() == [1, 2, 3, 1, 7]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("1 2 1\n1 -2 1\n", "line 5: key -2 is negative"),
        ("1 2 1\n1 3\n", "line 5: it has 2 fields"),
        ("2 2 1\n1 2 1\n", "line 5: its document comes after a later one"),
        ("1 2 1\n1 3 0\n", "line 5: count 0 is not positive"),
        ("1 2 1\n1 3 nan\n", "line 5: a value is NaN"),
        ("1 2 1\n1 2 3\n", "document 1 has word 2 twice"),
        ("1 2 1\n", "has 1 entries; its header says 2"),
    ],
)
def test_wrong_bags_of_words_are_named(tmp_path: Path, body: str, told: str) -> None:
    file = written(tmp_path, f"2\n9\n2\n{body}", "docword.txt")
    with pytest.raises(UserError) as caught:
        list(bag_blocks(file))
    assert told in caught.value.message


@pytest.mark.parametrize("reader", [libsvm_blocks, ratings_blocks, bag_blocks])
def test_files_that_do_not_exist_are_named(tmp_path: Path, reader: object) -> None:
    with pytest.raises(UserError, match=r"missing\.csv"):
        list(reader(tmp_path / "missing.csv"))  # type: ignore[operator]


def drawn_libsvm(draw: np.random.Generator, lines: int) -> str:
    texts = []
    for _ in range(lines):
        keys = np.sort(draw.choice(50, draw.integers(0, 6), replace=False))
        row = " ".join([f"{draw.integers(2)}", *(f"{key}:{key + 0.5}" for key in keys)])
        texts.append(str(draw.choice([row, row + "  # a comment", "", row + "\r"])))
    return "\n".join(texts) + str(draw.choice(["", "\n"]))


def drawn_csv(draw: np.random.Generator, lines: int) -> str:
    notes = ["plain", '"two\nlines"', '"a ""quoted"" word\n,1,1"']
    rows = [f"{draw.choice(notes)},{user},{draw.integers(9)},{draw.normal():.3f}" for user in range(lines)]
    return "\n".join(["note,user,item,rating", *rows]) + str(draw.choice(["", "\n"]))


def drawn_bag(draw: np.random.Generator, lines: int) -> str:
    triples = []
    for document in range(1, lines + 1):
        words = draw.choice(30, draw.integers(0, 7), replace=False)
        triples += [f"{document} {word} {draw.integers(1, 5)}" for word in words]
    return "\n".join([str(lines), "30", str(len(triples)), *triples]) + "\n"


@pytest.mark.parametrize("kind", ["libsvm", "ratings", "bags", "triples"])
def test_all_parts_together_are_the_rows_of_the_files(tmp_path: Path, kind: str) -> None:
    """Files are cut at drawn places, and blocks of the reader end at other places."""
    drawn_text = {"libsvm": drawn_libsvm, "bags": drawn_bag}.get(kind, drawn_csv)
    readers: dict[str, Any] = {"libsvm": libsvm_blocks, "bags": bag_blocks}
    form: Any = kind if kind in readers else "ratings"
    for seed in range(60):
        draw = np.random.default_rng(seed)
        suffix = {"libsvm": "txt", "bags": "txt"}.get(kind, "csv")
        files = [
            written(tmp_path, drawn_text(draw, int(draw.integers(8, 40))), f"{number}.{suffix}")
            for number in range(draw.integers(1, 4))
        ]
        if kind == "triples":
            for file in files:
                write_triples(file, ("user", "item", "rating"), file.with_suffix(".triples"))
            files = [file.with_suffix(".triples") for file in files]
        whole = joined([rows for file in files for rows in readers.get(kind, ratings_blocks)(file)])
        workers = int(draw.integers(1, 5))
        found, entries = [], 0
        for parts in split_files(files, form, workers):
            for each in parts:
                part = FilePart(each.start, each.stop, each.header)
                size = int(draw.integers(100, 400))
                if kind == "bags":
                    counts = BagCounts()
                    found += list(bag_blocks(files[each.file], size, part, counts))
                    entries += counts.entries
                elif kind == "libsvm":
                    found += list(libsvm_blocks(files[each.file], size, part))
                else:
                    found += list(ratings_blocks(files[each.file], block_bytes=size, part=part))
        again = joined(found)
        for name in ("starts", "keys", "values", "targets"):
            np.testing.assert_array_equal(getattr(again, name), getattr(whole, name), f"seed {seed}: {name}")
        if kind == "bags":
            assert entries == sum(bag_header(file)[2] for file in files)


@pytest.mark.parametrize(
    ("kind", "name", "text", "told"),
    [
        ("libsvm", "data.txt", "1 1:1\n" * 30 + "1 1:x\n", "line 31: value 'x' is no number"),
        ("ratings", "data.csv", "user,item,rating\n" + "1,2,3\n" * 30 + "1,-2,3\n", "line 32: column 'item'"),
        ("bags", "data.txt", "9\n9\n31\n" + "".join(f"{n} 1 1\n" for n in range(30)) + "30 1 0\n", "line 34"),
    ],
)
def test_errors_in_a_later_part_name_the_line_of_the_file(
    tmp_path: Path, kind: Any, name: str, text: str, told: str
) -> None:
    file = written(tmp_path, text, name)
    [last] = split_files([file], kind, 3)[-1]
    part = FilePart(last.start, last.stop, last.header)
    readers: dict[str, Any] = {"libsvm": libsvm_blocks, "bags": bag_blocks, "ratings": ratings_blocks}
    with pytest.raises(UserError) as caught:
        list(readers[kind](file, part=part))
    assert told in caught.value.message


def test_more_workers_than_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="too few rows for 3 workers"):
        split_files([written(tmp_path, "1 1:1\n0 2:1\n")], "libsvm", 3)
