"""Files that a confined program can reach: the system's programs, its installation and its policy's folders."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import venv
from contextlib import closing
from pathlib import Path

import pytest

from share_compute_actors.machine.confine import Policy, confined, landlock_domain, landlock_version

RESOLVE_UNIX = 1 << 16
"""LANDLOCK_ACCESS_FS_RESOLVE_UNIX of linux/landlock.h."""


CAPABILITIES = ("CapInh", "CapPrm", "CapEff", "CapAmb")
BECOMES = """
import ctypes, json, os, struct, sys
from share_compute_actors.machine import confine
uid, user = json.loads(sys.argv[1])
PR_SET_KEEPCAPS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_CHOWN = 8, 47, 2, 0
libc = ctypes.CDLL(None, use_errno=True)
if uid:
    assert libc.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0) == 0
    os.setresuid(uid, uid, uid)
header = struct.pack("=Ii", 0x20080522, 0)
sets = (ctypes.c_uint32 * 6)()
assert libc.capget(header, sets) == 0
sets[2] |= 1 << CAP_CHOWN  # inheritable, of the capabilities 0 to 31
assert libc.capset(header, sets) == 0, ctypes.get_errno()
assert libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_CHOWN, 0, 0) == 0, ctypes.get_errno()
if sys.argv[2] == "confined":
    confine._become(None if user is None else confine.User("someone", user, user), os.getppid())
os.execvp("cat", ["cat", "/proc/self/status"])
"""
"""Program with an ambient capability that becomes ``cat``, with or without giving up its privileges."""

RESTRICTS = """
import json, os, sys
from share_compute_actors.machine import confine
uid, names_threads = json.loads(sys.argv[1])
confine._prctl(confine._SET_NO_NEW_PRIVS, 1)
confine._become(confine.User("someone", uid, uid) if uid else None, os.getppid())
overwritten = confine._overwritten(confine.Policy(names_threads=names_threads))
confine._restrict(confine._SYSTEM, ["/dev/null"], overwritten)
os.execvp("sh", ["sh", "-c", f"printf named > /proc/$$/{sys.argv[2]}; cat /proc/$$/comm"])
"""
"""Program that becomes a confined shell, which overwrites a file below ``/proc`` and prints its own name."""


def run(code: str, *arguments: str, policy: Policy) -> subprocess.CompletedProcess[str]:
    command = confined([sys.executable, "-c", code, *arguments], policy)
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("version", "is_handled"), [(8, False), (9, True)])
def test_unix_sockets_are_for_folders_that_it_may_change(version: int, is_handled: bool) -> None:
    domain = landlock_domain(version, ["/read"], ["/write"])
    allowed = dict(domain.allowed)
    assert bool(domain.rights & RESOLVE_UNIX) is is_handled
    assert bool(allowed["/write"] & RESOLVE_UNIX) is is_handled
    assert not allowed["/read"] & RESOLVE_UNIX


@pytest.mark.skipif(landlock_version() < 9, reason="this kernel does not restrict Unix sockets with a path")
def test_a_unix_socket_outside_its_folders_is_out_of_reach() -> None:
    code = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, closing(socket.socket(socket.AF_UNIX)) as server:
        path = f"{folder}/socket"
        server.bind(path)
        server.listen()
        assert "PermissionError" in run(code, path, policy=Policy(read=(folder,))).stderr
        done = run(code, path, policy=Policy(write=(folder,)))
        assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not landlock_version(), reason="this kernel has no Landlock")
@pytest.mark.parametrize("path", ["/dev/ptmx", "/dev/pts", "/dev/tty", "/opt", "/home", "/etc/shadow"])
def test_what_no_program_needs_is_out_of_reach(path: str) -> None:
    if not Path(path).exists():
        pytest.skip(f"there is no {path}")
    code = "import os, sys; path = sys.argv[1]; (os.listdir if os.path.isdir(path) else open)(path)"
    assert "PermissionError" in run(code, path, policy=Policy()).stderr


@pytest.mark.skipif(not landlock_version(), reason="this kernel has no Landlock")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a program as another user")
@pytest.mark.parametrize(
    ("uid", "names_threads", "file", "is_written"),
    [
        (65534, True, "comm", True),
        (65534, False, "comm", False),
        (0, True, "comm", False),
        (65534, True, "../../proc/sys/kernel/core_pattern", False),
        (65534, True, "../../proc/1/oom_score_adj", False),
    ],
)
def test_threads_are_named_by_nodes_with_a_gpu_alone(
    uid: int, names_threads: bool, file: str, is_written: bool
) -> None:
    """Names are written as CUDA's driver writes them, below ``/proc``, and nothing else there can be."""
    command = [sys.executable, "-c", RESTRICTS, json.dumps([uid, names_threads]), file]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == ("named\n" if is_written else "sh\n"), done.stderr
    assert ("Permission denied" in done.stderr) is not is_written


@pytest.mark.skipif(not landlock_version(), reason="this kernel has no Landlock")
def test_an_installation_anywhere_is_within_reach(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    python = str(tmp_path / "venv/bin/python")
    (library,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    (library / "installed.py").write_text("print('imported')")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked/file").write_text("read")
    code = "import installed, sys; print(open(sys.argv[1]).read())"
    arguments = confined([python, "-c", code, str(tmp_path / "linked/file")], Policy())
    variables = {"PYTHONPATH": os.pathsep.join(sys.path), "LD_LIBRARY_PATH": str(tmp_path / "linked")}
    done = subprocess.run(
        [python, *arguments[1:]], capture_output=True, text=True, check=False, env=variables
    )
    assert done.stdout.split() == ["imported", "read"], done.stderr
    del variables["LD_LIBRARY_PATH"]
    done = subprocess.run(
        [python, *arguments[1:]], capture_output=True, text=True, check=False, env=variables
    )
    assert "PermissionError" in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives capabilities to another user")
@pytest.mark.parametrize(
    ("uid", "user"), [(65534, None), (0, None), (0, 65534)], ids=["as another user", "as root", "from root"]
)
def test_ambient_capabilities_are_given_up(uid: int, user: int | None) -> None:
    def capabilities(how: str) -> dict[str, int]:
        command = [sys.executable, "-c", BECOMES, json.dumps([uid, user]), how]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        status = dict(line.split(":", 1) for line in done.stdout.splitlines())
        return {name: int(status[name], 16) for name in CAPABILITIES}

    assert all(capabilities("free").values())
    assert capabilities("confined") == dict.fromkeys(CAPABILITIES, 0)
