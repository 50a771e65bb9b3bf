"""Adapters of classifiers, and embeddings, on real Ray nodes: losses as in plain loops, also after lost machines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from tests.actors.training.jobs.outcomes import (
    losses_of,
    require_no_change_by_a_kill,
    runs_in_layouts,
    validated,
    weights_of,
)
from tests.actors.training.jobs.test_text_tasks import BERT, LAYOUTS, LENGTH, STEPS, job, pretrained, written
from tests.ray_nodes import Attempt
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from transformers import AutoModel, AutoModelForSequenceClassification

from share_compute.data import PreparedData, StepOrder, prepare
from share_compute.models.adapters import adapter_tensors
from share_compute.models.blueprint import blueprint_of
from share_compute.models.factory import build_stage
from share_compute.models.huggingface.encoder_types import trained_pooling
from share_compute.models.huggingface.hub_configuration import hub_configuration
from share_compute.shards import Shard
from share_compute.specification import TrainJob, parse_job

pytestmark = [
    pytest.mark.slow,
    pytest.mark.exact,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),  # peft asks transformers
]

LORA: dict[str, Any] = {"rank": 4, "alpha": 8}


def folder_of(kind: str, folder: Path) -> Path:
    """Return the folder of a base model without a head for classes of texts."""
    if kind == "decoder":
        return Path(pretrained(folder)["path"])
    torch.manual_seed(0)
    AutoModel.from_config(hub_configuration(BERT)).save_pretrained(folder)
    return folder


def adapted(folder: Path, training: dict[str, Any] | None = None, **parallelism: Any) -> dict[str, Any]:
    file = written(folder.parent / "data")
    document = job(file, {"path": str(folder)}, {"lora": LORA, **(training or {})}, **parallelism)
    return {**document, "tokenizer": {"vocab_size": 400}}


def pairs(
    folder: Path, model: dict[str, Any], training: dict[str, Any] | None = None, **parallelism: Any
) -> dict[str, Any]:
    """Return a job that trains a model on pairs of texts, which are written into a folder."""
    rows = [{"text": f"the number {number}", "positive": f"{number} is a number"} for number in range(60)]
    file = folder / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    document = job(file, model, training, **parallelism)
    data = {"files": [str(file)], "pairs": {}, "validation_fraction": 0.2, "test_fraction": 0.2}
    return {**document, "task": "embedding", "data": data, "tokenizer": {"vocab_size": 400}}


class Vectors(nn.Module):
    """Declared layers that return a vector for each text, with the mean over tokens written out."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(400, 8), nn.Linear(8, 4)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        means = (self.table(ids) * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
        outputs: Tensor = self.head(means)
        return outputs


DECLARED: dict[str, Any] = {
    "layers": [
        {"type": "embedding_bag", "options": {"num_embeddings": 400, "embedding_dim": 8}},
        {"type": "linear", "options": {"in_features": 8, "out_features": 4}},
    ]
}


def losses_of_declared_pairs(document: dict[str, Any], folder: Path) -> list[float]:
    """Train declared layers with torch alone; only data and initial weights are ours."""
    spec = parse_job(document)
    data = prepare(spec, folder / "data")
    made = blueprint_of(spec, None, objective=data.objective, sample_shape=data.sample_shape)
    start = build_stage(made, Shard("m", 0, 2, 2), torch.device("cpu"))
    start.initialize(spec.training.seed)
    model = Vectors()
    model.load_state_dict(dict(zip(model.state_dict(), start.persistent().values(), strict=True)))
    return trained_on_pairs(spec, data, model, lambda ids, mask, _: model(ids, mask))


