"""Keys can use the routes of their scopes and no others, on every route that the server has."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from fastapi import FastAPI
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given
from hypothesis import settings as options
from sqlalchemy import func, select
from tests.databases import make_schema, reading
from tests.isolated import shared_processes

from share_compute.errors import Conflict
from share_compute.scopes import GRANTABLE, Scope
from share_compute.settings import Settings
from share_compute.store import Store
from share_compute.store.database.tables import Base
from share_compute_api.app.app import create_app
from share_compute_api.server.auth import OPEN, check_routes, declared_scopes

R, S, A, C, AGENT = Scope.read, Scope.submit, Scope.admin, Scope.chat, Scope.contribute
TABLE: dict[str, Scope | None] = {
    "getHealth": None,
    "getJobSchema": None,
    "signIn": None,
    "getSession": None,
    "signOut": None,
    "preflight": None,
    "join": None,
    "dial": AGENT,
    "online": AGENT,
    "heartbeat": AGENT,
    "rejoin": AGENT,
    "joinSibling": AGENT,
    "leave": AGENT,
    "createSignInCode": R,
    "getStatus": R,
    "listAlerts": R,
    "getQueue": R,
    "createKey": A,
    "listKeys": A,
    "revokeKey": A,
    "createInvite": A,
    "listInvites": A,
    "revokeInvite": A,
    "getCluster": R,
    "getClusterUtilization": R,
    "listContributors": R,
    "getContributor": R,
    "getContributorEvents": R,
    "getContributorWork": R,
    "getContributorBusy": R,
    "getContributorUtilization": R,
    "clearContributor": A,
    "measureContributor": A,
    "removeContributor": A,
    "rotateToken": A,
    "submitJob": S,
    "checkJob": S,
    "previewData": S,
    "listJobs": R,
    "getJob": R,
    "getTimeline": R,
    "cancelJob": S,
    "resumeJob": S,
    "deleteJob": S,
    "deleteArtifact": S,
    "deleteDeployment": S,
    "prune": A,
    "getMetrics": R,
    "getMetricsFile": R,
    "getPictures": R,
    "compareJobs": R,
    "getTrials": R,
    "getRounds": R,
    "labelJob": S,
    "makeFailure": A,
    "createDeployment": S,
    "listDeployments": R,
    "getDeployment": R,
    "getDeploymentStatus": R,
    "getDeploymentEvents": R,
    "changeDeployment": S,
    "stopDeployment": S,
    "listCatalogue": S,
    "plan": S,
    "getTopology": R,
    "createUpload": S,
    "listUploads": R,
    "getUpload": R,
    "putUploadFile": S,
    "completeUpload": S,
    "removeUpload": S,
    "listArtifacts": R,
    "getArtifact": R,
    "getArtifactFile": R,
    "getArtifactLayout": R,
    "listCheckpoints": R,
    "getCheckpointLayout": R,
    "exportCheckpoint": S,
    "getJobEvents": R,
    "streamEvents": R,
    "listModels": C,
    "getModel": C,
    "createChatCompletion": C,
    "createResponse": C,
    "createCompletion": C,
    "createEmbedding": C,
    "resumeStream": C,
    "cancelStream": C,
    "getPrometheusMetrics": R,
}
"""The scope of each operation. Written out, so that a change of a route's scope is a change of this file."""
OPENS = {C: {C}, R: {R}, S: {S, R, C}, A: {A, S, R, C}, AGENT: {AGENT}}
"""The scopes that a key of each scope includes."""
STREAM = "streamEvents"
"""Routes whose answers never end for a key that may read them."""


