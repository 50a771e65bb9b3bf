"""Events as they happen, over real sockets, also through a restart of the server."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest
from httpx_sse import connect_sse

from share_compute.lifecycle.attempt_events import AttemptEnded, Note
from share_compute.store import EventRecord
from share_compute_api.client.client import Client


@pytest.fixture
def job_id(client: Client, digits: dict[str, Any]) -> str:
    return client.submit(digits).id


def begin(plane: Any, job_id: str) -> None:
    plane.store.jobs.begin(job_id, [])


def note(plane: Any, job_id: str, text: str) -> None:
    plane.store.progress.record(job_id, plane.store.jobs.get(job_id).attempt, [Note(message=text)])


def end(plane: Any, job_id: str) -> None:
    ended = AttemptEnded(outcome="failed", reason="ada was lost", error={"code": "contributor-lost"})
    plane.store.progress.record(job_id, plane.store.jobs.get(job_id).attempt, [ended])


def test_a_stream_sends_past_events_and_then_new_ones(plane: Any, http: httpx.Client, job_id: str) -> None:
    with connect_sse(http, "GET", f"/jobs/{job_id}/events") as source:
        assert source.response.headers["content-type"].startswith("text/event-stream")
        items = (item for item in source.iter_sse() if item.data)
        first = next(items)
        assert (first.event, EventRecord.model_validate_json(first.data).data["state"]) == ("state", "queued")
        begin(plane, job_id)
        second = next(items)
        assert int(second.id) > int(first.id)
    headers = {"Last-Event-ID": first.id}
    with connect_sse(http, "GET", f"/jobs/{job_id}/events", headers=headers) as source:
        assert next(item.id for item in source.iter_sse() if item.data) == second.id
    page = http.get(f"/jobs/{job_id}/events", params={"after": first.id}).json()
    assert [event["seq"] for event in page["events"]] == [int(second.id)]
    assert page["next_after"] == int(second.id)
    refused = http.get(f"/jobs/{job_id}/events", headers={"Last-Event-ID": "x"})
    assert refused.status_code == 422


def test_the_cluster_is_streamed_from_now_on(plane: Any, http: httpx.Client, job_id: str) -> None:
    with connect_sse(http, "GET", "/events") as source:
        items = source.iter_sse()
        assert next(items).retry == 1000  # the stream stands
        begin(plane, job_id)
        item = next(one for one in items if one.data)
        assert EventRecord.model_validate_json(item.data).data["state"] == "planning"


def test_following_goes_on_through_a_restart_and_ends_with_the_job(
    plane: Any, client: Client, job_id: str
) -> None:
    begin(plane, job_id)
    note(plane, job_id, "before")
    followed: list[EventRecord] = []
    noticed = threading.Event()

    def run() -> None:
        for event in client.follow(job_id):
            followed.append(event)
            if event.data.get("message") == "before":
                noticed.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert noticed.wait(60)
    plane.restart(pause=lambda: note(plane, job_id, "meanwhile"))
    end(plane, job_id)
    thread.join(60)
    assert not thread.is_alive()
    assert followed == client.events(job_id).events


def test_following_a_resumed_job_does_not_stop_at_its_earlier_end(
    plane: Any, client: Client, job_id: str
) -> None:
    begin(plane, job_id)
    end(plane, job_id)
    client.resume(job_id)
    begin(plane, job_id)
    end(plane, job_id)
    followed = [event.attempt for event in client.follow(job_id)]
    assert followed == sorted(followed)
    assert followed[-1] == 2


def test_following_a_job_that_is_over_ends(plane: Any, client: Client, job_id: str) -> None:
    begin(plane, job_id)
    end(plane, job_id)
    events = client.events(job_id).events
    assert list(client.follow(job_id)) == events
    assert list(client.follow(job_id, after=events[-2].seq)) == events[-1:]
    assert list(client.follow(job_id, after=events[-1].seq)) == []


def test_a_server_with_open_streams_stops_at_once(plane: Any, http: httpx.Client) -> None:
    with connect_sse(http, "GET", "/events") as source:
        next(source.iter_sse())
        plane.restart()
