"""The OpenAPI document is correct: bodies made from it never break the server, and answers match it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from share_compute.scopes import Scope
from share_compute.settings import Settings
from share_compute.store import Store, upgrade
from share_compute_api.app.app import create_app


def the_server_made_no_mistake(context: Any, response: Any, case: Any) -> None:
    # Not every 5xx is one: this server runs without a Ray cluster, and says so with 503.
    del context, case
    assert response.status_code != 500, response.text


CHECKS = [
    the_server_made_no_mistake,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
STREAMS = "/api/v1/events"
"""Routes whose answers never end."""


@pytest.fixture
def schema(tmp_path: Path) -> Iterator[Any]:
    places = Settings(data_folder=tmp_path, database_url=None)
    upgrade(places.resolved_database_url)
    store = Store(places.resolved_database_url)
    _, key = store.keys.create("fuzz", [Scope.admin])
    schema = schemathesis.openapi.from_asgi("/api/v1/openapi.json", create_app(places, store))
    schema.config.update(headers={"Authorization": f"Bearer {key}"}, request_timeout=600)
    yield schema.exclude(path=STREAMS)
    store.close()


@pytest.mark.slow
def test_answers_are_what_the_document_says(schema: Any) -> None:
    tried = 0
    for result in schema.get_all_operations():
        # Schemathesis's own decorator needs an older pytest.
        @given(case=result.ok().as_strategy())
        @settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
        def check(case: Any) -> None:
            case.call_and_validate(checks=CHECKS)

        check()
        tried += 1
    assert tried > 20


def test_every_body_has_an_example(tmp_path: Path) -> None:
    places = Settings(data_folder=tmp_path, database_url=None)
    upgrade(places.resolved_database_url)
    store = Store(places.resolved_database_url)
    document = create_app(places, store).openapi()
    store.close()
    bodies = {
        (operation["operationId"], kind): content
        for operations in document["paths"].values()
        for operation in operations.values()
        for kind, content in operation.get("requestBody", {}).get("content", {}).items()
    }

    def has_example(content: dict[str, Any]) -> bool:
        required, *_ = content["schema"].get(
            "anyOf", [content["schema"]]
        )  # or null, where the body is optional
        name = required.get("$ref", "").rpartition("/")[2]
        return bool(content.get("example") or document["components"]["schemas"].get(name, {}).get("examples"))

    assert len(bodies) > 3
    assert [name for name, content in bodies.items() if not has_example(content)] == []
