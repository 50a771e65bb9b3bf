"""Training on real Ray nodes equals a plain single-process loop, however the model is laid over the machines."""

import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ray_nodes import Attempt, processes_on
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, get_scheduler

from share_compute.data import StepOrder, prepare
from share_compute.lifecycle.attempt_events import AttemptEvent
from share_compute.models.blueprint import Blueprint
from share_compute.models.factory import build_stage
from share_compute.planning.plan import Plan
from share_compute.shards import Shard
from share_compute.specification import parse_job
from share_compute.topology import Topology
from share_compute_actors.training.step_log import StepLog

pytestmark = pytest.mark.slow

STEPS = 50
LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("corpus") / "licence.txt"
    target.write_text((Path(__file__).parents[4] / "LICENSE").read_text() * 20)
    return target


def job(
    corpus: Path, *, tied: bool = True, training: dict[str, Any] | None = None, **parallelism: Any
) -> dict[str, Any]:
    return {
        "model": {"config": {**LLAMA, "tie_word_embeddings": tied}},
        "data": {"files": [str(corpus)]},
        "tokenizer": {"vocab_size": 400},
        "training": {
            "steps": STEPS,
            "batch_size": 8,
            "microbatches": 4,
            "sequence_length": 32,
            **(training or {}),
        },
        "parallelism": {"members_per_stage": 1, **parallelism},
    }


