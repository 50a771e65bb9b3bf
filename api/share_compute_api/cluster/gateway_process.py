"""The gateway: the process that makes all Ray calls of the control plane. Its only secret is the cluster's token.

Run as ``python -m share_compute_api.cluster.gateway_process --temp-dir FOLDER --socket FD``. The gateway waits for a
`calls.HeadAddress` on the socket FD, so that it can be started together with the head. Then it answers messages
`calls.Call` on the socket until the socket is closed. It never unpickles results from contributors' processes, and
passes them to the control plane only as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import ray
from pydantic import ValidationError
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from share_compute.errors import ShareComputeError, Unavailable
from share_compute_actors.group import naming
from share_compute_actors.group.failing import make_fail
from share_compute_actors.inference.server import DeploymentServer
from share_compute_actors.machine.contributor import start_contributor
from share_compute_actors.unpickling import refuse_pickles
from share_compute_actors.wire import NOTHING, TEXT, Schema, unpack_answer
from share_compute_api.cluster.calls import MOST_BYTES, Call, CallFailure, CallResult, HeadAddress, NodeFacts

NAMESPACE = "share-compute"
_RETRY_S = 0.2
"""Pause before an unreachable actor is called again, in seconds."""
_METHODS: Final = {
    "coordinator": frozenset({"events", "cancel", "suspend", "offer", "drain"}),
    "deployment": frozenset(
        {"submit", "cancel", "pull", "status", "offer", "choose_computation", "set_standby", "stop"}
    ),
    "contributor": frozenset({"dial", "probe"}),
}
_ANSWERS: Final[dict[str, Schema[Any]]] = {"submit": NOTHING, "probe": TEXT}
"""Method -> schema of its result. These methods return bytes, which encode a result or a `ShareComputeError`."""
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Actor:
    """An actor that the control plane started. The actor lives as long as this handle."""

    kind: str
    handle: Any
    node_id: str
    """Id of the Ray node that the actor runs on."""
    run: asyncio.Future[Any] | None = None
    """Future of the actor's main task; None for an actor that only answers calls."""


