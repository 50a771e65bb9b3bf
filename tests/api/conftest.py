"""A real control plane on loopback, without a Ray cluster, and a real client of it."""

from __future__ import annotations

import os
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from tests.databases import make_schema
from tests.held_ports import HeldPort
from tests.isolated import shared_processes
from tests.warm_commands import run_warm

from share_compute.scopes import Scope
from share_compute.settings import Settings
from share_compute.store import Store
from share_compute_api.app.app import create_app, end_streams
from share_compute_api.client.client import Client
from share_compute_api.connection.listening import listener_config

DEADLINE_S = 240.0
"""Longer than anything takes on a busy machine, so that only a hang fails."""


def wait_until(condition: Callable[[], Any]) -> None:
    """Wait until a condition is true; fail the test if that takes too long."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"nothing happened within {DEADLINE_S} s")
        time.sleep(0.01)


class LiveServer:
    """uvicorn in a thread."""

    def __init__(
        self, app: FastAPI, held: HeldPort | None = None, *, tls: ssl.SSLContext | None = None
    ) -> None:
        self._app = app
        self.held = held or HeldPort()
        self.port = self.held.number
        settings = app.state.context.settings
        config = listener_config(
            app, settings, tls=tls, host="127.0.0.1", port=self.port, log_level="warning"
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        wait_until(lambda: self._server.started or not self._thread.is_alive())
        self.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{self.port}"

    def stop(self) -> None:
        end_streams(self._app)
        self._server.should_exit = True
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()


@dataclass
class Plane:
    """One control plane and the key to it."""

    settings: Settings
    store: Store
    app: FastAPI
    server: LiveServer
    api_key: str

    @property
    def url(self) -> str:
        return self.server.url

    def restart(self, pause: Callable[[], None] = lambda: None) -> None:
        """Stop the server and start another one on the same port and store."""
        self.server.stop()
        pause()
        self.start_again()

    def start_again(self, prepare: Callable[[], None] = lambda: None) -> None:
        """Start another server on the port and store of a stopped one, after ``prepare`` changed its app."""
        self.app = create_app(self.settings, self.store, isolated=shared_processes())
        prepare()
        self.server = LiveServer(self.app, self.server.held)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_folder=tmp_path / "data", database_url=None, data_roots=(tmp_path,))


@pytest.fixture
def store(settings: Settings) -> Iterator[Store]:
    make_schema(settings.resolved_database_url)
    store = Store(settings.resolved_database_url)
    yield store
    store.close()


@pytest.fixture
def plane(settings: Settings, store: Store) -> Iterator[Plane]:
    _, api_key = store.keys.create("first", [Scope.admin])
    app = create_app(settings, store, isolated=shared_processes())
    plane = Plane(settings, store, app, LiveServer(app), api_key)
    yield plane
    plane.server.stop()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plane]:
    """A control plane for all tests of a module that serve models of their own."""
    roots = (tmp_path_factory.getbasetemp(),)
    settings = Settings(data_folder=tmp_path_factory.mktemp("data"), database_url=None, data_roots=roots)
    make_schema(settings.resolved_database_url)
    store = Store(settings.resolved_database_url)
    _, key = store.keys.create("first", [Scope.admin])
    app = create_app(settings, store, isolated=shared_processes())
    plane = Plane(settings, store, app, LiveServer(app), key)
    yield plane
    plane.server.stop()
    store.close()


@pytest.fixture
def http(plane: Plane) -> Iterator[httpx.Client]:
    """Raw HTTP with the API key."""
    headers = {"Authorization": f"Bearer {plane.api_key}"}
    with httpx.Client(base_url=f"{plane.url}/api/v1", headers=headers, timeout=DEADLINE_S) as client:
        yield client


@pytest.fixture
def client(plane: Plane) -> Iterator[Client]:
    with Client(plane.url, plane.api_key, timeout_s=DEADLINE_S) as client:
        yield client


@pytest.fixture
def digits() -> dict[str, Any]:
    """A job that passes every check."""
    layers = [{"type": "linear", "options": {"in_features": 64, "out_features": 10}}]
    return {
        "name": "digits",
        "model": {"layers": layers},
        "data": {"dataset": "digits"},
        "training": {"steps": 3},
    }


@pytest.fixture
def run(plane: Any, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run ``share-compute`` as a user who has the server's URL and key."""
    environment = {
        **os.environ,
        "SHARE_COMPUTE_URL": plane.url,
        "SHARE_COMPUTE_API_KEY": plane.api_key,
        "SHARE_COMPUTE_DATA_FOLDER": str(tmp_path / "elsewhere"),
        "COLUMNS": "200",
    }

    def command(*words: str, text: str = "", **changes: str) -> subprocess.CompletedProcess[str]:
        return run_warm(words, {**environment, **changes}, text=text)

    return command
