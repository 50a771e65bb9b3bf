"""The control plane's side of the connection to the gateway: calls, and handles of actors."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from share_compute.errors import ContributorLost, ShareComputeError, TooLarge, Unavailable, error_of
from share_compute.quantities import bytes_text
from share_compute_api.cluster.calls import MOST_BYTES, Call, CallFailure, CallResult, HeadAddress

_CONNECT_S = 60.0
"""Time limit for the gateway to import Ray and to connect to the head, in seconds."""
ANSWER_S = 60.0
"""Time limit for an answer, in seconds; long, because an actor may still be starting on a busy machine."""
_ENDED_S = 60.0
"""Time limit of one call that waits for the end of an actor's main task, in seconds."""
_log = logging.getLogger(__name__)


class CallFailed(Exception):
    """Raised when a call through the gateway failed; `translated` converts it to an error with a message for users."""

    def __init__(self, failure: CallFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def send_address(connection: socket.socket, head: HeadAddress) -> None:
    """Send the head's address to a waiting gateway, which then connects to Ray.

    Do nothing if the gateway has ended; `Gateway.connect` reports that.

    Args:
        connection: the control plane's end of the socket pair.
        head: address of the running head.
    """
    with suppress(OSError):
        connection.sendall(head.model_dump_json().encode() + b"\n")


_GONE = CallFailure(kind="died", message="the process that calls Ray ended")


class Gateway:
    """A connection to one gateway process.

    Args:
        connection: the control plane's end of a socket pair.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._writer: asyncio.StreamWriter | None = None
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}

    async def connect(self, timeout_s: float = _CONNECT_S) -> asyncio.StreamReader:
        """Wait until the gateway, which has the head's address, is connected to Ray; return the reader for `listen`.

        Raises:
            Unavailable: the process ended, or was not ready in time.
        """
        reader, self._writer = await asyncio.open_connection(sock=self._connection, limit=MOST_BYTES)
        try:
            async with asyncio.timeout(timeout_s):
                first = await reader.readline()
        except (
            TimeoutError,
            ConnectionError,
        ):  # a gateway that ends without reading its address resets the connection
            first = b""
        if not first:
            raise Unavailable(
                "the process that calls Ray could not connect to the head", hint="look into its log"
            )
        return reader

    async def listen(self, reader: asyncio.StreamReader) -> None:
        """Process answers until the gateway ends or sends an invalid answer; then fail all waiting calls."""
        try:
            while line := await reader.readline():
                answer = CallResult.model_validate_json(line)
                waiting = self._waiting.pop(answer.number, None)
                if waiting is None or waiting.done():
                    continue
                if answer.failure is None:
                    waiting.set_result(answer.value)
                else:
                    waiting.set_exception(CallFailed(answer.failure))
        except (ConnectionError, ValueError, ValidationError) as failure:
            _log.error("the process that calls Ray sent an invalid line: %s", failure)
        finally:
            self.close()

    async def call(self, operation: str, *arguments: Any, timeout_s: float = ANSWER_S) -> Any:
        """Call an operation of the gateway; return the result as a JSON value.

        Raises:
            CallFailed: the operation failed or took longer than ``timeout_s``, the gateway ended, or the message is too
                long.
        """
        if self._writer is None or self._writer.is_closing():
            raise CallFailed(_GONE)
        number = next(self._numbers)
        self._write(Call(number=number, operation=operation, arguments=list(arguments)))
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                return await waiting
        except asyncio.CancelledError:
            self._write(Call(number=number, operation="cancel"))
            raise
        except TimeoutError as late:
            self._write(Call(number=number, operation="cancel"))
            message = f"no answer to {_described(operation, arguments)} within {timeout_s:g} s"
            raise CallFailed(CallFailure(kind="no_answer", message=message)) from late
        finally:
            self._waiting.pop(number, None)

    def post(self, operation: str, *arguments: Any) -> None:
        """Call an operation without waiting for its result."""
        self._write(Call(number=next(self._numbers), operation=operation, arguments=list(arguments)))

    def _write(self, call: Call) -> None:
        line = call.model_dump_json().encode() + b"\n"
        if len(line) > MOST_BYTES:
            too_large = TooLarge(
                f"a call of {bytes_text(len(line))} is larger than the {bytes_text(MOST_BYTES)} that one may have",
                hint="send less at once",
                details={"size_bytes": len(line), "most_bytes": MOST_BYTES},
            )
            raise CallFailed(
                CallFailure(
                    kind="raised", message=too_large.message, code=too_large.code, facts=too_large.facts()
                )
            )
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(line)

    def close(self) -> None:
        """Close the connection, which ends the gateway; waiting calls fail."""
        if self._writer is not None:
            self._writer.close()
        else:
            self._connection.close()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(CallFailed(_GONE))
        self._waiting.clear()


@dataclass(frozen=True, slots=True)
class RemoteActor:
    """Handle of an actor on the head or on a contributor. The actor ends after `kill`, or when its gateway ends."""

    gateway: Gateway
    number: int

    async def call(self, method: str, *arguments: Any, timeout_s: float = ANSWER_S) -> Any:
        """Call a method of the actor.

        Raises:
            CallFailed: the method failed, or the actor died or did not answer within ``timeout_s``.
        """
        return await self.gateway.call("call", self.number, method, list(arguments), timeout_s=timeout_s)

    async def ended(self) -> None:
        """Wait until the actor's main task has ended.

        Raises:
            CallFailed: the task failed, or the actor died.
        """
        while not await self.gateway.call("ended", self.number, _ENDED_S, timeout_s=_ENDED_S + ANSWER_S):
            pass

    async def is_alive(self) -> bool:
        """Return whether the actor answers."""
        try:
            return bool(await self.gateway.call("is_alive", self.number))
        except CallFailed:
            return False

    async def measure_links(self, peers: Sequence[tuple[str, RemoteActor]], *, timeout_s: float) -> Any:
        """Make a contributor measure its links to peers, and return a JSON list of links.

        Peers whose actor belongs to another gateway are left out.
        """
        numbers = [(peer, actor.number) for peer, actor in peers if actor.gateway is self.gateway]
        return await self.gateway.call("measure_links", self.number, numbers, timeout_s=timeout_s)

    def kill(self) -> None:
        """Ask the gateway to end the actor and all processes that the actor started, without waiting for their end."""
        self.gateway.post("kill", self.number)


@contextmanager
def translated(who: str, *, mistake_hint: str, loss_hint: str, job: str | None = None) -> Iterator[None]:
    """Convert `CallFailed` raised inside the block to an error with a hint.

    Args:
        who: name of the actor for messages.
        mistake_hint: hint for an internal error of the actor.
        loss_hint: hint if the actor died or cannot be reached, or if Ray does not answer.
        job: id of the job that the actor works for; None if there is none.

    Raises:
        ShareComputeError: the error of this type that the actor raised.
        Unavailable: the actor failed with another error, or Ray does not answer.
        ContributorLost: the process of the actor or of the gateway died, or the actor cannot be reached.
    """
    try:
        yield
    except CallFailed as failed:
        failure = failed.failure
        if failure.kind == "raised":
            raise raised(failure) from failed
        if failure.kind == "mistake":
            raise Unavailable(
                f"{who} failed with an internal error: {failure.message}", hint=mistake_hint, job=job
            ) from failed
        if failure.kind == "no_answer":
            raise Unavailable(f"Ray does not answer: {failure.message}", hint=loss_hint, job=job) from failed
        raise ContributorLost(f"{who} died: {failure.message}", hint=loss_hint, job=job) from failed


def _described(operation: str, arguments: Sequence[Any]) -> str:
    """Return the name of an operation for messages; for a call to an actor, the name of the actor's method."""
    return str(arguments[1]) if operation == "call" else operation


def raised(failure: CallFailure) -> ShareComputeError:
    """Return the `ShareComputeError` that a failure describes."""
    return error_of(failure.code or "", failure.message, failure.facts)
