"""REST against a real server: problems, keys, invites, jobs, submission checks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from tokenizers import Tokenizer, models

from share_compute.jobs.events import AttemptEnded, StepCommitted


def problem(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    document: dict[str, Any] = response.json()
    assert document["type"] == f"urn:share-compute:problem:{code}"
    assert (document["code"], document["status"]) == (code, status)
    assert document["mend"]
    assert document["instance"] == response.request.url.path
    return document


def test_the_control_plane_is_light() -> None:
    program = (
        "import sys, share_compute_api.app, share_compute_api.client, share_compute_api.agent_client;"
        "print([name for name in ('torch', 'transformers', 'ray', 'datasets') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_health_is_open_and_everything_else_needs_a_key(plane: Any) -> None:
    with httpx.Client(base_url=plane.url) as stranger:
        assert stranger.get("/api/v1/health").json()["status"] == "ok"
        assert stranger.get("/api/v1/schemas/job").json()["title"] == "TrainJob"
        document = stranger.get("/api/v1/openapi.json").json()
        open_paths = {"/api/v1/health", "/api/v1/schemas/job"}
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                if path in open_paths or operation["operationId"] == "join":
                    continue
                url = path.replace("{", "").replace("}", "")
                for headers in ({}, {"Authorization": "Bearer sck_wrong"}):
                    answer = stranger.request(
                        method, url, headers=headers, json={"node_id": "a", "address": "b"}
                    )
                    problem(answer, 401, "not-authorized")
                    assert answer.headers["www-authenticate"] == "Bearer"


def test_every_error_is_a_problem_document(http: httpx.Client) -> None:
    problem(http.get("/nothing"), 404, "not-found")
    problem(http.put("/status"), 405, "method-not-allowed")
    problem(http.get("/jobs/job-none"), 404, "not-found")
    problem(http.get("/jobs", params={"limit": 0}), 422, "invalid-request")
    problem(
        http.post("/invites", content="{", headers={"Content-Type": "application/json"}),
        422,
        "invalid-request",
    )
    document = problem(http.post("/invites", json={"lable": "x"}), 422, "invalid-request")
    assert document["details"]["fields"][0]["field"] == "lable"
    assert "label" in document["detail"]
    problem(http.post("/invites", content=b"x" * (2 << 20)), 413, "body-too-large")
    problem(http.post("/jobs", content=iter([b"x" * (1 << 20)] * 2)), 413, "body-too-large")
    problem(
        http.post("/jobs", content="x", headers={"Content-Type": "text/plain"}), 415, "unsupported-media-type"
    )


def test_a_mistake_of_the_server_shows_no_stack_trace(plane: Any, http: httpx.Client) -> None:
    def broken() -> None:
        raise RuntimeError("secret detail")

    plane.app.router.routes.insert(0, APIRoute("/api/v1/broken", broken, methods=["GET"]))
    answer = http.get("/broken")
    problem(answer, 500, "internal")
    assert "secret" not in answer.text


def test_invites_come_and_go(http: httpx.Client) -> None:
    made = http.post("/invites", json={"label": "Ada", "expires_in_s": 60})
    assert made.status_code == 201
    assert made.json()["join_command"].endswith(f"--invite {made.json()['code']}")
    assert "http://127.0.0.1:" in made.json()["join_command"]
    (listed,) = http.get("/invites").json()["invites"]
    assert (listed["state"], listed["label"], "code" in listed) == ("open", "Ada", False)
    assert http.delete(f"/invites/{listed['id']}").json()["state"] == "revoked"
    problem(http.delete("/invites/inv-none"), 404, "not-found")


def test_a_job_is_taken_as_json_and_as_yaml(http: httpx.Client, digits: dict[str, Any]) -> None:
    as_json = http.post("/jobs", json=digits)
    assert as_json.status_code == 201, as_json.text
    yaml = "name: digits\nmodel: {layers: [{type: linear}]}\ndata: {dataset: digits}\n"
    as_yaml = http.post("/jobs", content=yaml, headers={"Content-Type": "application/yaml; charset=utf-8"})
    assert as_yaml.status_code == 201, as_yaml.text
    assert as_yaml.json()["state"] == "queued"
    broken = http.post("/jobs", content="a: [", headers={"Content-Type": "application/yaml"})
    assert "line 1" in problem(broken, 422, "invalid-request")["detail"]
    broken = http.post("/jobs", content='{"a": }', headers={"Content-Type": "application/json"})
    assert "line 1, column 7" in problem(broken, 422, "invalid-request")["detail"]
    unknown = http.post("/jobs", json={**digits, "training": {"optimizer": {"name": "adamm"}}})
    assert "did you mean" in problem(unknown, 422, "invalid-request")["detail"]


def test_an_idempotency_key_makes_one_job(http: httpx.Client, digits: dict[str, Any]) -> None:
    headers = {"Idempotency-Key": "once"}
    first = http.post("/jobs", json=digits, headers=headers)
    again = http.post("/jobs", json=digits, headers=headers)
    assert (first.status_code, again.status_code) == (201, 201)
    assert first.json() == again.json()
    problem(http.post("/jobs", json={**digits, "name": "other"}, headers=headers), 409, "conflict")


def test_jobs_are_listed_in_pages_with_filters(http: httpx.Client, digits: dict[str, Any]) -> None:
    made = [http.post("/jobs", json={**digits, "name": f"job {index}"}).json()["id"] for index in range(5)]
    http.post(f"/jobs/{made[0]}/cancel")
    page = http.get("/jobs", params={"limit": 3}).json()
    rest = http.get("/jobs", params={"limit": 3, "cursor": page["next_cursor"]}).json()
    assert [job["id"] for job in page["jobs"] + rest["jobs"]] == made[::-1]
    assert rest["next_cursor"] is None
    two = http.get("/jobs", params={"state": ["cancelled", "failed"]}).json()["jobs"]
    assert [job["id"] for job in two] == made[:1]
    assert len(http.get("/jobs", params={"name": "JOB 3"}).json()["jobs"]) == 1
    problem(http.get("/jobs", params={"cursor": "x"}), 422, "invalid-request")


def test_a_job_is_cancelled_and_resumed(http: httpx.Client, digits: dict[str, Any]) -> None:
    job_id = http.post("/jobs", json=digits).json()["id"]
    assert http.post(f"/jobs/{job_id}/cancel").json()["state"] == "cancelled"
    problem(http.post(f"/jobs/{job_id}/cancel"), 409, "conflict")
    again = http.post(f"/jobs/{job_id}/resume").json()
    assert (again["state"], again["attempt"]) == ("queued", 2)
    problem(http.post(f"/jobs/{job_id}/resume"), 409, "conflict")


def test_metrics_come_as_json_and_as_csv(plane: Any, http: httpx.Client, digits: dict[str, Any]) -> None:
    job_id = http.post("/jobs", json=digits).json()["id"]
    plane.store.jobs.begin(job_id, [])
    step = StepCommitted(
        step=1,
        loss=0.5,
        learning_rate=0.1,
        gradient_norm=None,
        samples=4,
        tokens=4,
        seconds=1,
        tokens_per_s=4,
    )
    plane.store.progress.record(job_id, 1, [step])
    (row,) = http.get(f"/jobs/{job_id}/metrics").json()["metrics"]
    assert (row["step"], row["split"], row["data"]["loss"]) == (1, "train", 0.5)
    text = http.get(f"/jobs/{job_id}/metrics", params={"format": "csv"})
    assert text.headers["content-type"].startswith("text/csv")
    header, line = text.text.splitlines()
    assert dict(zip(header.split(","), line.split(","), strict=True))["loss"] == "0.5"
    ended = AttemptEnded(outcome="failed", reason="ada was lost", error={"code": "contributor-lost"})
    plane.store.progress.record(job_id, 1, [ended])
    assert http.get("/status").json()["jobs"]["failed"] == 1


def hugging_face_folder(
    folder: Path, *, vocab_size: int, token_ids: int, weights: str = "model.safetensors"
) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": vocab_size}))
    (folder / weights).touch()
    vocabulary = {f"w{index}": index for index in range(token_ids)}
    Tokenizer(models.WordLevel(vocabulary, unk_token="w0")).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("some text")
    return corpus


def submit(http: httpx.Client, model: dict[str, Any], corpus: Path, **more: Any) -> httpx.Response:
    return http.post("/jobs", json={"model": model, "data": {"files": [str(corpus)]}, **more})


def test_a_good_model_folder_is_taken(http: httpx.Client, tmp_path: Path, corpus: Path) -> None:
    folder = hugging_face_folder(tmp_path / "model", vocab_size=16, token_ids=16)
    answer = submit(http, {"path": str(folder)}, corpus)
    assert answer.status_code == 201, answer.text


def test_what_can_be_seen_on_disk_is_checked_at_once(
    http: httpx.Client, tmp_path: Path, corpus: Path
) -> None:
    def refused(model: dict[str, Any], corpus: Path = corpus, **more: Any) -> str:
        document = problem(submit(http, model, corpus, **more), 422, "invalid-request")
        (field,) = document["details"]["fields"]
        assert field["field"] in document["detail"]
        return f"{document['detail']} / {document['mend']}"

    llama = {"config": {"model_type": "llama", "vocab_size": 300}}
    assert "in full" in refused(llama, Path("relative.txt"))
    assert "does not exist" in refused(llama, tmp_path / "none.txt")
    assert "does not exist" in refused({"path": str(tmp_path / "none")})
    (tmp_path / "empty").mkdir()
    assert "config.json" in refused({"path": str(tmp_path / "empty")})
    pickled = hugging_face_folder(tmp_path / "bin", vocab_size=8, token_ids=8, weights="pytorch_model.bin")
    assert "save_pretrained" in refused({"path": str(pickled)})
    small = hugging_face_folder(tmp_path / "small", vocab_size=8, token_ids=9)
    assert "9 ids, the model only 8" in refused({"path": str(small)})
    assert "400 ids does not fit a model of 300" in refused(llama, tokenizer={"vocab_size": 400})
    (small / "tokenizer.json").write_text("{}")
    assert "cannot be read" in refused({"path": str(small)})
    answer = submit(http, llama, corpus, parallelism={"strategy": "unifrom"})
    assert "uniform" in problem(answer, 422, "invalid-request")["detail"]
