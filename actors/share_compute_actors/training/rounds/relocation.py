"""Moves branches to machines that join while a job trains."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from share_compute.lifecycle.attempt_events import AttemptEvent, Offer, ReplanAbandoned, ReplanProposed
from share_compute.models.profiles.profile import ModelProfile
from share_compute.planning.branches import BranchPlace, can_hold, island_topology
from share_compute.planning.rounds import Move, better_places
from share_compute.specification import TrainJob
from share_compute.topology import Topology


class Relocation:
    """Looks for shorter rounds when machines are offered, and proposes to move branches.

    The search runs in a thread, so branches need not wait for it. Machines are used only after the control plane has
    answered the proposal with an offer that contains them.

    Args:
        spec: the job.
        profile: cost profile of the job's model.
        report: receives the proposal.
    """

    def __init__(self, spec: TrainJob, profile: ModelProfile, report: Callable[[AttemptEvent], None]) -> None:
        self._spec = spec
        self._profile = profile
        self._report = report
        self._executor = ThreadPoolExecutor(1, "relocation")
        self._search: Future[Move | None] | None = None
        self._considered = frozenset[str]()
        """Machines with which a search was made."""
        self._proposed: tuple[int, Move] | None = None
        """Step of the open proposal, and its content."""
        self._accepted: Move | None = None

    def consider(self, topology: Topology, current: Sequence[BranchPlace], left: int) -> None:
        """Start a search if new machines are offered that no search has used yet.

        Args:
            topology: the machines that the job may use.
            current: the places of the branches.
            left: number of remaining rounds.
        """
        machines = frozenset(machine.id for machine in topology.contributors)
        used = {machine for place in current for machine in place.machines}
        is_busy = self._search is not None or self._proposed is not None or self._accepted is not None
        if is_busy or machines <= self._considered | used:
            return
        self._considered |= machines
        self._search = self._executor.submit(
            better_places, self._spec, topology, self._profile, tuple(current), left
        )

    def propose(self, step: int, left: int) -> None:
        """Propose the move that a finished search has found.

        Args:
            step: last known step.
            left: number of remaining rounds.
        """
        if self._search is None or not self._search.done():
            return
        move, self._search = self._search.result(), None
        if move is None:
            return
        self._proposed = step, move
        gain = 1 - move.round_s / move.current_round_s
        self._report(
            ReplanProposed(
                step=step,
                plan=move.plan,
                current_step_s=move.current_round_s,
                gain_s=(move.current_round_s - move.round_s) * left,
                move_cost_s=move.move_s,
                sentence=f"rounds are predicted to be {gain:.0%} shorter with the machines that joined",
            )
        )

    def answer(self, offer: Offer) -> None:
        """Accept or abandon the proposal that an offer answers; do nothing if the offer answers no proposal."""
        if self._proposed is None or offer.answers != self._proposed[0]:
            return
        (_, move), self._proposed = self._proposed, None
        there = {machine.id for machine in offer.topology.contributors}
        if move.plan.machines <= there:
            self._accepted = move
        else:
            self._report(ReplanAbandoned(reason="a machine of the better plan is gone"))

    def can_hold(self, topology: Topology, place: BranchPlace) -> bool:
        """Return whether an island can hold the model once for each of its branches.

        Args:
            topology: the machines that the job may use.
            place: the island, and its branches.
        """
        return can_hold(self._spec, island_topology(topology, place), self._profile)

    def take(self, left: Collection[str]) -> dict[int, BranchPlace]:
        """Return the accepted places by branch, and forget them; empty if there are none or a machine is gone.

        Args:
            left: ids of the machines that the job may use.
        """
        move, self._accepted = self._accepted, None
        if move is None or not move.plan.machines.issubset(left):
            return {}
        return {number: place for place in move.places for number in place.branches}

    def close(self) -> None:
        """End the thread of the search, without waiting for a running search."""
        self._executor.shutdown(wait=False, cancel_futures=True)
