"""Tables for the search: times and memory limits of a possible stage, for all ranges of layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from share_compute.models.profiles.profile import FLOAT_BYTES
from share_compute.planning.cost.cost import TrainingCost
from share_compute.planning.network.network import Floats
from share_compute.specification.workload import GRADIENT_BUCKET_BYTES

Ints = NDArray[np.int64]
_MOST_BYTES: Final = 128 * 2**20
"""Size in bytes of the cached tables above which the cache is cleared."""
ANY_WINDOW: Final = 2**31
"""Value of `Option.window` for "no limit": the layers fit with any number of microbatches in flight."""


@dataclass(frozen=True, slots=True, eq=False)
class Option:
    """One possible stage: its members, and tables of its times and memory limits for ranges of layers [start, stop).

    Tables are indexed ``[stop, stop - 1 - start]``. Times are in seconds. They are infinite for ranges that do not
    exist, and for ranges in which a member would get no microbatch.
    """

    members: tuple[int, ...]
    region: int
    first_s: Floats
    """Forward plus backward time of one microbatch on the fastest member."""
    own_s: Floats
    """Compute time of the busiest member in a step, plus the time after the last backward."""
    window: Ints
    """Largest window for which every member has enough memory; -1 if no window fits.

    The window is the number of microbatches by which a stage's forwards may run ahead of its backwards.
    """

    def reach(self, ceiling_s: float) -> int:
        """Return the largest number of layers that fit into memory and take less than ``ceiling_s`` per step, or 0."""
        held = np.flatnonzero(((self.own_s < ceiling_s) & (self.window >= 0)).any(axis=0))
        return int(held[-1]) + 1 if len(held) else 0


class Options:
    """Builds options on demand, and caches them."""

    def __init__(self, cost: TrainingCost) -> None:
        self._cost = cost
        self._known: dict[tuple[int, ...], tuple[Option, int, float]] = {}
        self._bytes = 0

    @cached_property
    def usable(self) -> tuple[int, ...]:
        """Machines with a known speed and at least `TrainingMemory.least_bytes` of memory for a plan."""
        cost = self._cost
        times = cost.forward_s[:, -1] + cost.backward_s[:, -1]
        able = np.isfinite(times) & (cost.memory_bytes > 0) & (cost.memory_bytes >= cost.least_bytes)
        return tuple(int(machine) for machine in np.flatnonzero(able))

    def of(self, machines: Sequence[int], most_layers: int, ceiling_s: float = math.inf) -> Option:
        """Return the option with these members.

        Args:
            machines: usable machines that may be members of one stage (`TrainingCost.may_share`).
            most_layers: maximum number of layers in a range of the tables.
            ceiling_s: step time in seconds; ranges of layers that need more than this may be left out.
        """
        members = tuple(sorted(machines))
        if self._bytes > _MOST_BYTES:
            self._known.clear()
            self._bytes = 0
        option, layers, until_s = self._known.get(members, (None, 0, 0.0))
        if option is None or layers < most_layers or until_s < ceiling_s:
            option = self._build(members, most_layers, ceiling_s)
            self._known[members] = option, most_layers, ceiling_s
            self._bytes += 3 * option.own_s.nbytes
        return option

    def _build(self, members: tuple[int, ...], most_layers: int, ceiling_s: float) -> Option:
        cost, rows = self._cost, np.array(members)
        stop, more = np.nonzero(
            np.arange(cost.num_layers + 1)[:, None] > np.arange(min(most_layers, cost.num_layers))
        )
        if len(members) > 1 and math.isfinite(ceiling_s):
            # Computing shares is slow, so ranges with too many layers for the ceiling are dropped first.
            hopeful = self._rough_s(members, stop - 1 - more, stop) <= ceiling_s * (1 + 1e-9)
            most_layers = int(more[hopeful].max(initial=0)) + 1
            stop, more = stop[more < most_layers], more[more < most_layers]
        start = stop - 1 - more

        def table(values: Floats, elsewhere: float) -> Floats:
            filled = np.full((cost.num_layers + 1, most_layers), elsewhere)
            filled[stop, more] = values
            return filled

        cells = self._cells_s(rows, start, stop)
        shares = _shares(cells, cost.workload.microbatches)
        if cost.workload.slices > 1:
            shares = np.full(cells.shape, cost.workload.microbatches / len(members))
        fixed = self._fixed_bytes(start, stop, len(members))
        tail = self._tail_s(members, start, stop)
        valid = (shares > 0).all(axis=0)
        return Option(
            members=members,
            region=int(cost.network.region[members[0]]),
            first_s=table(np.where(valid, cells.min(axis=0), np.inf), np.inf),
            own_s=table(np.where(valid, (shares * cells).max(axis=0) + tail, np.inf), np.inf),
            window=table(np.where(valid, self._windows(rows, start, stop, fixed, shares), -1), -1).astype(
                np.int64
            ),
        )

    def _cells_s(self, rows: Ints, start: Ints, stop: Ints) -> Floats:
        """Return forward plus backward time of one microbatch ``[members, ranges]``."""
        forward, backward = self._cost.forward_s[rows], self._cost.backward_s[rows]
        times: Floats = forward[:, stop] - forward[:, start] + backward[:, stop] - backward[:, start]
        return times

    def _rough_s(self, members: tuple[int, ...], start: Ints, stop: Ints) -> Floats:
        """Return a lower bound on a stage's time in a step ``[ranges]``, for microbatches that can be divided."""
        with np.errstate(divide="ignore"):
            speed = (1 / self._cells_s(np.array(members), start, stop)).sum(axis=0)
        times: Floats = self._cost.workload.microbatches / speed + self._tail_s(members, start, stop)
        return times

    def _trained(self, start: Ints, stop: Ints) -> Floats:
        cost = self._cost
        tied = cost.profile.tied if cost.profile.tied_trains else 0
        trained: Floats = cost.trained[stop] - cost.trained[start] + self._copies(start, stop, tied)
        return trained

    def _copies(self, start: Ints, stop: Ints, tied: int) -> Ints:
        return np.where((stop == self._cost.num_layers) & (start > 0), tied, 0)

    def _fixed_bytes(self, start: Ints, stop: Ints, members: int) -> Floats:
        """Return the part of the bytes of each layer range that is independent of microbatches, shape ``[ranges]``."""
        cost, trained = self._cost, self._trained(start, stop)
        updated = self._updated(trained, start, stop, members)
        held = cost.parameters[stop] - cost.parameters[start] + self._copies(start, stop, cost.profile.tied)
        return np.asarray(cost.state_bytes(held, trained, updated) + self._for_a_time[start, stop])

    def _updated(self, trained: Floats, start: Ints, stop: Ints, members: int) -> Floats:
        """Compute `TrainingMemory.updated_parameters` for many layer ranges at once, shape ``[ranges]``."""
        if not self._cost.workload.shares_optimizer:
            return trained
        return np.asarray(np.maximum(trained / members, self._largest[start, stop]))

    @cached_property
    def _largest(self) -> Floats:
        """Elements of the largest trained parameter of layers [start, stop) ``[layers, layers + 1]``."""
        return self._table(self._cost.largest_from)

    @cached_property
    def _for_a_time(self) -> Floats:
        """Transient bytes (`TrainingCost.for_a_time_bytes`) of layers [start, stop) ``[layers, layers + 1]``."""
        return self._table(self._cost.for_a_time_from)

    def _table(self, values_from: Callable[[int], Floats]) -> Floats:
        """Return a table ``[layers, layers + 1]`` of values of layers [start, stop), given those from each start."""
        layers = self._cost.num_layers
        table = np.zeros((layers, layers + 1))
        for start in range(layers):
            table[start, start + 1 :] = values_from(start)
        return table

    def _tail_s(self, members: tuple[int, ...], start: Ints, stop: Ints) -> Floats:
        cost, rows, trained = self._cost, np.array(members), self._trained(start, stop)
        backward = cost.backward_s[rows]
        hidden = (backward[:, stop] - backward[:, start]).max(axis=0)
        summing = self._summing(members, trained)
        log = self._log(members, trained, stop - start < cost.num_layers)
        buckets = np.maximum(1, np.ceil(trained * FLOAT_BYTES / GRADIENT_BUCKET_BYTES))
        updated = self._updated(trained, start, stop, len(members))
        update = np.multiply.outer(cost.update_s_per_parameter[rows], updated) + cost.call_s[rows, None]
        gathering = np.zeros(len(summing))
        if cost.workload.shares_optimizer:
            gathering = summing = summing / 2
        times: Floats = np.maximum(summing - hidden, summing / buckets) + log + update.max(axis=0) + gathering
        return times

    def _summing(self, members: tuple[int, ...], trained: Floats) -> Floats:
        """Return the time to sum the gradients (`TrainingCost.sum_s`) of each layer range, shape ``[ranges]``."""
        if len(members) == 1:
            return np.zeros(len(trained))
        cost = self._cost
        choices = cost.sums.choices(members, cost.kinds[members[0]])
        size = trained * cost.summed_bytes
        times: Floats = np.min(
            [
                time.latency_s + size * time.s_per_byte
                if math.isfinite(time.s_per_byte)
                else np.full(len(size), np.inf)
                for time in choices
            ],
            axis=0,
        )
        return times

    def _log(self, members: tuple[int, ...], trained: Floats, is_part: NDArray[np.bool_]) -> Floats:
        """Return the time to back up the gradient (`TrainingCost.log_s`) of each layer range, shape ``[ranges]``."""
        cost, none = self._cost, np.zeros(len(trained))
        if len(members) > 1 or not cost.workload.backups:
            return none
        times = [
            2 * latency + trained * FLOAT_BYTES / rate
            for latency, rate in cost.ways_out[int(cost.network.region[members[0]])]
            if rate > 0
        ]
        soonest = np.min(times, axis=0) if times else np.full(len(trained), np.inf)
        return np.where(is_part, soonest, none)

    def _windows(self, rows: Ints, start: Ints, stop: Ints, fixed: Floats, shares: Floats) -> Floats:
        """Return the largest window with which every member of the stage has enough memory, shape ``[ranges]``."""
        cost = self._cost
        memory = cost.memory_bytes[rows, None]
        slices = cost.workload.slices
        most = _after_a_loss(shares) if slices == 1 else shares
        fixed = fixed + most * 2 * (cost.boundary_bytes[start] + cost.boundary_bytes[stop])
        each = cost.activation_bytes[stop] - cost.activation_bytes[start]
        kept = np.minimum(np.floor((memory - fixed) / np.maximum(each, 1e-9)), ANY_WINDOW)
        # Rounding may make the quotient wrong by one, so it is checked with the formula of
        # `TrainingMemory.bytes_needed`.
        kept = kept - (fixed + kept * each > memory)
        kept = kept + (fixed + (kept + 1) * each <= memory)
        # A member computes one of the slices of each sequence in the window.
        window = np.maximum(kept, 0) * slices - 1
        windows: Floats = np.where(kept >= most, ANY_WINDOW, window).min(axis=0)
        return windows


