"""Encodes messages between actors as bytes of a declared schema, so that receivers need not unpickle them.

A `Schema` encodes messages of one type as JSON. The receiver limits the size, and validates the JSON with pydantic in
strict mode. `WithContent` encodes raw bytes after a JSON header. An answer encodes either the return value of an
actor's method (`pack_answer`) or an error (`pack_failure`).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, wraps
from inspect import signature
from types import GenericAlias
from typing import Annotated, Any, Generic, NamedTuple, ParamSpec, Protocol, TypeAlias, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from share_compute import errors
from share_compute.errors import ShareComputeError, VerificationFailed

Natural: TypeAlias = Annotated[int, Field(ge=0, lt=2**53)]
"""Count or size in bytes, below 2**53 so that JSON parsers that use 64-bit floats read it exactly."""
StepNumber: TypeAlias = Annotated[int, Field(ge=-1, lt=2**53)]
"""Number of a step; -1 stands for none."""
Seconds: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]
MOST_BYTES = 16 * 2**20
"""Default size limit of a message, in bytes."""
MOST_CONTENT_BYTES = 2**30
"""Size limit of a `WithContent` message, including its header, in bytes."""
_CONFIG = ConfigDict(
    extra="forbid",
    strict=True,
    ser_json_bytes="base64",
    val_json_bytes="base64",
    ser_json_inf_nan="constants",  # the coordinator must see a loss that is not finite
)
_LENGTH = struct.Struct(">I")
_GOOD, _BAD = b"+", b"-"
_SHOWN = 3
"""Largest number of validation errors that an error message lists."""
_MOST_NAME = 80
"""Maximum length of a field's path, and of its validation error, in an error message, in characters."""
_MOST_TEXT = 20_000
"""Maximum length of an error's message, in characters."""

T = TypeVar("T")
Parameters = ParamSpec("Parameters")


class Undeclared(VerificationFailed):
    """The received data does not match the schema; the sender is at fault."""

    code = "undeclared-message"


def undeclared(sender: str, fault: str) -> Undeclared:
    """Return the error for undeclared data from ``sender``.

    Args:
        sender: name of a machine, or of an actor on the server.
        fault: description of the defect.
    """
    return Undeclared(
        f"{sender} sent a message that does not match its schema: {fault}",
        machine=sender,
        hint="check that this machine runs the same version of share-compute; remove it if it does",
    )


class Packs(Protocol[T]):
    """Encodes messages of one kind as bytes, and decodes them."""

    def pack(self, message: T) -> bytes:
        """Return a message as bytes."""

    def unpack(self, data: Any, sender: str) -> T:
        """Return the message that these bytes encode.

        Args:
            data: the message as it was received.
            sender: name of the sender, for the error.

        Raises:
            Undeclared: ``data`` is not bytes, is too long, or does not encode a message of this kind.
        """


class Schema(Generic[T]):
    """Encodes messages of one type as JSON.

    Args:
        kind: the message type; any type that pydantic supports.
        most_bytes: size limit of a received message, in bytes.
    """

    def __init__(self, kind: Any, most_bytes: int = MOST_BYTES) -> None:
        self._kind = kind
        self._most_bytes = most_bytes

    def __reduce__(self) -> tuple[Any, ...]:
        # Schemas are pickled together with actor classes, without the cached adapter.
        return Schema, (self._kind, self._most_bytes)

    @cached_property
    def _adapter(self) -> TypeAdapter[Any]:
        # pydantic takes no config for a single dataclass, but applies a tuple's config to the dataclasses in the tuple.
        inside: Any = GenericAlias(tuple, (self._kind,))
        return TypeAdapter(inside, config=_CONFIG)

    def pack(self, message: T) -> bytes:
        """Return a message as bytes."""
        return self._adapter.dump_json((message,))

    def unpack(self, data: Any, sender: str) -> T:
        """Return the message that these bytes encode; see `Packs.unpack`."""
        found = _sized(data, self._most_bytes, sender)
        try:
            message: T = self._adapter.validate_json(bytes(found))[0]
        except ValidationError as failure:
            raise undeclared(sender, _faults(failure)) from None
        return message


class Messages(Generic[T]):
    """Encodes messages of several types, each message prefixed with a name for its type.

    Args:
        schemas: schema of each type, by name.
    """

    def __init__(self, **schemas: Schema[Any]) -> None:
        self._schemas = {name.encode(): schema for name, schema in schemas.items()}

    def pack(self, name: str, message: T) -> bytes:
        """Encode a message with the schema of this name, and return the bytes."""
        return name.encode() + b" " + self._schemas[name.encode()].pack(message)

    def unpack(self, data: Any, sender: str) -> T:
        """Return the message that these bytes encode; see `Packs.unpack`."""
        name, _, body = bytes(_sized(data, MOST_BYTES, sender)).partition(b" ")
        schema = self._schemas.get(name)
        if schema is None:
            raise undeclared(sender, f"no message is named {name[:40]!r}")
        message: T = schema.unpack(body, sender)
        return message


class Content(NamedTuple):
    """A header, and the raw bytes that it describes."""

    header: Any
    content: bytes | memoryview


class WithContent:
    """Encodes messages that carry raw bytes.

    Args:
        header: schema of the header that precedes the bytes.
    """

    def __init__(self, header: Schema[Any]) -> None:
        self._header = header

    def pack(self, message: Content) -> bytes:
        """Return a message as bytes."""
        header = self._header.pack(message.header)
        return b"".join((_LENGTH.pack(len(header)), header, message.content))

    def unpack(self, data: Any, sender: str) -> Content:
        """Return the message that these bytes encode; see `Packs.unpack`. Its content is a view of ``data``."""
        found = memoryview(_sized(data, MOST_CONTENT_BYTES, sender))
        length = _LENGTH.unpack_from(found)[0] if len(found) >= _LENGTH.size else len(found)
        body = _LENGTH.size + length
        if body > len(found):
            raise undeclared(sender, f"{len(found)} bytes are too few for its header")
        return Content(self._header.unpack(bytes(found[_LENGTH.size : body]), sender), found[body:])


