"""Uploads: sent, checked, used by jobs, removed; interrupted, damaged, too large, with paths out of the folder."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import socket
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.api.conftest import wait_until

from share_compute.errors import Conflict, NotFound, TooLarge, UserError
from share_compute.scopes import Scope
from share_compute.settings import Settings
from share_compute.store import ApiKeyRecord
from share_compute_api.client.client import Client
from share_compute_api.schemas.bodies import UploadFile
from share_compute_api.uploads.arrival import Arrival
from share_compute_api.uploads.upload_store import UploadStore

LIMIT_BYTES = 1 << 20
TEXT = b"a line of text\n" * 100
OPERATOR = ApiKeyRecord(
    id="key-a", name="operator", scopes=(Scope.admin,), created_at=datetime.now(UTC), revoked_at=None
)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(
        data_folder=tmp_path / "data",
        database_url=None,
        upload_limit_bytes=LIMIT_BYTES,
        uploads_limit_bytes=3 * LIMIT_BYTES // 2,
        data_roots=(tmp_path,),
    )


def begin(http: httpx.Client, kind: str = "data") -> str:
    answer = http.post("/uploads", json={"name": "corpus", "kind": kind})
    assert answer.status_code == 201
    return str(answer.json()["id"])


def put(http: httpx.Client, upload: str, path: str, content: bytes, **headers: str) -> httpx.Response:
    return http.put(f"/uploads/{upload}/files/{path}", content=content, headers=headers)


def raw_put(plane: Any, target: str, headers: dict[str, str], body: bytes = b"") -> socket.socket:
    """Send a request as it is: HTTP clients normalize paths, and send all bytes that they announce."""
    line = socket.create_connection(("127.0.0.1", plane.server.port), timeout=60)
    lines = [f"PUT /api/v1/uploads/{target} HTTP/1.1", "Host: x", f"Authorization: Bearer {plane.api_key}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    line.sendall("\r\n".join([*lines, "", ""]).encode() + body)
    return line


def answer_of(line: socket.socket) -> tuple[int, dict[str, Any]]:
    text = b""
    while piece := line.recv(65536):
        text += piece
        if b"\r\n\r\n" in text and text.rstrip().endswith(b"}"):
            break
    head, _, body = text.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def test_a_file_arrives_with_its_checksum_and_counts_once_the_upload_is_complete(
    plane: Any, http: httpx.Client
) -> None:
    upload = begin(http)
    digest = hashlib.sha256(TEXT)
    sent = put(
        http,
        upload,
        "deep/er/a file.txt",
        TEXT,
        **{"Content-Digest": f"sha-256=:{base64.b64encode(digest.digest()).decode()}:"},
    )
    expected = {"path": "deep/er/a file.txt", "size_bytes": len(TEXT), "sha256": digest.hexdigest()}
    assert sent.json() == expected
    job = {
        "model": {"config": {"model_type": "llama", "vocab_size": 300}},
        "data": {"files": [f"upload:{upload}/deep/er/a file.txt"]},
    }
    refused = http.post("/jobs", json=job).json()
    assert refused["details"]["fields"][0]["field"] == "data.files"
    assert "not complete" in refused["detail"]

    complete = http.post(f"/uploads/{upload}/complete").json()
    assert (complete["state"], complete["files"], complete["size_bytes"]) == (
        "complete",
        [expected],
        len(TEXT),
    )
    assert http.post(f"/uploads/{upload}/complete").json() == complete
    assert put(http, upload, "more.txt", b"x").status_code == 409
    job_id = http.post("/jobs", json=job).json()["id"]
    (file,) = plane.store.jobs.get(job_id).spec.data.files
    assert file.read_bytes() == TEXT
    assert file.is_relative_to(plane.settings.data_folder / "uploads" / upload)


def test_an_upload_outlives_the_server(plane: Any, http: httpx.Client) -> None:
    begun, done = begin(http), begin(http)
    for upload in (begun, done):
        put(http, upload, "a.txt", TEXT)
    http.post(f"/uploads/{done}/complete")
    before = http.get("/uploads").json()
    folder = plane.settings.data_folder / "uploads" / begun
    (folder / "partial" / "7").write_bytes(b"half of a file")
    with (folder / "arrived.jsonl").open("a") as arrived:
        arrived.write('{"path": "b.t')
    plane.restart()
    assert http.get("/uploads").json() == before
    assert not (folder / "partial").exists()
    assert put(http, begun, "b.txt", TEXT).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "..%2f..%2fescape.txt",
        "%2e%2e/%2e%2e/escape.txt",
        "a/../../escape.txt",
        "%2fetc/escape.txt",
        "/etc/escape.txt",
        "a//b.txt",
        "./a.txt",
        "..",
        "",
        "a%5cb.txt",
        "a%00.txt",
        "a%0a.txt",
        "a/" + 300 * "b" + ".txt",
        "/".join(600 * ["ab"]) + ".txt",
    ],
)
def test_no_path_leads_out_of_an_upload(plane: Any, http: httpx.Client, path: str) -> None:
    upload = begin(http)
    with raw_put(plane, f"{upload}/files/{path}", {"Content-Length": "1"}, b"x") as line:
        status, problem = answer_of(line)
    assert status in (404, 422), problem
    assert http.get(f"/uploads/{upload}").json()["files"] == []
    kept = [file for file in plane.settings.data_folder.rglob("*") if "escape" in file.name]
    assert kept == []


def test_jobs_name_nothing_outside_of_an_upload(http: httpx.Client) -> None:
    upload = begin(http)
    put(http, upload, "a.txt", TEXT)
    http.post(f"/uploads/{upload}/complete")
    model = {"config": {"model_type": "llama", "vocab_size": 300}}
    for named, said in (
        (f"upload:{upload}/../../../share-compute.db.txt", "no part of it"),
        (f"upload:{upload}/b.txt", "has no b.txt"),
        ("upload:up-none/a.txt", "there is no upload"),
        ("upload:../a.txt", "there is no upload"),
    ):
        refused = http.post("/jobs", json={"model": model, "data": {"files": [named]}})
        assert refused.status_code == 422
        assert said in refused.json()["detail"]


def test_a_damaged_file_is_refused_and_leaves_nothing(plane: Any, http: httpx.Client) -> None:
    upload = begin(http)
    wrong = base64.b64encode(hashlib.sha256(b"other").digest()).decode()
    refused = put(http, upload, "a.txt", TEXT, **{"Content-Digest": f"sha-256=:{wrong}:"})
    assert (refused.status_code, "arrived damaged" in refused.json()["detail"]) == (422, True)
    assert (
        put(http, upload, "a.txt", TEXT, **{"Content-Digest": "sha-512=:eA==:"}).json()["code"]
        == "invalid-request"
    )
    assert http.get("/uploads").json()["used_bytes"] == 0
    assert [*(plane.settings.data_folder / "uploads" / upload / "partial").iterdir()] == []


def test_what_is_too_large_is_refused_announced_or_not(plane: Any, http: httpx.Client) -> None:
    upload = begin(http)
    with raw_put(plane, f"{upload}/files/a.txt", {"Content-Length": str(LIMIT_BYTES + 1)}) as line:
        status, problem = answer_of(line)
    assert (status, problem["code"], problem["details"]["limit_bytes"]) == (413, "too-large", LIMIT_BYTES)
    chunk = b"10000\r\n" + bytes(0x10000) + b"\r\n"
    with raw_put(plane, f"{upload}/files/a.txt", {"Transfer-Encoding": "chunked"}, 20 * chunk) as line:
        status, problem = answer_of(line)
    assert (status, problem["code"]) == (413, "too-large")
    assert put(http, upload, "a.txt", bytes(LIMIT_BYTES)).status_code == 200
    full = put(http, begin(http), "a.txt", bytes(LIMIT_BYTES // 2 + 1)).json()
    assert "all uploads together" in full["detail"]
    # Replacing a file needs space for both until the new one is complete; deleting files frees space.
    http.delete(f"/uploads/{upload}")
    assert http.get("/uploads").json()["used_bytes"] == 0
    assert put(http, begin(http), "a.txt", bytes(LIMIT_BYTES // 2 + 1)).status_code == 200


def test_a_file_that_breaks_off_leaves_nothing(plane: Any, http: httpx.Client) -> None:
    upload = begin(http)
    partial = plane.settings.data_folder / "uploads" / upload / "partial"
    with raw_put(plane, f"{upload}/files/a.txt", {"Content-Length": "500000"}, TEXT):
        wait_until(lambda: partial.is_dir() and any(partial.iterdir()))
        assert "on the way" in http.post(f"/uploads/{upload}/complete").json()["detail"]
    wait_until(lambda: not any(partial.iterdir()))
    assert http.get(f"/uploads/{upload}").json()["files"] == []
    assert http.get("/uploads").json()["used_bytes"] == 0
    assert "no file yet" in http.post(f"/uploads/{upload}/complete").json()["detail"]


def test_concurrent_senders_of_one_file_do_not_mix(plane: Any, http: httpx.Client) -> None:
    upload = begin(http)
    contents = [bytes([number]) * 50_000 for number in range(8)]
    answers: list[dict[str, Any]] = []

    def send(content: bytes) -> None:
        answers.append(put(http, upload, "a.txt", content).json())

    threads = [threading.Thread(target=send, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (file,) = http.get(f"/uploads/{upload}").json()["files"]
    kept = (plane.settings.data_folder / "uploads" / upload / "files" / "a.txt").read_bytes()
    assert kept in contents
    assert file["sha256"] == hashlib.sha256(kept).hexdigest()
    assert len(answers) == len(contents)
    assert http.get("/uploads").json()["used_bytes"] == len(kept)


def test_a_name_is_a_file_or_a_folder(http: httpx.Client) -> None:
    upload = begin(http)
    assert put(http, upload, "a.txt", b"x").status_code == 200
    assert "both a file and a folder" in put(http, upload, "a.txt/b.txt", b"x").json()["detail"]
    assert put(http, upload, "c.txt/b.txt", b"x").status_code == 200
    assert "both a file and a folder" in put(http, upload, "c.txt", b"x").json()["detail"]
    assert len(http.get(f"/uploads/{upload}").json()["files"]) == 2


def test_pickles_and_strange_data_are_refused_with_the_reason(http: httpx.Client) -> None:
    model = begin(http, "model")
    for name in ("pytorch_model.bin", "a/weights.PT", "x.pkl"):
        assert "could run code" in put(http, model, name, b"x").json()["detail"]
    data = begin(http)
    assert ".txt, .jsonl, .parquet" in put(http, data, "film.mp4", b"x").json()["detail"]
    assert http.post("/uploads", json={"name": "x", "kind": "film"}).status_code == 422


def test_rows_of_a_sparse_model_are_sent_and_checked(
    client: Client, tmp_path: Path, http: httpx.Client
) -> None:
    rows = tmp_path / "rows"
    rows.mkdir()
    for name, line in (("train.libsvm", "1 3:1 7:0.5"), ("later.svm", "0 3:2"), ("bad.svmlight", "0 -3:1")):
        (rows / name).write_text(f"{line}\n")
    upload = client.upload(rows)
    assert upload.kind == "data"
    job: dict[str, Any] = {"kind": "sparse", "model": {"name": "logistic"}}
    for name, problems in (("later.svm", []), ("bad.svmlight", ["data"])):
        files = {
            "files": [f"upload:{upload.id}/train.libsvm"],
            "validation_files": [f"upload:{upload.id}/{name}"],
        }
        answer = http.post("/jobs/check", json={**job, "data": files}).json()
        assert [one["field"] for one in answer["problems"]] == problems, answer
    (problem,) = answer["problems"]
    assert "key -3 is negative" in problem["problem"]


def model_folder(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama", "vocab_size": 300, "num_hidden_layers": 2}')
    save_file({"a": np.zeros(4, dtype=np.float32)}, folder / "model.safetensors")
    (folder / ".gitattributes").write_text("left out")
    return folder


def test_a_model_is_sent_by_the_client_and_trained_from(
    client: Client, plane: Any, tmp_path: Path, http: httpx.Client
) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_bytes(TEXT)
    sent: list[int] = []
    model = client.upload(model_folder(tmp_path / "tiny"), progress=sent.append)
    assert (model.name, model.kind, model.state) == ("tiny", "model", "complete")
    assert [file.path for file in model.files] == ["config.json", "model.safetensors"]
    assert sum(sent) == model.size_bytes
    data = client.upload(corpus, name="words")
    job = {"model": {"path": f"upload:{model.id}"}, "data": {"files": [f"upload:{data.id}/corpus.txt"]}}
    assert http.post("/jobs/check", json=job).json() == {"kind": "train", "problems": [], "hint": None}
    record = client.submit(job)
    config = {"model_type": "llama", "vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2}
    other = client.submit({**job, "model": {"config": config}})
    found = {one.field: one.values for one in client.compare([record.id, other.id]).differences}
    assert found["model.path"] == [f"upload:{model.id}", None]
    assert "data.files" not in found
    with pytest.raises(Conflict, match=f"used by {record.id}"):
        client.remove_upload(model.id)
    plane.store.jobs.cancel(record.id)
    assert client.remove_upload(model.id).id == model.id
    with pytest.raises(NotFound):
        client.remove_upload(model.id)
    (problem,) = http.post("/jobs/check", json=job).json()["problems"]
    assert problem["field"] == "model.path"
    assert [one.id for one in client.uploads().uploads] == [data.id]


def test_a_model_without_its_weights_is_never_usable(client: Client, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "tiny")
    (folder / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(UserError, match="damaged"):
        client.upload(folder)
    assert client.uploads().uploads == []
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(UserError, match="could run code"):
        client.upload(folder)
    (folder / "pytorch_model.bin").write_bytes(b"x" * (2 * LIMIT_BYTES))
    (folder / "pytorch_model.bin").rename(folder / "model.safetensors")
    with pytest.raises(TooLarge):
        client.upload(folder)


@pytest.mark.slow
def test_the_command_line_sends_lists_and_removes(run: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_bytes(TEXT)
    sent = run("upload", str(tmp_path / "corpus.txt"), "--name", "words")
    assert sent.returncode == 0, sent.stderr
    named = sent.stdout.strip()
    assert named.startswith("upload:up-")
    assert named.endswith("/corpus.txt")
    job = tmp_path / "job.yaml"
    job.write_text(
        f"model: {{config: {{model_type: llama, vocab_size: 300}}}}\ndata: {{files: ['{named}']}}\n"
    )
    assert run("submit", str(job)).returncode == 0
    assert "words" in run("uploads", "list").stdout
    upload = named.removeprefix("upload:").partition("/")[0]
    assert run("uploads", "remove", upload).returncode == Conflict.exit_code


def test_what_was_left_for_a_day_goes_when_the_next_one_begins(tmp_path: Path) -> None:
    now = datetime(2026, 1, 31, tzinfo=UTC)
    uploads = UploadStore(tmp_path / "uploads", LIMIT_BYTES, LIMIT_BYTES, lambda: now)
    left, complete = uploads.create("left", "data", OPERATOR), uploads.create("complete", "data", OPERATOR)
    arrival = uploads.receive(complete.id, "a.txt", OPERATOR)
    arrival.write(TEXT)
    arrival.finish()
    uploads.complete(complete.id, OPERATOR)
    now += timedelta(days=2)
    fresh = uploads.create("fresh", "data", OPERATOR)
    assert {one.id for one in uploads.list(OPERATOR)} == {complete.id, fresh.id}
    assert not (tmp_path / "uploads" / left.id).exists()


def test_an_upload_that_receives_a_file_while_others_expire_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = datetime(2026, 1, 31, tzinfo=UTC)
    uploads = UploadStore(tmp_path / "uploads", LIMIT_BYTES, LIMIT_BYTES, lambda: now)
    expired, receiving, received, completed = (
        uploads.create(name, "data", OPERATOR).id for name in ("a", "b", "c", "d")
    )
    sent: list[UploadFile] = []
    arrivals: list[Arrival] = []
    delete = shutil.rmtree

    def send_and_delete(folder: Path, ignore_errors: bool) -> None:
        """Send files at the moment at which the first upload is deleted."""
        if not arrivals:
            for upload in (receiving, received, completed):
                arrivals.append(uploads.receive(upload, "a.txt", OPERATOR))
                arrivals[-1].write(TEXT)
            sent.extend(arrival.finish() for arrival in arrivals[1:])
            uploads.complete(completed, OPERATOR)
        delete(folder, ignore_errors=ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", send_and_delete)
    now += timedelta(days=2)
    fresh = uploads.create("fresh", "data", OPERATOR).id
    kept = {one.id: one.files for one in uploads.list(OPERATOR)}
    assert kept == {receiving: [], received: [sent[0]], completed: [sent[1]], fresh: []}
    assert not (tmp_path / "uploads" / expired).exists()
    file = arrivals[0].finish()
    assert uploads.get(receiving, OPERATOR).files == [file]


def test_what_is_removed_takes_no_file_that_was_on_its_way(tmp_path: Path) -> None:
    uploads = UploadStore(tmp_path / "uploads", LIMIT_BYTES, LIMIT_BYTES)
    upload = uploads.create("corpus", "data", OPERATOR)
    arrival = uploads.receive(upload.id, "a.txt", OPERATOR)
    arrival.write(TEXT)
    uploads.remove(upload.id, lambda _: [], OPERATOR)
    with pytest.raises(NotFound):
        arrival.finish()
    arrival.close()
    assert uploads.used_bytes == 0
    assert [*uploads.folder.iterdir()] == []


def test_what_a_request_reads_is_not_removed_meanwhile(tmp_path: Path) -> None:
    uploads = UploadStore(tmp_path / "uploads", LIMIT_BYTES, LIMIT_BYTES)
    upload = uploads.create("corpus", "data", OPERATOR)
    arrival = uploads.receive(upload.id, "a.txt", OPERATOR)
    arrival.write(TEXT)
    arrival.finish()
    uploads.complete(upload.id, OPERATOR)
    with uploads.reading(upload.id, OPERATOR):
        with pytest.raises(Conflict, match="is being read"):
            uploads.remove(upload.id, lambda _: [], OPERATOR)
        with pytest.raises(Conflict, match="is used by job-1"):
            uploads.remove(upload.id, lambda _: ["job-1"], OPERATOR)
    uploads.remove(upload.id, lambda _: [], OPERATOR)


def test_a_check_says_all_that_is_wrong_without_refusing(http: httpx.Client) -> None:
    job = {"kind": "train", "model": {"layers": []}, "data": {"dataset": "digits"}, "training": {"steps": 0}}
    answer = http.post("/jobs/check", json=job)
    assert answer.status_code == 200
    fields = {one["field"] for one in answer.json()["problems"]}
    assert fields >= {"model", "training.steps"}
    served = {"kind": "serve", "name": "x", "model": {"path": "/nowhere"}}
    (problem,) = http.post("/jobs/check", json=served).json()["problems"]
    assert problem["field"] == "model.path"
    assert http.post("/jobs/check", json={"kind": "dance"}).json()["kind"] is None


@pytest.mark.parametrize(
    ("training", "field", "said"),
    [
        (
            {"synchronization": {"kind": "elastic", "branches": 4, "rate": 0.5}},
            "training.synchronization",
            "rate 0.5",
        ),
        (
            {"steps": 9, "synchronization": {"kind": "gossip", "branches": 2}},
            "training",
            "synchronization.every 10",
        ),
        (
            {
                "synchronization": {"kind": "local", "branches": 2},
                "compression": {"name": "topk", "density": 1e-5},
            },
            "training.compression",
            "density 1e-05",
        ),
    ],
)
def test_rounds_that_cannot_be_are_refused_by_all_routes(
    http: httpx.Client, training: dict[str, Any], field: str, said: str
) -> None:
    layers = [{"type": "linear", "options": {"in_features": 64, "out_features": 10}}]
    job = {"kind": "train", "model": {"layers": layers}, "data": {"dataset": "digits"}, "training": training}
    (problem,) = http.post("/jobs/check", json=job).json()["problems"]
    assert problem["field"] == field
    assert said in problem["problem"]
    for route, body in (("/jobs", job), ("/plans", {"job": job})):
        answer = http.post(route, json=body)
        assert answer.status_code == 422, route
        assert said in answer.json()["detail"]