@dataclass
class House:
    """A control plane, one key for each scope, and a machine that joined."""

    app: FastAPI
    store: Store
    settings: Settings
    keys: dict[Scope, str]
    ids: dict[Scope, str]
    contributor_id: str

    def client(self, scope: Scope | None = None) -> TestClient:
        key = None if scope is None else self.keys[scope]
        return self.client_of(key)

    def client_of(self, key: str | None) -> TestClient:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        here = ("127.0.0.1", 50000)  # without TLS, the cluster's token is not sent to another machine
        return TestClient(self.app, headers=headers, raise_server_exceptions=False, client=here)

    def routes(self) -> Iterator[tuple[str, str, str]]:
        """Yield (operation, method, URL); the ids in it do not exist, except that of the joined machine."""
        for route, _ in declared_scopes(self.app):
            path = str(route.path).replace("{contributor_id}", self.contributor_id)
            url = path.replace("{path:path}", "x").replace("{step}", "1").replace("{", "").replace("}", "")
            for method in route.methods or ():
                yield str(route.operation_id), method, url

    def rows(self) -> dict[str, int]:
        with reading(self.store) as session:
            return {
                name: session.scalar(select(func.count()).select_from(table)) or 0
                for name, table in Base.metadata.tables.items()
            }


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    settings = Settings(data_folder=tmp_path / "data", database_url=None, data_roots=(tmp_path / "root",))
    (tmp_path / "root").mkdir()
    make_schema(settings.resolved_database_url)
    store = Store(settings.resolved_database_url)
    made = {scope: store.keys.create(scope.value, [scope]) for scope in GRANTABLE}
    _, code = store.invites.create()
    machine, machine_key = store.contributors.join(
        code, name="ada", host="h", versions={}, limits={"memory_bytes": 1 << 30, "cpu_threads": 1}
    )
    keys = {scope: key for scope, (_, key) in made.items()} | {AGENT: machine_key}
    ids = {scope: record.id for scope, (record, _) in made.items()}
    app = create_app(settings, store, isolated=shared_processes())
    yield House(app, store, settings, keys, ids, machine.id)
    store.close()


def test_every_route_is_in_the_table_with_the_scope_that_it_declares(house: House) -> None:
    declared = {str(route.operation_id): scopes for route, scopes in declared_scopes(house.app)}
    assert {name: tuple(filter(None, [scope])) for name, scope in TABLE.items()} == declared
    assert {name for name, scope in TABLE.items() if scope is None} == set(OPEN)
    documented = {
        operation["operationId"]: [
            scope for need in operation.get("security", []) for scope in chain(*need.values())
        ]
        for operations in house.app.openapi()["paths"].values()
        for operation in operations.values()
    }
    assert documented == {name: [] if scope is None else [scope.value] for name, scope in TABLE.items()}


def test_nothing_else_answers_but_the_document_and_the_dashboard(house: House) -> None:
    from fastapi.routing import APIRoute, iter_route_contexts

    others = [
        one.path
        for one in iter_route_contexts(house.app.routes)
        if not isinstance(one.original_route, APIRoute)
    ]
    assert others == ["/api/v1/openapi.json", "/{path:path}"]


def test_a_route_without_a_scope_keeps_the_server_from_starting(house: House) -> None:
    @house.app.get("/api/v1/forgotten")
    def forgotten() -> None:
        pass

    with pytest.raises(RuntimeError, match="forgotten"):
        check_routes(house.app)


@pytest.mark.parametrize("scope", [C, R, S, A, AGENT])
def test_a_key_opens_what_its_scope_says(house: House, scope: Scope) -> None:
    with house.client(scope) as client:
        for operation, method, url in house.routes():
            needed = TABLE[operation]
            if needed is None or operation in (STREAM, "leave"):
                continue
            answer = client.request(method, url, json={})
            if needed in OPENS[scope]:
                assert answer.status_code not in (401, 403), (operation, answer.text)
            else:
                assert answer.status_code == 403, (operation, answer.text)
                assert needed.value in answer.text
                assert "missing" in answer.text


def test_a_key_for_chatting_or_none_does_not_listen_to_events(house: House) -> None:
    with house.client(C) as client:
        assert client.get("/api/v1/events").status_code == 403
    with house.client() as client:
        assert client.get("/api/v1/events").status_code == 401


def test_without_a_key_only_open_routes_answer(house: House) -> None:
    refusals = {None: {401}, "sck_wrong": {401, 429}}  # a client that guesses has to wait
    for key, expected in refusals.items():
        with house.client_of(key) as client:
            for operation, method, url in house.routes():
                if TABLE[operation] is not None:
                    assert client.request(method, url, json={}).status_code in expected, operation


