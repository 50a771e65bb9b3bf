"""Streams continue after a break of the connection or a restart of the server, with the text of an undisturbed one."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from httpx_sse import EventSource
from openai import OpenAI
from sqlalchemy import delete, select
from tests.api.conftest import Plane, wait_until
from tests.api.local_engine import LocalEngine
from tests.api.openai.conftest import CALLS, EXPECTED, HELLO, TOOLS
from tests.api.speaking import WINDOW, Speaker, make_llama, make_tool_tokenizer
from tests.databases import reading, writing

from share_compute.errors import Busy, Unavailable
from share_compute.inference.scheduler.options import Generation
from share_compute.scopes import Scope
from share_compute.specification import ServeJob
from share_compute.store.database.tables import StreamPartRow, StreamRow
from share_compute.store.streams import StreamLimits
from share_compute_api.openai.resumable.streams import ResumableStreams
from share_compute_api.workers.isolated.tokenizer import ServedTokenizer

ANSWER = "the quick brown fox is in 東京 😀 and Grüße aus München, END of it"
CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
RESUMABLE = {"X-Resumable": "true"}
DONE = "[DONE]"


@pytest.fixture
def speaker(plane: Plane, folder: Path, tokenizer: ServedTokenizer) -> Speaker:
    """A model whose answers to one request have different lengths."""

    def ids(generation: Generation) -> Sequence[int]:
        times = 1 + generation.options.seed % 2
        return (*tokenizer.encode(ANSWER * times, 1000), *tokenizer.vocabulary.end_ids)

    speaker = Speaker("poet", folder, ids)
    plane.app.state.context.engines.add(speaker)
    return speaker


@pytest.fixture
def http(plane: Plane) -> Iterator[httpx.Client]:
    with client(plane, plane.api_key) as found:
        yield found


def client(plane: Plane, api_key: str) -> httpx.Client:
    headers = {"Authorization": f"Bearer {api_key}"}
    return httpx.Client(base_url=f"{plane.url}/v1", headers=headers, timeout=60)


def streams(plane: Plane) -> ResumableStreams:
    found: ResumableStreams = plane.app.state.context.streams
    return found


def stored(plane: Plane) -> list[StreamRow]:
    """Return all streams in the store, expired ones too."""
    with reading(plane.store) as session:
        return list(session.scalars(select(StreamRow)))


def wait_until_over(plane: Plane, *seen: Seen) -> None:
    """Wait until the store has the ends of these streams."""
    ids = {one.stream_id for one in seen}
    wait_until(lambda: ids <= {row.id for row in stored(plane) if row.is_over})


@dataclass
class Seen:
    """All that a client received of one stream, over all its connections."""

    stream_id: str = ""
    last_id: str | None = None
    chunks: list[dict[str, Any]] = field(default_factory=list)
    is_done: bool = False
    error: dict[str, Any] | None = None

    def read(
        self,
        response: httpx.Response,
        until_characters: int | None = None,
        until_chunks: int | None = None,
    ) -> None:
        """Read a response to its end, or until this many characters or chunks arrived."""
        if response.status_code != 200:
            response.read()
        assert response.status_code == 200, response.text
        self.stream_id = response.headers.get("x-stream-id", "")
        for event in EventSource(response).iter_sse():
            if not event.data:
                continue
            if event.data == DONE:
                self.is_done = True
                return
            chunk = json.loads(event.data)
            if "error" in chunk:
                self.error = chunk["error"]
                continue
            assert event.id or not self.stream_id
            self.last_id = event.id
            self.chunks.append(chunk)
            if until_characters is not None and len("".join(self.texts())) >= until_characters:
                return
            if until_chunks is not None and len(self.chunks) >= until_chunks:
                return

    def choices(self, index: int | None = None) -> list[dict[str, Any]]:
        found = [choice for chunk in self.chunks for choice in chunk["choices"]]
        return [one for one in found if index is None or one["index"] == index]

    def texts(self) -> list[str]:
        """Return the text of each answer, in the order of the indexes."""
        texts: dict[int, str] = {}
        for choice in self.choices():
            piece = choice.get("text") or choice.get("delta", {}).get("content") or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + piece
        return [texts[index] for index in sorted(texts)]

    def whole(self) -> dict[str, Any]:
        """Return what must be equal to an undisturbed stream."""
        ends = sorted((one["index"], one["finish_reason"]) for one in self.choices() if one["finish_reason"])
        roles = sorted(one["index"] for one in self.choices() if "role" in one.get("delta", {}))
        usages = [chunk["usage"] for chunk in self.chunks if chunk.get("usage")]
        return {"texts": self.texts(), "ends": ends, "roles": roles, "usages": usages, "done": self.is_done}

    def logprobs(self, index: int) -> list[Any]:
        return [
            token
            for choice in self.choices(index)
            if choice["logprobs"]
            for token in choice["logprobs"]["content"]
        ]


def ask(
    http: httpx.Client, route: str, until: int | None = None, *, is_resumable: bool = True, **options: Any
) -> Seen:
    seen, headers = Seen(), RESUMABLE if is_resumable else {}
    prompt = CHAT if route == "chat/completions" else {"prompt": "x", "max_tokens": 200}
    body = {"model": "poet", "stream": True, "seed": 0, **prompt, **options}
    with http.stream("POST", f"/{route}", json=body, headers=headers) as response:
        seen.read(response, until)
    return seen


def resume(http: httpx.Client, seen: Seen, until: int | None = None) -> Seen:
    headers = {} if seen.last_id is None else {"Last-Event-ID": seen.last_id}
    with http.stream("GET", f"/streams/{seen.stream_id}", headers=headers) as response:
        seen.read(response, until)
    return seen


def go_on_after_restart(plane: Plane, speaker: Speaker, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Restart the server, whose model then generates without a pause."""
    plane.restart(meanwhile)
    speaker.pause_after = None
    plane.app.state.context.engines.add(speaker)


