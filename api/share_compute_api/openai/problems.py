"""Returns the errors of the routes under ``/v1`` in the JSON shape of the OpenAI API."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response

from share_compute.errors import Busy, NotAuthorized, ShareComputeError, TooLong, UserError
from share_compute.files.described import DescribedModel
from share_compute.files.field_errors import (
    NOT_JSON,
    field_name,
    fields_text,
    json_problem_of,
    named,
    without_consequences,
)
from share_compute_api.connection.departures import ClientGone
from share_compute_api.openai.requests import UNSUPPORTED

PREFIX = "/v1"
_CLIENT_GONE = 499
"""Status that nginx logs when the client closed the connection; no client receives this response."""
_log = logging.getLogger(__name__)
_CODES: dict[type[ShareComputeError], str] = {
    Busy: "rate_limit_exceeded",
    NotAuthorized: "invalid_api_key",
    TooLong: "context_length_exceeded",
}
"""Error type -> ``code`` in the OpenAI API, if it differs from the error type's own code."""
_VALIDATION = {
    "missing": "missing_required_parameter",
    UNSUPPORTED: "unsupported_parameter",
    "unknown_key": "unknown_parameter",
}
"""Type of a validation error -> ``code`` of the OpenAI API; all other types are reported as invalid values."""


class ErrorFacts(DescribedModel):
    """Description of an error."""

    message: str
    type: str
    """invalid_request_error, rate_limit_error or server_error."""
    param: str | None
    """Name of the request's first invalid field; null if the error concerns no field."""
    code: str | None
    partial: list[str] | None = None
    """Text generated before the error, one item for each answer; the field is omitted if there is none."""


class ErrorAnswer(BaseModel):
    """Body of an error response of the OpenAI API."""

    error: ErrorFacts


@dataclass(frozen=True, slots=True)
class OpenAiProblem:
    """An error response of the OpenAI API."""

    status: int
    message: str
    code: str
    param: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    partial: list[str] | None = None

    def body(self) -> dict[str, Any]:
        """Return the JSON body of the response, or the data of a stream's error event."""
        kind = "invalid_request_error" if self.status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
        if self.status == HTTPStatus.TOO_MANY_REQUESTS:
            kind = "rate_limit_error"
        found = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": found if self.partial is None else {**found, "partial": self.partial}}


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI descriptions of the error responses with these statuses."""
    return {status: {"description": HTTPStatus(status).phrase, "model": ErrorAnswer} for status in statuses}


def problem_of(failure: Exception) -> OpenAiProblem:
    """Return the error response for a failure; an unexpected failure is described without details."""
    match failure:
        case ShareComputeError():
            return _ours(failure)
        case RequestValidationError():
            return _invalid(failure)
        case HTTPException():
            status = HTTPStatus(failure.status_code)
            code = status.phrase.lower().replace(" ", "_")
            return OpenAiProblem(status, str(failure.detail), code, headers=dict(failure.headers or {}))
        case _:
            _log.error("a request to a model failed", exc_info=failure)
            return OpenAiProblem(500, "internal server error; look into its log, and report it", "internal")


def _ours(failure: ShareComputeError) -> OpenAiProblem:
    headers = {}
    if isinstance(failure, NotAuthorized):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(failure, Busy):
        headers["Retry-After"] = str(failure.retry_after_s)
    elif "retry_after_s" in failure.details:
        headers["Retry-After"] = str(failure.details["retry_after_s"])
    # The OpenAI API answers invalid requests with status 400, not 422.
    status = HTTPStatus.BAD_REQUEST if failure.status == UserError.status else failure.status
    code = failure.details.get("code") or _CODES.get(type(failure)) or failure.code.replace("-", "_")
    return OpenAiProblem(
        status,
        "; ".join(filter(None, (failure.message, failure.hint))),
        code,
        param=failure.details.get("param"),
        headers=headers,
        partial=failure.details.get("partial"),
    )


def _invalid(failure: RequestValidationError) -> OpenAiProblem:
    if isinstance(failure.body, bytes):
        return OpenAiProblem(HTTPStatus.BAD_REQUEST, NOT_JSON, "unsupported_media_type")
    errors = without_consequences(failure.errors())
    if (wrong := json_problem_of(errors)) is not None:
        return OpenAiProblem(HTTPStatus.BAD_REQUEST, wrong, "invalid_value")
    fields = named(errors, lambda error: _name(error) or "")
    first = errors[0]
    code = _VALIDATION.get(first["type"], "invalid_value")
    return OpenAiProblem(HTTPStatus.BAD_REQUEST, fields_text(fields, len(errors)), code, param=_name(first))


def _name(error: dict[str, Any]) -> str | None:
    name = field_name(part for part in error["loc"] if part not in ("body", "header", "path", "query"))
    return None if error["type"] == "json_invalid" else name or None


def install(app: FastAPI) -> None:
    """Make routes below `PREFIX` return errors in the shape of the OpenAI API.

    Call this function after all other error handlers are installed, because it wraps them.
    """
    for kind in (ShareComputeError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _unless_ours(app.exception_handlers[kind]))
    app.add_exception_handler(ClientGone, lambda *_: Response(status_code=_CLIENT_GONE))


def _unless_ours(others: Callable[[Request, Exception], Any]) -> Callable[[Request, Exception], Response]:
    def answer(request: Request, failure: Exception) -> Response:
        path = request.url.path
        if path != PREFIX and not path.startswith(f"{PREFIX}/"):
            response: Response = others(request, failure)
            return response
        if isinstance(failure, HTTPException) and failure.status_code == HTTPStatus.NOT_FOUND:
            failure = HTTPException(404, f"there is nothing at {path}")
        problem = problem_of(failure)
        return JSONResponse(problem.body(), status_code=problem.status, headers=problem.headers)

    return answer
