"""The tools of one request together with the syntax in which its model calls them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from share_compute.errors import UserError
from share_compute_api.openai.tools.definitions import ToolRequest
from share_compute_api.openai.tools.grammar import call_grammar
from share_compute_api.openai.tools.parsing import ToolCallParser
from share_compute_api.openai.tools.syntax import MARKS, ToolSyntax

if TYPE_CHECKING:
    from share_compute_api.openai.engine import ModelFacts
    from share_compute_api.openai.tokenizer_client import TokenizerClient


class ToolUse:
    """Grammar and parsers for the answers to one request.

    Args:
        request: the tools that may be called; their schemas must have been checked.
        syntax: syntax of the model's calls.
    """

    def __init__(self, request: ToolRequest, syntax: ToolSyntax) -> None:
        self._request = request
        self._syntax = syntax
        self.grammar = call_grammar(request, syntax)
        """Grammar of the answers in Lark; None if they are not constrained."""
        self.shown = {id_: character for character, id_ in syntax.special.items()}
        """Characters that represent special tokens in the text for `parser`, by id."""

    @classmethod
    async def prepare(cls, request: ToolRequest, facts: ModelFacts, tokenizer: TokenizerClient) -> ToolUse:
        """Check the tools of a request.

        Raises:
            UserError: the format of the model's calls is not known, or decoding cannot follow a schema.
            Unavailable: no process can check a schema; `Busy` if too many requests are queued.
        """
        format_ = tokenizer.vocabulary.tool_format if facts.tool_format == "auto" else facts.tool_format
        if format_ is None:
            raise UserError(
                f"the format in which model {facts.name} writes tool calls is not known",
                hint=f"leave tools out, or deploy the model again with a tool_format: {', '.join(MARKS)}",
                details={"param": "tools", "code": "unsupported_parameter"},
            )
        syntax = ToolSyntax.of(format_, tokenizer.vocabulary)
        for tool in filter(request.is_constrained, request.tools):
            try:
                await tokenizer.check_schema(json.dumps(tool.function.schema_of_arguments))
            except UserError as failure:
                failure.message = f"tools: parameters of {tool.function.name}: {failure.message}"
                failure.details = {"param": "tools", **failure.details}
                raise
        return cls(request, syntax)

    def parser(self) -> ToolCallParser:
        """Return a parser for the text of one answer."""
        request = self._request
        return ToolCallParser(
            self._syntax, request.names, is_single=request.is_single, is_streamed=request.is_streamed
        )
