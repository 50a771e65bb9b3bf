"""Batches: a real model in this process answers rows, whichever process dies meanwhile; and their requests."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx
import pyarrow as pa
import pytest
from pyarrow import parquet
from tests.api.conftest import Plane
from tests.api.local_engine import LocalEngine
from tests.api.speaking import Encoder, Speaker, make_llama
from tests.isolated import shared_processes
from tokenizers import Tokenizer
from typer.testing import CliRunner

from share_compute.batches.parts import Parts
from share_compute.errors import Busy, ContributorLost, ShareComputeError, Unavailable, UserError
from share_compute.inference.scheduler.events import Emitted
from share_compute.inference.scheduler.options import Generation, SamplingOptions
from share_compute.lifecycle.attempt_events import AttemptEnded
from share_compute.lifecycle.deployment_states import DeploymentState
from share_compute.lifecycle.states import JobState
from share_compute.specification import ReplicasSpec, ServeJob, parse_any_job
from share_compute.store import JobRecord, Store
from share_compute_api.cli import make_app
from share_compute_api.client.client import Client
from share_compute_api.connection.notifier import Notifier
from share_compute_api.control.batches import attempt as attempt_module
from share_compute_api.control.batches.batches import BatchSupervisor
from share_compute_api.control.batches.pace import Pace
from share_compute_api.openai.batch_rows import row_seed
from share_compute_api.openai.engine import Engines, ServingEngine, Stream, StreamEvent, TextEngine

pytestmark = pytest.mark.exact

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "and", "far", "away"]
ROWS = [{"id": n, "q": " ".join(WORDS[n % 5 : n % 5 + 1 + n % 4])} for n in range(24)]
SAMPLING = {"max_tokens": 8, "temperature": 1.0, "seed": 3, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with random weights."""
    return make_llama(tmp_path_factory.mktemp("model"), window=64)


@pytest.fixture(scope="module")
def llama(folder: Path) -> Iterator[LocalEngine]:
    engine = LocalEngine("llama", folder, max_sequences=4, max_queued=64)
    yield engine
    engine.close()


class Refusing:
    """An engine that fails some requests before it answers."""

    def __init__(self, engine: TextEngine, failures: list[Exception]) -> None:
        self.facts = engine.facts
        self._engine = engine
        self.failures = failures
        self.requested: list[Generation] = []

    async def generate(self, generations: Any) -> Any:
        self.requested += generations
        if self.failures:
            raise self.failures.pop()
        return await self._engine.generate(generations)


@dataclass
class Asked:
    """One sequence that an engine received, without the numbers that differ between two equal requests."""

    prompt: tuple[int, ...]
    options: SamplingOptions
    tokens: list[int] = field(default_factory=list)


class Recording:
    """An engine that records the tokens of all sequences."""

    def __init__(self, engine: TextEngine) -> None:
        self.facts = engine.facts
        self._engine = engine
        self.asked: dict[int, Asked] = {}

    async def generate(self, generations: Sequence[Generation]) -> Any:
        for one in generations:
            self.asked[one.sequence] = Asked(one.prompt, one.options)
        return RecordedStream(await self._engine.generate(generations), self.asked)


@dataclass
class RecordedStream:
    stream: Stream
    asked: dict[int, Asked]

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Sequence[StreamEvent]:
        events = await anext(self.stream)
        for event in events:
            if isinstance(event, Emitted):
                self.asked[event.sequence].tokens.append(event.token)
        return events

    def complete(self, sequence: int) -> None:
        self.stream.complete(sequence)

    def close(self) -> None:
        self.stream.close()


