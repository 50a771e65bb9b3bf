"""The demonstration: the whole path, and nothing left of it."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from share_compute.specification import parse_job
from share_compute_actors.processes import is_alive
from share_compute_api.children import own_command
from share_compute_api.demonstration.corpus import gather_corpus
from share_compute_api.demonstration.job import write_job


def test_its_text_is_real_and_the_same_each_time(tmp_path: Path):
    sizes = [gather_corpus(tmp_path / name, enough_bytes=200_000) for name in ("first", "second")]
    assert sizes[0] >= 200_000
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()


def test_its_job_is_valid(tmp_path: Path):
    file = write_job(tmp_path, tmp_path / "corpus.txt", pools=3, steps=70)
    job = parse_job(file.read_text())
    assert job.parallelism.pools == 3
    assert job.training.steps == 70


@pytest.mark.slow
def test_the_whole_path():
    command = own_command("demo", "--exit", "--json", "--contributors", "2", "--steps", "12")
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = done.stdout.splitlines()
    result = json.loads(line)
    assert len(result["plan"]["pools"]) == 2
    assert result["loss_last"] < result["loss_first"]
    model = Path(result["artifact"])
    assert (model / "config.json").exists()
    shutil.rmtree(model.parent)


@pytest.mark.slow
def test_an_interrupt_leaves_nothing(tmp_path: Path, run_command: Any, wait_for: Any):
    with run_command(tmp_path, "demo", "--exit", "--contributors", "2") as command:
        demo = psutil.Process(command.process.pid)

        def machines() -> list[psutil.Process]:
            family = demo.children(recursive=True)
            return family if sum(child.name() == "raylet" for child in family) > 1 else []

        family = wait_for(machines, "a machine that joins", 60)
        command.process.send_signal(signal.SIGINT)
        assert command.process.wait(60) == 130
    assert not any(is_alive(member) for member in family)
