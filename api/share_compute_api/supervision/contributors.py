"""Watches contributors: measures those that come online, and notices those that are gone."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import defaultdict
from datetime import timedelta
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from share_compute.errors import Conflict, ContributorLost, ShareComputeError
from share_compute.jobs.states import ContributorState
from share_compute.store import ContributorRecord, Store
from share_compute_actors.contributor import HEAD, read_devices, read_links, start_contributor
from share_compute_api.supervision import ClusterInfo

_LOOK_S = 1.0
_MEASURE_TIMEOUT_S = 150.0
_SIBLINGS_S = 10.0
_SIBLINGS_POLL_S = 0.2
_JOINING_LIMIT = timedelta(seconds=180)
_PEERS = 4
_LIVE = (
    ContributorState.joining,
    ContributorState.probing,
    ContributorState.ready,
    ContributorState.draining,
)
_log = logging.getLogger(__name__)

# Ray ends an actor when its last handle goes; like the connection to Ray, they belong to the whole process.
_actors: dict[str, Any] = {}
_measuring: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
"""By address: contributors of one host are measured in turn, since they would slow each other down."""


async def contributor_online(store: Store, cluster: ClusterInfo, contributor_id: str) -> None:
    """Measure a contributor whose node just came up and make it ready; lost, with a reason, if that fails."""
    record = await asyncio.to_thread(store.contributors.get, contributor_id)
    try:
        async with asyncio.timeout(_MEASURE_TIMEOUT_S):
            await _measure(store, cluster, record)
    except TimeoutError:
        await _give_up(store, record, f"it could not be measured within {_MEASURE_TIMEOUT_S:.0f} s")
    except Conflict as left_meanwhile:
        _log.info("%s", left_meanwhile.message)
        _forget(contributor_id)
    except ShareComputeError as failure:
        await _give_up(store, record, failure.message)


async def _measure(store: Store, cluster: ClusterInfo, record: ContributorRecord) -> None:
    assert record.node_id is not None
    _forget(record.id)
    if HEAD not in _actors:
        _actors[HEAD] = start_contributor(HEAD, cluster.head_node_id)
    actor = _actors[record.id] = start_contributor(record.id, record.node_id)
    try:
        async with _measuring[record.address or record.id]:
            await _wait_for_siblings(store, record)
            devices = await actor.probe.remote(
                memory_bytes=record.limits["memory_bytes"],
                cpu_threads=record.limits["cpu_threads"],
                device=record.limits["device"],
            )
            links = await actor.measure_links.remote(await _peers(store, record))
    except RayError as failure:
        raise _translated(failure, record.name) from failure
    await asyncio.to_thread(
        store.contributors.ready, record.id, capacity=read_devices(devices), links=read_links(links)
    )


async def _wait_for_siblings(store: Store, record: ContributorRecord) -> None:
    """Wait, not for long, while other contributors of the same host start: they would spoil the figures."""
    deadline = asyncio.get_running_loop().time() + _SIBLINGS_S
    while asyncio.get_running_loop().time() < deadline:
        starting = await asyncio.to_thread(store.contributors.list, [ContributorState.joining])
        if not any(sibling.host == record.host for sibling in starting):
            return
        await asyncio.sleep(_SIBLINGS_POLL_S)


async def _peers(store: Store, record: ContributorRecord) -> list[tuple[str, Any]]:
    ready = await asyncio.to_thread(store.contributors.list, [ContributorState.ready])
    others = [machine.id for machine in ready if machine.id in _actors and machine.id != record.id]
    sample = random.sample(others, min(_PEERS, len(others)))
    return [(peer, _actors[peer]) for peer in (HEAD, *sample)]


def _translated(failure: RayError, name: str) -> ShareComputeError:
    cause = failure.cause if isinstance(failure, RayTaskError) else None
    if isinstance(cause, ShareComputeError):
        return cause
    first = (str(failure).strip().splitlines() or [type(failure).__name__])[0]
    return ContributorLost(
        f"{name} was lost while it was measured: {first}", mend="let it join again", machine=name
    )


async def _give_up(store: Store, record: ContributorRecord, reason: str) -> None:
    _log.warning("contributor %s: %s", record.name, reason)
    _forget(record.id)
    current = await asyncio.to_thread(store.contributors.get, record.id)
    # It may have come back with a new node meanwhile, and left states are final.
    if current.state is ContributorState.probing and current.node_id == record.node_id:
        await asyncio.to_thread(store.contributors.set_state, record.id, ContributorState.lost, reason)


def _forget(contributor_id: str) -> None:
    actor = _actors.pop(contributor_id, None)
    if actor is not None and ray.is_initialized():
        ray.kill(actor)


async def supervise_contributors(store: Store, cluster: ClusterInfo) -> None:
    """Mark contributors left or lost when they are; runs until cancelled."""
    del cluster  # the connection to Ray belongs to the process
    await asyncio.to_thread(_mark_ghosts, store)
    while True:
        await asyncio.to_thread(_look, store)
        await asyncio.sleep(_LOOK_S)


def _mark_ghosts(store: Store) -> None:
    """What an earlier server knew is lost until its agent comes back, which it does by itself."""
    for record in store.contributors.list(_LIVE):
        if record.id in _actors or record.state is ContributorState.joining:
            continue
        if record.state is ContributorState.draining:
            store.contributors.set_state(
                record.id, ContributorState.left, "it left while the server was away"
            )
        else:
            reason = "the server was restarted; waiting for the machine to come back"
            store.contributors.set_state(record.id, ContributorState.lost, reason)


def _look(store: Store) -> None:
    # Rows first: a node that comes up between the two questions is then seen as alive.
    records = store.contributors.list(_LIVE)
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]} if records else set()
    for record in records:
        change = _change(record, record.node_id in alive, store)
        if change is not None:
            state, reason = change
            store.contributors.set_state(record.id, state, reason)
            _forget(record.id)
            _log.info("contributor %s is %s: %s", record.name, state.value, reason)


def _change(record: ContributorRecord, is_alive: bool, store: Store) -> tuple[ContributorState, str] | None:
    if record.state is ContributorState.joining:
        if store.clock() - record.last_seen_at > _JOINING_LIMIT:
            return ContributorState.lost, f"its Ray node did not come up within {_JOINING_LIMIT.seconds} s"
        return None
    if record.state is ContributorState.draining:
        if record.job_id is None or not is_alive:
            return ContributorState.left, record.reason
        return None
    if not is_alive:
        return ContributorState.lost, "its Ray node is dead or does not answer"
    return None
