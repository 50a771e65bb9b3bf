"""Grammars of tool calls: random tokens that a grammar allows are calls that the parser reads."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tests.api.speaking import make_tool_tokenizer

from share_compute.errors import UserError
from share_compute.inference.runtime.constraints import Grammar, Grammars
from share_compute.inference.scheduler.events import Emitted, Finished
from share_compute.specification.serve import ToolFormat
from share_compute_api.openai.tools.definitions import FunctionTool, ToolRequest
from share_compute_api.openai.tools.grammar import call_grammar
from share_compute_api.openai.tools.parsing import ToolCallParser
from share_compute_api.openai.tools.syntax import ToolSyntax
from share_compute_api.openai.writing import FullAnswer, Writer
from share_compute_api.workers.isolated.tokenizer import ServedTokenizer

SCHEMA = {
    "type": "object",
    "properties": {"unit": {"enum": ["C", "F"]}, "exact": {"type": "boolean"}},
    "required": ["unit", "exact"],
    "additionalProperties": False,
}
KINDS: dict[str, tuple[ToolFormat, list[str] | None]] = {
    "hermes": ("hermes", None),
    "hermes with special tokens": ("hermes", ["<tool_call>", "</tool_call>"]),
    "llama": ("llama", None),
    "llama without a special token": ("llama", []),
    "mistral": ("mistral", None),
    "mistral with lists": ("mistral", ["[TOOL_CALLS]"]),
}
Prepared = tuple[ServedTokenizer, ToolSyntax, Grammars]


@pytest.fixture(scope="module", params=KINDS)
def prepared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    tool_format, special = KINDS[request.param]
    folder: Path = make_tool_tokenizer(tmp_path_factory.mktemp("tokenizer"), tool_format, special)
    tokenizer = ServedTokenizer(folder)
    syntax = ToolSyntax.of(tool_format, tokenizer.vocabulary)
    return tokenizer, syntax, Grammars(folder, tokenizer.vocabulary.vocab_size)


def request_of(*, required: bool = False, single: bool = False) -> ToolRequest:
    tools = [
        {"name": "weather", "parameters": SCHEMA, "strict": True},
        {"name": "now", "parameters": {"type": "object", "additionalProperties": False}, "strict": True},
    ]
    validated = tuple(FunctionTool.model_validate({"type": "function", "function": tool}) for tool in tools)
    return ToolRequest(validated, is_required=required, is_single=single, is_streamed=False)


def start(prepared: Prepared, request: ToolRequest) -> Grammar:
    tokenizer, syntax, grammars = prepared
    text = call_grammar(request, syntax)
    assert text is not None
    return grammars.start(text, is_lark=True, stop_ids=tokenizer.vocabulary.end_ids)


def walk(prepared: Prepared, grammar: Grammar, ids: list[int], seed: int) -> list[int]:
    """Append random allowed tokens until the text may end."""
    (end,) = prepared[0].vocabulary.end_ids
    lots = random.Random(seed)
    grammar.accept(ids)
    while not grammar.is_complete:
        (allowed,) = grammar.allowed().nonzero()
        assert len(allowed)
        if end in allowed and lots.random() < 0.8:
            break
        chosen = lots.choice([id_ for id_ in allowed.tolist() if id_ != end] or [end])
        if chosen == end:
            break
        ids.append(chosen)
        grammar.accept((chosen,))
        assert len(ids) < 2000
    return ids


def read(prepared: Prepared, request: ToolRequest, ids: list[int]) -> FullAnswer:
    tokenizer, syntax, _ = prepared
    shown = {id_: character for character, id_ in syntax.special.items()}
    writer = Writer(tokenizer.vocabulary, (), end_ids=tokenizer.vocabulary.end_ids, shown=shown)
    parser = ToolCallParser(
        syntax, request.names, seed="test", is_single=request.is_single, is_streamed=request.is_streamed
    )
    answer = FullAnswer()
    for index, token in enumerate(ids):
        answer.add(parser.read(writer.read(Emitted(1, index, token, None, ()))))
    if not parser.is_done:
        answer.add(parser.read(writer.read(Finished(1, "stop", len(ids)))))
    return answer


def check_calls(answer: FullAnswer) -> None:
    for call in answer.calls:
        arguments = json.loads(call.arguments)
        if call.name == "weather":
            assert arguments.keys() == {"unit", "exact"}
            assert arguments["unit"] in ("C", "F")
            assert arguments["exact"] in (True, False)
        else:
            assert (call.name, arguments) == ("now", {})


@pytest.mark.parametrize("single", [False, True])
def test_required_calls_come_at_once(prepared: Prepared, single: bool) -> None:
    request = request_of(required=True, single=single)
    counts = set()
    for seed in range(20):
        answer = read(prepared, request, walk(prepared, start(prepared, request), [], seed))
        assert (answer.text, answer.finish) == ("", "tool_calls")
        check_calls(answer)
        counts.add(len(answer.calls))
    assert counts == {1} if single else max(counts) > 1


def begin_of(prepared: Prepared) -> str:
    """Return the text before a call, which has its mark."""
    tokenizer, syntax, _ = prepared
    if not syntax.begin:
        return ""
    id_ = syntax.special.get(syntax.begin)
    return "I look. " + (syntax.begin if id_ is None else tokenizer.vocabulary.tokens[id_] or "")


@pytest.mark.parametrize("single", [False, True])
def test_calls_in_free_text_follow_the_schema(prepared: Prepared, single: bool) -> None:
    request = request_of(single=single)
    tokenizer, syntax, _ = prepared
    for seed in range(10):
        begin = begin_of(prepared) or '{"'
        ids = walk(prepared, start(prepared, request), list(tokenizer.encode(begin, 99)), seed)
        answer = read(prepared, request, ids)
        check_calls(answer)
        assert answer.calls
        assert answer.text.startswith("I look.") == bool(syntax.begin)


def test_free_text_may_end_anywhere(prepared: Prepared) -> None:
    tokenizer, _, _ = prepared
    grammar = start(prepared, request_of())
    for id_ in tokenizer.encode("no call here: { [ < ", 99):
        assert grammar.allowed()[id_]
        grammar.accept((id_,))
        assert grammar.allowed()[list(tokenizer.vocabulary.end_ids)].all()


def test_arguments_of_tools_that_are_not_strict_are_any_object(prepared: Prepared) -> None:
    tokenizer, syntax, _ = prepared
    request = request_of()
    loose = request.tools[0].model_copy(
        update={"function": request.tools[0].function.model_copy(update={"strict": None})}
    )
    request = ToolRequest((loose, request.tools[1]), is_required=False, is_single=True, is_streamed=False)
    head = {
        "hermes": '\n{"name": "weather", "arguments": {"x": 1}',
        "llama": '{"name": "weather", "parameters": {"x": 1}',
        "mistral": '[{"name": "weather", "arguments": {"x": 1}',
    }[syntax.format]
    if syntax.arguments:
        head = 'weather[ARGS]{"x": 1}'
    grammar = start(prepared, request)
    for id_ in tokenizer.encode(begin_of(prepared) + head, 999):
        assert grammar.allowed()[id_]
        grammar.accept((id_,))


def test_names_and_schemas_cannot_leave_their_place() -> None:
    hostile: dict[str, Any] = {"properties": {'"} | /.*/ \n start: "x"': {"const": 'end" \n%llguidance {}'}}}
    tool = FunctionTool.model_validate(
        {"type": "function", "function": {"name": "f", "parameters": hostile, "strict": True}}
    )
    request = ToolRequest((tool,), is_required=True, is_single=True, is_streamed=False)
    text = call_grammar(request, ToolSyntax("llama", "")) or ""
    assert len([line for line in text.splitlines() if line.startswith(("start:", "%llguidance"))]) == 2


def test_a_grammar_that_cannot_be_followed_is_refused(prepared: Prepared) -> None:
    with pytest.raises(UserError, match="grammar cannot be followed"):
        prepared[2].start('start: <[99999]> "x"', is_lark=True)
