"""Models of the Hub in jobs and deployments, fetched by a real control plane from a stand-in of the Hub."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import save
from tests.api.conftest import DEADLINE_S, Plane, wait_until
from tests.api.speaking import make_llama
from tests.hub_server import Hub, Repository, hub_server

from share_compute_api.hub.fetching import HubModels
from share_compute_api.server.budget import Budget

LLAMA = {"model_type": "llama", "vocab_size": 300, "hidden_size": 16, "intermediate_size": 32,
         "num_hidden_layers": 2, "num_attention_heads": 2}  # fmt: skip


SHORT_S = 0.1
"""Time that a request waits for a model whose fetch is held up."""


@contextmanager
def short_waits(plane: Plane) -> Iterator[None]:
    """Let requests inside the block wait for a model for a short time only."""
    hub: HubModels = plane.app.state.context.hub
    hub.wait_s = SHORT_S
    yield
    hub.wait_s = DEADLINE_S


def wait_for_fetches() -> None:
    """Wait until no model is being fetched; the name of a thread says what it does."""
    for thread in threading.enumerate():
        if thread.name == "hub-fetch":
            thread.join(DEADLINE_S)
            assert not thread.is_alive()


def weights(seed: int, size: int = 1000) -> bytes:
    return save({f"layer.{seed}": np.full(size, seed, np.float32)})


@pytest.fixture
def hub(plane: Plane) -> Iterator[Hub]:
    with hub_server() as hub:
        context = plane.app.state.context
        # Requests wait until a model has arrived, also on a busy machine.
        context.hub = HubModels(
            context.uploads, context.isolated, hub.url, wait_s=DEADLINE_S, timeout_s=DEADLINE_S
        )
        hub.repositories["org/tiny"] = Repository(
            {
                "config.json": json.dumps(LLAMA).encode(),
                "README.md": b"---\nlicense: mit\n---\n",
                "model.safetensors.index.json": json.dumps(
                    {"weight_map": {f"layer.{n}": f"model-0000{n}-of-00002.safetensors" for n in (1, 2)}}
                ).encode(),
                "model-00001-of-00002.safetensors": weights(1),
                "model-00002-of-00002.safetensors": weights(2),
                "pytorch_model.bin": b"pickle",
                "other.safetensors": weights(3),
                "onnx/model.safetensors": weights(4),
                "train.py": b"import os",
            },
            branches=("main", "dev"),
        )
        yield hub


@pytest.fixture
def job(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "corpus.txt").write_text("some text\n" * 100)
    return {
        "model": {"hub": "org/tiny"},
        "data": {"files": [str(tmp_path / "corpus.txt")]},
        "training": {"steps": 3, "sequence_length": 16},
    }


def refused(http: httpx.Client, job: dict[str, Any]) -> dict[str, Any]:
    answer = http.post("/jobs", json=job)
    assert answer.status_code == 422, answer.text
    problem: dict[str, Any] = answer.json()
    assert problem["details"]["fields"][0]["field"] == "model.hub"
    assert problem["hint"]
    return problem


def test_a_model_is_fetched_at_the_commit_of_the_submission(
    http: httpx.Client, hub: Hub, job: dict[str, Any]
) -> None:
    first = hub.repositories["org/tiny"].commit
    model = http.post("/jobs", json=job).json()["spec"]["model"]
    assert (model["hub"], model["revision"]) == ("org/tiny", first)
    folder = Path(model["path"])
    # Only one copy of the weights, without pickles and code, is fetched.
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md",
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    assert (folder / "model-00002-of-00002.safetensors").read_bytes() == weights(2)
    assert hub.tokens == {""}
    (upload,) = http.get("/uploads").json()["uploads"]
    assert (upload["name"], upload["state"]) == (f"org/tiny@{first}", "complete")

    # A submitted specification can be submitted again, and gets the same model without asking the Hub.
    hub.repositories["org/tiny"].files["config.json"] = json.dumps({**LLAMA, "num_hidden_layers": 1}).encode()
    fetched = len(hub.fetched)
    again = http.post("/jobs", json={**job, "model": model}).json()["spec"]["model"]
    assert (again, len(hub.fetched)) == (model, fetched)

    # The branch has moved, so a new job gets the new commit.
    moved = http.post("/jobs", json={**job, "model": {"hub": "org/tiny", "revision": "dev"}}).json()["spec"][
        "model"
    ]
    assert moved["revision"] == hub.repositories["org/tiny"].commit != first
    assert moved["path"] != model["path"]


def test_a_repeated_submission_finds_the_first_although_the_branch_has_moved(
    http: httpx.Client, hub: Hub, job: dict[str, Any]
) -> None:
    key = {"Idempotency-Key": "one"}
    first = http.post("/jobs", json=job, headers=key)
    assert first.status_code == 201, first.text
    del hub.repositories["org/tiny"]
    again = http.post("/jobs", json=job, headers=key)
    assert (again.status_code, again.json()["id"]) == (201, first.json()["id"])
    other = {**job, "name": "other"}
    assert http.post("/jobs", json=other, headers=key).json()["code"] == "conflict"


def test_a_request_does_not_wait_for_a_large_model(
    plane: Plane, http: httpx.Client, hub: Hub, job: dict[str, Any], tmp_path: Path,
    run: Callable[..., subprocess.CompletedProcess[str]],
) -> None:  # fmt: skip
    plane.app.state.context.hub.wait_s = SHORT_S
    hub.opened.clear()
    waiting = http.post("/jobs", json=job)
    assert (waiting.status_code, waiting.json()["code"]) == (503, "fetch-under-way")
    assert "of 8" in waiting.json()["detail"]
    assert int(waiting.headers["Retry-After"]) > 0
    # A check and a plan do not fetch the weights, and find errors of the model.
    assert http.post("/jobs/check", json=job).json()["problems"] == []
    wide = {**job, "tokenizer": {"vocab_size": 301}}
    (problem,) = http.post("/jobs/check", json=wide).json()["problems"]
    assert problem["field"] == "tokenizer.vocab_size"
    deployment = {"kind": "serve", "name": "tiny", "model": {"hub": "org/tiny"}}
    assert http.post("/jobs/check", json=deployment).json()["problems"] == []
    hub.opened.set()
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    done = run("submit", str(tmp_path / "job.yaml"), "--json")
    assert done.returncode == 0, done.stderr
    assert [name for name in hub.fetched if "00001" in name] == ["model-00001-of-00002.safetensors"]


@pytest.mark.slow
def test_plans_and_checks_of_sweeps_need_only_the_configuration(
    http: httpx.Client, hub: Hub, job: dict[str, Any], run: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path: Path,
) -> None:  # fmt: skip
    adapted = {**job, "training": {**job["training"], "lora": {}}}
    topology = {"kind": "topology", "version": 1, "contributors": [
        {"name": "ada", "devices": [{"memory_bytes": 8 << 30, "flops_per_s": {"float32": 2e11}}]}]}  # fmt: skip
    for one in (job, adapted):
        planned = http.post("/plans", json={"job": one, "topology": topology})
        assert planned.status_code == 200, planned.text
        assert planned.json()["plan"]["num_layers"] == 2
    sweep = {"kind": "sweep", "job": job, "fields": {"training.optimizer.learning_rate": {"values": [0.1, 0.01]}},
             "search": {"kind": "grid"}}  # fmt: skip
    assert http.post("/jobs/check", json=sweep).json()["problems"] == []
    assert not [name for name in hub.fetched if name.endswith(".safetensors")]
    # A configuration in a submission is replaced by that of the model.
    pinned = {
        "hub": "org/tiny",
        "revision": hub.repositories["org/tiny"].commit,
        "config": {**LLAMA, "vocab_size": 9},
    }
    model = http.post("/jobs", json={**job, "model": pinned}).json()["spec"]["model"]
    assert model["path"]
    assert model["config"] is None
    (tmp_path / "job.json").write_text(json.dumps(job))
    (tmp_path / "topology.json").write_text(json.dumps(topology))
    alone = run("plan", str(tmp_path / "job.json"), "--topology", str(tmp_path / "topology.json"))
    assert "is on the Hub, not on this machine" in alone.stderr


def test_the_error_of_a_fetch_is_shown_once_to_a_request_that_comes_later(
    plane: Plane, http: httpx.Client, hub: Hub, job: dict[str, Any]
) -> None:
    hub.opened.clear()
    hub.damaged.add("model-00001-of-00002.safetensors")
    with short_waits(plane):
        assert http.post("/jobs", json=job).json()["code"] == "fetch-under-way"
    hub.opened.set()
    wait_for_fetches()
    hub.damaged.clear()
    assert "arrived damaged" in refused(http, job)["detail"]
    assert http.post("/jobs", json=job).status_code == 201


def test_waits_for_the_hub_leave_capacity_for_other_submissions(
    plane: Plane,
    http: httpx.Client,
    hub: Hub,
    job: dict[str, Any],
    digits: dict[str, Any],
) -> None:
    context = plane.app.state.context
    context.checks = Budget(at_once=1)
    hub.answers.clear()
    with ThreadPoolExecutor(2) as executor:
        waiting = [executor.submit(http.post, "/jobs/check", json=job) for _ in range(2)]
        try:
            wait_until(lambda: len(hub.asked) == 2)
            assert http.post("/jobs", json=digits).status_code == 201
            busy = http.post("/jobs", json=job)
            assert (busy.status_code, busy.json()["detail"]) == (
                429,
                "2 requests of this key wait for the Hub",
            )
        finally:
            hub.answers.set()
        assert [one.result().json()["problems"] for one in waiting] == [[], []]
    assert http.post("/jobs", json=job).status_code == 201


def test_a_key_fetches_two_models_at_a_time_and_can_end_a_fetch(
    plane: Plane, http: httpx.Client, hub: Hub, job: dict[str, Any]
) -> None:
    files = hub.repositories["org/tiny"].files
    large = {**files, "model-00001-of-00002.safetensors": weights(1, size=15 << 20)}
    hub.repositories |= {name: Repository(dict(large)) for name in ("org/a", "org/b", "org/c")}
    hub.pieces = threading.Semaphore(0)
    wanted = [{**job, "model": {"hub": name}} for name in ("org/a", "org/b", "org/c")]
    with short_waits(plane):
        for one in wanted[:2]:
            assert http.post("/jobs", json=one).json()["code"] == "fetch-under-way"
    busy = http.post("/jobs", json=wanted[2])
    assert (busy.status_code, busy.json()["code"]) == (429, "busy")
    assert "2 models are being fetched from the Hub for this key" in busy.json()["detail"]
    for upload in http.get("/uploads").json()["uploads"]:
        assert http.delete(f"/uploads/{upload['id']}").is_success
    hub.pieces.release(40)  # each of the two files has 60 MiB, so both fetches end before their files do
    wait_for_fetches()
    assert "upload" in refused(http, wanted[0])["detail"]
    hub.pieces = None
    assert http.post("/jobs", json=wanted[2]).status_code == 201


def test_names_that_do_not_exist_and_gated_models_are_refused(
    http: httpx.Client, hub: Hub, job: dict[str, Any]
) -> None:
    assert "no repository org/none" in refused(http, {**job, "model": {"hub": "org/none"}})["detail"]
    assert "revision" in refused(http, {**job, "model": {"hub": "org/tiny", "revision": "v9"}})["detail"]
    hub.repositories["org/tiny"].gated = True
    gated = refused(http, job)
    assert "gated" in gated["detail"]
    assert "share-compute upload" in gated["hint"]
    hub.repositories["org/tiny"] = Repository(private=True)
    assert "share-compute upload" in refused(http, job)["hint"]
    for model in (
        {"hub": "../etc"},
        {"hub": "a/b/c"},
        {"hub": "org/tiny", "revision": "a b"},
        {"revision": "v1"},
    ):
        assert http.post("/jobs", json={**job, "model": model}).status_code == 422
    both = http.post("/jobs", json={**job, "model": {"hub": "org/tiny", "config": LLAMA}})
    assert "exactly one of path, hub, config and layers" in both.json()["detail"]


def test_only_whole_models_in_safetensors_are_fetched(
    http: httpx.Client, hub: Hub, job: dict[str, Any]
) -> None:
    repository = hub.repositories["org/tiny"]
    files = dict(repository.files)
    repository.files = {"config.json": files["config.json"], "pytorch_model.bin": b"pickle"}
    assert "safetensors" in refused(http, job)["detail"]
    repository.files = {
        name: data for name, data in files.items() if name != "model-00002-of-00002.safetensors"
    }
    assert "lacks model-00002" in refused(http, job)["detail"]
    repository.files = {**files, "model.safetensors.index.json": b'{"weight_map": {"a": "../../up.bin"}}'}
    assert "does not list the weights" in refused(http, job)["detail"]
    for value in (b"[]", b"{}", b"1"):
        repository.files = {**files, "model.safetensors.index.json": b'{"weight_map": {"a": %s}}' % value}
        assert "does not list the weights" in refused(http, job)["detail"]
    repository.files = {**files, "config.json": b"[]"}
    (problem,) = http.post("/jobs/check", json=job).json()["problems"]
    assert "model_type" in problem["problem"]
    repository.files = files
    hub.damaged.add("model-00002-of-00002.safetensors")
    assert "arrived damaged" in refused(http, job)["detail"]
    # The next try keeps the files that have arrived.
    hub.damaged.clear()
    hub.fetched.clear()
    assert http.post("/jobs", json=job).status_code == 201
    assert "model-00001-of-00002.safetensors" not in hub.fetched


def test_large_descriptions_of_models_are_not_parsed(
    http: httpx.Client, hub: Hub, job: dict[str, Any]
) -> None:
    repository = hub.repositories["org/tiny"]
    files = dict(repository.files)
    lists = b"[" + b"[]," * (6 << 20) + b"[]]"
    repository.files = {**files, "model.safetensors.index.json": lists}
    assert "has more than 16" in refused(http, job)["detail"]
    repository.files = {**files, "config.json": lists[: 2 << 20]}
    (problem,) = http.post("/jobs/check", json=job).json()["problems"]
    assert "has more than 1" in problem["problem"]


@pytest.mark.usefixtures("hub")
def test_the_limit_of_uploads_holds(plane: Plane, http: httpx.Client, job: dict[str, Any]) -> None:
    plane.app.state.context.uploads.most_bytes_each = 5000
    assert "SHARE_COMPUTE_UPLOAD_LIMIT_BYTES" in refused(http, job)["hint"]
    assert http.get("/uploads").json()["uploads"] == []


def test_without_a_network_the_error_says_so(plane: Plane, http: httpx.Client, job: dict[str, Any]) -> None:
    context = plane.app.state.context
    context.hub = HubModels(context.uploads, context.isolated, "http://127.0.0.1:9")
    answer = http.post("/jobs", json=job)
    assert (answer.status_code, answer.json()["code"]) == (503, "unavailable")
    assert "HF_ENDPOINT" in answer.json()["hint"]


def test_a_model_of_the_hub_is_served(
    http: httpx.Client, hub: Hub, tmp_path: Path, run: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    folder = make_llama(tmp_path / "llama", window=64)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    hub.repositories["org/llama"] = Repository(files)
    done = run("serve", "hub:org/llama@main", "--json")
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert (made["name"], made["spec"]["model"]["revision"]) == (
        "llama",
        hub.repositories["org/llama"].commit,
    )
    used = http.delete(f"/uploads/{http.get('/uploads').json()['uploads'][0]['id']}")
    assert (used.status_code, used.json()["code"]) == (409, "conflict")
