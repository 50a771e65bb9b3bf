"""Jobs read files below the data roots, and uploads and results of their own key; they learn of no other files."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi.testclient import TestClient
from safetensors.numpy import save_file
from tests.databases import make_schema
from tests.isolated import shared_processes

from share_compute.batches.inputs import Inputs
from share_compute.data.reading import files_digest, read_pieces
from share_compute.errors import UserError
from share_compute.files.plain_files import open_unlinked
from share_compute.lifecycle.attempt_events import ArtifactSaved
from share_compute.scopes import Scope
from share_compute.settings import Settings
from share_compute.specification import parse_any_job, parse_deployment
from share_compute.store import Store
from share_compute_api.app.app import create_app
from share_compute_api.submission.data_roots import DataRoots, offered, require_folders

ROW = '{"text": "a secret line"}\n'


class House:
    """A control plane with one data root, and keys of two people."""

    def __init__(self, folder: Path) -> None:
        self.root, self.outside = folder / "root", folder / "outside"
        self.root.mkdir()
        self.outside.mkdir()
        # Inside the root, as with `share-compute up --data-folder ./state`.
        self.settings = Settings(data_folder=self.root / "state", database_url=None, data_roots=(self.root,))
        make_schema(self.settings.resolved_database_url)
        self.store = Store(self.settings.resolved_database_url)
        self.app = create_app(self.settings, self.store, isolated=shared_processes())
        self.operator = self.client(Scope.admin)
        self.ada = self.client(Scope.submit)
        self.grace = self.client(Scope.submit)
        self.reader = self.client(Scope.read)

    def client(self, scope: Scope) -> httpx.Client:
        _, key = self.store.keys.create(scope.value, [scope])
        return TestClient(self.app, base_url="http://x/api/v1", headers={"Authorization": f"Bearer {key}"})

    def file(self, folder: Path, name: str = "corpus.jsonl", text: str = ROW) -> Path:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def check(self, path: Path | str, who: httpx.Client | None = None) -> dict[str, Any]:
        answer = (who or self.ada).post("/jobs/check", json=job(path))
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def problem(self, path: Path | str) -> str:
        """Return the errors about a path, without the path itself."""
        (found,) = self.check(path)["problems"]
        refused = self.ada.post("/jobs", json=job(path))
        assert refused.status_code == 422
        assert found["problem"] in refused.json()["detail"]
        return str(found["problem"]).replace(str(path), "PATH") + f" ({self.check(path)['hint']})"


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path.resolve())
    yield house
    house.store.close()


def job(path: Path | str) -> dict[str, Any]:
    config = {
        "model_type": "llama",
        "vocab_size": 300,
        "hidden_size": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return {
        "model": {"config": config},
        "tokenizer": {"vocab_size": 300},
        "data": {"files": [str(path)]},
        "training": {"steps": 1},
    }


def model(folder: Path) -> Path:
    """Make a folder that looks like a model."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 300}))
    save_file({"a": np.zeros(1, np.float32)}, folder / "model.safetensors")
    return folder


def test_a_file_below_a_root_is_taken(house: House) -> None:
    file = house.file(house.root / "deep" / "er")
    assert house.check(file)["problems"] == []
    made = house.ada.post("/jobs", json=job(file))
    assert made.status_code == 201
    assert made.json()["spec"]["data"]["files"] == [str(file)]


def test_a_link_is_followed_first_and_its_end_is_what_the_job_has(house: House) -> None:
    file = house.file(house.root)
    link = house.root / "link.jsonl"
    link.symlink_to(file)
    made = house.ada.post("/jobs", json=job(link))
    assert made.json()["spec"]["data"]["files"] == [str(file)]


def test_no_path_outside_tells_whether_it_is_there(house: House) -> None:
    there = house.file(house.outside)
    link, dangling = house.root / "link.jsonl", house.root / "dangling.jsonl"
    link.symlink_to(there)
    dangling.symlink_to(house.outside / "nothing.jsonl")
    inner = house.root / "folder"
    inner.symlink_to(house.outside)
    secret = house.file(house.settings.data_folder / "uploads" / "up-a" / "files")
    problems = {
        house.problem(path)
        for path in (
            there,
            house.outside / "nothing.jsonl",
            link,
            dangling,
            inner / "corpus.jsonl",
            inner / "nothing.jsonl",
            house.root / ".." / "outside" / "corpus.jsonl",
            house.root / ".." / "outside" / "nothing.jsonl",
            f"{house.outside}/../root/corpus.jsonl",
            f"{house.root}-beside.jsonl",
            "/etc/passwd.txt",
            "/root/nothing.txt",
            "/proc/self/environ.txt",
            "/proc/self/cwd/corpus.jsonl",
            "/proc/self/fd/0.txt",
            "/dev/stdin.txt",
            secret,
            house.settings.data_folder / "nothing.jsonl",
        )
    }
    hint = f"name what is below {house.root}, or send it with share-compute upload"
    assert problems == {f"PATH is not below a folder that jobs may read ({hint})"}