@dataclass
class House:
    """A store, and a server that may be killed and started again."""

    store: Store
    folder: Path
    engines: Engines = field(default_factory=lambda: Engines(shared_processes()))
    notifier: Notifier = field(default_factory=Notifier)

    def serve(self, engine: ServingEngine) -> None:
        """Report that a model is ready."""
        facts = engine.facts
        self.engines.add(engine)
        if self.store.deployments.by_name(facts.name) is None:
            wanted = ServeJob.model_validate({"name": facts.name, "model": {"path": str(facts.folder)}})
            made = self.store.deployments.create(wanted, reason="new")
            for state in (DeploymentState.loading, DeploymentState.ready):
                self.store.deployments.set_state(made.id, state, state.value)

    def submit(self, rows: list[Any], **changed: Any) -> JobRecord:
        file = self.folder / "rows.jsonl"
        file.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
        source = {
            "kind": "generate",
            "deployment": "llama",
            "data": {"files": [str(file)], "prompt": "q"},
            "sampling": SAMPLING,
        }
        return self.store.jobs.create(parse_any_job({**source, **changed}))

    @asynccontextmanager
    async def server(self) -> AsyncIterator[None]:
        self.notifier = Notifier()  # each server has an event loop of its own, and its notifier belongs to it
        supervisor = BatchSupervisor(self.store, self.engines, self.folder / "batches", self.notifier)
        unsubscribe = self.store.on_commit(self.notifier.notify)
        try:
            # If the supervisor fails, the group cancels the test's body and raises that failure.
            async with asyncio.timeout(240), asyncio.TaskGroup() as group:
                task = group.create_task(supervisor.run())
                yield
                task.cancel()
        finally:
            unsubscribe()

    async def until(self, check: Callable[[], Any]) -> None:
        while True:
            ticket = self.notifier.ticket
            if await asyncio.to_thread(check):
                return
            await self.notifier.wait(ticket, 0.05)

    def run(self, job: JobRecord, state: JobState = JobState.succeeded) -> JobRecord:
        """Let a server run until the job is over."""

        parts = self.folder / "batches" / job.id / "parts"

        async def main() -> None:
            async with self.server():
                await self.until(lambda: self.store.jobs.get(job.id).state.is_final)
                if state is JobState.succeeded:
                    await self.until(lambda: not parts.exists())

        asyncio.run(main())
        over = self.store.jobs.get(job.id)
        assert over.state is state, over.reason
        return over

    def output(self, job: JobRecord) -> bytes:
        return self.store.progress.artifact(job.id, "output").path.read_bytes()

    def rows(self, job: JobRecord) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.output(job).splitlines()]


@pytest.fixture
def house(store: Store, tmp_path: Path) -> House:
    return House(store, tmp_path)


def test_every_row_has_its_own_answer_and_none_depends_on_others(house: House, llama: LocalEngine) -> None:
    house.serve(llama)
    job = house.submit(ROWS)
    over = house.run(job)
    rows = house.rows(job)
    assert [{key: row[key] for key in ("id", "q")} for row in rows] == ROWS
    assert all(row["usage"]["completion_tokens"] == 8 and row["finish_reason"] == "length" for row in rows)
    assert len({row["output"] for row in rows}) > 20
    assert over.reason == "answered 24 of 24 rows"
    assert over.rows is not None
    assert (over.rows.done, over.rows.total, over.rows.failed) == (24, 24, 0)
    kinds = [event.kind for event in house.store.events.after(0, job_id=job.id)]
    assert kinds[:2] == ["state", "state"]
    assert kinds[-3:] == ["artifact", "ended", "state"]
    alone = house.submit(ROWS, concurrency=1)
    house.run(alone)
    assert house.output(alone) == house.output(job)


