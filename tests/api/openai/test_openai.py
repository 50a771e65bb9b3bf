"""The OpenAI API, by the real ``openai`` package against a live server: every feature, and every error."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel
from tests.api.conftest import Plane, wait_until
from tests.api.openai.conftest import ANSWER, Says
from tests.api.speaking import WINDOW, Encoder, Speaker, make_tokenizer
from tokenizers import Tokenizer

from share_compute.errors import Busy, TooLong, Unavailable
from share_compute.inference.scheduler.options import Generation
from share_compute.specification import parse_deployment
from share_compute_api.connection import sse
from share_compute_api.openai import answer_stream
from share_compute_api.openai.requests import Message
from share_compute_api.workers.isolated.tokenizer import ServedTokenizer

HELLO = [{"role": "user", "content": "Hello"}]


def error(caught: pytest.ExceptionInfo[Any]) -> dict[str, Any]:
    """Return the error object, whose shape is the same everywhere."""
    body = caught.value.body
    assert isinstance(body, dict), caught.value
    assert {"message", "type", "param", "code"} <= set(body)
    return body


# Models


def test_models_are_listed_and_shown(openai_client: OpenAI, says: Says) -> None:
    speaker = says()
    name = speaker.facts.name
    assert name in [model.id for model in openai_client.models.list()]
    found = openai_client.models.retrieve(name)
    assert (found.object, found.created, found.owned_by) == ("model", 1_700_000_000, "share-compute")
    assert found.model_extra is not None
    assert found.model_extra["max_model_len"] == WINDOW


# Chats


def test_templates_receive_the_name_of_the_speaker() -> None:
    message = Message.model_validate({"role": "user", "content": "Hello", "name": "ada"}).for_template()
    assert message == {"role": "user", "content": "Hello", "name": "ada"}


def test_a_chat_is_answered(
    openai_client: OpenAI, says: Says, folder: Path, tokenizer: ServedTokenizer
) -> None:
    speaker = says()
    answer = openai_client.chat.completions.create(
        model=speaker.facts.name,
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]},
            {"role": "assistant", "content": "Yes?", "refusal": None},
            {"role": "user", "content": "Go on", "name": "ada"},
        ],
        user="ada",
        store=False,
        metadata={"a": "b"},
        service_tier="auto",
        tools=[],
        logit_bias={},
        extra_body={"stop_token_ids": [], "min_tokens": 0, "skip_special_tokens": True},
    )
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == (
        "assistant",
        ANSWER,
        "stop",
    )
    assert choice.logprobs is None
    (generation,) = speaker.received
    prompt = "<|system|>Be brief.<|end|><|user|>Hello<|end|><|assistant|>Yes?<|end|><|user|>Go on<|end|><|assistant|>"
    library = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert library.decode(generation.prompt, skip_special_tokens=False) == prompt
    assert generation.owner.startswith("key-")
    assert generation.options.max_tokens == WINDOW - len(generation.prompt)
    assert generation.options.stop_token_ids == tokenizer.vocabulary.end_ids
    usage = answer.usage
    assert usage is not None
    spoken = len(tokenizer.encode(ANSWER, 1000)) + 1
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(generation.prompt), spoken)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 3
    # An answer can be sent back unchanged as part of the next request.
    again = [*HELLO, choice.message, {"role": "user", "content": "And?"}]
    assert openai_client.chat.completions.create(model=speaker.facts.name, messages=again).choices  # type: ignore[arg-type]


def test_a_chat_is_streamed(openai_client: OpenAI, says: Says) -> None:
    stream = openai_client.chat.completions.create(
        model=says().facts.name, messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    *spoken, last = chunks
    assert spoken[0].choices[0].delta.role == "assistant"
    texts = [chunk.choices[0].delta.content for chunk in spoken]
    assert "".join(text or "" for text in texts) == ANSWER
    assert len([text for text in texts if text]) > 3
    assert [chunk.choices[0].finish_reason for chunk in spoken if chunk.choices[0].finish_reason] == ["stop"]
    assert all(chunk.usage is None for chunk in spoken)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens


def test_the_packages_own_helper_reads_a_stream(openai_client: OpenAI, says: Says) -> None:
    with openai_client.chat.completions.stream(
        model=says().facts.name, messages=HELLO, logprobs=True
    ) as stream:
        kinds = {event.type for event in stream}
        answer = stream.get_final_completion()
    assert {"content.delta", "content.done", "logprobs.content.delta"} <= kinds
    assert answer.choices[0].message.content == ANSWER


def test_several_answers_have_seeds_of_their_own(
    openai_client: OpenAI, says: Says, tokenizer: ServedTokenizer
) -> None:
    def by_seed(generation: Generation) -> list[int]:
        return list(tokenizer.encode(str(generation.options.seed % 1000), 99))

    speaker = says(by_seed)

    def ask(**options: Any) -> list[str | None]:
        given = {"model": speaker.facts.name, "messages": HELLO, "n": 3, **options}
        return [choice.message.content for choice in openai_client.chat.completions.create(**given).choices]

    first, again, other = ask(seed=7), ask(seed=7), ask(seed=8)
    assert first == again
    assert first[0] == "7"
    assert len(set(first)) == 3
    assert first != other
    assert speaker.received[0].options.seed == 7
    assert len({ask(n=1)[0], ask(n=1)[0], ask(n=1)[0]}) > 1
    assert len({generation.sequence for generation in speaker.received}) == len(speaker.received)
    streamed: dict[int, str] = {}
    for chunk in openai_client.chat.completions.create(
        model=speaker.facts.name, messages=HELLO, n=3, seed=7, stream=True
    ):
        for choice in chunk.choices:
            streamed[choice.index] = streamed.get(choice.index, "") + (choice.delta.content or "")
    assert [streamed[index] for index in range(3)] == first


def test_all_options_reach_the_engine(openai_client: OpenAI, says: Says) -> None:
    speaker = says()
    openai_client.chat.completions.create(
        model=speaker.facts.name,
        messages=HELLO,
        temperature=0.5,
        top_p=0.9,
        frequency_penalty=0.25,
        presence_penalty=-0.5,
        seed=-(2**62),
        max_completion_tokens=5,
        max_tokens=9,
        logit_bias={"7": -100, "5": 2},
        extra_body={
            "top_k": 40,
            "min_p": 0.05,
            "repetition_penalty": 1.2,
            "ignore_eos": True,
            "stop_token_ids": [9, 5, 9],
            "min_tokens": 4,
        },
    )
    options = speaker.received[0].options.model_dump(exclude_defaults=True)
    assert options == {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.25,
        "presence_penalty": -0.5,
        "seed": -(2**62),
        "max_tokens": 5,
        "logit_bias": ((5, 2.0), (7, -100.0)),
        "stop_token_ids": (9, 5),
        "min_tokens": 4,
    }


def test_an_answer_that_is_too_long_ends_by_length(
    openai_client: OpenAI, says: Says, tokenizer: ServedTokenizer
) -> None:
    answer = openai_client.chat.completions.create(model=says().facts.name, messages=HELLO, max_tokens=3)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.content == tokenizer.vocabulary.decode(tokenizer.encode(ANSWER, 99)[:3])
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


@pytest.mark.parametrize(
    ("stop", "shown"),
    [
        ("fox", "the quick brown "),
        (["zebra", "k brown f"], "the quic"),
        (["京 ", "in "], "the quick brown fox is "),
        ("😀", "the quick brown fox is in 東京 "),
        ("😀!", ANSWER),
        ([], ANSWER),
    ],
)
def test_stop_strings_end_a_text_wherever_tokens_do(
    openai_client: OpenAI, says: Says, stop: str | list[str], shown: str
) -> None:
    speaker = says()
    whole = openai_client.chat.completions.create(model=speaker.facts.name, messages=HELLO, stop=stop)
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (shown, "stop")
    chunks = list(
        openai_client.chat.completions.create(
            model=speaker.facts.name, messages=HELLO, stop=stop, stream=True
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == shown
    if shown != ANSWER:
        wait_until(lambda: {one.sequence for one in speaker.received} <= speaker.closed)


def test_a_special_token_can_be_a_stop_string(
    openai_client: OpenAI, says: Says, tokenizer: ServedTokenizer
) -> None:
    user = tokenizer.vocabulary.special_id("<|user|>")
    assert user is not None
    ids = [*tokenizer.encode("well ", 9), user, *tokenizer.encode("and more", 99)]
    speaker = says(lambda _: ids)
    answer = openai_client.completions.create(
        model=speaker.facts.name, prompt="x", stop="<|user|>", max_tokens=99
    )
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("well ", "stop")
    assert speaker.received[0].options.stop_token_ids == (*tokenizer.vocabulary.end_ids, user)


def test_special_tokens_are_text_if_wanted(
    openai_client: OpenAI, says: Says, tokenizer: ServedTokenizer
) -> None:
    vocabulary = tokenizer.vocabulary
    user, (end,) = vocabulary.special_id("<|user|>"), vocabulary.end_ids
    assert user is not None
    ids = [*tokenizer.encode("well ", 9), user, *tokenizer.encode("and more", 99), end, user]
    name = says(lambda _: ids).facts.name

    def ask(**extra: Any) -> str:
        given: dict[str, Any] = {"model": name, "prompt": "x", "max_tokens": 99, "extra_body": extra}
        whole = openai_client.completions.create(**given).choices[0].text
        streamed = openai_client.completions.create(**given, stream=True)
        assert "".join(chunk.choices[0].text for chunk in streamed) == whole
        return str(whole)

    assert ask() == ask(skip_special_tokens=None) == ask(skip_special_tokens=True) == "well and more"
    assert ask(skip_special_tokens=False) == "well <|user|>and more"
    # The token that ends an answer is never part of its text.
    assert ask(skip_special_tokens=False, stop_token_ids=[user]) == "well "
    everything = ask(skip_special_tokens=False, ignore_eos=True)
    assert everything == "well <|user|>and more<|end|><|user|>"


def test_nothing_ends_an_answer_before_min_tokens(
    openai_client: OpenAI, says: Says, tokenizer: ServedTokenizer
) -> None:
    speaker = says("fox and fox and fox")
    first = next(
        count
        for count in range(99)
        if "fox" in tokenizer.vocabulary.decode(tokenizer.encode("fox and fox", 99)[:count])
    )

    def ask(**extra: Any) -> str | None:
        answer = openai_client.chat.completions.create(
            model=speaker.facts.name, messages=HELLO, stop="fox", extra_body=extra
        )
        return answer.choices[0].message.content

    assert ask() == ""
    assert ask(min_tokens=first) == "fox and "
    assert speaker.received[-1].options.min_tokens == first
    # JSON ends when it is complete.
    assert ask(min_tokens=first, response_format={"type": "json_object"}) == ""


def test_a_body_that_is_not_json_is_refused_with_the_place(plane: Plane) -> None:
    headers = {"Authorization": f"Bearer {plane.api_key}", "Content-Type": "application/json"}
    answer = httpx.post(f"{plane.url}/v1/completions", content=b'{"model": ', headers=headers)
    assert answer.status_code == 400
    assert (
        answer.json()["error"]["message"] == "the body is not valid JSON at character 11: a value is missing"
    )


def test_a_chats_tokens_come_with_their_probabilities(openai_client: OpenAI, says: Says) -> None:
    name = says().facts.name
    answer = openai_client.chat.completions.create(model=name, messages=HELLO, logprobs=True, top_logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    whole = b"".join(bytes(token.bytes or []) for token in logprobs.content)
    assert whole.decode() == ANSWER
    assert all(token.logprob == -0.25 for token in logprobs.content)
    assert all([top.logprob for top in token.top_logprobs] == [-1.0, -2.0] for token in logprobs.content)
    assert logprobs.content[0].token == logprobs.content[0].top_logprobs[0].token
    streamed = []
    for chunk in openai_client.chat.completions.create(
        model=name, messages=HELLO, logprobs=True, top_logprobs=2, stream=True
    ):
        streamed += (chunk.choices[0].logprobs and chunk.choices[0].logprobs.content) or []
    assert streamed == logprobs.content
    alone = (
        openai_client.chat.completions.create(model=name, messages=HELLO, logprobs=True).choices[0].logprobs
    )
    assert alone is not None
    assert alone.content is not None
    assert all(token.top_logprobs == [] for token in alone.content)


class Animal(BaseModel):
    name: str
    legs: int


def test_an_answer_follows_a_schema(openai_client: OpenAI, says: Says) -> None:
    speaker = says('{"name": "fox", "legs": 4}')
    name = speaker.facts.name
    parsed = openai_client.chat.completions.parse(model=name, messages=HELLO, response_format=Animal)
    assert parsed.choices[0].message.parsed == Animal(name="fox", legs=4)
    schema = speaker.received[0].options.json_schema
    assert schema is not None
    assert json.loads(schema)["required"] == ["name", "legs"]
    openai_client.chat.completions.create(model=name, messages=HELLO, response_format={"type": "json_object"})
    assert speaker.received[1].options.json_schema == ""
    openai_client.chat.completions.create(model=name, messages=HELLO, response_format={"type": "text"})
    assert speaker.received[2].options.json_schema is None
    broken = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "zebra"}}}
    with pytest.raises(openai.BadRequestError) as caught:
        openai_client.chat.completions.create(model=name, messages=HELLO, response_format=broken)  # type: ignore[arg-type]
    assert "JSON schema" in error(caught)["message"]


# Completions


def test_texts_are_completed(openai_client: OpenAI, says: Says, tokenizer: ServedTokenizer) -> None:
    speaker = says(lambda generation: generation.prompt[:2])
    name = speaker.facts.name
    ids = list(tokenizer.encode("the fox", 9))
    begin = tokenizer.vocabulary.decode(ids[:2])
    for prompt in ("the fox", ids, ["the fox"], [ids]):
        answer = openai_client.completions.create(model=name, prompt=prompt)
        assert answer.object == "text_completion"
        assert [(choice.text, choice.finish_reason) for choice in answer.choices] == [(begin, "stop")]
    assert speaker.received[0].options.max_tokens == 16
    several = openai_client.completions.create(model=name, prompt=["the fox", "lazy dog"], n=2, max_tokens=1)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert several.choices[0].text == several.choices[1].text == tokenizer.vocabulary.decode(ids[:1])
    assert several.choices[2].text == several.choices[3].text
    assert several.usage is not None
    prompts = sum(len(tokenizer.encode(text, 9)) for text in ("the fox", "lazy dog"))
    assert (several.usage.prompt_tokens, several.usage.completion_tokens) == (prompts, 4)
    nothing = openai_client.completions.create(
        model=name, prompt="the fox", max_tokens=0, echo=False, best_of=1
    )
    assert (nothing.choices[0].text, nothing.choices[0].finish_reason) == ("", "length")


def test_a_completion_is_streamed_with_its_tokens(openai_client: OpenAI, says: Says) -> None:
    name = says().facts.name
    options: dict[str, Any] = {"model": name, "prompt": "x", "max_tokens": 99, "logprobs": 2}
    whole = openai_client.completions.create(**options).choices[0].logprobs
    assert whole is not None
    assert whole.tokens is not None
    assert whole.top_logprobs is not None
    assert whole.text_offset is not None
    assert len(whole.tokens) == len(whole.token_logprobs or []) == len(whole.top_logprobs)
    first = whole.tokens[0]
    assert whole.top_logprobs[0][first] == -1.0
    assert whole.text_offset[:2] == [0, len(first)]
    chunks = list(
        openai_client.completions.create(**options, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == ANSWER
    assert chunks[-1].usage is not None
    tokens: list[str] = []
    for chunk in chunks[:-1]:
        logprobs = chunk.choices[0].logprobs
        tokens += (logprobs and logprobs.tokens) or []
    assert tokens == whole.tokens
    plain = openai_client.completions.create(**{**options, "logprobs": 0}).choices[0].logprobs
    assert plain is not None
    assert plain.top_logprobs is None


# Embeddings


def test_texts_become_vectors(
    openai_client: OpenAI, served: Plane, folder: Path, tokenizer: ServedTokenizer
) -> None:
    served.app.state.context.engines.add(Encoder("encoder", folder))
    texts = ["the fox", "lazy"]
    expected = [tokenizer.encode(text, 9) for text in texts]
    found = openai_client.embeddings.create(model="encoder", input=texts)  # the package asks for base64
    assert [one.index for one in found.data] == [0, 1]
    assert [list(one.embedding) for one in found.data] == [[len(ids), sum(ids), -0.5] for ids in expected]
    assert found.usage.prompt_tokens == found.usage.total_tokens == sum(map(len, expected))
    ids = [list(one) for one in expected]
    plain = openai_client.embeddings.create(model="encoder", input=ids, encoding_format="float", dimensions=3)
    assert [one.embedding for one in plain.data] == [list(one.embedding) for one in found.data]
    with pytest.raises(openai.BadRequestError) as caught:
        openai_client.embeddings.create(model="encoder", input="x", dimensions=2)
    assert error(caught)["param"] == "dimensions"
    with pytest.raises(openai.BadRequestError) as caught:
        openai_client.chat.completions.create(model="encoder", messages=HELLO)
    assert "/v1/embeddings" in error(caught)["message"]


def test_a_model_that_writes_gives_no_vectors(openai_client: OpenAI, says: Says) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        openai_client.embeddings.create(model=says().facts.name, input="x")
    assert "writes text" in error(caught)["message"]


# Errors


def test_the_key_must_be_right(served: Plane, says: Says) -> None:
    name = says().facts.name
    with OpenAI(base_url=f"{served.url}/v1", api_key="sck_wrong", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError) as caught:
            stranger.models.list()
        assert error(caught)["code"] == "invalid_api_key"
        with pytest.raises(openai.AuthenticationError):
            stranger.chat.completions.create(model=name, messages=HELLO)
    for path in ("models", f"models/{name}"):
        assert httpx.get(f"{served.url}/v1/{path}").status_code == 401
    for path in ("chat/completions", "completions", "embeddings"):
        assert httpx.post(f"{served.url}/v1/{path}", json={}).status_code == 401


def test_an_unknown_model_comes_with_the_nearest_name(openai_client: OpenAI, says: Says) -> None:
    name = says().facts.name
    with pytest.raises(openai.NotFoundError) as caught:
        openai_client.chat.completions.create(model=name.upper(), messages=HELLO)
    assert f"; did you mean '{name}'? GET /v1/models lists what is served" in error(caught)["message"]


def test_a_model_that_is_not_there_is_distinguished_from_one_that_is_not_ready(
    openai_client: OpenAI, served: Plane
) -> None:
    with pytest.raises(openai.NotFoundError, match=r"no model zebra;.* GET /v1/models lists") as caught:
        openai_client.chat.completions.create(model="zebra", messages=HELLO)
    assert (error(caught)["code"], error(caught)["param"]) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        openai_client.models.retrieve("zebra")
    spec = parse_deployment({"name": "later", "model": {"path": "/srv/model"}})
    served.store.deployments.create(spec, reason="it waits for machines")
    for ask in (
        lambda: openai_client.models.retrieve("later"),
        lambda: openai_client.chat.completions.create(model="later", messages=HELLO),
    ):
        with pytest.raises(openai.InternalServerError) as late:
            ask()
        assert late.value.status_code == 503
        assert "pending, it waits for machines" in error(late)["message"]


BAD: list[tuple[dict[str, Any], str, str | None]] = [
    ({"messages": []}, "messages", None),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0", None),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages.0.content",
        None,
    ),
    ({"messages": "Hello"}, "messages", None),
    ({"messages": None}, "messages", None),
    ({"temperature": -1}, "temperature", None),
    ({"temperature": 2.5}, "temperature", None),
    ({"temperature": "hot"}, "temperature", None),
    ({"top_p": 0}, "top_p", None),
    ({"n": 10**9}, "n", None),
    ({"n": 0}, "n", None),
    ({"seed": 2**70}, "seed", None),
    ({"max_tokens": -1}, "max_tokens", None),
    ({"max_tokens": 10**6}, None, "context_length_exceeded"),  # type: ignore[list-item]
    ({"top_logprobs": 2}, None, None),  # type: ignore[list-item]
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", None),
    ({"stop": ["a"] * 17}, "stop", None),
    ({"stream_options": {"include_usage": True}}, None, None),  # type: ignore[list-item]
    ({"response_format": {"type": "json_schema"}}, "response_format", None),
    ({"response_format": {"type": "xml"}}, "response_format.type", None),
    ({"tools": [{"type": "function"}]}, "tools.0.function", "missing_required_parameter"),
    ({"functions": [{"name": "f"}]}, "functions", "unsupported_parameter"),
    ({"logit_bias": {"5": 101}}, "logit_bias", None),
    ({"logit_bias": {"5": "much"}}, "logit_bias", None),
    ({"logit_bias": {"5": True}}, "logit_bias", None),
    ({"logit_bias": {"fox": 1}}, "logit_bias", None),
    ({"logit_bias": {"05": 1}}, "logit_bias", None),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", None),
    ({"logit_bias": {"-1": 1}}, "logit_bias", None),
    ({"logit_bias": {"99999": 1}}, "logit_bias", None),
    ({"logit_bias": [5]}, "logit_bias", None),
    ({"logit_bias": {str(token): 1 for token in range(301)}}, "logit_bias", None),
    ({"stop_token_ids": [-1]}, "stop_token_ids", None),
    ({"stop_token_ids": 5}, "stop_token_ids", None),
    ({"stop_token_ids": ["fox"]}, "stop_token_ids", None),
    ({"stop_token_ids": [99999]}, "stop_token_ids", None),
    ({"stop_token_ids": list(range(65))}, "stop_token_ids", None),
    ({"min_tokens": -1}, "min_tokens", None),
    ({"min_tokens": 6, "max_tokens": 5}, "min_tokens", None),
    ({"min_tokens": WINDOW}, "min_tokens", None),
    ({"skip_special_tokens": "some"}, "skip_special_tokens", None),
    ({"reasoning_effort": 3}, "reasoning_effort", None),
    ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs", None),
    ({"chat_template_kwargs": {str(key): key for key in range(65)}}, "chat_template_kwargs", None),
    ({"chat_template_kwargs": "thinking"}, "chat_template_kwargs", None),
    ({"add_generation_prompt": True, "continue_final_message": True}, None, None),  # type: ignore[list-item]
    ({"messages": [{"role": "user"}]}, "messages.0", None),
    ({"temprature": 1}, "temprature", "unknown_parameter"),
    ({"model": None}, "model", None),
]


@pytest.mark.parametrize(("change", "param", "code"), BAD, ids=[json.dumps(one[0])[:40] for one in BAD])
def test_bad_requests_are_refused_by_name(
    raw: httpx.Client, says: Says, change: dict[str, Any], param: str | None, code: str | None
) -> None:
    answer = raw.post("/chat/completions", json={"model": says().facts.name, "messages": HELLO, **change})
    assert answer.status_code == 400, answer.text
    found = answer.json()["error"]
    assert found["type"] == "invalid_request_error"
    assert (found["param"], found["code"]) == (param, code or "invalid_value")
    assert found["message"]


def test_refused_tokens_are_named(raw: httpx.Client, says: Says) -> None:
    name = says().facts.name

    def refused(**body: Any) -> str:
        answer = raw.post("/completions", json={"model": name, "prompt": "x", **body})
        assert answer.status_code == 400, answer.text
        return str(answer.json()["error"]["message"])

    assert "at most 64 stop token ids are looked for, these are 1000" in refused(stop_token_ids=[5] * 1000)
    assert "no tokens have the ids 4000, 5000; " in refused(stop_token_ids=[5, 4000, 5000])
    many = refused(logit_bias={str(token): 1 for token in range(1000, 1020)})
    assert "no tokens have the ids 1000, 1001, 1002" in many
    assert "and 12 others" in many
    assert "at most 300 tokens" in refused(logit_bias={str(token): 1 for token in range(1000)})
    assert "the bias of token id 5 must be a number from -100 to 100" in refused(logit_bias={"5": -101})
    # A completion has 16 tokens at most, unless max_tokens says otherwise.
    assert "min_tokens is 17, but an answer has at most 16 tokens" in refused(min_tokens=17)


def test_empty_texts_and_fields_of_front_ends_are_accepted(raw: httpx.Client, says: Says) -> None:
    request = {
        "model": says().facts.name,
        "messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": ""}, *HELLO],
        "stop": "",
        "reasoning_effort": "high",
    }
    plain = raw.post("/chat/completions", json=request)
    assert plain.status_code == 200, plain.text
    assert "X-Ignored-Parameters" not in plain.headers
    webui = {
        "session_id": "s",
        "chat_id": "c",
        "background_tasks": {"title_generation": True},
        "features": {},
    }
    for stream in (False, True):
        answer = raw.post("/chat/completions", json={**request, **webui, "stream": stream})
        assert answer.status_code == 200, answer.text
        assert answer.headers["X-Ignored-Parameters"] == "background_tasks, chat_id, features, session_id"


def test_a_completion_is_refused_by_name(raw: httpx.Client, says: Says) -> None:
    name = says().facts.name

    def refused(**body: Any) -> tuple[str | None, str]:
        answer = raw.post("/completions", json={"model": name, "prompt": "x", **body})
        assert answer.status_code == 400, answer.text
        return answer.json()["error"]["param"], answer.json()["error"]["message"]

    assert refused(echo=True)[0] == "echo"
    assert refused(suffix="end")[0] == "suffix"
    assert "best_of" in refused(best_of=3)[1]
    assert "128" in refused(n=100, prompt=["a", "b"])[1]
    for prompt in (None, [], [[]], ["a", 1], [1, "a"], [-1], [True], {"text": "x"}, ["x"] * 200):
        assert refused(prompt=prompt)[0] in ("prompt", None), prompt
    assert "no tokens" in refused(prompt="")[1]
    assert "vocabulary" in refused(prompt=[10**6])[1]


def test_a_request_without_content_type_is_told_so(raw: httpx.Client, says: Says) -> None:
    body = json.dumps({"model": says().facts.name, "messages": [{"role": "user", "content": "x"}]})
    answer = raw.post("/chat/completions", content=body)
    assert answer.status_code == 400
    assert "Content-Type is missing" in answer.json()["error"]["message"]
    assert answer.json()["error"]["code"] == "unsupported_media_type"


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"role": "wizard", "content": "x"}, "messages.0.role: must be 'system', 'developer'"),
        ({"role": "user", "content": 5}, "messages.0.content: give text, or a list of parts of type text"),
        ({"content": "x"}, "messages.0.role: is missing"),
    ],
)
def test_a_wrong_message_is_one_error(
    raw: httpx.Client, says: Says, message: dict[str, Any], problem: str
) -> None:
    answer = raw.post("/chat/completions", json={"model": says().facts.name, "messages": [message]})
    assert answer.status_code == 400
    said = answer.json()["error"]["message"]
    assert said.startswith(problem)
    assert "at least 1 item" not in said
    empty = raw.post("/chat/completions", json={"model": says().facts.name, "messages": []})
    assert "at least 1 item" in empty.json()["error"]["message"]


def test_bytes_that_are_no_request_are_refused(raw: httpx.Client, says: Says) -> None:
    name = says().facts.name
    headers = {"Content-Type": "application/json"}
    text = json.dumps({"model": name, "messages": [{"role": "user", "content": "\ud800 x"}]})
    bodies = {
        b"{": 400,
        b"\xff\xfe": 400,
        b'{"model": "' + b"\xff" + b'"}': 400,
        b"[]": 400,
        b"null": 400,
        b"": 400,
        text.encode(): 400,
    }
    for body, status in bodies.items():
        answer = raw.post("/chat/completions", content=body, headers=headers)
        assert answer.status_code == status, (body, answer.text)
        assert answer.json()["error"]["message"], body


def test_prompts_of_a_megabyte_are_refused_before_the_model_receives_them(
    raw: httpx.Client, says: Says
) -> None:
    speaker = says()
    name = speaker.facts.name
    long = [{"role": "user", "content": "word " * 200_000}]
    answer = raw.post("/chat/completions", json={"model": name, "messages": long})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    answer = raw.post("/completions", json={"model": name, "prompt": [5] * 200_000})
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    answer = raw.post("/completions", content=b"x" * (5 << 20))
    assert answer.status_code == 413
    assert answer.json()["error"]["message"]
    assert speaker.received == []


def test_there_is_nothing_else(raw: httpx.Client) -> None:
    for method, path, status in (
        ("GET", "/nothing", 404),
        ("GET", "/responses/resp_1", 404),
        ("POST", "/conversations", 404),
        ("GET", "/completions", 405),
    ):
        answer = raw.request(method, path)
        assert answer.status_code == status
        assert answer.json()["error"]["message"]


def test_a_tokenizer_without_a_template_cannot_chat(
    openai_client: OpenAI, says: Says, tmp_path: Path
) -> None:
    name = says(where=make_tokenizer(tmp_path, with_template=False)).facts.name
    with pytest.raises(openai.BadRequestError) as caught:
        openai_client.chat.completions.create(model=name, messages=HELLO)
    assert "no chat template" in error(caught)["message"]
    assert error(caught)["code"] == "no_chat_template"
    assert "/v1/completions" in error(caught)["message"]
    assert openai_client.completions.create(model=name, prompt="x", max_tokens=99).choices[0].text == ANSWER


def test_a_template_may_refuse_messages(openai_client: OpenAI, says: Says) -> None:
    late = [*HELLO, {"role": "system", "content": "Be brief."}]
    with pytest.raises(openai.BadRequestError) as caught:
        openai_client.chat.completions.create(model=says().facts.name, messages=late)  # type: ignore[arg-type]
    assert "system comes first" in error(caught)["message"]


def test_a_full_queue_says_when_to_come_again(openai_client: OpenAI, says: Says) -> None:
    speaker = says()
    speaker.refusal = Busy("500 sequences wait", hint="ask again later", details={"retry_after_s": 7})
    for stream in (False, True):
        with pytest.raises(openai.RateLimitError) as caught:
            openai_client.chat.completions.create(model=speaker.facts.name, messages=HELLO, stream=stream)
        assert caught.value.response.headers["retry-after"] == "7"
        assert (error(caught)["type"], error(caught)["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    speaker.refusal = TooLong("it is too long for its machines", hint="shorten it")
    with pytest.raises(openai.BadRequestError) as late:
        openai_client.chat.completions.create(model=speaker.facts.name, messages=HELLO, stream=True)
    assert error(late)["code"] == "context_length_exceeded"


def test_what_was_written_before_a_failure_is_kept(
    openai_client: OpenAI, says: Says, tokenizer: ServedTokenizer
) -> None:
    speaker = says()
    speaker.failure = (4, Unavailable("no machine is left", hint="let machines join"))
    partial = tokenizer.vocabulary.decode(tokenizer.encode(ANSWER, 99)[:4])
    with pytest.raises(openai.InternalServerError) as caught:
        openai_client.chat.completions.create(model=speaker.facts.name, messages=HELLO)
    assert caught.value.status_code == 503
    assert "no machine is left" in error(caught)["message"]
    assert error(caught)["partial"] == [partial]
    read = []
    stream = openai_client.chat.completions.create(model=speaker.facts.name, messages=HELLO, stream=True)
    with pytest.raises(openai.APIError, match="no machine is left"):
        read += (chunk.choices[0].delta.content or "" for chunk in stream)
    assert "".join(read) == partial


def test_a_mistake_of_an_engine_shows_no_details(openai_client: OpenAI, says: Says) -> None:
    speaker = says()
    speaker.failure = (2, RuntimeError("secret detail"))
    with pytest.raises(openai.InternalServerError) as caught:
        openai_client.chat.completions.create(model=speaker.facts.name, messages=HELLO)
    assert "secret" not in str(caught.value)
    with pytest.raises(openai.APIError) as streamed:
        list(openai_client.chat.completions.create(model=speaker.facts.name, messages=HELLO, stream=True))
    assert "secret" not in str(streamed.value)


# Clients that go


def test_a_stream_that_is_closed_cancels_its_sequences(openai_client: OpenAI, says: Says) -> None:
    speaker = says()
    speaker.pause_after = 3
    stream = openai_client.chat.completions.create(model=speaker.facts.name, messages=HELLO, n=2, stream=True)
    next(iter(stream))
    stream.close()
    wait_until(lambda: speaker.closed == {one.sequence for one in speaker.received})
    assert len(speaker.closed) == 2


def test_a_client_that_gives_up_waiting_cancels_its_sequence(openai_client: OpenAI, says: Says) -> None:
    speaker = says()
    speaker.pause_after = 3
    while not speaker.received:  # a busy server may not begin in time
        with pytest.raises(openai.APITimeoutError):
            openai_client.with_options(timeout=0.5).chat.completions.create(
                model=speaker.facts.name, messages=HELLO
            )
    wait_until(lambda: speaker.closed == {one.sequence for one in speaker.received} != set())


def open_stream(served: Plane, name: str, **options: Any) -> socket.socket:
    """Send a request by a plain socket, with a receive window that unread answers soon fill."""
    body = json.dumps({"model": name, "prompt": "x", "stream": True, **options}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {served.api_key}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", served.server.port))
    connection.sendall(head.encode() + body)
    return connection


def test_a_client_that_never_reads_is_given_up(
    served: Plane, says: Says, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_stream, "UNREAD_S", 0.3)
    speaker = says(lambda _: [200] * WINDOW)
    speaker.pause_after = 200
    with open_stream(served, speaker.facts.name, max_tokens=WINDOW - 1, n=128, logprobs=20):
        wait_until(lambda: speaker.closed)


def test_an_idle_stream_sends_keep_alives(served: Plane, says: Says, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "KEEPALIVE_S", 0.05)
    speaker = says()
    speaker.pause_after = 1
    with open_stream(served, speaker.facts.name) as connection:
        read = b""
        while b": still here" not in read:
            read += connection.recv(4096)
        speaker.go_on.set()
        while b"[DONE]" not in read:
            read += connection.recv(4096)


def test_a_server_that_ends_notifies_its_streams(
    plane: Plane, folder: Path, tokenizer: ServedTokenizer
) -> None:
    speaker = Speaker("model", folder, lambda _: tokenizer.encode(ANSWER, 99))
    speaker.pause_after = 2
    plane.app.state.context.engines.add(speaker)
    with OpenAI(base_url=f"{plane.url}/v1", api_key=plane.api_key, max_retries=0) as client:
        stream = iter(client.chat.completions.create(model="model", messages=HELLO, stream=True))
        next(stream)
        plane.app.state.context.notifier.close()
        with pytest.raises(openai.APIError, match="the server ends"):
            list(stream)
    wait_until(lambda: speaker.closed)


def test_many_read_at_the_same_time(served: Plane, says: Says) -> None:
    name = says().facts.name

    async def main() -> list[str]:
        async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key=served.api_key) as client:

            async def one() -> str:
                stream = await client.chat.completions.create(model=name, messages=HELLO, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*(one() for _ in range(30)))

    assert set(asyncio.run(main())) == {ANSWER}


def test_events_are_lines_for_all_who_cut_text_into_lines() -> None:
    data = {"text": "one\x85two\u2028three\u2029four\nfünf"}
    line, *rest = sse.json_event(data).decode().splitlines()
    assert rest == [""]
    assert json.loads(line.removeprefix("data: ")) == data
