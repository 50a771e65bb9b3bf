"""A real model behind the OpenAI API: its text is that of ``transformers``, whichever other requests there are."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from tests.api.conftest import Plane, wait_until
from tests.api.local_engine import LocalEngine
from tests.api.speaking import SPECIAL, make_llama, make_tokenizer, make_tool_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from share_compute.data.tokenization import has_chat_template
from share_compute.specification.serve import ToolFormat

pytestmark = pytest.mark.exact

PROMPT = "the quick brown fox"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with random weights."""
    return make_llama(tmp_path_factory.mktemp("model"), window=256)


@pytest.fixture
def engine(served: Plane, folder: Path) -> Iterator[LocalEngine]:
    engine = LocalEngine("llama", folder, max_sequences=4, max_queued=8)
    served.app.state.context.engines.add(engine)
    yield engine
    engine.close()


@pytest.fixture
def client(served: Plane, engine: LocalEngine) -> Iterator[OpenAI]:
    del engine
    with OpenAI(base_url=f"{served.url}/v1", api_key=served.api_key, max_retries=0, timeout=60) as client:
        yield client


def complete(client: OpenAI, **options: Any) -> str:
    given = {"model": "llama", "prompt": PROMPT, "max_tokens": 24, **options}
    return str(client.completions.create(**given).choices[0].text)


def test_the_most_probable_text_is_that_of_transformers(client: OpenAI, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    expected = model.generate(ids, max_new_tokens=24, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
    text = tokenizer.decode(expected, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    with ThreadPoolExecutor(4) as others:
        noise = [others.submit(complete, client, prompt=[[5, 6, index]], seed=1) for index in range(4)]
        assert complete(client, temperature=0, extra_body={"ignore_eos": True}) == text
        assert all(one.result() is not None for one in noise)
        seeded = [others.submit(complete, client, seed=3) for _ in range(2)]
        assert {one.result() for one in seeded} == {complete(client, seed=3)}


def test_biases_and_stop_tokens_reach_the_model(client: OpenAI, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    fox = tokenizer("x", add_special_tokens=False).input_ids[0]
    for temperature in (0, 2):
        given: dict[str, Any] = {"temperature": temperature, "seed": 2, "max_tokens": 8}
        assert complete(client, **given, logit_bias={str(fox): 100}) == "x" * 8
        ended = {"stop_token_ids": [fox]}
        assert complete(client, **given, logit_bias={str(fox): 100}, extra_body=ended) == ""
        waits = complete(client, **given, logit_bias={str(fox): 100}, extra_body={**ended, "min_tokens": 3})
        assert waits
        assert "x" not in waits
        banned = {str(token): -100 for token in range(300)}
        free = complete(client, **given, logit_bias=banned, extra_body={"skip_special_tokens": False})
        assert set(re.findall(r"<[^>]*>|[^<]+", free)) <= {*tokenizer.all_special_tokens, *SPECIAL}


def test_text_of_a_schema_is_json_of_it(client: OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"animal": {"enum": ["fox", "dog"]}, "lazy": {"type": "boolean"}},
        "required": ["animal", "lazy"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model="llama",
        messages=[{"role": "user", "content": "Which?"}],
        response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
    )
    found = json.loads(answer.choices[0].message.content or "")
    assert set(found) == {"animal", "lazy"}
    assert found["animal"] in ("fox", "dog")
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("tool_format", ["hermes", "llama", "mistral"])
def test_required_calls_follow_their_schema(served: Plane, tmp_path: Path, tool_format: ToolFormat) -> None:
    folder = make_llama(tmp_path, window=1024, vocab_size=320)
    engine = LocalEngine("calls", make_tool_tokenizer(folder, tool_format))
    served.app.state.context.engines.add(engine)
    schema = {
        "type": "object",
        "properties": {"animal": {"enum": ["fox", "dog"]}, "lazy": {"type": "boolean"}},
        "required": ["animal", "lazy"],
        "additionalProperties": False,
    }
    tool: Any = {"type": "function", "function": {"name": "choose", "parameters": schema}}
    given: dict[str, Any] = {
        "model": "calls",
        "messages": [{"role": "user", "content": "Which?"}],
        "tools": [tool],
        "seed": 1,
    }
    with OpenAI(base_url=f"{served.url}/v1", api_key=served.api_key, max_retries=0, timeout=60) as client:
        for choice in ("required", {"type": "function", "function": {"name": "choose"}}):
            (answer,) = client.chat.completions.create(
                **given, tool_choice=choice, parallel_tool_calls=False
            ).choices
            (call,) = answer.message.tool_calls or ()
            assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
            found = json.loads(call.function.arguments)
            assert call.function.name == "choose"
            assert found["animal"] in ("fox", "dog")
            assert found.keys() == {"animal", "lazy"}
    engine.close()


def test_nothing_is_left_of_clients_that_go(client: OpenAI, engine: LocalEngine) -> None:
    stream = client.completions.create(
        model="llama", prompt=PROMPT, max_tokens=200, n=4, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    wait_until(lambda: engine.stats().running == engine.stats().queued == 0)


def test_more_than_may_wait_are_refused(client: OpenAI) -> None:
    def ask(stack: ExitStack) -> None:
        for _ in range(40):  # each needs all KV slots, and fills half of the queue; some may end meanwhile
            stream = client.completions.create(
                model="llama",
                prompt=PROMPT,
                max_tokens=200,
                n=4,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            stack.enter_context(stream)

    with ExitStack() as stack, pytest.raises(openai.RateLimitError) as caught:
        ask(stack)
    assert int(caught.value.response.headers["retry-after"]) >= 1


def test_a_model_that_is_taken_down_says_so(client: OpenAI, engine: LocalEngine) -> None:
    engine.close()
    with pytest.raises(openai.InternalServerError, match="not served any more"):
        complete(client)


def test_a_sequence_that_cannot_be_computed_stops_no_others(
    served: Plane, folder: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    engine = LocalEngine("copy", copy)
    served.app.state.context.engines.add(engine)
    with OpenAI(base_url=f"{served.url}/v1", api_key=served.api_key, max_retries=0, timeout=60) as client:
        before = complete(client, model="copy", seed=1)
        for file in copy.glob("tokenizer*"):
            file.unlink()  # constrained text needs the library, which is loaded at its first use
        with pytest.raises(openai.BadRequestError, match="tokenizer"):
            complete(client, model="copy", extra_body={"response_format": {"type": "json_object"}})
        assert complete(client, model="copy", seed=1) == before
    engine.close()


def test_models_say_whether_they_write_conversations(client: OpenAI, tmp_path: Path) -> None:
    model = next(iter(client.models.list().data))
    assert model.model_extra is not None
    assert model.model_extra["has_chat_template"] is True
    assert not has_chat_template(make_tokenizer(tmp_path / "base", with_template=False))
    (tmp_path / "base" / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    assert has_chat_template(tmp_path / "base")
    (tmp_path / "base" / "tokenizer_config.json").write_text("[" * 100_000)
    assert not has_chat_template(tmp_path / "base")
