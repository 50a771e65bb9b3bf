"""The commands of README.md run in their order, on a real server with a real machine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.conftest import RunningServer, harmless_environment, run_contributor, run_server, wait_for
from tests.docs.pages import ASK, NEEDS_THE_HUB, Command, copy_examples, readme_commands
from tests.warm_commands import run_warm

from share_compute.lifecycle.deployment_states import DeploymentState
from share_compute.lifecycle.states import JobState
from share_compute_api.client.client import Client

LIMIT_S = 240
NOT_HERE = {
    "up": "the test starts the server",
    "join": "the test joins a machine",
    "remove": "the other commands need the machine",
    "push": NEEDS_THE_HUB,
}
"""Command -> reason why it is not run here."""


@dataclass
class Reader:
    """A person who runs one command of the page after the other."""

    server: RunningServer
    client: Client
    folder: Path
    """The clone, in which the commands run."""
    job: str = ""
    """The job that ``JOB`` means."""
    ran: list[str] = field(default_factory=list)

    def run(self, *words: str) -> str:
        """Run a command and return what it printed; it finds the server by the server's data folder."""
        if words[0] == "python":
            done = subprocess.run(
                [sys.executable, *words[1:]], cwd=self.folder, capture_output=True, text=True, check=False
            )
        else:
            environment = {
                **harmless_environment(),
                "SHARE_COMPUTE_DATA_FOLDER": str(self.server.data_folder),
            }
            done = run_warm(words[1:], environment, text="Hello\n", folder=self.folder, timeout_s=LIMIT_S)
        assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}{done.stderr}"
        assert "Traceback" not in done.stderr
        return done.stdout

    def submit_changed(self, file: str, *changes: tuple[str, str]) -> str:
        """Submit an example in which these texts are replaced, and return the id of the job."""
        text = (self.folder / file).read_text()
        for old, new in changes:
            assert old in text, f"{file} lacks {old}"
            text = text.replace(old, new)
        changed = Path(file).with_name("changed.yaml")
        (self.folder / changed).write_text(text)
        self.run("share-compute", "submit", str(changed))
        return self.client.jobs().jobs[0].id

    def follow(self, command: Command) -> None:
        """Run a command of the page; first do what its comment or the command itself needs."""
        words = command.words
        before: dict[tuple[str, ...], Callable[[], None]] = {
            ("serve", "JOB"): self._train_a_language_model,
            ("chat", "poet"): self._wait_for_the_deployment,
            ("undeploy", "poet"): self._wait_for_the_answers,
        }
        before.get(words[1:3], lambda: None)()
        if words[1] == "resume":
            self._resume_another(words)
        else:
            answers = ["--yes"] if words[1:2] in ASK else []  # there is no terminal to ask at
            printed = self.run(*(self.job if word == "JOB" else word for word in words), *answers)
            assert printed.strip() or words[0] == "python", f"{command}: printed nothing"
        if words[1] == "submit":
            self.job = self.client.jobs().jobs[0].id
        self.ran.append(" ".join(words[1:]))

    def _train_a_language_model(self) -> None:
        self.job = self.submit_changed(
            "examples/tiny-llama.yaml", ("steps: 200", "steps: 4"), ("warmup_steps: 20", "warmup_steps: 1")
        )
        assert self.client.wait(self.job).state is JobState.succeeded

    def _wait_for_the_deployment(self) -> None:
        wait_for(lambda: self.client.deployment("poet").state is DeploymentState.ready, "the deployment")

    def _wait_for_the_answers(self) -> None:
        assert self.client.wait(self.job).state is JobState.succeeded

    def _resume_another(self, words: tuple[str, ...]) -> None:
        """Resume a job that was cancelled, since the one before succeeded."""
        other = self.submit_changed("examples/digits.yaml", ("steps: 300", "steps: 100000"))
        wait_for(lambda: self.client.job(other).step > 0, "the first step")
        self.run("share-compute", "cancel", other)
        wait_for(lambda: self.client.job(other).state.is_final, "the end of the cancelled job")
        self.run(*(other if word == "JOB" else word for word in words))
        wait_for(lambda: self.client.job(other).attempt == 2, "the second attempt")
        self.run("share-compute", "cancel", other)
        wait_for(lambda: self.client.job(other).state.is_final, "the end of the cancelled job")


@pytest.mark.slow
@pytest.mark.more
@pytest.mark.xdist_group("servers")
def test_the_commands_of_the_readme_run_in_their_order(tmp_path: Path) -> None:
    folder = tmp_path / "clone"
    copy_examples(folder)
    with ExitStack() as stack:
        server = stack.enter_context(run_server(tmp_path / "data", data_root=folder))
        stack.enter_context(run_contributor(server, "ann", "--memory", "2GiB"))
        reader = Reader(server, stack.enter_context(server.client()), folder)
        listed = readme_commands()
        for command in listed:
            if command.words[1] not in NOT_HERE:
                reader.follow(command)
        assert (folder / "so-far").is_dir()
        assert (folder / "cluster.yaml").is_file()
        assert {"chat poet", "undeploy poet", "jobs", "doctor"} <= {*reader.ran}
    assert {*NOT_HERE} <= {command.words[1] for command in listed}
