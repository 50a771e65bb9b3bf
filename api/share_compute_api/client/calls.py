"""Describes each request once, for the synchronous and the asynchronous client."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import update_wrapper, wraps
from inspect import signature
from types import MethodType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeAlias, TypeVar, overload
from urllib.parse import quote

from pydantic import BaseModel

Model = TypeVar("Model", bound=BaseModel)
Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)
Other = TypeVar("Other")
Given = ParamSpec("Given")


@dataclass(frozen=True, slots=True)
class ApiCall(Generic[Result]):
    """A request to the REST API, and the function that reads its answer."""

    method: str
    path: str
    """Path below ``/api/v1``."""
    options: dict[str, Any]
    """Arguments of ``httpx.Client.request``."""
    read: Callable[[bytes], Result]
    """Returns the result, given the body of the answer."""

    def then(self, change: Callable[[Result], Other]) -> ApiCall[Other]:
        """Return a call whose result is a function of this call's result."""
        return ApiCall(self.method, self.path, self.options, lambda body: change(self.read(body)))

    def __iter__(self) -> Calls[Result]:
        """Yield the call itself, so that ``yield from`` in `Calls` evaluates to the call's result."""
        result: Result = yield self
        return result


@dataclass(frozen=True, slots=True)
class StreamedCall:
    """A GET request whose answer is read in pieces."""

    path: str
    """Path below ``/api/v1``."""
    begin: Callable[[int], AbstractContextManager[Callable[[bytes], object]]]
    """Returns a context with the function that gets the pieces, given the status of the answer."""
    headers: dict[str, str] = field(default_factory=dict)

    def __iter__(self) -> Calls[None]:
        """Yield the call alone."""
        yield self


Calls: TypeAlias = Generator[ApiCall[Any] | StreamedCall, Any, Result]
"""Calls one after the other. Each gets its result, or the exception that it raised, before the next one is yielded."""


class Described(Protocol[Result_co]):
    """A call, or `Calls`, with their result."""

    def __iter__(self) -> Generator[ApiCall[Any] | StreamedCall, Any, Result_co]: ...


def call(kind: type[Model], method: str, path: str, **options: Any) -> ApiCall[Model]:
    """Return a call whose answer is a model of type ``kind``; ``options`` are those of ``httpx.Client.request``."""
    return ApiCall(method, path, options, kind.model_validate_json)


class Sender:
    """Client that sends calls and waits for their results."""

    @abstractmethod
    def _exchange(self, sent: ApiCall[Any] | StreamedCall) -> Any:
        """Send one call, and return its result."""

    def send(self, described: Described[Result]) -> Result:
        """Send one call, or several in sequence, and return their result."""
        calls = described.__iter__()
        try:
            sent = next(calls)
            while True:
                try:
                    result = self._exchange(sent)
                except BaseException as failure:  # noqa: BLE001 - raised where the call was yielded
                    sent = calls.throw(failure)
                else:
                    sent = calls.send(result)
        except StopIteration as over:
            return over.value  # type: ignore[no-any-return]


class AsyncSender:
    """Client that sends calls asynchronously."""

    @abstractmethod
    async def _exchange(self, sent: ApiCall[Any] | StreamedCall) -> Any:
        """Send one call, and return its result."""

    async def send(self, described: Described[Result]) -> Result:
        """Send a call, or several ones one after the other, and return their result."""
        calls = described.__iter__()
        try:
            sent = next(calls)
            while True:
                try:
                    result = await self._exchange(sent)
                except BaseException as failure:  # noqa: BLE001 - raised where the call was yielded
                    sent = calls.throw(failure)
                else:
                    sent = calls.send(result)
        except StopIteration as over:
            return over.value  # type: ignore[no-any-return]


class Describer:
    """Client that sends nothing: its methods return the calls, for use in `Calls`."""

    def send(self, described: Described[Result]) -> Described[Result]:
        """Return the call."""
        return described


class RequestMethod(Generic[Given, Result]):
    """Method that sends the calls described by a function; in an `AsyncSender`, the method is a coroutine.

    Args:
        describe: the function. It gets the client and the arguments of the method.
    """

    def __init__(self, describe: Callable[Concatenate[Any, Given], Described[Result]]) -> None:
        @wraps(describe)
        def send(client: Any, *given: Given.args, **options: Given.kwargs) -> Any:
            return client.send(describe(client, *given, **options))

        # `help` shows the result of the method, not the calls that the function returns.
        shown = signature(describe)
        kind, _, result = str(shown.return_annotation).removesuffix("]").partition("[")
        assert kind in {"ApiCall", "Calls"}
        send.__signature__ = shown.replace(return_annotation=result)  # type: ignore[attr-defined]
        self._send = send
        update_wrapper(self, describe)  # type: ignore[arg-type]

    @overload
    def __get__(self, client: None, owner: type) -> Callable[Concatenate[Any, Given], Any]: ...
    @overload
    def __get__(self, client: Sender, owner: type) -> Callable[Given, Result]: ...
    @overload
    def __get__(self, client: AsyncSender, owner: type) -> Callable[Given, Awaitable[Result]]: ...
    @overload
    def __get__(self, client: Describer, owner: type) -> Callable[Given, Described[Result]]: ...
    def __get__(self, client: Any, owner: type) -> Any:
        return self._send if client is None else MethodType(self._send, client)


def request(describe: Callable[Concatenate[Any, Given], Described[Result]]) -> RequestMethod[Given, Result]:
    """Make a method that sends calls from a function that describes them."""
    return RequestMethod(describe)


def path_part(identifier: str) -> str:
    """Return an id or a name as one part of a URL's path, escaping all special characters.

    Dots alone are encoded too: HTTP libraries resolve the parts ``.`` and ``..`` (RFC 3986, section 5.2.4).
    """
    quoted = quote(identifier, safe="")
    return quoted.replace(".", "%2E") if quoted in {".", ".."} else quoted
