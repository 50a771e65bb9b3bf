"""A real server on loopback and a real browser."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import uvicorn
from fastapi import FastAPI
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, expect, sync_playwright
from tests.held_ports import HeldPort
from tests.isolated import shared_processes
from tests.programs import missing, require

from share_compute.scopes import Scope
from share_compute.settings import Settings
from share_compute.store import Store, upgrade
from share_compute_api.app.app import create_app, end_streams
from share_compute_api.app.dashboard import STATIC_FOLDER
from share_compute_api.connection.listening import listener_config
from share_compute_api.control.machines.utilization import UtilizationMonitor

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


PATIENCE_MS = 60_000
"""Time limit of expectations and actions. Playwright's defaults, 5 s and 30 s, would fail on a busy machine."""
expect.set_options(timeout=PATIENCE_MS)


class Server:
    """The control plane under uvicorn; stopped and started again, it keeps its port."""

    def __init__(self, settings: Settings, store: Store) -> None:
        self._settings = settings
        self._store = store
        self._held = HeldPort()
        self.port = self._held.number
        self.start()

    def make_app(self) -> FastAPI:
        """Return the application to serve."""
        return create_app(self._settings, self._store, cluster=None, isolated=shared_processes())

    def start(self) -> None:
        self._app = self.make_app()
        config = listener_config(
            self._app, self._settings, host="127.0.0.1", port=self.port, log_level="warning"
        )
        self._server = uvicorn.Server(config)
        self._listener = config.bind_socket()
        self._listener.listen()  # a browser may be faster than the server's thread
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._listener]})
        self._thread.start()

    @property
    def utilization(self) -> UtilizationMonitor:
        """Utilization of the machines, into which tests write what agents report."""
        return self._app.state.context.utilization  # type: ignore[no-any-return]

    def stop(self) -> None:
        end_streams(self._app)
        self._server.should_exit = True
        self._thread.join(timeout=60)
        self._listener.close()
        assert not self._thread.is_alive(), "the server did not stop"


@dataclass(frozen=True)
class Cluster:
    """A running control plane without a cluster; tests write into its store what a supervisor would."""

    server: Server
    key: str
    store: Store
    folder: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"


@contextmanager
def open_cluster(
    folder: Path, make_server: Callable[[Settings, Store], Server] = Server
) -> Iterator[Cluster]:
    """Run a control plane over an empty store inside the block."""
    require_dashboard()
    settings = Settings(data_folder=folder, data_roots=(folder.parent,))
    upgrade(settings.resolved_database_url)
    store = Store(settings.resolved_database_url)
    server = make_server(settings, store)
    try:
        yield Cluster(server, store.keys.create("browser", [Scope.admin])[1], store, folder)
    finally:
        server.stop()
        store.close()


def require_dashboard() -> None:
    """Skip the test if the dashboard was not built."""
    if not (STATIC_FOLDER / "index.html").is_file():
        pytest.skip(missing("dashboard (make dashboard)"))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with open_cluster(tmp_path) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    # Not of session scope: while it is open, no other event loop can run in this thread.
    chromium = require("chromium", "google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield browser
        browser.close()


def copied(page: Page) -> str:
    """Return the text on the clipboard; a page writes it there some time after a click."""
    return str(page.evaluate("navigator.clipboard.readText()"))


class Complaints(list[str]):
    """Errors and warnings in the browser's console."""

    def listen(self, page: Page) -> None:
        page.on("console", self._said)
        page.on("pageerror", lambda failure: self.append(str(failure)))

    def _said(self, message: ConsoleMessage) -> None:
        # Containers and others change this machine's network; the dashboard then repeats its requests.
        if message.type in ("error", "warning") and "net::ERR_NETWORK_CHANGED" not in message.text:
            self.append(message.text)


@pytest.fixture
def complaints() -> Iterator[Complaints]:
    found = Complaints()
    yield found
    assert found == []


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    context = browser.new_context(viewport={"width": 1200, "height": 800})
    context.set_default_timeout(PATIENCE_MS)
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    yield context
    context.close()


@pytest.fixture
def page(cluster: Cluster, context: BrowserContext, complaints: Complaints) -> Page:
    """The dashboard, signed in by the link that ``share-compute up`` prints."""
    page = context.new_page()
    complaints.listen(page)
    page.goto(f"{cluster.url}/#key={cluster.key}")
    page.get_by_role("heading", name="Machines", level=1).wait_for()
    return page
