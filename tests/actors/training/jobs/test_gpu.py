"""Training on a GPU: the same bits in each run, close to those of a CPU, and the same whichever process dies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ray_nodes import Attempt

from share_compute.lifecycle.attempt_events import AttemptEvent
from share_compute.models.blueprint import Blueprint
from share_compute.models.devices import operations
from share_compute.models.factory import build_stage
from share_compute.models.storage.weights import WeightFolder
from share_compute.protocol.failures import FailureKind, InjectedFailure
from share_compute.protocol.points import Point
from share_compute.protocol.tree import SummationTree
from share_compute.shards import Shard
from share_compute.specification import TrainingSpec
from share_compute.topology import Device, Topology
from share_compute_actors.training.member.runner import Runner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]
GPU = torch.device("cuda")
STEPS, MICROBATCHES, TOKENS, VOCABULARY = 6, 2, 384, 300
LLAMA = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512, "attention_dropout": 0.1,
}  # fmt: skip
SMALL = {**LLAMA, "num_hidden_layers": 2, "vocab_size": VOCABULARY, "pad_token_id": 0}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {"head_dim": 64, "sliding_window": 64, "query_pre_attn_scalar": 64},
    "mistral": {"head_dim": 64, "sliding_window": 64},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_neox": {},
}
"""Attention by torch's fused kernels, by plain products with a soft cap, and with a window; experts."""


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Compute in this process as a member does."""
    operations(GPU).compute_deterministically()
    yield
    torch.use_deterministic_algorithms(mode=False)


def step(blueprint: Blueprint, device: torch.device) -> tuple[float, str, list[torch.Tensor]]:
    """Train one step in two stages; return the loss, the digests of the weights, and the gradients."""
    training = TrainingSpec(
        steps=1,
        batch_size=2 * MICROBATCHES,
        microbatches=MICROBATCHES,
        sequence_length=TOKENS,
        precision=blueprint.precision,
    )
    runners = []
    for start in (0, 1):
        shard = Shard("m", start, start + 1, 2)
        first = build_stage(blueprint, shard, torch.device("cpu"))
        first.initialize(3)
        stage = build_stage(blueprint, shard, device)
        stage.module.load_state_dict(first.module.state_dict())
        runners.append(Runner(stage, training, SummationTree((MICROBATCHES,))))
    for microbatch in range(MICROBATCHES):
        source = torch.Generator().manual_seed(microbatch)
        rows = torch.randint(3, VOCABULARY, (2, TOKENS), generator=source)
        runners[0].forward(1, microbatch, rows)
        entering = runners[0].kept("activation", microbatch)
        assert entering is not None
        runners[1].forward(1, microbatch, entering.clone())
        runners[1].backward(microbatch, rows)
        gradient = runners[1].kept("gradient", microbatch)
        assert gradient is not None
        runners[0].backward(microbatch, gradient)
    loss = sum(runners[1].losses().values()) / (MICROBATCHES * rows.numel())
    for runner in runners:
        runner.reduce([])
    digest = " ".join(runner.gradients.digest() for runner in runners)
    gradients = [
        each.grad.cpu() for runner in runners for each in runner.parameters.values() if each.grad is not None
    ]
    return loss, digest, gradients


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.usefixtures("deterministic")
def test_gradients_have_the_same_bits_in_each_run(model_type: str, precision: Any) -> None:
    config = {**SMALL, **MODELS[model_type], "model_type": model_type}
    blueprint = Blueprint(config=config, precision=precision)
    runs = [step(blueprint, GPU) for _ in range(4)]
    assert len({(loss, digest) for loss, digest, _ in runs}) == 1
    assert all(torch.equal(*pair) for pair in zip(runs[0][2], runs[-1][2], strict=True))


@pytest.mark.usefixtures("deterministic")
def test_gradients_are_near_those_of_a_processor() -> None:
    blueprint = Blueprint(config={**SMALL, "attention_dropout": 0.0})
    expected_loss, _, expected = step(blueprint, torch.device("cpu"))
    loss, _, found = step(blueprint, GPU)
    assert loss == pytest.approx(expected_loss, abs=1e-5)
    for mine, theirs in zip(found, expected, strict=True):
        assert float((mine - theirs).norm()) <= 1e-4 * float(theirs.norm())


@pytest.fixture
def gpus(topology: Topology) -> Topology:
    """Machines that all compute on the same GPU."""
    device = Device(
        "cuda", "gpu", memory_bytes=2**31, flops_per_s={"float32": 1e10}, uuid=operations(GPU).uuid()
    )
    return Topology(tuple(replace(machine, devices=(device,)) for machine in topology.contributors))


def job(corpus: Path, precision: str) -> dict[str, Any]:
    return {
        "model": {"config": LLAMA},
        "data": {"files": [str(corpus)]},
        "tokenizer": {"vocab_size": VOCABULARY},
        "training": {
            "steps": STEPS,
            "batch_size": 8,
            "microbatches": 4,
            "sequence_length": 256,
            "precision": precision,
            "validate_every": 3,
            "samples": {"every": 3, "prompts": ["The License"], "max_tokens": 4},
        },
        "parallelism": {"stages": 2, "members_per_stage": 1},
    }


def losses(events: Sequence[AttemptEvent]) -> list[tuple[int, float]]:
    return [(event.step, event.loss) for event in events if event.type == "step"]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_a_member_killed_on_a_gpu_changes_no_bit(
    attempt: Attempt, gpus: Topology, tmp_path: Path, precision: str
) -> None:
    corpus = tmp_path / "licence.txt"
    corpus.write_text((Path(__file__).parents[4] / "LICENSE").read_text() * 20)
    kill = InjectedFailure(FailureKind.kill, Point.cell_done, worker="c1", step=4)
    found = []
    for name, failures in (("calm", ()), ("killed", (kill,))):
        events = attempt(job(corpus, precision), machines=gpus, folder=tmp_path / name, failures=failures)
        assert events[-1].outcome == "succeeded", events[-1].reason
        lost = [event.lost for event in events if event.type == "reformed"]
        assert lost == ([("c1",)] if failures else [])
        assert [event.step for event in events if event.type == "validated"][:1] == [3]
        weights = WeightFolder(tmp_path / name / "artifacts" / "model")
        found.append((weights.digest(), losses(events)))
    assert found[0] == found[1]
    curve = [loss for _, loss in found[0][1]]
    assert len(curve) == STEPS
    assert curve[-1] < curve[0]
