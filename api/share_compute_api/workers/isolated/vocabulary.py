"""Vocabulary of a served model, with which the control plane decodes tokens. A vocabulary is data and contains no code.

An isolated process loads the tokenizer and returns its `Vocabulary`. The control plane decodes each token itself,
because a call to another process for each token would cost more than the decoding.

Decoding with an untrusted vocabulary is safe for two reasons. The length of a token's text is limited. Only decoders
whose work and output grow linearly are accepted. Regular expressions are rejected, and so are sequences of replacements
that can lengthen a text by more than the factor `_MOST_GROWTH`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, model_validator

from share_compute.errors import TooLong, UserError
from share_compute.specification.serve import ToolFormat

MOST_TOKENS = 1 << 20
"""Largest accepted number of token ids, about four times as many as in the largest published vocabularies."""
MOST_TOKEN_CHARACTERS = 1024
_MOST_GROWTH = 16
"""Largest factor by which all replacements of a decoder together may lengthen a text."""
_MOST_NAMED = 8
"""Largest number of unknown ids that an error names."""
_ONE_BYTE = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")
"""Form in which SentencePiece tokenizers write a byte that has no token of its own."""
_SPACE = "\u2581"
"""Character that stands for a space in SentencePiece tokenizers."""


class _Declared(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class ByteLevel(_Declared):
    """Maps each character of a token to one byte (GPT-2)."""

    type: Literal["ByteLevel"]

    def build(self) -> Any:
        """Return the equivalent decoder of the ``tokenizers`` library."""
        from tokenizers import decoders

        return decoders.ByteLevel()


class WordPiece(_Declared):
    """Joins tokens with spaces; a token that begins with ``prefix`` continues the previous word."""

    type: Literal["WordPiece"]
    prefix: str = Field(max_length=16)
    cleanup: bool

    def build(self) -> Any:
        """Return the equivalent decoder of the ``tokenizers`` library."""
        from tokenizers import decoders

        return decoders.WordPiece(self.prefix, self.cleanup)


class Metaspace(_Declared):
    """Replaces a given character with a space (SentencePiece)."""

    type: Literal["Metaspace"]
    replacement: str = Field(min_length=1, max_length=1)
    prepend_scheme: Literal["always", "never", "first"] = "always"
    split: bool = True

    def build(self) -> Any:
        """Return the equivalent decoder of the ``tokenizers`` library."""
        from tokenizers import decoders

        return decoders.Metaspace(self.replacement, self.prepend_scheme, self.split)


class BpeSuffix(_Declared):
    """Replaces the suffix that marks the end of a word with a space."""

    type: Literal["BPEDecoder"]
    suffix: str = Field(min_length=1, max_length=16)

    def build(self) -> Any:
        """Return the equivalent decoder of the ``tokenizers`` library."""
        from tokenizers import decoders

        return decoders.BPEDecoder(self.suffix)


class ByteFallback(_Declared):
    """Decodes tokens such as ``<0x0A>`` to single bytes."""

    type: Literal["ByteFallback"]

    def build(self) -> Any:
        """Return the equivalent decoder of the ``tokenizers`` library."""
        from tokenizers import decoders

        return decoders.ByteFallback()


class Fuse(_Declared):
    """Joins all tokens into one string for the decoders that follow."""

    type: Literal["Fuse"]

    def build(self) -> Any:
        """Return the equivalent decoder of the ``tokenizers`` library."""
        from tokenizers import decoders

        return decoders.Fuse()


class Strip(_Declared):
    """Removes a given character from the ends of a token."""

    type: Literal["Strip"]
    content: str = Field(min_length=1, max_length=1)
    start: int = Field(ge=0, le=MOST_TOKEN_CHARACTERS)
    stop: int = Field(ge=0, le=MOST_TOKEN_CHARACTERS)

    def build(self) -> Any:
        """Return the equivalent decoder of the ``tokenizers`` library."""
        from tokenizers import decoders

        return decoders.Strip(self.content, self.start, self.stop)


def _check_growth(growth: float) -> None:
    if growth > _MOST_GROWTH:
        raise ValueError(f"its replacements make text {growth:g} times as long; at most {_MOST_GROWTH} times")


class _Literal(_Declared):
    model_config = ConfigDict(frozen=True, extra="forbid")

    String: str = Field(min_length=1, max_length=64)


class Replace(_Declared):
    """Replaces one string with another; regular expressions are rejected."""

    type: Literal["Replace"]
    pattern: _Literal
    content: str = Field(max_length=64)

    @property
    def growth(self) -> float:
        """Largest factor by which the replacement may lengthen a text; at least 1."""
        return max(1.0, len(self.content) / len(self.pattern.String))

    @model_validator(mode="after")
    def _keeps_text_short(self) -> Replace:
        _check_growth(self.growth)
        return self

    def build(self) -> Any:
        """Return the equivalent decoder of the ``tokenizers`` library."""
        from tokenizers import decoders

        return decoders.Replace(self.pattern.String, self.content)


Simple: TypeAlias = Annotated[
    ByteLevel | WordPiece | Metaspace | BpeSuffix | ByteFallback | Fuse | Strip | Replace,
    Field(discriminator="type"),
]


class Several(_Declared):
    """Applies several decoders in sequence."""

    type: Literal["Sequence"]
    decoders: tuple[Simple, ...] = Field(max_length=16)

    @model_validator(mode="after")
    def _keeps_text_short(self) -> Several:
        _check_growth(math.prod(step.growth for step in self.decoders if isinstance(step, Replace)))
        return self

    def build(self) -> Any:
        """Return the equivalent decoder of the ``tokenizers`` library."""
        from tokenizers import decoders

        return decoders.Sequence([step.build() for step in self.decoders])


Decoder: TypeAlias = Annotated[Simple | Several, Field(discriminator="type")]
Token: TypeAlias = Annotated[str, Field(max_length=MOST_TOKEN_CHARACTERS)]


class Vocabulary(BaseModel):
    """Decodes tokens to text; thread-safe."""

    model_config = ConfigDict(frozen=True)

    tokens: tuple[Token | None, ...] = Field(max_length=MOST_TOKENS)
    """Token strings, indexed by id; None for an unused id."""
    added: frozenset[int]
    """Ids of added tokens; `token_bytes` encodes their text unchanged."""
    special: frozenset[int]
    """Ids of special tokens, which `decode` omits."""
    end_ids: tuple[int, ...] = Field(max_length=64)
    """Ids of the end-of-text tokens."""
    decoder: Decoder | None
    """Decoder that joins tokens into text; if None, tokens are joined with spaces."""
    tool_format: ToolFormat | None = None
    """Format of tool calls that the chat template shows; None if it shows no known one."""

    @property
    def vocab_size(self) -> int:
        """Largest token id plus one."""
        return len(self.tokens)

    def check(self, ids: Sequence[int], most_tokens: int) -> tuple[int, ...]:
        """Return token ids if a client may use them as a prompt.

        Raises:
            TooLong: there are more than ``most_tokens`` ids.
            UserError: there are no ids, or an id is larger than all ids of the vocabulary.
        """
        if len(ids) > most_tokens:
            raise too_long(str(len(ids)), most_tokens)
        if not ids:
            raise UserError("the prompt has no tokens", hint="send some text")
        largest = max(ids)
        if largest >= self.vocab_size:
            raise UserError(
                f"the prompt has token id {largest}; the model's vocabulary ends at {self.vocab_size - 1}",
                hint="send text, or ids of this model's own tokenizer",
            )
        return tuple(ids)

    def require_known(self, ids: Sequence[int], field: str) -> None:
        """Check that tokens have these ids.

        Args:
            ids: token ids.
            field: name of the request's field that holds them.

        Raises:
            UserError: the vocabulary lacks some of the ids.
        """
        unknown = [id_ for id_ in ids if self._token(id_) is None]
        if unknown:
            named = ", ".join(map(str, unknown[:_MOST_NAMED]))
            more = len(unknown) - _MOST_NAMED
            raise UserError(
                f"{field}: no tokens have the ids {named}{f' and {more} others' if more > 0 else ''}; "
                f"the model's vocabulary ends at {self.vocab_size - 1}",
                hint="use ids of this model's own tokenizer",
                details={"param": field, "code": "invalid_value"},
            )

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids without special tokens; bytes that are not valid UTF-8 become U+FFFD."""
        tokens = [token for id_ in ids if id_ not in self.special and (token := self._token(id_)) is not None]
        if self._decodes is None:
            return " ".join(tokens)
        text: str = self._decodes.decode(tokens)
        return text

    @cached_property
    def with_special(self) -> Vocabulary:
        """The same vocabulary, but special tokens are output like others."""
        return self.model_copy(update={"special": frozenset()})

    def is_special(self, id_: int) -> bool:
        """Return whether a token is special. `decode` omits special tokens."""
        return id_ in self.special

    def special_id(self, text: str) -> int | None:
        """Return the id of the special token ``text``; None if there is none."""
        return self._special_ids.get(text)

    def token_bytes(self, id_: int) -> bytes:
        """Return the bytes that a token stands for.

        In a byte-level vocabulary, the bytes of a text's tokens, concatenated, are the text in UTF-8.
        """
        token = self._token(id_)
        if token is None:  # an unused id, as in padded vocabularies
            return b""
        if id_ in self.added:
            return token.encode()
        if self._bytes is not None:
            return bytes(self._bytes[letter] for letter in token if letter in self._bytes)
        one = _ONE_BYTE.match(token)
        if one is not None:
            return bytes([int(one[1], 16)])
        return (token.replace(_SPACE, " ") if self._writes_spaces else token).encode()

    def _token(self, id_: int) -> str | None:
        return self.tokens[id_] if 0 <= id_ < len(self.tokens) else None

    @cached_property
    def _decodes(self) -> Any:
        return None if self.decoder is None else self.decoder.build()

    @cached_property
    def _steps(self) -> tuple[Any, ...]:
        return self.decoder.decoders if isinstance(self.decoder, Several) else (self.decoder,)

    @cached_property
    def _bytes(self) -> dict[str, int] | None:
        return byte_alphabet() if any(isinstance(step, ByteLevel) for step in self._steps) else None

    @cached_property
    def _writes_spaces(self) -> bool:
        return any(
            isinstance(step, Metaspace) or (isinstance(step, Replace) and step.pattern.String == _SPACE)
            for step in self._steps
        )

    @cached_property
    def _special_ids(self) -> dict[str, int]:
        return {token: id_ for id_ in self.special if (token := self._token(id_)) is not None}


def too_long(found: str, most_tokens: int) -> TooLong:
    """Return the error for a prompt of ``found`` tokens."""
    return TooLong(
        f"the prompt has {found} tokens, the model's window is {most_tokens}",
        hint="shorten it",
        details={"window_tokens": most_tokens},
    )


def byte_alphabet() -> dict[str, int]:
    """Return the mapping from the characters of a byte-level vocabulary to the bytes that they stand for.

    The mapping is GPT-2's: a visible Latin-1 character stands for its own byte. The characters from U+0100 onwards
    stand for the remaining bytes, in order.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {
        chr(0x100 + place): byte for place, byte in enumerate(others)
    }