def single_process(
    document: dict[str, Any], folder: Path, config: dict[str, Any]
) -> tuple[list[float], torch.nn.Module]:
    """Train with transformers and torch alone, whole batches at a time; only data and initial weights are ours."""
    spec = parse_job(document)
    samples = prepare(spec, folder / "data").samples
    count = config["num_hidden_layers"]
    start = build_stage(Blueprint(config=config), Shard("m", 0, count, count), torch.device("cpu"))
    start.initialize(spec.training.seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
    model.load_state_dict(start.module.state_dict())
    options = spec.training.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=options.learning_rate, weight_decay=options.weight_decay, betas=options.betas
    )
    schedule = get_scheduler("cosine", optimizer, num_warmup_steps=0, num_training_steps=spec.training.steps)
    order = StepOrder(spec.training.seed, samples.size("train"), spec.training.batch_size)
    losses = []
    for step in range(1, spec.training.steps + 1):
        inputs, targets = (torch.tensor(rows) for rows in samples.take("train", order.indices(step)))
        loss = cross_entropy(model(input_ids=inputs).logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses, model


def losses_of(events: list[AttemptEvent]) -> dict[int, float]:
    return {event.step: event.loss for event in events if event.type == "step"}


def plan_of(events: list[AttemptEvent]) -> Plan:
    return next(event.plan for event in events if event.type == "planned")


def ending(events: list[AttemptEvent]) -> Any:
    return events[-1]


@pytest.mark.parametrize(
    ("tied", "parallelism"),
    [
        pytest.param(True, {"stages": 1}, marks=pytest.mark.thorough),
        pytest.param(True, {"stages": 2}, marks=pytest.mark.real_path),
        pytest.param(True, {"stages": 3}, marks=pytest.mark.thorough),
        pytest.param(True, {"stages": 1, "members_per_stage": 2}, marks=pytest.mark.real_path),
        (False, {"stages": 3, "channel": "ray"}),
        pytest.param(True, {"stages": 2, "channel": "direct"}, marks=pytest.mark.thorough),
    ],
    ids=["one-stage", "two-stages", "three-stages", "two-members", "three-stages-untied-ray-calls", "direct"],
)
def test_loss_equals_a_single_process_at_every_step(
    attempt: Attempt, corpus: Path, tmp_path: Path, tied: bool, parallelism: dict[str, Any]
) -> None:
    document = job(corpus, tied=tied, **parallelism)
    events = attempt(document)
    assert ending(events).outcome == "succeeded", ending(events).reason
    model_folder = tmp_path / "artifacts" / "model"
    config = json.loads((model_folder / "config.json").read_text())
    expected, reference = single_process(document, tmp_path, config)
    losses = losses_of(events)
    assert sorted(losses) == list(range(1, STEPS + 1))
    for step, loss in losses.items():
        assert loss == pytest.approx(expected[step - 1], abs=1e-5), f"step {step}"
    assert expected[-1] < expected[0] - 0.5
    trained = AutoModelForCausalLM.from_pretrained(model_folder)
    for name, tensor in reference.state_dict().items():
        assert torch.allclose(trained.state_dict()[name], tensor, atol=1e-4), name
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    written = trained.generate(
        input_ids=torch.tensor([tokenizer("The License").input_ids]), max_new_tokens=8, do_sample=False
    )
    assert written.shape[1] > 8


def test_two_stages_of_two_members_equal_one_machine(attempt: Attempt, corpus: Path) -> None:
    training = {"steps": 8, "microbatches": 8}
    alone = losses_of(attempt(job(corpus, training=training, stages=1)))
    hybrid = losses_of(attempt(job(corpus, training=training, stages=2, members_per_stage=2)))
    assert hybrid == pytest.approx(alone, abs=1e-5)


def with_speeds(topology: Topology, *gflops: float) -> Topology:
    """Return the topology with these speeds for its first machines."""
    machines = tuple(
        replace(machine, devices=(replace(machine.device, flops_per_s={"float32": speed * 1e9}),))
        for machine, speed in zip(topology.contributors, gflops, strict=False)
    )
    return Topology(machines)


@pytest.mark.thorough
def test_members_of_unequal_speed_share_unequally_and_learn_the_same(
    attempt: Attempt, corpus: Path, topology: Topology
) -> None:
    training = {"steps": 8, "microbatches": 8}
    alone = losses_of(attempt(job(corpus, training=training, stages=1)))
    unequal = attempt(
        job(corpus, training=training, strategy="compute_weighted", stages=2, members_per_stage=2),
        machines=with_speeds(topology, 30, 30, 10, 10),
        number=2,
    )
    plan = next(event.plan for event in unequal if event.type == "planned")
    assert sorted(share for shares in plan.shares for share in shares) == [4, 4, 4, 4]
    lopsided = attempt(
        job(corpus, training=training, stages=1, members_per_stage=2),
        machines=with_speeds(topology, 30, 10),
        number=3,
    )
    plan = next(event.plan for event in lopsided if event.type == "planned")
    assert plan.shares == ((6, 2),)
    for losses in (losses_of(unequal), losses_of(lopsided)):
        assert losses == pytest.approx(alone, abs=1e-5)


def test_the_planner_cuts_the_batch_and_a_resumed_job_keeps_to_it(
    attempt: Attempt, corpus: Path, topology: Topology
) -> None:
    training: dict[str, Any] = {"steps": 14, "microbatches": None, "batch_size": 8, "checkpoint_every": 12}
    first = attempt(job(corpus, training=training, stages=2))
    assert ending(first).outcome == "succeeded", ending(first).reason
    plan = next(event.plan for event in first if event.type == "planned")
    saved = next(event for event in first if event.type == "checkpoint" and event.step == 12)
    assert json.loads((saved.path / "training.json").read_text())["microbatches"] == plan.microbatches
    measured = [event for event in first if event.type == "measured"]
    assert measured
    assert measured[-1].predicted_step_s == plan.prediction.step_s
    assert measured[-1].measured_step_s > 0
    assert len(measured[-1].stages) == 2
    # A single machine would by default take the whole batch at once; the order of sums must not change.
    resumed = attempt(
        job(corpus, training=training, stages=1),
        checkpoint=saved.path,
        number=2,
        machines=with_speeds(topology, 10),
    )
    assert next(event.plan for event in resumed if event.type == "planned").microbatches == plan.microbatches
    assert ending(resumed).outcome == "succeeded", ending(resumed).reason


def test_a_resumed_job_goes_on_exactly(attempt: Attempt, corpus: Path) -> None:
    document = job(corpus, training={"steps": 12, "checkpoint_every": 6}, stages=2)
    straight = attempt(document)
    saved = next(event for event in straight if event.type == "checkpoint" and event.step == 6)
    (timed,) = (event.machines for event in straight if event.type == "layers-timed")
    layers = sorted(layer for machine in timed.values() for layer in machine.layers)
    assert layers == list(range(plan_of(straight).num_layers))
    resumed = attempt(
        job(corpus, training={"steps": 12}, stages=3), checkpoint=saved.path, number=2, known=6, timings=timed
    )
    assert ending(resumed).outcome == "succeeded", ending(resumed).reason
    notes = [event.message for event in resumed if event.type == "note"]
    assert any(f"{len(layers)} measured times of layers" in note for note in notes)
    rest = losses_of(resumed)
    assert sorted(rest) == list(range(7, 13))
    assert rest == pytest.approx(
        {step: loss for step, loss in losses_of(straight).items() if step > 6}, abs=1e-6
    )


@pytest.mark.thorough
def test_resuming_after_the_last_step_saves_the_result(
    attempt: Attempt, corpus: Path, tmp_path: Path
) -> None:
    document = job(corpus, training={"steps": 3}, stages=2)
    saved = next(event for event in attempt(document) if event.type == "checkpoint")
    shutil.rmtree(tmp_path / "artifacts")
    resumed = attempt(document, checkpoint=saved.path, number=2)
    assert ending(resumed).outcome == "succeeded"
    assert any(event.type == "artifact" for event in resumed)
    assert len(list((tmp_path / "artifacts" / "model").glob("model-*-of-00002.safetensors"))) == 2


@pytest.mark.thorough
def test_a_checkpoint_of_other_data_is_refused(attempt: Attempt, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("one two three four five six seven\n" * 400)
    saved = next(
        event for event in attempt(job(text, training={"steps": 2}, stages=1)) if event.type == "checkpoint"
    )
    text.write_text("one two three four five six seven\n" * 900)
    resumed = attempt(job(text, training={"steps": 4}, stages=1), checkpoint=saved.path, number=2)
    assert "the data has changed" in ending(resumed).reason


def test_a_pretrained_folder_is_trained_further(attempt: Attempt, corpus: Path, tmp_path: Path) -> None:
    first = job(corpus, training={"steps": 6}, stages=2)
    assert ending(attempt(first)).outcome == "succeeded"
    folder = tmp_path / "pretrained"
    shutil.copytree(tmp_path / "artifacts" / "model", folder)
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    further = {**first, "model": {"path": str(folder)}, "tokenizer": {}}
    events = attempt(further, number=2, folder=tmp_path / "second")
    assert ending(events).outcome == "succeeded", ending(events).reason
    assert losses_of(events)[1] < losses_of(events)[6] + 1
    config = json.loads((tmp_path / "second" / "artifacts" / "model" / "config.json").read_text())
    assert config["dtype"] == "float32"
    assert config["architectures"] == ["LlamaForCausalLM"]


def test_digits_are_learned(attempt: Attempt, tmp_path: Path) -> None:
    layers = [
        {"type": "dropout", "options": {"p": 0.01}},
        {"type": "linear", "options": {"in_features": 64, "out_features": 64}},
        {"type": "relu"},
        {"type": "linear", "options": {"in_features": 64, "out_features": 10}},
    ]
    events = attempt(
        {
            "model": {"layers": layers},
            "data": {"dataset": "digits"},
            "training": {
                "steps": 80,
                "batch_size": 64,
                "microbatches": 2,
                "optimizer": {"learning_rate": 0.01},
            },
            "parallelism": {"stages": 4, "members_per_stage": 1},
        }
    )
    assert ending(events).outcome == "succeeded", ending(events).reason
    tested = [event for event in events if event.type == "validated" and event.split == "test"]
    assert tested[-1].accuracy is not None
    assert tested[-1].accuracy > 0.9
    assert (tmp_path / "artifacts" / "model" / "layers.json").exists()


def test_cancelling_ends_the_attempt_soon(attempt: Attempt, corpus: Path) -> None:
    def cancel(event: AttemptEvent, coordinator: Any) -> None:
        if event.type == "step" and event.step == 3:
            coordinator.cancel.remote()

    events = attempt(job(corpus, training={"steps": 5000}, stages=2), on_event=cancel)
    assert ending(events).outcome == "cancelled"


@pytest.mark.chaos
def test_a_dead_member_is_named_and_its_checkpoint_stays(
    attempt: Attempt, corpus: Path, nodes: list[Any]
) -> None:
    def kill(event: AttemptEvent, _coordinator: Any) -> None:
        if event.type == "checkpoint" and event.step == 10:
            pid = _process_on(nodes[1], "Member")
            assert pid is not None
            os.kill(pid, signal.SIGKILL)

    document = job(corpus, training={"steps": 5000, "checkpoint_every": 10}, stages=2, backups=False)
    events = attempt(document, on_event=kill)
    assert ending(events).outcome == "failed"
    assert "machine-1" in ending(events).reason
    assert ending(events).error["code"] == "contributor-lost"
    saved = [event for event in events if event.type == "checkpoint"]
    assert saved[-1].path.is_dir()


@pytest.mark.chaos
@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("planned", marks=pytest.mark.thorough),
        pytest.param("note", marks=pytest.mark.thorough),
        "started",
    ],
)
def test_a_member_that_dies_before_the_first_step_is_done_without(
    attempt: Attempt, corpus: Path, nodes: list[Any], moment: str
) -> None:
    killed: list[int] = []

    def kill(event: AttemptEvent, _coordinator: Any) -> None:
        if event.type == moment and not killed and (pid := _process_on(nodes[1], "Member")):
            killed.append(pid)
            os.kill(pid, signal.SIGKILL)

    events = attempt(job(corpus, training={"steps": 200}, stages=2, backups=False), on_event=kill)
    assert killed or moment == "planned"  # at that moment the process may not exist yet
    assert ending(events).outcome == "succeeded", ending(events).reason
    notes = [event.message for event in events if event.type == "note"]
    assert not killed or any(note.startswith("lost machine machine-1") for note in notes)