@pytest.mark.parametrize("root", [Path("/"), Path("/proc"), Path("/proc/self")])
def test_processes_and_devices_are_below_no_root(root: Path, tmp_path: Path) -> None:
    roots = DataRoots([root], [tmp_path / "data"])
    for path in ("/proc/self/environ", "/proc/1/environ", "/dev/stdin", "/sys/kernel/version"):
        with pytest.raises(UserError, match="not below a folder"):
            roots.resolve(Path(path), "data.files")


def test_a_root_may_be_a_link(tmp_path: Path) -> None:
    real = tmp_path / "disk"
    real.mkdir()
    root = tmp_path / "root"
    root.symlink_to(real)
    roots = DataRoots([root], [tmp_path / "data"])
    for path in (root / "a.txt", real / "a.txt"):
        assert roots.resolve(path, "data.files") == real / "a.txt"


@pytest.mark.parametrize("kind", ["train", "tokenizer", "serve", "generate", "plan"])
def test_every_field_that_names_a_path_is_held_to_the_roots(house: House, kind: str) -> None:
    outside = model(house.outside / "model")
    rows = str(house.file(house.root))
    path = {"path": str(outside)}
    specs: dict[str, tuple[str, dict[str, Any]]] = {
        "train": ("/jobs", {**job(rows), "model": path}),
        "tokenizer": ("/jobs", {**job(rows), "tokenizer": path}),
        "serve": ("/deployments", {"name": "x", "model": path}),
        "generate": (
            "/jobs",
            {"kind": "generate", "model": path, "data": {"files": [rows], "prompt": "text"}},
        ),
        "plan": ("/plans", {"job": {**job(rows), "model": path}}),
    }
    url, spec = specs[kind]
    for _ in range(2):
        refused = house.ada.post(url, json=spec)
        assert refused.status_code == 422, refused.text
        assert "not below a folder that jobs may read" in refused.json()["detail"]
        shutil.rmtree(outside, ignore_errors=True)  # in the second round the path does not exist


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "deep/more.json"])
def test_a_link_in_a_models_folder_leads_nowhere_else(house: House, name: str) -> None:
    folder = model(house.root / "model")
    there = house.file(house.outside, "secret.json", '{"vocab_size": 300}')
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(there)
    spec = {**job(house.file(house.root)), "model": {"path": str(folder)}}
    first = house.ada.post("/jobs", json=spec).json()
    there.unlink()
    assert house.ada.post("/jobs", json=spec).json() == first
    assert "not below a folder" in first["detail"]


def test_a_models_folder_of_links_below_the_root_is_taken(house: House) -> None:
    # The links are as in the cache of huggingface_hub.
    blobs = model(house.root / "blobs")
    snapshot = house.root / "snapshot"
    snapshot.mkdir()
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(file)
    spec = {**job(house.file(house.root)), "model": {"path": str(snapshot)}}
    assert house.ada.post("/jobs/check", json=spec).json()["problems"] == []


def test_a_link_that_takes_the_place_of_a_file_later_is_not_read(house: House) -> None:
    secret = house.file(house.outside)
    file = house.file(house.root / "data", text='{"text": "harmless"}\n')
    spec = parse_any_job(house.ada.post("/jobs", json=job(file)).json()["spec"])
    roots = DataRoots([house.root], [house.settings.data_folder])
    roots.recheck(spec)

    def swap_file() -> None:
        file.unlink()
        file.symlink_to(secret)

    def swap_folder() -> None:
        file.unlink()
        file.parent.rmdir()
        file.parent.symlink_to(secret.parent)

    reads: list[Callable[[], Any]] = [
        lambda: list(Inputs([file], "text").objects()),
        lambda: Inputs([file], "text").survey(),
        lambda: files_digest([file]),
        lambda: list(read_pieces([file], "text")),
        lambda: roots.recheck(spec),
    ]
    for swap in (swap_file, swap_folder):
        swap()
        assert file.read_text() == ROW
        for read in reads:
            with pytest.raises(UserError, match="link"):
                read()


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    pipe = tmp_path.resolve() / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path.resolve(), Path("/dev/null")):
        with pytest.raises(OSError, match=r"regular|directory"):
            open_unlinked(path)
    file = tmp_path.resolve() / "a.txt"
    file.write_text("a")
    with open_unlinked(file) as opened:
        assert opened.read() == b"a"


