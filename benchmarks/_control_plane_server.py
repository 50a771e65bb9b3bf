"""Serve a control plane without a Ray cluster for `control_plane.py`, from the checkout that is on the path.

``python _control_plane_server.py FOLDER CONTRIBUTORS`` prints one JSON line: its port, a key with all rights, and the
id and key of each contributor. With a third argument, a job, all contributors train it together. It uses only functions
that all checkouts have. Keys get scopes if the checkout has any.
"""

from __future__ import annotations

import json
import socket
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import uvicorn

from share_compute.lifecycle.attempt_events import Planned
from share_compute.planning.plan import MemberPlan, Plan, StagePlan
from share_compute.settings import Settings
from share_compute.specification import parse_job
from share_compute.store import Store, upgrade
from share_compute.topology import HEAD, Device, Link

MEMBERS = 10


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


def train(store: Store, job: dict[str, Any], contributors: list[str]) -> None:
    """Lease all contributors to a job with a plan of stages of ten members each.

    Args:
        store: the server's store.
        job: the job as a submitter writes it.
        contributors: ids of the contributors.
    """
    places = [(HEAD, 0.01, 1e8), *((other, 0.02, 1e7) for other in contributors[:10])]
    for contributor in contributors:
        store.contributors.online(contributor, node_id="ab", address="192.0.2.7")
        capacity = [Device("cpu", "processor", 2**34, {"float32": 1e11})]
        store.contributors.ready(
            contributor, capacity=capacity, links=[Link(contributor, *place) for place in places]
        )
    submitted = store.jobs.create(parse_job(job))
    store.jobs.begin(submitted.id, contributors)
    reason = "it holds these layers because they fit into its memory, and no other machine is as near to its neighbours"
    stages = []
    for start, first in enumerate(range(0, len(contributors), MEMBERS)):
        members = tuple(
            MemberPlan(
                contributor_id=one, name=one, microbatches=(number,), memory_bytes=2**30, reason=reason
            )
            for number, one in enumerate(contributors[first : first + MEMBERS])
        )
        stages.append(StagePlan(start=start, stop=start + 1, parameters=1000, members=members))
    plan = Plan(
        epoch=0,
        strategy="auto",
        num_layers=len(stages),
        parameters=1000 * len(stages),
        stages=tuple(stages),
        microbatches=MEMBERS,
    )
    store.progress.record(submitted.id, 1, [Planned(plan=plan)])


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
    if len(sys.argv) > 3:
        train(store, json.loads(sys.argv[3]), [contributor for contributor, _ in joined])
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    # Otherwise both sides wait 40 ms for delayed acknowledgements of the client (Nagle's algorithm).
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    server = uvicorn.Server(server_config(settings, app))
    print(json.dumps({"port": listener.getsockname()[1], "api_key": key, "contributors": joined}), flush=True)
    server.run(sockets=[listener])


if __name__ == "__main__":
    main()
