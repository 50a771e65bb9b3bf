"""The OpenAPI document: what FastAPI derives, plus what it cannot see."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from share_compute.specification import job_schema
from share_compute_api.problems import MEDIA_TYPE, Problem
from share_compute_api.schemas import PlanRequest

_TAGS = [
    {"name": "server", "description": "The server itself."},
    {"name": "jobs", "description": "Submit, watch, cancel and resume jobs."},
    {"name": "plans", "description": "Which plan a job would get, and why; what was measured."},
    {"name": "events", "description": "What happens, as pages or streams."},
    {"name": "artifacts", "description": "Finished results."},
    {"name": "keys", "description": "Keys that open this API."},
    {"name": "invites", "description": "Codes that let one machine join, once."},
    {"name": "contributors", "description": "Machines of the pool."},
    {"name": "agents", "description": "What a contributor's own agent calls."},
]
_PROBLEM = {"$ref": "#/components/schemas/Problem"}


def install(app: FastAPI) -> None:
    """Make ``app.openapi()`` return the complete document."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's own way to extend it


def _document(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(
        title=app.title, version=app.version, summary=app.summary, routes=app.routes, tags=_TAGS
    )
    schemas = document["components"]["schemas"]
    schemas["Problem"] = _hoisted(Problem.model_json_schema(), schemas, suffix="")
    schemas["JobRequest"] = _hoisted(job_schema(), schemas, suffix="Request")
    schemas["PlanRequest"] = _hoisted(PlanRequest.model_json_schema(), schemas, suffix="Request")
    schemas["PlanRequest"]["properties"]["job"] = {"$ref": "#/components/schemas/JobRequest"}
    del schemas["TrainJobRequest"]
    # FastAPI documents its own shape of validation errors, which this server never sends.
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"]["422"] = {
                "description": "The request is not valid.",
                "content": {MEDIA_TYPE: {"schema": _PROBLEM}},
            }
    return document


def _hoisted(schema: dict[str, Any], schemas: dict[str, Any], *, suffix: str) -> dict[str, Any]:
    """Move a schema's own definitions beside the others, under names with ``suffix``, and point there."""

    def moved(node: Any) -> Any:
        if isinstance(node, list):
            return [moved(item) for item in node]
        if not isinstance(node, dict):
            return node
        return {
            key: value.replace("#/$defs/", "#/components/schemas/") + suffix
            if key == "$ref" and isinstance(value, str)
            else moved(value)
            for key, value in node.items()
            if key != "$defs"
        }

    for name, definition in schema.get("$defs", {}).items():
        schemas[name + suffix] = moved(definition)
    hoisted: dict[str, Any] = moved(schema)
    return hoisted
