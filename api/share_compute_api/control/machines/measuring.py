"""Measures contributors when their Ray nodes come up, and again while they are idle; one per host at a time."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from share_compute.errors import Conflict, ShareComputeError
from share_compute.lifecycle.states import HERE, ContributorState
from share_compute.store import ContributorRecord, Store
from share_compute.topology import HEAD, MOST_DEVICES
from share_compute_api.control.machines.live_topology import require_sound, sound_links
from share_compute_api.control.machines.machines import MEASURE_S, Machine, Start

_SIBLINGS_S = 10.0
_SIBLINGS_POLL_S = 0.2
_PEERS = 4
"""Maximum number of machines on other hosts to which the links of a machine are measured, in addition to the head."""
_DIALLERS = 3
"""Maximum number of machines that test the ports of a machine that is about to join."""
AGAIN = timedelta(minutes=30)
"""Age of an idle machine's figures at which the machine is measured again."""
_RETRY = timedelta(seconds=30)
"""Minimum time between two attempts to measure an idle machine again."""
_MEASURABLE = (ContributorState.ready, ContributorState.quarantined)
_log = logging.getLogger(__name__)


class Share(NamedTuple):
    """A machine's share of its host's processors."""

    threads: int
    """Threads that the machine computes with."""
    beside: int
    """Threads with which the host's other machines compute, limited to the remaining processors."""


