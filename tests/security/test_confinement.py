"""What a confined program reaches: the system's programs, its installation and the folders of its policy."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from contextlib import closing

import pytest

from share_compute_actors.machine import confine
from share_compute_actors.machine.confine import Policy, confined, landlock_version

RESOLVE_UNIX = 1 << 16
"""LANDLOCK_ACCESS_FS_RESOLVE_UNIX of linux/landlock.h."""


def run(code: str, *arguments: str, policy: Policy) -> subprocess.CompletedProcess[str]:
    command = confined([sys.executable, "-c", code, *arguments], policy)
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("version", "is_handled"), [(8, False), (9, True)])
def test_unix_sockets_are_for_folders_that_it_may_change(
    monkeypatch: pytest.MonkeyPatch, version: int, is_handled: bool
) -> None:
    entered: list[tuple[int, dict[str, int]]] = []

    def enter(rights: int, scopes: int, allowed: Iterable[tuple[str, int]]) -> None:
        del scopes
        entered.append((rights, dict(allowed)))

    monkeypatch.setattr(confine, "landlock_version", lambda: version)
    monkeypatch.setattr(confine, "_enter_domain", enter)
    confine._restrict(["/read"], ["/write"])
    ((rights, allowed),) = entered
    assert bool(rights & RESOLVE_UNIX) is is_handled
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
