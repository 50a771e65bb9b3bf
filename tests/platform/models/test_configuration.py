"""A job's model configuration, read in the same way for a plan on paper and for training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from share_compute.data.tokenization import DEFAULT_VOCAB_SIZE, expected_vocab_size
from share_compute.errors import UserError
from share_compute.models.blueprint import blueprint_of
from share_compute.models.configuration import declared_config, model_vocab_size
from share_compute.specification import ModelSpec, TrainJob, parse_job


def job(model: dict[str, Any], *, sequence_length: int = 16, **more: Any) -> TrainJob:
    return parse_job(
        {
            "model": model,
            "data": {"files": ["a.txt"]},
            "training": {"sequence_length": sequence_length},
            **more,
        }
    )


def folder_of(tmp_path: Path, content: str) -> dict[str, Any]:
    (tmp_path / "config.json").write_text(content)
    return {"path": str(tmp_path)}


def test_a_folder_and_the_job_itself_declare_the_same(tmp_path: Path) -> None:
    config = {"model_type": "llama", "vocab_size": 300, "max_position_embeddings": 16}
    inside, beside = job({"config": config}), job(folder_of(tmp_path, json.dumps(config)))
    for spec in (inside, beside):
        assert declared_config(spec.model) == config
        assert blueprint_of(spec, 999).config == config
        assert expected_vocab_size(spec) == 300


def test_the_tokenizer_says_what_the_configuration_does_not() -> None:
    spec = job({"config": {"model_type": "llama"}})
    assert blueprint_of(spec, 301).config == {"model_type": "llama", "vocab_size": 301}
    assert expected_vocab_size(spec) == DEFAULT_VOCAB_SIZE
    requested = job({"config": {"model_type": "llama"}}, tokenizer={"vocab_size": 500})
    assert expected_vocab_size(requested) == 500


def test_a_text_model_inside_another_has_the_vocabulary() -> None:
    model = ModelSpec(config={"model_type": "gemma3", "text_config": {"vocab_size": 321}})
    assert model_vocab_size(model) == 321


def test_only_a_model_without_weights_takes_the_tokenizers_special_tokens(tmp_path: Path) -> None:
    tokens = {"eos_token_id": 7}
    config = {"model_type": "llama", "vocab_size": 300, "eos_token_id": 2}
    fresh = blueprint_of(job({"config": config}), None, tokens)
    trained = blueprint_of(job(folder_of(tmp_path, json.dumps(config))), None, tokens)
    assert fresh.config is not None
    assert trained.config is not None
    assert (fresh.config["eos_token_id"], trained.config["eos_token_id"]) == (7, 2)


def test_samples_must_fit_into_the_window() -> None:
    config = {"model_type": "llama", "vocab_size": 300, "max_position_embeddings": 15}
    with pytest.raises(UserError, match="longer than the model's window of 15 tokens"):
        blueprint_of(job({"config": config}), None)


@pytest.mark.parametrize(
    ("content", "problem"),
    [("{", "cannot be read"), ("[1]", "is not a JSON object"), ('{"vocab_size": 0}', "vocab_size is 0")],
)
def test_a_broken_configuration_is_named(tmp_path: Path, content: str, problem: str) -> None:
    spec = job(folder_of(tmp_path, content))
    with pytest.raises(UserError, match=problem) as caught:
        blueprint_of(spec, None)
    assert caught.value.hint


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        declared_config(ModelSpec(path=tmp_path / "none"))


def test_a_list_of_layers_has_no_vocabulary() -> None:
    layers = [{"type": "linear", "options": {"in_features": 64, "out_features": 10}}]
    spec = parse_job({"model": {"layers": layers}, "data": {"dataset": "digits"}})
    assert expected_vocab_size(spec) is None
    assert blueprint_of(spec, None).layers == spec.model.layers
