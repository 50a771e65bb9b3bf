"""Stages of encoders: their vectors are those of transformers for each text alone, however the model is cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.platform.inference.runtime.encoders import (
    CPU,
    LAYERS,
    OPTIONS,
    PADDING,
    POSITIONS,
    encoder_config,
    encoder_of,
    filled,
    hidden_states,
    stage_of,
    text_of,
    vectors,
)
from transformers import AutoConfig, AutoModelForMaskedLM

from share_compute.errors import UserError
from share_compute.inference.runtime.encoder_stage import EncoderStage
from share_compute.inference.scheduler.engine_steps import EngineStep
from share_compute.models.huggingface.encoder import profile_encoder
from share_compute.models.huggingface.encoder_types import (
    ENCODERS,
    Pooling,
    encoder_window,
    is_encoder,
    pooling_of,
    trained_pooling,
    trained_window,
)
from share_compute.shards import Shard

CUTS = {1: [(0, 3)], 2: [(0, 1), (1, 3)], 3: [(0, 1), (1, 2), (2, 3)]}
TEXTS = [text_of(19, 1), text_of(3, 2), text_of(1, 3), text_of(40, 4), text_of(19, 5)]
TEXTS[0][7] = PADDING
"""A padding token inside a text counts as a token: some architectures give it a position of its own."""
CLOSE = {"atol": 1e-5, "rtol": 0.0}


@pytest.mark.parametrize("num_stages", CUTS)
@pytest.mark.parametrize("model_type", ENCODERS)
def test_vectors_are_those_of_transformers(model_type: str, num_stages: int) -> None:
    expected = torch.stack([hidden_states(model_type, text).mean(0) for text in TEXTS])
    assert torch.cdist(expected, expected).fill_diagonal_(9).min() > 0.1, "a degenerate model proves nothing"
    stages = [filled(stage_of(model_type, cut), model_type) for cut in CUTS[num_stages]]
    torch.testing.assert_close(vectors(stages, TEXTS), expected, **CLOSE)
    # Neither the other texts of its step nor its position in the step matter.
    torch.testing.assert_close(vectors(stages, TEXTS[::-1]), expected.flip(0), **CLOSE)
    torch.testing.assert_close(vectors(stages, TEXTS[:1]), expected[:1], **CLOSE)


@pytest.mark.parametrize("model_type", ENCODERS)
def test_the_longest_text_is_as_long_as_the_window(model_type: str) -> None:
    window = encoder_window(encoder_config(model_type))
    assert window is not None
    assert window == POSITIONS - (PADDING + 1 if ENCODERS[model_type].counts_from_padding else 0)
    longest = text_of(window, 6)
    expected = hidden_states(model_type, longest).mean(0)
    stages = [filled(stage_of(model_type, cut), model_type) for cut in CUTS[2]]
    torch.testing.assert_close(vectors(stages, [TEXTS[1], longest])[1], expected, **CLOSE)


def test_vectors_are_made_as_requested() -> None:
    def made(**how: Any) -> Any:
        return vectors([filled(stage_of("bert", (0, 3), Pooling(**how)), "bert")], TEXTS)

    first = torch.stack([hidden_states("bert", text)[0] for text in TEXTS])
    torch.testing.assert_close(made(mode="cls"), first, **CLOSE)
    normalized = torch.nn.functional.normalize(first, dim=1)
    torch.testing.assert_close(made(mode="cls", is_normalized=True), normalized, **CLOSE)


@pytest.mark.parametrize("model_type", ["bert", "modernbert", "mpnet"])
def test_two_bytes_a_weight_come_near(model_type: str) -> None:
    stages = [filled(stage_of(model_type, cut, dtype=torch.bfloat16), model_type) for cut in CUTS[2]]
    assert {tensor.dtype for stage in stages for tensor in stage.tensors().values()} == {torch.bfloat16}
    expected = torch.stack([hidden_states(model_type, text).mean(0) for text in TEXTS])
    assert torch.cosine_similarity(vectors(stages, TEXTS), expected).min() > 0.995


def test_a_step_without_texts_passes() -> None:
    step = EngineStep(0, 0, 0, (), (), ())
    first, last = (filled(stage_of("bert", cut), "bert") for cut in CUTS[2])
    between = first.compute(step, torch.empty(0, dtype=torch.int64))
    assert isinstance(between, torch.Tensor)
    assert between.shape == (0, 32)
    assert last.compute(step, between) == ()


@pytest.mark.parametrize("model_type", ["bert", "distilbert", "modernbert"])
def test_a_stage_has_its_own_tensors_alone(model_type: str) -> None:
    names = [stage_of(model_type, cut).tensors().keys() for cut in CUTS[3]]
    whole = {name for name in encoder_of(model_type).state_dict() if not name.startswith("pooler.")}
    assert set().union(*names) == whole
    assert sum(map(len, names)) == len(whole), "a tensor is held twice"
    layers = ENCODERS[model_type].layers
    for number, own in enumerate(names):
        assert {name.removeprefix(f"{layers}.").split(".")[0] for name in own if layers in name} == {
            str(number)
        }
    assert all("embeddings." not in name for own in names[1:] for name in own)


@pytest.mark.parametrize("model_type", ["bert", "roberta", "modernbert"])
def test_weights_of_a_folder_are_found(model_type: str, tmp_path: Path) -> None:
    """Folders have the base model's names, or a prefix and a head as well."""
    base = encoder_of(model_type)
    base.save_pretrained(tmp_path / "base")
    headed = AutoModelForMaskedLM.from_config(AutoConfig.for_model(**encoder_config(model_type)))
    headed.base_model.load_state_dict(base.state_dict(), strict=False)
    headed.save_pretrained(tmp_path / "headed")
    expected = torch.stack([hidden_states(model_type, text).mean(0) for text in TEXTS])
    for folder in ("base", "headed"):
        stages = [stage_of(model_type, cut) for cut in CUTS[2]]
        for stage in stages:
            stage.load(tmp_path / folder)
        torch.testing.assert_close(vectors(stages, TEXTS), expected, **CLOSE)


