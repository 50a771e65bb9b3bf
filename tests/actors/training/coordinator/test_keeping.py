"""Checkpoints on real Ray nodes: training continues while they are written, and jobs continue from complete ones."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tests.ray_nodes import Attempt, processes_on

from share_compute.lifecycle.attempt_events import AttemptEvent
from share_compute.models.storage.checksums import damage
from share_compute.protocol.failures import FailureKind, InjectedFailure
from share_compute.protocol.points import Point

pytestmark = pytest.mark.slow

LLAMA = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


STEPS_UNTIL_TIME = 200
CHECKPOINT_EVERY_S = 0.1
"""The steps take far longer than this and the writing of a checkpoint: the first is written before the last step."""


class SlowDisk:
    """A pretrained folder of which one file is not readable yet: who saves a checkpoint waits for it.

    Args:
        folder: of a model.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "generation_config.json"
        self._file.unlink(missing_ok=True)
        os.mkfifo(self._file)

    def wait_for_reader(self) -> int:
        """Wait until a process reads the file; return a function that lets it continue."""
        return os.open(self._file, os.O_WRONLY)

    def let_go(self, reader: int) -> None:
        """Give the content to the present reader and to all later ones."""
        self._file.unlink()
        self._file.write_text("{}")
        os.write(reader, b"{}")
        os.close(reader)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("corpus") / "licence.txt"
    target.write_text((Path(__file__).parents[4] / "LICENSE").read_text() * 4)
    return target


@pytest.fixture(scope="session")
def pretrained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("pretrained")
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train([str(corpus)], trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "</s>"]))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>").save_pretrained(
        folder
    )
    config = AutoConfig.for_model(**LLAMA, vocab_size=300, eos_token_id=1, bos_token_id=1)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def job(corpus: Path, pretrained: Path, *, members: int = 1, **training: Any) -> dict[str, Any]:
    return {
        "model": {"path": str(pretrained)},
        "data": {"files": [str(corpus)]},
        "training": {
            "steps": 10,
            "batch_size": 8,
            "microbatches": 4,
            "sequence_length": 16,
            "checkpoint_every": 4,
            **training,
        },
        "parallelism": {"stages": 2, "members_per_stage": members, "strategy": "uniform"},
    }


def succeeded(events: list[AttemptEvent]) -> list[AttemptEvent]:
    assert events[-1].type == "ended"
    assert events[-1].outcome == "succeeded", events[-1].reason
    return events


def checkpoints_of(events: list[AttemptEvent]) -> dict[int, Path]:
    return {event.step: event.path for event in events if event.type == "checkpoint"}


def losses_after(step: int, events: list[AttemptEvent]) -> dict[int, float]:
    return {event.step: event.loss for event in events if event.type == "step" and event.step > step}


def notes_of(events: list[AttemptEvent]) -> list[str]:
    return [event.message for event in events if event.type == "note"]


def test_training_goes_on_while_a_checkpoint_is_written(
    attempt: Attempt, corpus: Path, pretrained: Path, tmp_path: Path
) -> None:
    disk = SlowDisk(pretrained)

    def on_event(event: AttemptEvent, _coordinator: Any) -> None:
        if event.type == "step" and event.step == 7:
            disk.let_go(disk.wait_for_reader())

    events = succeeded(attempt(job(corpus, pretrained, checkpoints_kept=2), on_event=on_event))
    order = [(event.type, event.step) for event in events if event.type in ("step", "checkpoint")]
    # The checkpoint of step 8 waits for that of step 4, and the job's end waits for the last checkpoint.
    assert order.index(("step", 7)) < order.index(("checkpoint", 4)) < order.index(("step", 9))
    assert [step for kind, step in order if kind == "checkpoint"] == [4, 8, 10]
    kept = tmp_path / "checkpoints"
    assert sorted(folder.name for folder in kept.iterdir()) == ["step-00000008", "step-00000010"]
    assert all(damage(folder) is None for folder in (*kept.iterdir(), tmp_path / "artifacts" / "model"))
    # The checkpoint that was fetched during training has the state after step 8, and of no later step.
    state = json.loads((kept / "step-00000008" / "training.json").read_text())
    assert (state["step"], state["seed"], state["batch_size"]) == (8, 0, 8)
    again = succeeded(attempt(job(corpus, pretrained), checkpoint=kept / "step-00000008", number=2))
    assert losses_after(8, again) == losses_after(8, events)


