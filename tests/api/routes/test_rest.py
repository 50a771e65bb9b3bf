"""REST against a real server: problems, keys, invites, jobs, submission checks."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute, iter_route_contexts
from tokenizers import Tokenizer, models

from share_compute.errors import NotAuthorized, NotFound, UserError
from share_compute.lifecycle.attempt_events import AttemptEnded, StepCommitted
from share_compute.scopes import Scope
from share_compute.specification import parse_job
from share_compute_api.client.client import Client
from share_compute_api.server.guesses import Guesses
from share_compute_api.submission.jobs import check_job
from share_compute_api.workers.isolated.messages import CheckModel
from share_compute_api.workers.isolated.pool import IsolatedProcesses


def problem(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    document: dict[str, Any] = response.json()
    assert document["type"] == f"urn:share-compute:problem:{code}"
    assert (document["code"], document["status"]) == (code, status)
    assert document["hint"]
    assert document["instance"] == response.request.url.path
    return document


def test_the_control_plane_is_light() -> None:
    program = (
        "import sys, share_compute_api.app.app, share_compute_api.client.client, share_compute_api.agent.client;"
        "print([name for name in ('torch', 'transformers', 'ray', 'datasets') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


OPEN = {"getHealth", "getJobSchema", "join", "preflight", "signIn", "getSession", "signOut"}


def operations(plane: Any) -> list[tuple[str, str, str]]:
    """Return (method, path, operation) of all that the server answers, documented or not."""
    return [
        (method, str(route.path), getattr(route, "operation_id", ""))
        for route in iter_route_contexts(plane.app.routes)
        for method in sorted(route.methods or {"GET"})
        if str(route.path).startswith("/api/") and not str(route.path).endswith("/openapi.json")
    ]


def test_health_is_open_and_everything_else_needs_a_key(plane: Any) -> None:
    plane.app.state.context.guesses = Guesses(count(0, 1000).__next__)  # long pauses after wrong keys
    with httpx.Client(base_url=plane.url) as stranger:
        assert stranger.get("/api/v1/health").json()["status"] == "ok"
        assert stranger.get("/api/v1/schemas/job").json()["title"] == "TrainJob"
        assert stranger.get("/api/v1/openapi.json").is_success
        found = operations(plane)
        assert {operation for _, _, operation in found} > OPEN
        for method, path, operation in found:
            if operation in OPEN:
                continue
            url = path.replace("{", "").replace("}", "")
            for headers in ({}, {"Authorization": "Bearer sck_wrong"}):
                answer = stranger.request(method, url, headers=headers, json={"node_id": "a", "address": "b"})
                problem(answer, 401, "not-authorized")
                assert answer.headers["www-authenticate"] == "Bearer"


def test_a_contributors_key_opens_its_own_routes_only(plane: Any) -> None:
    plane.app.state.context.guesses = Guesses(count(0, 1000).__next__)  # long pauses after wrong keys

    def join(name: str) -> tuple[str, str]:
        _, code = plane.store.invites.create()
        record, key = plane.store.contributors.join(code, name=name, host="h", versions={}, limits={})
        return record.id, key

    (ada, key), (grace, _) = join("ada"), join("grace")
    body = {"node_id": "ab", "address": "192.0.2.7"}
    with httpx.Client(base_url=plane.url, headers={"Authorization": f"Bearer {key}"}) as agent:
        for method, path, operation in operations(plane):
            if operation in OPEN:
                continue
            answer = agent.request(method, path.replace("{contributor_id}", grace), json=body)
            is_agents = operation in ("online", "heartbeat", "rejoin", "leave", "joinSibling", "dial")
            problem(answer, *((401, "not-authorized") if is_agents else (403, "missing-scope")))
        assert agent.post(f"/api/v1/contributors/{ada}/heartbeat").json()["state"] == "joining"


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
    for headers in ({}, {"Content-Type": "text/plain"}):
        document = problem(http.post("/invites", content="{}", headers=headers), 422, "invalid-request")
        assert "Content-Type is missing, or is not application/json" in document["detail"]
        assert "application/json" in document["hint"]
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


def test_a_key_opens_until_it_is_revoked(plane: Any, client: Client) -> None:
    made = client.create_key("Ada's scripts", [Scope.admin])
    with Client(plane.url, made.key) as ada:
        assert [key.name for key in ada.api_keys()] == ["first", "Ada's scripts"]
        assert client.revoke_key(made.id).revoked_at is not None
        with pytest.raises(NotAuthorized):
            ada.status()
    with pytest.raises(NotFound):
        client.revoke_key("key-none")


def test_invites_come_and_go(http: httpx.Client) -> None:
    made = http.post("/invites", json={"label": "Ada", "expires_in_s": 60})
    assert made.status_code == 201
    code = made.json()["code"]
    assert made.json()["join_command"].startswith(f"SHARE_COMPUTE_INVITE={code} share-compute join http://")
    assert "http://127.0.0.1:" in made.json()["join_command"]
    assert http.get("/status").json()["is_for_one_machine"] is True
    (listed,) = http.get("/invites").json()["invites"]
    assert (listed["state"], listed["label"], "code" in listed) == ("open", "Ada", False)
    assert http.delete(f"/invites/{listed['id']}").json()["state"] == "revoked"
    problem(http.delete("/invites/inv-none"), 404, "not-found")


def test_an_invite_names_the_machine_that_used_it(plane: Any, http: httpx.Client) -> None:
    code = http.post("/invites", json={}).json()["code"]
    record, _ = plane.store.contributors.join(code, name="ada", host="h", versions={}, limits={})
    (listed,) = http.get("/invites").json()["invites"]
    assert (listed["state"], listed["used_by"], listed["machines"]) == ("used", [record.id], ["ada"])


def test_an_invite_of_several_uses_shows_how_many_are_left(plane: Any, http: httpx.Client) -> None:
    made = http.post("/invites", json={"uses": 2, "memory_bytes": 2**30}).json()
    assert made["uses"] == 2
    names = []
    for name in ("ada", "grace"):
        names.append(name)
        plane.store.contributors.join(made["code"], name=name, host="h", versions={}, limits={})
        (listed,) = http.get("/invites").json()["invites"]
        assert (listed["uses"], listed["machines"], listed["memory_bytes"]) == (2, names, 2**30)
        assert listed["state"] == ("open" if name == "ada" else "used")
    problem(http.delete(f"/invites/{made['id']}"), 409, "invite-used")
    for wrong in ({"uses": 0}, {"uses": 10_001}, {"memory_bytes": 0}):
        problem(http.post("/invites", json=wrong), 422, "invalid-request")


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


def test_contributors_are_listed_in_pages_with_filters(plane: Any, http: httpx.Client) -> None:
    made = []
    for index in range(3):
        _, code = plane.store.invites.create()
        joined, _ = plane.store.contributors.join(
            code, name=f"machine-{index}", host="h", versions={}, limits={}
        )
        made.append(joined.id)
    plane.store.contributors.leave(made[0])
    page = http.get("/contributors", params={"limit": 2}).json()
    rest = http.get("/contributors", params={"limit": 2, "cursor": page["next_cursor"]}).json()
    assert [one["id"] for one in page["contributors"] + rest["contributors"]] == made
    assert rest["next_cursor"] is None
    (left,) = http.get("/contributors", params={"state": ["left", "lost"]}).json()["contributors"]
    assert left["id"] == made[0]
    problem(http.get("/contributors", params={"state": "gone"}), 422, "invalid-request")


def test_a_job_is_cancelled_and_resumed(http: httpx.Client, digits: dict[str, Any]) -> None:
    job_id = http.post("/jobs", json=digits).json()["id"]
    assert http.post(f"/jobs/{job_id}/cancel").json()["state"] == "cancelled"
    assert http.post(f"/jobs/{job_id}/cancel").json()["state"] == "cancelled"
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
    refused = problem(http.get(f"/jobs/{job_id}/metrics", params={"format": "csv"}), 422, "invalid-request")
    assert "/metrics/file?format=csv" in refused["hint"]
    text = http.get(f"/jobs/{job_id}/metrics/file", params={"format": "csv"})
    assert text.headers["content-type"].startswith("text/csv")
    header, line = text.text.splitlines()
    assert dict(zip(header.split(","), line.split(","), strict=True))["loss"] == "0.5"
    ended = AttemptEnded(outcome="failed", reason="ada was lost", error={"code": "contributor-lost"})
    plane.store.progress.record(job_id, 1, [ended])
    assert http.get("/status").json()["jobs"]["failed"] == 1


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"config": {"model_type": "llama", "note": "\ud800"}}},
        {"model": {"config": {"model_type": "llama", "note": float("nan")}}},
        {"model": {"path": "/\ud800"}},
        {"data": {"files": ["/\ud800.txt"]}},
        {"name": "\ud800"},
        {"training": {"steps": 2**63}},
    ],
)
def test_what_cannot_be_kept_is_refused_and_spoils_no_list(
    http: httpx.Client, digits: dict[str, Any], corpus: Path, change: dict[str, Any]
) -> None:
    if "model" in change:
        change = {"data": {"files": [str(corpus)]}, **change}
    body = json.dumps({**digits, **change}).encode()
    answer = http.post("/jobs", content=body, headers={"Content-Type": "application/json"})
    problem(answer, 422, "invalid-request")
    assert http.get("/jobs").json()["jobs"] == []


def test_a_number_of_thousands_of_digits_is_refused(http: httpx.Client) -> None:
    content = '{"training": {"steps": ' + "9" * 5000 + "}}"
    answer = http.post("/jobs", content=content, headers={"Content-Type": "application/json"})
    problem(answer, 422, "invalid-request")


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
        return f"{document['detail']} / {document['hint']}"

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
    assert "3 stages cannot share 2 layers" in refused(
        {"config": {"model_type": "llama", "num_hidden_layers": 2}}, parallelism={"stages": 3}
    )
    (small / "config.json").write_text(
        json.dumps({"model_type": "llama", "num_hidden_layers": 2, "vocab_size": 99})
    )
    assert "3 stages cannot share 2 layers" in refused({"path": str(small)}, parallelism={"stages": 3})
    layers = [{"type": "linear", "options": {"in_features": 64, "out_features": 10}}]
    declared = {"model": {"layers": layers}, "data": {"dataset": "digits"}, "parallelism": {"stages": 2}}
    assert (
        "2 stages cannot share 1 layers"
        in problem(http.post("/jobs", json=declared), 422, "invalid-request")["detail"]
    )
    (small / "tokenizer.json").write_text("{}")
    assert "cannot be read" in refused({"path": str(small)})
    answer = submit(http, llama, corpus, parallelism={"strategy": "unifrom"})
    assert "uniform" in problem(answer, 422, "invalid-request")["detail"]


@pytest.mark.parametrize(
    ("config", "field", "problem_text"),
    [
        (
            {"model_type": "llama", "hidden_size": 100, "num_attention_heads": 6},
            "model.config",
            "not a multiple",
        ),
        (
            {"model_type": "qwen3", "num_attention_heads": 6, "num_key_value_heads": 4},
            "model.config",
            "not a multiple",
        ),
        (
            {"model_type": "llama", "hidden_size": "large"},
            "model.config",
            "hidden_size must be a whole number",
        ),
        ({"model_type": "t5"}, "model.config", "no causal language model"),
        ({"model_type": "gpt2"}, "model.config", "no pipeline plan"),
        ({"model_type": "llamma"}, "model.config", "unknown model_type"),
    ],
)
def test_models_that_cannot_be_trained_are_refused_at_submission(
    http: httpx.Client, corpus: Path, config: dict[str, Any], field: str, problem_text: str
) -> None:
    document = problem(submit(http, {"config": config}, corpus), 422, "invalid-request")
    (found,) = document["details"]["fields"]
    assert (found["field"], problem_text in found["problem"]) == (field, True), found


def test_all_that_is_wrong_with_a_job_is_reported_at_once(http: httpx.Client, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"body": "some text"}\n')
    config = {"model_type": "llama", "hidden_size": 100, "num_attention_heads": 6, "vocab_size": 300}
    job = {
        "model": {"config": {**config, "num_hidden_layers": 2}},
        "data": {"files": [str(rows)]},
        "tokenizer": {"vocab_size": 400},
        "parallelism": {"strategy": "unifrom", "stages": 3},
    }
    expected = [
        "parallelism.strategy",
        "data.text_column",
        "model.config",
        "tokenizer.vocab_size",
        "parallelism.stages",
    ]
    document = problem(http.post("/jobs", json=job), 422, "invalid-request")
    assert [one["field"] for one in document["details"]["fields"]] == expected
    assert "name one of its columns: body" in document["hint"]
    checked = http.post("/jobs/check", json=job).json()["problems"]
    assert [one["field"] for one in checked] == expected


@pytest.fixture
def an_ordinary_user() -> Iterator[IsolatedProcesses]:
    """Run as an unprivileged user, if this process is root; the isolated processes are started before."""
    processes = IsolatedProcesses()
    processes.ask(CheckModel(config={"model_type": "llama"}))
    if os.geteuid() != 0:
        yield processes
    else:
        os.seteuid(pwd.getpwnam("nobody").pw_uid)
        yield processes
        os.seteuid(0)
    processes.close()


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (
            {"table": {"target": "knid"}},
            "data.table: data file .*a.csv has no column 'knid'; did you mean 'kind'",
        ),
        ({"validation_files": ["/nowhere.csv"]}, "data.validation_files: /nowhere.csv does not exist"),
        (
            {"files": ["b.csv"]},
            r"^model\.layers\.0\.options\.in_features: 1 does not fit the 2 features of the table$",
        ),
        ({"files": ["a.csv", "b.csv"]}, "data.table: data file .*b.csv has other columns than a.csv"),
        (
            {"files": ["c.csv"]},
            "data.table: column 'size' of .*c.csv has 'big' in row 1.*; data.table: the target 'kind' .* in row 2",
        ),
    ],
)
def test_tables_are_checked_before_they_are_queued(
    an_ordinary_user: IsolatedProcesses, data: dict[str, Any], problem: str
) -> None:
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        Path(place, "a.csv").write_text("size,kind\n1,a\n")
        Path(place, "b.csv").write_text("size,weight,kind\n1,2,a\n")
        Path(place, "c.csv").write_text("size,kind\nbig,a\n1,\n")
        files = [str(Path(place, name)) for name in data.get("files", ["a.csv"])]
        job = {
            "task": "tabular_classification",
            "model": {"layers": [{"type": "linear", "options": {"in_features": 1, "out_features": 2}}]},
            "data": {"table": {"target": "kind"}, **data, "files": files},
        }
        with pytest.raises(UserError, match=problem):
            check_job(parse_job(job), an_ordinary_user)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ({"labels": {"column": "knid"}}, "data.labels: .*a.csv has no column 'knid'; did you mean 'kind'"),
        ({"labels": {"column": "kind"}, "text_column": "body"}, "data.labels: .* has no column 'body'"),
        ({"images": {"height": 8, "width": 8}}, "data.images: manifest .*a.csv has no column 'path'"),
    ],
)
def test_labels_and_manifests_are_checked_before_they_are_queued(
    an_ordinary_user: IsolatedProcesses, data: dict[str, Any], problem: str
) -> None:
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        file = Path(place, "a.csv")
        file.write_text("text,kind\nsome text,a\n")
        job = {
            "model": {
                "layers": [{"type": "embedding_bag", "options": {"num_embeddings": 9, "embedding_dim": 2}}]
            },
            "data": {**data, "files": [str(file)]},
        }
        with pytest.raises(UserError, match=problem):
            check_job(parse_job(job), an_ordinary_user)


@pytest.mark.parametrize("task", ["text_classification", "language_model"])
def test_a_model_without_a_head_for_the_task_is_refused(
    an_ordinary_user: IsolatedProcesses, task: str
) -> None:
    question = CheckModel(config={"model_type": "granite"}, task=task)
    if task == "language_model":
        an_ordinary_user.ask(question)
        return
    with pytest.raises(UserError, match="'granite' has no head for classes of texts"):
        an_ordinary_user.ask(question)


@pytest.mark.parametrize("part", ["model", "tokenizer"])
def test_what_may_not_be_read_is_refused(an_ordinary_user: IsolatedProcesses, part: str) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder, corpus = Path(place, "model"), Path(place, "corpus.txt")
        folder.mkdir(mode=0o000)
        corpus.write_text("some text")
        model = (
            {"path": str(folder)} if part == "model" else {"config": {"model_type": "llama", "vocab_size": 9}}
        )
        tokenizer = {"path": str(folder)} if part == "tokenizer" else {}
        job = parse_job({"model": model, "tokenizer": tokenizer, "data": {"files": [str(corpus)]}})
        with pytest.raises(UserError, match=f"{part}.path: it cannot be checked"):
            check_job(job, an_ordinary_user)
