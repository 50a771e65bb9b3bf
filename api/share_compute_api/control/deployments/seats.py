"""The replicas of a deployment: staying ones, leaving ones that finish their sequences, and ending ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from itertools import count

from share_compute.lifecycle.deployment_status import ServingStatus
from share_compute_api.control.deployments.interruptions import Interruptions
from share_compute_api.control.deployments.replicas import Slot
from share_compute_api.openai.replica import Replica


class Seat:
    """One replica, and what was reported to it and about it.

    Args:
        number: number of the replica in its deployment.
        stages: number of stages that were asked for; None leaves it open.
    """

    def __init__(self, number: int, stages: int | None) -> None:
        self.number = number
        self.slot = Slot(stages)
        self.replica: Replica | None = None
        self.told = frozenset[tuple[str, str | None]]()
        """Machines that the replica was last offered."""
        self.interruptions = Interruptions()
        """Times in which the replica computed nothing."""
        self.failures = 0
        """Number of failures in a row."""
        self.leaves_since_s: float | None = None
        """Time since when it gets no new requests; None while it gets them."""
        self.ending: asyncio.Task[None] | None = None
        """Task that ends its processes; None before that."""

    @property
    def stays(self) -> bool:
        """Whether the replica is wanted."""
        return self.leaves_since_s is None

    def end(self) -> None:
        """End the replica's processes; its machines are free when that is done."""
        replica, self.replica = self.replica, None
        self.ending = asyncio.create_task(replica.close() if replica is not None else asyncio.sleep(0))


class Seats:
    """All seats of one deployment.

    Args:
        stages: number of stages that were asked for, for each replica; None leaves it open.
        drain_s: seconds that a leaving replica may continue its sequences; then other replicas continue them.
    """

    def __init__(self, stages: int | None, drain_s: float) -> None:
        self._drain_s = drain_s
        self._stages = stages
        self._seats: list[Seat] = []

    def __iter__(self) -> Iterator[Seat]:
        return iter(tuple(self._seats))

    @property
    def staying(self) -> list[Seat]:
        """Seats of replicas that are wanted."""
        return [seat for seat in self._seats if seat.stays]

    @property
    def statuses(self) -> list[ServingStatus]:
        """Known statuses of all replicas, leaving ones included."""
        return [seat.slot.status for seat in self._seats if seat.slot.status is not None]

    def fit(self, wanted: int, now_s: float, ongoing: Callable[[Replica], int]) -> list[Seat]:
        """Let ``wanted`` replicas stay; return the seats that leave now or stay again.

        A leaving replica may stay again as long as its processes are not being ended. Replicas that are not ready leave
        first, then those with the fewest sequences.

        Args:
            wanted: number of replicas that there are to be.
            now_s: the time in seconds.
            ongoing: returns the number of sequences of a replica.
        """
        changed: list[Seat] = []
        while len(self.staying) < wanted:
            back = next((one for one in self._seats if not one.stays and one.ending is None), None)
            if back is not None:
                back.leaves_since_s = None
                changed.append(back)
            else:
                self._seats.append(Seat(self._free_number(), self._stages))

        def loss(seat: Seat) -> tuple[bool, int, int]:
            has = ongoing(seat.replica) if seat.replica is not None else 0
            return seat.slot.is_ready, has, -seat.number

        for seat in sorted(self.staying, key=loss)[: max(0, len(self.staying) - wanted)]:
            seat.leaves_since_s = now_s
            changed.append(seat)
        return changed

    def done(self, now_s: float, ongoing: Callable[[Replica], int]) -> list[Seat]:
        """Return the leaving seats that are to end now: their sequences have ended, or they took too long."""
        return [
            seat
            for seat in self._seats
            if seat.leaves_since_s is not None
            and seat.ending is None
            and (
                seat.replica is None
                or not ongoing(seat.replica)
                or now_s - seat.leaves_since_s > self._drain_s
            )
        ]

    def forget_ended(self) -> None:
        """Forget the seats whose processes have ended."""
        self._seats = [seat for seat in self._seats if seat.ending is None or not seat.ending.done()]

    def _free_number(self) -> int:
        taken = {seat.number for seat in self._seats}
        return next(number for number in count() if number not in taken)