def test_a_job_that_names_no_interval_survives_the_loss_of_all_its_members(
    attempt: Attempt, corpus: Path, pretrained: Path, nodes: list[Any], tmp_path: Path
) -> None:
    document = job(corpus, pretrained, checkpoint_every=None, steps=STEPS_UNTIL_TIME)
    document["parallelism"]["backups"] = False
    killed: list[int] = []

    def kill(event: AttemptEvent, _coordinator: Any) -> None:
        if event.type == "checkpoint" and not killed:
            for node in nodes:
                for process in processes_on(node, "Member"):
                    killed.append(process.pid)
                    process.kill()

    timed: dict[str, Any] = {"checkpoint_every_s": CHECKPOINT_EVERY_S, "folder": tmp_path / "lost"}
    lost = attempt(document, on_event=kill, **timed)
    assert len(killed) == 2
    assert lost[-1].type == "ended"
    assert lost[-1].outcome == "failed"
    (step, saved), *_ = checkpoints_of(lost).items()
    assert 0 < step < STEPS_UNTIL_TIME
    # From a checkpoint that was due by time, and with further ones, the losses are those of the undisturbed job.
    again = succeeded(attempt(document, checkpoint=saved, number=2, **timed))
    calm = succeeded(attempt(document, folder=tmp_path / "calm"))
    assert list(checkpoints_of(calm)) == [STEPS_UNTIL_TIME]
    assert losses_after(step, again) == losses_after(step, calm)
    first, second = (tmp_path / name / "artifacts" / "model" for name in ("lost", "calm"))
    for file in second.glob("*.safetensors"):
        assert (first / file.name).read_bytes() == file.read_bytes()


def test_a_member_that_dies_before_all_is_fetched_costs_one_checkpoint(
    attempt: Attempt, corpus: Path, pretrained: Path
) -> None:
    disk = SlowDisk(pretrained)

    def on_event(event: AttemptEvent, _coordinator: Any) -> None:
        if event.type == "reformed":
            disk.let_go(disk.wait_for_reader())

    first_of_stages = InjectedFailure(FailureKind.kill, Point.cell_starting, worker="c0", step=6)
    events = succeeded(
        attempt(job(corpus, pretrained, members=2), on_event=on_event, failures=[first_of_stages])
    )
    assert any("the state of step 4 could not be saved completely" in note for note in notes_of(events))
    assert list(checkpoints_of(events)) == [8, 10]
    assert all(damage(path) is None for path in checkpoints_of(events).values())


def test_a_damaged_checkpoint_is_passed_over(
    attempt: Attempt, corpus: Path, pretrained: Path, tmp_path: Path
) -> None:
    first = succeeded(attempt(job(corpus, pretrained)))
    saved = checkpoints_of(first)
    for step in (8, 10):
        file = next(saved[step].glob("model*.safetensors"))
        content = bytearray(file.read_bytes())
        content[-5] ^= 1
        file.write_bytes(content)
    again = succeeded(attempt(job(corpus, pretrained), checkpoint=saved[10], number=2))
    assert losses_after(4, again) == losses_after(4, first)
    assert sum("is damaged" in note and "is not used" in note for note in notes_of(again)) == 2
    for folder in (tmp_path / "checkpoints").glob("step-*"):
        next(folder.glob("optimizer*.safetensors")).unlink()
    lost = attempt(job(corpus, pretrained), checkpoint=saved[10], number=3)[-1]
    assert lost.type == "ended"
    assert lost.outcome == "failed"
    assert "no checkpoint of the job is whole" in lost.reason
    assert lost.error is not None
    assert "put a whole copy" in lost.error["hint"]


def test_a_disk_that_cannot_be_written_ends_the_job(
    attempt: Attempt, corpus: Path, pretrained: Path, tmp_path: Path
) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    (ended,) = (event for event in attempt(job(corpus, pretrained)) if event.type == "ended")
    assert ended.outcome == "failed"
    assert f"cannot write {tmp_path / 'checkpoints' / 'step-00000004'}" in ended.reason
    assert ended.error is not None
    assert "disk" in ended.error["hint"]
