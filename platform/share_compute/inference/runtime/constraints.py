"""Constrained decoding: compute with llguidance which tokens a JSON schema or a grammar allows next."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from share_compute.data.tokenization import load_tokenizer
from share_compute.errors import UserError
from share_compute.inference.scheduler.options import SCHEMA_OPTIONS

_ANY_OBJECT = '{"type": "object"}'
_KEPT = 32
"""Maximum number of compiled schemas and grammars that are cached for later requests."""
_TRIED_BYTES = 8
"""Maximum number of bytes that are generated to test whether decoding can follow a schema."""


def check_schema(schema: str) -> None:
    """Check that decoding can follow a schema.

    Args:
        schema: JSON text of the schema; "" allows any object.

    Raises:
        UserError: the text is not a JSON schema, or llguidance does not support the schema.
    """
    try:
        grammar = _grammar(schema)
        reason = LLMatcher.validate_grammar(grammar) or _tried(grammar)
    except (ValueError, RecursionError) as failure:
        reason = str(failure)
    if reason:
        raise UserError(
            f"the JSON schema cannot be followed: {' '.join(reason.split())[:300]}",
            hint="fix the schema, or leave out the keyword that is named",
        )


def _tried(grammar: str) -> str:
    """Generate a few bytes that the grammar allows; return the error message of llguidance, or "" on success."""
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0)
    for _ in range(_TRIED_BYTES):
        allowed = np.flatnonzero(np.frombuffer(matcher.compute_logit_bias(), dtype=np.uint8))
        if matcher.is_error() or matcher.is_stopped() or not len(allowed):
            break
        matcher.consume_tokens([int(allowed[len(allowed) // 2])])
    return matcher.get_error() if matcher.is_error() else ""


def _grammar(schema: str) -> str:
    """Convert a JSON schema to a grammar of llguidance."""
    given = json.loads(schema or _ANY_OBJECT)
    if given is True or given == {}:
        given = {"type": ["object", "array", "string", "number", "boolean", "null"]}
    return LLMatcher.grammar_from_json_schema(given, overrides=SCHEMA_OPTIONS)


class Grammar:
    """State of the constraint on one sequence's text.

    Args:
        matcher: matcher of the schema or grammar; each sequence needs its own copy.
        vocabulary_size: number of logits of the model.
        stop_ids: tokens that end the sequence; they are allowed wherever the text may end.
    """

    def __init__(self, matcher: LLMatcher, vocabulary_size: int, stop_ids: Sequence[int] = ()) -> None:
        self._matcher = matcher
        self._vocabulary_size = vocabulary_size
        self._stop_ids = [id_ for id_ in stop_ids if id_ < vocabulary_size]

    @property
    def is_complete(self) -> bool:
        """Whether the matcher has stopped, because the text is complete or after an error."""
        return self._matcher.is_stopped()

    def allowed(self) -> NDArray[np.bool_]:
        """Return a mask of the tokens that may come next, ``[vocabulary]``."""
        found = np.frombuffer(self._matcher.compute_logit_bias(), dtype=np.uint8) != 0
        allowed = np.zeros(self._vocabulary_size, dtype=np.bool_)
        shared = min(len(found), self._vocabulary_size)
        allowed[:shared] = found[:shared]
        # llguidance knows one end-of-text token, and a model may have several.
        if self._stop_ids and self._matcher.is_accepting():
            allowed[self._stop_ids] = True
        return allowed

    def accept(self, tokens: Sequence[int]) -> None:
        """Advance the grammar by these tokens."""
        self._matcher.consume_tokens(list(tokens))


class Grammars:
    """Cache of compiled JSON schemas and grammars for one tokenizer.

    Args:
        folder: folder of the tokenizer.
        vocabulary_size: number of logits of the model.
    """

    def __init__(self, folder: Path, vocabulary_size: int) -> None:
        self._folder = folder
        self._vocabulary_size = vocabulary_size
        self._tokenizer: Any = None
        self._compiled: dict[tuple[str, bool], LLMatcher] = {}

    def warm_up(self) -> None:
        """Load the tokenizer.

        Raises:
            UserError: the tokenizer cannot be used.
        """
        self._known_tokenizer()

    def start(self, text: str, *, is_lark: bool = False, stop_ids: Sequence[int] = ()) -> Grammar:
        """Return the `Grammar` of a new sequence that must follow a schema or a grammar.

        Args:
            text: JSON schema, or a grammar in llguidance's dialect of Lark.
            is_lark: whether the text is a grammar.
            stop_ids: tokens that end the sequence.

        Raises:
            UserError: the tokenizer cannot be used, or decoding cannot follow the schema or grammar.
        """
        key = (text, is_lark)
        if key not in self._compiled:
            if len(self._compiled) >= _KEPT:
                del self._compiled[next(iter(self._compiled))]
            self._compiled[key] = self._matcher(text, is_lark=is_lark)
        return Grammar(self._compiled[key].deep_copy(), self._vocabulary_size, stop_ids)

    def _matcher(self, text: str, *, is_lark: bool) -> LLMatcher:
        if not is_lark:
            check_schema(text)
        grammar = LLMatcher.grammar_from_lark(text) if is_lark else _grammar(text)
        matcher = LLMatcher(self._known_tokenizer(), grammar, log_level=0)
        if matcher.is_error():
            raise UserError(
                f"the grammar cannot be followed: {' '.join(matcher.get_error().split())[:300]}",
                hint="use fewer tools, or simpler schemas",
            )
        return matcher

    def _known_tokenizer(self) -> Any:
        if self._tokenizer is None:
            from llguidance.hf import from_tokenizer  # noqa: PLC0415 - imports transformers

            try:
                self._tokenizer = from_tokenizer(load_tokenizer(self._folder))
            except (ValueError, TypeError) as failure:
                raise UserError(
                    f"the tokenizer in {self._folder} cannot be used for constrained text: {failure}",
                    hint="give the model a fast tokenizer (tokenizer.json) that has an end of text",
                ) from failure
        return self._tokenizer
