"""Children are ended with exactly the processes that they started, whichever process dies first."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from share_compute.errors import Conflict, Unavailable
from share_compute_actors.machine.confine import END_NOW
from share_compute_actors.machine.processes import ChildProcesses, ProcessIdentity, is_alive, tied
from share_compute_actors.machine.run_folders import (
    abandoned,
    close_run_folder,
    open_run_folder,
    root_folder,
    run_folder,
    sweep,
)

Wait = Callable[..., object]
SLEEPER = "import time; print('up', flush=True); time.sleep(600)"
PARENT = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEPER!r}]).wait()"
DEAF = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def is_gone(process: psutil.Process) -> bool:
    try:
        process.wait(60)
    except psutil.NoSuchProcess:
        return True
    return not process.is_running()


@pytest.fixture
def children(tmp_path: Path):
    made = ChildProcesses(tmp_path / "roster")
    yield made
    made.stop_all(grace_s=0)


def started(children: ChildProcesses, code: str, wait_for: Wait):
    child = children.start("child", python(code), environment={})
    wait_for(lambda: "up" in child.log.read_text(), "the child")
    return child


def test_stop_ends_the_whole_family(children: ChildProcesses, wait_for: Wait):
    child = started(children, PARENT, wait_for)
    family = child.family()
    assert len(family) == 2
    children.stop(child)
    assert all(is_gone(member) for member in family)


def test_a_child_that_ignores_sigterm_is_killed(children: ChildProcesses, wait_for: Wait):
    child = started(children, DEAF, wait_for)
    children.stop(child, grace_s=0.2)
    assert child.exit_code == -END_NOW


def test_a_child_that_ended_by_itself_is_no_trouble(children: ChildProcesses):
    child = children.start("brief", python("raise SystemExit(3)"), environment={})
    assert child.wait(60) == 3
    children.stop(child)
    assert child.exit_code == 3


def test_a_grandchild_whose_parent_died_is_ended_too(children: ChildProcesses, wait_for: Wait):
    child = started(children, PARENT, wait_for)
    grandchild = next(member for member in child.family() if member.pid != child.pid)
    os.kill(child.pid, signal.SIGKILL)
    child.wait(60)
    assert grandchild.is_running()
    children.stop(child)
    assert is_gone(grandchild)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel does this on Linux only")
def test_a_child_dies_with_a_killed_parent(tmp_path: Path, wait_for: Wait):
    code = (
        "import sys, time; from pathlib import Path; from share_compute_actors.machine.processes import ChildProcesses;"
        f"command = [sys.executable, '-c', {SLEEPER!r}];"
        f"child = ChildProcesses(Path({str(tmp_path)!r})).start('child', command, environment={{}});"
        "print(child.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen(python(code), stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        wait_for(lambda: "up" in (tmp_path / "child.log").read_text(), "the child")
        parent.kill()
    assert is_gone(child)


def test_leftovers_are_ended_only_when_they_are_the_same_process(tmp_path: Path):
    left = subprocess.Popen(python(SLEEPER))
    other = subprocess.Popen(python(SLEEPER))
    try:
        real = ProcessIdentity.of(psutil.Process(left.pid))
        mistaken = replace(ProcessIdentity.of(psutil.Process(other.pid)), start=real.start + "1")
        rows = [[identity.pid, identity.start] for identity in (real, mistaken)]
        (tmp_path / "processes.json").write_text(json.dumps(rows))
        assert ChildProcesses(tmp_path).end_leftovers() == 1
        assert left.wait(60) is not None
        assert other.poll() is None
    finally:
        for process in (left, other):
            process.kill()
            process.wait()


def test_a_tied_program_keeps_its_arguments_and_status():
    command = tied([*python("import sys; print(sys.argv[1:]); sys.exit(7)"), "a b", "-c"])
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (7, "['a b', '-c']")


def set_the_clock(monkeypatch: pytest.MonkeyPatch, ahead_s: float) -> None:
    """Start times since the epoch are computed from the clock, so they move with it."""
    real = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: real(process) + ahead_s)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems write the start down when it happens")
def test_a_process_is_known_again_when_the_clock_was_set(monkeypatch: pytest.MonkeyPatch):
    identity = ProcessIdentity.of(psutil.Process())
    set_the_clock(monkeypatch, 5.0)
    assert identity.find() == psutil.Process()


def test_a_list_that_cannot_be_written_ends_nothing(
    children: ChildProcesses, wait_for: Wait, caplog: pytest.LogCaptureFixture
):
    child = started(children, SLEEPER, wait_for)
    (children.folder / "processes.partial").mkdir()
    for _ in range(2):
        children.refresh()
    assert len(caplog.records) == 1
    assert child.exit_code is None
    children.stop(child)
    assert child.exit_code is not None


def test_a_child_that_cannot_be_written_down_is_not_left_running(children: ChildProcesses):
    (children.folder / "processes.partial").mkdir()
    before = psutil.Process().children()
    with pytest.raises(Unavailable, match="cannot be started") as refused:
        children.start("child", python(SLEEPER), environment={})
    assert refused.value.hint
    assert not [child for child in psutil.Process().children() if is_alive(child) and child not in before]


@pytest.fixture
def own_root(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A root of run folders that nobody else uses, with a short path."""
    folder = tempfile.mkdtemp(prefix="sc", dir="/tmp")
    monkeypatch.setenv("TMPDIR", folder)
    monkeypatch.setattr(tempfile, "tempdir", folder)
    yield root_folder()
    shutil.rmtree(folder)


def test_a_run_folder_has_one_owner_and_is_swept_after_it(own_root: Path, monkeypatch: pytest.MonkeyPatch):
    code = (
        "import time; from share_compute_actors.machine.run_folders import open_run_folder;"
        "children = open_run_folder('key'); print(children.folder, flush=True); time.sleep(600)"
    )
    with subprocess.Popen(python(code), stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        folder = Path(owner.stdout.readline().strip())
        assert folder.parent == own_root
        with pytest.raises(Conflict, match=str(owner.pid)):
            open_run_folder("key")
        set_the_clock(monkeypatch, 5.0)
        assert sweep() == 0
        assert folder.exists()
        owner.kill()
    assert [children.folder for children in abandoned()] == [folder]
    assert sweep() == 1
    assert not list(own_root.iterdir())


@pytest.mark.usefixtures("own_root")
def test_who_comes_while_a_folder_is_swept_gets_a_new_one():
    run_folder("key").mkdir()
    with ThreadPoolExecutor(1) as other:
        sweeping = abandoned()
        swept = next(sweeping)
        (swept.folder / "old").touch()
        coming = other.submit(open_run_folder, "key")
        close_run_folder(swept)
        sweeping.close()
        opened = coming.result(60)
    assert [file.name for file in opened.folder.iterdir()] == ["lock"]
    assert sweep() == 0
    close_run_folder(opened)


@pytest.mark.usefixtures("own_root")
def test_a_run_folder_is_used_again_after_its_owner_closed_it():
    for _ in range(2):
        children = open_run_folder("again")
        assert len(str(children.folder)) < 45
        close_run_folder(children)
        assert not children.folder.exists()


def test_a_temporary_folder_that_cannot_be_written_is_said(own_root: Path):
    (own_root / "0" / "lock").mkdir(parents=True)
    run_folder("key").symlink_to(own_root / "0")
    for action in (sweep, lambda: open_run_folder("key")):
        with pytest.raises(Unavailable, match="cannot be written") as refused:
            action()
        assert refused.value.hint
