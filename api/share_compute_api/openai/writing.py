"""Turns one sequence's tokens into text up to a stop string, together with the tokens of that text.

Tokens are decoded one by one. A character that consists of several tokens is held back until it is complete. Text that
may be the beginning of a stop string is held back too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from share_compute.inference.scheduler.events import Emitted, Finished

Finish = Literal["stop", "length", "tool_calls"]
_BROKEN = "\ufffd"
_CONTEXT_TOKENS = 5
"""Number of prompt tokens kept as context, since some tokenizers decode the first token of a text differently."""
_MOST_BYTES = 3
"""Maximum number of bytes of an incomplete UTF-8 character; each byte decodes to at most one U+FFFD."""
_WINDOW_TOKENS = 16


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """The next part of a sequence's answer."""

    text: str = ""
    tokens: tuple[Written, ...] = ()
    """Tokens of the text; empty if the client did not request log-probabilities."""
    calls: tuple[ToolCallDelta, ...] = ()
    """Parts of tool calls."""
    finish: Finish | None = None
    """Reason why the sequence ended with this piece; None if it continues."""


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """The next part of a tool call: its id and name, or a part of its arguments."""

    index: int
    """Position of the call in the answer."""
    id: str | None = None
    name: str | None = None
    """Name of the function; the first part of a call has it, later parts have not."""
    arguments: str = ""
    """Part of the arguments, which are a JSON object as text."""


@dataclass(frozen=True, slots=True)
class Written:
    """A generated token and the position of its text."""

    emitted: Emitted
    offset: int
    """Position of the token's text, in characters from the beginning of the answer."""


@dataclass(slots=True)
class FullAnswer:
    """Concatenation of all pieces of one sequence."""

    text: str = ""
    tokens: list[Written] = field(default_factory=list)
    calls: list[ToolCallDelta] = field(default_factory=list)
    """Tool calls with all of their arguments."""
    call_offsets: list[int] = field(default_factory=list)
    """Length in characters of the text before each call."""
    finish: Finish = "stop"

    def add(self, piece: AnswerPiece) -> None:
        """Append a piece."""
        self.text += piece.text
        self.tokens += piece.tokens
        for delta in piece.calls:
            if delta.name is not None:
                self.calls.append(delta)
                self.call_offsets.append(len(self.text))
            else:
                whole = self.calls[delta.index]
                self.calls[delta.index] = replace(whole, arguments=whole.arguments + delta.arguments)
        self.finish = piece.finish or self.finish


class Writer:
    """Turns the events of one sequence into pieces.

    Args:
        tokenizer: the model's tokenizer.
        prompt: the prompt's tokens, which precede the first event.
        end_ids: tokens that end the sequence; their text is left out.
        stops: strings before which the text ends.
        min_tokens: number of tokens up to which a complete stop string is ordinary text. A stop string that is
            completed later ends the text, even if it began before.
        keeps_tokens: whether pieces include tokens, for clients that request log-probabilities.
        shown: text of special tokens that are part of the text, by id; other special tokens have no text.
    """

    def __init__(
        self,
        tokenizer: Decodes,
        prompt: Sequence[int],
        *,
        end_ids: Sequence[int] = (),
        stops: Sequence[str] = (),
        min_tokens: int = 0,
        keeps_tokens: bool = False,
        shown: Mapping[int, str] | None = None,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt)
        self._shown = shown or {}
        self._stops = StopStrings(stops)
        self._end_ids = frozenset(end_ids)
        self._min_tokens = min_tokens
        self._keeps_tokens = keeps_tokens
        self._tokens: list[Written] = []
        self._read = 0
        """Number of characters decoded from the tokens."""
        self._returned = 0
        """Number of characters returned in pieces."""
        self.num_tokens = 0
        """Number of generated tokens."""
        self.cached_tokens = 0
        """Number of prompt tokens whose computation was skipped because of prefix caching; 0 before the first token."""

    def read(self, event: Emitted | Finished) -> AnswerPiece:
        """Process a token or the end of the sequence, and return the text that can be shown now.

        The piece has ``finish`` set when the text is complete.
        """
        if isinstance(event, Finished):
            return self._finish("length" if event.reason == "length" else "stop")
        self.num_tokens += 1
        self.cached_tokens += event.cached_tokens
        if event.token in self._end_ids:
            return AnswerPiece()
        if self._keeps_tokens:
            self._tokens.append(Written(event, self._read))
        shown = self._shown.get(event.token)
        if shown is not None:
            return self._take(self._detokenizer.flush() + shown)
        return self._take(self._detokenizer.push(event.token))

    def _finish(self, why: Finish) -> AnswerPiece:
        piece = self._take(self._detokenizer.flush())
        if piece.finish is not None:
            return piece
        text = piece.text + self._stops.flush()
        tokens, self._tokens = (*piece.tokens, *self._tokens), []
        return AnswerPiece(text, tokens, finish=why)

    def _take(self, text: str) -> AnswerPiece:
        self._read += len(text)
        shown = self._stops.push(text, may_end=self.num_tokens > self._min_tokens)
        self._returned += len(shown)
        ready = [written for written in self._tokens if written.offset < self._returned]
        self._tokens = self._tokens[len(ready) :]
        return AnswerPiece(shown, tuple(ready), finish="stop" if self._stops.found else None)