def _sized(data: Any, most_bytes: int, sender: str) -> bytes | memoryview:
    if not isinstance(data, (bytes, memoryview)):
        raise undeclared(sender, f"a {type(data).__name__} where bytes are due")
    if len(data) > most_bytes:
        raise undeclared(sender, f"{len(data)} bytes, of {most_bytes} at most")
    return data


def _faults(failure: ValidationError) -> str:
    faults = failure.errors(include_url=False, include_input=False, include_context=False)[:_SHOWN]
    named = (f"{'.'.join(map(str, fault['loc'][1:])) or 'all'}"[:_MOST_NAME] for fault in faults)
    return "; ".join(
        f"{name}: {fault['msg'][:_MOST_NAME]}" for name, fault in zip(named, faults, strict=True)
    )


# -- errors --------------------------------------------------------------------------------------------------------

_KINDS: dict[str, type[ShareComputeError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, ShareComputeError)
}
_FACTS: dict[str, dict[str, type]] = {
    "OutOfMemory": {"taken_bytes": int},
    "Busy": {"retry_after_s": int},
    "NoCopy": {"lacks_space": bool, "epoch": int, "owner": str},
}
"""Details that a received error must have, with their types, by the name of the error's class."""


@dataclass(frozen=True, slots=True)
class Raised:
    """An error in the form in which it is sent to another process."""

    kind: str
    """Name of the error's class in `share_compute.errors`."""
    message: Annotated[str, Field(max_length=_MOST_TEXT)]
    hint: str | None = None
    job: str | None = None
    step: int | None = None
    machine: str | None = None
    details: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, error: ShareComputeError) -> Raised:
        """Return the form in which an error is sent.

        Its kind is the name of its class, or of the nearest base class that `share_compute.errors` defines.
        """
        kind = next(base.__name__ for base in type(error).__mro__ if _KINDS.get(base.__name__) is base)
        details = json.loads(json.dumps(error.details, default=str))
        message = error.message[:_MOST_TEXT]
        return cls(kind, message, error.hint, error.job, error.step, error.machine, details)

    def error(self, sender: str) -> ShareComputeError:
        """Return the error as an exception.

        Raises:
            Undeclared: there is no error of this kind, or a required detail is missing or has the wrong type.
        """
        kind = _KINDS.get(self.kind)
        if kind is None:
            raise undeclared(sender, f"no error is named {self.kind[:40]!r}")
        for name, wanted in _FACTS.get(self.kind, {}).items():
            if type(self.details.get(name)) is not wanted:
                raise undeclared(sender, f"{self.kind} without its {name}")
        return kind(
            self.message,
            hint=self.hint,
            job=self.job,
            step=self.step,
            machine=self.machine,
            details=dict(self.details),
        )


RAISED: Schema[Raised] = Schema(Raised)

# -- answers -------------------------------------------------------------------------------------------------------

NOTHING: Schema[None] = Schema(None)
FLAG: Schema[bool] = Schema(bool)
COUNT: Schema[int] = Schema(Natural)
TEXT: Schema[str] = Schema(str)
NAMES: Schema[tuple[str, ...]] = Schema(tuple[str, ...])


def pack_answer(schema: Packs[T], message: T) -> bytes:
    """Return the answer for a method's return value, as bytes."""
    return _GOOD + schema.pack(message)


def pack_failure(failure: ShareComputeError) -> bytes:
    """Return the answer for an error that a method raised, as bytes."""
    return _BAD + RAISED.pack(Raised.of(failure))


def answers_by(
    schema: Packs[T], translate: Callable[[Exception], ShareComputeError]
) -> Callable[[Callable[Parameters, T]], Callable[Parameters, bytes]]:
    """Return a decorator that encodes the result or the error of an actor's method as bytes.

    If the method raises an `Exception`, the decorated method returns the encoded error.

    Args:
        schema: schema of the method's return value.
        translate: converts the exception into the error to encode.
    """

    def decorate(method: Callable[Parameters, T]) -> Callable[Parameters, bytes]:
        @wraps(method)
        def answer(*arguments: Parameters.args, **options: Parameters.kwargs) -> bytes:
            try:
                return pack_answer(schema, method(*arguments, **options))
            except Exception as failure:  # noqa: BLE001 - the answer contains it, and the caller decides
                return pack_failure(translate(failure))

        # With `__wrapped__`, Ray would look for the concurrency group on the wrapped method, but it is set on this
        # wrapper.
        answer.__signature__ = signature(method)  # type: ignore[attr-defined]
        del answer.__wrapped__
        return answer

    return decorate


def unpack_answer(schema: Packs[T], data: Any, sender: str) -> T:
    """Decode an answer, and return the method's return value.

    Args:
        schema: schema of the return value.
        data: the answer as it was received.
        sender: name of the machine or the actor that answered.

    Raises:
        Undeclared: the data is not an answer of this kind.
        ShareComputeError: the method raised this error.
    """
    if isinstance(data, bytes) and data[:1] == _GOOD:
        return schema.unpack(memoryview(data)[1:], sender)
    if isinstance(data, bytes) and data[:1] == _BAD:
        raise RAISED.unpack(data[1:], sender).error(sender)
    raise undeclared(sender, f"a {type(data).__name__} where an answer is due")
