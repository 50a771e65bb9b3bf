"""Models that write tool calls, for tests of tools."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tests.api.conftest import Plane
from tests.api.speaking import Speaker, make_tool_tokenizer

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
WINDOW = 4096
_numbers = count()
SaysCalls = Callable[..., Speaker]


@pytest.fixture(scope="module")
def tool_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make_tool_tokenizer(tmp_path_factory.mktemp(name), name) for name in FORMATS}


@pytest.fixture
def says_calls(served: Plane, tool_folders: dict[str, Path]) -> Iterator[SaysCalls]:
    """Give a function that serves a model of its own, which says a text in a format."""
    engines, names = served.app.state.context.engines, []

    def serve(text: str, tool_format: ToolFormat = "hermes", where: Path | None = None) -> Speaker:
        folder = where or tool_folders[tool_format]
        tokenizer = ServedTokenizer(folder)
        ids = (*tokenizer.encode(text, WINDOW), *tokenizer.vocabulary.end_ids)
        speaker = Speaker(f"tools-{next(_numbers)}", folder, lambda _: ids, WINDOW)
        names.append(speaker.facts.name)
        engines.add(speaker)
        return speaker

    yield serve
    for name in names:
        engines.remove(name)