@pytest.mark.chaos
@pytest.mark.thorough
def test_an_unresponsive_member_is_named(attempt: Attempt, corpus: Path, nodes: list[Any]) -> None:
    stopped: list[int] = []

    def stop(event: AttemptEvent, _coordinator: Any) -> None:
        if event.type == "step" and event.step == 5:
            pid = _process_on(nodes[1], "Member")
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            stopped.append(pid)

    events = attempt(job(corpus, training={"steps": 5000}, stages=2, backups=False), on_event=stop)
    os.kill(stopped[0], signal.SIGCONT)
    assert ending(events).outcome == "failed"
    assert ending(events).error["machine"] == "machine-1"


@pytest.mark.chaos
def test_the_shard_stores_death_is_not_blamed_on_a_machine(
    attempt: Attempt, corpus: Path, ray_cluster: Any
) -> None:
    def kill(event: AttemptEvent, _coordinator: Any) -> None:
        if event.type == "step" and event.step == 5:
            (pid,) = filter(None, (_process_on(node, "ShardStore") for node in ray_cluster.list_all_nodes()))
            os.kill(pid, signal.SIGKILL)

    events = attempt(job(corpus, training={"steps": 5000}, stages=2), on_event=kill)
    assert ending(events).outcome == "failed"
    assert "shard store" in ending(events).reason
    assert "machine" not in ending(events).error


