"""Grammars in llguidance's dialect of Lark that constrain an answer to tool calls, or to text with valid calls."""

from __future__ import annotations

import json

from share_compute.inference.scheduler.options import SCHEMA_OPTIONS
from share_compute_api.openai.tools.definitions import ToolRequest
from share_compute_api.openai.tools.syntax import ToolSyntax


def call_grammar(request: ToolRequest, syntax: ToolSyntax) -> str | None:
    """Return the grammar of an answer in Lark; None if the request does not constrain it.

    If a call is required, the answer is one call or, if the request allows it, several. Otherwise text is unconstrained
    up to the mark of a call, and calls follow the grammar. See https://github.com/guidance-ai/llguidance,
    docs/syntax.md.
    """
    if not any(map(request.is_constrained, request.tools)):
        return None
    begin = _mark(syntax.begin, syntax)
    if request.is_required:
        # Without a special token, the text begins with the JSON object, as the chat templates of Llama require.
        rules = [f"start: {_repeated(request, syntax, '' if syntax.is_bare else begin)}"]
    elif syntax.is_bare:
        rules = [f"start: {_group(request, syntax)} | tail", "tail: TEXT", r"TEXT: /([^ \t\r\n{](.|\n)*)?/"]
        if begin:
            rules[0] += f" | TEXT {begin} {_group(request, syntax)}"
    else:
        is_special = syntax.begin in syntax.special
        rules = [
            "start: calls | tail" if request.is_single else "start: calls* tail",
            f"calls: head {_group(request, syntax)}",
            f"head: TEXT {begin}" if is_special else f"head[lazy]: TEXT {begin}",
            "tail: TEXT",
            r"TEXT: /(.|\n)*/",
        ]
    return "\n".join(["%llguidance {}", *rules, *_functions(request, syntax), ""])


def _mark(mark: str, syntax: ToolSyntax) -> str:
    """Return the Lark terminal of a mark; "" for an empty mark."""
    if mark in syntax.special:
        return f"<[{syntax.special[mark]}]>"
    return json.dumps(mark) if mark else ""


def _repeated(request: ToolRequest, syntax: ToolSyntax, begin: str) -> str:
    """Return the Lark expression of an answer that consists only of calls."""
    group = f"{begin} {_group(request, syntax)}"
    if request.is_single or syntax.is_bare or (syntax.format == "mistral" and not syntax.arguments):
        return group
    separator = r'"\n"' if syntax.format == "hermes" else ""
    return f"{group} ({separator} {group})*"


def _group(request: ToolRequest, syntax: ToolSyntax) -> str:
    """Return the Lark expression of the text after the mark of a call: one call, or all calls with this mark."""

    def several(separator: str) -> str:
        return "function" if request.is_single else f'function ("{separator}" function)*'

    if syntax.format == "hermes":
        return rf'"\n" function "\n" {_mark(syntax.end, syntax)}'
    if syntax.format == "llama":
        return several("; ")
    return "function" if syntax.arguments else f'"[" {several(", ")} "]"'


def _functions(request: ToolRequest, syntax: ToolSyntax) -> list[str]:
    """Return the Lark rules of the functions with their arguments."""
    rules = ["function: " + " | ".join(f"function_{number}" for number in range(len(request.tools)))]
    for number, tool in enumerate(request.tools):
        name = tool.function.name
        if syntax.arguments:
            body = f"{json.dumps(name)} {_mark(syntax.arguments, syntax)} arguments_{number}"
        else:
            head = f'{{"name": "{name}", "{syntax.key}": '
            body = f'{json.dumps(head)} arguments_{number} "}}"'
        schema = tool.function.schema_of_arguments if request.is_constrained(tool) else {"type": "object"}
        rules += [
            f"function_{number}: {body}",
            f"arguments_{number}: %json {json.dumps({**schema, 'x-guidance': SCHEMA_OPTIONS})}",
        ]
    return rules
