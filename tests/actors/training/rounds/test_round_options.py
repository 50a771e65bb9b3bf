"""Options of training that hold in rounds as in lockstep: adapters, schedules, and early stopping."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.actors.training.rounds.test_rounds import (
    job,
    model,
    part,
    require_success,
    rounds_of,
    validations_of,
)
from tests.ray_nodes import Attempt

from share_compute.models.storage.weights import WeightFolder
from share_compute.specification import parse_job
from share_compute.topology import Topology
from share_compute.training.optimizers import learning_rates

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def licence(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("corpus") / "licence.txt"
    target.write_text((Path(__file__).parents[4] / "LICENSE").read_text() * 5)
    return target


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks transformers
def test_branches_with_adapters_send_and_merge_the_adapters_alone(
    attempt: Attempt, topology: Topology, licence: Path, tmp_path: Path
) -> None:
    whole = job(licence, steps=1)
    del whole["training"]["synchronization"]
    require_success(attempt(whole, folder=tmp_path / "base", machines=part(topology, "c0")))
    base = tmp_path / "base" / "artifacts" / "model"
    lora = {"rank": 2, "targets": ["q_proj", "up_proj"]}
    document = job(licence, {"every": 2}, steps=4, lora=lora, optimizer={"learning_rate": 0.01})
    document["model"] = {"path": str(base)}
    del document["tokenizer"]
    events = attempt(document, folder=tmp_path / "tuned", machines=part(topology, "c0", "c1"))
    require_success(events)
    merged = rounds_of(events)
    assert [len(event.branches) for event in merged] == [2, 2]

    rounds = tmp_path / "tuned" / "rounds"
    update = WeightFolder(rounds / "updates" / "00000002")
    assert len(update.names()) == 4 * 2 * 2  # layers, matrices, A and B
    assert all(".lora_" in name for name in update.names())
    version = WeightFolder(rounds / "versions" / "00000002")
    adapters = {name: version.read(name) for name in update.names()}
    sizes = 4 * sum(tensor.numel() for tensor in adapters.values())
    assert {event.weight_bytes for event in merged} == {sizes}
    assert all(branch.sent_bytes < 2 * sizes + 4096 for event in merged for branch in event.branches)
    saved = load_file(tmp_path / "tuned" / "artifacts" / "model" / "adapter_model.safetensors")
    assert len(saved) == len(adapters)
    for name, tensor in saved.items():
        assert tensor.any()
        assert torch.equal(tensor, adapters[name.removeprefix("base_model.model.")]), name
    frozen = WeightFolder(base)
    for name in set(frozen.names()) & set(version.names()):
        assert torch.equal(version.read(name), frozen.read(name)), name


def test_the_schedule_goes_by_steps_of_a_branch_and_the_job_ends_when_validations_get_no_better(
    attempt: Attempt, topology: Topology, licence: Path, tmp_path: Path
) -> None:
    document = job(
        licence,
        {"preset": "diloco", "every": 2},
        steps=40,
        schedule={"name": "linear", "warmup_steps": 3},
        validate_every=2,
        early_stopping={"patience": 2, "min_delta": 50.0},
    )
    events = attempt(document, folder=tmp_path, machines=part(topology, "c0", "c1"))
    require_success(events)
    assert events[-1].type == "ended"
    assert events[-1].reason.startswith("6 steps done: validation loss has not fallen below")
    rates = {event.step: event.learning_rate for event in events if event.type == "step"}
    expected = learning_rates(parse_job(document).training)
    assert rates == pytest.approx({step: expected(step) for step in range(1, 7)})
    assert len(set(rates.values())) == 6
    assert sorted(validations_of(events)) == [2, 4, 6]
    assert [event.round for event in rounds_of(events)] == [1, 2, 3]
    version = WeightFolder(tmp_path / "rounds" / "versions" / "00000003")
    assert all(torch.equal(tensor, version.read(name)) for name, tensor in model(tmp_path).items())
