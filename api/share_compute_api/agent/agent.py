"""The agent process of a contributor: it joins the cluster, keeps the Ray node alive, and drains before it leaves.

One agent runs for each contributor. It imports neither Ray nor torch, so that it needs little memory.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import psutil

from share_compute.errors import (
    ContributorLost,
    NotAuthorized,
    NotFound,
    ShareComputeError,
    Unavailable,
    UserError,
)
from share_compute.lifecycle.states import ContributorState
from share_compute_actors.machine.launch import RayNode
from share_compute_actors.machine.node import NodeAccess, NodeLimits, start_node
from share_compute_actors.machine.ports import NodePorts
from share_compute_actors.machine.preflight import route_address
from share_compute_actors.machine.processes import ChildProcesses
from share_compute_actors.machine.run_folders import close_run_folder, open_run_folder
from share_compute_api.agent import client as agent_client
from share_compute_api.agent.client import AgentClient
from share_compute_api.agent.joining import JoinOptions, check_machine, resolve_limits
from share_compute_api.agent.reachability import require_reachable
from share_compute_api.agent.sensors import Sensors, SensorThread
from share_compute_api.connection.backoff import ExponentialBackoff
from share_compute_api.connection.identity import AgentIdentity, Identities, digest_of
from share_compute_api.connection.join_line import INVITE_VARIABLE
from share_compute_api.schemas.agents import (
    ClusterAccess,
    ContributedWork,
    ContributorWork,
    Joined,
    JoinRequest,
    MachineLimits,
    PreflightRequest,
    RejoinRequest,
    SiblingRequest,
)
from share_compute_api.schemas.utilization import Utilization
from share_compute_api.schemas.versions import local_versions
from share_compute_api.terminal.children import Interrupts

_HEARTBEAT_S = 2.0
_WRITE_BEATS = 5
"""Number of heartbeats between updates of the list of child processes; Ray starts further processes at any time."""
_PATIENCE_S = 600.0
"""Time without an answer from the server after which the agent gives up, in seconds."""
_PAUSES_S = (0.5, 30.0)
"""First and longest delay before the agent rejoins, in seconds."""
_UNREACHABLE_PAUSES_S = (0.5, _HEARTBEAT_S)
"""First and longest delay before the next heartbeat while the server does not answer, in seconds.

These delays are short, because after a network cut jobs cannot use the machine until its next heartbeat.
"""
_HEAD_PATIENCE_S = 60.0
"""Time for which a machine that wants to join waits for the server's Ray head, in seconds."""
_REJOINS_WITH_NODE = 2
"""Number of consecutive rejoins that keep the Ray node; the next one restarts it.

The first rejoins may fail only because the Ray head is being restarted."""
_SOUND_S = 60.0
"""Run time in seconds after which a node counts as healthy; the rejoin delays then start over."""
_NODE_GRACE_S = 5.0
_LEAVE_GRACE_S = 0.5


@dataclass(frozen=True, slots=True)
class AgentStatus:
    """State of the agent that is shown to the machine's owner."""

    name: str
    url: str
    phase: str
    """Current activity of the agent in words, such as ``joining``."""
    since: datetime
    contributor_id: str | None = None
    lent: MachineLimits | None = None
    """Lent resources; None before the machine was examined."""
    work: ContributorWork | None = None
    utilization: Utilization | None = None
    """Last measurement of this machine; None before the first one."""
    contributed: ContributedWork | None = None
    """Work of this machine; None before the server has reported it."""
    warnings: tuple[str, ...] = ()
    """Warnings from the checks of this machine and of the connections to other machines."""


