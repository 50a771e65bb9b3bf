"""A submitter whose templates, tokenizers, schemas and files take endless time or memory: the server continues.

Each test looks at four things: the request is refused by an error that says why, /health answers after at most a second
of work meanwhile, the server's process hardly grows, and the next ordinary request is answered.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import psutil
import pyarrow as pa
import pytest
from anyio import to_thread
from pyarrow import parquet
from tests.api.conftest import DEADLINE_S, LiveServer, Plane, wait_until
from tests.api.speaking import Speaker, Speech, make_tokenizer
from tests.databases import make_schema
from tests.security.watching import Watch

from share_compute.batches.inputs import Inputs
from share_compute.data.parquet_rows import MOST_BATCH_BYTES, record_batches
from share_compute.data.reading import read_pieces
from share_compute.errors import Busy, UserError
from share_compute.files.field_errors import MOST_NAMED
from share_compute.inference.scheduler.options import Generation
from share_compute.scopes import Scope
from share_compute.settings import Settings
from share_compute.specification import TableSpec
from share_compute.store import Store
from share_compute_api.app.app import create_app
from share_compute_api.server.budget import Budget
from share_compute_api.workers.isolated.messages import CheckInputs, CheckTables, Describe, Done, Question
from share_compute_api.workers.isolated.pool import IsolatedProcesses, PoolLimits
from share_compute_api.workers.isolated.process import bare_environment

pytestmark = pytest.mark.slow  # attacks last until their limit

MOST_GROWTH_BYTES = 64 << 20
"""Largest growth of the server's process during one attack."""
LIMITS = PoolLimits(memory_bytes=512 << 20, time_s=2.0, load_s=10.0)
PATIENT = replace(LIMITS, time_s=DEADLINE_S, load_s=DEADLINE_S)
"""Limits for what must succeed, or reach its limit of memory, even where other tests take the processors."""
HELLO = [{"role": "user", "content": "Hello"}]
_numbers = count()


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plane]:
    """A server whose processes for submitters' files have little time, so that tests take little."""
    with opened(tmp_path_factory, LIMITS) as plane:
        yield plane


@contextmanager
def opened(tmp_path_factory: pytest.TempPathFactory, limits: PoolLimits) -> Iterator[Plane]:
    roots = (tmp_path_factory.getbasetemp(),)
    settings = Settings(data_folder=tmp_path_factory.mktemp("data"), database_url=None, data_roots=roots)
    make_schema(settings.resolved_database_url)
    store = Store(settings.resolved_database_url)
    _, key = store.keys.create("first", [Scope.admin])
    isolated = IsolatedProcesses(limits)
    app = create_app(settings, store, isolated=isolated)
    plane = Plane(settings, store, app, LiveServer(app), key)
    yield plane
    plane.server.stop()
    isolated.close()
    store.close()


@pytest.fixture(scope="module")
def http(plane: Plane) -> Iterator[httpx.Client]:
    with client_of(plane) as client:
        yield client


def client_of(plane: Plane) -> httpx.Client:
    headers = {"Authorization": f"Bearer {plane.api_key}"}
    return httpx.Client(base_url=plane.url, headers=headers, timeout=60)


