"""One sequence's tokens become what its client reads: text up to a stop string, with the tokens that it is made of."""

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
    """What a client gets to read next of one sequence."""

    text: str = ""
    tokens: tuple[Written, ...] = ()
    """Those of the text, with log-probabilities; empty when nobody asked for them."""
    finish: Finish | None = None
    """Why it ended here."""


@dataclass(frozen=True, slots=True)
class Written:
    """A token of the text."""

    emitted: Emitted
    offset: int
    """Where its text begins, in characters from the beginning of the answer."""


@dataclass(slots=True)
class Told:
    """All pieces of one sequence, put together."""

    text: str = ""
    tokens: list[Written] = field(default_factory=list)
    finish: Finish = "stop"

    def add(self, piece: Piece) -> None:
        """Take one more piece."""
        self.text += piece.text
        self.tokens += piece.tokens
        self.finish = piece.finish or self.finish


class Writer:
    """Writes down one sequence.

    Args:
        tokenizer: of the model.
        prompt: what stands before the first token.
        end_ids: tokens that end the sequence and are no text.
        stops: strings before which the text ends.
        keeps_tokens: whether the client wants to see tokens, too.
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
        """Characters that came out of the tokens."""
        self._told = 0
        """Of them, those that the client has."""
        self.num_tokens = 0
        """Tokens that were generated."""
        self.cached_tokens = 0
        """Tokens of the prompt that were copied, not computed; known with the first token."""

    def read(self, event: Emitted | Finished) -> Piece:
        """Return what one more token, or the end, adds; with a finish when the text is over."""
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
