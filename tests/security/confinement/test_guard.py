"""No process that came from a confined program outlives the program, its guard's end or the process that started it."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.conftest import wait_for

from share_compute_actors.machine import confine
from share_compute_actors.machine.confine import Policy, confined, landlock_version
from share_compute_actors.machine.processes import Child, ChildProcesses

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="guards exist on Linux only")

PROGRAM = """
import fcntl, os, signal, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
held = open(folder / "held", "w")
fcntl.flock(held, fcntl.LOCK_EX)  # until all processes that inherit the open file have ended
def detach():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            return True
        os._exit(0)
    os.wait()
    return False
def ignore_signals():
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
        signal.signal(number, signal.SIG_IGN)
def wait(name):
    while not (folder / name).exists():
        time.sleep(0.01)
"""
SLEEPS = """
if detach():
    ignore_signals()
    (folder / "detached").touch()
    wait("never")
wait("end")
sys.exit(7)
"""
DEAF = f"ignore_signals(){SLEEPS}"
CHAIN = """
if detach():
    (folder / "detached").touch()
    until_s = time.monotonic() + 60  # a chain that escaped would run for ever
    while time.monotonic() < until_s and not os.fork():  # each process starts the next one and ends
        pass
    os._exit(0)
wait("end")
"""
STARTER = """
import json, sys
from pathlib import Path
from share_compute_actors.machine.processes import ChildProcesses
ChildProcesses(Path(sys.argv[1])).start("program", json.loads(sys.argv[2]), environment={}).wait()
"""
OLDER = """
import sys
from share_compute_actors.machine import confine
confine.landlock_version = lambda: {version}
confine.main(sys.argv[1:])
"""
Command = Callable[[str], list[str]]


@pytest.fixture(params=["this kernel", "5", "0"])
def command(request: pytest.FixtureRequest, tmp_path: Path) -> Command:
    """Return a function that confines a program, with the Landlock of this kernel or of an older one."""

    def make(code: str) -> list[str]:
        program = [sys.executable, "-c", PROGRAM + code, str(tmp_path)]
        given = confined(program, Policy(write=(str(tmp_path),)))
        if request.param == "this kernel":
            return given
        if int(request.param) > landlock_version():
            pytest.skip("this kernel's Landlock is older")
        arguments = given[given.index(confine.__name__) + 1 :]
        return [sys.executable, "-P", "-c", OLDER.format(version=request.param), *arguments]

    return make


@pytest.fixture
def children(tmp_path: Path) -> Iterator[ChildProcesses]:
    made = ChildProcesses(tmp_path / "roster")
    yield made
    made.stop_all(grace_s=0)


def start(children: ChildProcesses, command: list[str], folder: Path) -> Child:
    """Start a program, and return when it has detached a process."""
    child = children.start("program", command, environment={})
    wait_for((folder / "detached").exists, "a detached process")
    assert is_left(folder)
    return child


def is_left(folder: Path) -> bool:
    """Return whether a process that came from the program still runs."""
    with (folder / "held").open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@pytest.mark.parametrize("code", [SLEEPS, DEAF, CHAIN], ids=["sleeps", "deaf", "chain"])
def test_stop_ends_a_detached_process(
    tmp_path: Path, children: ChildProcesses, command: Command, code: str
) -> None:
    child = start(children, command(code), tmp_path)
    children.stop(child, grace_s=0.2)
    assert not is_left(tmp_path)


def test_kill_all_ends_a_detached_process(tmp_path: Path, children: ChildProcesses, command: Command) -> None:
    start(children, command(DEAF), tmp_path)
    children.kill_all()
    assert not is_left(tmp_path)


def test_the_end_of_a_program_ends_a_detached_process(
    tmp_path: Path, children: ChildProcesses, command: Command
) -> None:
    child = start(children, command(SLEEPS), tmp_path)
    (tmp_path / "end").touch()
    assert child.wait(60) == 7
    assert not is_left(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_guard_ends_with_the_signal_that_ended_its_program(
    children: ChildProcesses, command: Command, number: signal.Signals
) -> None:
    child = children.start("program", command(f"os.kill(os.getpid(), {int(number)})"), environment={})
    assert child.wait(60) == -number


def test_the_death_of_the_starter_ends_a_detached_process(tmp_path: Path, command: Command) -> None:
    arguments = [str(tmp_path / "roster"), json.dumps(command(DEAF))]
    with subprocess.Popen([sys.executable, "-c", STARTER, *arguments]) as starter:
        wait_for((tmp_path / "detached").exists, "a detached process")
        starter.kill()
    wait_for(lambda: not is_left(tmp_path), "the end of the detached process")


@pytest.mark.slow
def test_stop_ends_a_detached_process_whose_guard_was_killed(
    tmp_path: Path, children: ChildProcesses, command: Command
) -> None:
    child = start(children, command(DEAF), tmp_path)
    children.refresh()
    os.kill(child.pid, signal.SIGKILL)
    child.wait(60)
    children.stop(child)
    assert not is_left(tmp_path)


@pytest.mark.skipif(landlock_version() < 6, reason="this kernel lets signals out of a Landlock domain")
def test_a_program_cannot_signal_its_guard(children: ChildProcesses) -> None:
    code = "import os; os.kill(os.getppid(), 9)"
    child = children.start("program", confined([sys.executable, "-c", code], Policy()), environment={})
    assert child.wait(60) == 1
    assert "PermissionError" in child.log_tail()


def test_a_program_links_across_folders(tmp_path: Path, children: ChildProcesses, command: Command) -> None:
    (tmp_path / "inner").mkdir()
    child = children.start(
        "program", command("os.rename(folder / 'held', folder / 'inner/held')"), environment={}
    )
    assert child.wait(60) == 0, child.log_tail()
