"""Control planes on loopback, without a Ray cluster, to be attacked."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.api.conftest import LiveServer, Plane
from tests.databases import make_schema
from tests.isolated import shared_processes

from share_compute.scopes import Scope
from share_compute.settings import Settings
from share_compute.store import Store
from share_compute_api.app.app import create_app
from share_compute_api.cluster.cluster import ClusterInfo

CLUSTER = ClusterInfo("192.0.2.1:6379", "cluster-secret", "ab", "127.0.0.1", {})


@contextmanager
def open_plane(
    folder: Path, *, cluster: bool = False, tls: ssl.SSLContext | None = None, **changes: Any
) -> Iterator[Plane]:
    """Run a control plane with these settings inside the block; with ``cluster`` it reports that machines can join."""
    settings = Settings(data_folder=folder / "data", database_url=None, **changes)
    make_schema(settings.resolved_database_url)
    store = Store(settings.resolved_database_url)
    _, api_key = store.keys.create("first", [Scope.admin])
    app = create_app(settings, store, isolated=shared_processes())
    server = LiveServer(app, tls=tls)
    if cluster:  # only now, so that the loops that need Ray are not started
        app.state.context.cluster = SimpleNamespace(info=CLUSTER, is_rotating=False, trouble=None)
    try:
        yield Plane(settings, store, app, server, api_key)
    finally:
        server.stop()
        store.close()
