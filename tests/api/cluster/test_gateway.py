"""Calls through the gateway: each ends in time, and none blocks the connection for the others."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable

import pytest

from share_compute.errors import TooLarge, Unavailable
from share_compute_api.cluster.calls import MOST_BYTES, Call, CallResult, HeadAddress
from share_compute_api.cluster.gateway import CallFailed, Gateway, RemoteActor, send_address, translated

HEAD = HeadAddress(ray_address="127.0.0.1:6379", node_address="127.0.0.1")


class Peer:
    """The other end of a gateway's connection, whose answers a test sets."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    async def connect(self) -> None:
        self._reader, self._writer = await asyncio.open_connection(sock=self._connection, limit=MOST_BYTES)
        self.answer(0, "ready")

    async def head(self) -> HeadAddress:
        return HeadAddress.model_validate_json(await self._reader.readline())

    async def received(self) -> Call:
        return Call.model_validate_json(await self._reader.readline())

    def answer(self, number: int, value: object) -> None:
        self._writer.write(CallResult(number=number, value=value).model_dump_json().encode() + b"\n")

    def close(self) -> None:
        self._writer.close()


def talk(test: Callable[[Gateway, Peer], Awaitable[None]]) -> None:
    """Run a test with both ends of a connection."""

    async def run() -> None:
        ours, theirs = socket.socketpair()
        gateway, peer = Gateway(ours), Peer(theirs)
        send_address(ours, HEAD)
        await peer.connect()
        reader = await gateway.connect()
        assert await peer.head() == HEAD
        listening = asyncio.create_task(gateway.listen(reader))
        try:
            async with asyncio.timeout(60):
                await test(gateway, peer)
        finally:
            peer.close()
            await listening

    asyncio.run(run())


def test_a_call_that_nobody_answers_ends_and_is_given_up() -> None:
    async def test(gateway: Gateway, peer: Peer) -> None:
        with (
            pytest.raises(Unavailable, match=r"Ray does not answer: no answer to status within 0\.05 s"),
            translated("a server", mistake_hint="", loss_hint=""),
        ):
            await RemoteActor(gateway, 7).call("status", timeout_s=0.05)
        call, given_up = await peer.received(), await peer.received()
        assert (call.operation, call.arguments) == ("call", [7, "status", []])
        assert (given_up.operation, given_up.number) == ("cancel", call.number)
        peer.answer(call.number, "too late")
        nodes = asyncio.create_task(gateway.call("nodes"))
        peer.answer((await peer.received()).number, ["a node"])
        assert await nodes == ["a node"]

    talk(test)


def test_a_call_that_is_too_large_is_refused_and_others_are_not() -> None:
    async def test(gateway: Gateway, peer: Peer) -> None:
        with pytest.raises(TooLarge) as refused, translated("a server", mistake_hint="", loss_hint=""):
            await RemoteActor(gateway, 7).call("submit", "x" * MOST_BYTES)
        assert refused.value.details["most_bytes"] == MOST_BYTES
        nodes = asyncio.create_task(gateway.call("nodes"))
        call = await peer.received()
        assert call.operation == "nodes"
        peer.answer(call.number, [])
        assert await nodes == []

    talk(test)


def test_the_longest_line_that_is_sent_arrives() -> None:
    async def test(gateway: Gateway, peer: Peer) -> None:
        empty = len(Call(number=1, operation="nodes", arguments=[""]).model_dump_json()) + 1
        nodes = asyncio.create_task(gateway.call("nodes", "x" * (MOST_BYTES - empty)))
        call = await peer.received()
        assert len(call.arguments[0]) == MOST_BYTES - empty
        peer.answer(call.number, [])
        assert await nodes == []

    talk(test)


def test_the_end_of_an_actor_is_waited_for_by_questions_that_end() -> None:
    async def test(gateway: Gateway, peer: Peer) -> None:
        ended = asyncio.create_task(RemoteActor(gateway, 7).ended())
        for answer in (False, False, True):
            assert not ended.done()
            call = await peer.received()
            assert call.operation == "ended"
            peer.answer(call.number, answer)
        await ended

    talk(test)


def test_calls_fail_when_the_process_ends() -> None:
    async def test(gateway: Gateway, peer: Peer) -> None:
        call = asyncio.create_task(gateway.call("nodes"))
        await peer.received()
        peer.close()
        with pytest.raises(CallFailed, match="ended"):
            await call

    talk(test)


def test_a_gateway_that_ends_before_it_reads_its_address_is_reported() -> None:
    async def run() -> None:
        ours, theirs = socket.socketpair()
        gateway = Gateway(ours)
        send_address(ours, HEAD)  # it is never read, so the connection is reset below
        theirs.close()
        with pytest.raises(Unavailable, match="could not connect to the head"):
            await gateway.connect()
        gateway.close()

    asyncio.run(run())


def test_a_gateway_that_ends_before_it_gets_its_address_is_reported() -> None:
    async def run() -> None:
        ours, theirs = socket.socketpair()
        theirs.close()
        send_address(ours, HEAD)
        gateway = Gateway(ours)
        with pytest.raises(Unavailable, match="could not connect to the head"):
            await gateway.connect()
        gateway.close()

    asyncio.run(run())


def test_the_gateway_starts_without_torch() -> None:
    program = (
        "import sys, share_compute_api.cluster.gateway_process;"
        "print([name for name in ('torch', 'transformers', 'fastapi', 'sqlalchemy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
