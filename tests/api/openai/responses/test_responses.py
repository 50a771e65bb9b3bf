"""The Responses API, by the real ``openai`` package against a live server: text, tools, streams and failures."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.responses import ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter
from tests.api.conftest import Plane, wait_until
from tests.api.openai.conftest import (
    ANSWER,
    ARGUMENTS,
    CALLS,
    EXPECTED,
    FORMATS,
    HELLO,
    PARAMETERS,
    Says,
    SaysCalls,
    prompt_of,
)
from tests.api.speaking import Speaker, make_tokenizer

from share_compute.errors import Busy, Unavailable
from share_compute.specification.serve import ToolFormat
from share_compute_api.connection import sse
from share_compute_api.workers.isolated.tokenizer import ServedTokenizer

TOOLS: list[Any] = [
    {"type": "function", "name": "weather", "description": "Tell the weather.", "parameters": PARAMETERS},
    {"type": "function", "name": "now"},
]
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def anonymous(found: Any) -> Any:
    """Return a response as a dict, without its ids and its time."""
    if isinstance(found, dict):
        return {
            key: anonymous(value)
            for key, value in found.items()
            if key not in ("id", "call_id", "created_at")
        }
    return [anonymous(value) for value in found] if isinstance(found, list) else found


def events_of(raw: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    """Return the events of a stream, after the checks that hold for all streams."""
    answer = raw.post("/responses", json={"input": "Hello", **body, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.text.endswith("\n\n")
    events = []
    for block in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
        EVENT.validate_python(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    return events


def part(text: str) -> dict[str, Any]:
    return {"type": "input_text", "text": text}


def calls_of(response: Any) -> list[tuple[str, str]]:
    return [(item.name, item.arguments) for item in response.output if item.type == "function_call"]


# Text


def test_a_text_is_answered(openai_client: OpenAI, says: Says) -> None:
    speaker = says()
    response = openai_client.responses.create(
        model=speaker.facts.name,
        instructions="Be brief.",
        input="Hello",
        temperature=0.5,
        top_p=0.9,
        metadata={"a": "b"},
        store=True,
        user="ada",
        truncation="disabled",
        include=["reasoning.encrypted_content"],
    )
    assert (response.object, response.status, response.error) == ("response", "completed", None)
    assert response.id.startswith("resp_")
    assert response.output_text == ANSWER
    (message,) = response.output
    assert message.type == "message"
    assert message.status == "completed"
    (part,) = message.content
    assert part.type == "output_text"
    assert (part.annotations, part.logprobs) == ([], [])
    (generation,) = speaker.received
    assert prompt_of(speaker) == "<|system|>Be brief.<|end|><|user|>Hello<|end|><|assistant|>"
    assert (generation.options.temperature, generation.options.top_p) == (0.5, 0.9)
    usage = response.usage
    assert usage is not None
    assert usage.input_tokens == len(generation.prompt)
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.input_tokens_details.cached_tokens == 3
    assert usage.output_tokens_details.reasoning_tokens == 0
    # The options of the request are repeated.
    assert (response.instructions, response.temperature, response.top_p) == ("Be brief.", 0.5, 0.9)
    assert (response.metadata, response.tools, response.tool_choice) == ({"a": "b"}, [], "auto")
    assert (response.background, response.truncation, response.parallel_tool_calls) == (
        False,
        "disabled",
        True,
    )
    assert response.model_extra is not None
    assert response.model_extra["store"] is False


def test_items_become_messages(openai_client: OpenAI, says: Says) -> None:
    speaker = says()
    first = openai_client.responses.create(model=speaker.facts.name, input="Hello")
    items: list[Any] = [
        {"role": "developer", "content": "Be kind."},
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "Hel"}, {"type": "input_text", "text": "lo"}],
        },
        *first.output,
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "x"}],
            "status": None,
        },
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "Go on"},
    ]
    openai_client.responses.create(model=speaker.facts.name, instructions="Be brief.", input=items)
    assert prompt_of(speaker) == (
        "<|system|>Be brief.\n\nBe kind.<|end|><|user|>Hello<|end|>"
        f"<|assistant|>{ANSWER}<|end|><|assistant|>Yes?<|end|><|user|>Go on<|end|><|assistant|>"
    )


def test_a_text_is_streamed(openai_client: OpenAI, raw: httpx.Client, says: Says) -> None:
    name = says().facts.name
    events = events_of(raw, model=name)
    kinds = [event["type"].removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    assert deltas > 5
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * deltas,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert "".join(event.get("delta", "") for event in events) == ANSWER
    with openai_client.responses.stream(model=name, input="Hello") as stream:
        found = list(stream)
        final = stream.get_final_response()
    assert [event.type.removeprefix("response.") for event in found] == kinds
    whole = openai_client.responses.create(model=name, input="Hello")
    assert anonymous(whole.to_dict()) == anonymous(events[-1]["response"])
    assert final.output_text == whole.output_text == ANSWER
    assert final.usage == whole.usage


def test_the_async_client_and_many_at_once(served: Plane, says: Says) -> None:
    name = says().facts.name

    async def main() -> list[str]:
        client = AsyncOpenAI(base_url=f"{served.url}/v1", api_key=served.api_key, max_retries=0)

        async def one() -> str:
            async with client.responses.stream(model=name, input="Hello") as stream:
                return (await stream.get_final_response()).output_text

        async with client:
            whole = await client.responses.create(model=name, input="Hello")
            return [whole.output_text, *await asyncio.gather(*(one() for _ in range(10)))]

    assert set(asyncio.run(main())) == {ANSWER}


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_response_that_is_too_long_is_incomplete(raw: httpx.Client, says: Says, is_streamed: bool) -> None:
    body = {"model": says().facts.name, "input": "Hello", "max_output_tokens": 3}
    if is_streamed:
        last = events_of(raw, **body)[-1]
        assert last["type"] == "response.incomplete"
        response = last["response"]
    else:
        response = raw.post("/responses", json=body).json()
    assert (response["status"], response["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    assert [item["status"] for item in response["output"]] == ["incomplete"]
    assert response["usage"]["output_tokens"] == 3


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_empty_answer_is_an_empty_message(
    raw: httpx.Client, says: Says, tokenizer: ServedTokenizer, is_streamed: bool
) -> None:
    body = {"model": says(lambda _: tokenizer.vocabulary.end_ids).facts.name, "input": "Hello"}
    response = (
        events_of(raw, **body)[-1]["response"] if is_streamed else raw.post("/responses", json=body).json()
    )
    assert response["status"] == "completed"
    (message,) = response["output"]
    assert [part["text"] for part in message["content"]] == [""]


class Town(BaseModel):
    """A town."""

    name: str
    people: int


def test_an_answer_follows_a_schema(openai_client: OpenAI, says: Says) -> None:
    speaker = says('{"name": "Köln", "people": 3}')
    name = speaker.facts.name
    parsed = openai_client.responses.parse(model=name, input="Hello", text_format=Town)
    assert parsed.output_parsed == Town(name="Köln", people=3)
    assert json.loads(speaker.received[-1].options.json_schema or "")["required"] == ["name", "people"]
    with openai_client.responses.stream(model=name, input="Hello", text_format=Town) as stream:
        assert stream.get_final_response().output_parsed == Town(name="Köln", people=3)
    openai_client.responses.create(model=name, input="Hello", text={"format": {"type": "json_object"}})
    assert speaker.received[-1].options.json_schema == ""
    openai_client.responses.create(model=name, input="Hello", text={"format": {"type": "text"}})
    assert speaker.received[-1].options.json_schema is None


def test_tokens_come_with_their_probabilities(openai_client: OpenAI, raw: httpx.Client, says: Says) -> None:
    options: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    name = says().facts.name
    response = openai_client.responses.create(model=name, input="Hello", **options)
    (message,) = response.output
    assert message.type == "message"
    assert message.content[0].type == "output_text"
    tokens = message.content[0].logprobs or []
    assert b"".join(bytes(token.bytes) for token in tokens).decode() == ANSWER
    assert {len(token.top_logprobs) for token in tokens} == {2}
    events = events_of(raw, model=name, **options)
    streamed = [token for event in events if "delta" in event for token in event["logprobs"]]
    assert streamed == [token.to_dict() for token in tokens]
    assert anonymous(events[-1]["response"]) == anonymous(response.to_dict())


def test_the_chat_template_gets_the_effort(
    openai_client: OpenAI, says_calls: SaysCalls, tmp_path: Path
) -> None:
    folder = make_tokenizer(tmp_path)
    (folder / "chat_template.jinja").write_text("{{ reasoning_effort }}: {{ messages[0].content }}")
    speaker = says_calls("x", where=folder)
    openai_client.responses.create(
        model=speaker.facts.name, input="Hello", reasoning={"effort": "high", "summary": "auto"}
    )
    assert prompt_of(speaker) == "high: Hello"


# Tools


@pytest.mark.parametrize("tool_format", FORMATS)
def test_calls_are_answered_and_their_results_sent_back(
    openai_client: OpenAI, raw: httpx.Client, says_calls: SaysCalls, tool_format: ToolFormat
) -> None:
    speaker = says_calls(CALLS[tool_format], tool_format)
    name = speaker.facts.name
    response = openai_client.responses.create(model=name, input=HELLO, tools=TOOLS)
    assert calls_of(response) == EXPECTED
    assert {item.status for item in response.output if item.type == "function_call"} == {"completed"}
    assert '"name": "weather"' in prompt_of(speaker)
    outputs = [
        {"type": "function_call_output", "call_id": item.call_id, "output": f"result {index}"}
        for index, item in enumerate(response.output)
        if item.type == "function_call"
    ]
    again = openai_client.responses.create(
        model=name, input=[*HELLO, *response.output, *outputs], tools=TOOLS
    )
    assert calls_of(again) == EXPECTED
    prompt = prompt_of(speaker)
    assert '{"city": "Köln", "days": 2}' in prompt
    assert "<|tool|>result 0<|end|><|tool|>result 1<|end|><|assistant|>" in prompt
    assert prompt.count("<|assistant|>") == 2
    events = events_of(raw, model=name, input=HELLO, tools=TOOLS)
    assert anonymous(events[-1]["response"]) == anonymous(response.to_dict())
    for index, (_, arguments) in enumerate(EXPECTED):
        own = [event for event in events if event.get("output_index") == index]
        assert [event["type"].removeprefix("response.") for event in own] == [
            "output_item.added",
            *["function_call_arguments.delta"] * (len(own) - 3),
            "function_call_arguments.done",
            "output_item.done",
        ]
        assert "".join(event.get("delta", "") for event in own) == arguments
    with openai_client.responses.stream(model=name, input=HELLO, tools=TOOLS) as stream:
        assert calls_of(stream.get_final_response()) == EXPECTED


@pytest.mark.parametrize("tool_format", ["hermes", "mistral"])
def test_text_and_calls_keep_their_order(
    openai_client: OpenAI, raw: httpx.Client, says_calls: SaysCalls, tool_format: ToolFormat
) -> None:
    speaker = says_calls(f"I look: \n{CALLS[tool_format]} Done.", tool_format)
    given: dict[str, Any] = {"model": speaker.facts.name, "input": HELLO, "tools": TOOLS}
    response = openai_client.responses.create(**given)
    assert [item.type for item in response.output] == ["message", "function_call", "function_call", "message"]
    assert response.output_text.split() == ["I", "look:", "Done."]
    assert anonymous(events_of(raw, **given)[-1]["response"]) == anonymous(response.to_dict())
    outputs = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "warm"}
        for item in response.output
        if item.type == "function_call"
    ]
    openai_client.responses.create(**{**given, "input": [*HELLO, *response.output, *outputs]})
    assert (
        prompt_of(speaker).count("<|assistant|>") == 2
    )  # one message of the first turn, and the next answer


class Weather(BaseModel):
    """Tell the weather."""

    city: str
    days: int


def test_the_packages_own_helpers_read_calls(openai_client: OpenAI, says_calls: SaysCalls) -> None:
    speaker = says_calls(CALLS["hermes"].replace("weather", "Weather"))
    tool: Any = openai.pydantic_function_tool(Weather)
    flat: Any = {"type": "function", **tool["function"]}
    given: dict[str, Any] = {"model": speaker.facts.name, "input": HELLO, "tools": [flat]}
    parsed = openai_client.responses.parse(**given, parallel_tool_calls=False)
    (call,) = parsed.output
    assert call.type == "function_call"
    assert call.parsed_arguments == {"city": "Köln", "days": 2}
    assert speaker.received[-1].options.grammar is not None  # the helper sets strict
    output = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": [{"type": "input_text", "text": "warm"}],
    }
    again = openai_client.responses.parse(
        **{**given, "input": [*HELLO, call, output]}, parallel_tool_calls=False
    )
    assert [item.type for item in again.output] == ["function_call"]
    assert "<|tool|>warm<|end|>" in prompt_of(speaker)
    with openai_client.responses.stream(**given, parallel_tool_calls=False) as stream:
        kinds = {event.type for event in stream}
        assert calls_of(stream.get_final_response()) == [("Weather", ARGUMENTS)]
    assert {"response.function_call_arguments.delta", "response.function_call_arguments.done"} <= kinds


def test_choices_constrain_the_answer(openai_client: OpenAI, says_calls: SaysCalls) -> None:
    speaker = says_calls(CALLS["hermes"])

    def grammar(choice: Any) -> tuple[str | None, Any]:
        response = openai_client.responses.create(
            model=speaker.facts.name, input=HELLO, tools=TOOLS, tool_choice=choice
        )
        return speaker.received[-1].options.grammar, response.tool_choice

    assert grammar("auto") == (None, "auto")
    assert grammar("none") == (None, "none")
    assert "Tell the weather." not in prompt_of(speaker)
    assert "weather" in (grammar("required")[0] or "")
    named, repeated = grammar({"type": "function", "name": "now"})
    assert "now" in (named or "")
    assert "weather" not in (named or "")
    assert repeated.to_dict() == {"type": "function", "name": "now"}


def test_a_call_that_breaks_off_is_incomplete(raw: httpx.Client, says_calls: SaysCalls) -> None:
    broken = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", ]}}\n</tool_call> So what?'
    given: dict[str, Any] = {"model": says_calls(broken).facts.name, "input": HELLO, "tools": TOOLS}
    response = events_of(raw, **given)[-1]["response"]
    assert response["status"] == "completed"
    call, message = response["output"]
    assert (call["type"], call["status"], message["status"]) == ("function_call", "incomplete", "completed")
    assert call["arguments"].startswith('{"city": "Köln"')
    whole = raw.post("/responses", json=given).json()  # here, only complete calls count as calls
    assert [item["type"] for item in whole["output"]] == ["message"]
    cut = {**given, "model": says_calls(CALLS["hermes"]).facts.name, "max_output_tokens": 40}
    response = events_of(raw, **cut)[-1]["response"]
    assert response["status"] == "incomplete"
    assert [item["status"] for item in response["output"]] == ["incomplete"]


# Failures


@pytest.mark.parametrize(
    ("failure", "code", "text"),
    [
        (
            Unavailable("a machine was lost", hint="try again"),
            "server_error",
            "a machine was lost; try again",
        ),
        (
            Busy("too many", hint="wait", details={"retry_after_s": 7}),
            "rate_limit_exceeded",
            "too many; wait",
        ),
        (RuntimeError("secret"), "server_error", "internal server error; look into its log, and report it"),
    ],
)
def test_a_failure_ends_a_stream(
    openai_client: OpenAI, raw: httpx.Client, says: Says, failure: Exception, code: str, text: str
) -> None:
    speaker = says()
    speaker.failure = (4, failure)
    name = speaker.facts.name
    events = events_of(raw, model=name)
    assert events[-1]["type"] == "response.failed"
    response = events[-1]["response"]
    assert (response["status"], response["usage"]) == ("failed", None)
    assert response["error"] == {"code": code, "message": text}
    (message,) = response["output"]
    assert message["status"] == "incomplete"
    assert message["content"][0]["text"] == "".join(event.get("delta", "") for event in events)
    assert ANSWER.startswith(message["content"][0]["text"])
    *_, last = openai_client.responses.create(model=name, input="Hello", stream=True)
    assert last.type == "response.failed"
    with pytest.raises(openai.APIStatusError) as caught:
        openai_client.responses.create(model=name, input="Hello")
    assert isinstance(caught.value.body, dict)
    assert ANSWER.startswith(caught.value.body["partial"][0])


def test_a_failure_before_the_first_token_has_no_output(raw: httpx.Client, says: Says) -> None:
    speaker = says()
    speaker.failure = (0, Unavailable("a machine was lost", hint="try again"))
    *_, last = events_of(raw, model=speaker.facts.name)
    assert (last["type"], last["response"]["output"]) == ("response.failed", [])
    speaker.refusal = Busy("the queue is full", hint="wait", details={"retry_after_s": 7})
    answer = raw.post("/responses", json={"model": speaker.facts.name, "input": "Hello", "stream": True})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")


def test_a_client_that_leaves_cancels_its_response(openai_client: OpenAI, says: Says) -> None:
    speaker = says()
    speaker.pause_after = 5
    with openai_client.responses.create(model=speaker.facts.name, input="Hello", stream=True) as stream:
        kinds = [next(stream).type for _ in range(5)]
    assert kinds[-1] == "response.output_text.delta"
    wait_until(lambda: speaker.closed == {speaker.received[0].sequence})
    with pytest.raises(openai.APITimeoutError):
        openai_client.responses.create(model=speaker.facts.name, input="Hello", timeout=0.5)
    wait_until(lambda: speaker.closed == {one.sequence for one in speaker.received})


def test_an_idle_stream_sends_comments(served: Plane, says: Says, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "KEEPALIVE_S", 0.05)
    speaker = says()
    speaker.pause_after = 2
    headers = {"Authorization": f"Bearer {served.api_key}"}
    body = {"model": speaker.facts.name, "input": "Hello", "stream": True}
    with httpx.stream(
        "POST", f"{served.url}/v1/responses", json=body, headers=headers, timeout=240
    ) as answer:
        lines = answer.iter_lines()
        assert any(line == ": still here" for line in lines)
        speaker.go_on.set()
        assert "event: response.completed" in list(lines)


def test_a_server_that_ends_notifies_its_streams(
    plane: Plane, folder: Path, tokenizer: ServedTokenizer
) -> None:
    speaker = Speaker("model", folder, lambda _: tokenizer.encode(ANSWER, 99))
    speaker.pause_after = 2
    plane.app.state.context.engines.add(speaker)
    with OpenAI(base_url=f"{plane.url}/v1", api_key=plane.api_key, max_retries=0) as client:
        stream = iter(client.responses.create(model="model", input="Hello", stream=True))
        assert next(stream).type == "response.created"
        plane.app.state.context.notifier.close()
        *_, last = stream
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert "the server ends" in last.response.error.message
    wait_until(lambda: speaker.closed)


def test_streams_are_not_resumable(raw: httpx.Client, says: Says) -> None:
    body = {"model": says().facts.name, "input": "Hello", "stream": True}
    answer = raw.post("/responses", json=body, headers={"X-Resumable": "true"})
    assert answer.status_code == 200
    assert "x-stream-id" not in answer.headers
    assert "id:" not in answer.text
