"""Routes for a contributor's agent. The agent joins with an invite; its later requests carry the contributor's key."""

from __future__ import annotations

import asyncio
from datetime import datetime
from ipaddress import IPv4Address, IPv6Address
from time import monotonic
from typing import Any

from anyio import to_thread
from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool

from share_compute.errors import ClockSkew, Unavailable, UserError
from share_compute.lifecycle.states import ContributorState
from share_compute.planning.plan import layer_span
from share_compute.store import ContributorRecord
from share_compute.store.records import HeldRecord
from share_compute_actors.machine.preflight import MOST_CLOCK_SKEW_S
from share_compute_actors.machine.reach import closed_ports
from share_compute_api.cluster.cluster import ClusterInfo
from share_compute_api.connection.private import is_from_here, require_private
from share_compute_api.control import LABEL
from share_compute_api.control.machines.nodes import check_node, unknown_node
from share_compute_api.schemas.agents import (
    SERVER,
    ClosedPorts,
    ClusterAccess,
    ContributorWork,
    DialReport,
    DialRequest,
    HeartbeatRequest,
    Joined,
    JoinRequest,
    NodePlace,
    OnlineRequest,
    Preflight,
    PreflightRequest,
    RejoinRequest,
    SiblingRequest,
)
from share_compute_api.schemas.versions import check_versions, local_versions
from share_compute_api.server.auth import SelfAgent, SelfContributor
from share_compute_api.server.context import Context, InContext
from share_compute_api.server.problems import documented

router = APIRouter(prefix="/contributors", tags=["agents"])

NODE_PATIENCE_S = 5.0
"""Longest wait, in seconds, for a node that just registered to appear in Ray's table of nodes."""
_NODE_POLL_S = 0.2


@router.post("/preflight", operation_id="preflight", responses=documented(401, 403, 409, 410, 429, 503))
def preflight(wanted: PreflightRequest, context: InContext, request: Request) -> Preflight:
    """Check a machine's invite and versions, and return the address of the Ray head; the invite stays unused."""
    require_private(request, context.settings)
    cluster = _cluster(context)
    context.guesses.check(request, wanted.invite, lambda: context.store.invites.check(wanted.invite))
    check_versions(local_versions(), wanted.versions)
    return Preflight(ray_address=cluster.ray_address)


@router.post("", status_code=201, operation_id="join", responses=documented(401, 403, 409, 410, 429, 503))
def join(wanted: JoinRequest, context: InContext, request: Request) -> Joined:
    """Let a machine join. The invite counts as used only if every check passes."""
    require_private(request, context.settings)
    cluster = _cluster(context)
    context.guesses.check(request, wanted.invite, lambda: context.store.invites.check(wanted.invite))
    check_versions(local_versions(), wanted.versions)
    _check_clock(wanted.clock, context)
    record, key = context.store.contributors.join(wanted.invite, **_facts(wanted))
    return Joined(contributor_id=record.id, contributor_key=key, cluster=_access(cluster, record.id))


@router.post(
    "/{contributor_id}/siblings",
    status_code=201,
    operation_id="joinSibling",
    responses=documented(401, 403, 409, 503),
)
def join_sibling(
    wanted: SiblingRequest, contributor: SelfContributor, context: InContext, request: Request
) -> Joined:
    """Let another device of a contributor's host join, as a separate contributor."""
    require_private(request, context.settings)
    cluster = _cluster(context)
    check_versions(local_versions(), wanted.versions)
    _check_clock(wanted.clock, context)
    record, key = context.store.contributors.join_sibling(contributor.id, **_facts(wanted))
    return Joined(contributor_id=record.id, contributor_key=key, cluster=_access(cluster, record.id))


