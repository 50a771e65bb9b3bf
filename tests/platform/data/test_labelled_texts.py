"""Texts with labels: reading, tokenizing, padding, splitting, and texts that cannot be used."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from tokenizers import processors
from transformers import AutoTokenizer

from share_compute.data import PreparedData, prepare
from share_compute.data.samples import SPLITS
from share_compute.data.tokenization import train_tokenizer
from share_compute.errors import UserError
from share_compute.specification import parse_job

TEXTS: list[tuple[Any, Any]] = [
    ("the sea is calm", "water"),
    ("the hill is steep", "land"),
    ("a river, wide and slow", "water"),
    ("a stone", "land"),
] * 5
LENGTH = 16


def write(file: Path, rows: list[dict[str, Any]]) -> Path:
    match file.suffix:
        case ".csv":
            with file.open("w", newline="") as opened:
                writer = csv.DictWriter(opened, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)
        case ".jsonl":
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        case _:
            parquet.write_table(pa.Table.from_pylist(rows), file)
    return file


def rows_of(texts: list[tuple[Any, Any]]) -> list[dict[str, Any]]:
    return [{"text": text, "label": label} for text, label in texts]


def prepared(file: Path, labels: Any = None, training: Any = None, **data: Any) -> PreparedData:
    spec = parse_job(
        {
            "model": {
                "layers": [{"type": "embedding_bag", "options": {"num_embeddings": 400, "embedding_dim": 8}}]
            },
            "data": {"files": [str(file)], "labels": labels or {}, **data},
            "training": {"sequence_length": LENGTH, **(training or {})},
        }
    )
    return prepare(spec, file.parent / "prepared")


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_texts_are_padded_and_split(tmp_path: Path, suffix: str) -> None:
    file = write(tmp_path / f"texts{suffix}", rows_of(TEXTS))
    found = prepared(file, validation_fraction=0.2, test_fraction=0.1)
    assert [found.samples.size(split) for split in SPLITS] == [14, 4, 2]
    assert found.sample_shape == (LENGTH,)
    assert found.objective is not None
    assert (found.objective.task, found.objective.classes) == ("text_classification", 2)
    assert found.description is not None
    assert found.description["classes"] == ["land", "water"]
    tokenizer = AutoTokenizer.from_pretrained(found.tokenizer_folder)
    assert tokenizer.pad_token_id == found.objective.padding != tokenizer.eos_token_id
    known = dict(TEXTS)
    seen = []
    for split in SPLITS:
        inputs, targets = found.samples.take(split, range(found.samples.size(split)))
        assert inputs.dtype == targets.dtype == np.int64
        for ids, (label, last) in zip(inputs, targets, strict=True):
            text = tokenizer.decode(ids[: last + 1])
            assert (ids[last + 1 :] == tokenizer.pad_token_id).all()
            assert ["land", "water"][label] == known[text]
            seen.append(text)
    assert sorted(seen) == sorted(text for text, _ in TEXTS)
    with pytest.raises(IndexError):
        found.samples.take("test", [2])
    before = (tmp_path / "prepared" / "texts.bin").stat().st_mtime_ns
    prepared(file, validation_fraction=0.2, test_fraction=0.1)
    assert (tmp_path / "prepared" / "texts.bin").stat().st_mtime_ns == before


def test_pairs_are_separated_and_long_ones_are_cut(tmp_path: Path) -> None:
    rows = [
        {"text": f"is {number} less", "other": f"than {other}? " * times, "label": number < other}
        for number, other, times in ((1, 2, 1), (3, 2, 1), (5, 6, 30), (9, 8, 1))
    ]
    file = write(tmp_path / "pairs.jsonl", rows)
    found = prepared(file, {"pair": "other"}, validation_fraction=0, test_fraction=0)
    assert found.description is not None
    assert found.description["classes"] == ["False", "True"]
    tokenizer = AutoTokenizer.from_pretrained(found.tokenizer_folder)
    inputs, targets = found.samples.take("train", range(4))
    texts = {tokenizer.decode(ids[: last + 1]) for ids, (_, last) in zip(inputs, targets, strict=True)}
    assert "is 1 less<|endoftext|>than 2? " in texts
    assert sum(last == LENGTH - 1 for _, last in targets) >= 1
    assert any("texts fill training.sequence_length 16" in note for note in found.notes)


def test_a_folders_tokenizer_and_files_of_their_own_are_used(tmp_path: Path) -> None:
    tokenizer = train_tokenizer((text for text, _ in TEXTS), 300)  # without a padding token
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    file = write(tmp_path / "train.csv", rows_of(TEXTS))
    other = write(tmp_path / "other.csv", rows_of([("a cliff", "land")]))
    spec = parse_job(
        {
            "model": {"config": {"model_type": "llama", "vocab_size": 300}},
            "tokenizer": {"path": str(tmp_path / "tokenizer")},
            "data": {
                "files": [str(file)],
                "labels": {"column": "label"},
                "validation_files": [str(other)],
                "test_fraction": 0,
            },
            "training": {"sequence_length": LENGTH},
        }
    )
    found = prepare(spec, tmp_path / "prepared")
    assert [found.samples.size(split) for split in SPLITS] == [20, 1, 0]
    inputs, targets = found.samples.take("validation", [0])
    assert tokenizer.decode(inputs[0][: targets[0, 1] + 1]) == "a cliff"
    assert found.objective is not None
    assert found.objective.padding == tokenizer.eos_token_id


def test_an_end_of_text_token_that_pads_is_not_the_last_token(tmp_path: Path) -> None:
    tokenizer = train_tokenizer((text for text, _ in TEXTS), 300)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", tokenizer.eos_token_id)]
    )
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    file = write(tmp_path / "texts.csv", rows_of(TEXTS))
    job = {
        "model": {"config": {"model_type": "llama", "vocab_size": 300}},
        "tokenizer": {"path": str(tmp_path / "tokenizer")},
        "data": {"files": [str(file)], "labels": {}},
        "training": {"sequence_length": 32},
    }
    inputs, targets = prepare(parse_job(job), tmp_path / "prepared").samples.take("train", range(5))
    for ids, (_, last) in zip(inputs, targets, strict=True):
        assert tokenizer.decode(ids[: last + 1]) in dict(
            TEXTS
        )  # as transformers counts tokens other than padding
        assert ids[last + 1] == tokenizer.eos_token_id


def test_labels_are_sorted_as_numbers_if_all_are_numbers(tmp_path: Path) -> None:
    for labels, expected in (("10 9 -1", ["-1", "9", "10"]), ("10 9 nan", ["10", "9", "nan"])):
        rows = rows_of([("some text", label) for label in labels.split()] * 20)
        found = prepared(write(tmp_path / "texts.jsonl", rows))
        assert found.description is not None
        assert found.description["classes"] == expected


@pytest.mark.parametrize(
    ("rows", "labels", "message", "hint"),
    [
        ([{"body": "a", "label": "b"}], {}, "texts.jsonl has no column 'text'", "data.text_column"),
        (
            rows_of(TEXTS),
            {"column": "labl"},
            "has no column 'labl'; did you mean 'label'?",
            "data.labels.column",
        ),
        (rows_of(TEXTS), {"pair": "second"}, "has no column 'second'", "data.labels.pair"),
        (
            rows_of([*TEXTS, (" ", "land")]),
            {},
            "column 'text' of data file .*texts.jsonl has no text in row 21",
            "row",
        ),
        (rows_of([(1, "land")]), {}, "has int in row 1, not text", "data.text_column"),
        (
            rows_of([*TEXTS, ("a", None)]),
            {},
            "column 'label' of data file .* has no label in row 21",
            "column",
        ),
        (rows_of([("a", 1.5)]), {}, "has float, no label, in row 1", "whole numbers"),
        (rows_of([("a", "x" * 2000)]), {}, "has a label of 2000 characters in row 1", "whole numbers"),
        (rows_of([("a", "b")] * 9), {}, "all training samples have the same class, 'b'", "two classes"),
    ],
)
def test_texts_that_cannot_be_used(
    tmp_path: Path, rows: list[dict[str, Any]], labels: Any, message: str, hint: str
) -> None:
    file = write(tmp_path / "texts.jsonl", rows)
    with pytest.raises(UserError, match=message) as caught:
        prepared(file, labels)
    assert hint in (caught.value.hint or "")


def test_a_label_that_only_validation_has(tmp_path: Path) -> None:
    file = write(tmp_path / "train.csv", rows_of(TEXTS))
    write(tmp_path / "other.csv", rows_of([("a cloud", "sky")]))
    with pytest.raises(
        UserError, match=r"class 'sky' is in the validation split, .*: column 'label' of .*other.csv"
    ):
        prepared(file, validation_files=[str(tmp_path / "other.csv")])


def test_a_tokenizer_that_cannot_be_used(tmp_path: Path) -> None:
    file = write(tmp_path / "texts.csv", rows_of(TEXTS))
    tokenizer = train_tokenizer((text for text, _ in TEXTS), 300)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "bare")
    job = {
        "model": {"config": {"model_type": "llama", "vocab_size": 300}},
        "tokenizer": {"path": str(tmp_path / "bare")},
        "data": {"files": [str(file)], "labels": {}},
    }
    with pytest.raises(UserError, match="neither a padding token nor an end-of-text token"):
        prepare(parse_job(job), tmp_path / "prepared")
    with pytest.raises(UserError, match="the tokenizer has 259 tokens, but the model's vocab_size is 257"):
        prepare(
            parse_job(
                {**job, "tokenizer": {}, "model": {"config": {"model_type": "llama", "vocab_size": 257}}}
            ),
            tmp_path / "prepared",
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": {"column": "text"}}, "column 'text' is named twice"),
        ({"labels": {}, "files": ["a.txt"]}, "cannot read a.txt; known: .csv, .jsonl, .parquet"),
        (
            {"labels": {}, "table": {"target": "a"}},
            "files are read in one way: give only one of table and labels",
        ),
        ({"labels": {}, "files": ["a.csv", "./a.csv"]}, "files names a.csv, which data has already"),
    ],
)
def test_descriptions_that_contradict_themselves(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_job({"model": {"config": {"model_type": "llama"}}, "data": {"files": ["a.csv"], **change}})


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"samples": {"every": 1, "prompts": ["a"]}}, "a model for text_classification makes no text"),
        ({"loss": {"name": "mse"}}, "mse is no loss of text_classification"),
    ],
)
def test_training_that_the_task_lacks(training: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_job({"model": {"path": "m"}, "data": {"files": ["a.csv"], "labels": {}}, "training": training})


def test_adapters_are_for_pretrained_models() -> None:
    layers = [{"type": "embedding_bag", "options": {"num_embeddings": 300, "embedding_dim": 2}}]
    for model, message in (
        ({"layers": layers}, r"training\.lora adapts Hugging Face models, not declared layers"),
        ({"config": {"model_type": "llama"}}, r"training\.lora adapts a pretrained model: give model\.path"),
    ):
        with pytest.raises(UserError, match=message):
            parse_job({"model": model, "data": {"files": ["a.csv"], "labels": {}}, "training": {"lora": {}}})


def two_columns(file: Path) -> Path:
    columns = ["text", "label", "text"]
    if file.suffix == ".csv":
        file.write_text(",".join(columns) + "\na,b,c\n")
    else:
        parquet.write_table(pa.Table.from_arrays([pa.array(["a"])] * 3, names=columns), file)
    return file


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_file_with_two_columns_of_one_name_is_refused(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(UserError, match=r"texts\..* has two columns 'text'"):
        prepared(two_columns(tmp_path / f"texts{suffix}"))


def test_a_text_of_padding_alone_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "texts.jsonl", rows_of([*TEXTS, ("<|padding|><|padding|>", "land")]))
    with pytest.raises(UserError, match=r"texts\.jsonl has a text without tokens in row 21"):
        prepared(file)


@pytest.mark.parametrize("side", ["left", "right"])
def test_long_texts_are_cut_on_the_side_that_the_tokenizer_names(tmp_path: Path, side: str) -> None:
    tokenizer = train_tokenizer((text for text, _ in TEXTS), 300)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    options = tmp_path / "tokenizer" / "tokenizer_config.json"
    options.write_text(json.dumps({**json.loads(options.read_text()), "truncation_side": side}))
    text = "a hill " + "x" * 64 * LENGTH + " the sea"
    file = write(tmp_path / "texts.jsonl", rows_of([(text, "land"), ("b", "water")]))
    spec = parse_job(
        {
            "model": {"config": {"model_type": "llama", "vocab_size": 300}},
            "tokenizer": {"path": str(tmp_path / "tokenizer")},
            "data": {"files": [str(file)], "labels": {}, "validation_fraction": 0, "test_fraction": 0},
            "training": {"sequence_length": LENGTH},
        }
    )
    inputs, targets = prepare(spec, tmp_path / "prepared").samples.take("train", range(2))
    (ids,) = inputs[targets[:, 1] == LENGTH - 1]
    known = AutoTokenizer.from_pretrained(tmp_path / "prepared" / "tokenizer")
    assert known.truncation_side == side
    assert ids.tolist() == known(text, truncation=True, max_length=LENGTH)["input_ids"]
