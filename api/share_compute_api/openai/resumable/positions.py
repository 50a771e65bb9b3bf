"""Positions in a stream: they are the ids of its events, and say how much of each answer was sent.

A position has one item for each answer, separated by commas, in the order of the answers' indexes:

| item | meaning |
|---|---|
| ``-`` | nothing was sent |
| ``12`` | the first chunk was sent, and 12 characters of text |
| ``12:5`` | the same, with the log-probabilities of 5 tokens |
| ``12:5.`` | the same, and the finish reason |

``+`` at the end of the position means that the token counts of the request were sent, too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from share_compute.errors import UserError

_ITEM = re.compile(r"-|(\d{1,9})(?::(\d{1,9}))?(\.?)", re.ASCII)
_SHOWN = 80
"""Largest number of characters of a malformed position that an error repeats."""


@dataclass(slots=True)
class SentAnswer:
    """The part of one answer that was sent."""

    has_begun: bool = False
    characters: int = 0
    tokens: int = 0
    """Number of tokens whose log-probabilities were sent; 0 if the client did not request any."""
    has_ended: bool = False

    def __str__(self) -> str:
        if not self.has_begun:
            return "-"
        tokens = f":{self.tokens}" if self.tokens else ""
        return f"{self.characters}{tokens}{'.' if self.has_ended else ''}"


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
                has_ended=bool(match[3]),
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
