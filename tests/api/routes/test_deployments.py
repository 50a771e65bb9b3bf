"""Deployments by REST, by the client and from the terminal: asked for, checked, listed, taken down, talked to."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from safetensors.numpy import save_file
from tests.api.conftest import Plane, wait_until
from tests.api.speaking import WINDOW, Speaker, make_tokenizer
from tokenizers import Tokenizer
from typer.testing import CliRunner, Result

from share_compute.errors import Busy, Conflict, NotFound, Unavailable, UserError
from share_compute.lifecycle.attempt_events import ArtifactSaved
from share_compute.lifecycle.deployment_states import DeploymentState
from share_compute.lifecycle.deployment_status import LatencyStatus, QueueStatus, ServingStatus, StageStatus
from share_compute.lifecycle.states import JobState
from share_compute.specification import parse_deployment, parse_job
from share_compute_api.cli import make_app
from share_compute_api.client.client import Client
from share_compute_api.openai.metrics import Snapshot
from share_compute_api.schemas.bodies import ReplicaCounts
from share_compute_api.server.figures import PERIOD_S, SentFigures
from share_compute_api.submission.deployments import check_deployment
from share_compute_api.workers.isolated.tokenizer import ServedTokenizer

Run = Callable[..., Result]
CONFIG = {
    "model_type": "llama", "vocab_size": 304, "num_hidden_layers": 2, "max_position_embeddings": 128
}  # fmt: skip
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tokenizer(tmp_path_factory.mktemp("whole"))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for name in SHARDS:
        save_file({name[6:11]: np.zeros(4, np.float32)}, folder / name)
    index = {"weight_map": {name[6:11]: name for name in SHARDS}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture
def model(whole: Path, tmp_path: Path) -> Path:
    """A complete model folder, in which a test may damage files."""
    return Path(shutil.copytree(whole, tmp_path / "tiny llama"))


def test_a_model_is_deployed_listed_and_taken_down(client: Client, model: Path) -> None:
    made = client.deploy({"name": "llama", "model": {"path": str(model)}, "max_seq": 64})
    assert (made.state, made.spec.max_seq) == (DeploymentState.pending, 64)
    assert "nothing has placed it" in made.reason
    assert client.deployment("llama") == client.deployment(made.id) == made
    assert client.deployments().deployments == [made]
    with pytest.raises(Conflict, match="llama is up already"):
        client.deploy(made.spec)
    assert client.undeploy("llama").state is DeploymentState.stopped
    assert client.undeploy("llama").state is DeploymentState.stopped
    assert client.deployments().deployments == []
    assert [one.id for one in client.deployments(state=[DeploymentState.stopped]).deployments] == [made.id]
    with pytest.raises(NotFound, match="no deployment zebra"):
        client.undeploy("zebra")
    client.deploy(made.spec)
    with pytest.raises(Unavailable, match="pending, submitted"):
        client.require_model("llama")


def test_another_number_of_replicas_is_requested_while_it_is_up(
    plane: Plane, client: Client, run: Run, model: Path
) -> None:
    source = {"path": str(model)}
    made = client.deploy({"name": "llama", "model": source, "replicas": {"max": 2, "upscale_delay_s": 9}})
    assert (str(made.spec.replicas), made.replicas) == ("1..2", None)
    changed = client.scale("llama", "0..4")
    assert (str(changed.spec.replicas), changed.spec.replicas.upscale_delay_s) == ("0..4", 9)
    assert client.scale(made.id, {"max": 6}).spec.replicas.max == 6
    assert client.deployment("llama").spec == client.scale("llama", {"max": 6}).spec
    with pytest.raises(UserError, match="replicas: 'many' is neither a number"):
        client.scale("llama", "many")
    with pytest.raises(UserError, match="did you mean"):
        client.scale("llama", {"max": 4, "upscale_delay": 1})
    assert "replicas 3" in run("scale", "llama", "3").stdout
    assert "0/3" in run("deployments").stdout
    assert isinstance(run("scale", "llama", "0").exception, UserError)
    events = [event.data for event in plane.store.events.after(0) if event.kind == "deployment"]
    requested = [data["replicas"]["asked"] for data in events if "replicas" in data]
    assert requested == ["0..4", "0..6", "3"]
    client.undeploy("llama")
    with pytest.raises(Conflict, match="llama is stopped"):
        client.scale("llama", 2)


def test_a_card_shows_measured_beside_predicted(plane: Plane, client: Client, run: Run, model: Path) -> None:
    made = client.deploy({"name": "llama", "model": {"path": str(model)}, "replicas": "0..4"})
    assert "window not known yet" in run("deployments", "llama").stdout
    plane.app.state.context.deployments = Supervised()
    card = run("deployments", "llama").stdout
    lines = [" ".join(line.split()) for line in card.splitlines()]
    assert f"llama {made.id} pending" in lines
    assert "replicas 1/0..4" in lines
    assert "2 wanted: 20 sequences: each replica is to have 16; 3 requests wait for one" in lines
    assert "time to first token 200.0 ms (95%: 900.0 ms) 150.0 ms" in lines
    assert "inter-token latency - 20.0 ms" in lines
    assert "tokens/s 40.0 50.0" in lines
    assert "requests 4 running, 2 queued -" in lines
    assert "batch size 3.5 in a step -" in lines
    assert "KV cache 25% of 400 tokens in use, 10% kept -" in lines
    assert "1 ada layers 0-1 50% 80% 1.0 GiB 512 MiB" in lines
    shown = json.loads(run("deployments", "llama", "--json").stdout)
    assert shown["deployment"]["replicas"]["wanted"] == 2
    assert shown["status"]["replicas"][0]["queue"]["batch_size"] == 3.5


def test_what_happened_to_a_deployment_is_read_in_pages(
    http: httpx.Client, client: Client, model: Path
) -> None:
    client.deploy({"name": "other", "model": {"path": str(model)}})
    made = client.deploy({"name": "llama", "model": {"path": str(model)}})
    client.scale("llama", "0..4")
    client.undeploy("llama")
    page = http.get("/deployments/llama/events", params={"limit": 2}).json()
    assert [event["data"]["id"] for event in page["events"]] == [made.id] * 2
    assert page["events"][1]["data"]["replicas"] == {"asked": "0..4", "asked_before": "1"}
    rest = http.get(f"/deployments/{made.id}/events", params={"after": page["next_after"]}).json()
    assert [event["data"]["state"] for event in rest["events"]] == ["stopped"]
    assert http.get("/deployments/zebra/events").status_code == 404


def test_figures_come_with_the_stream_of_events_without_a_number(plane: Plane, http: httpx.Client) -> None:
    supervised = Supervised()
    plane.app.state.context.deployments = supervised

    def figures(lines: Iterator[str]) -> dict[str, Any]:
        for line in lines:
            if line == "event: figures":
                event: dict[str, Any] = json.loads(next(lines).removeprefix("data: "))
                assert next(lines) == ""
                return event
        raise AssertionError("the stream ended")

    with http.stream("GET", "/events", params={"figures": True}) as answer:
        lines = answer.iter_lines()
        first = figures(lines)
        assert (first["name"], first["replicas"]["wanted"]) == ("llama", 2)
        assert first["status"]["replicas"][0]["queue"]["batch_size"] == 3.5
        supervised.status = supervised.status.model_copy(update={"tokens_per_s": 55.0})
        assert figures(lines)["status"]["replicas"][0]["tokens_per_s"] == 55.0


def test_figures_are_sent_when_they_change_and_now_and_then() -> None:
    sent, supervised = SentFigures(), Supervised()
    assert [one.name for one in sent.news(supervised.snapshots, 0.0)] == ["llama"]
    supervised.status = supervised.status.model_copy(update={"tokens_per_s": 55.0})
    assert sent.news(supervised.snapshots, PERIOD_S / 2) == []
    (changed,) = sent.news(supervised.snapshots, PERIOD_S)
    assert changed.status.replicas[0].tokens_per_s == 55.0
    assert sent.news(supervised.snapshots, 2 * PERIOD_S) == []
    assert len(sent.news(supervised.snapshots, 100.0)) == 1


def test_prometheus_receives_the_same(plane: Plane) -> None:
    url = plane.url + "/metrics"
    assert httpx.get(url).status_code == 401
    plane.app.state.context.deployments = Supervised()
    answer = httpx.get(url, headers={"Authorization": f"Bearer {plane.api_key}"})
    assert answer.headers["content-type"].startswith("text/plain; version=")
    families = {family.name: family for family in text_string_to_metric_families(answer.text)}

    def values(name: str, **labels: str) -> list[float]:
        samples = families[f"share_compute_{name}"].samples
        return [one.value for one in samples if labels.items() <= one.labels.items()]

    assert values("replicas", model_name="llama", state="wanted") == [2]
    assert values("num_requests_unplaced", model_name="llama") == [3]
    assert values("num_requests_running", model_name="llama", replica="7") == [4]
    assert values("num_requests_waiting") == [2]
    assert values("kv_cache_usage_perc") == [0.25]
    assert values("predicted_time_to_first_token_seconds") == [0.15]
    assert values("stage_busy_ratio", machine="ada", stage="0") == [0.5]
    assert values("predicted_stage_busy_ratio", machine="ada") == [0.8]
    assert all(family.documentation for family in families.values())


class Supervised:
    """Reports the status of one deployment."""

    status = ServingStatus(
        state=DeploymentState.ready,
        reason="ada holds layers 0-1",
        window_tokens=128,
        stages=(
            StageStatus(
                contributor_id="con-1", name="ada", start=0, stop=2, is_alive=True, busy_fraction=0.5,
                predicted_busy_fraction=0.8, resident_bytes=2**30, cache_bytes=2**29,
            ),
        ),
        queue=QueueStatus(
            queued=2, running=4, batch_size=3.5, kv_tokens=400, kv_tokens_used=100, kv_tokens_cached=40
        ),
        tokens_per_s=40,
        predicted_tokens_per_s=50,
        first_token=LatencyStatus(p50_s=0.2, p95_s=0.9, predicted_s=0.15),
        next_token=LatencyStatus(predicted_s=0.02),
    )  # fmt: skip
    counts = ReplicaCounts(ready=1, wanted=2, waiting=3, reason="20 sequences: each replica is to have 16")

    def statuses(self, deployment_id: str) -> list[ServingStatus]:
        del deployment_id
        return [self.status]

    def replicas(self, deployment_id: str) -> ReplicaCounts:
        del deployment_id
        return self.counts

    def snapshots(self) -> list[Snapshot]:
        return [Snapshot("llama", self.counts, {7: self.status})]


def test_a_deployment_is_taken_as_json_and_as_yaml(http: httpx.Client, model: Path) -> None:
    headers = {"Content-Type": "application/yaml"}
    text = f"kind: serve\nname: llama\nmodel: {{path: '{model}'}}\n"
    made = http.post("/deployments", content=text, headers=headers)
    assert made.status_code == 201, made.text
    problem = http.post("/jobs", content=text, headers=headers)
    assert problem.status_code == 422
    assert "the route of deployments" in problem.json()["hint"]
    wrong = http.post("/deployments", json={"name": "a/b", "model": {}})
    assert [one["field"] for one in wrong.json()["details"]["fields"]] == ["name", "model"]
    assert http.post("/deployments", content=b"x").status_code == 415
    page = http.get("/deployments", params={"limit": 1}).json()
    assert page["next_cursor"] is None


def lacks(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def writes(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


def only_pickled(folder: Path) -> None:
    for file in folder.glob("model*"):
        file.unlink()
    (folder / "pytorch_model.bin").touch()


def cut_off(folder: Path) -> None:
    content = (folder / SHARDS[1]).read_bytes()
    (folder / SHARDS[1]).write_bytes(content[:-5])


def only_adapters(folder: Path) -> None:
    (folder / "config.json").rename(folder / "adapter_config.json")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lacks(SHARDS[1]), SHARDS[1]),
        (lacks("config.json"), "config.json"),
        (lacks("tokenizer.json"), "no tokenizer"),
        (only_pickled, "could run code"),
        (only_adapters, "adapters, not a whole model"),
        (cut_off, "is damaged"),
        (writes("config.json", "[]"), "not a JSON object"),
        (writes("config.json", json.dumps({**CONFIG, "vocab_size": 9})), "the model only 9"),
        (writes("model.safetensors.index.json", '{"weight_map": {"a": "../b"}}'), "does not list"),
        (writes("model.safetensors.index.json", '{"weight_map": {"a": "c.safetensors"}}'), "c.safetensors"),
        (shutil.rmtree, "does not exist"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_folders_that_cannot_be_served_are_refused(
    served: Plane, model: Path, spoil: Callable[[Path], None], said: str
) -> None:
    spoil(model)
    spec = parse_deployment({"name": "llama", "model": {"path": str(model)}})
    with pytest.raises(UserError, match=r"model\.path: ") as caught:
        check_deployment(spec, served.store, served.app.state.context.isolated)
    assert said in caught.value.message
    assert caught.value.hint
    assert caught.value.details["fields"][0]["field"] == "model.path"


def test_more_than_the_model_has_is_refused(client: Client, model: Path) -> None:
    (model / "model.safetensors.index.json").unlink()  # the names of the files are enough here
    (model / "config.json").write_text(
        json.dumps({**CONFIG, "num_key_value_heads": 2, "intermediate_size": 63})
    )
    wanted = {"name": "llama", "model": {"path": str(model)}}
    with pytest.raises(UserError, match="max_seq: 129 tokens are more than the 128"):
        client.deploy({**wanted, "max_seq": 129})
    with pytest.raises(UserError, match="3 stages cannot share 2 layers"):
        client.deploy({**wanted, "parallelism": {"stages": 3}})
    with pytest.raises(
        UserError, match=r"parallelism\.tensor: 3 ranks cannot share 2 KV heads evenly"
    ) as refused:
        client.deploy({**wanted, "parallelism": {"tensor": 3}})
    assert refused.value.hint == "set it to one of 1, 2"
    with pytest.raises(UserError, match=r"2 ranks cannot share the 63 outputs of mlp evenly"):
        client.deploy({**wanted, "parallelism": {"tensor": 2}})
    assert client.deploy({**wanted, "max_seq": 128, "parallelism": {"stages": 2}}).state == "pending"


def test_encoders_are_not_served_in_int8(served: Plane, model: Path) -> None:
    (model / "config.json").write_text(json.dumps({**CONFIG, "model_type": "bert"}))
    spec = parse_deployment({"name": "bert", "model": {"path": str(model)}, "dtype": "int8"})
    with pytest.raises(UserError, match="dtype: int8 is for models that write text"):
        check_deployment(spec, served.store, served.app.state.context.isolated)
    compiled = parse_deployment({**spec.model_dump(), "dtype": "float32", "compile": "auto"})
    with pytest.raises(UserError, match="compile: compiled code is for models that write text"):
        check_deployment(compiled, served.store, served.app.state.context.isolated)
    several = parse_deployment({**spec.model_dump(), "dtype": "float32", "parallelism": {"tensor": 2}})
    with pytest.raises(UserError, match=r"parallelism\.tensor: .* this is an encoder"):
        check_deployment(several, served.store, served.app.state.context.isolated)
    check_deployment(
        spec.model_copy(update={"dtype": "bfloat16"}), served.store, served.app.state.context.isolated
    )


def finished_job(plane: Plane, digits: dict[str, Any], result: Path) -> str:
    job = plane.store.jobs.create(parse_job(digits))
    plane.store.jobs.begin(job.id, [])
    plane.store.progress.record(job.id, 1, [ArtifactSaved(name="model", path=result, size_bytes=1)])
    return job.id


def test_the_result_of_a_job_is_deployed(
    plane: Plane, client: Client, run: Run, model: Path, digits: dict[str, Any], tmp_path: Path
) -> None:
    job_id = finished_job(plane, digits, model)
    assert client.deploy({"name": "llama", "model": {"job": job_id}}).spec.model.job == job_id
    for wrong in ({"job": "job-none"}, {"job": job_id, "artifact": "other"}):
        with pytest.raises(UserError, match=r"model\.job: ") as caught:
            client.deploy({"name": "other", "model": wrong})
        assert not isinstance(caught.value, NotFound)
    (tmp_path / "declared").mkdir()
    declared = finished_job(plane, digits, tmp_path / "declared")
    with pytest.raises(
        UserError, match=r"a model of declared layers \(image_classification\); only language"
    ):
        client.deploy({"name": "declared", "model": {"job": declared}})
    weights = plane.store.progress.artifact(job_id, "model").path / "model-00001-of-00002.safetensors"
    aside = weights.rename(weights.with_suffix(".aside"))
    weights.symlink_to("/etc/hostname")
    with pytest.raises(UserError, match=r"model\.job: the result has links"):
        client.deploy({"name": "linked", "model": {"job": job_id}})
    weights.unlink()
    aside.rename(weights)
    done = run("serve", job_id, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["name"] == "digits"


# From the terminal


@pytest.fixture
def run(plane: Plane, tmp_path: Path) -> Run:
    """Run a command in this process, which takes a tenth of the time of a new one."""
    environment = {
        "SHARE_COMPUTE_URL": plane.url,
        "SHARE_COMPUTE_API_KEY": plane.api_key,
        "SHARE_COMPUTE_DATA_FOLDER": str(tmp_path / "elsewhere"),
        "COLUMNS": "200",
    }
    return lambda *words, text=None: CliRunner().invoke(make_app(), words, input=text, env=environment)


def test_a_deployments_life_from_the_terminal(run: Run, model: Path) -> None:
    options = ("--max-seq", "64", "--dtype", "bfloat16", "--objective", "throughput", "--compile", "auto")
    made = run("serve", str(model), *options)
    assert made.exit_code == 0, made.output
    assert "pending" in made.stdout
    assert "/v1, model tiny-llama" in made.stdout
    listed = json.loads(run("deployments", "--json").stdout)["items"][0]
    spec = listed["spec"]
    wanted = ("bfloat16", "throughput", 64, "auto")
    assert (spec["dtype"], spec["objective"], spec["max_seq"], spec["compile"]) == wanted
    table = " ".join(run("deployments").stdout.split())
    assert "tiny-llama" in table
    assert "nothing has placed it" in table
    assert isinstance(run("serve", str(model)).exception, Conflict)
    assert isinstance(run("chat", "tiny-llama", text="Hello\n").exception, Unavailable)
    assert "stopped" in run("undeploy", "tiny-llama").stdout
    assert isinstance(run("chat", "tiny-llama", text="Hello\n").exception, NotFound)
    assert "Nothing is served" in run("deployments").stdout
    assert "tiny-llama" in run("deployments", "--all").stdout


def test_a_job_file_may_ask_for_a_deployment(run: Run, model: Path) -> None:
    file = model.parent / "serve.yaml"
    file.write_text("kind: serve\nname: llama\nmodel: {path: ./tiny llama}\n")
    done = run("submit", str(file), "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["spec"]["model"]["path"] == str(model)


@pytest.fixture
def speaker(plane: Plane, whole: Path) -> Speaker:
    tokenizer, library = ServedTokenizer(whole), Tokenizer.from_file(str(whole / "tokenizer.json"))

    def echo(generation: Any) -> tuple[int, ...]:
        said = library.decode(list(generation.prompt), skip_special_tokens=False)
        return tokenizer.encode(f"{said.count('<|user|>')} said", 99)

    speaker = Speaker("llama", whole, echo)
    plane.app.state.context.engines.add(speaker)
    return speaker


def test_a_conversation_is_remembered_until_it_is_reset(run: Run, speaker: Speaker) -> None:
    talked = run("chat", "llama", "--temperature", "0.5", "--seed", "3", text="Hello\nAnd?\n/reset\nHello\n")
    assert talked.exit_code == 0, talked.output
    assert talked.stdout.splitlines() == ["1 said", "2 said", "forgotten", "1 said"]
    assert {one.options.temperature for one in speaker.received} == {0.5}
    speaker.refusal = Busy("500 wait", hint="ask later", details={"retry_after_s": 7})
    refused = run("chat", "llama", text="Hello\n").exception
    assert isinstance(refused, Busy)
    assert "500 wait" in refused.message


@pytest.mark.usefixtures("speaker")
def test_an_unknown_model_may_be_the_result_of_a_job(plane: Plane, run: Run) -> None:
    job = {"name": "poem", "model": {"config": CONFIG}, "data": {"files": ["/srv/poems.txt"]}}
    record = plane.store.jobs.create(parse_job(job))
    unknown = run("chat", "poem", text="Hello\n").exception
    assert isinstance(unknown, NotFound)
    assert unknown.message == "there is no model poem; did you mean 'llama'?"
    assert unknown.hint == "share-compute deployments lists what is served"
    plane.store.jobs.begin(record.id, [])
    for state in (JobState.running, JobState.succeeded):
        plane.store.jobs.move(record.id, state, "done", attempt=1)
    unknown = run("chat", "poem", text="Hello\n").exception
    assert isinstance(unknown, NotFound)
    assert unknown.hint is not None
    assert unknown.hint.endswith(f"share-compute serve {record.id}")


def test_a_model_without_a_chat_template_continues_the_text(plane: Plane, run: Run, tmp_path: Path) -> None:
    tokenizer = ServedTokenizer(make_tokenizer(tmp_path / "base", with_template=False))
    library = Tokenizer.from_file(str(tmp_path / "base" / "tokenizer.json"))

    def echo(generation: Any) -> tuple[int, ...]:
        said = library.decode(list(generation.prompt), skip_special_tokens=False)
        return tokenizer.encode(f"<{said.replace(chr(10), '/')}>", 99)

    speaker = Speaker("base", tmp_path / "base", echo)
    plane.app.state.context.engines.add(speaker)
    talked = run("chat", "base", "--system", "S", text="one\ntwo\n/reset\n/help\nthree\n")
    assert talked.exit_code == 0, talked.output
    _, *said, help_text, answer = talked.stdout.splitlines()
    assert (said, answer) == (["<S/one>", "<S/one/<S/one>/two>", "forgotten"], "<S/three>")
    assert "/reset" in help_text
    assert {one.options.max_tokens for one in speaker.received} == {WINDOW // 2}
    run("chat", "base", "--max-tokens", "3", text="one\n")
    assert speaker.received[-1].options.max_tokens == 3


def test_the_client_reads_an_answer_piece_by_piece(client: Client, speaker: Speaker) -> None:
    hello = [{"role": "user", "content": "Hello"}]
    pieces = list(client.chat("llama", hello, max_tokens=20))
    assert "".join(pieces) == "1 said"
    assert len(pieces) > 1
    with pytest.raises(UserError, match="temperature"):
        list(client.chat("llama", hello, temperature=-1))
    speaker.failure = (2, Unavailable("no machine is left"))
    with pytest.raises(Unavailable, match="no machine is left"):
        list(client.chat("llama", hello))


class Terminal:
    """A terminal with a program in it."""

    def __init__(self, leader: int) -> None:
        self._leader = leader
        self.text = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        try:
            while content := os.read(self._leader, 4096):
                self.text += content.decode(errors="replace")
        except OSError:
            return  # the program has ended

    def type(self, text: str) -> None:
        os.write(self._leader, text.encode())

    def sees(self, text: str) -> None:
        wait_until(lambda: text in self.text)

    def close(self) -> None:
        self._reader.join()
        os.close(self._leader)


@contextmanager
def in_a_terminal(plane: Plane, *words: str) -> Iterator[tuple[Terminal, subprocess.Popen[bytes]]]:
    leader, follower = pty.openpty()
    places = {"SHARE_COMPUTE_URL": plane.url, "SHARE_COMPUTE_API_KEY": plane.api_key, "TERM": "dumb"}
    process = subprocess.Popen(
        [Path(sys.executable).with_name("share-compute"), *words],
        stdin=follower, stdout=follower, stderr=follower, env={**os.environ, **places},
        start_new_session=True, preexec_fn=lambda: controlled_by(0),  # noqa: PLW1509
    )  # fmt: skip
    os.close(follower)
    terminal = Terminal(leader)
    try:
        yield terminal, process
    finally:
        process.kill()
        process.wait()
        terminal.close()


def controlled_by(descriptor: int) -> None:
    """Make a terminal the controlling one, whose Ctrl-C ends this process."""
    import fcntl
    import termios

    fcntl.ioctl(descriptor, termios.TIOCSCTTY, 0)


def test_control_c_stops_an_answer_and_control_d_leaves(plane: Plane, speaker: Speaker) -> None:
    speaker.pause_after = 1
    with in_a_terminal(plane, "chat", "llama") as (terminal, process):
        terminal.sees("Ctrl-D leaves")
        terminal.type("Hello\n")
        wait_until(lambda: speaker.received)
        terminal.sees("\n1")
        terminal.type("\x03")
        terminal.sees("(stopped)")
        wait_until(lambda: speaker.closed)
        speaker.go_on.set()
        terminal.type("And?\n")
        terminal.sees("2 said\r\n> ")
        terminal.type("\x04")
        assert process.wait(60) == 0
