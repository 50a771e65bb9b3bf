"""Turns one sequence's tokens into what its client reads: text up to a stop string, and the tokens of that text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from share_compute.serving.events import Emitted, Finished
from share_compute_api.serving.detokenizing import Decodes, Detokenizer
from share_compute_api.serving.stopping import StopStrings

Finish = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Piece:
    """The next part of a sequence's answer."""

    text: str = ""
    tokens: tuple[Written, ...] = ()
    """Tokens of the text, with log-probabilities; empty if the client did not ask for them."""
    finish: Finish | None = None
    """Reason why the sequence ended here; None if it did not."""


@dataclass(frozen=True, slots=True)
class Written:
    """A token of the text."""

    emitted: Emitted
    offset: int
    """Beginning of its text, in characters from the beginning of the answer."""


@dataclass(slots=True)
class Told:
    """All pieces of one sequence together."""

    text: str = ""
    tokens: list[Written] = field(default_factory=list)
    finish: Finish = "stop"

    def add(self, piece: Piece) -> None:
        """Append a piece."""
        self.text += piece.text
        self.tokens += piece.tokens
        self.finish = piece.finish or self.finish


class Writer:
    """Turns the events of one sequence into pieces.

    Args:
        tokenizer: the model's tokenizer.
        prompt: the tokens before the first one.
        end_ids: tokens that end the sequence and have no text.
        stops: strings before which the text ends.
        keeps_tokens: whether the client wants the tokens too.
    """

    def __init__(
        self,
        tokenizer: Decodes,
        prompt: Sequence[int],
        *,
        end_ids: Sequence[int] = (),
        stops: Sequence[str] = (),
        keeps_tokens: bool = False,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt)
        self._stops = StopStrings(stops)
        self._end_ids = frozenset(end_ids)
        self._keeps_tokens = keeps_tokens
        self._tokens: list[Written] = []
        self._read = 0
        """Characters decoded from the tokens."""
        self._told = 0
        """Characters that the client has received."""
        self.num_tokens = 0
        """Number of generated tokens."""
        self.cached_tokens = 0
        """Number of prompt tokens that were copied, not computed; known with the first token."""

    def read(self, event: Emitted | Finished) -> Piece:
        """Return the text that a token, or the end, adds; the piece has a finish when the text is over."""
        if isinstance(event, Finished):
            return self._finish("length" if event.reason == "length" else "stop")
        self.num_tokens += 1
        self.cached_tokens += event.cached_tokens
        if event.token in self._end_ids:
            return Piece()
        if self._keeps_tokens:
            self._tokens.append(Written(event, self._read))
        return self._tell(self._detokenizer.push(event.token))

    def _finish(self, why: Finish) -> Piece:
        piece = self._tell(self._detokenizer.flush())
        if piece.finish is not None:
            return piece
        text = piece.text + self._stops.flush()
        tokens, self._tokens = (*piece.tokens, *self._tokens), []
        return Piece(text, tokens, why)

    def _tell(self, text: str) -> Piece:
        self._read += len(text)
        shown = self._stops.push(text)
        self._told += len(shown)
        ready = [written for written in self._tokens if written.offset < self._told]
        self._tokens = self._tokens[len(ready) :]
        return Piece(shown, tuple(ready), "stop" if self._stops.found else None)
