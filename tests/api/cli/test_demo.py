"""The demonstration runs the whole path, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.conftest import descendants

from share_compute.specification import parse_job
from share_compute_actors.machine.processes import is_alive
from share_compute_api.demonstration.corpus import gather_corpus
from share_compute_api.demonstration.job import write_job
from share_compute_api.terminal.children import own_command


def test_its_text_is_real_and_the_same_each_time(tmp_path: Path):
    sizes = [gather_corpus(tmp_path / name, enough_bytes=200_000) for name in ("first", "second")]
    assert sizes[0] >= 200_000
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()


def test_its_job_is_valid(tmp_path: Path):
    file = write_job(tmp_path, tmp_path / "corpus.txt", stages=3, steps=70)
    job = parse_job(file.read_text())
    assert job.parallelism.stages == 3
    assert job.training.steps == 70


@pytest.fixture
def temporary_folder() -> Iterator[Path]:
    """A temporary folder for one demonstration alone: all its processes have this path in their arguments."""
    folder = Path(tempfile.mkdtemp(prefix="sc", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


def traces(folder: Path) -> list[str]:
    """Return the remains of a demonstration: processes, and run folders."""
    found = [str(path) for path in folder.glob("sc-*/*")]
    for process in psutil.process_iter():
        try:
            about = [*process.cmdline(), *process.environ().values()]
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if is_alive(process) and any(str(folder) in text for text in about):
            found.append(f"{process.pid} {process.name()}")
    return found


def require_learned(result: Any, said: str) -> None:
    """Check the result of a demonstration, and the two stages with which it began; a busy machine may be lost later."""
    assert result["prediction_error"] > -1
    (first, one), (second, other), *_ = re.findall(r"layers? (\d+)(?:-\d+)?  (machine-\d)", said)
    assert first == "0" != second
    assert one != other
    assert result["loss_last"] < result["loss_first"]
    assert (Path(result["artifact"]) / "config.json").exists()


@pytest.mark.slow
def test_the_whole_path(temporary_folder: Path, tmp_path: Path, run_command: Any, wait_for: Any):
    # The demonstration ignores variables that the user exported for another server.
    exported = {"SHARE_COMPUTE_API_KEY": "another", "SHARE_COMPUTE_URL": "http://127.0.0.1:9"}
    variables = {**exported, "TMPDIR": str(temporary_folder)}
    wanted = ("--json", "--contributors", "2", "--steps", "12")
    with run_command(tmp_path, "demo", *wanted, **variables) as command:

        def is_standing() -> bool:
            assert command.process.poll() is None, command.text()[-2000:]
            return "The server stays up" in command.text()

        wait_for(is_standing, "the result", 600)
        assert "  export SHARE_COMPUTE_DATA_FOLDER=" in command.text()
        (result,) = command.json_lines()
        require_learned(result, command.text())
        assert traces(temporary_folder)
        command.process.send_signal(signal.SIGINT)
        assert command.process.wait(150) == 0
    assert not traces(temporary_folder)


@pytest.mark.slow
@pytest.mark.thorough
def test_it_ends_by_itself(temporary_folder: Path):
    done = subprocess.run(
        own_command("demo", "--exit", "--json", "--contributors", "2", "--steps", "12"),
        env={**os.environ, "TMPDIR": str(temporary_folder)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = done.stdout.splitlines()
    require_learned(json.loads(line), done.stderr)
    assert not traces(temporary_folder)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("moment", ["the server starts", "machines join", "training"])
def test_an_interrupt_leaves_nothing(
    moment: str, temporary_folder: Path, tmp_path: Path, run_command: Any, wait_for: Any
):
    variables = {"TMPDIR": str(temporary_folder)}
    with run_command(tmp_path, "demo", "--exit", "--contributors", "2", **variables) as command:
        demo = psutil.Process(command.process.pid)

        def is_reached() -> bool:
            return {
                "the server starts": bool(descendants("gcs_server", demo.pid)),
                "machines join": len(descendants("raylet", demo.pid)) > 1,
                "training": "layers 0-" in command.text(),
            }[moment]

        wait_for(is_reached, moment, 300)
        assert traces(temporary_folder)
        command.process.send_signal(signal.SIGINT)
        assert command.process.wait(150) == 130
    assert not traces(temporary_folder)
