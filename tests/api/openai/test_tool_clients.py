"""Tools of chats, by the real ``litellm`` and ``langchain-openai`` packages against a live server."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.api.conftest import Plane
from tests.api.openai.conftest import ARGUMENTS, CALLS, EXPECTED, HELLO, TOOLS, SaysCalls
from tests.api.speaking import Speaker
from tests.programs import require_package

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
FOUND = [(name, json.loads(arguments)) for name, arguments in EXPECTED]


class TestLiteLlm:
    @pytest.fixture
    def litellm(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it would request prices online
        return require_package("litellm")

    @pytest.fixture
    def given(self, served: Plane, says_calls: SaysCalls) -> dict[str, Any]:
        speaker = says_calls(CALLS["hermes"])
        access = {"api_base": f"{served.url}/v1", "api_key": served.api_key, "num_retries": 0}
        return {"model": f"openai/{speaker.facts.name}", "messages": HELLO, "tools": TOOLS, **access}

    def test_calls_and_their_results_go_round(self, litellm: Any, given: dict[str, Any]) -> None:
        answer = litellm.completion(**given)
        (choice,) = answer.choices
        calls = choice.message.tool_calls
        assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == FOUND
        assert choice.finish_reason == "tool_calls"
        results = [{"role": "tool", "tool_call_id": call.id, "content": "warm"} for call in calls]
        again = litellm.completion(**{**given, "messages": [*HELLO, choice.message, *results]})
        assert again.choices[0].message.tool_calls

    def test_calls_are_streamed(self, litellm: Any, given: dict[str, Any]) -> None:
        chunks = list(litellm.completion(**given, stream=True))
        answer = litellm.stream_chunk_builder(chunks, messages=HELLO)
        calls = answer.choices[0].message.tool_calls
        assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == FOUND
        assert answer.choices[0].finish_reason == "tool_calls"

    def test_errors_have_the_packages_types(self, litellm: Any, given: dict[str, Any]) -> None:
        for stream in (False, True):
            with pytest.raises(litellm.BadRequestError, match="zebra is not in tools"):
                litellm.completion(
                    **given, stream=stream, tool_choice={"type": "function", "function": {"name": "zebra"}}
                )


class TestLangChain:
    @pytest.fixture
    def speaker(self, says_calls: SaysCalls) -> Speaker:
        return says_calls(CALLS["hermes"])

    @pytest.fixture
    def model(self, served: Plane, speaker: Speaker) -> Any:
        package = require_package("langchain_openai")
        return package.ChatOpenAI(
            model=speaker.facts.name, base_url=f"{served.url}/v1", api_key=served.api_key, max_retries=0
        )

    def test_calls_and_their_results_go_round(self, model: Any) -> None:
        from langchain_core.messages import HumanMessage, ToolMessage

        bound = model.bind_tools(TOOLS)
        question = HumanMessage("Is it warm in Köln?")
        answer = bound.invoke([question])
        assert [(call["name"], call["args"]) for call in answer.tool_calls] == FOUND
        assert answer.response_metadata["finish_reason"] == "tool_calls"
        results = [ToolMessage("warm", tool_call_id=call["id"]) for call in answer.tool_calls]
        assert bound.invoke([question, answer, *results]).tool_calls

    def test_calls_are_streamed_and_joined(self, model: Any) -> None:
        whole = None
        for chunk in model.bind_tools(TOOLS).stream("Is it warm in Köln?"):
            whole = chunk if whole is None else whole + chunk
        assert whole is not None
        assert [(call["name"], call["args"]) for call in whole.tool_calls] == FOUND
        assert whole.invalid_tool_calls == []

    def test_structured_output_is_a_named_tool(self, model: Any, speaker: Speaker) -> None:
        schema = {**TOOLS[0]["function"]["parameters"], "title": "weather", "description": "Weather."}
        structured = model.with_structured_output(schema, method="function_calling")
        assert structured.invoke("Is it warm in Köln?") == json.loads(ARGUMENTS)
        assert "tail" not in (speaker.received[-1].options.grammar or "tail")

    def test_errors_name_the_field(self, model: Any) -> None:
        import openai

        wrong = {"type": "function", "function": {"name": "a b"}}
        with pytest.raises(openai.BadRequestError, match=r"tools.0.function.name"):
            model.bind(tools=[wrong]).invoke("Is it warm in Köln?")
