"""The commands of README.md and docs/ run as they are written, against a control plane without a Ray cluster."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from tests.api.conftest import Plane
from tests.api.speaking import make_encoder, make_llama
from tests.api.workers.test_exports import save
from tests.conftest import harmless_environment
from tests.docs.pages import (
    ASK,
    NEEDS_THE_HUB,
    Command,
    blocks,
    commands,
    copy_examples,
    readme_commands,
    spans,
    split,
)
from tests.docs.test_pages import SHELL, UsageError, own
from tests.docs.test_readme import NOT_HERE
from tests.security.planes import open_plane
from tests.warm_commands import run_warm

from share_compute.lifecycle.attempt_events import ArtifactSaved, AttemptEnded, Planned
from share_compute.planning.plan import Plan
from share_compute.store.database.backups import back_up, embedded_file
from share_compute.topology import Device, Link
from share_compute_api.client.client import Client

LIMIT_S = 240
Outcome = Literal["succeeded", "failed"] | None
CLUSTER = "starts a Ray cluster, or needs one"
MACHINES = "needs machines that run the job or the model"
NOT_RUN = {
    "up": CLUSTER,
    "up --contribute": CLUSTER,
    "up --data-root ~/texts": CLUSTER,
    "up --host 0.0.0.0 --tls self-signed --data-root ~/texts": CLUSTER,
    "up --host 0.0.0.0 --tls self-signed": CLUSTER,
    "up --host 0.0.0.0 --tls-cert chain.pem --tls-key key.pem": CLUSTER,
    "up --allow-failures": CLUSTER,
    "demo": CLUSTER,
    "measure MACHINE": CLUSTER,
    "rotate-token": CLUSTER,
    "submit examples/words.yaml --follow": MACHINES,
    "submit examples/tensor.yaml --follow": MACHINES,
    "submit batch.yaml --follow": MACHINES,
    "tune job.yaml --keep precision --steps 30 --json": MACHINES,
    "tune job.yaml --output fast.yaml": MACHINES,
    "show job-k3v7q2ma --best": "needs a sweep with trials that ended; tests/api/control/test_sweeps.py has one",
    "chaos --job JOB --mtbf 20s --minutes 10 --against CALM_JOB": MACHINES,
    "push JOB OWNER/NAME": NEEDS_THE_HUB,
    "serve hub:OWNER/NAME": "needs the Hugging Face Hub; tests/api/routes/test_hub_models.py has a stand-in of it",
    "artifacts get JOB tensorboard": "needs a job with reports; tests/api/control/test_reports.py makes them",
    "artifacts get JOB mlflow": "needs a job with reports; tests/api/control/test_reports.py makes them",
    "artifacts get JOB wandb": "needs a job with reports; tests/api/control/test_reports.py makes them",
    "top": "runs until Ctrl-C; `top --once` is run",
    "--install-completion": "needs a shell among its parent processes, whose configuration it changes",
    "join https://SERVER:8700 --memory 8GiB --cpu-threads 4": "starts a Ray node",
    "join https://SERVER:8700 --label site=paris --label gpu=no": "starts a Ray node",
    "join https://SERVER:8700 --device cuda:0+cuda:1": "needs two GPUs",
    "service install https://SERVER:8700 --memory 8GiB": "starts a service of systemd",
}
"""Command -> reason why it is not run here."""


def found() -> dict[str, Command]:
    """Return the different commands of share-compute in blocks, and the complete ones in sentences."""
    listed = [command for block in SHELL for command in commands(block)]
    for page, line, text in spans():
        for command in split(page, line, text) if text.startswith("share-compute ") else ():
            try:
                own(command.words[1:])
            except UsageError:  # a sentence may name a command without its arguments
                continue
            listed.append(command)
    every = [command for command in listed if command.words and command.words[0] == "share-compute"]
    return {" ".join(command.words[1:]): command for command in reversed(every)}


COMMANDS = found()
IN_ORDER = {" ".join(command.words[1:]) for command in readme_commands() if command.words[1] not in NOT_HERE}
"""Commands that test_readme.py runs, with machines."""


def block_of(page: str, **first: Any) -> str:
    """Return the YAML block of a page whose document has these items."""
    for block in blocks():
        if (
            block.page == page
            and block.language == "yaml"
            and first.items() <= yaml.safe_load(block.text).items()
        ):
            return block.text
    raise AssertionError(f"{page} has no such block: {first}")


@dataclass
class World:
    """The control plane and the working folder of all commands."""

    plane: Plane
    client: Client
    folder: Path
    names: int = 0

    def job(self, outcome: Outcome) -> str:
        """Return a training job with a checkpoint; it is queued if ``outcome`` is None."""
        self.names += 1
        text = (self.folder / "job.yaml").read_text(encoding="utf-8")
        job = yaml.safe_load(text) | {"name": f"job-{self.names}"}
        job["data"]["files"] = [str(self.folder / "corpus.txt")]
        job_id = self.client.submit(job).id
        if outcome is None:
            return job_id
        kept = self.plane.settings.data_folder / "jobs" / job_id
        save(kept / "checkpoints", 4)
        model = Path(shutil.copytree(self.folder / "tiny-llama", kept / "artifacts" / "model"))
        rows = kept / "artifacts" / "output"
        rows.mkdir()
        (rows / "output.jsonl").write_text("{}\n")
        plan = Plan(epoch=0, strategy="uniform", num_layers=4, parameters=650, stages=(), microbatches=1)
        artifacts = [ArtifactSaved(name=path.name, path=path, size_bytes=1) for path in (model, rows)]
        store = self.plane.store
        store.jobs.begin(job_id, [])
        ended = AttemptEnded(outcome=outcome, reason="the test says so")
        store.progress.record(job_id, store.jobs.get(job_id).attempt, [Planned(plan=plan), *artifacts, ended])
        return job_id

    def deploy(self, *names: str) -> None:
        """Let only the deployments of these names be up."""
        up = {one.name for one in self.client.deployments().deployments}
        for name in up - {*names}:
            self.client.undeploy(name)
        for name in {*names} - up:
            self.client.deploy({"name": name, "model": {"path": str(self.folder / "tiny-llama")}})

    def machine(self) -> str:
        """Return the name of a machine that joined."""
        self.names += 1
        name = f"machine-{self.names}"
        _, code = self.plane.store.invites.create()
        limits = {"memory_bytes": 2**33, "cpu_threads": 2}
        joined, _ = self.plane.store.contributors.join(code, name=name, host=name, versions={}, limits=limits)
        self.plane.store.contributors.online(joined.id, node_id=name, address="192.0.2.7")
        device = Device("cpu", "some cpu", 2**33, {"float32": 2e11}, 2e10)
        links = [Link(joined.id, "head", 1e-3, 1e8)]
        self.plane.store.contributors.ready(joined.id, capacity=[device], links=links)
        return name

    def run_documented(self, command: Command) -> subprocess.CompletedProcess[str]:
        """Run a command of a page after making the things that it names."""
        words = command.words[1:]
        is_new = words[0] == "serve" or "serve.yaml" in words
        self.deploy(*(() if is_new else ("poet",)))
        filled = [words[0], *(self._fill(words[0], word) for word in words[1:])]
        if words[:1] in ASK or words[:2] in ASK:
            filled.append("--yes")
        if words[:2] == ("artifacts", "get"):
            shutil.rmtree(self.folder / "model", ignore_errors=True)  # another command may have written it
        folder = self.folder / "restored" if words[0] == "restore" else self.plane.settings.data_folder
        return self.run(filled, SHARE_COMPUTE_DATA_FOLDER=str(folder), **dict(command.variables))

    def _fill(self, verb: str, word: str) -> str:  # noqa: PLR0911 - a return for each word
        """Return the value for a word of a page: the name of a new job, machine, key, upload or backup."""
        match word:
            case "JOB" | "JOB..." | "job-k3v7q2ma":
                outcomes: dict[str, Outcome] = {"cancel": None, "resume": "failed"}
                return self.job(outcomes.get(verb, "succeeded"))
            case "MACHINE":
                return self.machine()
            case "KEY":
                return self.plane.store.keys.create("to revoke", [])[0].id
            case "UPLOAD":
                return self.client.upload(self.folder / "corpus.txt").id
            case "NAME" if verb != "keys":
                return "model" if verb == "artifacts" else "poet"
            case "/mnt/safe/monday.db":
                self.names += 1
                file = self.folder / f"backup-{self.names}.db"
                if verb == "restore":
                    back_up(embedded_file(self.plane.settings.resolved_database_url), file)
                return str(file)
        return word

    def run(self, words: Sequence[str], **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command with the server's URL and key."""
        own_variables = {
            "SHARE_COMPUTE_URL": self.plane.url,
            "SHARE_COMPUTE_API_KEY": self.plane.api_key,
            "HOME": str(self.folder),
        }
        environment = {**harmless_environment(), **own_variables, **variables}
        return run_warm(words, environment, folder=self.folder, timeout_s=LIMIT_S)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("working")
    copy_examples(folder)
    subprocess.run([sys.executable, folder / "examples" / "prepare.py"], check=True, timeout=LIMIT_S)
    (folder / "corpus.txt").write_text("The sea is wide. " * 2000)
    for name in ("a.jsonl", "b.jsonl"):
        (folder / name).write_text(json.dumps({"question": "What is the sea?"}) + "\n")
    (folder / "job.yaml").write_text(block_of("docs/job-file.md", data={"files": ["corpus.txt"]}))
    (folder / "serve.yaml").write_text(block_of("docs/serving.md", kind="serve"))
    (folder / "sweep.yaml").write_text(block_of("docs/sweeps.md", kind="sweep"))
    (folder / "batch.yaml").write_text(block_of("docs/serving.md", kind="generate"))
    for name in ("machines.yaml", "cluster.yaml"):
        shutil.copy(folder / "examples" / "topologies" / "lan.yaml", folder / name)
    make_llama(folder / "tiny-llama", window=2048)
    make_encoder(folder / "all-MiniLM-L6-v2")
    root = tmp_path_factory.mktemp("server")
    with open_plane(root, data_roots=(folder,)) as plane, Client(plane.url, plane.api_key) as client:
        world = World(plane, client, folder)
        world.machine()
        yield world


@pytest.mark.more
@pytest.mark.xdist_group("documented commands")
@pytest.mark.parametrize("text", [text for text in COMMANDS if text not in NOT_RUN and text not in IN_ORDER])
def test_a_documented_command_runs(world: World, text: str) -> None:
    command = COMMANDS[text]
    done = world.run_documented(command)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    assert done.stdout.strip(), f"{command}: printed nothing"
    assert "Traceback" not in done.stderr


def test_commands_that_are_not_run_are_in_the_pages() -> None:
    assert set(NOT_RUN) - set(COMMANDS) == set()
    assert all(NOT_RUN.values())
