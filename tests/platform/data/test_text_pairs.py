"""Pairs of texts for embeddings: reading, padding, the loss over a microbatch, and pairs that cannot be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.platform.data.test_labelled_texts import write
from tokenizers import processors
from torch.nn.functional import cosine_similarity, cross_entropy
from transformers import AutoTokenizer

from share_compute.data import PreparedData, prepare
from share_compute.data.text_pairs import prepare_pairs
from share_compute.data.tokenization import train_tokenizer
from share_compute.errors import UserError
from share_compute.models.blueprint import blueprint_of
from share_compute.models.boundary import boundary_shape
from share_compute.models.factory import build_stage, dissect
from share_compute.models.layers import require_fit
from share_compute.models.losses import loss_sum, similarities, target_count
from share_compute.shards import Shard
from share_compute.specification import parse_job

ROWS = [{"text": f"the number {number}", "positive": f"{number} is a number"} for number in range(20)]
LENGTH = 24


def job(file: Path, training: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return {
        "model": {
            "layers": [
                {"type": "embedding_bag", "options": {"num_embeddings": 400, "embedding_dim": 8}},
                {"type": "linear", "options": {"in_features": 8, "out_features": 4}},
            ]
        },
        "data": {"files": [str(file)], "pairs": {}, "validation_fraction": 0.2, "test_fraction": 0},
        "training": {"sequence_length": LENGTH, "batch_size": 8, "microbatches": 2, **(training or {})},
        **changes,
    }


def prepared(file: Path) -> PreparedData:
    return prepare(parse_job(job(file)), file.parent / "prepared")


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_pairs_are_padded_and_split(tmp_path: Path, suffix: str) -> None:
    found = prepared(write(tmp_path / f"pairs{suffix}", ROWS))
    assert (found.samples.size("train"), found.samples.size("validation")) == (16, 4)
    assert found.sample_shape == (2, LENGTH)
    tokenizer = AutoTokenizer.from_pretrained(found.tokenizer_folder)
    inputs, targets = found.samples.take("train", range(16))
    assert inputs.shape == (16, 2, LENGTH)
    seen = [
        tuple(tokenizer.decode(ids[: last + 1]) for ids, last in zip(pair, places, strict=True))
        for pair, places in zip(inputs, targets, strict=True)
    ]
    assert set(seen) < {(row["text"], row["positive"]) for row in ROWS}
    assert len(set(seen)) == 16
    past = np.arange(LENGTH) > targets[:, :, None]
    assert (inputs[past] == tokenizer.pad_token_id).all()


def test_the_last_token_is_the_padding_token_that_the_tokenizer_appends(tmp_path: Path) -> None:
    tokenizer = train_tokenizer((row["text"] for row in ROWS), 300)  # without a padding token
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", tokenizer.eos_token_id)]
    )
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    file = write(tmp_path / "pairs.jsonl", ROWS)
    spec = parse_job(job(file, tokenizer={"path": str(tmp_path / "tokenizer")}))
    found = prepare_pairs(spec, tmp_path / "prepared", lambda _activity, _share: None)
    inputs, targets = found.samples.take("train", range(16))
    for pair, places in zip(inputs, targets, strict=True):
        for ids, last in zip(pair, places, strict=True):
            text = tokenizer.decode(ids[: last + 1])
            assert text.endswith("<|endoftext|>")
            assert last == len(tokenizer(text.removesuffix("<|endoftext|>"))["input_ids"]) - 1


def test_the_loss_is_that_of_a_microbatch(tmp_path: Path) -> None:
    file = write(tmp_path / "pairs.jsonl", ROWS)
    found, spec = prepared(file), parse_job(job(file))
    made = blueprint_of(spec, None, objective=found.objective, sample_shape=found.sample_shape)
    require_fit(made)
    assert blueprint_of(spec, None).sample_shape == found.sample_shape
    assert dissect(made).counted
    assert boundary_shape(made, 1, 4, LENGTH) == (8, 8)
    parts = [build_stage(made, Shard("m", place, place + 1, 2), torch.device("cpu")) for place in range(2)]
    for part in parts:
        part.initialize(0)
    ids, targets = map(torch.tensor, found.samples.take("train", range(4)))
    outputs = parts[1].forward(parts[0].forward(ids))
    first, second = (parts[1].forward(parts[0].forward(ids[:, [place, place]]))[::2] for place in range(2))
    cosines = cosine_similarity(first[:, None], second[None], dim=-1) / 0.05
    expected = cross_entropy(cosines, torch.arange(4), reduction="sum")
    assert torch.allclose(similarities(outputs, made.objective), cosines, atol=1e-5)
    assert loss_sum(outputs, targets, made.objective).item() == pytest.approx(expected.item(), abs=1e-5)
    assert target_count(targets, made.objective) == 4


@pytest.mark.parametrize(("fraction", "wanted"), [(0.05, 0), (0.2, 4), (0.25, 4), (0.3, 6)])
def test_no_pair_is_alone_in_a_microbatch_of_an_evaluation(
    tmp_path: Path, fraction: float, wanted: int
) -> None:
    file = write(tmp_path / "pairs.jsonl", ROWS)
    document = job(file)
    document["data"] |= {"validation_fraction": fraction}
    found = prepare(parse_job(document), tmp_path / "prepared")
    assert found.samples.size("validation") == wanted
    told = "the last pair of the validation split is left out: it would be alone in its microbatch"
    assert (told in found.notes) == (wanted < 20 * fraction)
    assert found.samples.size("train") == round(20 * (1 - fraction))


def test_layers_that_return_no_vector_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "pairs.jsonl", ROWS)
    found = prepared(file)
    layers = [{"type": "embedding", "options": {"num_embeddings": 400, "embedding_dim": 8}}]
    spec = parse_job(job(file, model={"layers": layers}))
    with pytest.raises(UserError, match=r"the model's last layer returns \[24, 8\] for each text"):
        require_fit(blueprint_of(spec, None, objective=found.objective, sample_shape=found.sample_shape))


@pytest.mark.parametrize(
    ("training", "changes", "message"),
    [
        (
            {"batch_size": 8, "microbatches": 8},
            {},
            "batch_size 8 with 8 microbatches gives microbatches of one pair",
        ),
        (
            {"loss": {"name": "cross_entropy", "temperature": 0.1}},
            {"data": {"dataset": "digits"}},
            "training.loss.temperature needs training.loss.name info_nce",
        ),
        ({"microbatches": None}, {}, "training.microbatches is needed for embedding"),
        ({"loss": {"class_weights": "balanced"}}, {}, "embedding has no classes"),
        ({"loss": {"name": "cross_entropy"}}, {}, "cross_entropy is no loss of embedding: info_nce"),
        ({}, {"task": "text_classification"}, "task text_classification does not fit the data"),
    ],
)
def test_jobs_that_have_nothing_to_compare(training: Any, changes: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_job(job(Path("a.csv"), training, **changes))


def test_a_pair_without_a_second_text_is_named(tmp_path: Path) -> None:
    file = write(tmp_path / "pairs.jsonl", [*ROWS, {"text": "a", "positive": ""}])
    with pytest.raises(
        UserError, match=r"column 'positive' of data file .*pairs.jsonl has no text in row 21"
    ):
        prepared(file)
    with pytest.raises(UserError, match="has no column 'positive'"):
        prepared(write(tmp_path / "other.jsonl", [{"text": "a", "second": "b"}]))
