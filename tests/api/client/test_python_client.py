"""The asynchronous client sends the same requests as the other one; lists become tables of pandas."""

from __future__ import annotations

import asyncio
import inspect
import pydoc
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.api.cli.test_cli import step
from tests.api.conftest import Plane

from share_compute.errors import Conflict, NotFound, Unavailable, UserError
from share_compute.lifecycle.attempt_events import ArtifactSaved, AttemptEnded
from share_compute.lifecycle.states import JobState
from share_compute_api import AsyncClient, Client
from share_compute_api.client.calls import RequestMethod
from share_compute_api.client.requests import ApiRequests


def finish(plane: Plane, job_id: str) -> None:
    """Play a job of two steps to its end."""
    plane.store.jobs.begin(job_id, [])
    plane.store.jobs.move(job_id, JobState.running, "running", attempt=1)
    plane.store.progress.record(
        job_id, 1, [step(1), step(2), AttemptEnded(outcome="succeeded", reason="done")]
    )


def methods(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def test_both_clients_have_the_same_methods() -> None:
    assert methods(Client) == methods(AsyncClient)
    for name in methods(Client):
        one, other = (inspect.signature(getattr(kind, name)).parameters for kind in (Client, AsyncClient))
        assert one == other, name


def test_methods_have_the_signature_and_the_docstring_of_their_description(client: Client) -> None:
    requests = [name for name, value in vars(ApiRequests).items() if isinstance(value, RequestMethod)]
    assert len(requests) > 40
    assert all(getattr(Client, name).__doc__ for name in requests)
    assert [*inspect.signature(client.job).parameters] == ["job_id"]
    assert (
        pydoc.plain(pydoc.render_doc(Client.job)).splitlines()[2] == "job(self, job_id: 'str') -> 'JobRecord'"
    )


def test_the_page_about_the_client_names_all_methods() -> None:
    page = (Path(__file__).parents[3] / "docs" / "python.md").read_text()
    assert {name for name in methods(Client) if f"`{name}`" not in page} == {"close", "send"}


async def use(plane: Plane, digits: dict[str, Any]) -> None:
    async with AsyncClient(plane.url, plane.api_key) as client:
        jobs = await asyncio.gather(*(client.submit({**digits, "name": f"digits {n}"}) for n in range(3)))
        assert {job.id for job in jobs} == {job.id for job in (await client.jobs()).jobs}
        first = jobs[0].id

        async def follow() -> list[int]:
            return [event.data["step"] async for event in client.follow(first) if event.kind == "step"]

        following = asyncio.create_task(follow())
        await asyncio.to_thread(finish, plane, first)
        assert (await client.wait(first, progress=True)).state is JobState.succeeded
        assert await following == [1, 2]
        assert [row.step for row in await client.metrics(first)] == [1, 2]
        assert (await client.cancel(jobs[1].id)).state is JobState.cancelled
        assert await client.contributors() == []
        assert (await client.schema())["properties"]["kind"]
        with pytest.raises(NotFound, match="there is no job job-none"):
            await client.job("job-none")
        with pytest.raises(NotFound, match="there is no model llama"):
            async for _ in client.chat("llama", [{"role": "user", "content": "hello"}]):
                pass
    async with AsyncClient("http://127.0.0.1:1", "key") as away:
        with pytest.raises(Unavailable, match="nothing listens at this port"):
            await away.status()


async def transfer(plane: Plane, job: dict[str, Any], folder: Path) -> None:
    source = folder / "source"
    source.mkdir()
    (source / "a.csv").write_bytes(b"number,label\n" * 200_000)
    (source / "größe.csv").write_bytes(b"number,label\n")
    sent: list[int] = []
    async with AsyncClient(plane.url, plane.api_key) as client:
        upload = await client.upload(source, progress=sent.append)
        assert (upload.kind, len(upload.files), sum(sent)) == ("data", 2, 13 * 200_001)
        with pytest.raises(UserError, match="does not exist"):
            await client.upload(folder / "missing")
        (source / "b.pkl").touch()
        with pytest.raises(UserError, match="is no file of data"):
            await client.upload(source)
        assert [one.id for one in (await client.uploads()).uploads] == [upload.id]

        job_id = (await client.submit(job)).id
        made = folder / "data" / "jobs" / job_id / "model"
        made.mkdir(parents=True)
        (made / "config.json").write_bytes(b"{}" * 100_000)
        plane.store.jobs.begin(job_id, [])
        saved = ArtifactSaved(name="model", path=made, size_bytes=200_000)
        plane.store.progress.record(job_id, 1, [saved, step(1)])
        (artifact,) = await client.artifacts(job_id)
        partial = folder / f".model-{artifact.id}.part"
        partial.mkdir()
        (partial / "config.json").write_bytes(b"?" * 10)
        arrived: list[int] = []
        target = await client.download(job_id, "model", folder, progress=arrived.append)
        assert (target / "config.json").read_bytes() == b"?" * 10 + b"{}" * 99_995
        with pytest.raises(Conflict, match="exists already"):
            await client.download(job_id, "model", folder)
        series: list[bytes] = []
        await client.metrics_file(job_id, "csv", series.append)
        assert b"loss" in b"".join(series)
        with pytest.raises(NotFound, match="there is no job job-none"):
            await client.metrics_file("job-none", "csv", series.append)


def test_the_asynchronous_client_uploads_and_downloads(
    plane: Plane, digits: dict[str, Any], tmp_path: Path
) -> None:
    asyncio.run(transfer(plane, digits, tmp_path))


def test_a_cancelled_upload_is_removed(plane: Plane, tmp_path: Path) -> None:
    (tmp_path / "numbers.csv").write_bytes(bytes(8 << 20))

    async def cancel() -> None:
        async with AsyncClient(plane.url, plane.api_key) as client:
            sending = asyncio.create_task(
                client.upload(tmp_path / "numbers.csv", progress=lambda _: sending.cancel())
            )
            with pytest.raises(asyncio.CancelledError):
                await sending
            assert (await client.uploads()).uploads == []

    asyncio.run(cancel())


def test_the_asynchronous_client(plane: Plane, digits: dict[str, Any]) -> None:
    asyncio.run(use(plane, digits))


@pytest.mark.parametrize("odd", ["job-1?cancel=true", "job 1#x", "100%", "größe", "..", "."])
def test_odd_ids_stay_one_part_of_the_path(client: Client, odd: str) -> None:
    with pytest.raises(NotFound) as unknown:
        client.job(odd)
    assert unknown.value.message.startswith(f"there is no job {odd}")
    with pytest.raises(NotFound, match="there is no machine"):
        client.contributor(odd)


def test_lists_become_tables(
    plane: Plane, client: Client, digits: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (client.submit({**digits, "training": {"steps": steps}}).id for steps in (3, 4))
    finish(plane, first)
    metrics = client.metrics(first).to_pandas()
    assert metrics[["split", "step", "loss"]].to_numpy().tolist() == [["train", 1, 2.0], ["train", 2, 1.0]]
    jobs = client.jobs().to_pandas().set_index("id")
    assert jobs.loc[[first, second], "state"].tolist() == ["succeeded", "queued"]
    runs = client.compare([first, second]).to_pandas()
    assert runs["training.steps"].tolist() == [3, 4]
    assert client.jobs(name="no such job").to_pandas().empty
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match="pandas is not installed") as caught:
        client.metrics(first).to_pandas()
    assert caught.value.hint == "install it: pip install pandas"