def share_of(record: ContributorRecord, here: Iterable[ContributorRecord]) -> Share:
    """Return a machine's share of its host's processors.

    If several machines compute on the host, each of their devices gets at most an equal part of the processors, and at
    least one thread. Otherwise the machine gets all threads that it lends.

    Args:
        record: the machine.
        here: all machines that are present.
    """
    processors = int(record.limits.get("host_threads") or 0)
    others = [
        one
        for one in here
        if one.id != record.id and record.host_id and one.host_id == record.host_id and _uses_cpu(one)
    ]
    if not others or not processors or not _uses_cpu(record):
        return Share(record.lent_threads, 0)
    part = max(1, processors // (record.lent_devices + sum(one.lent_devices for one in others)))
    threads = min(record.lent_threads, part * record.lent_devices)
    wanted = sum(min(one.lent_threads, part * one.lent_devices) for one in others)
    return Share(threads, max(0, min(wanted, processors - threads)))


def _uses_cpu(record: ContributorRecord) -> bool:
    return record.lent_kind == "cpu"


class Measurements:
    """Measures machines, and keeps the actors that measure them.

    Args:
        store: the store of contributors.
        start: starts a machine's measuring actor.
        timeout_s: time limit for one measurement, in seconds.
        relink_s: seconds between two measurements of dead links.
        actor_after_s: seconds between the return of a machine that keeps its figures and the start of its actor.
    """

    def __init__(
        self,
        store: Store,
        start: Start,
        timeout_s: float = MEASURE_S,
        relink_s: float = 30.0,
        actor_after_s: float = 5.0,
    ) -> None:
        self._timeout_s = timeout_s
        self._actor_after_s = actor_after_s
        self._relink_s = relink_s
        self._store = store
        self._start = start
        # Ray ends an actor when its last handle is deleted, so the handles are kept here.
        self._machines: dict[str, Machine] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._relinking: asyncio.Task[None] | None = None
        self._relinked_s = -math.inf
        """Time of the last measurement of dead links, on the event loop's clock."""
        self._head_lock = asyncio.Lock()
        self._host_locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """Host key -> lock, so that the contributors of a host are measured one at a time."""
        self._wanted: set[str] = set()
        """Contributors to measure again as soon as they are idle."""
        self._tried_at: dict[str, datetime] = {}

    def want(self, contributor_id: str) -> None:
        """Schedule a measurement, to start when all contributors of the host are idle; callable from any thread."""
        self._wanted.add(contributor_id)
        self._tried_at.pop(contributor_id, None)

    def measure_idle(self, here: Sequence[ContributorRecord]) -> None:
        """Start to measure machines that are due, at most one per host, on hosts whose machines are all idle.

        A machine is due when `want` was called for it, when its figures are old, or when its share of its host's
        processors differs from the share during the last measurement.

        Args:
            here: all machines that are present.
        """
        hosts: dict[str, list[ContributorRecord]] = defaultdict(list)
        for record in here:
            hosts[_host(record)].append(record)
        for machines in hosts.values():
            if all(self._is_idle(machine) for machine in machines):
                due = next((machine for machine in machines if self._is_due(machine, machines)), None)
                if due is not None:
                    self._tried_at[due.id] = self._store.clock()
                    self.begin(due.id)

    def _is_idle(self, record: ContributorRecord) -> bool:
        return record.state in _MEASURABLE and not record.is_leased and not self.is_measuring(record.id)

    def _is_due(self, record: ContributorRecord, machines: Sequence[ContributorRecord]) -> bool:
        now = self._store.clock()
        tried_at = self._tried_at.get(record.id)
        if tried_at is not None and now - tried_at < _RETRY:
            return False
        if record.id in self._wanted or record.measured_at is None or now - record.measured_at >= AGAIN:
            return True
        return (record.threads or record.lent_threads) != share_of(record, machines).threads

    def begin(self, contributor_id: str, *, keeps_figures: bool = False) -> None:
        """Start to measure a contributor whose node just came up, or that is idle; cancel its earlier measurement.

        Args:
            contributor_id: id of the machine.
            keeps_figures: whether to make the machine ready with its last figures instead of measuring it. Set for a
                machine whose Ray node is unchanged.
        """
        earlier = self._tasks.get(contributor_id)
        if earlier is not None:
            earlier.cancel()
        task = asyncio.create_task(
            self._measure_or_give_up(contributor_id, earlier, keeps_figures=keeps_figures)
        )
        self._tasks[contributor_id] = task
        task.add_done_callback(lambda ended: self._ended(contributor_id, ended))

    def is_known(self, contributor_id: str) -> bool:
        """Return whether this process has a measuring actor on the contributor, or is measuring the contributor."""
        return contributor_id in self._machines or contributor_id in self._tasks

    def is_measuring(self, contributor_id: str) -> bool:
        """Return whether a measurement of the contributor runs or waits for its turn."""
        return contributor_id in self._tasks

    def forgetting(self, contributor_id: str) -> Callable[[], None]:
        """Return a function that ends the current actor and measurement of the contributor, but not later ones."""
        task, machine = self._tasks.get(contributor_id), self._machines.get(contributor_id)

        def forget() -> None:
            is_the_same = self._tasks.get(contributor_id) is task
            if task is not None:
                task.cancel()
            self._drop(contributor_id, self._machines.get(contributor_id) if is_the_same else machine)

        return forget

    def measure_dead_links(self, ready: Sequence[ContributorRecord]) -> None:
        """Start to measure dead links between ready contributors again, at most every ``relink_s`` seconds.

        Args:
            ready: all contributors that are ready.
        """
        now_s = asyncio.get_running_loop().time()
        if self._relinking is not None and not self._relinking.done():
            return
        if now_s - self._relinked_s < self._relink_s or not any(map(_dead_links, ready)):
            return
        self._relinked_s = now_s
        self._relinking = asyncio.create_task(self._relink(ready))

    async def _relink(self, ready: Sequence[ContributorRecord]) -> None:
        names = {record.id: record.name for record in ready}
        for record in ready:
            machine = self._machines.get(record.id)
            peers = [(one, self._machines[one]) for one in _dead_links(record) if one in self._machines]
            if machine is None or not peers:
                continue
            try:
                async with asyncio.timeout(self._timeout_s):
                    links = sound_links(await machine.measure_links(peers), record.name)
                alive = [link for link in links if not link.is_dead]
                if alive:
                    await asyncio.to_thread(self._store.contributors.relink, record.id, alive)
            except (TimeoutError, ShareComputeError) as failure:
                _log.info(
                    "contributor %s: its dead links could not be measured again: %s", record.name, failure
                )
            else:
                for link in alive:
                    other = names.get(link.target, link.target)
                    _log.info("contributors %s and %s reach each other again", record.name, other)

    async def dial(
        self, record: ContributorRecord, address: str, ports: Sequence[int], handshake: str
    ) -> dict[str, frozenset[int]]:
        """Have a few machines at other addresses test a joining machine's ports before its Ray node starts.

        Args:
            record: the joining machine.
            address: the machine's IP address.
            ports: the ports that the machine listens on.
            handshake: bytes that the machine sends on each connection, in hexadecimal.

        Returns:
            Id of the testing contributor -> ports that did not send the handshake.
        """
        ready = await asyncio.to_thread(self._store.contributors.list, [ContributorState.ready])
        others = [
            one.id
            for one in ready
            if one.id in self._machines and one.id != record.id and one.address != address
        ]
        sample = random.sample(others, min(_DIALLERS, len(others)))
        answers = await asyncio.gather(
            *(self._machines[one].dial(address, ports, handshake) for one in sample), return_exceptions=True
        )
        # The failure of a testing machine says nothing about the joining machine.
        return {
            one: found for one, found in zip(sample, answers, strict=True) if isinstance(found, frozenset)
        }

    async def close(self) -> None:
        """Cancel all measurements, and wait until they have ended."""
        tasks = list(self._tasks.values())
        if self._relinking is not None:
            tasks.append(self._relinking)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, contributor_id: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(contributor_id) is task:
            del self._tasks[contributor_id]
        if not task.cancelled() and (failure := task.exception()) is not None:
            _log.error("contributor %s: its state could not be recorded", contributor_id, exc_info=failure)

    async def _measure_or_give_up(
        self, contributor_id: str, earlier: asyncio.Task[None] | None, *, keeps_figures: bool
    ) -> None:
        if earlier is not None:
            await asyncio.wait([earlier])
        record = await asyncio.to_thread(self._store.contributors.get, contributor_id)
        if record.state not in (ContributorState.probing, *_MEASURABLE) or record.node_id is None:
            return  # the contributor left, or its node was lost again meanwhile
        try:
            if keeps_figures:
                await self._take_back(record, record.node_id)
            else:
                await self._measure(record, record.node_id)
        except TimeoutError:
            await self._give_up(record, f"it could not be measured within {self._timeout_s:g} s")
        except Conflict as left_meanwhile:
            _log.info("%s", left_meanwhile.message)
            self._drop(record.id, self._machines.get(record.id))
        except ShareComputeError as failure:
            await self._give_up(record, failure.message)
        except Exception as failure:  # noqa: BLE001 - the state must not stay "probing"; the log has the exception
            _log.exception("contributor %s could not be measured", record.name)
            await self._give_up(record, f"it could not be measured: {type(failure).__name__}")

    async def _take_back(self, record: ContributorRecord, node_id: str) -> None:
        """Make a machine ready, or quarantined again, with its stored measurements; then start its measuring actor.

        The actor starts with a delay, because after a restart of the server, processes of deployments and jobs would
        otherwise wait for the processes of all measuring actors.
        """
        self._drop(record.id, self._machines.get(record.id))
        await asyncio.to_thread(self._store.contributors.ready_again, record.id)
        await asyncio.sleep(self._actor_after_s)
        async with asyncio.timeout(self._timeout_s):
            self._machines[record.id] = await self._start(record.id, node_id)

    async def _measure(self, record: ContributorRecord, node_id: str) -> None:
        is_new = record.state is ContributorState.probing
        if is_new:
            self._drop(record.id, self._machines.get(record.id))
        async with self._host_locks[_host(record)], asyncio.timeout(self._timeout_s):
            machine = self._machines.get(record.id)
            if machine is None:
                machine = self._machines[record.id] = await self._start(record.id, node_id)
            await self._wait_for_siblings(record)
            here = await asyncio.to_thread(self._store.contributors.list, HERE)
            share = share_of(record, here)
            devices = await machine.probe({**record.limits, "cpu_threads": share.threads}, share.beside)
            require_sound(devices, record.name, record.limits.get("memory_bytes"))
            links = sound_links(await machine.measure_links(await self._peers(record)), record.name)
        if not is_new and (await asyncio.to_thread(self._store.contributors.get, record.id)).is_leased:
            return  # a job that started during the measurement has distorted the figures
        self._wanted.discard(record.id)
        await asyncio.to_thread(
            self._store.contributors.ready,
            record.id,
            capacity=devices,
            links=links,
            threads=share.threads,
        )

    async def _wait_for_siblings(self, record: ContributorRecord) -> None:
        """Wait up to `_SIBLINGS_S` seconds until no contributor of the host is joining; joins distort the figures."""
        deadline = asyncio.get_running_loop().time() + _SIBLINGS_S
        while asyncio.get_running_loop().time() < deadline:
            starting = await asyncio.to_thread(self._store.contributors.list, [ContributorState.joining])
            if not any(_computer(sibling) == _computer(record) for sibling in starting):
                return
            await asyncio.sleep(_SIBLINGS_POLL_S)

    async def _peers(self, record: ContributorRecord) -> list[tuple[str, Machine]]:
        ready = await asyncio.to_thread(self._store.contributors.list, [ContributorState.ready])
        others = [one for one in ready if one.id in self._machines and one.id != record.id]
        inside = [one for one in others if _is_beside(one, record)]
        outside = [one for one in others if one not in inside]
        chosen = [*inside[:MOST_DEVICES], *random.sample(outside, min(_PEERS, len(outside)))]
        peers = [(one.id, self._machines[one.id]) for one in chosen]
        return [(HEAD, await self._head()), *peers]

    async def _head(self) -> Machine:
        async with self._head_lock:
            head = self._machines.get(HEAD)
            if head is None or not await head.is_alive():
                head = self._machines[HEAD] = await self._start(HEAD, None)
            return head

    async def _give_up(self, record: ContributorRecord, reason: str) -> None:
        _log.warning("contributor %s: %s", record.name, reason)
        self._drop(record.id, self._machines.get(record.id))
        if record.state in _MEASURABLE:
            return  # the contributor keeps its earlier figures
        # If the contributor has reconnected with a new node or left meanwhile, this call has no effect.
        await asyncio.to_thread(self._store.contributors.set_state, record, ContributorState.lost, reason)

    def _drop(self, contributor_id: str, machine: Machine | None) -> None:
        if machine is not None and self._machines.get(contributor_id) is machine:
            del self._machines[contributor_id]
            machine.kill()


def _dead_links(record: ContributorRecord) -> list[str]:
    """Return the ids of the peers that could not be reached when the contributor's links were measured."""
    return [link.target for link in record.links or () if link.is_dead]


def _host(record: ContributorRecord) -> str:
    """Return the key of a contributor's host. Contributors with the same key are measured one at a time."""
    return record.host_id or record.address or record.id


def _is_beside(one: ContributorRecord, other: ContributorRecord) -> bool:
    """Return whether two contributors are devices of one host."""
    return one.invited_as == other.invited_as or (bool(one.host_id) and one.host_id == other.host_id)


def _computer(record: ContributorRecord) -> str:
    """Return a key for a contributor's host that does not depend on the contributor's address."""
    return record.host_id or record.host