class Decodes(Protocol):
    """Decodes token ids to text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text without special tokens; bytes that are not valid UTF-8 become U+FFFD."""

    def is_special(self, id_: int) -> bool:
        """Return whether a token is special; special tokens have no text."""


class Detokenizer:
    """Decodes tokens one by one; the cost per token does not grow with the length of the text.

    Args:
        tokenizer: the model's tokenizer.
        prompt: the tokens that precede the first token to be pushed.
    """

    def __init__(self, tokenizer: Decodes, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._window = list(prompt[-_CONTEXT_TOKENS:])
        """Tokens kept as context, followed by tokens whose text was not fully returned yet."""
        self._context = len(self._window)
        self._returned = len(tokenizer.decode(self._window))
        """Number of characters of the window's text that were returned."""

    def push(self, id_: int) -> str:
        """Append a token, and return the new text that later tokens cannot change."""
        if self._tokenizer.is_special(id_):
            return ""
        self._window.append(id_)
        text = self._tokenizer.decode(self._window)
        if not text.endswith(_BROKEN):
            new = self._take(text, len(text))
            if new:
                del self._window[: self._context]
                self._context = len(self._window)
                self._returned = len(self._tokenizer.decode(self._window))
        elif len(self._window) - self._context > _MOST_BYTES:
            # At most the last `_MOST_BYTES` U+FFFD can be an incomplete character; earlier ones are final.
            broken = len(text) - len(text.rstrip(_BROKEN))
            new = self._take(text, len(text) - min(broken, _MOST_BYTES))
        else:
            new = ""
        return new + self._shrink(text)

    def flush(self) -> str:
        """Return the text that is still held back, after the last token."""
        text = self._tokenizer.decode(self._window)
        return self._take(text, len(text))

    def _take(self, text: str, stop: int) -> str:
        new = text[self._returned : stop]
        self._returned = max(self._returned, stop)
        return new

    def _shrink(self, text: str) -> str:
        """Drop the oldest tokens if the window is too long; return any of their text that was not returned yet."""
        if len(self._window) <= _WINDOW_TOKENS:
            return ""
        decode, window, half = self._tokenizer.decode, self._window, _WINDOW_TOKENS // 2
        # Prefer a cut at which the two parts decode to the same text as the whole.
        cuts = range(half, 0, -1)
        cut = next((at for at in cuts if decode(window[:at]) + decode(window[at:]) == text), half)
        gone = len(decode(window[:cut]))
        new = self._take(text, gone)
        del window[:cut]
        self._context = max(0, self._context - cut)
        self._returned -= gone
        return new


class StopStrings:
    """Finds stop strings in a text that arrives in pieces.

    Args:
        strings: the stop strings, none of them empty.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._held = ""
        self.found = False
        """Whether a stop string was found; the text ends before it."""

    def push(self, text: str, *, may_end: bool = True) -> str:
        """Add text, and return the new and held-back text that cannot belong to a stop string; hold back the rest.

        If a stop string is found, the returned text ends before it. Without ``may_end``, stop strings that this text
        completes are ignored.
        """
        if not self._strings:
            return text
        held, text = len(self._held), self._held + text
        # Held-back text may contain a stop string that was completed while stop strings were ignored.
        places = [
            place
            for string in self._strings
            if (place := text.find(string, max(0, held - len(string) + 1))) >= 0
        ]
        if places and may_end:
            self.found, self._held = True, ""
            return text[: min(places)]
        kept = max(overlap(text, string) for string in self._strings)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def flush(self) -> str:
        """Return the text that is still held back, after the last piece."""
        text, self._held = self._held, ""
        return text


def overlap(text: str, string: str) -> int:
    """Return the length of the longest suffix of ``text`` that is a proper prefix of ``string``."""
    longest = min(len(text), len(string) - 1)
    return next((count for count in range(longest, 0, -1) if text.endswith(string[:count])), 0)
