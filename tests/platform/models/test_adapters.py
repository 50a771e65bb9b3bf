"""LoRA: adapters of ``peft`` in shards, and the result of a job with adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from share_compute.errors import UserError
from share_compute.models.adapters import adapter_config, adapter_tensors, merged_tensors
from share_compute.models.blueprint import Blueprint
from share_compute.models.export import export_checkpoint
from share_compute.models.factory import build_stage, dissect
from share_compute.models.huggingface.conversion import PretrainedWeights
from share_compute.models.huggingface.decoder import PartNames, sketch
from share_compute.models.losses import loss_sum
from share_compute.models.stage import Stage
from share_compute.models.storage.weights import FolderWriter, WeightFolder, stream_file
from share_compute.shards import Shard
from share_compute.specification import LoraSpec, parse_job

CPU = torch.device("cpu")
LAYERS = 4
WHOLE, HALVES = ((0, 4),), ((0, 2), (2, 4))


def config() -> dict[str, Any]:
    made = CONFIG_MAPPING["llama"](
        hidden_size=32, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, max_position_embeddings=32,
    ).to_dict()  # fmt: skip
    return {**made, "model_type": "llama"}


def blueprint(**options: Any) -> Blueprint:
    return Blueprint(config=config(), lora=LoraSpec(**options))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(sketch(config()).config).save_pretrained(folder)
    return folder


def stages_of(adapted: Blueprint, base: Path, cuts: tuple[tuple[int, int], ...]) -> list[Stage]:
    """Return stages as members make them: adapters from the seed, all else from the folder."""
    weights = PretrainedWeights(WeightFolder(base), config())
    stages = [build_stage(adapted, Shard("m", start, stop, LAYERS), CPU) for start, stop in cuts]
    for stage in stages:
        stage.initialize_added(5)
        for name, tensor in stage.persistent().items():
            if name not in stage.added:
                tensor.copy_(weights.read(name))
        stage.module.train()
    return stages


def train(stages: list[Stage]) -> dict[str, Tensor]:
    """Take one step that is large enough to be seen; return the gradients."""
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))
    ways: list[tuple[Tensor, Tensor]] = []
    hidden = ids
    for stage in stages:
        if not stage.shard.is_first:
            hidden = hidden.detach().requires_grad_(stage.trains_before)
        stage.prepare_cell(5, 1, 0)
        ways.append((hidden, stage.forward(hidden)))
        hidden = ways[-1][1]
    loss_sum(hidden, ids).backward()
    for (entering, _), (_, outputs) in zip(ways[:0:-1], ways[-2::-1], strict=True):
        outputs.backward(entering.grad)
    found = {}
    for stage in stages:
        for name, parameter in stage.parameters().items():
            if parameter.grad is not None:
                found[name] = parameter.grad
                parameter.data -= 0.1 * parameter.grad
    return found


def test_only_adapters_train_and_the_cut_does_not_matter(base: Path) -> None:
    adapted = blueprint(rank=4, dropout=0.3)
    one, other = (train(stages_of(adapted, base, cuts)) for cuts in (WHOLE, HALVES))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert len(one) == LAYERS * 7 * 2
    assert all(".lora_A." in name or ".lora_B." in name for name in one)


def test_they_begin_where_the_model_is(base: Path) -> None:
    (stage,) = stages_of(blueprint(), base, WHOLE)
    ids = torch.randint(0, 64, (2, 16))
    own = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    with torch.no_grad():
        assert torch.equal(stage.forward(ids), own(input_ids=ids).logits)
        matrix = stage.persistent()["model.layers.2.mlp.up_proj.lora_A.weight"]
    assert matrix.std() > 0.05
    again = stages_of(blueprint(), base, HALVES)[1]
    assert torch.equal(again.persistent()["model.layers.2.mlp.up_proj.lora_A.weight"], matrix)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks transformers
@pytest.mark.parametrize("targets", [None, ("q_proj", "mlp.down_proj")])
def test_peft_loads_what_was_trained(base: Path, targets: tuple[str, ...] | None, tmp_path: Path) -> None:
    adapted = blueprint(rank=4, alpha=8.0, targets=targets)
    assert adapted.lora is not None
    stages = stages_of(adapted, base, HALVES)
    train(stages)
    writer = FolderWriter(tmp_path / "adapter")
    for place, stage in enumerate(stages):
        for piece in stream_file(adapter_tensors(stage)):
            writer.write(f"adapter_model-{place:04}-0000.part", piece)
    plain = sketch(config())
    writer.write_json(
        "adapter_config.json", adapter_config(adapted.lora, plain, PartNames(plain).places, str(base))
    )
    writer.finish()
    assert {file.name for file in (tmp_path / "adapter").iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors", "checksums.json"
    }  # fmt: skip
    own: PreTrainedModel = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(own, str(tmp_path / "adapter")).eval()
    ids = torch.randint(0, 64, (2, 16))
    with torch.no_grad():
        hidden = ids
        for stage in stages:
            stage.module.eval()
            hidden = stage.forward(hidden)
        assert torch.equal(hidden, loaded(input_ids=ids).logits)
        before = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()(input_ids=ids).logits
        assert not torch.allclose(hidden, before, atol=1e-3)
    said = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert said["base_model_name_or_path"] == str(base)


def test_merged_weights_are_a_plain_model(base: Path) -> None:
    stages = stages_of(blueprint(rank=4), base, HALVES)
    train(stages)
    own = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    own.load_state_dict({name: tensor for stage in stages for name, tensor in merged_tensors(stage).items()})
    ids = torch.randint(0, 64, (2, 16))
    with torch.no_grad():
        hidden = ids
        for stage in stages:
            stage.module.eval()
            hidden = stage.forward(hidden)
        assert torch.allclose(hidden, own(input_ids=ids).logits, atol=1e-4)


def test_a_checkpoint_has_adapters_under_plain_names(base: Path) -> None:
    first, _ = stages_of(blueprint(targets=("q_proj",)), base, HALVES)
    plain = build_stage(Blueprint(config=config()), Shard("m", 0, 2, LAYERS), CPU)
    assert set(first.persistent()) - set(plain.persistent()) == set(first.added)
    assert first.added == {
        f"model.layers.{layer}.self_attn.q_proj.lora_{part}.weight" for layer in (0, 1) for part in "AB"
    }


def test_the_profile_counts_adapters() -> None:
    profile, plain = dissect(blueprint(rank=4, targets=("q_proj",))), dissect(Blueprint(config=config()))
    assert profile.counted
    added = 4 * (32 + 32)
    for layer, before in zip(profile.layers, plain.layers, strict=True):
        assert layer.parameters == before.parameters + added
        assert layer.frozen == before.parameters
    assert profile.embedding.frozen == profile.embedding.parameters
    assert profile.embedding.backward_operations == 0
    assert profile.layers[2].backward_flops.at(100) < plain.layers[2].backward_flops.at(100)


def test_a_target_that_is_not_there_is_reported() -> None:
    with pytest.raises(UserError, match=r"no matrix in the model's layers is called 'query'") as caught:
        dissect(blueprint(targets=("query",)))
    assert "choose among down_proj, gate_proj, k_proj" in str(caught.value.hint)
    with pytest.raises(UserError, match="is called 'lm_head'"):
        dissect(blueprint(targets=("lm_head",)))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks transformers
@pytest.mark.parametrize("merge", [False, True], ids=["alone", "merged"])
def test_a_checkpoint_is_exported_as_the_result_would_be(base: Path, tmp_path: Path, merge: bool) -> None:
    adapted = blueprint(rank=4, alpha=12.0, targets=("q_proj", "up_proj"), merge=merge)
    stages = stages_of(adapted, base, ((0, 2), (2, LAYERS)))
    train(stages)
    with torch.no_grad():
        for stage in stages:
            for parameter in stage.parameters().values():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad)
    writer = FolderWriter(tmp_path / "step-00000001")
    expected: dict[str, Tensor] = {}
    for place, stage in enumerate(stages):
        for piece in stream_file(stage.persistent()):
            writer.write(f"model-{place:04}-0000.part", piece)
        expected |= merged_tensors(stage) if merge else adapter_tensors(stage)
    writer.write_json("config.json", config())
    writer.write_json("tokenizer.json", {})
    writer.finish()
    spec = parse_job(
        {
            "model": {"path": str(base)},
            "data": {"files": ["words.txt"]},
            "training": {"lora": adapted.lora.model_dump() if adapted.lora is not None else None},
        }
    )
    size = export_checkpoint(writer.target, spec, tmp_path / "out")
    files = list((tmp_path / "out").iterdir())
    assert size == sum(file.stat().st_size for file in files)
    found: dict[str, Tensor] = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        found |= load_file(file)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    names = {file.name for file in files}
    assert {"tokenizer.json", "checksums.json"} <= names
    assert ("config.json" in names) == merge
    assert ("adapter_config.json" in names) != merge
    if not merge:
        own = AutoModelForCausalLM.from_pretrained(base)
        assert PeftModel.from_pretrained(own, str(tmp_path / "out")) is not None
