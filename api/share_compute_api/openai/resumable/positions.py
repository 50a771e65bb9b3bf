"""Positions in a stream, which are the ids of its events: they state how much of each answer was sent.

A position has one item for each answer, separated by commas, in the order of the answers' indexes:

| item | meaning |
|---|---|
| ``-`` | nothing was sent |
| ``12`` | the first chunk was sent, and 12 characters of text |
| ``12:5`` | the same, with the log-probabilities of 5 tokens |
| ``12~2/34`` | the first chunk, 12 characters of text, 2 tool calls, and 34 characters of the arguments of the second |
| ``12:5~2/34.`` | all of these, and the finish reason |

``+`` at the end of the position means that the token counts of the request were sent, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

from share_compute.errors import UserError
from share_compute_api.openai.writing import AnswerPiece, Finish, FullAnswer, ToolCallDelta

_ITEM = re.compile(r"-|(\d{1,9})(?::(\d{1,9}))?(?:~([1-9]\d{0,8})/(\d{1,9}))?(\.?)", re.ASCII)
_SHOWN = 80
"""Largest number of characters of a malformed position that an error repeats."""


@dataclass(slots=True)
class SentAnswer:
    """The part of one answer that was sent."""

    has_begun: bool = False
    characters: int = 0
    tokens: int = 0
    """Number of tokens whose log-probabilities were sent; 0 if the client did not request any."""
    calls: int = 0
    """Number of tool calls of which at least the name was sent."""
    argument_characters: int = 0
    """Number of characters of the last of these calls' arguments."""
    has_ended: bool = False

    def __str__(self) -> str:
        if not self.has_begun:
            return "-"
        tokens = f":{self.tokens}" if self.tokens else ""
        calls = f"~{self.calls}/{self.argument_characters}" if self.calls else ""
        return f"{self.characters}{tokens}{calls}{'.' if self.has_ended else ''}"

    def is_ahead_of(self, answer: FullAnswer) -> bool:
        """Return whether more was sent than the answer contains so far."""
        return (
            self.characters > len(answer.text)
            or self.tokens > len(answer.tokens)
            or self.calls > len(answer.calls)
            or (self.calls > 0 and self.argument_characters > len(answer.calls[self.calls - 1].arguments))
        )

    def advance(self, answer: FullAnswer, finish: Finish | None) -> Iterator[AnswerPiece]:
        """Yield the pieces of an answer that were not sent, and count each as sent when it is yielded.

        Each piece makes one chunk. The text comes before the tool calls.

        Args:
            answer: the answer so far.
            finish: reason why the answer ended, if it is complete; None otherwise.
        """
        pieces = list(self._unsent(answer))
        if finish is not None:
            last = pieces.pop() if pieces else AnswerPiece()
            pieces.append(replace(last, finish=finish))
        for piece in pieces:
            if piece.text or piece.tokens:
                # After a restart, more of the text may have been sent than has been regenerated so far.
                self.characters = max(self.characters, len(answer.text))
                self.tokens = max(self.tokens, len(answer.tokens))
            for call in piece.calls:
                self.calls = call.index + 1
                self.argument_characters = len(answer.calls[call.index].arguments)
            self.has_ended = piece.finish is not None
            yield piece

    def _unsent(self, answer: FullAnswer) -> Iterator[AnswerPiece]:
        text, tokens = answer.text[self.characters :], tuple(answer.tokens[self.tokens :])
        if text or tokens:
            yield AnswerPiece(text, tokens)
        for index in range(max(0, self.calls - 1), len(answer.calls)):
            call = answer.calls[index]
            if index >= self.calls:
                yield AnswerPiece(calls=(call,))
            elif rest := call.arguments[self.argument_characters :]:
                yield AnswerPiece(calls=(ToolCallDelta(index, arguments=rest),))


@dataclass(slots=True)
class StreamPosition:
    """The part of a stream that was sent."""

    answers: Sequence[SentAnswer]
    has_usage: bool = False
    """Whether the token counts of the request were sent."""

    @classmethod
    def start(cls, num_answers: int) -> Self:
        """Return the position before the first event."""
        return cls([SentAnswer() for _ in range(num_answers)])

    @classmethod
    def parse(cls, text: str, num_answers: int) -> Self:
        """Return the position that an event's id names.

        Raises:
            UserError: the text is not the id of an event of a stream with this number of answers.
        """
        items, plus, rest = text.partition("+")
        matches = [_ITEM.fullmatch(item) for item in items.split(",", num_answers)]
        answers = [
            SentAnswer()
            if match[0] == "-"
            else SentAnswer(
                has_begun=True,
                characters=int(match[1]),
                tokens=int(match[2] or 0),
                calls=int(match[3] or 0),
                argument_characters=int(match[4] or 0),
                has_ended=bool(match[5]),
            )
            for match in matches
            if match is not None
        ]
        if rest or len(answers) != num_answers or len(matches) != num_answers:
            raise _not_an_id(text)
        if plus and not all(answer.has_ended for answer in answers):
            raise _not_an_id(text)
        return cls(answers, bool(plus))

    def __str__(self) -> str:
        return ",".join(map(str, self.answers)) + ("+" if self.has_usage else "")


def _not_an_id(text: str) -> UserError:
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    return UserError(
        f"Last-Event-ID {shown!r} is not the id of an event of this stream",
        hint="send the id of the last event that arrived, unchanged",
        details={"param": "Last-Event-ID"},
    )


def ahead_of_text(position: StreamPosition) -> UserError:
    """Return the error for a position that the text has not reached."""
    shown = str(position)
    return UserError(
        f"Last-Event-ID {shown[:_SHOWN]!r} is ahead of the text of this stream",
        hint="send the id of the last event that arrived, unchanged",
        details={"param": "Last-Event-ID"},
    )
