"""The tools of one request together with the syntax in which its model calls them."""

from __future__ import annotations

import json
import secrets
from copy import copy
from typing import TYPE_CHECKING, Self

from share_compute.errors import UserError
from share_compute_api.openai.requests import ChatRequest, TextRequest
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
        seed: text from which the ids of calls are derived. It must be unique among requests, because ids must be
            unique.
    """

    def __init__(self, request: ToolRequest, syntax: ToolSyntax, seed: str) -> None:
        self._request = request
        self._syntax = syntax
        self._seed = seed
        self.grammar = call_grammar(request, syntax)
        """Grammar of the answers in Lark; None if they are not constrained."""
        self.shown = {id_: character for character, id_ in syntax.special.items()}
        """Characters that represent special tokens in the text for `parser`, by id."""

    @classmethod
    async def prepare(cls, wanted: TextRequest, facts: ModelFacts, tokenizer: TokenizerClient) -> Self | None:
        """Check the tools of a request; return None if the model may call none.

        Raises:
            UserError: the format of the model's calls is not known, or decoding cannot follow a schema.
            Unavailable: no process can check a schema; `Busy` if too many requests are queued.
        """
        request = wanted.tool_request if isinstance(wanted, ChatRequest) else None
        if request is None:
            return None
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
        return cls(request, syntax, secrets.token_hex(16))

    def seeded(self, seed: str) -> ToolUse:
        """Return the same tools, with call ids derived from ``seed``."""
        seeded = copy(self)
        seeded._seed = seed  # noqa: SLF001 - an object of this class
        return seeded

    def parser(self, index: int) -> ToolCallParser:
        """Return a parser for the text of the answer with this index."""
        request = self._request
        return ToolCallParser(
            self._syntax,
            request.names,
            seed=f"{self._seed}/{index}",
            is_single=request.is_single,
            is_streamed=request.is_streamed,
        )
