"""Measures contributors whose node came up, one host's one after the other, and makes them ready."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence

from share_compute.errors import Conflict, ShareComputeError
from share_compute.jobs.states import ContributorState
from share_compute.store import ContributorRecord, Store
from share_compute.topology import HEAD
from share_compute_api.supervision.live_topology import require_sound, sound_links
from share_compute_api.supervision.machines import MEASURE_S, Machine, Start

_SIBLINGS_S = 10.0
_SIBLINGS_POLL_S = 0.2
_PEERS = 4
_log = logging.getLogger(__name__)


class Measurements:
    """Keeps the machines of the pool, and measures each once at a time.

    Args:
        store: where contributors are.
        start: starts a machine.
        timeout_s: how long one measurement may take.
        relink_s: time between two measurements of dead links.
    """

    def __init__(
        self,
        store: Store,
        start: Start,
        timeout_s: float = MEASURE_S,
        relink_s: float = 30.0,
    ) -> None:
        self._timeout_s = timeout_s
        self._relink_s = relink_s
        self._store = store
        self._start = start
        # Ray ends an actor when its last handle goes.
        self._machines: dict[str, Machine] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._relinking: asyncio.Task[None] | None = None
        self._relinked_s = -math.inf
        """By the loop's clock."""
        self._head_lock = asyncio.Lock()
        self._host_locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """By address: contributors of one host are measured in turn, since they would slow each other down."""

    def begin(self, contributor_id: str) -> None:
        """Measure a contributor whose node just came up; ends an earlier try, which was for an earlier node."""
        earlier = self._tasks.get(contributor_id)
        if earlier is not None:
            earlier.cancel()
        task = asyncio.create_task(self._measure_or_give_up(contributor_id, earlier))
        self._tasks[contributor_id] = task
        task.add_done_callback(lambda ended: self._ended(contributor_id, ended))

    def is_known(self, contributor_id: str) -> bool:
        """Return whether this server measured it, or does so now."""
        return contributor_id in self._machines or contributor_id in self._tasks

    def is_measuring(self, contributor_id: str) -> bool:
        """Return whether it is measured now, or waits for its turn."""
        return contributor_id in self._tasks

    def forgetting(self, contributor_id: str) -> Callable[[], None]:
        """Return what lets go of all that is held of a contributor now; what begins later stays."""
        task, machine = self._tasks.get(contributor_id), self._machines.get(contributor_id)

        def forget() -> None:
            is_the_same = self._tasks.get(contributor_id) is task
            if task is not None:
                task.cancel()
            self._drop(contributor_id, self._machines.get(contributor_id) if is_the_same else machine)

        return forget

    def look_at_dead_links(self, ready: Sequence[ContributorRecord]) -> None:
        """Measure dead links between these again, now and then: what cut them may be over.

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

    async def close(self) -> None:
        """End all that is measured."""
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
            _log.error("contributor %s: giving it up failed", contributor_id, exc_info=failure)

    async def _measure_or_give_up(self, contributor_id: str, earlier: asyncio.Task[None] | None) -> None:
        if earlier is not None:
            await asyncio.wait([earlier])
        record = await asyncio.to_thread(self._store.contributors.get, contributor_id)
        if record.state is not ContributorState.probing or record.node_id is None:
            return  # it left, or lost its node again
        try:
            await self._measure(record, record.node_id)
        except TimeoutError:
            await self._give_up(record, f"it could not be measured within {self._timeout_s:g} s")
        except Conflict as left_meanwhile:
            _log.info("%s", left_meanwhile.message)
            self._drop(record.id, self._machines.get(record.id))
        except ShareComputeError as failure:
            await self._give_up(record, failure.message)
        except Exception as failure:  # noqa: BLE001 - it must not stay in probing for ever, and the log has it
            _log.exception("contributor %s could not be measured", record.name)
            await self._give_up(record, f"it could not be measured: {type(failure).__name__}")

    async def _measure(self, record: ContributorRecord, node_id: str) -> None:
        self._drop(record.id, self._machines.get(record.id))
        async with self._host_locks[record.address or record.id], asyncio.timeout(self._timeout_s):
            machine = self._machines[record.id] = await self._start(record.id, node_id)
            await self._wait_for_siblings(record)
            devices = await machine.probe(record.limits)
            require_sound(devices, record.name, record.limits.get("memory_bytes"))
            links = sound_links(await machine.measure_links(await self._peers(record)), record.name)
        await asyncio.to_thread(self._store.contributors.ready, record.id, capacity=devices, links=links)

    async def _wait_for_siblings(self, record: ContributorRecord) -> None:
        """Wait, not for long, while other contributors of the same host start: they would spoil the figures."""
        deadline = asyncio.get_running_loop().time() + _SIBLINGS_S
        while asyncio.get_running_loop().time() < deadline:
            starting = await asyncio.to_thread(self._store.contributors.list, [ContributorState.joining])
            if not any(sibling.host == record.host for sibling in starting):
                return
            await asyncio.sleep(_SIBLINGS_POLL_S)

    async def _peers(self, record: ContributorRecord) -> list[tuple[str, Machine]]:
        ready = await asyncio.to_thread(self._store.contributors.list, [ContributorState.ready])
        others = [
            (machine.id, self._machines[machine.id])
            for machine in ready
            if machine.id in self._machines and machine.id != record.id
        ]
        return [(HEAD, await self._head()), *random.sample(others, min(_PEERS, len(others)))]

    async def _head(self) -> Machine:
        async with self._head_lock:
            head = self._machines.get(HEAD)
            if head is None or not await head.is_alive():
                head = self._machines[HEAD] = await self._start(HEAD, None)
            return head

    async def _give_up(self, record: ContributorRecord, reason: str) -> None:
        _log.warning("contributor %s: %s", record.name, reason)
        self._drop(record.id, self._machines.get(record.id))
        # It may have come back with a new node meanwhile, or left: then this changes nothing.
        await asyncio.to_thread(self._store.contributors.set_state, record, ContributorState.lost, reason)

    def _drop(self, contributor_id: str, machine: Machine | None) -> None:
        if machine is not None and self._machines.get(contributor_id) is machine:
            del self._machines[contributor_id]
            machine.kill()


def _dead_links(record: ContributorRecord) -> list[str]:
    """Return the ids of the peers that a contributor did not reach when its links were measured."""
    return [link.target for link in record.links or () if link.is_dead]