class GatewayOperations:
    """Operations that the control plane may call. Every public method is an operation, and returns a JSON value."""

    def __init__(self) -> None:
        self._actors: dict[int, _Actor] = {}
        self._next = 0
        # Pings have their own thread, because other operations may occupy all threads of the event loop's executor.
        self._pings = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pings")

    async def ping(self) -> bool:
        """Return True, which shows that this process answers."""
        return True

    async def ping_head(self, node_id: str) -> bool:
        """Return whether Ray's global control service (GCS) answers and lists the head's node as alive."""
        rows = await asyncio.get_running_loop().run_in_executor(self._pings, ray.nodes)
        return any(row["NodeID"] == node_id and row["Alive"] for row in rows)

    async def start_coordinator(self, node_id: str, assignment: str) -> int:
        """Start a coordinator on a node and start its main task; return the actor's number."""
        from share_compute_actors.training.coordinator.coordinator import Coordinator

        return await self._start("coordinator", Coordinator, node_id, assignment)

    async def start_sparse_coordinator(self, node_id: str, assignment: str) -> int:
        """Start the coordinator of a sparse model on a node and start its main task; return the actor's number."""
        from share_compute_actors.sparse.coordinator import SparseCoordinator

        return await self._start("coordinator", SparseCoordinator, node_id, assignment)

    async def start_deployment(self, node_id: str, assignment: str) -> int:
        """Start the server of a replica on a node and start its main task; return the actor's number."""
        return await self._start("deployment", DeploymentServer, node_id, assignment)

    async def start_contributor(self, node_id: str, contributor_id: str) -> int:
        """Start the actor that measures a contributor, on the node ``node_id``; return the actor's number."""
        handle = await asyncio.to_thread(start_contributor, contributor_id, node_id)
        return self._keep(_Actor("contributor", handle, node_id))

    async def call(self, number: int, method: str, arguments: list[Any]) -> Any:
        """Call a method of an actor and return the result. Retry while Ray reports the actor as unavailable, not dead.

        Calls to actors that measure contributors are not retried.

        Raises:
            ActorUnavailableError: the actor of a contributor is unreachable.
        """
        actor = self._actor(number)
        if method not in _METHODS[actor.kind]:
            raise ValueError(f"a {actor.kind} has no method {method}")
        while True:
            try:
                answer = await getattr(actor.handle, method).remote(*arguments)
                schema = _ANSWERS.get(method)
                return answer if schema is None else unpack_answer(schema, answer, f"a {actor.kind}")
            except ActorUnavailableError as failure:
                if actor.kind == "contributor":
                    raise
                _log.info("%s %d: %s", actor.kind, number, first_line(failure))
            await asyncio.sleep(_RETRY_S)

    async def ended(self, number: int, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` seconds for the end of an actor's main task; return whether it has ended.

        If the task failed, raise its error.
        """
        run = self._actor(number).run
        if run is None:
            return True
        await asyncio.wait([run], timeout=timeout_s)
        if run.done():
            run.result()
        return run.done()

    async def is_alive(self, number: int) -> bool:
        """Return whether an actor answers."""
        try:
            await self._actor(number).handle.__ray_ready__.remote()
        except RayError:
            return False
        return True

    async def measure_links(self, number: int, peers: list[tuple[str, int]]) -> Any:
        """Make a contributor measure its links to peers, and return a JSON list of links; skip peers that are gone.

        Args:
            number: number of the contributor's actor.
            peers: (contributor id or `HEAD`, number of its actor) of each peer.
        """
        rows = await asyncio.to_thread(ray.nodes)
        places = {row["NodeID"]: (row["NodeManagerAddress"], row["NodeManagerPort"]) for row in rows}
        found = [(peer, self._actors[other]) for peer, other in peers if other in self._actors]
        measured = [
            (peer, places[actor.node_id], actor.handle) for peer, actor in found if actor.node_id in places
        ]
        return await self._actor(number).handle.measure_links.remote(measured)

    async def kill(self, number: int) -> None:
        """End an actor and all processes that it started; do nothing if the actor is gone."""
        actor = self._actors.pop(number, None)
        if actor is not None:
            await asyncio.to_thread(ray.kill, actor.handle)

    async def nodes(self) -> list[dict[str, Any]]:
        """Return Ray's table of nodes."""
        rows = await asyncio.to_thread(ray.nodes)
        return [
            NodeFacts(
                node_id=row["NodeID"],
                address=row["NodeManagerAddress"],
                port=row["NodeManagerPort"],
                is_alive=row["Alive"],
                labels=dict(row.get("Labels", {})),
                resources=dict(row.get("Resources", {})),
            ).model_dump()
            for row in rows
        ]

    async def members(self) -> dict[str, list[str]]:
        """Return {contributor id: ids of the jobs that have members on it}."""
        found = await asyncio.to_thread(naming.machines_with_members)
        return {contributor: sorted(jobs) for contributor, jobs in found.items()}

    async def end_members(self, job_id: str) -> int:
        """End all members of a job; return their number."""
        return await asyncio.to_thread(naming.end_members, job_id)

    async def make_fail(self, job_id: str, contributor_id: str, kind: str, duration_s: float) -> None:
        """Make a member of a running job fail on purpose (fault injection)."""
        await asyncio.to_thread(make_fail, job_id, contributor_id, kind, duration_s)  # type: ignore[arg-type]

    async def _start(self, kind: str, actor_class: Any, node_id: str, assignment: str) -> int:
        there = NodeAffinitySchedulingStrategy(node_id, soft=False)
        start = actor_class.options(num_cpus=0, scheduling_strategy=there).remote
        handle = await asyncio.to_thread(start, assignment)
        run = asyncio.ensure_future(_awaited(handle.run.remote()))
        run.add_done_callback(_retrieve)
        return self._keep(_Actor(kind, handle, node_id, run))

    def _keep(self, actor: _Actor) -> int:
        self._next += 1
        self._actors[self._next] = actor
        return self._next

    def _actor(self, number: int) -> _Actor:
        try:
            return self._actors[number]
        except KeyError:
            raise Unavailable(f"there is no actor {number} any more", hint="start another one") from None


async def _awaited(reference: Any) -> Any:
    return await reference


def _retrieve(run: asyncio.Future[Any]) -> None:
    """Retrieve and ignore the task's error; otherwise asyncio would log that the error was never retrieved."""
    if not run.cancelled():
        run.exception()


class Server:
    """Answers calls from a socket concurrently until the socket is closed.

    Args:
        reader: stream of incoming calls.
        writer: stream for the answers.
        operations: operations that may be called.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, operations: GatewayOperations
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._operations = operations
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Answer calls until the control plane closes the socket."""
        self._write(CallResult(number=0, value="ready"))
        while line := await self._reader.readline():
            call = Call.model_validate_json(line)
            if call.operation == "cancel":
                if call.number in self._tasks:
                    self._tasks[call.number].cancel()
                continue
            task = asyncio.create_task(self._answer(call))
            self._tasks[call.number] = task
            task.add_done_callback(partial(self._forget, call.number))

    def _forget(self, number: int, task: asyncio.Task[None]) -> None:
        del task
        self._tasks.pop(number, None)

    async def _answer(self, call: Call) -> None:
        try:
            value = await self._work(call)
            answer = CallResult(number=call.number, value=value)
        except Exception as failure:  # noqa: BLE001 - every failure is reported to the control plane
            answer = CallResult(number=call.number, failure=_described(failure))
        self._write(answer)
        with suppress(ConnectionError):
            await self._writer.drain()

    def _work(self, call: Call) -> Awaitable[Any]:
        work: Callable[..., Awaitable[Any]] | None = None
        if not call.operation.startswith("_"):
            work = getattr(self._operations, call.operation, None)
        if work is None:
            raise ValueError(f"there is no operation {call.operation}")
        return work(*call.arguments)

    def _write(self, answer: CallResult) -> None:
        try:
            line = answer.model_dump_json().encode()
        except (ValueError, ValidationError) as failure:
            # An actor returned a value that JSON cannot represent.
            line = CallResult(number=answer.number, failure=_described(failure)).model_dump_json().encode()
        if len(line) >= MOST_BYTES:
            too_long = ValueError(f"an answer of {len(line)} bytes is too long")
            line = CallResult(number=answer.number, failure=_described(too_long)).model_dump_json().encode()
        self._writer.write(line + b"\n")


def _described(failure: Exception) -> CallFailure:
    """Return an error in the form in which it is sent to the control plane."""
    cause: BaseException = failure.cause if isinstance(failure, RayTaskError) else failure
    if isinstance(cause, ShareComputeError):
        facts = json.loads(json.dumps(cause.facts(), default=str))
        return CallFailure(kind="raised", message=cause.message, code=cause.code, facts=facts)
    if isinstance(failure, ActorUnavailableError):
        return CallFailure(kind="unreachable", message=first_line(failure))
    if isinstance(failure, RayActorError):
        return CallFailure(kind="died", message=first_line(failure))
    if isinstance(failure, RayError) and not isinstance(failure, RayTaskError):
        return CallFailure(kind="no_answer", message=f"{type(failure).__name__}: {first_line(failure)}")
    return CallFailure(kind="mistake", message=f"{type(cause).__name__}: {first_line(cause)}")


def first_line(failure: BaseException) -> str:
    """Return the first non-empty line of a Ray error. Further lines are stack traces and advice to developers."""
    return next((line.strip() for line in str(failure).splitlines() if line.strip()), type(failure).__name__)


async def _serve(connection: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=connection, limit=MOST_BYTES)
    await Server(reader, writer, GatewayOperations()).run()


def main(arguments: Sequence[str]) -> None:
    """Connect to Ray when the head runs, then answer calls until the socket is closed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--temp-dir", required=True)
    parser.add_argument("--socket", required=True, type=int)
    wanted = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO)
    connection = socket.socket(fileno=wanted.socket)
    os.set_inheritable(wanted.socket, False)  # noqa: FBT003 - a function of the standard library
    with connection.makefile("rb", buffering=0) as unbuffered:  # later lines are for `Server`
        first = unbuffered.readline()
    if not first:
        return  # the head did not start
    head = HeadAddress.model_validate_json(first)
    ray.init(
        address=head.ray_address,
        namespace=NAMESPACE,
        log_to_driver=False,
        logging_level=logging.WARNING,
        # Contributors' nodes may also run on this machine. These two options make Ray select the head's node.
        _node_ip_address=head.node_address,
        _temp_dir=wanted.temp_dir,
    )
    refuse_pickles()
    try:
        asyncio.run(_serve(connection))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