def test_without_roots_the_hint_names_uploads_and_the_option(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        DataRoots([], [tmp_path]).resolve(Path("/srv/a.txt"), "data.files")
    assert re.search("share-compute upload.*--data-root", caught.value.hint or "")


def test_only_a_server_for_this_machine_offers_its_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SHARE_COMPUTE_DATA_ROOTS", raising=False)
    for host in ("127.0.0.1", "localhost", "::1"):
        assert offered(Settings(host=host), tmp_path).data_roots == (tmp_path,)
    assert offered(Settings(host="0.0.0.0"), tmp_path).data_roots == ()
    assert offered(Settings(), Path("/")).data_roots == ()
    assert offered(Settings(data_roots=()), tmp_path).data_roots == ()
    for text in ("/a:/b", '["/a", "/b"]'):
        monkeypatch.setenv("SHARE_COMPUTE_DATA_ROOTS", text)
        assert offered(Settings(), tmp_path).data_roots == (Path("/a"), Path("/b"))


# -- owners ----------------------------------------------------------------------------------------------------------


def uploaded(client: httpx.Client) -> str:
    upload = str(client.post("/uploads", json={"name": "corpus", "kind": "data"}).json()["id"])
    assert client.put(f"/uploads/{upload}/files/corpus.jsonl", content=ROW).is_success
    assert client.post(f"/uploads/{upload}/complete").is_success
    return upload


def test_an_upload_is_there_for_its_key_and_for_admins_alone(house: House) -> None:
    upload = uploaded(house.ada)
    folder = house.ada.get(f"/uploads/{upload}").json()["folder"]
    for other in (house.grace, house.reader):
        assert other.get("/uploads").json()["uploads"] == []
        assert other.get(f"/uploads/{upload}").json()["detail"] == f"there is no upload {upload}"
        assert other.get(f"/uploads/{upload}").status_code == 404
    for method, url in (
        ("PUT", f"/uploads/{upload}/files/corpus.jsonl"),
        ("POST", f"/uploads/{upload}/complete"),
        ("DELETE", f"/uploads/{upload}"),
    ):
        assert house.grace.request(method, url, content=b"x").status_code == 404
    (theirs,) = house.check(f"upload:{upload}/corpus.jsonl", house.grace)["problems"]
    (nobodys,) = house.check("upload:up-none/corpus.jsonl", house.grace)["problems"]
    assert theirs["problem"].replace(upload, "up-none") == nobodys["problem"]
    # The path of the upload's folder is refused, also for its own key.
    for who in (house.grace, house.ada, house.operator):
        (problem,) = house.check(f"{folder}/corpus.jsonl", who)["problems"]
        assert "not below a folder" in problem["problem"]
    for owner in (house.ada, house.operator):
        assert [one["id"] for one in owner.get("/uploads").json()["uploads"]] == [upload]
        assert house.check(f"upload:{upload}/corpus.jsonl", owner)["problems"] == []
    assert house.operator.delete(f"/uploads/{upload}").is_success


def test_uploads_of_before_belong_to_admins(house: House) -> None:
    upload = uploaded(house.ada)
    record = house.settings.data_folder / "uploads" / upload / "upload.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "owner": None}))
    house.app = create_app(house.settings, house.store, isolated=shared_processes())
    assert house.client(Scope.submit).get(f"/uploads/{upload}").status_code == 404
    assert house.client(Scope.admin).get(f"/uploads/{upload}").is_success


def finished(house: House, client: httpx.Client) -> tuple[str, Path]:
    """Return a job of a key with a result, and where the result is."""
    file = house.file(house.root, "private.jsonl")
    job_id = str(client.post("/jobs", json=job(file)).json()["id"])
    folder = house.settings.data_folder / "jobs" / job_id
    result = model(folder / "artifacts" / "model")
    house.file(folder / "checkpoints" / "step-00000001", "weights", "x")
    house.store.progress.add_artifact(job_id, ArtifactSaved(name="model", path=result, size_bytes=1))
    return job_id, result


def test_results_are_there_for_their_key_and_for_admins_alone(house: House) -> None:
    job_id, result = finished(house, house.ada)
    reads = [
        f"/jobs/{job_id}/artifacts",
        f"/jobs/{job_id}/artifacts/model",
        f"/jobs/{job_id}/artifacts/model/files/config.json",
        f"/jobs/{job_id}/artifacts/none",
        f"/jobs/{job_id}/checkpoints",
    ]
    for other in (house.grace, house.reader):
        for url in reads:
            assert other.get(url).status_code == 404
            nobodys = other.get(url.replace(job_id, "job-none")).json()["detail"]
            assert other.get(url).json()["detail"].replace(job_id, "job-none") == nobodys
    assert house.grace.post(f"/jobs/{job_id}/checkpoints/1/export").status_code == 404
    served = {"name": "stolen", "model": {"job": job_id}}
    refused = house.grace.post("/deployments", json=served)
    nobodys = house.grace.post("/deployments", json={"name": "stolen", "model": {"job": "job-none"}})
    assert (refused.status_code, nobodys.status_code) == (422, 422)
    assert refused.json()["detail"].replace(job_id, "job-none") == nobodys.json()["detail"]
    rows = {"files": [str(house.file(house.root))], "prompt": "text"}
    batch = {"kind": "generate", "model": {"job": job_id}, "data": rows}
    assert "there is no job" in house.grace.post("/jobs", json=batch).json()["detail"]
    further = {**job(house.file(house.root)), "model": {"path": str(result)}}
    assert "not below a folder" in house.grace.post("/jobs", json=further).json()["detail"]
    for owner in (house.ada, house.operator):
        assert all(owner.get(url).is_success for url in reads if "none" not in url)
        assert owner.post("/jobs/check", json=further).json()["problems"] == []


def test_others_see_that_a_job_runs_and_not_on_what(house: House) -> None:
    job_id, _ = finished(house, house.ada)
    for other in (house.grace, house.reader):
        listed = json.dumps(other.get("/jobs").json())
        assert job_id in listed
        for text in (listed, json.dumps(other.get(f"/jobs/{job_id}").json())):
            assert "private.jsonl" not in text
            assert "hidden.jsonl" in text
    assert "private.jsonl" in json.dumps(house.ada.get(f"/jobs/{job_id}").json())
    assert "private.jsonl" in json.dumps(house.operator.get(f"/jobs/{job_id}").json())


def test_others_change_neither_jobs_nor_deployments(house: House) -> None:
    job_id = str(house.ada.post("/jobs", json=job(house.file(house.root))).json()["id"])
    for verb in ("cancel", "resume"):
        refused = house.grace.post(f"/jobs/{job_id}/{verb}")
        assert (refused.status_code, refused.json()["code"]) == (403, "not-owner")
    spec = parse_deployment({"name": "x", "model": {"path": str(house.root / "secret-model")}})
    owner = house.store.jobs.get(job_id).owner
    deployed = house.store.deployments.create(spec, reason="x", owner=owner)
    for name in (deployed.id, deployed.name):
        refused = house.grace.delete(f"/deployments/{name}")
        assert (refused.status_code, refused.json()["code"]) == (403, "not-owner")
        assert house.grace.patch(f"/deployments/{name}", json={"replicas": 2}).status_code == 403
        assert "secret-model" not in house.grace.get(f"/deployments/{name}").text
    assert house.ada.post(f"/jobs/{job_id}/cancel").is_success
    assert house.ada.delete(f"/deployments/{deployed.id}").is_success


def test_one_keys_idempotency_keys_are_not_anothers(house: House) -> None:
    spec, headers = job(house.file(house.root)), {"Idempotency-Key": "1"}
    first = house.ada.post("/jobs", json=spec, headers=headers).json()
    assert house.ada.post("/jobs", json=spec, headers=headers).json()["id"] == first["id"]
    assert house.grace.post("/jobs", json=spec, headers=headers).json()["id"] != first["id"]


def test_a_link_in_the_place_of_a_result_leads_nowhere(house: House) -> None:
    client = house.ada
    job_id, result = finished(house, client)
    files = f"/jobs/{job_id}/artifacts/model/files"
    assert client.get(f"{files}/config.json").status_code == 200
    shutil.move(result, result.with_name("moved"))
    result.symlink_to(house.settings.data_folder)
    (house.settings.data_folder / "config.json").write_text("the server's own")
    assert client.get(f"{files}/config.json").status_code == 404
    assert client.get(f"/jobs/{job_id}/artifacts/model").json()["files"] == []


def test_a_result_that_is_reported_elsewhere_is_not_given(house: House) -> None:
    client = house.ada
    job_id, _ = finished(house, client)
    problems = ArtifactSaved(name="forged", path=house.settings.data_folder, size_bytes=1)
    house.store.progress.add_artifact(job_id, problems)
    (house.settings.data_folder / "config.json").write_text("the server's own")
    assert client.get(f"/jobs/{job_id}/artifacts/forged/files/config.json").status_code == 404


def test_a_data_root_that_is_no_folder_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    require_folders(Settings(data_roots=(tmp_path,)))
    with pytest.raises(UserError, match=r"missing is not there"):
        require_folders(Settings(data_roots=(tmp_path, tmp_path / "missing")))
    with pytest.raises(UserError, match=r"file is not a folder"):
        require_folders(Settings(data_roots=(tmp_path / "file",)))
