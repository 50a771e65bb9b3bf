"""Checks of a machine before it joins."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from share_compute.errors import Unavailable, UserError
from share_compute_actors.machine import preflight
from share_compute_actors.machine.preflight import (
    Gpu,
    check_head,
    check_listening,
    check_resolver,
    check_walls,
    route_address,
    visible_gpus,
)
from share_compute_actors.machine.sizes import parse_bytes, parse_rate

GPUS = [Gpu("GPU-aa1", "first"), Gpu("GPU-bb2", "second")]


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        (None, ("first", "second")),
        ("", ()),
        ("-1", ()),
        ("1", ("second",)),
        ("1,0", ("second", "first")),
        ("0,7,1", ("first",)),
        ("GPU-bb", ("second",)),
        ("MIG-1/2/3", ("MIG-1/2/3",)),
    ],
)
def test_cuda_visible_devices_limits_what_is_lent(wanted: str | None, names: tuple[str, ...]):
    assert tuple(gpu.name for gpu in visible_gpus(GPUS, wanted)) == names
    assert set(visible_gpus(GPUS, wanted)) <= {*GPUS, Gpu("MIG-1/2/3", "MIG-1/2/3")}


def test_a_head_that_is_blocked_is_found_before_the_invite_is_used():
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        assert check_head(address).state == "ok"
    blocked = check_head(address)
    assert blocked.state == "fail"
    assert address in blocked.text
    assert blocked.hint


def test_an_address_of_another_machine_is_refused():
    assert check_listening(route_address("127.0.0.1")).state == "ok"
    assert check_listening("192.0.2.1").state == "fail"


def test_a_resolver_that_does_not_answer_is_found(monkeypatch: pytest.MonkeyPatch):
    ended = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", lambda *_: ended.wait())
        found = check_resolver()
    ended.set()
    assert found.state == "warn"
    assert found.hint


def test_a_resolver_that_knows_no_such_name_is_fine(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "unknown")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert check_resolver().state == "ok"


@pytest.mark.parametrize(("text", "count"), [("4GiB", 2**32), ("500 MB", 500_000_000), ("2k", 2048)])
def test_sizes_are_read(text: str, count: int):
    assert parse_bytes(text) == count


def test_a_size_without_a_unit_suggests_one() -> None:
    with pytest.raises(UserError, match="no unit") as caught:
        parse_bytes(" 8 ")
    assert caught.value.hint == "did you mean 8GiB?"
    assert parse_bytes("1073741824") == 2**30


@pytest.mark.parametrize("text", ["", "GiB", "0", "many", "9" * 30])
def test_what_is_no_size_is_refused(text: str):
    with pytest.raises(UserError):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("10Mbit", 1_250_000),
        ("10 Mbit/s", 1_250_000),
        ("10Mbps", 1_250_000),
        ("64kbit", 8_000),
        ("2MB", 2_000_000),
        ("2 MB/s", 2_000_000),
        ("1MiBps", 2**20),
        ("1.5Gbit", 187_500_000),
    ],
)
def test_rates_are_read(text: str, bytes_per_s: int):
    assert parse_rate(text) == bytes_per_s


@pytest.mark.parametrize(
    "text", ["", "10", "10M", "10Mb", "Mbit", "0Mbit", "-1Mbit", "1bit", "1.2.3MB", "9" * 30 + "B"]
)
def test_ambiguous_and_impossible_rates_are_refused(text: str):
    with pytest.raises(UserError):
        parse_rate(text)


def test_a_system_that_confines_nothing_is_reported(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(preflight, "landlock_version", lambda: 0)
    found = check_walls()
    assert (found.state, "seccomp" in (found.hint or "")) == ("warn", True)
    monkeypatch.setattr(preflight, "landlock_version", lambda: 1)
    assert check_walls().state == "ok"


@pytest.mark.parametrize(
    ("uid", "landlock", "gpus", "state"),
    [(0, 7, GPUS, "warn"), (1000, 7, GPUS, "ok"), (0, 0, GPUS, "ok"), (0, 7, [], "ok")],
)
def test_root_lends_no_gpu_where_its_node_would_be_confined(
    monkeypatch: pytest.MonkeyPatch, uid: int, landlock: int, gpus: list[Gpu], state: str
):
    monkeypatch.setattr(preflight, "landlock_version", lambda: landlock)
    monkeypatch.setattr(preflight, "find_gpus", lambda: tuple(gpus))
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    found = preflight.check_devices()
    assert (found.state, "a GPU cannot be lent by root" in found.text) == (state, state == "warn")
    if state == "warn":
        with pytest.raises(Unavailable, match="a GPU cannot be lent by root"):
            preflight.require_gpu_access(gpus)
    else:
        preflight.require_gpu_access(gpus)


def test_a_machine_without_a_compiler_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    found = preflight.check_compiler()
    assert (found.state, found.hint is not None) == ("warn", True)
    assert "compute eagerly" in found.text


def test_a_compiler_that_does_not_work_is_reported_with_its_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\necho 'fatal error: Python.h: No such file' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    found = preflight.check_compiler()
    assert (found.state, "Python.h" in found.text) == ("warn", True)


def test_a_compiler_that_works_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    works = tmp_path / "g++"
    works.write_text("#!/bin/sh\ncat > /dev/null\n")
    works.chmod(0o755)
    monkeypatch.setenv("CXX", str(works))
    assert preflight.check_compiler().state == "ok"
