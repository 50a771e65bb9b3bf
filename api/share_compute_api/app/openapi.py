"""The OpenAPI document of FastAPI, completed with the parts that FastAPI cannot derive."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from share_compute.files.described import describe
from share_compute.specification import EmbedJob, GenerateJob, ServeJob, SparseJob, SweepJob, job_schema
from share_compute.topology import Device, Link
from share_compute_api.openai.problems import PREFIX as OPENAI_PREFIX
from share_compute_api.schemas.bodies import PlanRequest
from share_compute_api.server.problems import MEDIA_TYPE, Problem

_TAGS = [
    {"name": "server", "description": "The server itself."},
    {"name": "jobs", "description": "Submit, watch, cancel and resume jobs."},
    {"name": "plans", "description": "Which plan a job would get, and why; what was measured."},
    {"name": "events", "description": "What happens, as pages or streams."},
    {"name": "artifacts", "description": "Finished results, and checkpoints."},
    {"name": "session", "description": "How the dashboard is signed in, by a cookie in place of a key."},
    {"name": "uploads", "description": "Data and models that jobs name."},
    {"name": "keys", "description": "Keys that open this API."},
    {"name": "invites", "description": "Codes that let machines join."},
    {"name": "contributors", "description": "Machines of the cluster."},
    {"name": "agents", "description": "What a contributor's own agent calls."},
    {"name": "deployments", "description": "Models that are served: deploy, watch, take down."},
    {"name": "openai", "description": "The OpenAI API: what clients of served models call."},
]
_JOBS = ("JobRequest", "GenerateJobRequest", "EmbedJobRequest", "SparseJobRequest", "SweepJobRequest")
"""Names of the schemas of job requests, one for each kind of job."""


def _reference(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


_PROBLEM = _reference("Problem")


def install(app: FastAPI) -> None:
    """Make ``app.openapi()`` return the complete document."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # documented way of FastAPI to extend the document


def _document(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(
        title=app.title, version=app.version, summary=app.summary, routes=app.routes, tags=_TAGS
    )
    schemas = document["components"]["schemas"]
    for kind in (Device, Link):  # dataclasses
        describe(schemas[kind.__name__], kind)
    schemas["Problem"] = _hoisted(Problem.model_json_schema(), schemas, suffix="")
    schemas["JobRequest"] = _hoisted(job_schema(), schemas, suffix="Request")
    schemas["GenerateJobRequest"] = _hoisted(GenerateJob.model_json_schema(), schemas, suffix="Request")
    schemas["EmbedJobRequest"] = _hoisted(EmbedJob.model_json_schema(), schemas, suffix="Request")
    schemas["SparseJobRequest"] = _hoisted(SparseJob.model_json_schema(), schemas, suffix="Request")
    schemas["SweepJobRequest"] = _hoisted(SweepJob.model_json_schema(), schemas, suffix="Request")
    schemas["SweepJobRequest"]["properties"]["job"]["$ref"] = _reference("JobRequest")["$ref"]
    schemas["AnyJobRequest"] = {"title": "AnyJob", "anyOf": [_reference(name) for name in _JOBS]}
    schemas["DeploymentRequest"] = _hoisted(ServeJob.model_json_schema(), schemas, suffix="Request")
    schemas["AnySpecRequest"] = {
        "title": "AnySpec",
        "anyOf": [_reference(name) for name in (*_JOBS, "DeploymentRequest")],
    }
    schemas["PlanRequest"] = _hoisted(PlanRequest.model_json_schema(), schemas, suffix="Request")
    schemas["PlanRequest"]["properties"]["job"] = _reference("JobRequest")
    del schemas["TrainJobRequest"]
    # FastAPI documents its default format of validation errors, which this server never sends.
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    for path, operations in document["paths"].items():
        for operation in operations.values():
            if path.startswith(f"{OPENAI_PREFIX}/"):
                operation["responses"].pop("422", None)  # the OpenAI API has no status 422
                continue
            operation["responses"]["422"] = {
                "description": "The request is not valid.",
                "content": {MEDIA_TYPE: {"schema": _PROBLEM}},
            }
    return document


def _hoisted(schema: dict[str, Any], schemas: dict[str, Any], *, suffix: str) -> dict[str, Any]:
    """Copy a schema's definitions to ``schemas``, with ``suffix`` added to their names.

    Return the schema with references to these copies.
    """

    def moved(node: Any) -> Any:
        if isinstance(node, list):
            return [moved(item) for item in node]
        # References are values of $ref, and of the mappings of discriminators.
        if isinstance(node, str) and node.startswith("#/$defs/"):
            return node.replace("#/$defs/", "#/components/schemas/") + suffix
        if not isinstance(node, dict):
            return node
        return {key: moved(value) for key, value in node.items() if key != "$defs"}

    for name, definition in schema.get("$defs", {}).items():
        schemas[name + suffix] = moved(definition)
    hoisted: dict[str, Any] = moved(schema)
    return hoisted