MOMENTS = ["before a part", "after a part", "before the output", "after the output", "after all is recorded"]


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_server_that_stops_at_any_moment_changes_nothing(
    house: House, llama: LocalEngine, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    house.serve(llama)
    undisturbed = house.submit(ROWS)
    house.run(undisturbed)
    engine = Refusing(llama, [])
    house.engines.add(engine)
    job = house.submit(ROWS)
    kept: list[int] = []
    reached, gone = threading.Event(), threading.Event()
    keep, write, record = Parts.keep, attempt_module.write_output, house.store.progress.record

    def stand(now: str, *, due: bool = True) -> None:
        """Stop at this moment: the server ends meanwhile, and writes no more."""
        if reached.is_set() or (now == moment and due):
            reached.set()
            gone.wait()
            raise OSError("the server is gone")

    def watched_keep(parts: Parts, number: int, answers: Any) -> None:
        stand("before a part", due=len(kept) >= 5)
        keep(parts, number, answers)
        kept.append(number)
        stand("after a part", due=len(kept) >= 5)

    def watched_write(*arguments: Any) -> int:
        stand("before the output")
        size_bytes = write(*arguments)
        stand("after the output")
        return size_bytes

    def watched_record(job_id: str, number: int, events: list[Any]) -> JobRecord:
        recorded = record(job_id, number, events)
        stand("after all is recorded", due=events[0].type == "artifact")
        return recorded

    async def main() -> None:
        async with house.server():
            while not reached.is_set():  # noqa: ASYNC110 - who stands still may hold all threads
                await asyncio.sleep(0.01)
        gone.set()

    with monkeypatch.context() as patch:
        patch.setattr(Parts, "keep", watched_keep)
        patch.setattr(attempt_module, "write_output", watched_write)
        patch.setattr(house.store.progress, "record", watched_record)
        asyncio.run(main())
    assert house.store.jobs.get(job.id).state is JobState.running
    engine.requested.clear()
    over = house.run(job)
    assert over.attempt == 2
    assert house.output(job) == house.output(undisturbed)
    assert len(engine.requested) == 24 - len(kept)


def test_what_an_engine_cannot_do_now_is_requested_again(
    house: House, llama: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt_module, "PAUSE_S", 0.01)
    house.serve(llama)
    job = house.submit(ROWS)
    house.run(job)
    failures = [
        Busy("the queue is full", details={"retry_after_s": 0}),
        Unavailable("nobody answers"),
        ContributorLost("it died"),
        ShareComputeError("a mistake"),
    ]
    house.engines.add(Refusing(llama, failures * 2))
    disturbed = house.submit(ROWS)
    house.run(disturbed)
    assert house.output(disturbed) == house.output(job)


def test_a_row_that_cannot_be_answered_says_why(house: House, llama: LocalEngine) -> None:
    house.serve(llama)
    rows = [{"q": "fox"}, {"q": "fox " * 100}, "no json", {"q": 7}, {"q": ""}, {"other": 1}]
    job = house.submit(rows)
    over = house.run(job)
    found = house.rows(job)
    assert "output" in found[0]
    problems = [row.get("error", "") for row in found]
    assert "window is 64" in problems[1]
    assert problems[2].startswith("the row is not JSON")
    assert problems[3] == "the row holds int, not text"
    assert "no tokens" in problems[4]
    assert problems[5] == "column 'q' is missing or null"
    assert over.reason == "answered 1 of 6 rows; 5 have an error in place of an answer"
    assert over.rows is not None
    assert over.rows.failed == 5


def test_a_row_at_which_the_engine_fails_is_given_up(
    house: House, llama: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt_module, "PAUSE_S", 0.0)
    house.serve(llama)
    house.engines.add(Refusing(llama, [ShareComputeError("a mistake")] * 3))
    job = house.submit(ROWS[:2], concurrency=1)
    house.run(job)
    first, second = house.rows(job)
    assert first["error"] == "a mistake"
    assert "output" in second


def test_conversations_are_written_by_the_chat_template(house: House, folder: Path) -> None:
    received = []

    def say(generation: Generation) -> list[int]:
        received.append(generation)
        return list(generation.prompt)

    house.serve(Speaker("chatty", folder, say))
    file = house.folder / "chats.parquet"
    chats = [[{"role": "user", "content": "fox"}], [{"role": "nobody", "content": "x"}], []]
    parquet.write_table(pa.table({"chat": chats, "id": [1, 2, 3]}), file)
    source = {"files": [str(file)], "messages": "chat"}
    job = house.submit([], deployment="chatty", data=source, sampling={"seed": 5})
    house.run(job)
    path = house.store.progress.artifact(job.id, "output").path
    assert path.suffix == ".parquet"
    rows = parquet.read_table(path).to_pylist()
    assert [row["id"] for row in rows] == [1, 2, 3]
    assert "fox" in rows[0]["output"]
    assert rows[1]["error"].startswith("messages.0.role")
    assert rows[2]["error"].startswith("messages")
    assert [(one.options.seed, one.owner) for one in received] == [(row_seed(5, 0), job.id)]


def test_texts_become_vectors(house: House, folder: Path) -> None:
    house.serve(Encoder("encoder", folder))
    changed = {"kind": "embed", "deployment": "encoder"}
    (house.folder / "texts.jsonl").write_text(json.dumps({"text": "the fox"}) + "\n{}\n")
    spec = {**changed, "data": {"files": [str(house.folder / "texts.jsonl")]}}
    job = house.store.jobs.create(parse_any_job(spec))
    house.run(job)
    first, second = house.rows(job)
    tokens = first["usage"]["prompt_tokens"]
    assert first["embedding"][0] == tokens > 0
    assert first["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert second == {"error": "column 'text' is missing or null"}


def test_a_batch_is_cancelled_and_resumed(house: House, folder: Path) -> None:
    def say(generation: Generation) -> tuple[int, ...]:
        if len(speaker.received) > 5:
            speaker.pause_after = 0
        return generation.prompt

    speaker = Speaker("slow", folder, say)
    house.serve(speaker)
    job = house.submit(ROWS, deployment="slow", concurrency=1)

    async def main() -> None:
        async with house.server():
            await house.until(lambda: (rows := house.store.jobs.get(job.id).rows) and rows.done == 5)
            house.store.jobs.cancel(job.id)
            await house.until(lambda: house.store.jobs.get(job.id).state.is_final)

    asyncio.run(main())
    over = house.store.jobs.get(job.id)
    assert over.state is JobState.cancelled
    assert "the 5 rows that are done are kept" in over.reason
    assert "continuing from the 5 rows that are done" in house.store.jobs.resume(job.id).reason
    speaker.received.clear()
    speaker.go_on.set()
    house.run(job)
    assert len(speaker.received) == 19
    assert [row["id"] for row in house.rows(job)] == list(range(24))


def test_a_batch_waits_for_its_deployment(house: House, llama: LocalEngine, folder: Path) -> None:
    job = house.submit(ROWS)

    async def main() -> None:
        async with house.server():
            await house.until(lambda: "nothing of this name" in house.store.jobs.get(job.id).reason)
            speaker = Speaker("llama", folder, lambda generation: generation.prompt)
            speaker.pause_after = 0
            house.serve(speaker)
            await house.until(lambda: house.store.jobs.get(job.id).state is JobState.running)
            # During the batch, the deployment is taken down, and another one of its name is deployed.
            house.store.deployments.stop("llama")
            house.engines.remove("llama")
            speaker.failure = (0, Unavailable("not served any more"))
            speaker.go_on.set()
            await house.until(lambda: house.store.jobs.get(job.id).state is JobState.queued)
            house.serve(llama)
            await house.until(lambda: house.store.jobs.get(job.id).state.is_final)

    asyncio.run(main())
    assert house.store.jobs.get(job.id).state is JobState.succeeded
    undisturbed = house.submit(ROWS)
    house.run(undisturbed)
    assert house.output(job) == house.output(undisturbed)


def test_files_that_change_meanwhile_end_the_batch(house: House, folder: Path) -> None:
    speaker = Speaker("slow", folder, lambda generation: generation.prompt)
    speaker.pause_after = 0
    house.serve(speaker)
    job = house.submit(ROWS, deployment="slow")

    async def main() -> None:
        async with house.server():
            await house.until(lambda: speaker.received)
            (house.folder / "rows.jsonl").write_text('{"q": "other"}\n')
            speaker.go_on.set()
            await house.until(lambda: house.store.jobs.get(job.id).state.is_final)

    asyncio.run(main())
    over = house.store.jobs.get(job.id)
    assert (over.state, over.reason) == (JobState.failed, "the files changed while their rows were answered")
    house.store.jobs.resume(job.id)
    assert "answers would belong to other rows" in house.run(job, JobState.failed).reason


def test_a_batch_has_a_deployment_for_itself(house: House, llama: LocalEngine, folder: Path) -> None:
    wanted = {"only": ["site=paris"]}
    job = house.submit(ROWS, deployment=None, model={"path": str(folder)}, parallelism=wanted)
    engine = LocalEngine(job.id, folder, max_sequences=4)

    async def main() -> None:
        async with house.server():
            await house.until(lambda: house.store.deployments.by_name(job.id))
            await house.until(lambda: "it is pending" in house.store.jobs.get(job.id).reason)
            house.engines.add(engine)
            made = house.store.deployments.get(job.id)
            assert made.spec.parallelism.only == ("site=paris",)
            for state in (DeploymentState.loading, DeploymentState.ready):
                house.store.deployments.set_state(made.id, state, state.value)
            house.store.deployments.set_replicas(made.id, ReplicasSpec(min=1, max=3))
            await house.until(lambda: house.store.deployments.by_name(job.id) is None)

    asyncio.run(main())
    engine.close()
    assert house.store.jobs.get(job.id).state is JobState.succeeded
    assert house.store.deployments.get(job.id).reason == "its batch is over"
    house.serve(llama)
    other = house.submit(ROWS)
    house.run(other)
    assert house.output(other) == house.output(job)


def test_a_batch_fails_with_the_deployment_that_it_has_for_itself(house: House, folder: Path) -> None:
    job = house.submit(ROWS, deployment=None, model={"path": str(folder)})

    async def main() -> None:
        async with house.server():
            for _ in range(2):
                await house.until(lambda: house.store.deployments.by_name(job.id))
                made = house.store.deployments.get(job.id)
                error = {"hint": "join a larger machine"}
                house.store.deployments.set_state(
                    made.id, DeploymentState.failed, "it is too large", error=error
                )
                await house.until(lambda: house.store.jobs.get(job.id).state.is_final)
                over = house.store.jobs.get(job.id)
                assert over.reason == "its deployment is failed: it is too large"
                assert over.error is not None
                assert over.error["hint"] == "join a larger machine"
                house.store.jobs.resume(job.id)

    asyncio.run(main())


def test_a_model_of_the_other_kind_ends_the_batch(house: House, folder: Path) -> None:
    house.serve(Encoder("llama", folder))
    job = house.submit(ROWS)
    assert "turns text into vectors" in house.run(job, JobState.failed).reason


def test_speed_is_that_of_the_last_while() -> None:
    pace = Pace(100.0)
    assert pace.rates(200.0) is None
    pace.see(101.0, 10)
    pace.see(102.0, 30)
    assert pace.rates(104.0) == (0.5, 10.0)
    pace.see(200.0, 5)
    assert pace.rates(202.0) == (0.01, 0.05)  # time without answers counts
    pace.see(240.0, 5)
    assert pace.rates(250.0) == (0.02, 0.1)


class TestTokenOptions:
    """stop_token_ids, min_tokens, skip_special_tokens and logit_bias."""

    @pytest.fixture
    def tokenizer(self, folder: Path) -> Tokenizer:
        return Tokenizer.from_file(str(folder / "tokenizer.json"))

    @pytest.fixture
    def fox(self, tokenizer: Tokenizer) -> int:
        """Id of the token "x"."""
        (token,) = tokenizer.encode("x", add_special_tokens=False).ids
        return int(token)

    @pytest.fixture(params=["prompt", "messages"])
    def answers(
        self, request: pytest.FixtureRequest, house: House, llama: LocalEngine
    ) -> Callable[..., list[Any]]:
        """Let the engine answer rows of prompts or messages with sampling options; return the output rows."""
        house.serve(llama)
        is_chat = request.param == "messages"

        def answer(**sampling: Any) -> list[dict[str, Any]]:
            values = [
                [{"role": "user", "content": text}] if is_chat else text for text in ("the fox", "far away")
            ]
            data = {"files": [str(house.folder / "rows.jsonl")], request.param: "q"}
            options = {"max_tokens": 8, "seed": 3, **sampling}
            job = house.submit([{"q": value} for value in values], data=data, sampling=options)
            house.run(job)
            return house.rows(job)

        return answer

    @pytest.mark.parametrize("temperature", [0, 1.5])
    def test_a_forbidden_token_never_appears(
        self, house: House, llama: LocalEngine, temperature: float
    ) -> None:
        engine = Recording(llama)
        house.serve(engine)
        sampling = {**SAMPLING, "temperature": temperature}
        house.run(house.submit(ROWS, sampling=sampling))
        drawn = {token for one in engine.asked.values() for token in one.tokens}
        assert drawn
        engine.asked.clear()
        bias = {str(token): -100 for token in drawn}
        house.run(house.submit(ROWS, sampling={**sampling, "logit_bias": bias}))
        others = {token for one in engine.asked.values() for token in one.tokens}
        assert others
        assert not others & drawn

    def test_a_stop_token_ends_an_answer_after_min_tokens(
        self, answers: Callable[..., list[Any]], fox: int
    ) -> None:
        bias = {str(fox): 100}
        for row in answers(logit_bias=bias):
            assert (row["output"], row["finish_reason"]) == ("x" * 8, "length")
        for row in answers(logit_bias=bias, stop_token_ids=[fox]):
            assert (row["output"], row["finish_reason"]) == ("", "stop")
            assert row["usage"]["completion_tokens"] == 1
        for row in answers(logit_bias=bias, stop_token_ids=[fox], min_tokens=3):
            assert "x" not in row["output"]
            assert (row["finish_reason"], row["usage"]["completion_tokens"]) == ("stop", 4)

    def test_special_tokens_are_text_if_wanted(
        self, answers: Callable[..., list[Any]], tokenizer: Tokenizer
    ) -> None:
        bias = {str(tokenizer.token_to_id("<|user|>")): 100}
        assert {row["output"] for row in answers(logit_bias=bias)} == {""}
        shown = answers(logit_bias=bias, skip_special_tokens=False)
        assert {row["output"] for row in shown} == {"<|user|>" * 8}

    def test_only_rows_without_room_for_min_tokens_have_an_error(
        self, house: House, llama: LocalEngine
    ) -> None:
        house.serve(llama)
        data = {"files": [str(house.folder / "rows.jsonl")], "messages": "q"}
        rows = [{"q": [{"role": "user", "content": text}]} for text in ("fox", "fox " * 20, "dog")]
        over = house.submit(rows, data=data, sampling={"min_tokens": 40, "seed": 1})
        assert house.run(over).reason == "answered 2 of 3 rows; 1 has an error in place of an answer"
        found = house.rows(over)
        assert ["error" in row for row in found] == [False, True, False]
        assert found[1]["error"].startswith("min_tokens is 40, but an answer has at most ")
        assert all(row["usage"]["completion_tokens"] >= 40 for row in found if "usage" in row)

    @pytest.mark.parametrize(
        ("sampling", "field"),
        [({"stop_token_ids": [5, 4000]}, "stop_token_ids"), ({"logit_bias": {4000: 1}}, "logit_bias")],
    )
    def test_rows_name_tokens_that_a_later_model_lacks(
        self, answers: Callable[..., list[Any]], sampling: dict[str, Any], field: str
    ) -> None:
        """The check at submission is left out while the deployment loads."""
        rows = answers(**sampling)
        assert [row["error"].partition(";")[0] for row in rows] == [
            f"{field}: no tokens have the ids 4000"
        ] * 2

    @pytest.mark.parametrize("form", ["prompt", "messages"])
    def test_equal_fields_give_the_tokens_of_requests(
        self, plane: Plane, llama: LocalEngine, fox: int, tmp_path: Path, form: str
    ) -> None:
        house, engine = House(plane.store, tmp_path, plane.app.state.context.engines), Recording(llama)
        house.serve(engine)
        texts = ["the fox", "far away", "lazy"]
        values = [[{"role": "user", "content": text}] if form == "messages" else text for text in texts]
        route = "chat/completions" if form == "messages" else "completions"
        common: dict[str, Any] = {"max_tokens": 24, "temperature": 1.2, "top_k": 40}
        biases = {str(token): round((token % 9 - 4) / 2, 1) for token in range(0, 290, 7)}
        reasons = set()
        for options in (
            {"logit_bias": biases},
            {"stop_token_ids": list(range(100, 160)), "min_tokens": 6},
            {"skip_special_tokens": False, "ignore_eos": True, "logit_bias": {str(fox): -100, "301": 4}},
            {"logit_bias": {**biases, str(fox): 7}, "stop_token_ids": [fox, 90, fox], "min_tokens": 4},
        ):
            engine.asked.clear()
            data = {"files": [str(tmp_path / "rows.jsonl")], form: "q"}
            sampling = {**common, **options, "seed": 3}
            job = house.submit(
                [{"q": value} for value in values], data=data, sampling=sampling, concurrency=1
            )
            house.run(job)
            by_batch = list(engine.asked.values())
            assert len(by_batch) == len(texts)
            engine.asked.clear()
            said = []
            for number, value in enumerate(values):
                body = {"model": "llama", form: value, **common, **options, "seed": row_seed(3, number)}
                headers = {"Authorization": f"Bearer {plane.api_key}"}
                answer = httpx.post(f"{plane.url}/v1/{route}", json=body, headers=headers, timeout=60)
                (choice,) = answer.raise_for_status().json()["choices"]
                text = choice["message"]["content"] if form == "messages" else choice["text"]
                said.append((text, choice["finish_reason"]))
            assert list(engine.asked.values()) == by_batch
            assert [(row["output"], row["finish_reason"]) for row in house.rows(job)] == said
            reasons |= {reason for _, reason in said}
        assert reasons == {"stop", "length"}


class TestSubmission:
    @pytest.fixture
    def files(self, tmp_path: Path) -> Path:
        (tmp_path / "rows.jsonl").write_text('{"q": "fox", "n": 1}\n')
        (tmp_path / "empty.jsonl").write_text("")
        return tmp_path

    @pytest.fixture
    def up(self, plane: Plane, folder: Path) -> Plane:
        """A control plane with two models that are ready."""
        for engine in (Speaker("poet", folder, lambda _: [5]), Encoder("encoder", folder)):
            house = House(plane.store, folder, plane.app.state.context.engines)
            house.serve(engine)
        return plane

    def test_a_file_is_submitted_listed_and_shown(
        self, up: Plane, files: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SHARE_COMPUTE_URL", up.url)
        monkeypatch.setenv("SHARE_COMPUTE_API_KEY", up.api_key)
        monkeypatch.setenv("COLUMNS", "200")
        job_file = files / "batch.yaml"
        job_file.write_text(
            "kind: generate\nname: questions\ndeployment: poet\ndata: {files: [rows.jsonl], prompt: q}\n"
        )
        run = CliRunner()
        made = json.loads(run.invoke(make_app(), ["submit", str(job_file), "--json"]).stdout)
        assert made["spec"]["data"]["files"] == [str(files / "rows.jsonl")]
        assert (made["kind"], made["rows"]) == ("generate", None)
        job = up.store.jobs.get(made["id"])
        assert "questions" in run.invoke(make_app(), ["jobs"]).stdout
        up.store.jobs.begin(job.id, ())
        house = House(up.store, up.settings.data_folder, up.app.state.context.engines)
        up.store.jobs.requeue(job.id, "tried", attempt=1)
        house.run(job)
        assert "1/1 rows" in run.invoke(make_app(), ["jobs"]).stdout
        assert "rows        1 of 1" in run.invoke(make_app(), ["show", job.id]).stdout
        assert "rows 1 of 1" in run.invoke(make_app(), ["logs", job.id]).stdout
        target = ["artifacts", "get", job.id, "output", "--output", str(files)]
        assert run.invoke(make_app(), target).exit_code == 0
        assert json.loads((files / "output" / "output.jsonl").read_text())["q"] == "fox"

    @pytest.mark.parametrize(
        ("changed", "problem"),
        [
            ({"deployment": "poem"}, "deployment: there is no deployment poem; did you mean 'poet'"),
            ({"deployment": "encoder"}, "deployment: it turns text into vectors"),
            (
                {"deployment": None, "model": {"path": "/nowhere"}},
                "model.path: /nowhere is not below a folder",
            ),
            (
                {"data": {"files": ["/nowhere.jsonl"], "prompt": "q"}},
                "data.files: /nowhere.jsonl is not below a folder",
            ),
            ({"data": {"files": ["rows.jsonl"], "prompt": "q"}}, "data.files: rows.jsonl is a relative path"),
            ({"data": {"files": ["{}/empty.jsonl"], "prompt": "q"}}, "holds no rows"),
            ({"data": {"files": ["{}/rows.jsonl"], "prompt": "p"}}, "no column 'p'"),
            ({"data": {"files": ["{}/rows.jsonl"], "prompt": "n"}}, "holds int, not text"),
            ({"data": {"files": ["{}/rows.jsonl"], "messages": "q"}}, "holds str, not lists of messages"),
            ({"sampling": {"response_format": {"type": "json"}}}, "sampling: response_format.type"),
            ({"sampling": {"stop_tokens": [5]}}, "sampling.stop_tokens: unknown key 'stop_tokens'"),
        ],
    )
    def test_what_cannot_be_done_is_refused(
        self, up: Plane, files: Path, changed: dict[str, Any], problem: str
    ) -> None:
        data = changed.get("data", {"files": ["{}/rows.jsonl"], "prompt": "q"})
        data = {**data, "files": [name.replace("{}", str(files)) for name in data["files"]]}
        with Client(up.url, up.api_key) as client, pytest.raises(UserError) as caught:
            client.submit({"kind": "generate", "deployment": "poet", **changed, "data": data})
        assert problem in str(caught.value)

    @pytest.mark.parametrize(
        "option",
        [
            {"stop_token_ids": [5] * 65},
            {"stop_token_ids": [-1]},
            {"stop_token_ids": 5},
            {"stop_token_ids": [4000, 5000]},
            {"min_tokens": -1},
            {"min_tokens": 17},
            {"min_tokens": 6, "max_tokens": 5},
            {"skip_special_tokens": "some"},
            {"logit_bias": {"5": 101}},
            {"logit_bias": {"5": True}},
            {"logit_bias": {"fox": 1}},
            {"logit_bias": {"05": 1}},
            {"logit_bias": [5]},
            {"logit_bias": {"4000": 1}},
            {"logit_bias": {str(token): 1 for token in range(301)}},
        ],
        ids=lambda option: json.dumps(option)[:40],
    )
    def test_options_of_tokens_are_refused_as_in_requests(
        self, up: Plane, files: Path, option: dict[str, Any]
    ) -> None:
        data = {"files": [str(files / "rows.jsonl")], "prompt": "q"}
        job = {"kind": "generate", "deployment": "poet", "data": data, "sampling": option}
        with Client(up.url, up.api_key) as client, pytest.raises(UserError) as caught:
            client.submit(job)
        (found,) = caught.value.details["fields"]
        assert found["field"] == f"sampling.{next(iter(option))}"
        headers = {"Authorization": f"Bearer {up.api_key}"}
        body = {"model": "poet", "prompt": "fox", **option}
        answer = httpx.post(f"{up.url}/v1/completions", json=body, headers=headers)
        assert answer.status_code == 400
        refusal = answer.json()["error"]
        assert f"sampling.{refusal['param']}" == found["field"]
        assert found["problem"] in refusal["message"]

    def test_tokens_of_a_model_of_its_own_are_checked(self, plane: Plane, files: Path, folder: Path) -> None:
        model = shutil.copytree(folder, files / "model")
        data = {"files": [str(files / "rows.jsonl")], "prompt": "q"}
        job = {"kind": "generate", "model": {"path": str(model)}, "data": data}
        with Client(plane.url, plane.api_key) as client:
            with pytest.raises(UserError, match=r"sampling\.logit_bias: no tokens have the ids 4000; "):
                client.submit({**job, "sampling": {"logit_bias": {"5": 1, "4000": 1}}})
            made = client.submit(
                {**job, "sampling": {"logit_bias": {"5": 1, "7": -100}, "stop_token_ids": [9, 9]}}
            )
        sampling = plane.store.jobs.get(made.id).spec.sampling
        assert (sampling.logit_bias, sampling.stop_token_ids) == (((5, 1.0), (7, -100.0)), (9,))


@pytest.mark.parametrize("is_over", [False, True])
def test_no_other_deployment_of_the_name_answers_the_batch_of_a_link(
    house: House, llama: LocalEngine, *, is_over: bool
) -> None:
    rows = house.folder / "rows.jsonl"
    rows.write_text(json.dumps(ROWS[0]) + "\n")
    generate = {"data": {"files": [str(rows)], "prompt": "q"}, "sampling": SAMPLING}
    then = {"serve": {"name": "llama"}, "generate": generate}
    spec = {"model": {"config": {"model_type": "llama"}}, "data": {"files": [str(rows)]}, "then": then}
    store = house.store
    training = store.jobs.create(parse_any_job(spec))
    store.jobs.begin(training.id, [])
    store.jobs.move(training.id, JobState.running, "running", attempt=1)
    ended = store.progress.record(training.id, 1, [AttemptEnded(outcome="succeeded", reason="done")])
    links = ended.training.then
    assert links.serve is not None
    assert links.generate is not None
    store.chains.serve(training.id, links.serve.deployment(training.id))
    serve, generated = store.chains.generate(training.id, links.generate.batch(training.id, "llama")).links
    if is_over:
        store.deployments.stop(str(serve.started))
    else:
        for state in (DeploymentState.loading, DeploymentState.ready):
            store.deployments.set_state(str(serve.started), state, state.value)
    house.serve(llama)
    over = house.run(
        store.jobs.get(str(generated.started)), JobState.failed if is_over else JobState.succeeded
    )
    if is_over:
        assert over.reason == f"the deployment of the result, llama ({serve.started}), is over"
        assert (over.error or {})["hint"].startswith("serve the result again")
