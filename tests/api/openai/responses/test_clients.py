"""The Responses API, by the real ``langchain-openai`` and ``litellm`` packages against a live server."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel
from tests.api.conftest import Plane
from tests.api.openai.conftest import ANSWER, CALLS, EXPECTED, HELLO, TOOLS, Says, SaysCalls
from tests.programs import require_package

from share_compute.errors import Unavailable

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
FOUND = [(name, json.loads(arguments)) for name, arguments in EXPECTED]
FLAT: list[Any] = [{"type": "function", **tool["function"]} for tool in TOOLS]


class Place(BaseModel):
    """A place."""

    name: str
    people: int


class TestLangChain:
    def model(self, served: Plane, name: str) -> Any:
        package = require_package("langchain_openai")
        return package.ChatOpenAI(
            model=name,
            base_url=f"{served.url}/v1",
            api_key=served.api_key,
            max_retries=0,
            use_responses_api=True,
        )

    def test_text(self, served: Plane, says: Says) -> None:
        model = self.model(served, says().facts.name)
        answer = model.invoke([("system", "Be brief."), ("human", "Hello")])
        assert answer.text == ANSWER
        assert answer.usage_metadata["total_tokens"] > answer.usage_metadata["input_tokens"] > 0
        assert model.invoke([("human", "Hello"), answer, ("human", "And?")]).text == ANSWER
        whole = None
        for chunk in model.stream("Hello"):
            whole = chunk if whole is None else whole + chunk
        assert whole is not None
        assert whole.text == ANSWER
        assert whole.usage_metadata == model.invoke("Hello").usage_metadata

    def test_calls_and_their_results_go_round(self, served: Plane, says_calls: SaysCalls) -> None:
        from langchain_core.messages import HumanMessage, ToolMessage

        bound = self.model(served, says_calls(CALLS["hermes"]).facts.name).bind_tools(TOOLS)
        question = HumanMessage("Is it warm in Köln?")
        answer = bound.invoke([question])
        assert [(call["name"], call["args"]) for call in answer.tool_calls] == FOUND
        results = [ToolMessage("warm", tool_call_id=call["id"]) for call in answer.tool_calls]
        assert bound.invoke([question, answer, *results]).tool_calls
        whole = None
        for chunk in bound.stream([question]):
            whole = chunk if whole is None else whole + chunk
        assert whole is not None
        assert [(call["name"], call["args"]) for call in whole.tool_calls] == FOUND
        assert whole.invalid_tool_calls == []
        streamed = [ToolMessage("warm", tool_call_id=call["id"]) for call in whole.tool_calls]
        assert bound.invoke([question, whole, *streamed]).tool_calls

    def test_structured_output(self, served: Plane, says: Says) -> None:
        model = self.model(served, says('{"name": "Köln", "people": 3}').facts.name)
        structured = model.with_structured_output(Place, method="json_schema")
        assert structured.invoke("Which?") == Place(name="Köln", people=3)

    def test_failures_are_errors(self, served: Plane, says: Says) -> None:
        import openai

        speaker = says()
        model = self.model(served, speaker.facts.name)
        with pytest.raises(openai.BadRequestError, match="no tools of type web_search"):
            model.bind_tools([{"type": "web_search"}]).invoke("Hello")
        speaker.failure = (3, Unavailable("a machine was lost", hint="try again"))
        with pytest.raises(ValueError, match="a machine was lost"):
            list(model.stream("Hello"))


class TestLiteLlm:
    @pytest.fixture
    def litellm(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it would request prices online
        return require_package("litellm")

    @pytest.fixture
    def access(self, served: Plane) -> dict[str, Any]:
        return {"api_base": f"{served.url}/v1", "api_key": served.api_key, "num_retries": 0}

    def test_text(self, litellm: Any, access: dict[str, Any], says: Says) -> None:
        given = {
            "model": f"openai/{says().facts.name}",
            "input": "Hello",
            "instructions": "Be brief.",
            **access,
        }
        answer = litellm.responses(**given)
        assert answer.output[0].content[0].text == ANSWER
        assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
        events = list(litellm.responses(**given, stream=True))
        assert (
            "".join(event.delta for event in events if event.type == "response.output_text.delta") == ANSWER
        )
        assert events[-1].type == "response.completed"
        assert events[-1].response.output[0].content[0].text == ANSWER

    def test_calls_and_their_results_go_round(
        self, litellm: Any, access: dict[str, Any], says_calls: SaysCalls
    ) -> None:
        given = {"model": f"openai/{says_calls(CALLS['hermes']).facts.name}", "tools": FLAT, **access}
        answer = litellm.responses(**given, input=HELLO)
        assert [(call.name, json.loads(call.arguments)) for call in answer.output] == FOUND
        outputs = [
            {"type": "function_call_output", "call_id": call.call_id, "output": "warm"}
            for call in answer.output
        ]
        again = litellm.responses(**given, input=[*HELLO, *answer.output, *outputs])
        assert len(again.output) == len(EXPECTED)

    def test_errors_have_the_packages_types(self, litellm: Any, access: dict[str, Any], says: Says) -> None:
        given = {"model": f"openai/{says().facts.name}", "input": "Hello", **access}
        with pytest.raises(litellm.BadRequestError, match="no tools of type web_search"):
            litellm.responses(**given, tools=[{"type": "web_search"}])
