"""Raylets get idle agents, which report their ports as Ray's own agents do."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
from ray._private import services
from ray._raylet import (
    DASHBOARD_AGENT_LISTEN_PORT_NAME,
    METRICS_AGENT_PORT_NAME,
    METRICS_EXPORT_PORT_NAME,
    RUNTIME_ENV_AGENT_PORT_NAME,
    persist_port,
)

from share_compute.program import PROGRAM
from share_compute_actors.machine.ray_start import with_idle_agents, with_quick_workers

Wait = Callable[..., object]
NODE = "ab" * 28
RAYLET = (
    "/ray/raylet",
    "--python_worker_command=python worker.py --node_id=other",
    f"--node_id={NODE}",
    "--session_dir={folder}",
    "--runtime_env_agent_port=24005",
    "--head",
    "--dashboard_agent_command=python agent.py",
    "--runtime_env_agent_command=python main.py",
)


def files(folder: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in folder.iterdir() if not file.name.endswith(".new")}


def test_idle_agents_report_their_ports_as_those_of_ray_do(tmp_path: Path, wait_for: Wait) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder in (ours, theirs):
        folder.mkdir()
    for name in (DASHBOARD_AGENT_LISTEN_PORT_NAME, METRICS_AGENT_PORT_NAME, METRICS_EXPORT_PORT_NAME):
        persist_port(str(theirs), NODE, name, -1)
    persist_port(str(theirs), NODE, RUNTIME_ENV_AGENT_PORT_NAME, 24005)

    given = [word.format(folder=ours) for word in RAYLET]
    made = with_idle_agents(given)

    assert [word for word in made if word in given] == given[:-2]
    commands = [word.partition("=")[2] for word in made if word not in given]
    assert len(made) == len(given)
    environment = {**os.environ, "RAY_RAYLET_PID": str(os.getpid())}
    started = [subprocess.Popen(shlex.split(command), env=environment) for command in commands]
    try:
        wait_for(lambda: files(ours) == files(theirs), "the files with the ports")
        assert [agent.poll() for agent in started] == [None, None]
    finally:
        for agent in started:
            agent.kill()
            agent.wait()


def test_workers_are_started_by_the_program_that_collects_garbage_rarely() -> None:
    worker = f"{services.RAY_PATH}/_private/workers/default_worker.py"
    given = [
        "/ray/raylet",
        f"--python_worker_command=python setup_worker.py {worker} --node-ip-address=a",
        "--head",
    ]
    made = with_quick_workers(given)
    assert made[1] == f"--python_worker_command=python setup_worker.py {PROGRAM} {worker} --node-ip-address=a"
    assert [made[0], made[2]] == [given[0], given[2]]


def test_an_idle_agent_ends_after_its_raylet(tmp_path: Path, wait_for: Wait) -> None:
    (command,) = [
        word.partition("=")[2]
        for word in with_idle_agents([word.format(folder=tmp_path) for word in RAYLET])
        if word.startswith("--dashboard_agent_command")
    ]
    parent = (
        "import os, subprocess; os.environ['RAY_RAYLET_PID'] = str(os.getpid()); "
        f"subprocess.Popen({shlex.split(command)!r}).wait()"
    )
    raylet = subprocess.Popen([sys.executable, "-c", parent])
    wait_for(lambda: len(files(tmp_path)) == 3, "the files with the ports")
    (agent,) = psutil.Process(raylet.pid).children()
    raylet.kill()
    raylet.wait()
    wait_for(lambda: not agent.is_running(), "the end of the agent")
