"""Language models that several tasks share: heads for classes beside that for tokens, cut or whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.platform.models.huggingface.small_stages import LAYERS, stages
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from share_compute.errors import UserError
from share_compute.models.blueprint import Blueprint, blueprint_of
from share_compute.models.factory import dissect
from share_compute.models.huggingface.conversion import pretrained_weights
from share_compute.models.huggingface.decoder import HuggingFaceStage, published_config
from share_compute.models.huggingface.hub_configuration import check_trainable, hub_configuration
from share_compute.models.losses import training_loss
from share_compute.models.objective import Objective
from share_compute.models.stage import Stage
from share_compute.shards import Shard
from share_compute.specification import TrainJob, parse_job

PADDING, LENGTH = 1, 16
CONFIG: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 60, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
LABELLED = {"files": ["a.csv"], "labels": {}}
TASKS: list[dict[str, Any]] = [{"name": "text"}, {"name": "mood", "weight": 0.5, "data": LABELLED}]
TABLE = {"files": ["a.csv"], "table": {"target": "x"}}
OBJECTIVES = (Objective(), Objective(task="text_classification", classes=3, padding=PADDING))
HEAD = "head_mood.weight"


def job(
    model: dict[str, Any] | None = None, training: dict[str, Any] | None = None, **changes: Any
) -> TrainJob:
    return parse_job(
        {
            "model": model or {"config": CONFIG},
            "data": {"files": ["a.txt"]},
            "tokenizer": {"path": "tokenizer"},
            "tasks": TASKS,
            "training": {"sequence_length": LENGTH, "batch_size": 8, "microbatches": 4, **(training or {})},
            **changes,
        }
    )


def blueprint(folder: Path | None = None, **config: Any) -> Blueprint:
    model = {"path": str(folder)} if folder is not None else {"config": {**CONFIG, **config}}
    return blueprint_of(job(model), 60, objectives=OBJECTIVES)


def through(parts: list[Stage], ids: Tensor, microbatch: int) -> Tensor:
    outputs = ids
    for part in parts:
        part.prepare_cell(1, 5, microbatch)
        outputs = part.forward(outputs)
    return outputs


def samples() -> tuple[Tensor, tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 60, (3, LENGTH), generator=random)
    return ids, (torch.randint(3, 60, (3, LENGTH), generator=random), torch.tensor([[0, 4], [2, 15], [1, 9]]))


@pytest.mark.parametrize("tied", [False, True])
def test_each_task_has_its_head_cut_or_whole(tied: bool) -> None:
    made = blueprint(tie_word_embeddings=tied)
    whole = stages(made, 0, LAYERS)
    weights = whole[0].persistent()
    model: Any = AutoModelForCausalLM.from_config(hub_configuration(made.config or {})).eval()
    model.load_state_dict({name: each for name, each in weights.items() if name != HEAD}, strict=not tied)
    ids, (tokens, labels) = samples()
    hidden, logits = model.model(input_ids=ids).last_hidden_state, model(input_ids=ids).logits
    assert torch.equal(through(whole, ids, 0), logits)
    assert torch.allclose(through(whole, ids, 1), hidden @ weights[HEAD].T, atol=1e-6)
    for edges in ((0, 1, LAYERS), tuple(range(LAYERS + 1))):
        for microbatch in (0, 1):
            assert torch.equal(
                through(stages(made, *edges), ids, microbatch), through(whole, ids, microbatch)
            )
    loss, count = training_loss(logits, tokens, made.objectives[0])
    assert count == 3
    assert loss.item() == pytest.approx(
        3 * cross_entropy(logits.flatten(0, 1), tokens.flatten()).item(), rel=1e-5
    )
    loss, count = training_loss(through(whole, ids, 1), labels, made.objectives[1])
    chosen = hidden[torch.arange(3), labels[:, 1]] @ weights[HEAD].T
    assert count == 3
    assert loss.item() == pytest.approx(0.5 * 3 * cross_entropy(chosen, labels[:, 0]).item(), rel=1e-5)


def test_gradients_do_not_depend_on_the_cut() -> None:
    ids, targets = samples()
    found: list[dict[str, Tensor]] = []
    for edges in ((0, LAYERS), (0, 1, 3, LAYERS)):
        parts = stages(blueprint(), *edges)
        for microbatch, wanted in enumerate(targets):
            loss, count = training_loss(through(parts, ids, microbatch), wanted, parts[-1].objective)
            (loss / count).backward()  # type: ignore[no-untyped-call]
        gradients = {name: each.grad for part in parts for name, each in part.parameters().items()}
        found.append({name: each for name, each in gradients.items() if each is not None})
    assert found[0].keys() == found[1].keys() >= {HEAD, "lm_head.weight", "model.embed_tokens.weight"}
    assert all(torch.equal(each, found[1][name]) for name, each in found[0].items())


def test_heads_stay_with_the_last_shard_when_the_cut_moves() -> None:
    first, last = stages(blueprint(), 0, 2, LAYERS)
    kept = {name: value.clone() for name, value in last.persistent().items()}
    wider = HuggingFaceStage(blueprint(), Shard("m", 1, LAYERS, LAYERS), torch.device("cpu"))
    assert isinstance(last, HuggingFaceStage)
    missing = wider.take_over(last)
    assert missing.keys() == wider.persistent().keys() - kept.keys()
    assert HEAD in kept
    assert all(torch.equal(wider.persistent()[name], value) for name, value in kept.items())
    assert HEAD not in first.persistent()


def test_a_folder_lacks_the_heads_for_classes_only(tmp_path: Path) -> None:
    torch.manual_seed(0)
    stored = AutoModelForCausalLM.from_config(hub_configuration(CONFIG))
    stored.save_pretrained(tmp_path / "m")
    made = blueprint(tmp_path / "m")
    weights = pretrained_weights(tmp_path / "m", made)
    assert weights.added == {HEAD}
    assert set(weights.names()) == set(stored.state_dict())
    first, last = stages(made, 0, 2, LAYERS)
    assert not first.added
    assert last.added == {HEAD}
    before = last.persistent()[HEAD].clone()
    last.persistent()[HEAD].zero_()
    last.initialize_added(3)
    assert torch.equal(last.persistent()[HEAD], before)
    assert published_config(made.config or {}, made.whole_objective)["architectures"] == ["LlamaForCausalLM"]


def test_a_result_is_read_as_a_language_model(tmp_path: Path) -> None:
    made = blueprint()
    (whole,) = stages(made, 0, LAYERS)
    weights = whole.persistent()
    config = published_config(made.config or {}, made.whole_objective)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(dict(weights), tmp_path / "model.safetensors", metadata={"format": "pt"})
    plain = Blueprint(config=config)
    served = HuggingFaceStage(plain, Shard("m", 0, LAYERS, LAYERS), torch.device("cpu"), torch.float32)
    found = pretrained_weights(tmp_path, plain)
    assert served.persistent().keys() == weights.keys() - {HEAD}
    assert all(torch.equal(found.read(name), weights[name]) for name in served.persistent())
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.lm_head.weight, weights["lm_head.weight"])


def test_an_encoder_is_not_shared() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 60}
    made = job({"config": {"model_type": "bert", **sizes}})
    assert made.model_task == "language_model"
    with pytest.raises(UserError, match="architecture 'bert' declares no pipeline plan"):
        check_trainable(made.model.config or {}, made.model_task)


def test_plans_count_the_heads() -> None:
    profile, plain = dissect(blueprint()), dissect(Blueprint(config=CONFIG))
    assert profile.counted
    assert profile.parameters == plain.parameters + 3 * 32
    assert profile.head.forward_flops == plain.head.forward_flops


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"tasks": [TASKS[0], {"name": "x", "task": "tabular_regression", "data": TABLE}]},
            r"tasks\.1 \(x\): a Hugging Face model is shared by .*, not tabular_regression",
        ),
        (
            {"tasks": [TASKS[0], {**TASKS[1], "layers": [{"type": "relu"}]}]},
            r"tasks\.1\.layers: a Hugging Face model has a head for each task",
        ),
        (
            {"data": LABELLED, "tasks": [{"name": "one"}, {**TASKS[1], "data": {**LABELLED, "files": ["b.csv"]}}]},
            "one of the tasks that share a Hugging Face model must be language_model",
        ),
        ({"tasks": [TASKS[0], {**TASKS[1], "name": "text"}]}, r"tasks\.1\.name 'text' is given twice"),
        (
            {"tasks": [TASKS[0], {**TASKS[1], "task": "text_classification", "data": {"files": ["b.txt"]}}]},
            r"tasks\.1 \(mood\): task text_classification does not fit the data",
        ),
        ({"then": {"serve": {"name": "x", "replicas": 1}}}, r"then\.serve: the result of a job with tasks"),
        ({"tokenizer": {}}, r"tokenizer\.path is needed for tasks\.0"),
        ({"model": {"path": "m"}, "training": {"lora": {}}}, r"training\.lora is not possible with tasks"),
        (
            {"training": {"samples": {"every": 1, "prompts": ["a"]}}},
            r"training\.samples is not possible with tasks",
        ),
        ({"training": {"microbatches": None}}, "microbatches is needed with 2 tasks"),
        (
            {"training": {"validate_every": 1, "target": {"task": "mood", "metric": "perplexity", "value": 1}}},
            "perplexity is no metric of text_classification",
        ),
    ],
)  # fmt: skip
def test_tasks_that_cannot_share_a_language_model_are_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        job(**changes)
