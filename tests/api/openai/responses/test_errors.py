"""Wrong requests to the Responses API: each is refused soon, with the name of the field, and with little memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from tests.api.conftest import Plane
from tests.api.openai.conftest import Says, SaysCalls
from tests.api.speaking import make_tokenizer

TOOL = {"type": "function", "name": "f"}
CALL = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "a", "output": "x"}
USER = {"role": "user", "content": "Hello"}


def formatted(**fields: Any) -> dict[str, Any]:
    return {"text": {"format": fields}}


BAD: list[tuple[dict[str, Any], str | None, str]] = [
    ({"input": None}, "input", "give text, or a list of items"),
    ({"input": 5}, "input", "give text, or a list of items"),
    ({"input": ""}, "input", "it is empty"),
    ({"input": []}, "input", "it is empty"),
    ({"input": ["Hello"]}, "input.0", "give an object"),
    ({"input": [USER, {"type": "zebra"}]}, "input.1", "items of type zebra"),
    ({"input": [{"type": "{kind}" * 1000}]}, "input.0", "items of type {kind}"),
    ({"input": [{"type": ["a"]}]}, "input.0", "does not read items of type"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0", "item_reference"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input.0.role", "'user'"),
    ({"input": [{"role": "user"}]}, "input.0.content", "is missing"),
    ({"input": [{**USER, "nmae": "x"}]}, "input.0.nmae", "unknown key"),
    ({"input": [{**USER, "content": "\ud800"}]}, "input.0.content", "not valid Unicode"),
    (
        {"input": [{**USER, "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input.0.content",
        "part 0 is input_image",
    ),
    ({"input": [{"type": "reasoning", "summary": []}]}, "input", "no message"),
    ({"input": [USER, OUTPUT]}, "input", "item 1: call_id 'a' is no id"),
    ({"input": [USER, CALL, OUTPUT, OUTPUT]}, "input", "has an output already"),
    ({"input": [USER, CALL]}, "input", "the call 'a' of f has no output before the end"),
    ({"input": [USER, CALL, USER, OUTPUT]}, "input", "no output before item 2"),
    ({"input": [CALL, {**CALL, "call_id": "b"}, OUTPUT, {**CALL, "call_id": "c"}]}, "input", "before item 3"),
    ({"input": [CALL, CALL]}, "input", "item 1: two calls have the call_id 'a'"),
    ({"input": [{**CALL, "call_id": str(i)} for i in range(129)]}, "input", "item 128: at most 128 calls"),
    ({"input": [{**CALL, "arguments": "{"}]}, "input.0.arguments", "not valid JSON"),
    ({"input": [{**CALL, "arguments": "[]"}]}, "input.0.arguments", "must be a JSON object"),
    ({"input": [{**CALL, "namespace": "x"}]}, "input.0.namespace", "unknown key"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "does not do it"),
    ({"conversation": {"id": "conv_1"}}, "conversation", "does not do it"),
    ({"background": True}, "background", "does not do it"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt", "does not do it"),
    ({"truncation": "auto"}, "truncation", "disabled"),
    ({"instructions": ["x"]}, "instructions", "must be text, not a list"),
    ({"instructions": "\ud800"}, "instructions", "not valid Unicode"),
    ({"temperature": 3}, "temperature", "2"),
    ({"max_output_tokens": 0}, "max_output_tokens", "1"),
    ({"max_tokens": 5}, "max_tokens", "did you mean 'max_output_tokens'?"),
    ({"tools": [{"type": "web_search"}]}, "tools.0", "no tools of type web_search"),
    ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools.0", "no tools of type mcp"),
    ({"tools": ["f"]}, "tools.0", "no tools of type str"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools.0.name", "is missing"),
    ({"tools": [{**TOOL, "parameters": {"x": float("nan")}}]}, "tools.0.parameters", "JSON"),
    ({"tools": [TOOL, TOOL]}, "tools", "two tools have the name f"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice", "g is not in tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice", "give"),
    ({"tools": [TOOL], **formatted(type="json_object")}, None, "exclude each other"),
    ({"tools": [TOOL], "include": ["message.output_text.logprobs"]}, None, "exclude each other"),
    (formatted(type="zebra"), "text.format.type", "json_schema"),
    (formatted(type="json_schema", name="x"), "text.format", "needs it"),
    (formatted(type="text", schema={}), "text.format", "needs it"),
    (formatted(type="json_schema", name="\ud800", schema={}), "text.format.name", "not valid Unicode"),
    ({"text": {"verbosity": "low"}}, "text.verbosity", "medium"),
    ({"reasoning": {"effort": "x" * 21}}, "reasoning.effort", "20 characters"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary", "auto"),
    ({"include": ["file_search_call.results"]}, "include.0", "message.output_text.logprobs"),
    ({"top_logprobs": 2}, None, "needs include"),
    ({"stream_options": {"include_obfuscation": False}}, None, "stream: true"),
    ({"metadata": {str(i): "x" for i in range(17)}}, "metadata", "at most 16"),
    ({"metadata": {"a": "x" * 513}}, "metadata.a", "512 characters"),
    ({"metadata": {"a": 1}}, "metadata.a", "must be text, not 1; put it in quotes"),
    ({"metadata": {"a": "\ud800"}}, "metadata.a", "valid Unicode"),
]


@pytest.mark.parametrize(("change", "field", "said"), BAD, ids=lambda value: str(value)[:40])
def test_bad_requests_are_refused_by_name(
    raw: httpx.Client, says: Says, change: dict[str, Any], field: str | None, said: str
) -> None:
    body = json.dumps({"model": says().facts.name, "input": "Hello", **change})
    answer = raw.post("/responses", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    problem = answer.json()["error"]
    assert problem["param"] == field
    assert said in problem["message"]
    assert len(answer.content) < 2000


@pytest.mark.parametrize(
    "content", ["", "{", '{"model": "x", "input": "Hel', "[]", "5", '{"model": "x"}', "\ud800"]
)
def test_half_a_request_is_refused(raw: httpx.Client, content: str) -> None:
    body = content.encode(errors="surrogatepass")
    answer = raw.post("/responses", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "change",
    [
        {"background": False, "conversation": None, "previous_response_id": None, "prompt": None},
        {
            "store": True,
            "user": "ada",
            "service_tier": "auto",
            "safety_identifier": "x",
            "prompt_cache_key": "x",
        },
        {"tools": [], "tool_choice": "auto", "include": [], "metadata": {}, "max_tool_calls": 3},
        {"text": {"format": {"type": "text"}, "verbosity": "medium"}, "reasoning": {"effort": None}},
        {"top_logprobs": 0, "truncation": None, "instructions": None, "temperature": None, "stream": None},
    ],
)
def test_fields_that_change_nothing_are_accepted(
    raw: httpx.Client, says: Says, change: dict[str, Any]
) -> None:
    answer = raw.post("/responses", json={"model": says().facts.name, "input": "Hello", **change})
    assert answer.status_code == 200, answer.text
    assert "X-Ignored-Parameters" not in answer.headers
    assert answer.json()["status"] == "completed"


def test_fields_of_front_ends_are_named(raw: httpx.Client, says: Says) -> None:
    body = {"model": says().facts.name, "input": "Hello", "chat_id": "c", "features": {}}
    for stream in (False, True):
        answer = raw.post("/responses", json={**body, "stream": stream})
        assert answer.headers["X-Ignored-Parameters"] == "chat_id, features"


def test_a_body_that_is_too_large_is_refused(raw: httpx.Client, says: Says) -> None:
    answer = raw.post("/responses", json={"model": says().facts.name, "input": "x" * (4 << 20)})
    assert answer.status_code == 413, answer.text


def test_input_that_is_too_long_is_refused(openai_client: OpenAI, says: Says) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        openai_client.responses.create(model=says().facts.name, input="Hello " * 1000)
    assert caught.value.code == "context_length_exceeded"


def test_models_that_cannot_answer_are_refused(openai_client: OpenAI, says: Says, tmp_path: Path) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        openai_client.responses.create(model="nothing", input="Hello")
    assert (missing.value.param, missing.value.code) == ("model", "model_not_found")
    speaker = says(where=make_tokenizer(tmp_path, with_template=False))
    with pytest.raises(openai.BadRequestError, match="no chat template") as caught:
        openai_client.responses.create(model=speaker.facts.name, input="Hello")
    assert caught.value.param == "input"


def test_schemas_that_cannot_be_followed_are_refused(openai_client: OpenAI, says_calls: SaysCalls) -> None:
    name = says_calls("x").facts.name
    zebra = {"type": "object", "properties": {"a": {"type": "zebra"}}}
    tool: Any = {**TOOL, "parameters": zebra, "strict": True}
    with pytest.raises(openai.BadRequestError, match="parameters of f: the JSON schema cannot be followed"):
        openai_client.responses.create(model=name, input="Hello", tools=[tool])
    with pytest.raises(openai.BadRequestError, match="JSON schema cannot be followed"):
        openai_client.responses.create(
            model=name,
            input="Hello",
            text={"format": {"type": "json_schema", "name": "x", "schema": zebra}},
        )


def test_a_wrong_key_is_refused(served: Plane) -> None:
    with (
        OpenAI(base_url=f"{served.url}/v1", api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.responses.create(model="x", input="Hello")
