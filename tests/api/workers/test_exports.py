"""Exports of checkpoints, while the job that writes the checkpoints continues."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from share_compute.errors import NotFound, ShareComputeError, UserError
from share_compute.models.storage.checkpoints import STATE
from share_compute.models.storage.weights import FolderWriter, files, stream_file
from share_compute_actors.machine.confine import landlock_version
from share_compute_api.client.client import Client

LLAMA = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
IDS = torch.arange(12).reshape(1, 12)

Run = Callable[..., subprocess.CompletedProcess[str]]


def model(seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    made: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA)).eval()
    return made


def save(folder: Path, step: int) -> Path:
    """Write a checkpoint as the library does; the model is that of the step's seed."""
    writer = FolderWriter(folder / f"step-{step:08}")
    learnt = model(step)
    for number, group in enumerate(files(learnt.state_dict(), 40_000)):
        for piece in stream_file(group):
            writer.write(f"model-0000-{number:04}.part", piece)
    for piece in stream_file({"a::step": torch.tensor(float(step))}):
        writer.write("optimizer-0000-0000.part", piece)
    writer.write_json(STATE, {"step": step})
    writer.write_json("config.json", learnt.config.to_diff_dict() | LLAMA)
    writer.write_json("generation_config.json", {"eos_token_id": 7})
    writer.write_json("tokenizer.json", {"version": "1.0"})
    writer.finish()
    return writer.target


@pytest.fixture
def checkpoints(client: Client, digits: dict[str, Any], tmp_path: Path) -> Path:
    job_id = client.submit(digits).id
    folder = tmp_path / "data" / "jobs" / job_id / "checkpoints"
    for step in (4, 8):
        save(folder, step)
    (folder / ".step-00000012.partial").mkdir()
    return folder


@pytest.fixture
def job_id(checkpoints: Path) -> str:
    return checkpoints.parent.name


@pytest.mark.slow
def test_a_checkpoint_becomes_a_folder_that_transformers_loads(
    run: Run, client: Client, job_id: str, checkpoints: Path, tmp_path: Path
) -> None:
    assert [one.step for one in client.checkpoints(job_id)] == [4, 8]
    done = run("export", job_id, str(tmp_path / "deep" / "four"), "--step", "4", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["path"] == str(tmp_path / "deep" / "four")
    newest = run("export", job_id, str(tmp_path / "eight"))
    assert newest.returncode == 0, newest.stderr
    for folder, step in ((tmp_path / "deep" / "four", 4), (tmp_path / "eight", 8)):
        loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
        with torch.no_grad():
            assert torch.equal(loaded(IDS).logits, model(step)(IDS).logits)
        assert loaded.generation_config.eos_token_id == 7
        names = {file.name for file in folder.iterdir()}
        assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} <= names
        assert not any(name.startswith("optimizer") for name in names)
    # The export is a result of its own, and no longer needs its checkpoint.
    shutil.rmtree(checkpoints)
    assert [one.name for one in client.artifacts(job_id)] == ["step-00000004", "step-00000008"]
    assert client.export(job_id, 4) == client.artifacts(job_id)[0]


def test_an_export_takes_no_space_beside_its_checkpoint(
    client: Client, job_id: str, checkpoints: Path
) -> None:
    made = client.export(job_id, 8)
    for file in made.path.glob("*.safetensors"):
        assert file.samefile(checkpoints / "step-00000008" / file.name)


@pytest.mark.skipif(not landlock_version(), reason="this kernel has no Landlock")
@pytest.mark.parametrize("place", ["exports", "checkpoints/step-00000008/config.json"])
def test_a_link_that_code_on_the_head_made_leads_an_export_nowhere(
    client: Client, job_id: str, checkpoints: Path, tmp_path: Path, place: str
) -> None:
    link = checkpoints.parent / place
    outside = tmp_path / "outside"
    outside.mkdir()
    if link.exists():
        link.rename(outside / "kept")
        link.symlink_to(outside / "kept")
    else:
        link.symlink_to(outside)
    with pytest.raises(ShareComputeError):
        client.export(job_id, 8)
    assert [file.name for file in outside.iterdir()] in ([], ["kept"])
    assert client.artifacts(job_id) == []


@pytest.mark.slow
def test_a_damaged_checkpoint_is_refused(run: Run, client: Client, job_id: str, checkpoints: Path) -> None:
    file = next((checkpoints / "step-00000008").glob("model-00002*"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match=f"{file.name} is damaged"):
        client.export(job_id, 8)
    refused = run("export", job_id, str(checkpoints / "out"))
    assert refused.returncode == 2
    assert "choose another checkpoint" in refused.stderr
    assert client.artifacts(job_id) == []
    assert client.export(job_id, 4).name == "step-00000004"


@pytest.mark.slow
def test_what_is_not_there_is_not_exported(
    run: Run, client: Client, digits: dict[str, Any], job_id: str, tmp_path: Path
) -> None:
    with pytest.raises(NotFound, match="no checkpoint of step 5"):
        client.export(job_id, 5)
    (tmp_path / "there").mkdir()
    assert run("export", job_id, str(tmp_path / "there")).returncode == 4
    fresh = client.submit({**digits, "name": "fresh"}).id
    assert client.checkpoints(fresh) == []
    nothing = run("export", fresh, str(tmp_path / "out"))
    assert nothing.returncode == 3
    assert "has no checkpoint yet" in nothing.stderr
    with pytest.raises(NotFound):
        client.checkpoints("job-none")