def refused(http: httpx.Client, stream_id: str, status: int, last_id: str | None = None) -> str:
    headers = {} if last_id is None else {"Last-Event-ID": last_id}
    answer = http.get(f"/streams/{stream_id}", headers=headers)
    assert answer.status_code == status, answer.text
    return str(answer.json()["error"]["message"])


OPTIONS: list[dict[str, Any]] = [
    {"route": "chat/completions", "stream_options": {"include_usage": True}},
    {"route": "completions", "stream_options": {"include_usage": True}},
    {"route": "completions", "stop": ["END"]},
    {"route": "chat/completions", "n": 3, "stream_options": {"include_usage": True}},
    {"route": "completions", "n": 2, "stop": [", E"], "max_tokens": 30},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.usefixtures("speaker")
def test_every_cut_continues_with_the_same_text(http: httpx.Client, options: dict[str, Any]) -> None:
    """Characters of several tokens, and the beginning of a stop string, are held back at some of the cuts."""
    expected = ask(http, is_resumable=False, **options)
    assert expected.stream_id == ""
    assert expected.last_id == ""
    whole = expected.whole()
    assert whole["done"]
    length = len("".join(whole["texts"]))
    for cut in range(1, length, 11):
        seen = ask(http, until=cut, **options)
        resume(http, seen, cut + 20)
        if not seen.is_done:
            resume(http, seen)
        assert seen.whole() == whole
        # No stream is left after the end.
        assert resume(http, Seen(seen.stream_id, seen.last_id)).chunks == []
    assert {chunk["id"] for chunk in seen.chunks} == {seen.chunks[0]["id"]}


@pytest.mark.parametrize(
    ("number", "cut", "is_stored"),
    [(0, 9, True), (1, 1, True), (2, 16, True), (3, 9, True), (4, 16, True), (0, 16, False), (3, 9, False)],
)
def test_a_stream_outlives_the_server(
    plane: Plane, http: httpx.Client, speaker: Speaker, number: int, cut: int, is_stored: bool
) -> None:
    options = OPTIONS[number]
    whole = ask(http, is_resumable=False, **options).whole()
    speaker.pause_after = 25
    seen = ask(http, until=cut, **options)

    def lose() -> None:
        if not is_stored:
            with writing(plane.store) as session:
                session.execute(delete(StreamPartRow))

    go_on_after_restart(plane, speaker, lose)
    resume(http, seen)
    assert seen.whole() == whole
    assert len({(chunk["id"], chunk["created"]) for chunk in seen.chunks}) == 1
    again = [one for one in speaker.received if one.emitted]
    assert bool(again) == is_stored


def test_a_complete_stream_outlives_the_server(plane: Plane, http: httpx.Client, speaker: Speaker) -> None:
    options: dict[str, Any] = {"route": "completions", "n": 2, "stop": ["END"], "max_tokens": 40}
    whole = ask(http, is_resumable=False, **options).whole()
    seen = ask(http, until=5, **options)
    wait_until_over(plane, seen)
    plane.restart()
    plane.app.state.context.engines.add(speaker)
    received = len(speaker.received)
    assert "is ahead of the text" in refused(http, seen.stream_id, 400, "9999,1")
    resume(http, seen)
    assert seen.whole() == whole
    assert len(speaker.received) == received


@pytest.mark.parametrize("is_restarted", [False, True])
def test_each_token_has_its_log_probabilities_once(
    plane: Plane, http: httpx.Client, speaker: Speaker, is_restarted: bool
) -> None:
    options: dict[str, Any] = {"route": "chat/completions", "n": 2, "logprobs": True, "top_logprobs": 2}
    expected = ask(http, is_resumable=False, **options)
    if is_restarted:
        speaker.pause_after = 20
    seen = ask(http, until=15, **options)
    assert ":" in (seen.last_id or "")
    if is_restarted:
        go_on_after_restart(plane, speaker)
    resume(http, seen)
    assert seen.whole() == expected.whole()
    for index in range(2):
        assert seen.logprobs(index) == expected.logprobs(index)
        joined = b"".join(bytes(one["bytes"]) for one in seen.logprobs(index))
        assert joined.decode() == seen.texts()[index]


@pytest.fixture(params=["hermes", "llama", "mistral"])
def caller(request: pytest.FixtureRequest, plane: Plane, tmp_path: Path) -> Speaker:
    """A model that writes text, if its format allows this, and calls two tools."""
    folder = make_tool_tokenizer(tmp_path / "tools", request.param)
    tokenizer = ServedTokenizer(folder)
    text = "" if request.param == "llama" else "I look: "
    ids = (*tokenizer.encode(text + CALLS[request.param], 1000), *tokenizer.vocabulary.end_ids)
    speaker = Speaker("caller", folder, lambda _: ids, window=1024)
    plane.app.state.context.engines.add(speaker)
    return speaker


def ask_with_tools(
    http: httpx.Client, until: int | None = None, *, is_resumable: bool = True, pauses: bool = False
) -> Seen:
    """Ask for two answers with tools.

    Return what the stream had, or its first ``until`` chunks, or, with ``pauses``, those before a pause.
    """
    seen = Seen()
    body = {"model": "caller", "stream": True, "seed": 0, "n": 2, "messages": HELLO, "tools": TOOLS}
    headers = RESUMABLE if is_resumable else {}
    with http.stream("POST", "/chat/completions", json=body, headers=headers) as response:
        if pauses:
            # Only once the response has begun: a busy server may take longer than this to begin it.
            response.request.extensions["timeout"]["read"] = 0.5
        with suppress(httpx.ReadTimeout):
            seen.read(response, until_chunks=until)
    return seen


def calls(seen: Seen) -> dict[tuple[int, int], dict[str, str]]:
    """Return the parts of each call, joined, by the indexes of its answer and of itself."""
    found: dict[tuple[int, int], dict[str, str]] = {}
    for choice in seen.choices():
        for part in choice["delta"].get("tool_calls", ()):
            call = found.setdefault((choice["index"], part["index"]), {"arguments": ""})
            assert ("id" in part) == ("id" not in call)
            call["id"] = part.get("id", call.get("id", ""))
            call["name"] = part["function"].get("name", call.get("name", ""))
            call["arguments"] += part["function"]["arguments"]
    return found


def without_ids(seen: Seen) -> dict[tuple[int, int], dict[str, str]]:
    return {place: {**call, "id": ""} for place, call in calls(seen).items()}


def require_resumed(http: httpx.Client, seen: Seen, expected: Seen) -> None:
    """Read the rest of a stream, which must be the expected one in the end."""
    begun = {place: call["id"] for place, call in calls(seen).items()}
    resume(http, seen)
    assert seen.whole() == expected.whole()
    assert without_ids(seen) == without_ids(expected)
    again = calls(seen)
    assert {place: again[place]["id"] for place in begun} == begun
    assert len({call["id"] for call in again.values()}) == 4
    assert resume(http, Seen(seen.stream_id, seen.last_id)).chunks == []
    # The whole stream can be read once more, with the same ids.
    assert calls(resume(http, Seen(seen.stream_id))) == again


@pytest.mark.usefixtures("caller")
def test_tool_calls_continue_at_every_cut(http: httpx.Client) -> None:
    expected = ask_with_tools(http, is_resumable=False)
    named = [(call["name"], call["arguments"]) for call in calls(expected).values()]
    assert sorted(named) == sorted(2 * EXPECTED)
    for cut in range(1, len(expected.chunks), 5):
        require_resumed(http, ask_with_tools(http, until=cut), expected)


def test_tool_calls_outlive_the_server(plane: Plane, http: httpx.Client, caller: Speaker) -> None:
    expected = ask_with_tools(http, is_resumable=False)
    for tokens in (4, 24, 44):
        caller.pause_after = tokens
        seen = ask_with_tools(http, pauses=True)
        assert not seen.is_done
        go_on_after_restart(plane, caller)
        require_resumed(http, seen, expected)


def test_a_drawn_seed_is_kept(plane: Plane, http: httpx.Client, speaker: Speaker) -> None:
    speaker.pause_after = 5
    seen = ask(http, "completions", until=3, seed=None)
    go_on_after_restart(plane, speaker)
    resume(http, seen)
    first, again = speaker.received
    assert first.options == again.options
    assert first.prompt == again.prompt


def test_options_of_tokens_are_kept(plane: Plane, http: httpx.Client, speaker: Speaker) -> None:
    options = {"logit_bias": {"7": -100, "5": 0.5}, "stop_token_ids": [9], "min_tokens": 4}
    speaker.pause_after = 5
    seen = ask(http, "completions", until=3, skip_special_tokens=False, **options)
    go_on_after_restart(plane, speaker)
    resume(http, seen)
    first, again = speaker.received
    assert first.options == again.options
    assert again.options.logit_bias == ((5, 0.5), (7, -100.0))
    assert seen.is_done


def test_sequences_of_ordinary_clients_still_end_with_them(http: httpx.Client, speaker: Speaker) -> None:
    speaker.pause_after = 5
    ask(http, "completions", until=3, is_resumable=False)
    wait_until(lambda: speaker.closed)


def test_a_stream_without_readers_goes_on_and_is_cancelled_at_last(
    plane: Plane, http: httpx.Client, speaker: Speaker
) -> None:
    seen = ask(http, "completions", until=1)
    wait_until_over(plane, seen)
    assert not speaker.closed
    speaker.pause_after = 5
    other = ask(http, "completions", until=1)
    assert not speaker.closed
    streams(plane).keep_s = 0.0
    wait_until(lambda: speaker.closed)

    def is_deleted() -> bool:
        with reading(plane.store) as session:
            is_known = any(row.request or row.prompts for row in session.scalars(select(StreamRow)))
            return not is_known and session.scalars(select(StreamPartRow)).all() == []

    wait_until(is_deleted)
    for stream_id in (seen.stream_id, other.stream_id):
        message = refused(http, stream_id, 410)
        assert "has expired" in message
        assert "send the request again" in message


def test_only_the_owner_and_admins_read_a_stream(plane: Plane, http: httpx.Client, speaker: Speaker) -> None:
    _, mine = plane.store.keys.create("mine")
    _, foreign = plane.store.keys.create("foreign", [Scope.submit])
    with client(plane, mine) as owner, client(plane, foreign) as other:
        seen = ask(owner, "completions", until=3)
        for is_restarted in (False, True):
            if is_restarted:
                plane.restart()
                plane.app.state.context.engines.add(speaker)
            for answer in (
                other.get(f"/streams/{seen.stream_id}"),
                other.delete(f"/streams/{seen.stream_id}"),
                owner.get("/streams/stream-unknown"),
            ):
                assert answer.status_code == 404
                assert "X-Stream-Id" in answer.json()["error"]["message"]
        assert resume(http, Seen(seen.stream_id)).texts() == [ANSWER]
        assert resume(owner, seen).texts() == [ANSWER]


def test_a_stream_is_cancelled(http: httpx.Client, speaker: Speaker) -> None:
    speaker.pause_after = 5
    seen = ask(http, "completions", until=3)
    seen = Seen(seen.stream_id)
    reader = threading.Thread(target=resume, args=(http, seen))
    reader.start()
    wait_until(lambda: bool(seen.chunks))
    assert http.delete(f"/streams/{seen.stream_id}").status_code == 204
    reader.join()
    assert seen.error is not None
    assert "was cancelled" in seen.error["message"]
    assert seen.is_done
    assert speaker.closed
    assert "cancelled" in refused(http, seen.stream_id, 410)
    assert http.delete(f"/streams/{seen.stream_id}").status_code == 410


def test_the_newer_of_two_readers_goes_on(http: httpx.Client, speaker: Speaker) -> None:
    speaker.pause_after = 8
    seen = ask(http, "completions", until=3)
    older = Seen(seen.stream_id)
    reader = threading.Thread(target=resume, args=(http, older))
    reader.start()
    wait_until(lambda: bool(older.chunks))
    newer = threading.Thread(target=resume, args=(http, seen))
    newer.start()
    reader.join()
    assert older.error is not None
    assert "another connection reads" in older.error["message"]
    speaker.go_on.set()
    newer.join()
    assert (seen.error, seen.texts(), seen.is_done) == (None, [ANSWER], True)


def test_positions_that_are_malformed_or_ahead_are_refused(
    plane: Plane, http: httpx.Client, speaker: Speaker
) -> None:
    speaker.pause_after = 8
    seen = ask(http, "completions", until=3)
    for wrong in ("", "x", "-1", "1,2", "1.+x", "9" * 5000):
        answer = http.get(f"/streams/{seen.stream_id}", headers={"Last-Event-ID": wrong})
        assert answer.status_code == 400, wrong
        assert "Last-Event-ID" in answer.json()["error"]["message"]
        assert answer.json()["error"]["param"] == "Last-Event-ID"
    for ahead in ("999999", "1:3", "1.", "1.+"):
        assert "is ahead of the text" in refused(http, seen.stream_id, 400, ahead)
    # After a restart, the server may know less text than the client; it can tell when the text is complete.
    plane.restart()
    speaker.pause_after = None
    plane.app.state.context.engines.add(speaker)
    late = resume(http, Seen(seen.stream_id, "999"))
    assert late.error is not None
    assert "is ahead of the text" in late.error["message"]
    assert resume(http, seen).texts() == [ANSWER]


def test_the_header_is_for_streams(http: httpx.Client, speaker: Speaker) -> None:
    for value, body in (("true", {"stream": False}), ("maybe", {"stream": True})):
        given = {"model": "poet", "prompt": "x", **body}
        answer = http.post("/completions", json=given, headers={"X-Resumable": value})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "X-Resumable"
    assert speaker.received == []
    assert ask(http, "completions", is_resumable=False).stream_id == ""


def test_a_full_store_gives_ordinary_streams(plane: Plane, http: httpx.Client, speaker: Speaker) -> None:
    speaker.pause_after = 8
    streams(plane).limits = StreamLimits(streams_of_key=2)
    kept = [ask(http, "completions", until=3) for _ in range(2)]
    assert all(seen.stream_id for seen in kept)
    speaker.go_on.set()
    streams(plane).limits = StreamLimits(streams_of_key=2, tokens=100)
    ordinary = ask(http, "completions")
    assert (ordinary.stream_id, ordinary.last_id, ordinary.texts()) == ("", "", [ANSWER])
    # Streams that are over are deleted for new ones, the oldest first.
    wait_until_over(plane, *kept)
    streams(plane).limits = StreamLimits(streams_of_key=2)
    assert ask(http, "completions").stream_id
    refused(http, kept[0].stream_id, 410)
    assert resume(http, kept[1]).texts() == [ANSWER]


def test_refused_requests_leave_no_stream(plane: Plane, http: httpx.Client, speaker: Speaker) -> None:
    speaker.refusal = Busy("full", hint="later", details={"retry_after_s": 1})
    answer = http.post(
        "/completions", json={"model": "poet", "prompt": "x", "stream": True}, headers=RESUMABLE
    )
    assert answer.status_code == 429
    wait_until(lambda: [row.expired_at is None for row in stored(plane)] == [False])


@pytest.mark.usefixtures("speaker")
def test_a_model_that_is_taken_down_takes_its_streams_along(plane: Plane, http: httpx.Client) -> None:
    seen = ask(http, "completions", until=3)
    plane.restart()
    assert "is not served any more" in refused(http, seen.stream_id, 410)


def test_a_client_that_is_back_before_the_deployment_has_begun_waits(
    plane: Plane, http: httpx.Client, speaker: Speaker
) -> None:
    spec = ServeJob.model_validate(
        {"kind": "serve", "name": "poet", "model": {"path": str(speaker.facts.folder)}}
    )
    deployment = plane.store.deployments.create(spec, reason="submitted")
    speaker.facts = replace(speaker.facts, deployment_id=deployment.id)
    speaker.pause_after = 25
    seen = ask(http, "completions", until=9)
    plane.restart()
    speaker.pause_after = None
    with ThreadPoolExecutor() as threads:
        resuming = threads.submit(resume, http, seen)
        with pytest.raises(TimeoutError):
            resuming.result(0.5)
        context = plane.app.state.context
        loop = next(iter(context.tasks)).get_loop()
        loop.call_soon_threadsafe(context.engines.add, speaker)
        resuming.result()
    assert (seen.texts(), seen.is_done) == ([ANSWER], True)


def test_a_failure_ends_the_readers_and_a_later_reader_continues(
    http: httpx.Client, speaker: Speaker
) -> None:
    speaker.failure = (10, Unavailable("no replica is left", hint="ask again"))
    seen = ask(http, "completions")
    assert seen.error is not None
    assert "no replica is left" in seen.error["message"]
    speaker.failure = None
    resume(http, seen)
    assert seen.texts() == [ANSWER]


def test_real_tokens_continue_as_they_would_have(plane: Plane, http: httpx.Client, tmp_path: Path) -> None:
    model = make_llama(tmp_path / "llama", window=WINDOW)
    options: dict[str, Any] = {"n": 3, "max_tokens": 60, "ignore_eos": True, "seed": 7}
    with ExitStack() as stack:

        def serve() -> None:
            engine = LocalEngine("poet", model, max_sequences=4)
            stack.callback(engine.close)
            plane.app.state.context.engines.add(engine)

        serve()
        with OpenAI(base_url=f"{plane.url}/v1", api_key=plane.api_key, max_retries=0) as openai:
            extra = {"ignore_eos": options["ignore_eos"]}
            given = {key: value for key, value in options.items() if key != "ignore_eos"}
            answer = openai.completions.create(model="poet", prompt="x", extra_body=extra, **given)
        seen = ask(http, "completions", until=40, **options)
        plane.restart()
        serve()
        resume(http, seen)
    assert seen.texts() == [choice.text for choice in answer.choices]
    assert seen.is_done
