"""A machine's key stays valid: the machine rejoins without an invite, also as a service that starts at boot."""

from __future__ import annotations

import json
import shutil
import socket
import stat
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.programs import missing

from share_compute.errors import Conflict, NotAuthorized, UserError
from share_compute.store import Store
from share_compute_api.agent.agent import Agent
from share_compute_api.agent.joining import JoinOptions
from share_compute_api.agent.systemd import unit_text
from share_compute_api.cluster.cluster import ClusterInfo
from share_compute_api.connection.identity import Identities
from share_compute_api.schemas.agents import MachineLimits

Run = Callable[..., "subprocess.CompletedProcess[str]"]
LIMITS = MachineLimits(memory_bytes=600 * 2**20, cpu_threads=1, device="cpu")
SYSTEMCTL = """#!/bin/sh
echo "$@" >> {log}
[ "$2" = show ] && printf "%s\\n" LoadState=loaded ActiveState=active SubState=running UnitFileState=enabled
exit 0
"""


@pytest.fixture
def door(plane: Any) -> Iterator[str]:
    """URL of a server whose Ray head is a port that answers nothing."""
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        info = ClusterInfo(address, "cluster-secret", "ab", "127.0.0.1", {})
        plane.app.state.context.cluster = SimpleNamespace(info=info, is_rotating=False, trouble=None)
        yield plane.url


def enrolled(options: JoinOptions, identities: Identities, limits: MachineLimits = LIMITS) -> str:
    """Join as an agent does, without a node; return the contributor's id."""
    identity, access = Agent(options, lambda _view: None, identities).enroll(limits)
    assert access.token == "cluster-secret"
    return identity.contributor_id


def test_a_machine_that_joined_joins_again_by_its_own_key(door: str, store: Store, tmp_path: Path) -> None:
    identities = Identities(tmp_path / "own")
    again = JoinOptions(door, None, "ada")
    with pytest.raises(UserError, match="did not join"):
        enrolled(again, identities)
    first = enrolled(replace(again, invite=store.invites.create()[1]), identities)
    (file,) = (tmp_path / "own").rglob("*.json")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    store.contributors.leave(first)
    more = LIMITS.model_copy(update={"memory_bytes": 700 * 2**20})
    assert enrolled(again, identities, more) == first
    record = store.contributors.get(first)
    assert (record.state, record.limits["memory_bytes"]) == ("joining", 700 * 2**20)
    with identities.in_use(door, "ada"), pytest.raises(Conflict, match="as ada already"):
        Agent(again, lambda _view: None, identities).run()
    store.contributors.remove(first)
    with pytest.raises(NotAuthorized, match="removed this machine"):
        enrolled(again, identities)


def test_a_machine_waits_for_a_head_that_is_being_replaced(
    door: str, plane: Any, store: Store, tmp_path: Path
) -> None:
    context, phases = plane.app.state.context, list[str]()
    cluster, context.cluster = context.cluster, None

    def replace_head(_pause_s: float) -> None:
        context.cluster = cluster

    options = JoinOptions(door, store.invites.create()[1], "ada")
    agent = Agent(options, lambda view: phases.append(view.phase), Identities(tmp_path), sleep=replace_head)
    assert agent.enroll(LIMITS)[1].token == "cluster-secret"
    assert any("; trying again" in phase for phase in phases)


def test_a_machine_that_is_started_again_with_its_invite_uses_it_once(
    door: str, store: Store, tmp_path: Path
) -> None:
    identities = Identities(tmp_path / "own")
    _, code = store.invites.create(uses=2)
    given = JoinOptions(door, code, "ada", device="cpu")
    first = enrolled(given, identities)
    assert enrolled(given, identities) == first
    assert store.invites.check(code).used_by == (first,)
    store.contributors.remove(first)
    with pytest.raises(NotAuthorized, match="removed this machine"):
        enrolled(given, identities)
    assert store.invites.list()[0].used_by == (first,)  # no try to come back used it
    assert enrolled(replace(given, invite=store.invites.create()[1]), identities) != first
    assert code not in next((tmp_path / "own").rglob("*.json")).read_text()


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand-ins for systemd's programs; return the file to which they write their arguments."""
    programs, log = tmp_path / "bin", tmp_path / "systemctl.log"
    programs.mkdir()
    for name in ("systemctl", "loginctl"):
        (programs / name).write_text(SYSTEMCTL.format(log=log))
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=":")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return log


@pytest.mark.slow
def test_a_service_is_installed_shown_and_removed(
    door: str, store: Store, systemd: Path, run: Run, tmp_path: Path
) -> None:
    lent = ("--name", "ada", "--memory", "600MiB", "--device", "cpu", "--cpu-threads", "1")
    lent = (
        *lent,
        "--upload-limit",
        "10Mbit",
        "--download-limit",
        "2MB",
        "--label",
        "site=paris 5",
        "--label",
        "gpu=no",
    )
    _, code = store.invites.create()
    done = run("service", "install", door, *lent, SHARE_COMPUTE_INVITE=code)
    assert done.returncode == 0, done.stderr
    (machine,) = store.contributors.list()
    assert machine.name == "ada"
    assert machine.limits["upload_bytes_per_s"] == 1_250_000
    assert machine.limits["download_bytes_per_s"] == 2_000_000
    assert machine.labels == {"site": "paris 5", "gpu": "no"}
    (unit,) = (tmp_path / "config").rglob("share-compute-ada.service")
    text = unit.read_text()
    assert code not in text
    assert f'"join" "{door}" "--name" "ada" "--device" "cpu" "--memory" "600MiB"' in text
    assert (
        '"--upload-limit" "10Mbit" "--download-limit" "2MB" "--label" "site=paris 5" "--label" "gpu=no"'
        in text
    )
    assert str(tmp_path / "elsewhere") in text
    again = run("service", "install", door, *lent)  # it has its key
    assert again.returncode == 0, again.stderr
    assert len(store.contributors.list()) == 1
    wrong = run("service", "install", door, *lent, "--memory", "much")  # not only in the service's log
    assert (wrong.returncode, "--memory" in wrong.stderr) == (2, True)
    other = run("service", "install", door, "--name", "bob")
    assert other.returncode == 2
    assert "This machine joined before as ada;" in other.stderr
    status = json.loads(run("service", "status", "--name", "ada", "--json").stdout)
    assert (status["unit"], status["ActiveState"]) == ("share-compute-ada.service", "active")
    assert run("service", "uninstall", "--name", "ada").returncode == 0
    assert not unit.exists()
    assert run("service", "uninstall", "--name", "ada").returncode == 3
    said = systemd.read_text().splitlines()
    for words in ("enable share-compute-ada.service", "disable --now share-compute-ada.service"):
        assert f"--user {words}" in said
    assert "enable-linger" in said


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason=missing("systemd-analyze"))
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    arguments = ["join", "https://h:1/a%20b", "--name", "ada", "--address", 'a "b" $c \\ d']
    unit = tmp_path / "share-compute-ada.service"
    folder = tmp_path / "a folder"
    unit.write_text(unit_text(arguments, "https://h:1/a%20b", folder, 60.0))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--user", "--man=no", str(unit)],
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    complaints = [line for line in done.stderr.splitlines() if unit.name in line]
    assert (done.returncode, complaints) == (0, [])


def test_the_unit_is_shown_without_joining(run: Run) -> None:
    shown = run("service", "install", "https://192.0.2.1:8700", "--name", "ada", "--print")
    assert shown.returncode == 0, shown.stderr
    assert "Restart=on-failure" in shown.stdout
    assert "TimeoutStopSec=90" in shown.stdout