def _after_a_loss(shares: Floats) -> Floats:
    """Compute `share_compute.planning.cost.memory.after_a_loss` for many layer ranges at once.

    Args:
        shares: number of microbatches of each member, shape ``[members, ranges]``.
    """
    if len(shares) == 1:
        return shares
    count = shares.sum(axis=0)
    others = np.array([np.delete(shares, place, axis=0).max(axis=0) for place in range(len(shares))])
    left = np.maximum(count - others, 1)  # no division by 0 if one member gets all microbatches
    most: Floats = np.ceil(shares * count / left)
    return most


def _shares(cells: Floats, microbatches: int) -> Floats:
    """Compute `fill_shares` for many layer ranges at once; the result has shape ``[members, ranges]``.

    Where `fill_shares` returns None, at least one share is 0. Each member first gets a lower bound of its share. The
    remaining microbatches are assigned one by one.

    Args:
        cells: time of one microbatch on each member, shape ``[members, ranges]``.
        microbatches: number of microbatches to distribute.
    """
    count, ranges = cells.shape
    if count == 1:
        return np.full(cells.shape, float(microbatches))
    shares = np.zeros(cells.shape)
    if count > microbatches:
        return shares
    free = (cells <= 0).any(axis=0)
    safe = np.where(free, 1.0, cells)
    early = (1 - 1e-9) * (microbatches - count) / (1 / safe).sum(axis=0)
    shares = np.where(free, 0.0, np.floor(early / safe))
    columns = np.arange(ranges)
    left = microbatches - shares.sum(axis=0)
    while (open_ := columns[left > 0]).size:
        chosen = ((shares[:, open_] + 1) * cells[:, open_]).argmin(axis=0)
        shares[chosen, open_] += 1
        left[open_] -= 1
    return shares
