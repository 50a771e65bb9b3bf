"""The Ray head and the gateway: started, watched and started again while the control plane goes on."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from share_compute.errors import ShareComputeError, Unavailable, as_ours
from share_compute.jobs.folders import BATCHES, TRAINING
from share_compute.settings import Settings
from share_compute_actors.machine.confine import User, clean_environment, confined
from share_compute_actors.machine.head import (
    Head,
    hand_over,
    has_stale_token,
    invalidate_token,
    renew_token,
    show,
    start_head,
)
from share_compute_actors.machine.processes import Child, Roster
from share_compute_api.addresses import advertised
from share_compute_api.cluster.calls import NodeFacts, members_answer, nodes_answer
from share_compute_api.cluster.gateway import Gateway, RemoteActor, translated
from share_compute_api.supervision import ClusterInfo

_POLL_S = 0.1
_SOUND_S = 60.0
"""A process that ran this long was sound."""
_MOST_SHORT_LIVES = 3
_LONGEST_PAUSE_S = 30.0
_PATIENCE_S = 120.0
"""How long something that is to be started waits for a gateway."""
_ANSWER_S = 30.0
"""How long Ray's tables may take."""
_log = logging.getLogger(__name__)


class Cluster:
    """The cluster of one server; starts its head.

    Args:
        settings: where and how.
        roster: writes the children down, and ends them.

    Raises:
        Conflict: the head's port is taken.
        Unavailable: the head did not start.
    """

    def __init__(self, settings: Settings, roster: Roster) -> None:
        self._settings = settings
        self._roster = roster
        self._address = advertised(settings)
        self._began_s = 0.0
        self._short_lives = 0
        """Of heads, in a row."""
        self._lost_gateways = 0
        """In a row that could not connect, or ended soon."""
        self._gateway: Gateway | None = None
        self._is_connected = asyncio.Event()
        self._rotated: asyncio.Future[None] | None = None
        """Resolved when there is a head with another token, if that is wanted."""
        self.failure: ShareComputeError | None = None
        """Why there will be no other head or gateway."""
        self._head = self._start_head(renews=has_stale_token(settings.data_folder))

    # -- what the control plane knows of it ---------------------------------------------------------------------------

    @property
    def is_rotating(self) -> bool:
        """Whether the present token is about to end."""
        return self._rotated is not None

    @property
    def info(self) -> ClusterInfo:
        """What contributors need to get in, and where the head is."""
        return ClusterInfo(
            ray_address=self._head.ray_address,
            token=self._head.token,
            head_node_id=self._head.node.node_id,
            advertise_address=for_url(self._address),
            environment=self._head.node_environment,
        )

    @property
    def head_user(self) -> User | None:
        """The user that the head runs as; None: this process's own."""
        return self._head.policy.user

    async def nodes(self) -> list[NodeFacts]:
        """Return Ray's table of nodes; Unavailable when Ray does not answer."""
        return nodes_answer.validate_python(await self._ask("nodes"))

    async def alive_nodes(self) -> frozenset[str]:
        """Return the Ray nodes that answer, in hexadecimal; Unavailable when Ray does not."""
        return frozenset(node.node_id for node in await self.nodes() if node.is_alive)

    async def members(self) -> Mapping[str, frozenset[str]]:
        """Return, by contributor, the jobs that have members there; Unavailable when Ray does not answer."""
        found = members_answer.validate_python(await self._ask("members"))
        return {contributor: frozenset(jobs) for contributor, jobs in found.items()}

    async def end_members(self, job_id: str) -> int:
        """End all members of a job; return how many there were. Unavailable when Ray does not answer."""
        return int(await self._ask("end_members", job_id))

    async def make_fail(self, job_id: str, contributor_id: str, kind: str, duration_s: float) -> None:
        """Let a member of a running job fail on purpose."""
        await self._ask("make_fail", job_id, contributor_id, kind, duration_s)

    async def _ask(self, operation: str, *arguments: Any) -> Any:
        log = "look into the server's log"
        with translated("the process that calls Ray", mistake_mend=log, loss_mend=log):
            try:
                async with asyncio.timeout(_ANSWER_S):
                    return await (await self._connected()).call(operation, *arguments)
            except TimeoutError as failure:
                raise Unavailable(f"Ray did not answer within {_ANSWER_S:.0f} s", mend=log) from failure

    async def _connected(self) -> Gateway:
        await self._is_connected.wait()
        assert self._gateway is not None
        return self._gateway

    # -- actors -------------------------------------------------------------------------------------------------------

    async def start_coordinator(self, assignment: str, reads: list[Path], writes: Path) -> RemoteActor:
        """Start a coordinator on the head, and let it run.

        Args:
            assignment: an `Assignment` as JSON.
            reads: files and folders of the control plane that the job needs.
            writes: the job's folder.

        Raises:
            CallFailed: Ray refused.
            Unavailable: there is no gateway.
        """
        await asyncio.to_thread(self._hand_over, [*reads, writes])
        return await self._start("start_coordinator", self._head.node.node_id, assignment)

    async def start_deployment(self, assignment: str, reads: list[Path]) -> RemoteActor:
        """Start the server of a replica on the head, and let it run; see `start_coordinator`."""
        await asyncio.to_thread(self._hand_over, reads)
        return await self._start("start_deployment", self._head.node.node_id, assignment)

    async def start_contributor(self, contributor_id: str, node_id: str | None) -> RemoteActor:
        """Start the actor that measures a contributor on its node; None is the head's."""
        node_id = self._head.node.node_id if node_id is None else node_id
        return await self._start("start_contributor", node_id, contributor_id)

    def _hand_over(self, paths: Sequence[Path]) -> None:
        """Let the head's user read what lies in the data folder; what people named elsewhere stays theirs."""
        policy, given = self._head.policy, self._settings.data_folder
        data_folder = given.resolve()
        own = {data_folder / path.relative_to(given) for path in paths if path.is_relative_to(given)}
        own |= {path for path in paths if path.is_relative_to(data_folder)}
        batches = data_folder / BATCHES
        show(policy, [path for path in own if path.is_relative_to(batches)], batches)
        folders = (data_folder / TRAINING, data_folder / "uploads")
        hand_over(policy, [path for path in own if any(path.is_relative_to(folder) for folder in folders)])

    async def _start(self, operation: str, node_id: str, argument: str) -> RemoteActor:
        try:
            async with asyncio.timeout(_PATIENCE_S):
                gateway = await self._connected()
        except TimeoutError as failure:
            raise Unavailable("the server is not connected to Ray", mend="look into its log") from failure
        return RemoteActor(gateway, int(await gateway.call(operation, node_id, argument)))

    async def rotate_token(self) -> None:
        """Start another head with another token. All nodes of contributors end, and start anew with it.

        Raises:
            Unavailable: the head did not start.
        """
        await asyncio.to_thread(invalidate_token, self._settings.data_folder)
        if self._rotated is None:
            self._rotated = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._rotated)

    # -- the two processes --------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep head and gateway running until cancelled, or until one of them ends again and again."""
        try:
            while True:
                await self._connect_and_watch()
                if self._rotated is not None:
                    await asyncio.to_thread(self._replace)
                    self._rotated.set_result(None)
                    self._rotated = None
                elif self._head.node.child.exit_code is not None:
                    await asyncio.to_thread(self._revive)
        except ShareComputeError as failure:
            self._fail(failure)
        except Exception as failure:  # noqa: BLE001 - the server ends with it
            _log.exception("the cluster cannot be kept running")
            self._fail(as_ours(failure))
        finally:
            if self._rotated is not None and not self._rotated.done():
                self._rotated.cancel()  # the server stops; the next one makes the other token

    def _fail(self, failure: ShareComputeError) -> None:
        self.failure = failure
        if self._rotated is not None:
            self._rotated.set_exception(failure)

    async def _connect_and_watch(self) -> None:
        """Start a gateway, and return when it or the head has ended."""
        ours, theirs = socket.socketpair()
        gateway = Gateway(ours)
        try:
            with theirs:
                try:
                    child = await asyncio.to_thread(self._start_gateway, theirs.fileno())
                except Unavailable as failure:  # the disk is full, for example
                    await self._pause(failure.message)
                    return
            try:
                reader = await gateway.connect()
            except Unavailable:
                await self._give_up(child)
                return
            self._gateway = gateway
            self._is_connected.set()
            connected_s = time.monotonic()
            listening = asyncio.create_task(gateway.listen(reader))
            try:
                while not (listening.done() or self._is_over):
                    await asyncio.wait([listening], timeout=_POLL_S)
            finally:
                self._is_connected.clear()
                self._gateway = None
                listening.cancel()
            if time.monotonic() - connected_s > _SOUND_S:
                self._lost_gateways = 0
            await self._give_up(child)
        finally:
            gateway.close()

    @property
    def _is_over(self) -> bool:
        """Whether the present head has ended, or is to."""
        return self._rotated is not None or self._head.node.child.exit_code is not None

    async def _give_up(self, child: Child) -> None:
        """End a gateway, and wait before the next one: longer each time while none lasts."""
        await asyncio.to_thread(self._roster.stop, child, 1.0)
        # The head may have ended first, and is noticed a moment later.
        for _ in range(20):
            if self._is_over:
                return
            await asyncio.sleep(_POLL_S)
        last = child.log_tail(1) or "it printed nothing"
        await self._pause(f"the process that calls Ray ended with status {child.exit_code}: {last}")

    async def _pause(self, why: str) -> None:
        """Wait before the next gateway; the server goes on without Ray for as long as it takes."""
        pause_s = min(0.5 * 2.0 ** min(self._lost_gateways, 10), _LONGEST_PAUSE_S)
        self._lost_gateways += 1
        _log.warning("%s; it is started again in %.1f s", why, pause_s)
        for _ in range(round(pause_s / _POLL_S)):
            if self._is_over:
                return  # the next gateway needs another head, which is started now
            await asyncio.sleep(_POLL_S)

    def _start_gateway(self, descriptor: int) -> Child:
        head = self._head
        command = [
            *(sys.executable, "-P", "-m", "share_compute_api.cluster.gateway_process"),
            *("--address", head.ray_address, "--node-address", head.node.address),
            *("--temp-dir", str(head.folder), "--socket", str(descriptor)),
        ]
        return self._roster.start(
            "gateway",
            confined(command, head.policy),
            environment={**head.environment, "RAY_ADDRESS": "", "PYTHONWARNINGS": "ignore"},
            inherits=clean_environment(os.environ),
            files=[descriptor],
        )

    def _start_head(self, *, renews: bool = False) -> Head:
        if renews:
            renew_token(self._settings.data_folder)
        head = start_head(self._settings, self._roster, self._address)
        self._began_s = time.monotonic()
        return head

    def _replace(self) -> None:
        """Start another head in place of one that may still run."""
        self._roster.stop(self._head.node.child, 2.0)
        self._head = self._start_head(renews=True)

    def _revive(self) -> None:
        """Start another head in place of the one that ended."""
        ended = self._head.node.child
        self._short_lives = 0 if time.monotonic() - self._began_s > _SOUND_S else self._short_lives + 1
        if self._short_lives >= _MOST_SHORT_LIVES:
            raise Unavailable(
                f"the Ray head ended with status {ended.exit_code}, {self._short_lives} times soon after its start, "
                "so the server ended too",
                mend="look for lack of memory or disk, then start it again with `share-compute up`: jobs continue",
                details={"log": ended.log_tail()},
            )
        _log.warning(
            "the Ray head ended with status %s; it is started again, and jobs go on", ended.exit_code
        )
        self._roster.stop(ended)
        self._head = self._start_head()


def for_url(address: str) -> str:
    """Return an IP address as it is written in a URL."""
    return f"[{address}]" if ":" in address else address
