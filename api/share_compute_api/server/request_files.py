"""Parses request bodies that contain the specification of a job or deployment, as JSON or YAML."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from starlette.exceptions import HTTPException

from share_compute.errors import UserError
from share_compute.files.plain_yaml import json_problem

_YAML_TYPES = ("application/yaml", "application/x-yaml", "text/yaml")
Spec = TypeVar("Spec")


def spec_body(schema: str, example: dict[str, Any]) -> dict[str, Any]:
    """Return the OpenAPI description of a request body that `read_spec` parses.

    Args:
        schema: name of the body's schema in openapi.json.
        example: a valid body.
    """
    content = {"schema": {"$ref": f"#/components/schemas/{schema}"}, "example": example}
    return {
        "required": True,
        "content": dict.fromkeys(("application/json", "application/yaml"), content),
    }


def read_spec(content_type: str, body: bytes, parse: Callable[[str | dict[str, Any]], Spec]) -> Spec:
    """Parse and return the specification in a request body.

    Args:
        content_type: header Content-Type of the request.
        body: body of the request.
        parse: parses a specification, given YAML text or a JSON object.

    Raises:
        HTTPException: the content type is neither JSON nor YAML.
        UserError: the body cannot be read, or is not a valid specification.
    """
    kind = content_type.partition(";")[0].strip().lower()
    if kind not in ("application/json", *_YAML_TYPES):
        raise HTTPException(415, "send the job as application/json or application/yaml")
    try:
        text = body.decode()
        return parse(text if kind in _YAML_TYPES else json.loads(text))
    except UnicodeDecodeError as failure:
        raise UserError("the job is not UTF-8 text", hint="save it as UTF-8") from failure
    except json.JSONDecodeError as failure:
        raise UserError(
            f"the job is not valid JSON at {json_problem(failure)}" if text.strip() else "the body is empty",
            hint="fix the JSON, or send YAML as application/yaml",
        ) from failure
    except RecursionError as failure:
        raise UserError("the job is nested too deeply", hint="flatten it") from failure
    except ValueError as failure:  # for example, a number with thousands of digits
        raise UserError(f"the job is not valid JSON: {failure}", hint="fix the number") from failure
