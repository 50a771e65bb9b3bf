"""The replicas of a deployment: those that stay, those that leave once their sequences have ended, those that end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from itertools import count

from share_compute.serving.status import ServingStatus
from share_compute_api.serving.replica import Replica
from share_compute_api.supervision.interruptions import Interruptions
from share_compute_api.supervision.replicas import Slot

_DRAIN_S = 120.0
"""A replica that leaves may go on with its sequences for so long; then others go on with them."""


class Seat:
    """One replica, and what it was told.

    Args:
        number: tells the replicas of a deployment apart.
        pools: as many as were asked for.
    """

    def __init__(self, number: int, pools: int | None) -> None:
        self.number = number
        self.slot = Slot(pools)
        self.replica: Replica | None = None
        self.told = frozenset[tuple[str, str | None]]()
        """Machines that it knows of."""
        self.interruptions = Interruptions()
        """What was told of the times in which it computed nothing."""
        self.failures = 0
        """In a row."""
        self.leaves_since_s: float | None = None
        """Since when it gets no new requests; None while it does."""
        self.ending: asyncio.Task[None] | None = None
        """Ends its processes, when nothing is left of it."""

    @property
    def stays(self) -> bool:
        """Whether it is one of those that are wanted."""
        return self.leaves_since_s is None

    def end(self) -> None:
        """End its processes; its machines are free when that is done."""
        replica, self.replica = self.replica, None
        self.ending = asyncio.create_task(replica.close() if replica is not None else asyncio.sleep(0))


class Seats:
    """All seats of one deployment.

    Args:
        pools: of each replica, as many as were asked for.
    """

    def __init__(self, pools: int | None) -> None:
        self._pools = pools
        self._seats: list[Seat] = []

    def __iter__(self) -> Iterator[Seat]:
        return iter(tuple(self._seats))

    @property
    def staying(self) -> list[Seat]:
        """Those that are wanted."""
        return [seat for seat in self._seats if seat.stays]

    @property
    def statuses(self) -> list[ServingStatus]:
        """How each is that is known, those that leave among them."""
        return [seat.slot.status for seat in self._seats if seat.slot.status is not None]

    def fit(self, wanted: int, now_s: float, ongoing: Callable[[Replica], int]) -> list[Seat]:
        """Let so many stay; return those that leave now or stay again.

        Who leaves may stay again, as long as it has not ended. Who has least to do leaves first.

        Args:
            wanted: replicas that there are to be.
            now_s: the time.
            ongoing: tells how many sequences a replica has.
        """
        changed: list[Seat] = []
        while len(self.staying) < wanted:
            back = next((one for one in self._seats if not one.stays and one.ending is None), None)
            if back is not None:
                back.leaves_since_s = None
                changed.append(back)
            else:
                self._seats.append(Seat(self._free_number(), self._pools))

        def loss(seat: Seat) -> tuple[bool, int, int]:
            has = ongoing(seat.replica) if seat.replica is not None else 0
            return seat.slot.is_ready, has, -seat.number

        for seat in sorted(self.staying, key=loss)[: max(0, len(self.staying) - wanted)]:
            seat.leaves_since_s = now_s
            changed.append(seat)
        return changed

    def done(self, now_s: float, ongoing: Callable[[Replica], int]) -> list[Seat]:
        """Return those that leave and are to end now, since their sequences have ended or it takes too long."""
        return [
            seat
            for seat in self._seats
            if seat.leaves_since_s is not None
            and seat.ending is None
            and (seat.replica is None or not ongoing(seat.replica) or now_s - seat.leaves_since_s > _DRAIN_S)
        ]

    def forget_ended(self) -> None:
        """Forget those whose processes have ended."""
        self._seats = [seat for seat in self._seats if seat.ending is None or not seat.ending.done()]

    def _free_number(self) -> int:
        taken = {seat.number for seat in self._seats}
        return next(number for number in count() if number not in taken)
