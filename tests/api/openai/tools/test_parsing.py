"""Tool calls in texts: every format, every cut into pieces, and texts that only look like calls."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from share_compute_api.openai.tools.parsing import ToolCallParser
from share_compute_api.openai.tools.syntax import ToolSyntax
from share_compute_api.openai.writing import AnswerPiece, FullAnswer

NAMES = ("weather", "add")
A, B, C = map(chr, (0xD800, 0xD801, 0xD802))
"""Characters that represent special tokens."""
SPECIAL = {A: 300, B: 301, C: 302}
HERMES = ToolSyntax("hermes", "<tool_call>", end="</tool_call>")
HERMES_SPECIAL = ToolSyntax("hermes", A, end=B, special={A: 300, B: 301})
LLAMA = ToolSyntax("llama", A, special={A: 300})
BARE = ToolSyntax("llama", "")
MISTRAL = ToolSyntax("mistral", A, special={A: 300})
NEW_MISTRAL = ToolSyntax("mistral", A, arguments=B, call_id=C, special=SPECIAL)
SYNTAXES = [HERMES, HERMES_SPECIAL, LLAMA, BARE, MISTRAL, NEW_MISTRAL]
ARGUMENTS = '{"city": "Köln {\\"x\\"}", "days": [1, {"a": null}]}'
Result = tuple[str, list[tuple[str, str]], str]


def read(
    syntax: ToolSyntax, pieces: list[str], *, single: bool = False, streamed: bool = True, end: Any = "stop"
) -> Result:
    """Return the content, the calls and the reason to end."""
    parser = ToolCallParser(syntax, NAMES, seed="test", is_single=single, is_streamed=streamed)
    answer = FullAnswer()
    for piece in [*map(AnswerPiece, pieces), AnswerPiece(finish=end)]:
        part = parser.read(piece)
        assert all(delta.arguments == "" or delta.name is None for delta in part.calls)
        answer.add(part)
        if part.finish is not None:
            break
    ids = [call.id for call in answer.calls]
    assert len(set(ids)) == len(ids)
    assert None not in ids
    return answer.text, [(call.name or "", call.arguments) for call in answer.calls], answer.finish


def two_calls(syntax: ToolSyntax) -> str:
    key = syntax.key
    first, second = (
        f'{{"name": "{name}", "{key}": {text}}}' for name, text in zip(NAMES, (ARGUMENTS, "{}"), strict=True)
    )
    if syntax.format == "hermes":
        return "".join(f"\n{syntax.begin}\n{call}\n{syntax.end}" for call in (first, second))
    if syntax.format == "llama":
        return f"{syntax.begin}{first}; {second}"
    if syntax.arguments:
        return "".join(
            f"{syntax.begin}{name}{syntax.arguments}{text}"
            for name, text in zip(NAMES, (ARGUMENTS, "{}"), strict=True)
        )
    return f"{syntax.begin} [{first}, {second}]"


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("syntax", SYNTAXES, ids=repr)
def test_calls_are_found_in_every_format(syntax: ToolSyntax, streamed: bool) -> None:
    text = two_calls(syntax)
    expected = [("weather", ARGUMENTS), ("add", "{}")]
    assert read(syntax, [text], streamed=streamed) == ("", expected, "tool_calls")
    assert read(syntax, [text], streamed=streamed, end="length") == ("", expected, "length")
    assert read(syntax, [text], streamed=streamed, single=True) == ("", expected[:1], "tool_calls")
    if syntax.begin:
        before = read(syntax, [f"Let me look.\n{text}"], streamed=streamed)
        assert before == ("Let me look.", expected, "tool_calls")
    plain = "I cannot < help { you [ with\n\n that.\n"
    assert read(syntax, [plain], streamed=streamed) == (plain, [], "stop")


def test_arguments_arrive_while_they_are_written() -> None:
    for syntax in SYNTAXES:
        parser = ToolCallParser(syntax, NAMES, seed="test", is_single=False, is_streamed=True)
        text = two_calls(syntax)
        half = text.index("Köln") + 2
        (begin, arguments) = parser.read(AnswerPiece(text[:half])).calls
        assert (begin.name, begin.arguments, arguments.arguments) == ("weather", "", '{"city": "Kö')


# Fragments of correct and wrong calls, which are joined to texts.
FRAGMENTS = st.sampled_from(
    [
        A, B, C, "<tool_call>", "</tool_call>", "<tool", "\n", " ", "{", "}", "[", "]", ",", ";",
        '{"name": "weather", "arguments": ', '{"name": "add", "parameters": ', '{"name": "zebra", "arguments": ',
        '{"arguments": {"a": 1}, "name": "add"}', '"', "\\", "weather", "add", ARGUMENTS, "{}", "x", "é",
        '{"type": "function", "name": "add", "parameters": {"a": "}"}}',
        '{"name": "add", "arguments": "{}"}', '{"name": "add"}', '{"name": "add", "arguments": {"a": NaN}}',
    ]
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(
    syntax=st.sampled_from(SYNTAXES),
    fragments=st.lists(FRAGMENTS, max_size=10),
    single=st.booleans(),
    streamed=st.booleans(),
    data=st.data(),
)
def test_cuts_change_nothing_and_no_text_is_lost(
    syntax: ToolSyntax, fragments: list[str], single: bool, streamed: bool, data: st.DataObject
) -> None:
    text = "".join(fragments)
    text = "".join(one for one in text if one < "\ud800" or one > "\udfff" or one in syntax.special)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6).map(sorted))
    borders = [0, *cuts, len(text)]
    pieces = [text[begin:end] for begin, end in pairwise(borders)]
    whole = read(syntax, [text], single=single, streamed=streamed)
    assert read(syntax, pieces, single=single, streamed=streamed) == whole
    assert read(syntax, list(text), single=single, streamed=streamed) == whole
    content, calls, finish = whole
    assert not any("\ud800" <= one <= "\udfff" for one in content + "".join(map(str, calls)))
    assert all(name in NAMES for name, _ in calls)
    if finish == "tool_calls" or not streamed:
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)
    if not calls:
        assert content == syntax.without_marks(text)
        assert finish == "stop"


@pytest.mark.parametrize(
    "call",
    [
        '{"name": "zebra", "arguments": {"a": 1}}',
        '{"name": "weather", "arguments": {"a": 1, "a": 2}}',
        '{"name": "weather", "arguments": [1]}',
        '{"name": "weather", "arguments": {"a": 01}}',
        '{"name": "weather", "arguments": {}, "more": 1}',
        '{"name": "weather", "arguments": {"a": 1}',
        "weather(1)",
        '{"name": "weather", "arguments": ' + "[" * 5000 + "]" * 5000 + "}",
        "",
    ],
)
def test_text_that_is_no_call_is_content(call: str) -> None:
    for syntax in (HERMES, LLAMA, MISTRAL):
        text = f"{syntax.begin}{call}{syntax.end}" if syntax is not MISTRAL else f"{syntax.begin}[{call}]"
        content, calls, finish = read(syntax, [text], streamed=False)
        assert (content, calls, finish) == (syntax.without_marks(text), [], "stop")


def test_a_call_that_breaks_while_it_is_streamed_keeps_its_arguments() -> None:
    text = '<tool_call>{"name": "add", "arguments": {"a": 01}}</tool_call> so'
    assert read(HERMES, [text]) == ("</tool_call> so", [("add", '{"a": 01}')], "stop")
    cut = '<tool_call>{"name": "add", "arguments": {"a": "x'
    assert read(HERMES, [cut], end="length") == ("", [("add", '{"a": "x')], "length")
    assert read(HERMES, [cut], end="length", streamed=False) == (cut, [], "length")


def test_unusual_calls_are_read() -> None:
    for written, arguments in (
        ('{"arguments": {"a": 1}, "name": "add"}', '{"a": 1}'),
        ('{"name": "add", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
        ('{"name": "add", "parameters": {"a":  1}}', '{"a":  1}'),
        ('{"type": "function", "name": "add", "parameters": {"a": 1}}', '{"a": 1}'),
        ('{"name": "add", "arguments": {"a": 1}, "id": "x"}', '{"a": 1}'),
        ('{"name": "add"}', "{}"),
    ):
        for streamed in (False, True):
            found = read(HERMES, [f"<tool_call>\n{written}\n</tool_call>\n"], streamed=streamed)
            assert found == ("", [("add", arguments)], "tool_calls")
    with_id = f'{A}add{C}abcdefghi{B}{{"a": 1}}'
    assert read(NEW_MISTRAL, [with_id]) == ("", [("add", '{"a": 1}')], "tool_calls")
    assert read(BARE, ['{"name": "add"}']) == ('{"name": "add"}', [], "stop")


def test_ids_have_the_length_that_templates_accept() -> None:
    for syntax, length in ((HERMES, 29), (MISTRAL, 9)):
        parser = ToolCallParser(syntax, NAMES, seed="test", is_single=False, is_streamed=True)
        call = parser.read(AnswerPiece(two_calls(syntax))).calls[0]
        assert len(call.id or "") == length
