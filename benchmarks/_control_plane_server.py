"""Serve a control plane without a Ray cluster for `control_plane.py`, from the checkout that is on the path.

``python _control_plane_server.py FOLDER CONTRIBUTORS`` prints one JSON line: its port, a key with all rights, and the
id and key of each contributor. It uses only functions that all checkouts have. Keys get scopes if the checkout has any.
"""

from __future__ import annotations

import json
import socket
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import uvicorn

from share_compute.settings import Settings
from share_compute.store import Store, upgrade


def first_module(*names: str) -> Any:
    """Return the first of these modules that this checkout has: modules move between checkouts.

    Raises:
        ImportError: there is none.
    """
    for name in names:
        try:
            return import_module(name)
        except ImportError:
            continue
    raise ImportError(f"this checkout has none of {', '.join(names)}")


def key_for_everything(store: Any) -> str:
    """Return an API key with all scopes that this checkout knows."""
    try:
        scopes = list(import_module("share_compute.scopes").Scope)
    except ImportError:
        key: str = store.keys.create("benchmark")[1]
        return key
    scoped: str = store.keys.create("benchmark", scopes)[1]
    return scoped


def server_config(settings: Settings, app: Any) -> uvicorn.Config:
    """Return the server configuration of this checkout: with its limits of connections, if it has any."""
    try:
        listening = first_module("share_compute_api.connection.listening", "share_compute_api.listening")
    except ImportError:
        return uvicorn.Config(app, log_level="critical")
    config: uvicorn.Config = listening.listener_config(app, settings, log_level="critical")
    return config


def main() -> None:
    """Serve until this process is ended."""
    folder, contributors = Path(sys.argv[1]), int(sys.argv[2])
    settings = Settings(data_folder=folder, database_url=None)
    folder.mkdir(parents=True, exist_ok=True)
    upgrade(settings.resolved_database_url)
    store = Store(settings.resolved_database_url)
    if hasattr(store, "hold"):
        store.hold()
    app = first_module("share_compute_api.app.app", "share_compute_api.app").create_app(settings, store)
    key = key_for_everything(store)
    joined = []
    for number in range(contributors):
        _, code = store.invites.create()
        record, own = store.contributors.join(
            code, name=f"machine-{number}", host="host", versions={}, limits={}
        )
        joined.append((record.id, own))
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    # Otherwise both sides wait 40 ms for delayed acknowledgements of the client (Nagle's algorithm).
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    server = uvicorn.Server(server_config(settings, app))
    print(json.dumps({"port": listener.getsockname()[1], "api_key": key, "contributors": joined}), flush=True)
    server.run(sockets=[listener])


if __name__ == "__main__":
    main()