@router.post("/{contributor_id}/dial", operation_id="dial", responses=documented(401, 403, 503))
async def dial(
    wanted: DialRequest, contributor: SelfContributor, context: InContext, request: Request
) -> DialReport:
    """Test whether the server and some other machines can reach a machine's ports, before its Ray node starts.

    A port counts as open only if it sends the machine's handshake, so the route cannot scan ports of other programs.
    """
    if context.cluster is None or context.measurements is None:
        raise _no_cluster()
    if not _may_dial(wanted.address, request):
        raise UserError(
            f"other machines cannot reach {wanted.address}",
            hint="give an IP address of this machine that they reach, with --address",
        )
    address, handshake = str(wanted.address), bytes.fromhex(wanted.handshake)
    async with context.dials:
        mine, found = await asyncio.gather(
            asyncio.to_thread(closed_ports, address, wanted.ports, handshake),
            context.measurements.dial(contributor, address, wanted.ports, wanted.handshake),
        )
    named = await run_in_threadpool(lambda: {one: context.store.contributors.get(one) for one in found})
    rows = [ClosedPorts(source=SERVER, ports=mine)]
    rows += [ClosedPorts(source=named[one].name, ports=tuple(sorted(ports))) for one, ports in found.items()]
    nodes = {node.node_id: node for node in await context.cluster.nodes()} if named else {}
    places = [
        NodePlace(name=record.name, address=node.address, port=node.port)
        for record in named.values()
        if record.node_id is not None and (node := nodes.get(record.node_id)) is not None
    ]
    return DialReport(closed=tuple(rows), nodes=tuple(places))


def _may_dial(address: IPv4Address | IPv6Address, request: Request) -> bool:
    """Return whether `dial` may connect to an address; loopback only for requests from the server's own host."""
    if address.is_unspecified or address.is_multicast or address.is_reserved:
        return False
    return not address.is_loopback or is_from_here(request)


@router.post("/{contributor_id}/online", operation_id="online", responses=documented(401, 403, 409, 503))
async def online(node: OnlineRequest, contributor: SelfContributor, context: InContext) -> ContributorRecord:
    """Report that the machine's Ray node runs. The server checks the node at the Ray head, then measures the machine.

    A machine whose node is the same as at its last measurement keeps its figures.
    """
    if context.measurements is None:
        raise _no_cluster()
    await _check_node(node, contributor, context)
    record = await run_in_threadpool(
        context.store.contributors.online, contributor.id, node_id=node.node_id, address=node.address
    )
    was_measured = contributor.node_id == node.node_id and contributor.measured_at is not None
    context.measurements.begin(contributor.id, keeps_figures=was_measured)
    return record


@router.post("/{contributor_id}/heartbeat", operation_id="heartbeat", responses=documented(401, 403))
async def heartbeat(
    agent: SelfAgent, context: InContext, found: HeartbeatRequest | None = None
) -> ContributorWork:
    """Record a heartbeat; return the machine's current work and whether the machine should leave.

    Every 10 s a heartbeat has a body with the machine's utilization. The answers to these, and those to a machine that
    leaves, say what the machine contributed.
    """
    context.store.heartbeats.note(agent.id)
    if found is not None:
        context.utilization.add(agent.id, found.utilization, context.store.clock())
    held, leaving = agent.held, agent.state in (ContributorState.draining, ContributorState.left)
    is_counted = found is not None or leaving
    total, limiter = context.store.work.total, context.heartbeats
    return ContributorWork(
        state=agent.state,
        reason=agent.reason,
        job=held.job_id if held else None,
        job_name=held.name if held and held.job_id else None,
        deployment=held.name if held and held.deployment_id else None,
        shard=_shard(held),
        tokens_per_s=agent.tokens_per_s if agent.tokens_per_s is not None else _served(context, held),
        flops_per_s=agent.flops_per_s,
        head_latency_s=agent.head_latency_s,
        head_bytes_per_s=agent.head_bytes_per_s,
        contributed=await to_thread.run_sync(total, agent.id, limiter=limiter) if is_counted else None,
        wanted="leave" if leaving else "run",
    )


