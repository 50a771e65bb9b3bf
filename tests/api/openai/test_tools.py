"""Tools of chats, by the real ``openai`` package against a live server: calls, streams, histories and errors."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel
from tests.api.conftest import wait_until
from tests.api.openai.conftest import ARGUMENTS, CALLS, EXPECTED, FORMATS, HELLO, TOOLS, SaysCalls, prompt_of
from tests.api.speaking import make_tokenizer, make_tool_tokenizer

from share_compute.specification.serve import ToolFormat
from share_compute_api.workers.isolated.tokenizer import ServedTokenizer


def calls_of(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]


@pytest.mark.parametrize("tool_format", FORMATS)
def test_calls_are_answered_and_their_results_sent_back(
    openai_client: OpenAI, says_calls: SaysCalls, tool_format: ToolFormat
) -> None:
    speaker = says_calls(CALLS[tool_format], tool_format)
    name = speaker.facts.name
    answer = openai_client.chat.completions.create(model=name, messages=HELLO, tools=TOOLS)
    (choice,) = answer.choices
    assert calls_of(choice.message) == EXPECTED
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert speaker.received[0].options.grammar is None
    assert '"name": "weather"' in prompt_of(speaker)
    assert "Tell the weather." in prompt_of(speaker)
    calls = choice.message.tool_calls or []
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": f"result {index}"}
        for index, call in enumerate(calls)
    ]
    history = [*HELLO, choice.message, *results]
    again = openai_client.chat.completions.create(model=name, messages=history, tools=TOOLS)
    assert again.choices[0].finish_reason == "tool_calls"
    prompt = prompt_of(speaker)
    assert '{"city": "Köln", "days": 2}' in prompt  # an object, not a string of JSON
    assert "<|tool|>result 0<|end|><|tool|>result 1<|end|><|assistant|>" in prompt
    silent = openai_client.chat.completions.create(
        model=name, messages=history, tools=TOOLS, tool_choice="none"
    )
    assert silent.choices[0].message.tool_calls is None
    assert "Tell the weather." not in prompt_of(speaker)


@pytest.mark.parametrize("tool_format", FORMATS)
def test_calls_are_streamed(openai_client: OpenAI, says_calls: SaysCalls, tool_format: ToolFormat) -> None:
    speaker = says_calls(CALLS[tool_format], tool_format)
    stream = openai_client.chat.completions.create(
        model=speaker.facts.name,
        messages=HELLO,
        tools=TOOLS,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[-1].usage is not None
    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    assert "".join(delta.content or "" for delta in deltas) == ""
    parts = [part for delta in deltas for part in delta.tool_calls or ()]
    assert all(len(delta.tool_calls or ()) <= 1 for delta in deltas)
    for index, (name, arguments) in enumerate(EXPECTED):
        first, *rest = [part for part in parts if part.index == index]
        assert (first.type, first.function and first.function.name) == ("function", name)
        assert first.id
        assert first.function is not None
        assert first.function.arguments == ""
        assert "".join(part.function.arguments or "" for part in rest if part.function) == arguments
        assert all(part.id is None and part.function and part.function.name is None for part in rest)
    assert len([part for part in parts if part.index == 0]) > 5
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1] if chunk.choices[0].finish_reason] == [
        "tool_calls"
    ]


def test_text_may_come_before_calls(openai_client: OpenAI, says_calls: SaysCalls) -> None:
    for tool_format in ("hermes", "mistral"):
        speaker = says_calls(f"I look: \n{CALLS[tool_format]}", tool_format)
        message = (
            openai_client.chat.completions.create(model=speaker.facts.name, messages=HELLO, tools=TOOLS)
            .choices[0]
            .message
        )
        assert (message.content, calls_of(message)) == ("I look:", EXPECTED)


class Weather(BaseModel):
    """Tell the weather."""

    city: str
    days: int


def test_the_packages_own_helpers_read_calls(openai_client: OpenAI, says_calls: SaysCalls) -> None:
    speaker = says_calls(CALLS["hermes"].replace("weather", "Weather"))
    tools = [openai.pydantic_function_tool(Weather), openai.pydantic_function_tool(Weather, name="now")]
    given: dict[str, Any] = {"model": speaker.facts.name, "messages": HELLO, "tools": tools[:1]}
    with pytest.raises(openai.BadRequestError, match="not in tools"):
        openai_client.chat.completions.create(
            **given, tool_choice={"type": "function", "function": {"name": "zebra"}}
        )
    parsed = openai_client.chat.completions.parse(**given, parallel_tool_calls=False)
    (call,) = parsed.choices[0].message.tool_calls or ()
    assert call.function.parsed_arguments == Weather(city="Köln", days=2)
    assert speaker.received[-1].options.grammar is not None  # the helper sets strict
    result = {"role": "tool", "tool_call_id": call.id, "content": "warm"}
    again = openai_client.chat.completions.parse(
        **{**given, "messages": [*HELLO, parsed.choices[0].message, result]}, parallel_tool_calls=False
    )
    assert again.choices[0].finish_reason == "tool_calls"
    with openai_client.chat.completions.stream(**given, parallel_tool_calls=False) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    assert calls_of(final.choices[0].message) == [("Weather", ARGUMENTS)]


def test_without_parallel_calls_the_first_one_ends_the_answer(
    openai_client: OpenAI, says_calls: SaysCalls
) -> None:
    speaker = says_calls(CALLS["hermes"])
    for stream in (False, True):
        given: dict[str, Any] = {"model": speaker.facts.name, "messages": HELLO, "tools": TOOLS}
        answer = openai_client.chat.completions.create(**given, parallel_tool_calls=False, stream=stream)
        if not stream:
            assert calls_of(answer.choices[0].message) == EXPECTED[:1]
        else:
            assert [chunk.choices[0].finish_reason for chunk in answer][-1] == "tool_calls"
        wait_until(lambda: {one.sequence for one in speaker.received} <= speaker.closed)


def test_answers_are_constrained_where_the_request_says_so(
    openai_client: OpenAI, says_calls: SaysCalls
) -> None:
    speaker = says_calls(CALLS["hermes"])
    strict = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}, TOOLS[1]]

    def grammar(**options: Any) -> str | None:
        openai_client.chat.completions.create(model=speaker.facts.name, messages=HELLO, **options)
        return speaker.received[-1].options.grammar

    assert grammar(tools=TOOLS) is None
    assert grammar(tools=strict, tool_choice="none") is None
    assert "tail" in (grammar(tools=strict) or "")
    assert "tail" not in (grammar(tools=TOOLS, tool_choice="required") or "tail")
    named = grammar(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "now"}}) or ""
    assert "now" in named
    assert "weather" not in named
    zebra = {
        "type": "function",
        "function": {"name": "x", "parameters": {"properties": {"a": {"type": "zebra"}}}},
    }
    with pytest.raises(openai.BadRequestError, match="parameters of x: the JSON schema cannot be followed"):
        grammar(tools=[zebra], tool_choice="required")


def test_text_that_is_no_call_is_content(openai_client: OpenAI, says_calls: SaysCalls) -> None:
    text = '<tool_call>{"name": "zebra", "arguments": {}}</tool_call>'
    choice = openai_client.chat.completions.create(
        model=says_calls(text).facts.name, messages=HELLO, tools=TOOLS
    ).choices[0]
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (text, None, "stop")


def test_a_call_that_is_cut_off_ends_by_length(openai_client: OpenAI, says_calls: SaysCalls) -> None:
    given: dict[str, Any] = {
        "model": says_calls(CALLS["mistral"], "mistral").facts.name,
        "messages": HELLO,
        "tools": TOOLS,
        "max_tokens": 20,
    }
    choice = openai_client.chat.completions.create(**given).choices[0]
    assert choice.finish_reason == "length"
    assert (choice.message.content or "").startswith(
        'weather{"city'
    )  # special tokens are not part of content
    chunks = list(openai_client.chat.completions.create(**given, stream=True))
    parts = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or ()]
    sent = "".join(part.function.arguments or "" for part in parts if part.function)
    assert ARGUMENTS.startswith(sent)
    assert chunks[-1].choices[0].finish_reason == "length"


# Errors


def tool(**changes: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **changes}}


def nested(depth: int) -> dict[str, Any]:
    return {"properties": {"a": nested(depth - 1)}} if depth else {}


def called(arguments: str = "{}", **changes: Any) -> dict[str, Any]:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}, **changes}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


RESULT = {"role": "tool", "tool_call_id": "a", "content": "x"}
BAD: list[tuple[dict[str, Any], str | None, str]] = [
    ({"tools": [tool()] * 2}, "tools", "two tools have the name f"),
    ({"tools": [tool(name=f"f{i}") for i in range(129)]}, "tools", "at most 128"),
    ({"tools": [tool(name=f"f{i}", description="x" * 60_000) for i in range(5)]}, "tools", "characters"),
    ({"tools": [tool(name="a b")]}, "tools.0.function.name", "pattern"),
    ({"tools": [tool(name="x" * 65)]}, "tools.0.function.name", "pattern"),
    ({"tools": [tool(parameters={"type": "string"})]}, "tools.0.function.parameters", "must be object"),
    ({"tools": [tool(parameters=nested(40))]}, "tools.0.function.parameters", "levels deep"),
    ({"tools": [tool(description="\ud800")]}, "tools.0.function.description", "nicode"),
    ({"tools": [tool(parameters={"title": "\ud800"})]}, "tools.0.function.parameters", "not valid Unicode"),
    (
        {"messages": [*HELLO, called('{"a": "\\ud800"}'), RESULT]},
        "messages.1.tool_calls.0.function.arguments",
        "not valid Unicode",
    ),
    ({"chat_template_kwargs": {"a": "\ud800"}}, "chat_template_kwargs", "not valid Unicode"),
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools.0.type", "function"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tools": [tool()], "tool_choice": "any"}, "tool_choice", "give"),
    ({"tools": [tool()], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "give"),
    (
        {"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice",
        "g is not in tools",
    ),
    ({"tools": [tool()], "response_format": {"type": "json_object"}}, None, "exclude each other"),
    ({"messages": [*HELLO, called(), {**RESULT, "tool_call_id": "b"}]}, "messages", "message 2: tool_call_id 'b'"),
    ({"messages": [*HELLO, called(), RESULT, RESULT]}, "messages", "message 3: tool_call_id 'a'"),
    ({"messages": [*HELLO, called(), *HELLO]}, "messages", "no result before message 2"),
    ({"messages": [*HELLO, called()]}, "messages", "no result before message 2"),
    ({"messages": [*HELLO, {"role": "tool", "content": "x"}]}, "messages.1", "tool_call_id is missing"),
    ({"messages": [{**RESULT, "role": "user"}]}, "messages.0", "for the role tool"),
    (
        {"messages": [*HELLO, called("{broken"), RESULT]},
        "messages.1.tool_calls.0.function.arguments",
        "not valid JSON",
    ),
    ({"messages": [*HELLO, called("[1]"), RESULT]}, "messages.1.tool_calls.0.function.arguments", "object"),
    (
        {"messages": [*HELLO, called("[" * 100_000), RESULT]},
        "messages.1.tool_calls.0.function.arguments",
        "not valid JSON",
    ),
    ({"messages": [*HELLO, called(id=""), RESULT]}, "messages.1.tool_calls.0.id", "at least 1"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "param", "problem"), BAD, ids=[one[2] for one in BAD])
def test_bad_requests_are_refused_by_name(
    raw: httpx.Client, says_calls: SaysCalls, change: dict[str, Any], param: str | None, problem: str
) -> None:
    body = json.dumps({"model": says_calls("x").facts.name, "messages": HELLO, **change})
    answer = raw.post("/chat/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    found = answer.json()["error"]
    assert problem in found["message"]
    assert found["param"] == param


def test_a_template_without_tools_refuses_them(
    openai_client: OpenAI, says_calls: SaysCalls, tmp_path: Path
) -> None:
    speaker = says_calls("x", where=make_tokenizer(tmp_path))
    speaker.facts = dataclasses.replace(speaker.facts, tool_format="hermes")
    with pytest.raises(openai.BadRequestError, match="does not show tools to the model") as caught:
        openai_client.chat.completions.create(model=speaker.facts.name, messages=HELLO, tools=TOOLS)
    assert caught.value.param == "tools"


def test_a_template_may_fail_for_tools(openai_client: OpenAI, says_calls: SaysCalls, tmp_path: Path) -> None:
    folder = make_tool_tokenizer(tmp_path, "hermes")
    template = (
        "{% if tools %}{{ raise_exception('one tool only') }}<tool_call>{% endif %}{{ messages[0].content }}"
    )
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(openai.BadRequestError, match="refuses these messages with tools: one tool only"):
        openai_client.chat.completions.create(
            model=says_calls("x", where=folder).facts.name, messages=HELLO, tools=TOOLS
        )


def test_a_deployment_names_an_unknown_format(
    openai_client: OpenAI, says_calls: SaysCalls, tmp_path: Path
) -> None:
    folder = make_tool_tokenizer(tmp_path, "hermes")
    (folder / "chat_template.jinja").write_text("{{ tools }}{{ messages[0].content }}")
    speaker = says_calls(CALLS["hermes"], where=folder)
    with pytest.raises(openai.BadRequestError, match="tool_format: hermes, llama, mistral"):
        openai_client.chat.completions.create(model=speaker.facts.name, messages=HELLO, tools=TOOLS)
    speaker.facts = dataclasses.replace(speaker.facts, tool_format="hermes")
    answer = openai_client.chat.completions.create(model=speaker.facts.name, messages=HELLO, tools=TOOLS)
    assert calls_of(answer.choices[0].message) == EXPECTED


def test_templates_of_mistral_refuse_ids_of_other_servers(
    openai_client: OpenAI, says_calls: SaysCalls
) -> None:
    name = says_calls("x", "mistral").facts.name
    with pytest.raises(openai.BadRequestError, match="ids have 9 characters"):
        openai_client.chat.completions.create(model=name, messages=[*HELLO, called(), RESULT])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("<tool_call>{...}", "hermes"),
        ("<tool_call><function=f>", None),
        ("<tool_call>f<arg_key>", None),
        ("[TOOL_CALLS]", "mistral"),
        ("<|python_tag|>", "llama"),
        ('{"name": f, "parameters": x}', "llama"),
        ("{{ tools }}", None),
    ],
)
def test_the_template_tells_the_format(tmp_path: Path, template: str, found: str | None) -> None:
    folder = make_tokenizer(tmp_path)
    (folder / "chat_template.jinja").write_text(template)
    assert ServedTokenizer(folder).vocabulary.tool_format == found


def test_arguments_of_calls_stay_json(openai_client: OpenAI, says_calls: SaysCalls) -> None:
    speaker = says_calls(CALLS["hermes"])
    answer = openai_client.chat.completions.create(
        model=speaker.facts.name, messages=HELLO, tools=TOOLS, n=2, logprobs=True
    )
    for choice in answer.choices:
        assert [json.loads(text) for _, text in calls_of(choice.message)] == [json.loads(ARGUMENTS), {}]
        assert choice.logprobs is not None
