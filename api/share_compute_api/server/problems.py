"""Returns errors of the REST API as problem documents (RFC 9457)."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ConfigDict, Field
from starlette.exceptions import HTTPException

from share_compute.errors import ShareComputeError, UserError
from share_compute.files.described import DescribedModel
from share_compute.files.field_errors import (
    NOT_JSON,
    field_name,
    fields_details,
    fields_text,
    json_problem_of,
    named,
    without_consequences,
)

MEDIA_TYPE = "application/problem+json"
_SEND_JSON = "set the header Content-Type: application/json"
_HTTP = {
    400: ("bad-request", "fix the body"),
    404: ("not-found", "see /api/v1/openapi.json for what there is"),
    405: ("method-not-allowed", "see /api/v1/openapi.json for what is"),
    413: ("body-too-large", "send less; a job names its data by path, or as an upload"),
    415: ("unsupported-media-type", "set the header Content-Type"),
}
"""HTTP status -> (code, hint) of the problem document for an `HTTPException`."""


class Problem(DescribedModel):
    """Problem document (RFC 9457): the error, and what to do about it."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "type": "urn:share-compute:problem:not-found",
                    "title": "Not found",
                    "status": 404,
                    "detail": "there is no job job-k3v7q2ma",
                    "instance": "/api/v1/jobs/job-k3v7q2ma",
                    "code": "not-found",
                    "hint": "share-compute jobs lists them",
                }
            ]
        },
    )

    type: str
    """A URN whose last part is ``code``."""
    title: str
    status: int
    detail: str
    """Description of the error, in one sentence."""
    instance: str
    """Path of the request."""
    code: str
    """Stable name of this kind of problem."""
    hint: str | None = None
    """Hint: an action that the caller can take."""
    job: str | None = None
    step: int | None = None
    machine: str | None = None
    details: dict[str, Any] | None = Field(default=None)
    """Further facts. For a refused body, ``fields`` is a list of ``{field, problem}`` objects."""


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI descriptions of the error responses with these statuses."""
    return {
        status: {
            "description": HTTPStatus(status).phrase,
            "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
        }
        for status in statuses
    }


def problem_response(
    request: Request, status: int, code: str, detail: str, headers: dict[str, str] | None = None, **facts: Any
) -> JSONResponse:
    """Return a response with a problem document; ``facts`` are further fields of `Problem`."""
    document = Problem(
        type=f"urn:share-compute:problem:{code}",
        title=code.replace("-", " ").capitalize(),
        status=status,
        detail=detail,
        instance=request.url.path,
        code=code,
        **facts,
    )
    return JSONResponse(
        document.model_dump(mode="json", exclude_none=True),
        status_code=status,
        media_type=MEDIA_TYPE,
        headers=headers,
    )


def install(app: FastAPI) -> None:
    """Install handlers that return every error of ``app`` as a problem document."""
    app.add_exception_handler(ShareComputeError, _ours)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Exception, _unexpected)


def _ours(request: Request, failure: Exception) -> JSONResponse:
    assert isinstance(failure, ShareComputeError)
    headers = {"WWW-Authenticate": "Bearer"} if failure.status == HTTPStatus.UNAUTHORIZED else {}
    if "retry_after_s" in failure.details:
        headers["Retry-After"] = str(failure.details["retry_after_s"])
    return problem_response(
        request, failure.status, failure.code, failure.message, headers, **failure.facts()
    )


def _invalid(request: Request, failure: Exception) -> JSONResponse:
    assert isinstance(failure, RequestValidationError)
    if isinstance(failure.body, bytes):
        return problem_response(request, UserError.status, UserError.code, NOT_JSON, hint=_SEND_JSON)
    errors = without_consequences(failure.errors())
    if (wrong := json_problem_of(errors)) is not None:
        return problem_response(
            request, UserError.status, UserError.code, wrong, hint="fix the JSON of the body"
        )
    fields = named(
        errors, lambda error: field_name(part for part in error["loc"] if part != "body") or "the body"
    )
    return problem_response(
        request,
        UserError.status,
        UserError.code,
        fields_text(fields, len(errors)),
        hint="fix these fields",
        details=fields_details(fields, len(errors)),
    )


def _http(request: Request, failure: Exception) -> JSONResponse:
    assert isinstance(failure, HTTPException)
    status = HTTPStatus(failure.status_code)
    code, hint = _HTTP.get(status.value, (f"http-{status.value}", "see the detail"))
    detail = failure.detail
    if status is HTTPStatus.NOT_FOUND:
        detail = f"there is nothing at {request.url.path}"
    elif status is HTTPStatus.METHOD_NOT_ALLOWED:
        detail = f"{request.method} is not possible here"
    return problem_response(request, status.value, code, detail, dict(failure.headers or {}), hint=hint)


def _unexpected(request: Request, failure: Exception) -> JSONResponse:
    # The client must not see the error. Starlette re-raises it after this response, so its stack trace is logged.
    del failure
    return problem_response(
        request,
        500,
        ShareComputeError.code,
        "internal server error",
        hint="look into the server's log, and report it",
    )