@router.post("/{contributor_id}/rejoin", operation_id="rejoin", responses=documented(401, 403, 409, 503))
def rejoin(
    contributor: SelfContributor, context: InContext, request: Request, wanted: RejoinRequest | None = None
) -> ClusterAccess:
    """Let a machine rejoin after a restart of the Ray head (without a body) or of its own agent (with a body)."""
    require_private(request, context.settings)
    cluster = _cluster(context)
    if wanted is None:
        return _access(cluster, context.store.contributors.rejoin(contributor.id).id)
    check_versions(local_versions(), wanted.versions)
    _check_clock(wanted.clock, context)
    record = context.store.contributors.rejoin(
        contributor.id, versions=wanted.versions.model_dump(), limits=wanted.limits.model_dump()
    )
    return _access(cluster, record.id)


@router.post("/{contributor_id}/leave", operation_id="leave", responses=documented(401, 403))
def leave(contributor: SelfContributor, context: InContext) -> ContributorRecord:
    """Drain the machine at its owner's request: the machine hands over its work, and then leaves."""
    return context.store.contributors.leave(contributor.id)


async def _check_node(node: OnlineRequest, contributor: ContributorRecord, context: Context) -> None:
    """Wait until Ray lists the node, then check the node.

    Raises:
        Conflict: the node is the head's or another machine's, has another address, or has fewer resources than the
            contributor lends.
        ContributorLost: Ray did not list the node as alive in time.
        Unavailable: the server runs without a cluster.
    """
    cluster = context.cluster
    if cluster is None:
        raise _no_cluster()
    head_node_id = cluster.info.head_node_id
    deadline_s = monotonic() + NODE_PATIENCE_S
    while True:
        nodes = await cluster.nodes()
        if check_node(contributor, node.node_id, node.address, nodes, head_node_id=head_node_id):
            return
        if monotonic() > deadline_s:
            raise unknown_node(contributor, node.node_id)
        await asyncio.sleep(_NODE_POLL_S)


def _check_clock(clock: datetime, context: Context) -> None:
    skew_s = (clock - context.store.clock()).total_seconds()
    if abs(skew_s) > MOST_CLOCK_SKEW_S:
        raise ClockSkew(
            f"the joining machine's clock is {abs(skew_s):.0f} s {'ahead' if skew_s > 0 else 'behind'}",
            hint="set both clocks by NTP, e.g. timedatectl set-ntp true",
            details={"skew_s": skew_s, "most_s": MOST_CLOCK_SKEW_S},
        )


def _cluster(context: Context) -> ClusterInfo:
    if context.cluster is None:
        raise _no_cluster()
    if context.cluster.is_rotating:
        raise Unavailable("the cluster's token is being changed", hint="try again in a minute")
    if context.cluster.trouble is not None:
        raise context.cluster.unusable()
    return context.cluster.info


def _no_cluster() -> Unavailable:
    return Unavailable(
        "this server runs without a Ray cluster; no machine can join",
        hint="start it with `share-compute up`",
    )


def _access(cluster: ClusterInfo, contributor_id: str) -> ClusterAccess:
    return ClusterAccess(
        ray_address=cluster.ray_address,
        token=cluster.token,
        labels={LABEL: contributor_id},
        environment=dict(cluster.environment),
    )


def _facts(wanted: SiblingRequest) -> dict[str, Any]:
    """Return the facts about a joining machine that the store records."""
    return wanted.model_dump(include={"name", "host", "versions", "limits"})


def _served(context: Context, held: HeldRecord | None) -> float | None:
    """Return the tokens per second of all replicas of the deployment to which a machine is leased."""
    if held is None or held.deployment_id is None or context.deployments is None:
        return None
    return sum(status.tokens_per_s for status in context.deployments.statuses(held.deployment_id))


def _shard(held: HeldRecord | None) -> str | None:
    if held is None or held.start is None or held.stop is None:
        return None
    return f"{layer_span(held.start, held.stop)} of {held.num_layers}"