def test_weights_of_another_configuration_are_refused(tmp_path: Path) -> None:
    encoder_of("bert").save_pretrained(tmp_path)
    config = {**encoder_config("bert"), "num_hidden_layers": LAYERS + 1}
    whole = Shard("m", 0, LAYERS + 1, LAYERS + 1)
    stage = EncoderStage(config, whole, CPU, window_tokens=POSITIONS, pooling=Pooling())
    with pytest.raises(UserError, match="lacks 16 tensors"):
        stage.load(tmp_path)


@pytest.mark.parametrize("model_type", ["bert", "mpnet"])
def test_what_is_there_is_taken_over(model_type: str) -> None:
    expected = torch.stack([hidden_states(model_type, text).mean(0) for text in TEXTS])
    state = encoder_of(model_type).state_dict()
    before = filled(stage_of(model_type, (0, 2)), model_type)
    after = stage_of(model_type, (0, 3))
    missing = after.take_over(before)
    assert missing
    assert {name for name in missing if "layer." in name} == {name for name in state if "layer.2." in name}
    assert not any(name.startswith("embeddings.") for name in missing)
    for name, tensor in missing.items():
        tensor.copy_(state[name])
    after.seal()
    torch.testing.assert_close(vectors([after], TEXTS), expected, **CLOSE)


def test_what_a_model_costs_is_known_before_it_is_loaded() -> None:
    profile = profile_encoder(encoder_config("bert"))
    state = encoder_of("bert").state_dict()
    assert profile.parameters == sum(tensor.numel() for name, tensor in state.items() if "pooler" not in name)
    assert len(profile.layers) == LAYERS
    assert not profile.counted
    assert all(layer.cache_numbers.at(100) == 0 for layer in profile.layers)
    assert profile.layers[0].forward_flops.at(100) > 100 * 2 * profile.layers[0].parameters


# -- folders -----------------------------------------------------------------------------------------------------------


def write(folder: Path, steps: list[str], **files: dict[str, Any]) -> Path:
    """Write a folder as sentence-transformers does."""
    listed = [
        {"idx": number, "name": str(number), "path": "" if step == "Transformer" else f"{number}_{step}",
         "type": f"sentence_transformers.models.{step}"}
        for number, step in enumerate(steps)
    ]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(listed), encoding="utf-8")
    for name, content in files.items():
        place = folder / name.replace("__", "/").replace("_json", ".json")
        place.parent.mkdir(exist_ok=True)
        place.write_text(json.dumps(content), encoding="utf-8")
    return folder


def switches(**on: bool) -> dict[str, Any]:
    modes = ("cls_token", "mean_tokens", "max_tokens", "lasttoken")
    return {"word_embedding_dimension": 32, "include_prompt": True} | {
        f"pooling_mode_{mode}": on.get(mode, False) for mode in modes
    }


BERT = {"model_type": "bert"}


def test_a_folder_says_how_its_vectors_are_made(tmp_path: Path) -> None:
    assert pooling_of(tmp_path, BERT) == Pooling(mode="mean", is_normalized=False)
    assert pooling_of(tmp_path, {"model_type": "llama"}) is None
    write(tmp_path, ["Transformer", "Pooling"], **{"1_Pooling__config_json": switches(cls_token=True)})
    assert pooling_of(tmp_path, BERT) == Pooling(mode="cls")
    write(
        tmp_path,
        ["Transformer", "Pooling", "Normalize"],
        **{"1_Pooling__config_json": switches(mean_tokens=True)},
        sentence_bert_config_json={"max_seq_length": 48, "do_lower_case": False},
    )
    assert pooling_of(tmp_path, BERT) == Pooling(mode="mean", is_normalized=True)
    assert trained_window(tmp_path) == 48
    write(tmp_path, ["Transformer", "Pooling"], **{"1_Pooling__config_json": {"pooling_mode": "cls"}})
    assert pooling_of(tmp_path, BERT) == Pooling(mode="cls")


