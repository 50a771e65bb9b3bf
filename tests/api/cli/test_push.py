"""Results on the Hugging Face Hub: a real command, a real control plane, and a stand-in of the Hub."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from huggingface_hub import ModelCard
from tests.api.conftest import Plane
from tests.hub_server import OWNER, TOKEN, Hub, Repository, hub_server

from share_compute.lifecycle.attempt_events import ArtifactSaved
from share_compute_api.client.client import Client

Push = Callable[..., "subprocess.CompletedProcess[str]"]
WEIGHTS = b"weights" * 1000


@pytest.fixture
def hub() -> Iterator[Hub]:
    with hub_server() as hub:
        yield hub


@pytest.fixture
def job_id(plane: Plane, client: Client, digits: dict[str, Any]) -> str:
    job_id = client.submit(digits).id
    folder = plane.settings.data_folder / "jobs" / job_id / "artifacts" / "model"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    (folder / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": "/srv/models/base", "r": 8})
    )
    plane.store.jobs.begin(job_id, [])
    plane.store.progress.record(
        job_id, 1, [ArtifactSaved(name="model", path=folder, size_bytes=len(WEIGHTS))]
    )
    return job_id


@pytest.fixture
def push(run: Any, hub: Hub, tmp_path: Any) -> Push:
    def command(*words: str, **changes: str) -> subprocess.CompletedProcess[str]:
        environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1",
                       "HF_TOKEN": TOKEN, **changes}  # fmt: skip
        done: subprocess.CompletedProcess[str] = run("push", *words, **environment)
        return done

    return command


def problem(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert "Traceback" not in done.stderr
    found: dict[str, Any] = json.loads(done.stderr)["error"]
    assert found["hint"]
    return found


@pytest.mark.slow
def test_a_result_is_pushed_to_a_private_repository_with_its_card(push: Push, hub: Hub, job_id: str) -> None:
    done = push(job_id, "digits", "--json")
    assert done.returncode == 0, done.stderr
    pushed = json.loads(done.stdout)
    repository = hub.repositories[f"{OWNER}/digits"]
    assert pushed == {
        "repository": f"{OWNER}/digits",
        "url": f"{hub.url}/{OWNER}/digits",
        "commit": repository.commit,
        "is_private": True,
    }
    assert repository.private
    assert repository.files["model.safetensors"] == WEIGHTS
    assert (
        ModelCard(repository.files["README.md"].decode()).data.to_dict()["pipeline_tag"]
        == "image-classification"
    )
    # The path of the base model on the server is of no use elsewhere.
    assert json.loads(repository.files["adapter_config.json"]) == {"base_model_name_or_path": "base", "r": 8}
    again = push(job_id, f"{OWNER}/digits", "--base-model", "org/base")
    assert again.returncode == 0, again.stderr
    assert "private" in again.stdout
    assert json.loads(repository.files["adapter_config.json"])["base_model_name_or_path"] == "org/base"


@pytest.mark.slow
def test_a_public_repository_needs_a_word(push: Push, hub: Hub, job_id: str) -> None:
    hub.repositories["ada/open"] = Repository()
    refused = push(job_id, "ada/open", "--json")
    assert (refused.returncode, problem(refused)["code"]) == (4, "conflict")
    assert hub.repositories["ada/open"].files == {}
    assert push(job_id, "ada/open", "--public").returncode == 0
    assert push(job_id, "ada/new", "--public").returncode == 0
    assert not hub.repositories["ada/new"].private


@pytest.mark.slow
def test_errors_of_the_hub_have_hints(push: Push, hub: Hub, job_id: str) -> None:
    without = push(job_id, "digits", "--json", HF_TOKEN="hf_wrong")
    assert (without.returncode, problem(without)["code"]) == (5, "not-authorized")
    assert "hf auth login" in problem(without)["hint"]
    assert problem(push(job_id, "a/b/c", "--json"))["code"] == "invalid-request"
    away = push(job_id, "digits", "--json", HF_ENDPOINT="http://127.0.0.1:9")
    assert (away.returncode, problem(away)["code"]) == (8, "unavailable")
    branch = push(job_id, "digits", "--revision", "dev", "--json")
    assert problem(branch)["code"] == "not-found"
    assert hub.repositories == {}
    hub.repositories[f"{OWNER}/digits"] = Repository(private=True)
    assert "no such revision" in problem(push(job_id, "digits", "--revision", "dev", "--json"))["detail"]
    hub.repositories[f"{OWNER}/digits"].branches = ("main", "dev")
    assert push(job_id, "digits", "--revision", "dev", "--json").returncode == 0
    missing = push(job_id, "digits", "--artifact", "other", "--json")
    assert problem(missing)["code"] == "not-found"
