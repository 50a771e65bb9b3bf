"""Starts, watches and restarts the Ray head and the gateway, while the control plane keeps running."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from share_compute.errors import ShareComputeError, Unavailable, as_ours
from share_compute.lifecycle.folders import BATCHES, TRAINING
from share_compute.program import command_of
from share_compute.settings import Settings
from share_compute_actors.machine.confine import User, clean_environment, confined
from share_compute_actors.machine.head import (
    Head,
    HeadPlace,
    hand_over,
    has_stale_token,
    invalidate_token,
    renew_token,
    show,
    start_head,
)
from share_compute_actors.machine.processes import Child, ChildProcesses
from share_compute_api.cluster.calls import HeadAddress, NodeFacts, members_answer, nodes_answer
from share_compute_api.cluster.gateway import Gateway, RemoteActor, send_address, translated
from share_compute_api.cluster.pings import MOST_MISSED, PING_S, unresponsive
from share_compute_api.connection.addresses import advertised
from share_compute_api.connection.backoff import ExponentialBackoff

_POLL_S = 0.1
_SOUND_S = 60.0
"""Run time in seconds after which a process counts as stable, which resets the restart delay."""
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
_NOTICE_S = 2.0
"""Wait after the end of a gateway, in seconds, to find out whether the head has ended too."""
_PATIENCE_S = 120.0
"""Time limit for a gateway to connect before the start of an actor fails, in seconds."""
_ANSWER_S = 30.0
"""Time limit for a query of Ray's tables, in seconds."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ClusterInfo:
    """Data that a machine needs to connect its Ray node to the cluster."""

    ray_address: str
    """host:port of the head, as other machines reach it."""
    token: str = field(repr=False)
    """Token with which Ray nodes authenticate."""
    head_node_id: str
    """Id of the head's Ray node, in hexadecimal."""
    advertise_address: str
    """IP address at which other machines reach this machine, as in URLs: IPv6 in brackets."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables that the nodes of contributors must be started with."""


def _backoff() -> ExponentialBackoff:
    """Return the exponential backoff between restarts of a child process; `_pause_s` resets it after a stable run."""
    return ExponentialBackoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)


def _pause_s(backoff: ExponentialBackoff, life_s: float) -> float:
    """Record that a process ended after ``life_s`` seconds; return the delay before its restart, in seconds."""
    if life_s > _SOUND_S:
        backoff.reset()
    return backoff.failed()


@dataclass(frozen=True, slots=True)
class _GatewayProcess:
    """A gateway that was started but has not connected to the head yet."""

    child: Child
    connection: socket.socket
    """The control plane's end of a socket pair."""

    def connect_to(self, head: Head) -> None:
        """Let the gateway connect to a running head."""
        address = HeadAddress(ray_address=head.ray_address, node_address=head.node.address)
        send_address(self.connection, address)


