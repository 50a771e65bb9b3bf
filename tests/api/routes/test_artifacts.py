"""Downloads: whole, in parts, interrupted, and attempts to leave the folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from share_compute.errors import Conflict, NotFound
from share_compute.lifecycle.attempt_events import ArtifactSaved
from share_compute_api.client.calls import Calls
from share_compute_api.client.client import Client
from share_compute_api.client.downloads import download

FILES = {
    "config.json": b"{}",
    "model.safetensors": bytes(range(256)) * 5000,
    "deep/er/name with space.txt": b"x",
    "empty": b"",
}


@pytest.fixture
def job_id(plane: Any, client: Client, digits: dict[str, Any], tmp_path: Path) -> str:
    job_id = client.submit(digits).id
    folder = tmp_path / "data" / "jobs" / job_id / "artifacts" / "model"
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    (tmp_path / "secret").write_text("secret")
    (folder / "link").symlink_to(tmp_path / "secret")
    plane.store.jobs.begin(job_id, [])
    saved = ArtifactSaved(name="model", path=folder, size_bytes=sum(map(len, FILES.values())))
    plane.store.progress.record(job_id, 1, [saved])
    return job_id


def test_a_result_is_downloaded_whole(client: Client, job_id: str, tmp_path: Path) -> None:
    (artifact,) = client.artifacts(job_id)
    sizes = {entry.path: entry.size_bytes for entry in client.artifact(job_id, "model").files}
    card_bytes = sizes.pop("README.md")
    assert sizes == {name: len(content) for name, content in FILES.items()}
    arrived: list[int] = []
    target = client.download(job_id, "model", tmp_path / "here", progress=arrived.append)
    assert {name: (target / name).read_bytes() for name in FILES} == FILES
    assert (target / "README.md").stat().st_size == card_bytes
    assert sum(arrived) == artifact.size_bytes + card_bytes
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["model"]
    with pytest.raises(Conflict, match="exists already"):
        client.download(job_id, "model", tmp_path / "here")
    with pytest.raises(NotFound):
        client.download(job_id, "other", tmp_path / "here")


def test_a_broken_off_download_goes_on_where_it_stopped(client: Client, job_id: str, tmp_path: Path) -> None:
    (artifact,) = client.artifacts(job_id)
    partial = tmp_path / f".model-{artifact.id}.part"
    partial.mkdir()
    # These bytes differ from the server's file, so the result shows that they were not fetched again.
    (partial / "model.safetensors").write_bytes(b"?" * 1000)
    target = client.download(job_id, "model", tmp_path)
    expected = b"?" * 1000 + FILES["model.safetensors"][1000:]
    assert (target / "model.safetensors").read_bytes() == expected
    assert not partial.exists()


def test_progress_counts_each_byte_once_if_the_server_sends_a_file_again(
    client: Client, job_id: str, tmp_path: Path
) -> None:
    result = client.artifact(job_id, "model")
    partial = tmp_path / f".model-{result.artifact.id}.part"
    partial.mkdir()
    (partial / "model.safetensors").write_bytes(b"?" * 1000)
    arrived: list[int] = []

    def without_ranges() -> Calls[Path]:
        calls = download(result, tmp_path, arrived.append, "model")
        try:
            while True:
                yield replace(next(calls), headers={})
        except StopIteration as over:
            return over.value

    target = client.send(without_ranges())
    assert (target / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert sum(arrived) == sum(entry.size_bytes for entry in result.files)


def test_a_part_of_a_file_is_served(http: httpx.Client, job_id: str) -> None:
    url = f"/jobs/{job_id}/artifacts/model/files/model.safetensors"
    part = http.get(url, headers={"Range": "bytes=10-19"})
    assert (part.status_code, part.content) == (206, FILES["model.safetensors"][10:20])
    assert http.get(url, headers={"Range": "bytes=9999999-"}).status_code == 416


@pytest.mark.parametrize(
    "path",
    [
        "../../../../../secret",
        "..%2F..%2F..%2F..%2F..%2Fsecret",
        "%2Fetc%2Fpasswd",
        "link",
        "deep",
        "%00",
        "none",
        "",
    ],
)
def test_nothing_outside_of_the_result_is_served(http: httpx.Client, job_id: str, path: str) -> None:
    url = httpx.URL(f"{http.base_url}jobs/{job_id}/artifacts/model/files/").copy_with(
        raw_path=f"/api/v1/jobs/{job_id}/artifacts/model/files/{path}".encode()
    )
    answer = http.get(url)
    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/problem+json"
