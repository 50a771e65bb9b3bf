"""Finds tool calls in a model's text, which arrives in pieces.

The result does not depend on the cuts between pieces.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable, Collection
from dataclasses import replace
from hashlib import sha256
from typing import Any, NoReturn

from share_compute_api.openai.tools.syntax import ToolSyntax
from share_compute_api.openai.writing import AnswerPiece, ToolCallDelta, overlap

_HEAD = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([A-Za-z0-9_-]{1,64})"\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*\{'
)
"""Usual beginning of a call, after which its arguments can be streamed."""
_KEYS = frozenset({"name", "arguments", "parameters", "id", "type"})
_MOST_BLANKS = 64
"""Largest number of blank characters before a call that are dropped."""
_MOST_NAME = 160
"""Largest length in characters of a name and a call id before the mark of the arguments."""
_ALPHABET = string.ascii_letters + string.digits


class ToolCallParser:
    """Splits the text of one answer into content and tool calls.

    Text that begins like a call but is not one becomes content. If a call's JSON is found to be broken after some of
    its arguments were returned, the call keeps these arguments, and `is_broken` is true.

    Args:
        syntax: syntax of the model's calls.
        names: names of the functions that may be called.
        seed: text from which the ids of calls are derived.
        is_single: whether the answer ends after its first call.
        is_streamed: whether arguments are returned while they arrive; otherwise, only complete calls are returned.
    """

    def __init__(
        self, syntax: ToolSyntax, names: Collection[str], *, seed: str, is_single: bool, is_streamed: bool
    ) -> None:
        self._syntax = syntax
        self._names = names
        self._seed = seed
        self._is_single = is_single
        self._is_streamed = is_streamed
        self._step: Callable[[str], None] = self._blank_start if syntax.is_bare else self._text
        """Processes the next character; the state of the machine."""
        self._content: list[str] = []
        """Content that was not returned yet."""
        self._calls: list[ToolCallDelta] = []
        """Parts of calls that were not returned yet."""
        self._held = ""
        """End of the text that may be the beginning of a mark."""
        self._raw: list[str] = []
        """Characters of the present call, from its mark on."""
        self._object: _JsonObject | None = None
        self._is_list = False
        """Whether the present call is an item of a list."""
        self._num_begun = 0
        self.num_calls = 0
        """Number of complete calls."""
        self.is_broken = False
        """Whether a call was begun, and is not complete."""

    @property
    def is_done(self) -> bool:
        """Whether the answer ends here, because no further call may follow."""
        return self._is_single and self.num_calls > 0

    def read(self, piece: AnswerPiece) -> AnswerPiece:
        """Return a piece with the content and the parts of calls that the text so far determines.

        The finish reason is "tool_calls" if the text ended by itself and all calls are complete.
        """
        for character in piece.text:
            if not self.is_done:
                self._step(character)
        if piece.finish is not None:
            self._flush()
        finish = piece.finish
        if self.num_calls and not self.is_broken and (self.is_done or finish == "stop"):
            finish = "tool_calls"
        content = self._syntax.without_marks("".join(self._content))
        calls = _joined(self._calls)
        self._content, self._calls = [], []
        return replace(piece, text=content, calls=calls, finish=finish)

    def _flush(self) -> None:
        """Process the end of the text."""
        if self._object is not None or self._raw:
            if self._object is not None and self._object.is_returned:
                self.is_broken = True
            else:
                self._content += self._raw
        elif self._step == self._text and not (self.num_calls and self._held.isspace()):
            self._content.append(self._held)
        self._held, self._raw, self._object = "", [], None

    # -- states: text outside of calls -------------------------------------------------------------------------------

    def _blank_start(self, character: str) -> None:
        """Process blanks at the beginning of a text that may be a single call."""
        self._raw.append(character)
        if character == "{":
            self._begin_object(None)
        elif not character.isspace() or len(self._raw) > _MOST_BLANKS:
            self._refuse(character)

    def _text(self, character: str) -> None:
        """Process text, up to a mark."""
        begin = self._syntax.begin
        self._held += character
        if begin and self._held.endswith(begin):
            self._expect_call(self._held)
            return
        kept = overlap(self._held, begin) if begin else 0
        certain = self._held[: len(self._held) - kept]
        blanks = min(len(certain) - len(certain.rstrip()), _MOST_BLANKS)
        content = certain[: len(certain) - blanks]
        self._content.append(content)
        self._held = self._held[len(content) :]

    def _after_call(self, character: str) -> None:
        """Process text after a call, up to the mark of its end."""
        end = "]" if self._is_list else self._syntax.end
        self._held += character
        rest = self._held.lstrip()
        if end and rest == end:
            self._is_list, self._held, self._step = False, "", self._text
        elif (self._is_list and rest == ",") or (self._syntax.is_bare and rest == ";"):
            self._expect_call(self._held)
        elif not end.startswith(rest) or len(self._held) > _MOST_BLANKS + len(end):
            self._text_again(self._held)

    def _text_again(self, text: str) -> None:
        self._is_list, self._held, self._step = False, "", self._text
        for character in text:
            self._step(character)

    # -- states: calls -----------------------------------------------------------------------------------------------

    def _expect_call(self, raw: str) -> None:
        self._raw, self._held, self._step = list(raw), "", self._call_begin

    def _call_begin(self, character: str) -> None:
        """Process the text between a mark and the call."""
        self._raw.append(character)
        if character == "{":
            self._begin_object(None)
        elif character == "[" and self._syntax.format == "mistral" and not self._is_list:
            self._is_list = True
        elif self._syntax.arguments and not self._is_list and not character.isspace():
            self._held, self._step = character, self._name
        elif not character.isspace() or len(self._raw) > 2 * _MOST_BLANKS:
            self._refuse(character)

    def _name(self, character: str) -> None:
        """Process the name of a function, up to the mark of its arguments."""
        self._raw.append(character)
        self._held += character
        mark = self._syntax.arguments
        if self._held.endswith(mark):
            name = self._held.removesuffix(mark).partition(self._syntax.call_id)[0].strip()
            self._held = ""
            if name in self._names:
                self._step = lambda next_: self._arguments_begin(next_, name)
            else:
                self._refuse("")
        elif len(self._held) > _MOST_NAME:
            self._refuse(character)

    def _arguments_begin(self, character: str, name: str) -> None:
        """Process the text between the mark of the arguments and the arguments."""
        self._raw.append(character)
        if character == "{":
            self._begin_object(name)
        elif not character.isspace() or len(self._raw) > 2 * _MOST_BLANKS + _MOST_NAME:
            self._refuse(character)

    def _begin_object(self, name: str | None) -> None:
        """Begin the object of a call; if ``name`` is given, the object is the arguments of this function."""
        self._object = _JsonObject(name)
        self._step = self._in_object
        if name is not None:
            self._return_begin(name)
        self._take("{")

    def _in_object(self, character: str) -> None:
        self._raw.append(character)
        if character in self._syntax.special:  # a special token is not part of JSON
            self._end_call(None, character)
        else:
            self._take(character)

    def _take(self, character: str) -> None:
        found = self._object
        assert found is not None
        found.push(character)
        if found.is_head and (match := _HEAD.fullmatch(found.text)) and match[1] in self._names:
            found.name = match[1]
            self._return_begin(found.name)
        if found.is_returned and found.is_argument:
            self._calls.append(ToolCallDelta(self._num_begun - 1, arguments=character))
        if found.is_closed:
            self._end_call(found.call(needs_arguments=self._syntax.is_bare), "")

    def _return_begin(self, name: str) -> None:
        assert self._object is not None
        if self._is_streamed:
            self._object.is_returned = True
            self._calls.append(ToolCallDelta(self._num_begun, self._new_id(), name))
            self._num_begun += 1

    def _end_call(self, call: tuple[str, str] | None, last: str) -> None:
        """Process the end of a call's object.

        Args:
            call: name of the function and its arguments; None if the object is not a call.
            last: last character, if it does not belong to the object, else "".
        """
        assert self._object is not None
        is_returned = self._object.is_returned
        if call is not None and call[0] in self._names:
            if not is_returned:
                self._calls.append(ToolCallDelta(self._num_begun, self._new_id(), call[0]))
                self._calls.append(ToolCallDelta(self._num_begun, arguments=call[1]))
                self._num_begun += 1
            self.num_calls += 1
            self._object, self._raw, self._step = None, [], self._after_call
        elif is_returned:
            self.is_broken = True
            self._object, self._raw = None, []
            self._text_again(last)
        else:
            self._refuse(last)

    def _refuse(self, last: str) -> None:
        """Turn the present text into content, because it is not a call; its ``last`` character may begin a mark."""
        self._content += self._raw[: len(self._raw) - len(last)]
        self._object, self._raw = None, []
        self._text_again(last)

    def _new_id(self) -> str:
        length = self._syntax.call_id_length
        number = int.from_bytes(sha256(f"{self._seed}/{self._num_begun}".encode()).digest())
        text = "".join(
            _ALPHABET[number // len(_ALPHABET) ** place % len(_ALPHABET)] for place in range(length)
        )
        return text if self._syntax.format == "mistral" else f"call_{text}"


class _JsonObject:
    """A JSON object that arrives character by character.

    The parser tracks its nesting, and validates the whole object at its end.

    Args:
        name: name of the function, if the object is the function's arguments; None if the object has the name and the
            arguments.
    """

    def __init__(self, name: str | None) -> None:
        self.name = name
        self._arguments_depth = 2 if name is None else 1
        self._characters: list[str] = []
        self._depth = 0
        self._is_string = False
        self._is_escaped = False
        self._num_heads = 0
        self.is_head = False
        """Whether the last character began the first object inside."""
        self.is_argument = False
        """Whether the last character belongs to the arguments, if the first object inside is these."""
        self.is_returned = False
        """Whether the beginning of the call was returned."""

    @property
    def text(self) -> str:
        """Characters of the object so far."""
        return "".join(self._characters)

    @property
    def is_closed(self) -> bool:
        """Whether the last character closed the object."""
        return self._depth == 0

    def push(self, character: str) -> None:
        """Add a character."""
        self._characters.append(character)
        before = self._depth
        if self._is_string:
            if self._is_escaped:
                self._is_escaped = False
            elif character == "\\":
                self._is_escaped = True
            elif character == '"':
                self._is_string = False
        elif character == '"':
            self._is_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
        is_inside = max(before, self._depth) >= self._arguments_depth
        self.is_head = self.name is None and self._num_heads == 0 and is_inside
        self._num_heads += self.is_head
        # After the first inner object, further inner objects are not arguments.
        self.is_argument = is_inside and self._num_heads <= 1
        if before == self._arguments_depth > self._depth:
            self._num_heads = 2

    def call(self, *, needs_arguments: bool) -> tuple[str, str] | None:
        """Return the name of the function and the arguments as JSON; None if the object is not a call."""
        try:
            found = json.loads(self.text, parse_constant=_refuse_constant, object_pairs_hook=_unique)
        except (ValueError, RecursionError):
            return None
        if self._arguments_depth == 1:
            assert self.name is not None
            return self.name, self.text
        given = [key for key in ("arguments", "parameters") if key in found]
        is_call = isinstance(found.get("name"), str) and found.keys() <= _KEYS and len(given) <= 1
        if not is_call or (needs_arguments and not given):
            return None
        arguments = found[given[0]] if given else {}
        if isinstance(arguments, str):  # some models write the arguments as text
            try:
                arguments = json.loads(arguments, parse_constant=_refuse_constant)
            except (ValueError, RecursionError):
                return None
        if not isinstance(arguments, dict):
            return None
        return found["name"], self._written(arguments)

    def _written(self, arguments: dict[str, Any]) -> str:
        """Return the arguments as the model wrote them if the object has the usual form, else re-encoded as JSON."""
        match = _HEAD.match(self.text)
        if match is not None:
            decoded, end = json.JSONDecoder().raw_decode(self.text, match.end() - 1)
            if decoded == arguments:
                return self.text[match.end() - 1 : end]
        return json.dumps(arguments)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is used twice")
    return found


def _joined(deltas: list[ToolCallDelta]) -> tuple[ToolCallDelta, ...]:
    """Return the deltas, with those joined that continue the arguments of one call."""
    joined: list[ToolCallDelta] = []
    for delta in deltas:
        last = joined[-1] if joined else None
        if last is not None and last.name is None and delta.name is None and last.index == delta.index:
            joined[-1] = replace(last, arguments=last.arguments + delta.arguments)
        else:
            joined.append(delta)
    return tuple(joined)