@pytest.fixture(scope="module")
def honest(plane: Plane, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with correct files."""
    return serve(plane, make_tokenizer(tmp_path_factory.mktemp("honest")))


def serve(plane: Plane, folder: Path, ids: Sequence[int] = (5, 6, 7)) -> str:
    """Serve a model that always generates the same text, and return its name."""
    name = f"model-{next(_numbers)}"
    plane.app.state.context.engines.add(Speaker(name, folder, lambda _: ids))
    return name


def chat(http: httpx.Client, model: str, **more: Any) -> httpx.Response:
    body = {"model": model, "messages": HELLO, "max_tokens": 3, **more}
    return http.post("/v1/chat/completions", json=body)


def attack(
    plane: Plane, http: httpx.Client, honest: str, ask: Callable[[], httpx.Response], *said: str
) -> dict[str, Any]:
    """Send a hostile request; the answer is a refusal with these words, and no other client notices."""
    assert chat(http, honest).status_code == 200  # warms up
    with Watch(plane.url, MOST_GROWTH_BYTES):
        refused = ask()
        assert 400 <= refused.status_code < 500, refused.text
        assert len(refused.content) < 20_000
        assert any(word in refused.text for word in said), refused.text
        answered = chat(http, honest)
        assert answered.status_code == 200, answered.text
    found: dict[str, Any] = refused.json()
    return found


WRONG = [1] * 1_500_000
"""With one error for each item, the server would need gigabytes and half a minute."""
CHATS: dict[str, tuple[dict[str, Any], str]] = {
    "messages": ({"messages": WRONG}, "messages.0"),
    "empty messages": ({"messages": [{"role": "user", "content": ""}] * 20_000}, "10000"),
    "tools": ({"tools": WRONG}, "tools.0"),
    "calls": ({"messages": [{"role": "assistant", "tool_calls": WRONG}]}, "messages.0.tool_calls.0"),
    "parts": ({"messages": [{"role": "user", "content": WRONG}]}, "messages.0.content"),
    "stops": ({"stop": WRONG}, "stop"),
}


@pytest.mark.parametrize("kind", CHATS)
def test_a_long_list_of_wrong_items_is_one_problem(
    plane: Plane, http: httpx.Client, honest: str, kind: str
) -> None:
    more, said = CHATS[kind]
    attack(plane, http, honest, lambda: chat(http, honest, **more), said)


RESPONSES: dict[str, tuple[dict[str, Any], str]] = {
    "items": ({"input": WRONG}, "at most 10,000"),
    "wrong items": ({"input": WRONG[:10_000]}, "input.0"),
    "empty items": ({"input": [{}] * 1_000_000}, "at most 10,000"),
    "items without a role": ({"input": [{}] * 10_000}, "input.0.role"),
    "parts": ({"input": [{"role": "user", "content": WRONG}]}, "input.0.content"),
    "tools": ({"tools": WRONG}, "tools.0"),
    "nameless tools": ({"tools": [{"type": "function"}] * 150_000}, "tools.0.name"),
    "includes": ({"include": WRONG}, "include.0"),
    "metadata": ({"metadata": {str(number): 0 for number in range(300_000)}}, "at most 16"),
}


@pytest.mark.parametrize("kind", RESPONSES)
def test_a_response_with_very_many_wrong_parts_is_one_problem(
    plane: Plane, http: httpx.Client, honest: str, kind: str
) -> None:
    more, said = RESPONSES[kind]
    body = {"model": honest, "input": "Hello", **more}
    attack(plane, http, honest, lambda: http.post("/v1/responses", json=body), said)


# -- chat templates --------------------------------------------------------------------------------------------------

LOOPS = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}"
    "{% endfor %}"
)
TEMPLATES = {
    "loops": (LOOPS, "more than 2 s"),
    "multiplication": ("{{ 'a' * 3000000000 }}", "of memory"),
    "power": ("{{ 10 ** (10 ** 9) }}", "more than 2 s"),
    "output": ("{% for a in range(99999) %}{{ 'a' * 9999 }}{% endfor %}", "of memory"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    "long error": ("{{ raise_exception('a' * 100000000) }}", "aaa..."),
    "attributes": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    "formats": ("{{ '{0.__class__}'.format(messages) }}", "no tokens"),
    "globals": ("{{ cycler.__init__.__globals__.os.environ }}", "unsafe"),
}


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_chat_template_is_stopped(
    plane: Plane, http: httpx.Client, honest: str, tmp_path: Path, kind: str
) -> None:
    template, said = TEMPLATES[kind]
    folder = make_tokenizer(tmp_path)
    (folder / "chat_template.jinja").write_text(template)
    model = serve(plane, folder)
    attack(plane, http, honest, lambda: chat(http, model), said, "took more than 2 s")


def test_one_model_does_not_starve_another(
    plane: Plane, http: httpx.Client, honest: str, tmp_path: Path
) -> None:
    folder = make_tokenizer(tmp_path)
    (folder / "chat_template.jinja").write_text(LOOPS)
    model = serve(plane, folder)
    assert chat(http, honest).status_code == 200
    threads = [threading.Thread(target=chat, args=(http, model)) for _ in range(5)]
    with Watch(plane.url, MOST_GROWTH_BYTES):
        for thread in threads:
            thread.start()
        for _ in range(5):
            assert chat(http, honest).status_code == 200
        assert any(thread.is_alive() for thread in threads)  # honest requests did not wait for them
        for thread in threads:
            thread.join()


# -- tokenizers ------------------------------------------------------------------------------------------------------


def spoil(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Change a tokenizer's file."""
    file = make_tokenizer(folder) / "tokenizer.json"
    data = json.loads(file.read_text(encoding="utf-8"))
    change(data)
    file.write_text(json.dumps(data), encoding="utf-8")
    return folder


def replacing(pattern: dict[str, str], times: int) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": "a" * times}


def thrice(part: dict[str, Any], inside: str) -> dict[str, Any]:
    return {"type": "Sequence", inside: [part] * 3}


TOKENIZERS: dict[str, tuple[Callable[[dict[str, Any]], object], tuple[str, ...]]] = {
    "normalizer": (
        lambda data: data.update(normalizer=thrice(replacing({"Regex": "."}, 1000), "normalizers")),
        ("of memory", "more than 2 s"),
    ),
    "growing decoder": (
        lambda data: data.update(decoder=thrice(replacing({"String": "a"}, 60), "decoders")),
        ("times as long",),
    ),
    "decoder with a regular expression": (
        lambda data: data.update(decoder=replacing({"Regex": "(a+)+$"}, 1)),
        ("not one that this server runs",),
    ),
    "huge id": (
        lambda data: data["model"]["vocab"].update({"x!": 3 << 20}),
        ("ids below",),
    ),
    "long token": (
        lambda data: data["added_tokens"].append(
            {**data["added_tokens"][0], "id": 304, "content": "x" * 100_000}
        ),
        ("characters",),
    ),
    "vocabulary": (
        lambda data: data["model"]["vocab"].update(
            {f"{number:x}~": number for number in range(304, 1_060_000)}
        ),
        ("ids below", "of memory", "more than"),
    ),
    "corrupt": (lambda data: data.pop("model"), ("cannot be loaded",)),
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_tokenizer_is_stopped(
    plane: Plane, http: httpx.Client, honest: str, tmp_path: Path, kind: str
) -> None:
    change, said = TOKENIZERS[kind]
    model = serve(plane, spoil(tmp_path, change))
    attack(plane, http, honest, lambda: chat(http, model), *said)


def test_a_tokenizer_is_stopped_when_a_job_is_checked(
    plane: Plane, http: httpx.Client, honest: str, tmp_path: Path
) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_text('{"model": ' + "[" * 1_000_000)
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("text")
    job = {
        "model": {"config": {"model_type": "llama", "vocab_size": 64}},
        "tokenizer": {"path": str(folder)},
        "data": {"files": [str(corpus)]},
    }
    attack(plane, http, honest, lambda: http.post("/api/v1/jobs", json=job), "tokenizer.path")


# -- schemas ---------------------------------------------------------------------------------------------------------


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


SCHEMAS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "regex": (
        {"type": "string", "pattern": "^(a{1000}){1000}{1000}$"},
        ("cannot be followed", "more than 2 s"),
    ),
    "size": ({"enum": ["a" * 100] * 5_000}, ("at most",)),
    "depth": (nested(200), ("nested",)),
    "counts": ({"enum": ["a"], "minLength": 10**400}, ("cannot be followed",)),
}


@pytest.mark.parametrize("kind", SCHEMAS)
def test_a_schema_is_stopped(plane: Plane, http: httpx.Client, honest: str, kind: str) -> None:
    schema, said = SCHEMAS[kind]
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    attack(plane, http, honest, lambda: chat(http, honest, response_format=form), *said)


# -- the processes ---------------------------------------------------------------------------------------------------


def test_the_processes_hold_no_secrets(
    plane: Plane, http: httpx.Client, honest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARE_COMPUTE_API_KEY", "secret")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    assert "secret" not in bare_environment().values()
    isolated = plane.app.state.context.isolated
    # An earlier attack may have left a process with much memory, so the memory of a new one is measured.
    for pid in isolated.pids():
        psutil.Process(pid).kill()
    wait_until(lambda: not isolated.pids())
    assert chat(http, honest).status_code == 200
    pids = isolated.pids()
    assert pids
    for pid in pids:
        names = set(psutil.Process(pid).environ())
        assert not {name for name in names if name.startswith(("SHARE_COMPUTE", "RAY_", "AWS"))}
        assert psutil.Process(pid).memory_info().rss < 300 << 20
    assert os.getpid() not in pids


# -- job files -------------------------------------------------------------------------------------------------------


def yaml(http: httpx.Client, text: str) -> httpx.Response:
    return http.post("/api/v1/jobs", content=text.encode(), headers={"Content-Type": "application/yaml"})


LAUGHS = "a0: &a0 [ha, ha]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, 30)
)
YAMLS = {
    "laughs": (LAUGHS, "aliases"),
    "depth": ("[" * 100_000, "not valid YAML"),
    "size": ("a: [" + "1, " * 300_000 + "1]", "KiB are read"),
    "tags": ("kind: !!python/object/apply:os.system [id]", "tags"),
    "empty number": ("kind: !!int ''", "tags"),
    "huge number": ("name: " + "9" * 100_000, "not valid YAML"),
    "many keys": ("\n".join(f"k{number}: 1" for number in range(20_000)), "more unknown keys"),
}


@pytest.mark.parametrize("kind", YAMLS)
def test_a_yaml_file_is_stopped(plane: Plane, http: httpx.Client, honest: str, kind: str) -> None:
    text, said = YAMLS[kind]
    attack(plane, http, honest, lambda: yaml(http, text), said)


def test_ten_large_yaml_files_at_once_are_bounded(plane: Plane, http: httpx.Client, honest: str) -> None:
    text = "a: [" + "1, " * 349_000 + "1]"
    assert 1_000_000 < len(text) <= 1 << 20
    with ThreadPoolExecutor(10) as executor:

        def all_at_once() -> httpx.Response:
            answers = list(executor.map(lambda _: yaml(http, text), range(10)))
            assert {answer.status_code for answer in answers} == {422}
            return answers[0]

        attack(plane, http, honest, all_at_once, "KiB are read")


JSONS: dict[str, tuple[Any, str]] = {
    "unknown keys": ({f"k{number}": 1 for number in range(60_000)}, "more unknown keys"),
    "unknown keys inside": ({"data": {f"k{number}": 1 for number in range(60_000)}}, "more unknown keys"),
    "a long key": ({"k" * 1_000_000: 1}, "kkk..."),
    "wrong layers": ({"kind": "train", "name": "x", "model": {"layers": [1] * 300_000}}, "at most 10000"),
    "wrong files": ({"kind": "train", "name": "x", "data": {"files": [1] * 300_000}}, "data.files.0"),
    "wrong names": (
        {"kind": "train", "name": "x", "training": {"freeze": [1] * 300_000}},
        "training.freeze.0",
    ),
    "depth": ("[" * 500_000, "too deeply"),
    "number": ('{"name": ' + "9" * 100_000 + "}", "not valid JSON"),
}


@pytest.mark.parametrize("route", ["/api/v1/jobs", "/api/v1/deployments", "/api/v1/plans"])
@pytest.mark.parametrize("kind", JSONS)
def test_a_json_document_is_stopped(
    plane: Plane, http: httpx.Client, honest: str, route: str, kind: str
) -> None:
    document, _ = JSONS[kind]
    content = document if isinstance(document, str) else json.dumps(document)
    headers = {"Content-Type": "application/json"}
    found = attack(plane, http, honest, lambda: http.post(route, content=content, headers=headers), "")
    assert len(found.get("details", {}).get("fields", [])) <= MOST_NAMED


@pytest.mark.parametrize("kind", JSONS)
def test_a_request_to_a_model_is_stopped(plane: Plane, http: httpx.Client, honest: str, kind: str) -> None:
    document, _ = JSONS[kind]
    content = document if isinstance(document, str) else json.dumps(document)
    headers = {"Content-Type": "application/json"}
    attack(
        plane,
        http,
        honest,
        lambda: http.post("/v1/chat/completions", content=content, headers=headers),
        "",
    )


# -- heartbeats -----------------------------------------------------------------------------------------------------


class Hog(Speaker):
    """Takes all threads that requests share, until `go_on` is set."""

    async def generate(self, generations: Sequence[Generation]) -> Speech:
        threads = to_thread.current_default_thread_limiter()
        taken = [object() for _ in range(int(threads.total_tokens))]
        for one in taken:
            await threads.acquire_on_behalf_of(one)
        self.received += generations
        while not self.go_on.is_set():  # noqa: ASYNC110 - another thread sets it
            await asyncio.sleep(0.01)
        for one in taken:
            threads.release_on_behalf_of(one)
        return await super().generate(generations)


def test_signs_of_life_have_threads_of_their_own(plane: Plane, http: httpx.Client, tmp_path: Path) -> None:
    invite = plane.store.invites.create()[1]
    record, key = plane.store.contributors.join(invite, name="ada", host="host", versions={}, limits={})
    hog = Hog("hog", make_tokenizer(tmp_path), lambda _: (5, 6, 7))
    plane.app.state.context.engines.add(hog)
    with ThreadPoolExecutor(1) as executor, httpx.Client(base_url=plane.url, timeout=60) as agent:
        response = executor.submit(chat, http, "hog")
        try:
            wait_until(lambda: hog.received)
            with Watch(plane.url, MOST_GROWTH_BYTES):
                headers = {"Authorization": f"Bearer {key}"}
                answer = agent.post(f"/api/v1/contributors/{record.id}/heartbeat", headers=headers)
            assert answer.json()["wanted"] == "run"
        finally:
            hog.go_on.set()
        assert response.result().status_code == 200


def test_a_crowd_of_submissions_is_answered_with_a_retry_time(
    plane: Plane, http: httpx.Client, honest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = spoil(tmp_path, TOKENIZERS["vocabulary"][0])
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("text")
    job = {
        "model": {"config": {"model_type": "llama", "vocab_size": 64}},
        "tokenizer": {"path": str(folder)},
        "data": {"files": [str(corpus)]},
    }
    context, crowd, may_check = plane.app.state.context, 6, threading.Event()
    ask = context.isolated.ask
    monkeypatch.setattr(context.isolated, "ask", lambda question: may_check.wait() and ask(question))
    context.checks = Budget(at_once=1, most_waiting=1)
    with ThreadPoolExecutor(crowd) as executor, Watch(plane.url, MOST_GROWTH_BYTES):
        posted = [executor.submit(http.post, "/api/v1/jobs", json=job) for _ in range(crowd)]
        try:
            wait_until(lambda: sum(one.done() for one in posted) == crowd - 2)
        finally:
            may_check.set()
        answers = [one.result() for one in posted]
        assert chat(http, honest).status_code == 200
    context.checks = Budget()
    refused = [answer for answer in answers if answer.status_code == 429]
    assert len(refused) == crowd - 2
    assert all(answer.headers["Retry-After"] == "5" for answer in refused)
    assert {answer.status_code for answer in answers} == {422, 429}


def test_a_key_with_slow_checks_does_not_stop_those_of_others() -> None:
    budget, is_over = Budget(at_once=3, at_once_of_one=2), threading.Event()

    async def story() -> None:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(budget.run("slow", is_over.wait)) for _ in range(4)]
            await asyncio.sleep(0)
            assert await asyncio.wait_for(budget.run("ada", lambda: True), 60)
            assert not any(task.done() for task in running)
            is_over.set()
        assert all(task.result() for task in running)

    asyncio.run(story())


def test_a_key_with_many_submissions_leaves_capacity_for_others() -> None:
    budget, is_over = Budget(at_once=1, most_waiting=5, most_of_one=2), threading.Event()

    async def story() -> None:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(budget.run("crowd", is_over.wait)) for _ in range(2)]
            await asyncio.sleep(0)
            with pytest.raises(Busy, match="2 jobs and plans of this key"):
                await budget.run("crowd", is_over.wait)
            others = ("ada", "grace", "ada", "grace")
            running += [group.create_task(budget.run(name, is_over.wait)) for name in others]
            await asyncio.sleep(0)
            with pytest.raises(Busy, match="6 jobs and plans are"):
                await budget.run("edsger", is_over.wait)
            is_over.set()
        assert all(task.result() for task in running)
        assert await budget.run("crowd", is_over.wait)

    asyncio.run(story())


