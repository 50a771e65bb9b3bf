"""Validates request fields of the OpenAI API that accept several forms, and normalizes them to one form."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator

from share_compute.files.strict import StrictModel
from share_compute.specification.token_options import are_token_ids

MOST_MESSAGES = 10_000
"""Maximum number of messages of a chat, and of items of a response's input."""
MOST_STOPS = 16
MOST_VARIABLES = 64
MOST_SCHEMA_CHARACTERS = 1 << 16
MOST_SCHEMA_DEPTH = 64
_SHOWN_CHARACTERS = 40
Prompt: TypeAlias = str | tuple[int, ...]
"""Text, or token ids."""


def unicode_text(text: str) -> str:
    """Return the text; raise ValueError if it has lone surrogates, which JSON allows and UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError as failure:
        raise ValueError(f"not valid Unicode: {failure.reason} at character {failure.start}") from failure
    return text


def _prompts(value: Any) -> tuple[Prompt, ...]:
    if isinstance(value, str):
        return (unicode_text(value),)
    if not isinstance(value, list) or not value:
        raise ValueError("give text, a list of texts, a list of token ids, or a list of such lists")
    if all(isinstance(item, str) for item in value):
        return tuple(map(unicode_text, value))
    if are_token_ids(value):
        return (tuple(value),)
    if all(map(are_token_ids, value)):
        return tuple(map(tuple, value))
    raise ValueError("a list must be of texts alone, of token ids alone, or of lists of token ids alone")


def _stops(value: Any) -> Sequence[str]:
    stops = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value
    if stops is None:
        return ()
    if not isinstance(stops, tuple) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("give text, or a list of texts")
    stops = tuple(stop for stop in stops if stop)  # some clients send an empty string for "no stop"
    if len(stops) > MOST_STOPS:
        raise ValueError(f"at most {MOST_STOPS} stop strings are looked for, these are {len(stops)}")
    return tuple(map(unicode_text, stops))


def text_of_parts(value: Any, kinds: Sequence[str] = ("text",)) -> str:
    """Return the text of a message's content: text, or a list of parts whose types are ``kinds``."""
    if value is None:
        return ""
    if isinstance(value, str):
        return unicode_text(value)
    if not isinstance(value, list):
        raise ValueError(f"give text, or a list of parts of type {' or '.join(kinds)}")  # noqa: TRY004 - pydantic handles no TypeError
    texts = []
    for number, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        text = part.get("text") if isinstance(part, dict) else None
        if kind not in kinds or not isinstance(text, str):
            raise ValueError(
                f"part {number} is {str(kind)[:_SHOWN_CHARACTERS]}; "
                f"this server reads parts of type {' or '.join(kinds)} only"
            )
        texts.append(unicode_text(text))
    return "".join(texts)


Prompts = Annotated[
    tuple[Prompt, ...],
    BeforeValidator(_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
]
Stops = Annotated[tuple[str, ...], BeforeValidator(_stops, json_schema_input_type=str | list[str] | None)]


class TextPart(StrictModel):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


Content = Annotated[str, BeforeValidator(text_of_parts, json_schema_input_type=str | list[TextPart] | None)]


class StreamOptions(StrictModel):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    """Send the token counts of the request in the last chunk."""
    include_obfuscation: bool | None = None
    """Accepted, but has no effect."""


def _depth(value: Any) -> int:
    """Return the number of nested levels of a JSON value, at most `MOST_SCHEMA_DEPTH` + 1; a scalar is one level."""
    level, depth = [value], 0
    while level and depth <= MOST_SCHEMA_DEPTH:
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        depth += 1
    return depth


def shallow_object(value: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON object; raise ValueError if it is nested too deep, or has text or numbers that JSON cannot have."""
    if _depth(value) > MOST_SCHEMA_DEPTH:
        raise ValueError(f"it is nested more than {MOST_SCHEMA_DEPTH} levels deep")
    unicode_text(json.dumps(value, ensure_ascii=False, allow_nan=False))
    return value


TemplateVariables = Annotated[
    dict[str, Any], Field(max_length=MOST_VARIABLES), AfterValidator(shallow_object)
]


def small_schema(value: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON schema; raise ValueError if it is nested too deep, too long, or not valid Unicode."""
    size = len(json.dumps(shallow_object(value)))
    if size > MOST_SCHEMA_CHARACTERS:
        raise ValueError(f"it has {size} characters; at most {MOST_SCHEMA_CHARACTERS} are read")
    return value


class JsonSchema(StrictModel):
    """A JSON schema that the answer follows."""

    model_config = ConfigDict(populate_by_name=True)

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any], AfterValidator(small_schema)] = Field(alias="schema")
    strict: bool | None = None
    """Accepted, but has no effect."""


class ResponseFormat(StrictModel):
    """Format of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is for type json_schema, which needs it")
        return self

    @property
    def grammar(self) -> str | None:
        """JSON schema that the answer must follow; "" for any JSON object, None for plain text."""
        if self.type == "text":
            return None
        return json.dumps(self.json_schema.schema_) if self.json_schema is not None else ""
