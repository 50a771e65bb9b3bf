"""Optional features of training on real Ray nodes: adapters, freezing, float16, samples, early stopping."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tests.ray_nodes import Attempt
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, get_scheduler

from share_compute.data import StepOrder, prepare
from share_compute.lifecycle.attempt_events import AttemptEvent
from share_compute.models.blueprint import Blueprint
from share_compute.models.factory import build_stage
from share_compute.shards import Shard
from share_compute.specification import parse_job

pytestmark = pytest.mark.slow

LLAMA = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("corpus") / "licence.txt"
    target.write_text((Path(__file__).parents[4] / "LICENSE").read_text() * 4)
    return target


def job(
    corpus: Path, *, stages: int = 2, members: int = 1, model: Path | None = None, **training: Any
) -> dict[str, Any]:
    return {
        "model": {"config": LLAMA} if model is None else {"path": str(model)},
        "data": {"files": [str(corpus)]},
        "tokenizer": {"vocab_size": 300} if model is None else {},
        "training": {
            "steps": 6,
            "batch_size": 8,
            "microbatches": 4,
            "sequence_length": 32,
            "optimizer": {"learning_rate": 0.01},
            **training,
        },
        "parallelism": {"stages": stages, "members_per_stage": members},
    }


def succeeded(events: list[AttemptEvent]) -> list[AttemptEvent]:
    assert events[-1].type == "ended"
    assert events[-1].outcome == "succeeded", events[-1].reason
    return events


def losses_of(events: list[AttemptEvent]) -> dict[int, float]:
    return {event.step: event.loss for event in events if event.type == "step"}


def checkpoint_of(events: list[AttemptEvent], step: int) -> Path:
    return next(event.path for event in events if event.type == "checkpoint" and event.step == step)


def tensors_in(folder: Path, stem: str = "model") -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in folder.glob(f"{stem}*.safetensors"):
        found.update(load_file(file))
    return found


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> set[str]:
    assert one.keys() == other.keys()
    return {name for name in one if not torch.equal(one[name], other[name])}


def started(folder: Path) -> torch.nn.Module:
    """Return the whole model as a job without weights initializes it."""
    config = json.loads((folder / "config.json").read_text())
    stage = build_stage(Blueprint(config=config), Shard("m", 0, 6, 6), torch.device("cpu"))
    stage.initialize(0)
    model: torch.nn.Module = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**config), dtype=torch.float32
    )
    model.load_state_dict(stage.module.state_dict())
    return model


def reference(document: dict[str, Any], folder: Path, artifact: Path) -> list[float]:
    """Train whole batches in one process; weight decay applies to matrices only."""
    spec = parse_job(document)
    samples = prepare(spec, folder / "data").samples
    model, training = started(artifact), spec.training
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices}, {"params": others, "weight_decay": 0.0}],
        lr=training.optimizer.learning_rate,
        weight_decay=training.optimizer.weight_decay,
        betas=training.optimizer.betas,
    )
    schedule = get_scheduler("cosine", optimizer, num_warmup_steps=0, num_training_steps=training.steps)
    order = StepOrder(training.seed, samples.size("train"), training.batch_size)
    losses = []
    for step in range(1, training.steps + 1):
        inputs, targets = (torch.tensor(rows) for rows in samples.take("train", order.indices(step)))
        loss = cross_entropy(model(input_ids=inputs).logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def test_weights_decay_but_those_of_norms_do_not(attempt: Attempt, corpus: Path, tmp_path: Path) -> None:
    document = job(corpus, steps=12, optimizer={"learning_rate": 0.02, "weight_decay": 2.0})
    losses = losses_of(succeeded(attempt(document)))
    expected = reference(document, tmp_path, tmp_path / "artifacts" / "model")
    assert list(losses.values()) == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize(
    ("stages", "members", "frozen", "trained_layers"),
    [
        (3, 1, ["model.embed_tokens.*", "layers[:4]"], {4, 5}),
        pytest.param(2, 2, ["layers[3:]", "model.norm.*"], {0, 1, 2}, marks=pytest.mark.thorough),
        pytest.param(2, 1, ["model.embed_tokens.*"], set(range(6)), marks=pytest.mark.thorough),
    ],
    ids=["two-stages-train-nothing", "the-end", "a-shared-parameter"],
)
def test_what_is_frozen_stays(
    attempt: Attempt,
    corpus: Path,
    tmp_path: Path,
    stages: int,
    members: int,
    frozen: Sequence[str],
    trained_layers: set[int],
) -> None:
    alone = succeeded(attempt(job(corpus, stages=1, freeze=frozen), folder=tmp_path / "alone"))
    spread = succeeded(attempt(job(corpus, stages=stages, members=members, freeze=frozen), number=2))
    assert losses_of(spread) == pytest.approx(losses_of(alone), abs=1e-5)
    artifact = tmp_path / "artifacts" / "model"
    trained, first = tensors_in(artifact), started(artifact).state_dict()
    first.pop("lm_head.weight")
    changed = differing(trained, first)
    layers = {int(name.split(".")[2]) for name in changed if name.startswith("model.layers.")}
    assert layers == trained_layers
    assert ("model.embed_tokens.weight" in changed) == ("model.embed_tokens.*" not in frozen)
    assert ("model.norm.weight" in changed) == ("model.norm.*" not in frozen)


@pytest.fixture
def base(attempt: Attempt, corpus: Path, tmp_path: Path) -> Path:
    """A folder with a model that was trained for a few steps."""
    succeeded(attempt(job(corpus, steps=4), folder=tmp_path / "first"))
    return tmp_path / "first" / "artifacts" / "model"


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks transformers
def test_adapters_are_trained_saved_and_resumed(
    attempt: Attempt, corpus: Path, base: Path, tmp_path: Path
) -> None:
    lora = {"rank": 4, "dropout": 0.1, "targets": ["q_proj", "up_proj"]}
    document = job(corpus, model=base, stages=2, lora=lora, checkpoint_every=3)
    straight = succeeded(attempt(document, number=2))
    artifact = tmp_path / "artifacts" / "model"
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {file.name for file in artifact.iterdir()}
    assert not any((artifact / name).exists() for name in ("config.json", "layers.json"))

    # Everything but the adapters is unchanged, and peft reads the folder without conversion.
    saved = tensors_in(checkpoint_of(straight, 6))
    plain = {name: tensor for name, tensor in saved.items() if ".lora_" not in name}
    assert not differing(plain, tensors_in(base))
    config = json.loads((artifact / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), artifact)
    learnt = {name: tensor for name, tensor in adapted.state_dict().items() if ".lora_" in name}
    assert len(learnt) == 6 * 2 * 2
    for name, tensor in learnt.items():
        short = name.removeprefix("base_model.model.").replace(".default", "")
        assert torch.equal(tensor, saved[short]), name
        assert tensor.any()

    # On other machines, a job that continues from the checkpoint has the same losses.
    resumed = succeeded(
        attempt(
            {**document, "parallelism": {"stages": 3, "members_per_stage": 1}},
            checkpoint=checkpoint_of(straight, 3),
            number=3,
            folder=tmp_path / "second",
        )
    )
    rest = {step: loss for step, loss in losses_of(straight).items() if step > 3}
    assert losses_of(resumed) == pytest.approx(rest, abs=1e-6)


@pytest.mark.thorough
def test_merged_adapters_make_a_whole_model(
    attempt: Attempt, corpus: Path, base: Path, tmp_path: Path
) -> None:
    document = job(corpus, model=base, stages=2, lora={"rank": 2, "alpha": 8, "merge": True})
    events = succeeded(attempt(document, number=2))
    artifact = tmp_path / "artifacts" / "model"
    saved = tensors_in(checkpoint_of(events, 6))
    merged = AutoModelForCausalLM.from_pretrained(artifact).state_dict()
    name = "model.layers.4.mlp.down_proj"
    expected = saved[f"{name}.weight"] + 4 * saved[f"{name}.lora_B.weight"] @ saved[f"{name}.lora_A.weight"]
    assert torch.allclose(merged[f"{name}.weight"], expected, atol=1e-6)
    assert not torch.equal(merged[f"{name}.weight"], saved[f"{name}.weight"])


@pytest.mark.parametrize(
    "codecs",
    [
        {},
        pytest.param(
            {
                "compression": {"name": "int8", "error_feedback": None},
                "boundary_compression": {"name": "int8"},
            },
            marks=pytest.mark.thorough,
        ),
    ],
    ids=["float32", "int8"],
)
def test_float16_learns_as_float32_does_and_skips_what_overflows(
    attempt: Attempt, corpus: Path, tmp_path: Path, codecs: dict[str, Any]
) -> None:
    plain = losses_of(succeeded(attempt(job(corpus), folder=tmp_path / "plain")))
    document = job(corpus, precision="float16", checkpoint_every=3, **codecs)
    straight = succeeded(attempt(document))
    assert losses_of(straight) == pytest.approx(plain, abs=0.02)
    saved = checkpoint_of(straight, 3)
    file = saved / "training.json"
    state = json.loads(file.read_text())
    assert state["loss_scale"] == {"factor": 2.0**16, "clean_steps": 3, "is_dynamic": True}

    # This scale is so large that gradients are infinite until it has been halved often enough.
    state["loss_scale"]["factor"] = 2.0**21
    file.write_text(json.dumps(state))
    (saved / "checksums.json").unlink()
    resumed = succeeded(
        attempt(
            {**document, "training": {**document["training"], "steps": 9, "checkpoint_every": 1}},
            checkpoint=saved,
            number=2,
            folder=tmp_path / "second",
        )
    )
    norms = {event.step: event.gradient_norm for event in resumed if event.type == "step"}
    skipped = [step for step, norm in norms.items() if norm is None]
    assert skipped[0] == 4
    assert len(skipped) < 6
    notes = [
        event.message for event in resumed if event.type == "note" and "changed nothing" in event.message
    ]
    assert len(notes) == len(skipped)
    last = json.loads((checkpoint_of(resumed, 9) / "training.json").read_text())["loss_scale"]
    assert last == {
        "factor": 2.0 ** (21 - len(skipped)), "clean_steps": 9 - skipped[-1], "is_dynamic": True
    }  # fmt: skip


@pytest.mark.thorough
def test_a_skipped_step_leaves_the_weights(attempt: Attempt, corpus: Path, tmp_path: Path) -> None:
    document = job(corpus, precision="float16", steps=1)
    saved = checkpoint_of(succeeded(attempt(document)), 1)
    state = json.loads((saved / "training.json").read_text())
    state["loss_scale"]["factor"] = 2.0**40
    (saved / "training.json").write_text(json.dumps(state))
    (saved / "checksums.json").unlink()
    events = succeeded(
        attempt(
            {**document, "training": {**document["training"], "steps": 3}},
            checkpoint=saved,
            number=2,
            folder=tmp_path / "second",
        )
    )
    after = checkpoint_of(events, 3)
    assert not differing(tensors_in(after), tensors_in(saved))
    assert not differing(tensors_in(after, "optimizer"), tensors_in(saved, "optimizer"))


@pytest.mark.parametrize(("stages", "members"), [pytest.param(1, 1, marks=pytest.mark.thorough), (2, 2)])
def test_numbers_that_are_not_finite_are_traced(
    attempt: Attempt, corpus: Path, stages: int, members: int
) -> None:
    optimizer = {"name": "sgd", "learning_rate": 1e30}
    document = job(
        corpus,
        stages=stages,
        members=members,
        max_gradient_norm=None,
        optimizer=optimizer,
        checkpoint_every=1,
    )
    events = attempt(document)
    assert events[-1].type == "ended"
    assert events[-1].outcome == "failed"
    assert events[-1].reason.startswith("numbers are not finite at step 2: first ")
    assert "(microbatch " in events[-1].reason
    assert events[-1].error["step"] == 2
    assert list(losses_of(events)) == [1]
    assert all(tensor.isfinite().all() for tensor in tensors_in(checkpoint_of(events, 1)).values())


def test_a_job_ends_when_validations_get_no_better_also_after_it_was_resumed(
    attempt: Attempt, corpus: Path, tmp_path: Path
) -> None:
    document = job(
        corpus, steps=40, validate_every=2, checkpoint_every=2,
        early_stopping={"patience": 2, "min_delta": 50.0},
    )  # fmt: skip
    straight = succeeded(attempt(document))
    assert max(losses_of(straight)) == 6
    assert straight[-1].type == "ended"
    assert straight[-1].reason.startswith("6 steps done: validation loss has not fallen below")
    assert (checkpoint_of(straight, 6) / "training.json").exists()
    assert any(event.type == "artifact" for event in straight)
    resumed = succeeded(
        attempt(document, checkpoint=checkpoint_of(straight, 4), number=2, folder=tmp_path / "second")
    )
    assert list(losses_of(resumed)) == [5, 6]
    assert resumed[-1] == straight[-1]


def test_samples_are_what_the_model_says(attempt: Attempt, corpus: Path, tmp_path: Path) -> None:
    prompts = ["The License", "You may not"]
    document = job(corpus, stages=3, steps=20, samples={"every": 10, "prompts": prompts, "max_tokens": 12})
    events = succeeded(attempt(document))
    sampled = [event for event in events if event.type == "sampled"]
    assert [(event.step, event.prompt) for event in sampled] == [
        (step, prompt) for step in (10, 20) for prompt in prompts
    ]
    artifact = tmp_path / "artifacts" / "model"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(artifact), AutoTokenizer.from_pretrained(artifact)
    for event in sampled[2:]:
        ids = torch.tensor([tokenizer(event.prompt).input_ids])
        made = model.generate(input_ids=ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :].tolist()
        end = tokenizer.eos_token_id
        assert event.text == tokenizer.decode(made[: made.index(end)] if end in made else made)