def test_a_session_has_the_scopes_of_its_key(house: House) -> None:
    with house.client() as browser:
        page = {"Sec-Fetch-Site": "same-origin"}
        signed_in = browser.post("/api/v1/session", json={"key": house.keys[R]}, headers=page)
        assert signed_in.json()["key"]["scopes"] == ["read"]
        assert browser.get("/api/v1/jobs", headers=page).is_success
        for method, url in (("POST", "/api/v1/invites"), ("GET", "/api/v1/keys"), ("GET", "/v1/models")):
            assert browser.request(method, url, json={}, headers=page).status_code == 403


def test_the_way_from_a_key_for_chatting_to_the_cluster_ends_at_its_first_step(house: House) -> None:
    before = house.rows()
    for scope in (C, R, S, AGENT):
        with house.client(scope) as client:
            answer = client.post("/api/v1/invites", json={})
            assert answer.status_code == 403
            assert answer.json()["hint"]
            assert client.post("/api/v1/keys", json={"name": "more", "scopes": ["admin"]}).status_code == 403
            assert client.delete(f"/api/v1/contributors/{house.contributor_id}").status_code == 403
    assert house.rows() == before


def test_a_revoked_key_opens_nothing_more(house: House) -> None:
    house.store.keys.revoke(house.ids[S])
    with house.client(S) as client:
        for url in ("/api/v1/jobs", "/v1/models", "/metrics"):
            assert client.get(url).status_code == 401


def test_keys_are_made_for_chatting_by_default(house: House) -> None:
    with house.client(A) as client:
        made = client.post("/api/v1/keys", json={"name": "x"}).json()
        assert made["scopes"] == ["chat"]
        for scopes in (["contribute"], [], ["root"]):
            refused = client.post("/api/v1/keys", json={"name": "x", "scopes": scopes})
            assert refused.status_code == 422, scopes
            assert "scopes" in refused.text


def test_the_last_admin_key_stays(house: House) -> None:
    with house.client(A) as client:
        refused = client.delete(f"/api/v1/keys/{house.ids[A]}")
        assert refused.status_code == 409
        assert "--scope admin" in refused.json()["hint"]
        other = client.post("/api/v1/keys", json={"name": "second", "scopes": ["admin"]}).json()
        assert client.delete(f"/api/v1/keys/{house.ids[A]}").is_success
    with pytest.raises(Conflict):
        house.store.keys.revoke(other["id"])


def test_where_the_server_keeps_its_data_is_for_admins(house: House) -> None:
    for scope in (R, S, A):
        with house.client(scope) as client:
            text = json.dumps(
                [client.get(f"/api/v1/{name}").json() for name in ("status", "alerts", "queue")]
            )
            assert (str(house.settings.data_folder) in text) == (scope is A)


@pytest.mark.slow
@pytest.mark.parametrize("scope", [None, C, R, S, A, AGENT])
def test_generated_requests_of_a_key_change_nothing_that_it_may_not(
    house: House, scope: Scope | None
) -> None:
    schema = schemathesis.openapi.from_asgi("/api/v1/openapi.json", house.app)
    schema.config.update(request_timeout=600)
    if scope is not None:
        schema.config.update(headers={"Authorization": f"Bearer {house.keys[scope]}"})
    opened = set() if scope is None else OPENS[scope]
    before = house.rows()
    tried = 0
    for result in schema.exclude(path="/api/v1/events").get_all_operations():
        operation = result.ok()
        needed = TABLE[operation.definition.raw["operationId"]]
        is_refused = needed is not None and needed not in opened

        # Schemathesis's own decorator needs an older pytest.
        @given(case=operation.as_strategy())
        @options(max_examples=4, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
        def check(case: Any) -> None:
            # Generated headers must not take the place of the key.
            case.headers = {
                name: value for name, value in (case.headers or {}).items() if name != "Authorization"
            }
            case.cookies = {}
            answer = case.call()
            # This server runs without a Ray cluster, and says so with 503.
            assert answer.status_code < 500 or answer.status_code == 503, answer.text
            assert answer.status_code >= 400 or not is_refused, answer.text  # noqa: B023 - it runs at once

        check()
        tried += 1
    assert tried > 20
    after = house.rows()
    if scope is A:
        return
    may_change = {"jobs", "deployments", "events"} if scope is S else set()
    assert {name: count for name, count in after.items() if name not in may_change} == {
        name: count for name, count in before.items() if name not in may_change
    }
