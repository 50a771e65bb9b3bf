"""Manages the list of a deployment's replicas: adds, restores and drains replicas to reach the target number."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from itertools import count

from share_compute.lifecycle.deployment_status import ServingStatus
from share_compute_api.control.deployments.interruptions import Interruptions
from share_compute_api.control.deployments.replicas import Slot
from share_compute_api.openai.replica import Replica


class ManagedReplica:
    """One replica: its machines, its failures, and whether the replica is wanted, draining or ending.

    Args:
        number: number of the replica in its deployment.
        stages: requested number of stages; None if the planner decides.
    """

    def __init__(self, number: int, stages: int | None) -> None:
        self.number = number
        self.slot = Slot(stages)
        self.replica: Replica | None = None
        self.offered = frozenset[tuple[str, str | None]]()
        """(id, Ray node) of each machine in the last offer to the replica."""
        self.interruptions = Interruptions()
        """Detects and numbers the periods in which the replica computed nothing."""
        self.failures = 0
        """Number of failures that the replica reported since it was last ready; deaths of its process do not count."""
        self.leaves_since_s: float | None = None
        """Time in seconds at which the replica began to drain; None if it is wanted. A draining replica gets no new
        requests."""
        self.is_standby = False
        """Whether the replica is on standby: it keeps its machines and processes, but not the weights."""
        self.ending: asyncio.Task[None] | None = None
        """Task that terminates the replica's processes; None until `end` is called."""

    @property
    def stays(self) -> bool:
        """Whether the replica is wanted, and is therefore not draining."""
        return self.leaves_since_s is None

    def end(self) -> None:
        """Terminate the replica's processes in the background; the task `ending` is done when they have exited."""
        replica, self.replica = self.replica, None
        self.ending = asyncio.create_task(replica.close() if replica is not None else asyncio.sleep(0))


class ReplicaSet:
    """The replicas of one deployment. A replica keeps its number when its processes are restarted.

    Args:
        stages: requested number of stages of each replica; None if the planner decides.
        drain_s: seconds for a draining replica to finish its sequences; after that, other replicas continue them.
    """

    def __init__(self, stages: int | None, drain_s: float) -> None:
        self._drain_s = drain_s
        self._stages = stages
        self._replicas: list[ManagedReplica] = []

    def __iter__(self) -> Iterator[ManagedReplica]:
        return iter(tuple(self._replicas))

    @property
    def staying(self) -> list[ManagedReplica]:
        """The replicas that are wanted."""
        return [managed for managed in self._replicas if managed.stays]

    @property
    def statuses(self) -> list[ServingStatus]:
        """Last status of each replica that has reported one, including draining replicas."""
        return [managed.slot.status for managed in self._replicas if managed.slot.status is not None]

    def fit(self, wanted: int, now_s: float, ongoing: Callable[[Replica], int]) -> list[ManagedReplica]:
        """Add, restore or drain replicas, so that exactly ``wanted`` replicas are not draining.

        A draining replica whose processes are not being terminated yet is restored before a new one is added. Replicas
        that are not ready are drained first, then replicas with the fewest sequences.

        Args:
            wanted: target number of replicas.
            now_s: the time in seconds.
            ongoing: returns the number of unfinished sequences of a replica.

        Returns:
            The replicas that started to drain or were restored in this call.
        """
        changed: list[ManagedReplica] = []
        while len(self.staying) < wanted:
            back = next((one for one in self._replicas if not one.stays and one.ending is None), None)
            if back is not None:
                back.leaves_since_s = None
                changed.append(back)
            else:
                self._replicas.append(ManagedReplica(self._free_number(), self._stages))

        def loss(managed: ManagedReplica) -> tuple[bool, int, int]:
            has = ongoing(managed.replica) if managed.replica is not None else 0
            return managed.slot.is_ready, has, -managed.number

        for managed in sorted(self.staying, key=loss)[: max(0, len(self.staying) - wanted)]:
            managed.leaves_since_s = now_s
            changed.append(managed)
        return changed

    def done(self, now_s: float, ongoing: Callable[[Replica], int]) -> list[ManagedReplica]:
        """Return the draining replicas that should be ended now.

        A replica should be ended if it has no server or no unfinished sequences, or has been draining for more
        than ``drain_s`` seconds.
        """
        return [
            managed
            for managed in self._replicas
            if managed.leaves_since_s is not None
            and managed.ending is None
            and (
                managed.replica is None
                or not ongoing(managed.replica)
                or now_s - managed.leaves_since_s > self._drain_s
            )
        ]

    def forget_ended(self) -> None:
        """Remove the replicas whose processes have ended."""
        self._replicas = [
            managed for managed in self._replicas if managed.ending is None or not managed.ending.done()
        ]

    def _free_number(self) -> int:
        taken = {managed.number for managed in self._replicas}
        return next(number for number in count() if number not in taken)