@pytest.mark.parametrize(
    ("steps", "pooling", "message"),
    [
        (["Transformer", "Pooling", "Dense"], switches(mean_tokens=True), "asks for a Dense"),
        (["Transformer", "Pooling"], switches(lasttoken=True), "made by lasttoken"),
        (["Transformer", "Pooling"], switches(mean_tokens=True, max_tokens=True), "max_tokens and mean_tokens"),
        (["Transformer", "Pooling"], {"pooling_mode": "weightedmean"}, "made by weightedmean"),
    ],
)  # fmt: skip
def test_vectors_that_are_made_otherwise_are_refused(
    tmp_path: Path, steps: list[str], pooling: dict[str, Any], message: str
) -> None:
    write(tmp_path, steps, **{"1_Pooling__config_json": pooling})
    with pytest.raises(UserError, match=message):
        pooling_of(tmp_path, BERT)


def test_what_is_no_encoder_is_refused_as_embedder(tmp_path: Path) -> None:
    write(tmp_path, ["Transformer", "Pooling"])
    with pytest.raises(UserError, match="'qwen3' is none of the encoders"):
        pooling_of(tmp_path, {"model_type": "qwen3"})
    assert not is_encoder({"model_type": "bert", "is_decoder": True})
    write(tmp_path, ["Transformer"], sentence_bert_config_json={"do_lower_case": True})
    with pytest.raises(UserError, match="lower case"):
        pooling_of(tmp_path, BERT)
    (tmp_path / "modules.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UserError, match="not a JSON array"):
        pooling_of(tmp_path, BERT)
    (tmp_path / "modules.json").write_text("[3]", encoding="utf-8")
    with pytest.raises(UserError, match="lists no steps"):
        pooling_of(tmp_path, BERT)


SECRET = "a word of another folder"


def hostile(folder: Path, case: str) -> Path:
    """Write a folder whose modules.json leads to a file outside."""
    outside = folder / "outside"
    model = folder / "model"
    for one in (outside, model):
        one.mkdir()
    (outside / "config.json").write_text(json.dumps({"pooling_mode": SECRET}), encoding="utf-8")
    (model / "link").symlink_to(outside)
    (model / "inner").mkdir()
    (model / "inner" / "config.json").symlink_to(outside / "config.json")
    place = {
        "absolute": str(outside),
        "parent": "../outside",
        "hidden parent": "inner/../../outside",
        "link": "link",
        "nul": "a\0b",
        "missing": "../absent",
        "mode": "inner",
    }[case]
    listed = [{"type": "a.Pooling", "path": place}]
    (model / "modules.json").write_text(json.dumps(listed), encoding="utf-8")
    return model


@pytest.mark.parametrize("case", ["absolute", "parent", "hidden parent", "link", "nul", "missing", "mode"])
def test_steps_outside_the_folder_are_not_read(tmp_path: Path, case: str) -> None:
    folder = hostile(tmp_path, case)
    uses = (
        lambda: pooling_of(folder, BERT),
        lambda: trained_pooling(folder, BERT),
        lambda: trained_pooling(folder, {"model_type": "qwen3"}),
    )
    for use in uses:
        with pytest.raises(UserError) as caught:
            use()
        said = caught.value.message
        expected = "an unknown mode" if case == "mode" else "the folder of step 0 in modules.json is outside"
        assert expected in said
        assert SECRET not in said
        assert str(tmp_path) not in said


@pytest.mark.parametrize("name", ["modules.json", "sentence_bert_config.json", "1_Pooling/config.json"])
@pytest.mark.parametrize(
    ("content", "problem"),
    [(b" " * (1 << 20) + b"{}", "has 1.0 MiB; at most 1.0 MiB are read"), (b"[" * 500_000, "cannot be read")],
)
def test_errors_about_large_and_deep_files_name_them_in_the_folder(
    tmp_path: Path, name: str, content: bytes, problem: str
) -> None:
    write(tmp_path, ["Transformer", "Pooling"], **{"1_Pooling__config_json": {"pooling_mode": "cls"}})
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        pooling_of(tmp_path, BERT)
    assert caught.value.message.startswith(f"{name} {problem}")
    if name.startswith("sentence"):
        with pytest.raises(UserError, match=problem):
            trained_window(tmp_path)


def test_too_many_steps_are_refused(tmp_path: Path) -> None:
    write(tmp_path, ["Normalize"] * 17)
    with pytest.raises(UserError, match="lists 17 steps; at most 16"):
        pooling_of(tmp_path, BERT)


def test_all_that_are_listed_are_tried() -> None:
    assert set(OPTIONS) == set(ENCODERS)
