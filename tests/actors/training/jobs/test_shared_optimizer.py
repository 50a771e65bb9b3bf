"""Jobs on real Ray nodes whose machines keep shares of the optimizer's state; one of the machines is killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.actors.training.jobs.outcomes import killing, losses_of, require_same_weights, succeeded
from tests.actors.training.jobs.test_training import LLAMA
from tests.ray_nodes import Attempt
from transformers import AutoConfig, AutoModelForCausalLM

from share_compute.lifecycle.attempt_events import Reformed
from share_compute.models.storage.weights import WeightFolder

pytestmark = pytest.mark.slow


def job(corpus: Path, optimizer: str, **training: Any) -> dict[str, Any]:
    return {
        "model": {"config": {**LLAMA, "num_hidden_layers": 3, "vocab_size": 300}},
        "data": {"files": [str(corpus)]},
        "tokenizer": {"vocab_size": 300},
        "training": {
            "steps": 60,
            "batch_size": 12,
            "microbatches": 6,
            "sequence_length": 32,
            "checkpoint_every": 24,
            "optimizer": {"learning_rate": 0.01},
            **training,
        },
        "parallelism": {"stages": 1, "members_per_stage": 3, "optimizer": optimizer},
    }


def test_shares_change_nothing_and_none_is_lost_with_its_machine(
    attempt: Attempt, tmp_path: Path, nodes: list[Any]
) -> None:
    corpus = tmp_path / "licence.txt"
    corpus.write_text((Path(__file__).parents[4] / "LICENSE").read_text() * 4)
    kill, killed = killing(nodes[1], at_step=4)
    whole = succeeded(attempt(job(corpus, "replicated"), folder=tmp_path / "replicated"))
    sharded = succeeded(attempt(job(corpus, "sharded"), number=2, folder=tmp_path / "sharded"))
    rough = succeeded(attempt(job(corpus, "sharded"), number=3, folder=tmp_path / "killed", on_event=kill))
    assert killed
    (change,) = (event for event in rough if isinstance(event, Reformed) and event.lost)
    assert len(change.plan.stages[0].members) == 2
    for name, events in (("sharded", sharded), ("killed", rough)):
        assert losses_of(events) == losses_of(whole)
        require_same_weights(tmp_path / "replicated", tmp_path / name)
        for stem in ("model", "optimizer"):
            one, other = (
                WeightFolder(tmp_path / folder / "checkpoints" / "step-00000048", stem)
                for folder in ("replicated", name)
            )
            assert one.shapes() == other.shapes()
            assert one.digest() == other.digest()


@pytest.mark.parametrize(
    ("training", "parallelism"),
    [
        ({"precision": "bfloat16", "freeze": ["layers[:1]"]}, {"stages": 2, "members_per_stage": 2}),
        pytest.param({}, {"members_per_stage": 2, "tensor": 2}, marks=pytest.mark.thorough),
    ],
    ids=["tied-stages", "ranks"],
)
def test_shares_go_together_with(
    attempt: Attempt, tmp_path: Path, training: dict[str, Any], parallelism: dict[str, Any]
) -> None:
    corpus = tmp_path / "licence.txt"
    corpus.write_text((Path(__file__).parents[4] / "LICENSE").read_text() * 4)
    losses = []
    for number, optimizer in enumerate(("replicated", "sharded"), start=1):
        document = job(corpus, optimizer, **{"steps": 4, "checkpoint_every": None, **training})
        document["model"]["config"]["tie_word_embeddings"] = True
        document["parallelism"] |= parallelism
        events = succeeded(attempt(document, number=number, folder=tmp_path / optimizer))
        losses.append(losses_of(events))
    assert losses[0] == losses[1]
    require_same_weights(tmp_path / "replicated", tmp_path / "sharded")


def test_adapters_are_trained_in_shares(attempt: Attempt, tmp_path: Path) -> None:
    corpus, folder = tmp_path / "licence.txt", tmp_path / "pretrained"
    corpus.write_text((Path(__file__).parents[4] / "LICENSE").read_text() * 4)
    config = AutoConfig.for_model(**{**LLAMA, "num_hidden_layers": 2, "vocab_size": 300})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    adapters = []
    for number, optimizer in enumerate(("replicated", "sharded"), start=1):
        document = job(corpus, optimizer, steps=4, checkpoint_every=None, lora={"rank": 2})
        document["model"] = {"path": str(folder)}
        document["parallelism"]["members_per_stage"] = 2
        succeeded(attempt(document, number=number, folder=tmp_path / optimizer))
        adapters.append(load_file(tmp_path / optimizer / "artifacts" / "model" / "adapter_model.safetensors"))
    assert adapters[0].keys() == adapters[1].keys() != set()
    assert all(torch.equal(adapters[0][name], adapters[1][name]) for name in adapters[0])
