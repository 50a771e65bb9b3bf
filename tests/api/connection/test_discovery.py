"""The server that a client uses, and the key that it sends there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from share_compute.errors import Unavailable
from share_compute_api.connection.discovery import Target, find_target
from share_compute_api.connection.identity import AgentIdentity, Identities

HERE = "http://127.0.0.1:8700"


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SHARE_COMPUTE_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the data folder of a server that runs on this machine."""
    (tmp_path / "server.json").write_text(f'{{"url": "{HERE}", "pid": 1}}')
    (tmp_path / "credentials.json").write_text('{"api_key": "sck_local"}')
    return tmp_path


def test_the_server_of_this_machine_is_found_with_its_key(folder: Path) -> None:
    assert find_target(data_folder=folder) == Target(HERE, "sck_local")
    assert find_target(HERE + "/", data_folder=folder) == Target(HERE, "sck_local")


def test_its_key_is_shown_to_no_other_server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = "http://192.0.2.1:8700"
    assert find_target(elsewhere, data_folder=folder) == Target(elsewhere, None)
    monkeypatch.setenv("SHARE_COMPUTE_URL", elsewhere)
    assert find_target(data_folder=folder) == Target(elsewhere, None)
    monkeypatch.setenv("SHARE_COMPUTE_API_KEY", "sck_given")
    assert find_target(data_folder=folder) == Target(elsewhere, "sck_given")
    (folder / "server.json").unlink()
    monkeypatch.delenv("SHARE_COMPUTE_API_KEY")
    assert find_target(data_folder=folder) == Target(elsewhere, None)


def test_without_a_server_it_says_how_to_start_one(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="no server runs on this machine"):
        find_target(data_folder=tmp_path)
    Identities(tmp_path).keep(HERE, "ada", AgentIdentity(url=HERE, contributor_id="con-1", key="scc_x"))
    with pytest.raises(Unavailable, match=f"; it joined {HERE}") as caught:
        find_target(data_folder=tmp_path)
    assert "share-compute up" in str(caught.value.hint)