def losses_of_pairs(document: dict[str, Any], folder: Path) -> list[float]:
    """Train with torch and transformers alone."""
    spec = parse_job(document)
    data = prepare(spec, folder / "data")
    assert data.objective is not None
    model: Any = AutoModel.from_pretrained(
        spec.model.path, pad_token_id=data.objective.padding, dtype=torch.float32
    )
    is_encoder = model.config.model_type == "bert"

    def vectors(ids: Tensor, mask: Tensor, last: Tensor) -> Tensor:
        hidden: Tensor = model(input_ids=ids, attention_mask=mask).last_hidden_state
        means = (hidden * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
        return means if is_encoder else hidden[torch.arange(len(last)), last]

    return trained_on_pairs(spec, data, model, vectors)


def trained_on_pairs(
    spec: TrainJob,
    data: PreparedData,
    model: nn.Module,
    vectors: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> list[float]:
    """Train in a plain loop, and return the losses.

    Args:
        spec: the job.
        data: its data.
        model: the model.
        vectors: returns the vectors of texts from ids, their mask, and the places of the last tokens.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0, betas=(0.9, 0.95))
    order = StepOrder(spec.training.seed, data.samples.size("train"), spec.training.batch_size)
    losses = []
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        total = 0.0
        for indices in order.indices(step).reshape(2, -1):
            ids, last = map(torch.tensor, data.samples.take("train", indices))
            ids, last = ids.flatten(0, 1), last.flatten()
            mask = (torch.arange(LENGTH) <= last[:, None]).long()
            found = normalize(vectors(ids, mask, last), dim=-1)
            first, second = found.reshape(-1, 2, found.shape[-1]).unbind(1)
            loss = cross_entropy(first @ second.T / 0.05, torch.arange(len(first))) / 2
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(total)
    return losses


def plain_losses(document: dict[str, Any], folder: Path) -> tuple[list[float], Any]:
    """Train with ``peft`` and transformers alone, whole batches at a time; return the losses and the model."""
    spec = parse_job(document)
    data = prepare(spec, folder / "data")
    assert data.description is not None
    assert spec.model.path is not None
    made = blueprint_of(spec, data.vocab_size, objective=data.objective, classes=data.description["classes"])
    stage = build_stage(made, Shard("m", 0, 2, 2), torch.device("cpu"))
    stage.initialize_added(spec.training.seed)
    start = {name: tensor.clone() for name, tensor in adapter_tensors(stage).items()}
    whole = ["classifier", "pooler"] if made.uses_encoder else ["score"]
    base = AutoModelForSequenceClassification.from_pretrained(
        spec.model.path, num_labels=2, pad_token_id=data.objective.padding, dtype=torch.float32
    )
    if made.uses_encoder:  # the folder has a pooler, from which training starts
        stored = AutoModel.from_pretrained(spec.model.path).pooler.state_dict()
        start |= {f"base_model.model.bert.pooler.{name}": tensor for name, tensor in stored.items()}
    matrices = sorted(
        name.rpartition(".")[2]
        for name, part in base.base_model.named_modules()
        if isinstance(part, torch.nn.Linear) and ".0." in name
    )
    config = LoraConfig(
        task_type="SEQ_CLS", r=LORA["rank"], lora_alpha=LORA["alpha"], modules_to_save=whole,
        target_modules=[
            name for name, part in base.named_modules()
            if isinstance(part, torch.nn.Linear) and name.rpartition(".")[2] in matrices and ".layer" in name
        ],
    )  # fmt: skip
    model: Any = get_peft_model(base, config)
    set_peft_model_state_dict(model, start)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01, weight_decay=0.0, betas=(0.9, 0.95))
    order = StepOrder(spec.training.seed, data.samples.size("train"), spec.training.batch_size)
    losses = []
    for step in range(1, STEPS + 1):
        ids, targets = map(torch.tensor, data.samples.take("train", order.indices(step)))
        mask = (torch.arange(LENGTH) <= targets[:, 1:]).long()
        loss = model(input_ids=ids, attention_mask=mask, labels=targets[:, 0]).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, model


@pytest.mark.parametrize("kind", ["decoder", pytest.param("encoder", marks=pytest.mark.thorough)])
def test_adapters_of_a_classifier_learn_as_in_peft(attempt: Attempt, tmp_path: Path, kind: str) -> None:
    folder = folder_of(kind, tmp_path / "m")
    document = adapted(folder)
    runs = runs_in_layouts(attempt, document, tmp_path, LAYOUTS)
    losses, model = plain_losses(document, tmp_path / "plain")
    assert losses_of(runs[0]) == pytest.approx(losses, abs=1e-5)
    base = AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=2, pad_token_id=model.config.pad_token_id, dtype=torch.float32
    )
    loaded = PeftModel.from_pretrained(base, str(tmp_path / "2" / "artifacts" / "model")).eval()
    ids = torch.randint(3, 260, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.allclose(loaded(input_ids=ids).logits, model.eval()(input_ids=ids).logits, atol=1e-4)


def test_declared_embeddings_learn_as_in_a_plain_loop(attempt: Attempt, tmp_path: Path) -> None:
    document = pairs(tmp_path, DECLARED)
    runs = runs_in_layouts(attempt, document, tmp_path, LAYOUTS)
    losses = losses_of_declared_pairs(document, tmp_path / "plain")
    assert len(set(losses)) == STEPS
    assert losses_of(runs[0]) == pytest.approx(losses, abs=1e-5)


@pytest.mark.parametrize("kind", ["decoder", pytest.param("encoder", marks=pytest.mark.thorough)])
def test_embeddings_learn_as_in_a_plain_loop(attempt: Attempt, tmp_path: Path, kind: str) -> None:
    document = pairs(tmp_path, {"path": str(folder_of(kind, tmp_path / "m"))})
    runs = runs_in_layouts(attempt, document, tmp_path, LAYOUTS)
    losses = losses_of_pairs(document, tmp_path / "plain")
    assert losses_of(runs[0]) == pytest.approx(losses, abs=1e-5)
    assert 0 <= validated(runs[0], "test").accuracy <= 1
    result = tmp_path / "2" / "artifacts" / "model"
    loaded = AutoModel.from_pretrained(result).state_dict()
    weights = weights_of(tmp_path / "0")
    assert all(torch.equal(loaded[name], weight) for name, weight in weights.items())
    assert {name for name in loaded if name not in weights} == (
        {"pooler.dense.weight", "pooler.dense.bias"} if kind == "encoder" else set()
    )
    config = json.loads((result / "config.json").read_text())
    mode = trained_pooling(result, config).mode
    assert mode == ("mean" if kind == "encoder" else "last")


@pytest.mark.chaos
@pytest.mark.thorough
def test_a_kill_changes_no_bit_of_an_embedder(attempt: Attempt, tmp_path: Path, nodes: list[Any]) -> None:
    document = pairs(
        tmp_path,
        {"path": str(folder_of("encoder", tmp_path / "m"))},
        {"steps": 200, "microbatches": 4, "validate_every": 50},
        stages=2,
    )
    require_no_change_by_a_kill(attempt, document, tmp_path, nodes[1])


@pytest.mark.thorough
@pytest.mark.chaos
def test_a_kill_changes_no_bit_of_adapters_and_head(
    attempt: Attempt, tmp_path: Path, nodes: list[Any]
) -> None:
    document = adapted(
        folder_of("encoder", tmp_path / "m"),
        {"steps": 200, "microbatches": 4, "validate_every": 50, "lora": {**LORA, "dropout": 0.1}},
        stages=2,
    )
    require_no_change_by_a_kill(attempt, document, tmp_path, nodes[1])