# -- data files ------------------------------------------------------------------------------------------------------


def shared_text(file: Path) -> None:
    """Write a million rows that share one text of a megabyte."""
    indices = pa.array([0] * 1_000_000, pa.int32())
    values = pa.DictionaryArray.from_arrays(indices, pa.array(["z" * 1_000_000]))
    parquet.write_table(pa.table({"q": values}), file, store_schema=False, compression="zstd")


def long_list(file: Path) -> None:
    """Write a text beside a list of a hundred million nulls."""
    lists = pa.ListArray.from_arrays(
        pa.array([0, 100_000_000], pa.int32()), pa.nulls(100_000_000, pa.int32())
    )
    parquet.write_table(pa.table({"q": ["text"], "other": lists}), file, compression="zstd")


def test_only_the_requested_column_is_read(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    long_list(file)
    assert file.stat().st_size < 2_000
    grown = grown_by(lambda: Inputs([file], "q").check(str, ()))
    assert grown < MOST_GROWTH_BYTES
    with pytest.raises(UserError, match="values in one column of a row group"):
        list(record_batches(file))


def test_values_of_fixed_length_are_read_in_small_batches(tmp_path: Path) -> None:
    """A dictionary holds the value once, however long it is; each decoded row holds it again."""
    file = tmp_path / "rows.parquet"
    long = pa.array([b"z" * 100_000] * 2_000, pa.binary(100_000))
    parquet.write_table(pa.table({"q": long}), file, compression="zstd")
    assert file.stat().st_size < 20_000
    assert all(batch.nbytes <= MOST_BATCH_BYTES for batch in record_batches(file))


def test_keys_of_maps_count(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    maps = pa.array([{"k" * 70_000_000: 1}] * 2, pa.map_(pa.string(), pa.int8()))
    parquet.write_table(pa.table({"q": maps}), file, compression="zstd")
    with pytest.raises(UserError, match="a row of"):
        list(record_batches(file))


def test_a_text_that_all_rows_share_is_written_out_piece_by_piece(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    shared_text(file)
    assert file.stat().st_size < 20_000

    def read() -> None:
        Inputs([file], "q").check(str, ())
        batches = record_batches(file, ["q"])
        assert all(next(batches).nbytes <= MOST_BATCH_BYTES for _ in range(5))
        _, rows = next(Inputs([file], "q").parts(1_000, ()))
        assert rows[0].value == "z" * 1_000_000
        assert "hold more than" in (rows[-1].problem or "")

    assert grown_by(read) < 6 * MOST_GROWTH_BYTES


def grown_by(work: Callable[[], object]) -> int:
    """Return by how much this process's memory grows while it does something, sampled all the time."""
    process, most, is_over = psutil.Process(), 0, threading.Event()
    before = process.memory_info().rss

    def watch() -> None:
        nonlocal most
        while not is_over.wait(0.002):
            most = max(most, process.memory_info().rss - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        work()
    finally:
        is_over.set()
        thread.join()
    return most


def lying(file: Path) -> None:
    """Write a .parquet file whose content is not Parquet."""
    shared_text(file)
    content = bytearray(file.read_bytes())
    content[100:200] = b"\xff" * 100
    file.write_bytes(content)


def one_line(file: Path) -> None:
    """Write a line of four gigabytes, which takes no space on the disk."""
    with file.open("wb") as opened:
        opened.truncate(4 << 30)


FILES: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "other column": ("rows.parquet", long_list, "no deployment"),
    "shared text": ("rows.parquet", shared_text, "no deployment"),
    "damaged": ("rows.parquet", lying, "data"),
    "one line": ("rows.jsonl", one_line, "more than 64 MiB"),
}


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plane]:
    """A server whose processes have time to read files, of which only the memory is limited."""
    with opened(tmp_path_factory, PATIENT) as plane:
        yield plane


@pytest.mark.parametrize("kind", FILES)
def test_a_data_file_is_bounded(patient: Plane, tmp_path: Path, kind: str) -> None:
    name, write, said = FILES[kind]
    write(tmp_path / name)
    job = {
        "kind": "generate",
        "deployment": "nothing",
        "data": {"files": [str(tmp_path / name)], "prompt": "q"},
    }
    model = serve(patient, make_tokenizer(tmp_path / "honest"))
    with client_of(patient) as http:
        attack(patient, http, model, lambda: http.post("/api/v1/jobs", json=job), said)


def check_of(file: Path) -> CheckInputs:
    return CheckInputs(files=(file,), column="q", holds="text", taken=(), is_united=False)


def texts(folder: Path) -> CheckInputs:
    shared_text(folder / "rows.parquet")
    return check_of(folder / "rows.parquet")


def table(folder: Path) -> CheckTables:
    file = folder / "rows.csv"
    file.write_text("a,b\n" + "1234567,7654321\n" * 300_000)
    columns = TableSpec(target="b")
    return CheckTables(files=(file,), table=columns, target_is_class=False, in_features=None)


@pytest.mark.parametrize("question", [texts, table])
def test_a_file_is_read_though_the_tokenizer_of_another_submitter_took_the_memory(
    tmp_path: Path, question: Callable[[Path], Question[Done]]
) -> None:
    (tmp_path / "large").mkdir()
    large = spoil(tmp_path / "large", TOKENIZERS["vocabulary"][0])
    with closing(IsolatedProcesses(replace(PATIENT, processes=1))) as processes:
        with pytest.raises(UserError, match="has token id"):
            processes.ask(Describe(folder=large, version=1))
        (first,) = processes.pids()
        assert psutil.Process(first).memory_info().rss > LIMITS.memory_bytes * 3 // 4
        processes.ask(question(tmp_path))
        (second,) = processes.pids()
    assert second != first


def swollen(file: Path) -> None:
    """Write a .parquet file whose only page declares that it has two gigabytes when it is decompressed."""
    table = pa.table({"q": ["text"]})
    parquet.write_table(table, file, use_dictionary=False, write_statistics=False, store_schema=False)
    content = bytearray(file.read_bytes())
    # The header of the page, in Thrift's compact protocol: its kind, then its two sizes, as zigzag varints.
    assert content[4:7] == b"\x15\x00\x15"
    content[7:10] = b"\xfe\xff\xff\xff\x0f\x15" + bytes([content[9] - 8])  # the header grew by four bytes
    file.write_bytes(content)


def test_a_file_that_declares_more_than_the_limit_is_named_and_takes_one_process_at_most(
    tmp_path: Path,
) -> None:
    swollen(tmp_path / "rows.parquet")
    question = check_of(tmp_path / "rows.parquet")
    honest = make_tokenizer(tmp_path / "honest")
    with closing(IsolatedProcesses(replace(PATIENT, processes=1))) as processes:
        processes.ask(Describe(folder=honest, version=1))
        pids = [*processes.pids()]
        for _ in range(3):
            with pytest.raises(
                UserError, match=r"rows\.parquet cannot be read .* memory was lacking"
            ) as refused:
                processes.ask(question)
            assert refused.value.details["code"] == "too_much_memory"
            assert refused.value.hint == "give smaller files, or fewer"
            pids += processes.pids()
    assert len(set(pids)) == 2, "asked once more without the tokenizer, and in the same process later"


@pytest.mark.parametrize("suffix", [".jsonl", ".txt"])
def test_a_line_without_end_does_not_fill_the_memory_of_training(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"rows{suffix}"
    one_line(file)

    def read() -> None:
        with pytest.raises(UserError, match="has a line of more than"):
            list(read_pieces([file], "text"))

    list(read_pieces([short(tmp_path)], "text"))  # imports what reads
    assert grown_by(read) < MOST_GROWTH_BYTES


def short(folder: Path) -> Path:
    file = folder / "short.txt"
    file.write_text("text")
    return file
