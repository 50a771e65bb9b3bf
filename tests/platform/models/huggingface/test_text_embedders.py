"""Hugging Face models that embed texts: equal to transformers with pooling, cut or whole, independent of padding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.platform.models.huggingface.small_stages import ENCODERS, LAYERS, SIZES, stages, through
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize
from transformers import AutoModel, AutoModelForCausalLM

from share_compute.errors import UserError
from share_compute.models.blueprint import Blueprint, blueprint_of
from share_compute.models.boundary import boundary_shape
from share_compute.models.factory import dissect
from share_compute.models.huggingface.conversion import pretrained_weights
from share_compute.models.huggingface.decoder import published_config
from share_compute.models.huggingface.encoder_types import (
    Pooling,
    described_pooling,
    pooling_of,
    trained_pooling,
)
from share_compute.models.huggingface.hub_configuration import check_trainable, hub_configuration
from share_compute.models.losses import loss_sum, require_outputs, selected
from share_compute.models.objective import Objective
from share_compute.models.stage import Stage
from share_compute.models.storage.checksums import CHECKSUMS, damage
from share_compute.models.storage.weights import FolderWriter
from share_compute.specification import TrainJob, parse_job

PADDING, LENGTH = 1, 16
OBJECTIVE = Objective(task="embedding", loss="info_nce", padding=PADDING, temperature=0.1)
DECODERS: dict[str, dict[str, Any]] = {
    "llama": {**SIZES, "num_key_value_heads": 2},
    "qwen3": {**SIZES, "num_key_value_heads": 2, "head_dim": 8},
    "gemma": {**SIZES, "num_key_value_heads": 2, "head_dim": 8},
}
CONFIGS = {**ENCODERS, **DECODERS}
LENGTHS = ((3, 9), (12, 5), (7, 16))


def job(model: dict[str, Any], **training: Any) -> TrainJob:
    return parse_job(
        {
            "model": model,
            "data": {"files": ["a.csv"], "pairs": {}},
            "training": {"sequence_length": LENGTH, "batch_size": 6, "microbatches": 2, **training},
        }
    )


def blueprint(kind: str, folder: Path | None = None, **training: Any) -> Blueprint:
    model = {"config": {"model_type": kind, **CONFIGS[kind]}} if folder is None else {"path": str(folder)}
    pooling = trained_pooling(folder, {"model_type": kind}).mode
    return blueprint_of(job(model, **training), 60, objective=OBJECTIVE, pooling=pooling)


def samples(width: int = LENGTH) -> tuple[Tensor, Tensor]:
    """Return ids of three pairs of texts, padded to ``width``, and the places of their last tokens."""
    random = torch.Generator().manual_seed(1)
    ids = torch.full((len(LENGTHS), 2, width), PADDING)
    for pair, lengths in enumerate(LENGTHS):
        for text, length in enumerate(lengths):
            ids[pair, text, :length] = torch.randint(3, 60, (length,), generator=random)
    return ids, torch.tensor(LENGTHS) - 1


def vectors_of(parts: list[Stage], width: int = LENGTH) -> Tensor:
    ids, places = samples(width)
    return selected(through(parts, ids), places, OBJECTIVE)[0]


def theirs(model: Any, mode: str) -> Tensor:
    """Return the vectors of a model of transformers."""
    ids, places = samples()
    rows, last = ids.flatten(0, 1), places.flatten()
    mask = (torch.arange(LENGTH) <= last[:, None]).long()
    hidden = model.eval()(input_ids=rows, attention_mask=mask).last_hidden_state
    if mode == "mean":
        means: Tensor = (hidden * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
        return means
    vectors: Tensor = hidden[:, 0] if mode == "cls" else hidden[torch.arange(len(last)), last]
    return vectors


@pytest.mark.parametrize("kind", CONFIGS)
def test_vectors_are_those_of_transformers_cut_or_whole(kind: str) -> None:
    made = blueprint(kind)
    check_trainable(made.config or {}, "embedding")
    whole = stages(made, 0, LAYERS)
    model = AutoModel.from_config(hub_configuration(made.config or {}))
    absent, more = model.load_state_dict(whole[0].persistent(), strict=False)
    assert all(name.startswith("pooler.") for name in absent)
    assert not more
    expected = theirs(model, "mean" if kind in ENCODERS else "last")
    assert torch.allclose(vectors_of(whole), expected, atol=1e-5)
    for edges in ((0, 1, LAYERS), tuple(range(LAYERS + 1))):
        assert torch.equal(vectors_of(stages(made, *edges)), vectors_of(whole))
    assert torch.allclose(vectors_of(whole, 40), expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["bert", "distilbert", "llama"])
def test_loss_and_gradients_are_those_of_torch_and_do_not_depend_on_the_cut(kind: str) -> None:
    ids, places = samples()
    found: list[dict[str, Tensor]] = []
    losses = []
    for edges in ((0, LAYERS), (0, 1, 3, LAYERS)):
        parts = stages(blueprint(kind), *edges)
        carried = ids
        for part in parts:
            part.prepare_cell(1, 5, 0)
            carried = part.forward(carried)
            if not part.shard.is_last:
                assert tuple(carried.shape) == boundary_shape(
                    blueprint(kind), part.shard.stop, len(ids), LENGTH
                )
        loss = loss_sum(carried, places, OBJECTIVE)
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        gradients = {name: each.grad for part in parts for name, each in part.parameters().items()}
        found.append({name: each for name, each in gradients.items() if each is not None})
    assert losses[0] == losses[1]
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(each, found[1][name]) for name, each in found[0].items())
    first, second = (
        normalize(vectors_of(stages(blueprint(kind), 0, LAYERS)), dim=-1).reshape(3, 2, -1).unbind(1)
    )
    expected = cross_entropy(first @ second.T / 0.1, torch.arange(3), reduction="sum")
    assert losses[0] == pytest.approx(expected.item(), abs=1e-5)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_folder_is_read_without_what_embeddings_lack(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = hub_configuration({"model_type": kind, **CONFIGS[kind]})
    written = (AutoModel if kind in ENCODERS else AutoModelForCausalLM).from_config(config)
    written.save_pretrained(tmp_path / "m")
    made = blueprint(kind, tmp_path / "m")
    weights = pretrained_weights(tmp_path / "m", made)
    assert not weights.added
    (whole,) = stages(made, 0, LAYERS)
    assert not whole.added
    with torch.no_grad():
        for name, tensor in whole.persistent().items():
            tensor.copy_(weights.read(name))
    base = written if kind in ENCODERS else written.model
    assert torch.allclose(
        vectors_of([whole]), theirs(base, "mean" if kind in ENCODERS else "last"), atol=1e-5
    )
    saved = published_config(made.config or {}, made.objective)
    assert saved["architectures"] == [type(base).__name__]
    assert saved["pad_token_id"] == PADDING


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_a_pair_costs_twice_what_a_text_costs(kind: str) -> None:
    pair = dissect(blueprint(kind))
    config = {"model_type": kind, **CONFIGS[kind]}
    labels = {
        "model": {"config": config},
        "data": {"files": ["a.csv"], "labels": {}},
        "training": {"sequence_length": 16},
    }
    text = dissect(blueprint_of(parse_job(labels), 60))
    assert len(pair.layers) == LAYERS
    for one, other in zip(pair.layers, text.layers, strict=True):
        assert one.parameters == other.parameters
        assert one.forward_flops.at(LENGTH) == pytest.approx(2 * other.forward_flops.at(LENGTH))
        assert one.activation_bytes.at(LENGTH) == pytest.approx(2 * other.activation_bytes.at(LENGTH))
        assert one.boundary_numbers.at(LENGTH) == 2 * other.boundary_numbers.at(LENGTH)
    (whole,) = stages(blueprint(kind), 0, LAYERS)
    assert pair.parameters == sum(each.numel() for each in whole.parameters().values())


def pooled(folder: Path, *kinds: str, **switches: Any) -> Path:
    (folder / "1_Pooling").mkdir(parents=True, exist_ok=True)
    steps = [
        {"path": "1_Pooling" if kind == "Pooling" else "", "type": f"st.{kind}"}
        for kind in ("Transformer", *kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(steps))
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(switches))
    return folder


def test_the_pooling_of_a_folder_is_used(tmp_path: Path) -> None:
    encoder, decoder = {"model_type": "bert", **SIZES}, {"model_type": "llama", **DECODERS["llama"]}
    assert trained_pooling(None, encoder) == Pooling()
    assert trained_pooling(None, decoder) == Pooling(mode="last")
    folder = pooled(tmp_path / "cls", "Pooling", "Normalize", pooling_mode_cls_token=True)
    assert trained_pooling(folder, encoder) == Pooling(mode="cls", is_normalized=True)
    last = pooled(tmp_path / "last", "Pooling", "Normalize", pooling_mode_lasttoken=True)
    assert trained_pooling(last, decoder) == Pooling(mode="last", is_normalized=True)
    for broken, config, message in (
        (folder, decoder, "made by cls_token, those of a decoder by its last token"),
        (last, encoder, "made by lasttoken"),
        (
            pooled(tmp_path / "dense", "Pooling", "Dense", pooling_mode_mean_tokens=True),
            encoder,
            "asks for a Dense",
        ),
        (pooled(tmp_path / "more", "Dense"), decoder, "asks for a Dense"),
    ):
        with pytest.raises(UserError, match=f"this embedder cannot be used: .*{message}"):
            trained_pooling(broken, config)


@pytest.mark.parametrize("mode", ["mean", "cls"])
def test_vectors_are_pooled_as_the_folder_says_and_the_result_says_so_again(
    mode: str, tmp_path: Path
) -> None:
    folder = pooled(
        tmp_path / "m", "Pooling", **{f"pooling_mode_{'cls_token' if mode == 'cls' else 'mean_tokens'}": True}
    )
    torch.manual_seed(0)
    model = AutoModel.from_config(hub_configuration({"model_type": "bert", **SIZES}))
    model.save_pretrained(folder)
    made = blueprint("bert", folder)
    assert made.pooling == mode
    pooling = trained_pooling(folder, made.config or {})
    weights, (whole,) = pretrained_weights(folder, made), stages(made, 0, LAYERS)
    with torch.no_grad():
        for name, tensor in whole.persistent().items():
            tensor.copy_(weights.read(name))
    assert torch.allclose(vectors_of([whole]), theirs(model, mode), atol=1e-5)
    writer = FolderWriter(tmp_path / "out")
    for name, content in described_pooling(pooling, 32, LENGTH).items():
        writer.write_json(name, content)
    size = writer.finish()
    assert damage(tmp_path / "out") is None
    assert size == sum(file.stat().st_size for file in (tmp_path / "out").rglob("*") if file.is_file())
    assert pooling_of(tmp_path / "out", made.config or {}) == pooling
    copied = FolderWriter(tmp_path / "copy")
    copied.link(file for file in (tmp_path / "out").iterdir() if file.name != CHECKSUMS)
    copied.finish()
    assert pooling_of(tmp_path / "copy", made.config or {}) == pooling
    (tmp_path / "copy" / "1_Pooling" / "config.json").unlink()
    assert "1_Pooling/config.json is missing" in str(damage(tmp_path / "copy"))


def test_what_cannot_embed_is_refused() -> None:
    with pytest.raises(UserError, match="architecture 'mpnet' is no causal language model") as caught:
        check_trainable({"model_type": "mpnet"}, "embedding")
    assert "bert, camembert, distilbert" in str(caught.value.hint)
    with pytest.raises(UserError, match="declares no pipeline plan"):
        check_trainable({"model_type": "gpt2"}, "embedding")
    roberta = {"config": {"model_type": "roberta", **SIZES}}
    with pytest.raises(UserError, match="sequence_length 63 is longer than the model's window of 62 tokens"):
        blueprint_of(job(roberta, sequence_length=63), 60, objective=OBJECTIVE)
    with pytest.raises(UserError, match=r"returns .* for each text"):
        require_outputs(torch.zeros(4, LENGTH, 8), OBJECTIVE)
    with pytest.raises(UserError, match=r"training\.microbatches is needed for embedding"):
        job(roberta, microbatches=None)