class Agent:
    """Agent of one contributor: joins the cluster, keeps a Ray node in it, rejoins after failures, and leaves.

    Args:
        options: the server to join, and the resources that are lent to it.
        report: called with the agent's state whenever it changes.
        identities: store of the machine's key.
        start: starts the Ray node; see `start_node` for its arguments.
        sleep: waits for a number of seconds, between heartbeats and between attempts to reach the server.
    """

    def __init__(
        self,
        options: JoinOptions,
        report: Callable[[AgentStatus], None],
        identities: Identities,
        *,
        start: Callable[..., RayNode] = start_node,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._options = options
        self._identities = identities
        self._report = report
        self._start = start
        self._sleep = sleep
        self._view = AgentStatus(options.name, options.url, "checking this machine", datetime.now(UTC))
        self._children: ChildProcesses | None = None
        self._node: RayNode | None = None
        self._ports: NodePorts | None = None
        """Ports that the Ray node has or will have."""
        self._machine_warnings: tuple[str, ...] = ()
        """Warnings from `check_machine`."""
        self._access: ClusterAccess | None = None
        """Address and token with which the node was started, or will be started."""
        self._node_started = 0.0
        self._backoff = ExponentialBackoff(*_PAUSES_S, has_jitter=True)
        self._unreachable = ExponentialBackoff(*_UNREACHABLE_PAUSES_S, has_jitter=True)
        self._rejoins = 0
        """Number of rejoins since this machine was last ready."""
        self._was_ready = False
        """Whether this machine was ready at a heartbeat since its last attempt to rejoin."""
        self._beats = 0
        self._grace_s = _NODE_GRACE_S
        self._sensors: SensorThread | None = None
        self._refusal = ""
        """Reason why the server refuses this machine; empty while it does not."""

    def run(self) -> None:
        """Join and work until Ctrl-C or SIGTERM; then end all child processes.

        Raises:
            NotAuthorized: the server refused this machine, or the operator removed it.
            ShareComputeError: the machine could not join, or the server did not answer for 10 minutes.
        """
        with Interrupts() as interrupts, ExitStack() as stack:
            stack.callback(interrupts.begin_stopping)
            options = self._options
            stack.enter_context(self._identities.in_use(options.url, options.name))
            limits = resolve_limits(options)
            self._view = replace(self._view, lent=limits)
            identity, access = self.enroll(limits)
            children = open_run_folder(f"contributor {options.url} {options.name}")
            stack.callback(close_run_folder, children)
            interrupts.takes_along(children)
            client = stack.enter_context(self._client(identity))
            self._view = replace(self._view, contributor_id=identity.contributor_id)
            try:
                node_limits = NodeLimits(
                    limits.memory_bytes, limits.cpu_threads, limits.device, limits.devices, limits.gpus
                )
                self.work(client, access, node_limits, children)
            finally:
                interrupts.begin_stopping()
                self.leave(client)

    def enroll(
        self, limits: MachineLimits, beside: AgentIdentity | None = None
    ) -> tuple[AgentIdentity, ClusterAccess]:
        """Join with the invite and store the key, or rejoin with the stored key.

        The stored key is used if no invite is given, or if the invite is the one that this machine joined with. A
        restarted container passes the same invite again, but must not use it twice.

        Args:
            limits: resources that are lent.
            beside: identity of another device of this host. This device then joins as a new contributor with that
                device's key.

        Raises:
            ShareComputeError: `check_machine` or the server refused, or there is neither an invite nor a stored key.
        """
        if beside is not None:
            return self._join_beside(beside, limits)
        invite = self._options.invite
        kept = self._identities.find(self._options.url, self._options.name)
        if invite is None or (kept is not None and kept.came_with(invite)):
            return self._return(limits)
        return self._join(invite, limits)

    def _check(self, limits: MachineLimits, find_head: Callable[[], str]) -> None:
        self._machine_warnings = check_machine(
            self._options, limits, lambda: self._until_available(find_head)
        )
        self._view = replace(self._view, warnings=self._machine_warnings)

    def _until_available(self, find_head: Callable[[], str]) -> str:
        """Call a function, and repeat it while the server answers that it is unavailable, for `_HEAD_PATIENCE_S`.

        The server may be replacing its Ray head. It has answered before, so its URL is right.
        """
        deadline = time.monotonic() + _HEAD_PATIENCE_S
        while True:
            try:
                return find_head()
            except Unavailable as unavailable:
                if time.monotonic() > deadline:
                    raise
                self._show(f"{unavailable.message}; trying again")
                self._sleep(self._unreachable.failed())

    def _join(self, invite: str, limits: MachineLimits) -> tuple[AgentIdentity, ClusterAccess]:
        options = self._options
        wanted = PreflightRequest(invite=invite, versions=local_versions())
        self._check(
            limits, lambda: agent_client.preflight(options.url, wanted, options.fingerprint).ray_address
        )
        self._show("joining")
        request = JoinRequest(invite=invite, **dict(self._facts(limits)))
        return self._keep(agent_client.join(options.url, request, options.fingerprint), invite)

    def _join_beside(self, host: AgentIdentity, limits: MachineLimits) -> tuple[AgentIdentity, ClusterAccess]:
        self._options = replace(self._options, fingerprint=self._options.fingerprint or host.fingerprint)
        found: list[tuple[AgentIdentity, ClusterAccess]] = []

        def find_head() -> str:
            with self._client(host) as client:
                found.append(self._keep(client.join_sibling(self._facts(limits))))
            return found[0][1].ray_address

        self._check(limits, find_head)
        return found[0]

    def _facts(self, limits: MachineLimits) -> SiblingRequest:
        return SiblingRequest(
            name=self._options.name,
            versions=local_versions(),
            clock=datetime.now(UTC),
            limits=limits,
            host=socket.gethostname(),
        )

    def _keep(self, joined: Joined, invite: str | None = None) -> tuple[AgentIdentity, ClusterAccess]:
        options = self._options
        identity = AgentIdentity(
            url=options.url,
            contributor_id=joined.contributor_id,
            key=joined.contributor_key,
            fingerprint=options.fingerprint,
            invite_digest=None if invite is None else digest_of(invite),
        )
        self._identities.keep(options.url, options.name, identity)
        return identity, joined.cluster

    def _return(self, limits: MachineLimits) -> tuple[AgentIdentity, ClusterAccess]:
        url, name = self._options.url, self._options.name
        identity = self._identities.find(url, name)
        if identity is None and (other := self._identities.of_host(url, name)) is not None:
            return self._join_beside(other, limits)
        if identity is None:
            raise UserError(
                f"this machine did not join {url} as {name} before",
                hint="ask the operator of the server, who makes an invite with share-compute invite; then run "
                f"{INVITE_VARIABLE}=CODE share-compute join {url}",
            )
        fingerprint = self._options.fingerprint or identity.fingerprint
        self._options = replace(self._options, fingerprint=fingerprint)
        found: list[ClusterAccess] = []

        def find_head() -> str:
            wanted = RejoinRequest(versions=local_versions(), clock=datetime.now(UTC), limits=limits)
            with self._client(identity) as client:
                found.append(client.rejoin(wanted))
            return found[0].ray_address

        self._check(limits, find_head)
        return identity, found[0]

    def _client(self, identity: AgentIdentity) -> AgentClient:
        return AgentClient(
            self._options.url, identity.contributor_id, identity.key, self._options.fingerprint
        )

    def _show(self, phase: str) -> None:
        self._view = replace(self._view, phase=phase)
        self._report(self._view)

    def work(
        self, client: AgentClient, cluster: ClusterAccess, limits: NodeLimits, children: ChildProcesses
    ) -> None:
        """Keep a node in the cluster until an error ends the work.

        Args:
            client: client of the server, for the contributor that `enroll` returned.
            cluster: address and token of the cluster.
            limits: resources that the node may use.
            children: starts the node as a child process.

        Raises:
            NotAuthorized: the server refused this machine, or the operator removed it.
            NotFound: the server no longer knows this machine.
            Unavailable: the server did not answer for 10 minutes.
        """
        self._children, self._access = children, cluster
        self._sensors = SensorThread(lambda: self._make_sensors(limits))
        try:
            self._stay_online(client, cluster, limits)
        except NotAuthorized as refused:
            self._refusal = f"{refused.message}: {refused.hint}"
            raise
        finally:
            self._sensors.stop()

    def _make_sensors(self, limits: NodeLimits) -> Sensors:
        # Called in another thread, while this thread may replace the node.
        def processes() -> list[psutil.Process]:
            node = self._node
            return [] if node is None else node.child.known()

        def address() -> str | None:
            node = self._node
            return None if node is None else node.address

        return Sensors(processes, limits.cpu_threads, limits.gpus, address)

    def _stay_online(self, client: AgentClient, cluster: ClusterAccess, limits: NodeLimits) -> None:
        last_contact = time.monotonic()
        try:
            self._come_online(client, cluster, limits)
        except ContributorLost as refused:
            last_contact = self._recover(client, limits, refused, last_contact)
        while True:
            try:
                work = self._heartbeat(client)
            except (NotAuthorized, NotFound):
                raise
            except ContributorLost as trouble:
                last_contact = self._recover(client, limits, trouble, last_contact)
            except Unavailable as unavailable:
                self._wait(unavailable, last_contact, self._unreachable)
            else:
                last_contact = time.monotonic()
                if work.wanted == "leave":
                    raise NotAuthorized(
                        "the operator removed this machine", hint="ask for a new invite and join again"
                    )
                self._show_work(work)
                self._sleep(_HEARTBEAT_S)

    def _heartbeat(self, client: AgentClient) -> ContributorWork:
        if self._node is None or self._node.end is not None:
            raise ContributorLost("the Ray node ended", hint="it is started again")
        self._beats += 1
        if self._beats % _WRITE_BEATS == 1 and self._children is not None:
            self._children.refresh()
        measured = None if self._sensors is None else self._sensors.take()
        if measured is not None:
            self._view = replace(self._view, utilization=measured)
        try:
            work = client.heartbeat(measured)
        except UserError as failure:
            if measured is None or type(failure) is not UserError:
                raise
            work = client.heartbeat(None)  # an older server does not know one of the figures
        self._unreachable.reset()
        self._count(work)
        # In state `joining`, the server still waits for the report of the node (`AgentClient.online`).
        if work.state in (ContributorState.lost, ContributorState.joining):
            raise ContributorLost(work.reason, hint="it connects again by itself")
        return work

    def _count(self, work: ContributorWork) -> None:
        total, known = work.contributed, self._view.contributed
        if total is not None:
            contributed = ContributedWork.begin(total) if known is None else known.until(total)
            self._view = replace(self._view, contributed=contributed)

    def _show_work(self, work: ContributorWork) -> None:
        if time.monotonic() - self._node_started > _SOUND_S:
            self._backoff.reset()
        if work.state is ContributorState.ready:
            self._rejoins = 0
            self._was_ready = True
        self._view = replace(self._view, work=work)
        idle = {
            ContributorState.ready: "ready",
            ContributorState.quarantined: f"quarantined: it {work.reason}; ask the operator of the cluster",
        }.get(work.state, "being measured")
        self._show("working" if work.job or work.deployment else idle)

    def _recover(
        self,
        client: AgentClient,
        limits: NodeLimits,
        trouble: ShareComputeError,
        last_contact: float,
    ) -> float:
        """Wait, then try to rejoin the cluster; return the monotonic time of the server's last answer, in seconds.

        If the node runs, the first attempt after the machine was ready has no delay: a restarted server counts such
        machines as lost, and streams wait for them.
        """
        was_ready, self._was_ready = self._was_ready, False
        if not was_ready or self._node is None or self._node.end is not None:
            self._wait(trouble, last_contact, self._backoff)
        try:
            access = client.rejoin()
            last_contact = time.monotonic()
            # The first rejoins keep the Ray node and the members on it, because a restarted head may still know the
            # node.
            known, self._access = self._access, access
            is_another = known is None or (access.ray_address, access.token) != (
                known.ray_address,
                known.token,
            )
            if self._rejoins >= _REJOINS_WITH_NODE or is_another:
                self._stop_node()
            self._rejoins += 1
            self._come_online(client, access, limits)
        except (Unavailable, ContributorLost) as unavailable:
            self._show(f"{unavailable.message}; trying again")
        return last_contact

    def _wait(self, trouble: ShareComputeError, last_contact: float, backoff: ExponentialBackoff) -> None:
        if time.monotonic() - last_contact > _PATIENCE_S:
            raise Unavailable(
                f"the server did not answer for {_PATIENCE_S / 60:.0f} minutes: {trouble.message}",
                hint="join again when it is back",
            ) from trouble
        pause_s = backoff.failed()
        if backoff is self._unreachable:  # each of its short delays would be another line of a log
            self._show(f"{trouble.message}; trying again")
        else:
            self._show(f"{trouble.message}; trying again in {pause_s:.0f} s")
        self._sleep(pause_s)

    def _come_online(self, client: AgentClient, access: ClusterAccess, limits: NodeLimits) -> None:
        assert self._children is not None
        if self._node is None or self._node.end is not None:
            self._stop_node()
            known = NodeAccess(access.ray_address, access.token, access.labels, access.environment)
            try:
                ports = self._take_ports(client, access, limits)
                self._show("starting the Ray node")
                self._node = self._start(self._children, known, limits, ports, address=self._options.address)
            except NotAuthorized as refused:  # for example, the token was just replaced
                raise ContributorLost(refused.message, hint="it asks for the new token") from refused
            self._node_started = time.monotonic()
        try:
            client.online(node_id=self._node.node_id, address=self._node.address)
        except Unavailable as unavailable:  # for example, the head is being replaced
            raise ContributorLost(unavailable.message, hint="it connects again by itself") from unavailable
        self._show("being measured")

    def _take_ports(self, client: AgentClient, access: ClusterAccess, limits: NodeLimits) -> NodePorts:
        """Reserve ports for the node, and return them when the server and other machines can reach them."""
        options = self._options
        ports = self._ports = NodePorts.take(options.port_range, limits.cpu_threads)
        address = options.address or route_address(access.ray_address.rpartition(":")[0].strip("[]"))
        self._show("checking that others reach this machine")
        try:
            found = require_reachable(client.dial, address, ports.all, options.port_range, self._show)
        except Unavailable as unavailable:
            raise ContributorLost(unavailable.message, hint="it connects again by itself") from unavailable
        self._view = replace(self._view, warnings=(*self._machine_warnings, *found))
        return ports

    def _stop_node(self) -> None:
        if self._node is not None and self._children is not None:
            self._children.stop(self._node.child, self._grace_s)
            self._node = None
        if self._ports is not None:
            self._ports.release()
            self._ports = None

    def leave(self, client: AgentClient) -> None:
        """Ask the server to release this machine, wait at most `JoinOptions.leave_within_s`, and stop the Ray node.

        If the server does not answer, the node is not stopped here.
        """
        self._show(f"draining; {self._refusal}" if self._refusal else "draining")
        deadline = time.monotonic() + self._options.leave_within_s
        try:
            state = client.leave().state
            if state is ContributorState.draining:
                self._show("draining; its shards move to other machines first")
            while state is ContributorState.draining and time.monotonic() < deadline:
                self._sleep(0.2)
                work = client.heartbeat()
                self._count(work)
                state = work.state
        except ShareComputeError as failure:
            self._show(f"left; the server was not notified: {failure.message}")
        else:
            if state is ContributorState.draining:
                # The job did not release the machine in time, so the node gets only a short grace period.
                self._grace_s = _LEAVE_GRACE_S
                self._show("draining; a job still holds it, and loses it")
            self._stop_node()
            self._view = replace(self._view, work=None, utilization=None)
            self._show(f"left; {self._refusal}" if self._refusal else "left")