class Cluster:
    """The Ray cluster of one server. The constructor starts the Ray head and the gateway; `run` keeps them running.

    Args:
        settings: the server's settings.
        children: starts, records and ends the child processes.

    Raises:
        Conflict: the head's port is taken, too few ports are free, or a data root contains the data folder.
        Unavailable: the head did not start.
    """

    def __init__(self, settings: Settings, children: ChildProcesses) -> None:
        self._settings = settings
        self._children = children
        self._address = advertised(settings)
        self._began_s = 0.0
        self._head_backoff = _backoff()
        self._hang: str | None = None
        """Message about the current head if it runs but does not answer; else None."""
        self._waiting: _GatewayProcess | None = None
        """Gateway that was started together with the current head, until `_use_gateway` takes it."""
        self._gateway: Gateway | None = None
        self._is_connected = asyncio.Event()
        self._has_ended = False
        """Whether nothing connects a gateway any more, because the server stops."""
        self._rotated: asyncio.Future[None] | None = None
        """Future that is done when a head with the new token runs; None unless the token is being replaced."""
        self.trouble: str | None = None
        """Reason why Ray failed and cannot be used now, in one sentence. None while Ray works, while it starts for the
        first time, and while its token is being replaced."""
        self._head = self._start_head(renews=has_stale_token(settings.data_folder))

    # -- facts for the control plane ----------------------------------------------------------------------------------

    @property
    def is_rotating(self) -> bool:
        """Whether the current token is being replaced."""
        return self._rotated is not None

    @property
    def info(self) -> ClusterInfo:
        """Facts about the current Ray head, such as its address and authentication token."""
        return ClusterInfo(
            ray_address=self._head.ray_address,
            token=self._head.place.token,
            head_node_id=self._head.node.node_id,
            advertise_address=for_url(self._address),
            environment=self._head.node_environment,
        )

    @property
    def head_user(self) -> User | None:
        """User that the head runs as; None if it runs as this process's user."""
        return self._head.place.policy.user

    async def nodes(self) -> list[NodeFacts]:
        """Return Ray's table of nodes; raise Unavailable when Ray does not answer."""
        return nodes_answer.validate_python(await self._ask("nodes"))

    async def members(self) -> Mapping[str, frozenset[str]]:
        """Return {contributor id: ids of jobs that have members on it}; raise Unavailable when Ray does not answer."""
        found = members_answer.validate_python(await self._ask("members"))
        return {contributor: frozenset(jobs) for contributor, jobs in found.items()}

    async def end_members(self, job_id: str) -> int:
        """End all members of a job and return their number; raise Unavailable when Ray does not answer."""
        return int(await self._ask("end_members", job_id))

    async def make_fail(self, job_id: str, contributor_id: str, kind: str, duration_s: float) -> None:
        """Make a member of a running job fail on purpose (fault injection)."""
        await self._ask("make_fail", job_id, contributor_id, kind, duration_s)

    async def _ask(self, operation: str, *arguments: Any) -> Any:
        log = "look into the server's log"
        with translated("the process that calls Ray", mistake_hint=log, loss_hint=log):
            try:
                async with asyncio.timeout(_ANSWER_S):
                    return await (await self._connected()).call(operation, *arguments)
            except TimeoutError as failure:
                raise Unavailable(f"Ray did not answer within {_ANSWER_S:.0f} s", hint=log) from failure

    async def _connected(self) -> Gateway:
        while self._gateway is None:  # the gateway may be lost again before this task resumes
            if self._has_ended:
                raise self.unusable()
            await self._is_connected.wait()
        return self._gateway

    def unusable(self) -> Unavailable:
        """Return the error for an action that needs Ray while Ray is not available."""
        why = self.trouble or "the server is not connected to Ray"
        return Unavailable(why, hint="try again; if it stays so, look into the server's log")

    # -- actors -------------------------------------------------------------------------------------------------------

    async def start_coordinator(self, assignment: str, reads: list[Path], writes: Path) -> RemoteActor:
        """Start a coordinator actor on the head's node.

        Args:
            assignment: an `Assignment` as JSON.
            reads: files and folders that the coordinator reads.
            writes: the job's folder, to which the coordinator writes.

        Raises:
            CallFailed: Ray did not start the actor.
            Unavailable: no gateway was connected within `_PATIENCE_S`.
        """
        await asyncio.to_thread(self._hand_over, [*reads, writes])
        return await self._start("start_coordinator", self._head.node.node_id, assignment)

    async def start_sparse_coordinator(self, assignment: str, reads: list[Path], writes: Path) -> RemoteActor:
        """Start, on the head's node, the coordinator of a sparse model; see `start_coordinator`.

        Args:
            assignment: a `SparseAssignment` as JSON.
            reads: files that the coordinator reads.
            writes: the job's folder, to which the coordinator writes.
        """
        await asyncio.to_thread(self._hand_over, [*reads, writes])
        return await self._start("start_sparse_coordinator", self._head.node.node_id, assignment)

    async def start_deployment(self, assignment: str, reads: list[Path]) -> RemoteActor:
        """Start, on the head's node, the actor that serves a replica; see `start_coordinator`."""
        await asyncio.to_thread(self._hand_over, reads)
        return await self._start("start_deployment", self._head.node.node_id, assignment)

    async def start_contributor(self, contributor_id: str, node_id: str | None) -> RemoteActor:
        """Start the actor that measures a contributor, on Ray node ``node_id``; None for the head's node."""
        node_id = self._head.node.node_id if node_id is None else node_id
        return await self._start("start_contributor", node_id, contributor_id)

    def _hand_over(self, paths: Sequence[Path]) -> None:
        """Let the head's user access paths in the data folder; do not change paths outside the folder.

        The user can then read files of batches and uploads, and owns the files of training jobs.
        """
        policy, given = self._head.place.policy, self._settings.data_folder
        data_folder = given.resolve()
        own = {data_folder / path.relative_to(given) for path in paths if path.is_relative_to(given)}
        own |= {path for path in paths if path.is_relative_to(data_folder)}
        for readable in (data_folder / BATCHES, data_folder / "uploads"):
            show(policy, [path for path in own if path.is_relative_to(readable)], readable)
        training = data_folder / TRAINING
        hand_over(policy, [path for path in own if path.is_relative_to(training)])

    async def _start(self, operation: str, node_id: str, argument: str) -> RemoteActor:
        try:
            async with asyncio.timeout(_PATIENCE_S):
                gateway = await self._connected()
        except TimeoutError as failure:
            raise self.unusable() from failure
        return RemoteActor(gateway, int(await gateway.call(operation, node_id, argument)))

    async def rotate_token(self) -> None:
        """Start a head with a new token, and wait until it runs. All contributors must then restart their Ray nodes."""
        await asyncio.to_thread(invalidate_token, self._settings.data_folder)
        if self._rotated is None:
            self._rotated = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._rotated)

    # -- supervision of the head and the gateway ----------------------------------------------------------------------

    async def run(self) -> None:
        """Keep the head and the gateway running until cancelled; restart each whenever it ends."""
        try:
            while True:
                await self._use_head()
                await self._replace_head()
        except asyncio.CancelledError:  # the server stops; after other exceptions the caller runs this again
            self._has_ended = True
            self._is_connected.set()
            raise

    async def _use_head(self) -> None:
        """Keep a gateway connected to the current head until the head has ended or must be replaced."""
        backoff = _backoff()
        while not self._is_over:
            began_s = time.monotonic()
            try:
                why = await self._use_gateway()
            except ShareComputeError as failure:  # for example, because the disk is full
                why = failure.message
            pause_s = _pause_s(backoff, time.monotonic() - began_s)
            # If the head's end also ended the gateway, no restart of the gateway is reported.
            if not await self._is_over_within(_NOTICE_S):
                self._report(why, pause_s)
                await self._is_over_within(pause_s)

    async def _use_gateway(self) -> str:
        """Connect a gateway, and wait until the gateway or the head has ended; return a message with the reason."""
        process, self._waiting = self._waiting, None
        if process is None:
            process = await asyncio.to_thread(self._start_gateway, self._head.place)
            process.connect_to(self._head)
        child, gateway = process.child, Gateway(process.connection)
        try:
            why = await self._listen(gateway, child)
        finally:
            gateway.close()
            await asyncio.to_thread(self._children.stop, child, 1.0)
        return why or f"the process that calls Ray ended with status {child.exit_code}: {child.last_words()}"

    async def _listen(self, gateway: Gateway, child: Child) -> str | None:
        """Make the gateway available until it or the head ends or hangs; return a message about a hang, or None."""
        connecting = asyncio.create_task(gateway.connect())
        try:
            if not await self._is_done_first(connecting):
                return None
            reader = connecting.result()
        except Unavailable as failure:
            # The head may be the cause, so replace it. This interrupts no job, because no coordinator runs without a
            # gateway.
            self._hang = f"{failure.message}: {child.last_words()}"
            return self._hang
        finally:
            connecting.cancel()
        self._gateway = gateway
        self._is_connected.set()
        self.trouble = None
        listening = asyncio.create_task(gateway.listen(reader))
        watching = asyncio.create_task(
            unresponsive(
                lambda timeout_s: gateway.call("ping", timeout_s=timeout_s),
                lambda timeout_s: gateway.call("ping_head", self._head.node.node_id, timeout_s=timeout_s),
            )
        )
        try:
            await self._is_done_first(listening, watching)
        finally:
            self._is_connected.clear()
            self._gateway = None
            listening.cancel()
            watching.cancel()
        if not watching.done():
            return None
        reason = f"it left {MOST_MISSED} pings in {MOST_MISSED * PING_S:.0f} s unanswered"
        if watching.result() == "head":
            self._hang = reason
        return f"the process that calls Ray does not answer: {reason}"

    async def _is_done_first(self, *tasks: asyncio.Task[Any]) -> bool:
        """Wait until a task is done, or the head has ended or must be replaced; return whether the task is done."""
        while not (any(task.done() for task in tasks) or self._is_over):
            await asyncio.wait(tasks, timeout=_POLL_S, return_when=asyncio.FIRST_COMPLETED)
        return any(task.done() for task in tasks)

    @property
    def _is_over(self) -> bool:
        """Whether the current head has ended or must be replaced."""
        return self._rotated is not None or self._why_over is not None

    @property
    def _why_over(self) -> str | None:
        """Reason why the current head must be replaced; None while it can be used."""
        return self._head.node.end or self._hang

    async def _is_over_within(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` until the current head has ended or must be replaced; return `_is_over`."""
        deadline = time.monotonic() + timeout_s
        while not self._is_over and time.monotonic() < deadline:  # noqa: ASYNC110 - a child is polled
            await asyncio.sleep(_POLL_S)
        return self._is_over

    async def _replace_head(self) -> None:
        """Replace the current head with a new one; retry until the new one runs."""
        if self._rotated is None:
            pause_s = _pause_s(self._head_backoff, time.monotonic() - self._began_s)
            self._report(f"the Ray head is replaced: {self._why_over}", pause_s)
            await asyncio.sleep(pause_s)
        while True:
            rotated = self._rotated
            try:
                await asyncio.to_thread(self._start_another_head, renews=rotated is not None)
            except Exception as failure:  # noqa: BLE001 - after any error the server keeps running
                pause_s = self._head_backoff.failed()
                self._report(f"the Ray head did not start: {as_ours(failure).message}", pause_s)
                await asyncio.sleep(pause_s)
            else:
                break
        if rotated is not None:
            rotated.set_result(None)
            self._rotated = None

    def _report(self, why: str, pause_s: float) -> None:
        """Record and log the reason why Ray cannot be used, and the delay before the restart."""
        self.trouble = why
        _log.warning("%s; it is started again in %.1f s", why, pause_s)

    def _start_gateway(self, head: HeadPlace) -> _GatewayProcess:
        """Start a gateway, which imports Ray and then waits for the address from `_GatewayProcess.connect_to`."""
        ours, theirs = socket.socketpair()
        with theirs:
            command = [
                *command_of("share_compute_api.cluster.gateway_process"),
                *("--temp-dir", str(head.folder), "--socket", str(theirs.fileno())),
            ]
            try:
                child = self._children.start(
                    "gateway",
                    confined(command, head.policy),
                    environment={**head.environment, "RAY_ADDRESS": "", "PYTHONWARNINGS": "ignore"},
                    inherits=clean_environment(os.environ),
                    files=[theirs.fileno()],
                )
            except BaseException:
                ours.close()
                raise
        return _GatewayProcess(child, ours)

    def _wait_with_gateway(self, head: HeadPlace) -> None:
        """Start a gateway, so that it imports Ray while the head starts."""
        self._waiting = self._start_gateway(head)

    def _discard_gateway(self) -> None:
        """Stop the gateway that waits for the head; do nothing if there is none."""
        process, self._waiting = self._waiting, None
        if process is not None:
            process.connection.close()
            self._children.stop(process.child, 0.0)

    def _start_head(self, *, renews: bool) -> Head:
        if renews:
            renew_token(self._settings.data_folder)
        try:
            head = start_head(self._settings, self._children, self._address, beside=self._wait_with_gateway)
        except BaseException:
            self._discard_gateway()
            raise
        # The gateway connects now, and not when `run` begins, because a starting server imports packages until then.
        if self._waiting is not None:
            self._waiting.connect_to(head)
        self._began_s = time.monotonic()
        return head

    def _start_another_head(self, *, renews: bool) -> None:
        """Stop the current head if it still runs; then start a new one."""
        self._discard_gateway()
        self._children.stop(self._head.node.child, 2.0)
        self._head.place.ports.release()
        self._head = self._start_head(renews=renews)
        self._hang = None


def for_url(address: str) -> str:
    """Return an IP address in its form for URLs: IPv6 in brackets."""
    return f"[{address}]" if ":" in address else address
