"""A contributor comes online with its own node only, and lends no more than the node has."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.testclient import TestClient
from tests.databases import make_schema

from share_compute.errors import Conflict
from share_compute.settings import Settings
from share_compute.store import ContributorRecord, Store
from share_compute_api.app.app import create_app
from share_compute_api.cluster.calls import NodeFacts
from share_compute_api.cluster.cluster import ClusterInfo
from share_compute_api.control import LABEL
from share_compute_api.control.machines.machines import Machine
from share_compute_api.control.machines.measuring import Measurements
from share_compute_api.control.machines.nodes import check_node
from share_compute_api.routes.machines import agents
from share_compute_api.server.context import Context

HEAD = "aa"
NODE = "cd"
ADDRESS = "192.0.2.7"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    settings = Settings(data_folder=tmp_path, database_url=None)
    make_schema(settings.resolved_database_url)
    store = Store(settings.resolved_database_url)
    yield store
    store.close()


def joined(store: Store, name: str = "ada") -> tuple[ContributorRecord, str]:
    _, code = store.invites.create()
    limits = {"memory_bytes": 1 << 30, "cpu_threads": 2}
    return store.contributors.join(code, name=name, host="h", versions={}, limits=limits)


def own(contributor: ContributorRecord, **changes: Any) -> NodeFacts:
    facts = {
        "node_id": NODE,
        "address": ADDRESS,
        "port": 8000,
        "labels": {LABEL: contributor.id},
        "resources": {"memory": float(1 << 30), "CPU": 2.0},
        "is_alive": True,
    }
    return NodeFacts(**{**facts, **changes})


def test_a_machine_that_lends_a_gpu_has_it_in_the_books_of_ray(store: Store) -> None:
    _, code = store.invites.create()
    limits = {"memory_bytes": 1 << 30, "cpu_threads": 2, "device": "cuda", "gpus": ["GPU-aa"]}
    ada, _ = store.contributors.join(code, name="ada", host="h", versions={}, limits=limits)
    resources = own(ada).resources
    with pytest.raises(Conflict, match="it lends a GPU, but its node has none"):
        check_node(ada, NODE, ADDRESS, [own(ada)], head_node_id=HEAD)
    with_gpu = own(ada, resources={**resources, "GPU": 1.0})
    assert check_node(ada, NODE, ADDRESS, [with_gpu], head_node_id=HEAD)
    several = ada.model_copy(update={"limits": {**limits, "devices": 2}})
    with pytest.raises(Conflict, match="it lends 2 GPUs, but its node has 1"):
        check_node(several, NODE, ADDRESS, [with_gpu], head_node_id=HEAD)


def cluster(nodes: Callable[[], Awaitable[list[NodeFacts]]]) -> Any:
    """Return the part of a cluster that a machine which comes online uses."""
    info = ClusterInfo("192.0.2.1:6379", "cluster-secret", HEAD, "127.0.0.1")
    return SimpleNamespace(info=info, nodes=nodes)


async def started(contributor_id: str, node_id: str | None) -> Machine:
    raise AssertionError(f"{contributor_id} on {node_id} is to be measured")


def test_a_node_is_taken_for_what_the_head_says(store: Store) -> None:
    ada, _ = joined(store)

    def check(*nodes: NodeFacts, node_id: str = NODE, address: str = ADDRESS) -> bool:
        return check_node(ada, node_id, address, nodes, head_node_id=HEAD)

    assert check(own(ada))
    assert check(own(ada, address="2001:DB8::7"), address="2001:db8:0::7")
    assert not check()
    assert not check(own(ada, is_alive=False))
    lies: list[tuple[str, NodeFacts, dict[str, str]]] = [
        ("not the one", own(ada, node_id=HEAD, labels={}), {"node_id": HEAD}),
        ("not the one", own(ada, node_id=HEAD), {"node_id": HEAD}),
        ("not the one", own(ada, labels={}), {}),
        ("not the one", own(ada, labels={LABEL: "c-other"}), {}),
        ("not the one", own(ada, labels={LABEL: "c-other"}, is_alive=False), {}),
        ("the address 192.0.2.7, not 192.0.2.8", own(ada), {"address": "192.0.2.8"}),
        ("memory", own(ada, resources={"memory": float(1 << 29), "CPU": 2.0}), {}),
        ("2 threads, but its node has 1", own(ada, resources={"memory": float(1 << 30), "CPU": 1.0}), {}),
    ]
    for problem, node, claim in lies:
        with pytest.raises(Conflict, match=problem):
            check(node, **claim)


def test_a_lie_about_the_node_changes_nothing(store: Store, tmp_path: Path) -> None:
    app = create_app(Settings(data_folder=tmp_path, database_url=None), store)
    context: Context = app.state.context
    begun: list[tuple[str, bool]] = []

    class Watched(Measurements):
        def begin(self, contributor_id: str, *, keeps_figures: bool = False) -> None:
            begun.append((contributor_id, keeps_figures))

    context.measurements = Watched(store, started)
    (ada, key), (grace, _) = joined(store), joined(store, "grace")
    tables = iter(([], [own(ada)]))  # it appears at the second poll

    async def nodes() -> list[NodeFacts]:
        head = own(ada, node_id=HEAD, address="192.0.2.1", labels={})
        others = own(grace, node_id="ee", address="192.0.2.8")
        return [head, others, *next(tables, [own(ada)])]

    context.cluster = cluster(nodes)
    agent = TestClient(app, headers={"Authorization": f"Bearer {key}"})  # without the loops that need Ray
    url = f"/api/v1/contributors/{ada.id}/online"
    for node_id, address in ((HEAD, ADDRESS), (HEAD, "192.0.2.1"), ("ee", ADDRESS), ("ee", "192.0.2.8")):
        refused = agent.post(url, json={"node_id": node_id, "address": address})
        assert refused.status_code == 409
        assert refused.json()["hint"]
    tables = iter(())
    assert agent.post(url, json={"node_id": NODE, "address": "192.0.2.1"}).status_code == 409
    assert store.contributors.get(ada.id) == ada.model_copy(update={"node_id": None})
    assert begun == []
    tables = iter(([], [own(ada)]))
    assert agent.post(url, json={"node_id": NODE, "address": ADDRESS}).json()["state"] == "probing"
    assert begun == [(ada.id, False)]
    # The figures of a node hold for that node, until the agent is restarted, and the node with it.
    store.contributors.ready(ada.id, capacity=[], links=[])
    for versions, keeps_figures in ((None, True), ({"ray": "2.60.0"}, False)):
        store.contributors.rejoin(ada.id, versions=versions)
        tables = iter(())
        assert agent.post(url, json={"node_id": NODE, "address": ADDRESS}).status_code == 200
        assert begun.pop() == (ada.id, keeps_figures)


def test_a_node_that_the_head_does_not_know_is_refused_after_a_while(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents, "NODE_PATIENCE_S", 0.0)
    app = create_app(Settings(data_folder=tmp_path, database_url=None), store)
    context: Context = app.state.context
    context.measurements = Measurements(store, started)

    async def nodes() -> list[NodeFacts]:
        return []

    context.cluster = cluster(nodes)
    ada, key = joined(store)
    agent = TestClient(app, headers={"Authorization": f"Bearer {key}"})  # without the loops that need Ray
    claim = {"node_id": NODE, "address": ADDRESS}
    refused = agent.post(f"/api/v1/contributors/{ada.id}/online", json=claim)
    assert (refused.status_code, "knows no live node" in refused.text) == (503, True)
    assert refused.json()["type"].endswith("contributor-lost")  # its agent comes back
