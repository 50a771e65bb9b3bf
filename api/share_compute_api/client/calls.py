"""Describes each request once, for the client that waits for answers and for the asynchronous one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import update_wrapper, wraps
from inspect import signature
from types import MethodType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload
from urllib.parse import quote

from pydantic import BaseModel

Model = TypeVar("Model", bound=BaseModel)
Result = TypeVar("Result")
Other = TypeVar("Other")
Given = ParamSpec("Given")


@dataclass(frozen=True, slots=True)
class ApiCall(Generic[Result]):
    """A request to the REST API, and how its answer is read."""

    method: str
    path: str
    """Path below ``/api/v1``."""
    options: dict[str, Any]
    """Arguments of ``httpx.Client.request``."""
    read: Callable[[bytes], Result]
    """Returns the result, given the body of the answer."""

    def then(self, change: Callable[[Result], Other]) -> ApiCall[Other]:
        """Return a call whose result is that of this call, changed by a function."""
        return ApiCall(self.method, self.path, self.options, lambda body: change(self.read(body)))


def call(kind: type[Model], method: str, path: str, **options: Any) -> ApiCall[Model]:
    """Return a call whose answer is a model of type ``kind``; ``options`` are those of ``httpx.Client.request``."""
    return ApiCall(method, path, options, kind.model_validate_json)


class Sender:
    """Client that sends a call and waits for its result."""

    @abstractmethod
    def send(self, described: ApiCall[Result]) -> Result:
        """Send a request, and return its result."""


class AsyncSender:
    """Client that sends a call asynchronously."""

    @abstractmethod
    async def send(self, described: ApiCall[Result]) -> Result:
        """Send a request, and return its result."""


class RequestMethod(Generic[Given, Result]):
    """Method that sends the call that a function describes; in an `AsyncSender` it is a coroutine.

    Args:
        describe: the function. It gets the client and the arguments of the method.
    """

    def __init__(self, describe: Callable[Concatenate[Any, Given], ApiCall[Result]]) -> None:
        @wraps(describe)
        def send(client: Any, *given: Given.args, **options: Given.kwargs) -> Any:
            return client.send(describe(client, *given, **options))

        # `help` shows the result of the method, not the call that the function returns.
        shown = signature(describe)
        result = str(shown.return_annotation).removeprefix("ApiCall[").removesuffix("]")
        send.__signature__ = shown.replace(return_annotation=result)  # type: ignore[attr-defined]
        self._send = send
        update_wrapper(self, describe)  # type: ignore[arg-type]

    @overload
    def __get__(self, client: None, owner: type) -> Callable[Concatenate[Any, Given], Any]: ...
    @overload
    def __get__(self, client: Sender, owner: type) -> Callable[Given, Result]: ...
    @overload
    def __get__(self, client: AsyncSender, owner: type) -> Callable[Given, Awaitable[Result]]: ...
    def __get__(self, client: Any, owner: type) -> Any:
        return self._send if client is None else MethodType(self._send, client)


def request(describe: Callable[Concatenate[Any, Given], ApiCall[Result]]) -> RequestMethod[Given, Result]:
    """Make a method that sends a call from a function that describes it."""
    return RequestMethod(describe)


def path_part(identifier: str) -> str:
    """Return an id or a name as one part of a URL's path, whatever its characters.

    Dots alone are encoded too: HTTP libraries resolve the parts ``.`` and ``..`` (RFC 3986, section 5.2.4).
    """
    quoted = quote(identifier, safe="")
    return quoted.replace(".", "%2E") if quoted in {".", ".."} else quoted
