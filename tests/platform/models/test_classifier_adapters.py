"""LoRA of classifiers: adapters beside a head that is trained whole, in folders that ``peft`` loads."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageClassification, PreTrainedModel

from share_compute.errors import UserError
from share_compute.models.adapters import adapter_tensors, merged_tensors
from share_compute.models.blueprint import Blueprint, blueprint_of
from share_compute.models.export import export_checkpoint
from share_compute.models.factory import build_stage, dissect
from share_compute.models.huggingface.conversion import pretrained_weights
from share_compute.models.huggingface.decoder import published_config
from share_compute.models.huggingface.hub_configuration import hub_configuration
from share_compute.models.huggingface.parts import kind_of
from share_compute.models.losses import loss_sum, selected
from share_compute.models.objective import Objective
from share_compute.models.stage import Stage
from share_compute.models.storage.weights import FolderWriter, stream_file
from share_compute.shards import Shard
from share_compute.specification import TrainJob, parse_job

LAYERS, PADDING, LENGTH = 3, 1, 16
CLASSES = ("bad", "fair", "good")
SIZES = {
    "vocab_size": 60, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "bert": SIZES,
    "distilbert": {
        "vocab_size": 60, "dim": 32, "hidden_dim": 64, "n_layers": LAYERS, "n_heads": 4, "max_position_embeddings": 64,
    },
    "llama": {**SIZES, "num_key_value_heads": 2},
    "roberta": SIZES,
    "vit": {
        "hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "intermediate_size": 48,
        "patch_size": 4, "image_size": 8,
    },
}  # fmt: skip
WHOLE = {
    "bert": ("classifier.", "bert.pooler."),
    "distilbert": ("classifier.", "pre_classifier."),
    "llama": ("score.",),
    "roberta": ("classifier.",),
    "vit": ("classifier.",),
}
"""Beginnings of the names of parameters that are trained whole."""
MATRICES = {"bert": 6, "distilbert": 6, "llama": 7, "roberta": 6, "vit": 6}
pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing`:FutureWarning"
)  # peft asks transformers


def base(kind: str, folder: Path) -> Path:
    """Return the folder of a base model, which has no head for these classes."""
    made = {"llama": AutoModelForCausalLM, "vit": AutoModelForImageClassification}.get(kind, AutoModel)
    torch.manual_seed(3)
    made.from_config(hub_configuration({"model_type": kind, **CONFIGS[kind]})).save_pretrained(
        folder / "base"
    )
    return folder / "base"


def job(kind: str, folder: Path, lora: dict[str, Any] | None = None) -> TrainJob:
    data = {"labels": {}} if kind != "vit" else {"images": {"height": 8, "width": 8}}
    return parse_job(
        {
            "model": {"path": str(folder)},
            "data": {"files": ["a.csv"], **data},
            "training": {"sequence_length": LENGTH, "lora": lora or {"rank": 4}},
        }
    )


def blueprint(kind: str, folder: Path, lora: dict[str, Any] | None = None) -> Blueprint:
    spec = job(kind, folder, lora)
    objective = Objective(
        task=spec.resolved_task, classes=len(CLASSES), padding=PADDING if kind != "vit" else None
    )
    shape = None if kind != "vit" else (3, 8, 8)
    return blueprint_of(spec, 60, objective=objective, classes=CLASSES, sample_shape=shape)


def stages_of(made: Blueprint, folder: Path, *edges: int) -> list[Stage]:
    """Return stages as members make them: adapters and a new head from the seed, all else from the folder."""
    weights, found = pretrained_weights(folder, made), []
    for start, stop in itertools.pairwise(edges):
        stage = build_stage(made, Shard("m", start, stop, LAYERS), torch.device("cpu"))
        stage.initialize_added(5)
        for name, tensor in stage.persistent().items():
            if name not in stage.added or name in weights.names():
                tensor.copy_(weights.read(name))
        stage.module.train()
        found.append(stage)
    return found


def samples(kind: str) -> tuple[Tensor, Tensor]:
    """Return three samples, and their classes; for texts also the places of their last tokens."""
    random = torch.Generator().manual_seed(1)
    if kind == "vit":
        return torch.rand(3, 3, 8, 8, generator=random), torch.arange(3)
    ids, lengths = torch.full((3, LENGTH), PADDING), (3, 9, 12)
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.randint(3, 60, (length,), generator=random)
    return ids, torch.tensor([[row, length - 1] for row, length in enumerate(lengths)])


def train(stages: list[Stage], kind: str) -> dict[str, Tensor]:
    """Take one step that is large enough to be seen; return the gradients."""
    carried, targets = samples(kind)
    ways: list[tuple[Tensor, Tensor]] = []
    for stage in stages:
        if not stage.shard.is_first:
            carried = carried.detach().requires_grad_(stage.trains_before)
        stage.prepare_cell(5, 1, 0)
        ways.append((carried, stage.forward(carried)))
        carried = ways[-1][1]
    loss_sum(carried, targets, stages[-1].objective).backward()  # type: ignore[no-untyped-call]
    for (entering, _), (_, outputs) in zip(ways[:0:-1], ways[-2::-1], strict=True):
        outputs.backward(entering.grad)  # type: ignore[no-untyped-call]
    found = {}
    for stage in stages:
        for name, parameter in stage.parameters().items():
            if parameter.grad is not None:
                found[name] = parameter.grad.clone()
                parameter.data -= 0.1 * parameter.grad
    return found


def logits_of(stages: list[Stage], kind: str) -> Tensor:
    carried, targets = samples(kind)
    with torch.no_grad():
        for stage in stages:
            stage.module.eval()
            carried = stage.forward(carried)
    return selected(carried, targets, stages[-1].objective)[0]


def theirs(model: Any, kind: str) -> Tensor:
    """Return the logits of a model of transformers or ``peft``."""
    inputs, _ = samples(kind)
    given = (
        {"input_ids": inputs, "attention_mask": (inputs != PADDING).long()}
        if kind != "vit"
        else {"pixel_values": inputs}
    )
    with torch.no_grad():
        logits: Tensor = model.eval()(**given).logits
    return logits


def checkpoint(stages: list[Stage], made: Blueprint, folder: Path) -> Path:
    writer = FolderWriter(folder)
    for place, stage in enumerate(stages):
        for piece in stream_file(stage.persistent()):
            writer.write(f"model-{place:04}-0000.part", piece)
    writer.write_json("config.json", published_config(made.config or {}, made.objective))
    writer.finish()
    return folder


@pytest.mark.parametrize("kind", CONFIGS)
def test_adapters_and_the_head_train_and_the_cut_does_not_matter(kind: str, tmp_path: Path) -> None:
    folder = base(kind, tmp_path)
    made = blueprint(kind, folder, {"rank": 4, "dropout": 0.3})
    one, other = (train(stages_of(made, folder, *edges), kind) for edges in ((0, LAYERS), (0, 1, LAYERS)))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    adapters = {name for name in one if ".lora_" in name}
    assert len(adapters) == LAYERS * MATRICES[kind] * 2
    rest = set(one) - adapters
    assert rest
    assert all(name.startswith(WHOLE[kind]) for name in rest)
    assert {next(start for start in WHOLE[kind] if name.startswith(start)) for name in rest} == set(
        WHOLE[kind]
    )


@pytest.mark.parametrize("kind", CONFIGS)
def test_peft_loads_the_exported_checkpoint(kind: str, tmp_path: Path) -> None:
    folder = base(kind, tmp_path)
    lora = {"rank": 4, "alpha": 8}
    made = blueprint(kind, folder, lora)
    stages = stages_of(made, folder, 0, 1, LAYERS)
    train(stages, kind)
    export_checkpoint(checkpoint(stages, made, tmp_path / "step"), job(kind, folder, lora), tmp_path / "out")
    saved = load_file(tmp_path / "out" / "adapter_model.safetensors")
    expected = {name: tensor for stage in stages for name, tensor in adapter_tensors(stage).items()}
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in expected.items())
    options = {} if kind == "vit" else {"pad_token_id": PADDING}
    own: PreTrainedModel = kind_of(made.objective).from_pretrained(
        folder, num_labels=len(CLASSES), dtype=torch.float32, ignore_mismatched_sizes=True, **options
    )
    before = theirs(own, kind)
    loaded = theirs(PeftModel.from_pretrained(own, str(tmp_path / "out")), kind)
    assert torch.allclose(loaded, logits_of(stages, kind), atol=1e-5)
    assert not torch.allclose(loaded, before, atol=1e-3)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_merged_result_is_a_plain_classifier(kind: str, tmp_path: Path) -> None:
    folder = base(kind, tmp_path)
    lora = {"rank": 4, "merge": True}
    made = blueprint(kind, folder, lora)
    stages = stages_of(made, folder, 0, 1, LAYERS)
    train(stages, kind)
    export_checkpoint(checkpoint(stages, made, tmp_path / "step"), job(kind, folder, lora), tmp_path / "out")
    loaded = kind_of(made.objective).from_pretrained(tmp_path / "out")
    assert loaded.config.id2label == dict(enumerate(CLASSES))
    assert torch.allclose(theirs(loaded, kind), logits_of(stages, kind), atol=1e-5)
    merged = {name: tensor for stage in stages for name, tensor in merged_tensors(stage).items()}
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in merged.items())


@pytest.mark.parametrize("kind", CONFIGS)
def test_plans_know_what_is_frozen(kind: str, tmp_path: Path) -> None:
    folder = base(kind, tmp_path)
    made = blueprint(kind, folder)
    profile = dissect(made)
    (whole,) = stages_of(made, folder, 0, LAYERS)
    parameters = whole.parameters()
    parts = (profile.embedding, *profile.layers, profile.head)
    assert sum(part.parameters for part in parts) == sum(each.numel() for each in parameters.values())
    trained = sum(each.numel() for each in whole.trained().values())
    assert sum(part.parameters - part.frozen for part in parts) == trained
    assert profile.embedding.backward_operations == 0
    assert profile.head.parameters > profile.head.frozen


def test_a_target_that_the_model_lacks_is_named(tmp_path: Path) -> None:
    folder = base("bert", tmp_path)
    with pytest.raises(
        UserError, match=r"training\.lora\.targets: no matrix in the model's layers is called 'q_proj'"
    ):
        dissect(blueprint("bert", folder, {"targets": ["q_proj"]}))
