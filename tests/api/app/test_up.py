"""A real server: one for each data folder, without remains after its end, and with all state after a restart."""

from __future__ import annotations

import json
import os
import signal
import socket
import sqlite3
import subprocess
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.conftest import descendants

from share_compute_actors.machine.processes import is_alive
from share_compute_actors.machine.ray_start import SOUND_S
from share_compute_api.terminal.children import own_command

pytestmark = pytest.mark.slow


def up_fails(*arguments: str) -> tuple[int, dict[str, Any]]:
    command = own_command("up", "--json", *arguments)
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    return done.returncode, json.loads(done.stderr.strip().splitlines()[-1])["error"]


def test_a_second_server_on_one_data_folder(server: Any):
    status, error = up_fails("--port", "0", "--data-folder", str(server.data_folder))
    assert (status, error["code"]) == (4, "conflict")
    assert str(server.command.process.pid) in error["detail"]
    assert server.url in error["detail"]


def test_a_taken_port(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, error = up_fails("--port", str(port), "--data-folder", str(tmp_path))
    assert (status, error["code"]) == (4, "conflict")
    assert str(port) in error["detail"]
    assert not list(tmp_path.glob("server.json"))


def test_a_database_of_a_newer_version(tmp_path: Path):
    with closing(sqlite3.connect(tmp_path / "share-compute.db")) as database:
        database.execute("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL)")
        database.execute("INSERT INTO alembic_version VALUES ('from-the-future')")
        database.commit()
    status, error = up_fails("--port", "0", "--data-folder", str(tmp_path))
    assert (status, error["code"]) == (4, "conflict")
    assert error["hint"]


def test_it_ends_whole_and_finds_its_state_again_even_if_it_was_killed(tmp_path: Path, run_server: Any):
    with run_server(tmp_path) as first:
        family = psutil.Process(first.command.process.pid).children(recursive=True)
        with first.client() as client:
            invite = client.create_invite(label="kept")
        assert (tmp_path / "credentials.json").stat().st_mode & 0o077 == 0
        assert first.command.stop() == 0
    assert not any(is_alive(process) for process in family)
    assert not (tmp_path / "server.json").exists()
    with run_server(tmp_path) as second, second.client() as client:
        assert second.api_key == first.api_key
        assert invite.id in [one.id for one in client.invites()]
        printed = [one.state for one in client.invites() if one.label == "printed at start"]
        assert printed == ["open", "revoked"]
        family = psutil.Process(second.command.process.pid).children(recursive=True)
        os.kill(second.command.process.pid, signal.SIGKILL)
        second.command.process.wait()
    with run_server(tmp_path) as third, third.client() as client:
        assert client.health().status == "ok"
        # Ray's agents outlive a killed raylet for a while; the next server ends them.
        assert not any(is_alive(process) for process in family)


def gcs_of(pid: int) -> psutil.Process | None:
    """Return the GCS of a server's head, if one runs."""
    return next(iter(descendants("gcs_server", pid)), None)


def sound_gcs_of(pid: int) -> psutil.Process | None:
    """Return the GCS of a server's head once it is old enough to be restarted in place."""
    found = gcs_of(pid)
    return found if found is not None and time.time() - found.create_time() > SOUND_S + 1 else None


def another_gcs(pid: int, *than: psutil.Process) -> psutil.Process | None:
    found = gcs_of(pid)
    return found if found not in than else None


def test_a_gcs_that_dies_is_started_again_and_if_it_dies_twice_so_is_the_head(
    tmp_path: Path, run_server: Any, wait_for: Any
):
    """A GCS that dies twice within seconds is not started again in place."""
    with run_server(tmp_path) as running:
        pid = running.command.process.pid
        address = running.command.first_json()["ray_address"]
        first = wait_for(lambda: sound_gcs_of(pid), "a GCS")
        others = [one for one in psutil.Process(pid).children(recursive=True) if one != first]
        command = first.cmdline()
        first.kill()
        second = wait_for(lambda: another_gcs(pid, first), "another GCS")
        assert second.cmdline() == command
        with running.client() as client:
            assert client.status().has_cluster
        assert all(is_alive(one) for one in others)
        assert "started again" not in running.command.text()
        killed: list[psutil.Process] = []

        def has_died_young() -> bool:
            """Kill the newest GCS; return whether it was too young to be restarted in place.

            On a slow machine the second one may have been old enough.
            """
            newest = gcs_of(pid)
            if "it is started again" in running.command.text():
                return True
            if newest is not None and newest not in killed:
                killed.append(newest)
                with suppress(psutil.NoSuchProcess):
                    newest.kill()
            return False

        wait_for(has_died_young, "the news")
        assert killed[0] == second
        again = wait_for(lambda: another_gcs(pid, *killed), "a head")
        with running.client() as client:
            assert client.health().status == "ok"  # it was requested while the server was down
        assert f"--gcs_server_port={address.rpartition(':')[2]}" in again.cmdline()
        assert not any(is_alive(process) for process in (*killed, *others))
        assert running.command.stop() == 0
    assert not is_alive(again)


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("run folder", marks=pytest.mark.thorough),
        pytest.param("head", marks=pytest.mark.thorough),
        "raylet",
    ],
)
def test_an_interrupt_while_it_starts(tmp_path: Path, moment: str, run_command: Any, wait_for: Any):
    def reached() -> list[psutil.Process]:
        found = process.children(recursive=True)
        reached = {
            "run folder": (tmp_path / "lock").exists(),
            "head": bool(found),
            "raylet": bool(descendants("raylet", process.pid)),
        }
        return [process, *found] if reached[moment] else []

    with run_command(tmp_path, "up", "--json", "--port", "0", "--data-folder", str(tmp_path)) as command:
        process = psutil.Process(command.process.pid)
        family = wait_for(reached, moment, 120)
        command.process.send_signal(signal.SIGINT)
        command.process.wait(120)
    assert not any(is_alive(member) for member in family)
    assert not (tmp_path / "server.json").exists()
