"""Clients of a live server, and models that it serves; some of them write tool calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI
from tests.api.conftest import Plane
from tests.api.speaking import Speaker, make_tokenizer, make_tool_tokenizer
from tokenizers import Tokenizer

from share_compute.inference.scheduler.options import Generation
from share_compute.specification.serve import ToolFormat
from share_compute_api.workers.isolated.tokenizer import ServedTokenizer

HELLO: list[Any] = [{"role": "user", "content": "Is it warm in Köln?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "Tell the weather.", "parameters": PARAMETERS},
    },
    {"type": "function", "function": {"name": "now"}},
]
ARGUMENTS = '{"city": "Köln", "days": 2}'
CALLS: dict[ToolFormat, str] = {
    "hermes": f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "llama": f'<|python_tag|>{{"name": "weather", "parameters": {ARGUMENTS}}}; {{"name": "now", "parameters": {{}}}}',
    "mistral": f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]now[ARGS]{{}}",
}
EXPECTED = [("weather", ARGUMENTS), ("now", "{}")]
FORMATS: tuple[ToolFormat, ...] = ("hermes", "llama", "mistral")
ANSWER = "the quick brown fox is in 東京 😀"
WINDOW = 4096
_numbers = count()
Says = Callable[..., Speaker]
SaysCalls = Callable[..., Speaker]
Serves = Callable[[Speaker], Speaker]


def prompt_of(speaker: Speaker) -> str:
    """Return the text of the last prompt."""
    library = Tokenizer.from_file(str(speaker.facts.folder / "tokenizer.json"))
    text: str = library.decode(speaker.received[-1].prompt, skip_special_tokens=False)
    return text


@pytest.fixture
def openai_client(served: Plane) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{served.url}/v1", api_key=served.api_key, max_retries=0, timeout=240) as client:
        yield client


@pytest.fixture
def raw(served: Plane) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {served.api_key}"}
    with httpx.Client(base_url=f"{served.url}/v1", headers=headers, timeout=240) as client:
        yield client


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> ServedTokenizer:
    return ServedTokenizer(folder)


@pytest.fixture
def serves(served: Plane) -> Iterator[Serves]:
    """Return a function that serves a model until the end of the test."""
    engines, names = served.app.state.context.engines, []

    def serve(speaker: Speaker) -> Speaker:
        names.append(speaker.facts.name)
        engines.add(speaker)
        return speaker

    yield serve
    for name in names:
        engines.remove(name)


@pytest.fixture
def says(serves: Serves, folder: Path, tokenizer: ServedTokenizer) -> Says:
    """Return a function that serves a model of its own, which generates a given text."""

    def serve(text: str | Callable[[Generation], Sequence[int]] = ANSWER, where: Path = folder) -> Speaker:
        own = (
            (lambda _: (*tokenizer.encode(text, 1000), *tokenizer.vocabulary.end_ids))
            if isinstance(text, str)
            else text
        )
        return serves(Speaker(f"model-{next(_numbers)}", where, own))

    return serve


@pytest.fixture(scope="module")
def tool_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make_tool_tokenizer(tmp_path_factory.mktemp(name), name) for name in FORMATS}


@pytest.fixture
def says_calls(serves: Serves, tool_folders: dict[str, Path]) -> SaysCalls:
    """Return a function that serves a model of its own, which generates a given text in a tool format."""

    def serve(text: str, tool_format: ToolFormat = "hermes", where: Path | None = None) -> Speaker:
        folder = where or tool_folders[tool_format]
        tokenizer = ServedTokenizer(folder)
        ids = (*tokenizer.encode(text, WINDOW), *tokenizer.vocabulary.end_ids)
        return serves(Speaker(f"tools-{next(_numbers)}", folder, lambda _: ids, WINDOW))

    return serve