def _process_on(node: Any, actor: str) -> int | None:
    """Return the process of an actor on a node."""
    return next((process.pid for process in processes_on(node, actor)), None)


def test_too_few_machines_are_said_so(attempt: Attempt, corpus: Path) -> None:
    events = attempt(job(corpus, stages=5))
    assert ending(events).outcome == "failed"
    assert ending(events).error["code"] == "plan-infeasible"
    assert ending(events).error["details"] == {"machines_needed": 5, "machines_ready": 4}


def test_more_stages_than_layers_are_refused(attempt: Attempt, corpus: Path) -> None:
    events = attempt(job(corpus, stages=7))
    assert "7 stages cannot share 6 layers" in ending(events).reason


def test_a_model_larger_than_all_memory_says_what_is_missing(attempt: Attempt, corpus: Path) -> None:
    large = job(corpus, stages=3)
    large["model"]["config"].update(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80)
    events = attempt(large)
    assert ending(events).error["code"] == "plan-infeasible"
    assert ending(events).error["details"]["missing_bytes"] > 2**40


@pytest.mark.thorough
def test_a_diverging_loss_ends_the_job_with_its_step(attempt: Attempt, corpus: Path) -> None:
    wild = job(
        corpus,
        stages=1,
        training={
            "steps": 50,
            "max_gradient_norm": None,
            "optimizer": {"name": "sgd", "learning_rate": 3e38},
        },
    )
    events = attempt(wild)
    assert ending(events).outcome == "failed"
    assert "not finite" in ending(events).reason


def test_an_undisturbed_job_stays_in_its_first_epoch(attempt: Attempt, corpus: Path, tmp_path: Path) -> None:
    """No message is lost or damaged, so no step is computed twice; the job has the demonstration's stages."""
    steps = 40
    document = job(corpus, stages=3, training={"steps": steps, "batch_size": 16, "sequence_length": 64})
    events = attempt(document, drift=1e9)  # only a failure begins another epoch
    assert ending(events).outcome == "succeeded", ending(events).reason
    assert not [event.sentence for event in events if event.type == "reformed"]
    assert [event.step for event in events if event.type == "step"] == list(range(1, steps + 1))
    (tmp_path / "other").mkdir()
    other = StepLog(tmp_path / "other", 1)
    other.claim()  # an attempt uses one epoch to claim the log, and another one to rewind it to step 0
    other.rewind(0)
    first_epoch = other.read().epoch + 1
    standing = StepLog(tmp_path, 1).read()
    assert (standing.epoch, standing.committed) == (first_epoch, steps)
