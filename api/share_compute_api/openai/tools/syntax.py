"""Syntax of tool calls in the text of a model: the marks around calls, and their special tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from share_compute.specification.serve import ToolFormat

if TYPE_CHECKING:
    from share_compute_api.workers.isolated.vocabulary import Vocabulary

MARKS: dict[ToolFormat, tuple[str, ...]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "llama": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
}
"""Format -> the marks of its syntax."""
_FIRST_CHARACTER = 0xD800
"""Special tokens are represented by surrogates, which decoded text never contains."""


@dataclass(frozen=True, slots=True)
class ToolSyntax:
    """Syntax of a model's tool calls. Each mark is a text, or one character that represents a special token.

    - ``hermes``: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.
    - ``llama``: ``{"name": ..., "parameters": {...}}`` as the whole text or after ``<|python_tag|>``; further calls
      follow after ``;``.
    - ``mistral``: ``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]``, or ``[TOOL_CALLS]name[ARGS]{...}`` if the
      vocabulary has ``[ARGS]``.
    """

    format: ToolFormat
    begin: str
    """Mark before a call; "" if only the whole text can be a call."""
    end: str = ""
    """Mark after a call; "" if there is none."""
    arguments: str = ""
    """Mark between the name of a function and its arguments; "" if a JSON object has both."""
    call_id: str = ""
    """Mark between the name of a function and the id of the call, which some models write."""
    special: Mapping[str, int] = field(default_factory=dict)
    """Character of a mark -> id of its special token."""

    @classmethod
    def of(cls, format_: ToolFormat, vocabulary: Vocabulary) -> ToolSyntax:
        """Return the syntax of a format for a model's vocabulary."""
        special: dict[str, int] = {}
        marks = []
        for mark in MARKS[format_]:
            id_ = vocabulary.special_id(mark)
            if id_ is not None:
                character = chr(_FIRST_CHARACTER + len(special))
                special[character] = id_
            marks.append(mark if id_ is None else character)
        if format_ == "hermes":
            return cls(format_, marks[0], end=marks[1], special=special)
        if format_ == "llama":
            return cls(format_, marks[0] if special else "", special=special)
        if vocabulary.special_id("[ARGS]") is None:
            return cls(format_, marks[0], special=special)
        return cls(format_, marks[0], arguments=marks[1], call_id=marks[2], special=special)

    @property
    def is_bare(self) -> bool:
        """Whether a text that begins with a JSON object may be a call without a mark."""
        return self.format == "llama"

    @property
    def key(self) -> str:
        """Key of the arguments in the JSON object of a call."""
        return "parameters" if self.format == "llama" else "arguments"

    @property
    def call_id_length(self) -> int:
        """Length of the ids of calls, in characters; chat templates of Mistral accept only one length."""
        return 9 if self.format == "mistral" else 24

    def without_marks(self, text: str) -> str:
        """Return a text without the characters of special tokens."""
        return text.translate(dict.fromkeys(map(ord, self.special))) if self.special else text
