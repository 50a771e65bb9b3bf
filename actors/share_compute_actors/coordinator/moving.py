"""Brings to members what they are to hold from the next epoch on, from whoever has it."""

from __future__ import annotations

from collections.abc import Mapping

from share_compute.planning import plan as plans
from share_compute.planning.partitioning import Shard
from share_compute.protocol.coordinator import Plan
from share_compute.protocol.roster import Roster, Worker
from share_compute_actors.coordinator.crew import Crew
from share_compute_actors.coordinator.joining import Heirs, overlap
from share_compute_actors.coordinator.rosters import machines_lost
from share_compute_actors.member.schemas import HOLDING
from share_compute_actors.messages import Source, Sources
from share_compute_actors.wire import FLAG


class Mover:
    """Moves shards between members that are halted.

    Args:
        crew: the members.
        first_step: with which the attempt began: until it is committed, all can be loaded as it was at the beginning.
    """

    def __init__(self, crew: Crew, first_step: int) -> None:
        self._crew = crew
        self._first_step = first_step
        self.is_torn = False
        """Whether a move broke off, so that members may hold other shards than the roster of the epoch before says."""
        self._loaded: tuple[frozenset[Worker], Plan] | None = None
        """Who has loaded what it does not work with yet, and what was asked."""

    def load(
        self,
        before: Roster,
        plan: plans.Plan,
        asked: Plan,
        scales: Mapping[int, float],
        heirs: Heirs | None = None,
    ) -> frozenset[Worker]:
        """Let each member of a plan load its shard; return those that will hold another one than before.

        They work with it after `adopt`. Between the two, what is to be is written down: so whoever follows a
        coordinator that dies knows of each member that it holds its part, or has loaded it.

        Args:
            before: roster of the epoch before.
            plan: that is carried out from now on.
            asked: what members reported.
            scales: what the gradient of each committed step was multiplied by.
            heirs: the copies that members will keep; copies that they keep now are brought to the committed step, too.

        Raises:
            ContributorLost: nobody has some part of the model any more.
            StaleEpoch: who had some part died meanwhile.
            MembersLost: members died meanwhile.
            PlanInfeasible: a shard does not fit into its machine after all.
        """
        held = self._held(asked)
        wanted = {
            member.contributor_id: plan.shard(place)
            for place, pool in enumerate(plan.pools)
            for member in pool.members
        }
        moved = {
            worker: shard for worker, shard in wanted.items() if held.get(worker) != (shard.start, shard.stop)
        }
        if moved:
            own = self._own(before, moved, held, asked.committed, scales)
            others = None
            if own.keys() != moved.keys():
                others = self._sources(before, held, asked.committed, scales)
            self._crew.load_shards(moved, lambda worker: own.get(worker, others), asked.committed)
        self._bring_to(before, heirs or {}, asked.committed, scales)
        self._loaded = frozenset(moved), asked
        return frozenset(moved)

    def _bring_to(self, before: Roster, heirs: Heirs, committed: int, scales: Mapping[int, float]) -> None:
        """Bring copies to the committed step from which other copies will be made on the same machine."""
        for shard, pool in zip(before.shards, before.pools, strict=True):
            keepers = {keeper for owner in pool for keeper in before.keepers(owner)} & self._crew.workers
            calls = {
                keeper: self._crew.handle(keeper).bring_to.remote(shard, committed, scales)
                for keeper in keepers
                if any(overlap(shard, wanted) for wanted in heirs.get(keeper, ()))
            }
            self._crew.gather(FLAG, calls)

    def forget(self) -> None:
        """Forget what was loaded and not adopted."""
        self._loaded = None

    def adopt(self) -> None:
        """Let members work with what they loaded, if they were to load anything.

        Raises:
            MembersLost: members died meanwhile.
        """
        if self._loaded is None:
            return
        (moved, asked), self._loaded = self._loaded, None
        if moved:
            self.is_torn = True
            self._crew.adopt(moved, asked.epoch, asked.committed)
        self.is_torn = False

    def _own(
        self,
        before: Roster,
        moved: Mapping[Worker, Shard],
        held: Mapping[Worker, tuple[int, int]],
        committed: int,
        scales: Mapping[int, float],
    ) -> dict[Worker, Sources]:
        """Return those that load from themselves alone: what they hold, and copies of those that they followed."""
        found: dict[Worker, list[Source]] = {}
        lacking = {worker: set(range(shard.start, shard.stop)) for worker, shard in moved.items()}
        for worker in moved.keys() & held.keys():
            found[worker] = [self._crew.source(worker)]
            lacking[worker].difference_update(range(*held[worker]))
        for shard, pool in zip(before.shards, before.pools, strict=True):
            keepers = {keeper for owner in pool for keeper in before.keepers(owner)}
            calls = {
                keeper: self._crew.handle(keeper).bring_to.remote(shard, committed, scales)
                for keeper in keepers & moved.keys()
                if not lacking[keeper].isdisjoint(range(*shard))
            }
            for keeper, has_it in self._crew.gather(FLAG, calls).items():
                if has_it:
                    found.setdefault(keeper, []).append(self._crew.source(keeper, shard))
                    lacking[keeper].difference_update(range(*shard))
        return {
            worker: Sources(tuple(sources)) if len(sources) == 1 else self._crew.inventory(sources)
            for worker, sources in found.items()
            if not lacking[worker]
        }

    def _held(self, asked: Plan) -> dict[Worker, tuple[int, int]]:
        """Return the layers of each member that has them as the last committed step left them."""
        current = [worker for worker, report in asked.reports.items() if report.applied == asked.committed]
        answers = self._crew.ask(HOLDING, current, "holding") if current else {}
        return {worker: shard for worker, shard in answers.items() if shard is not None}

    def _sources(
        self,
        before: Roster,
        held: Mapping[Worker, tuple[int, int]],
        committed: int,
        scales: Mapping[int, float],
    ) -> Sources | None:
        """Return who has each parameter after the last committed step.

        Of every layer that is a living member, else a buddy that keeps a copy.
        """
        found: list[Source] = []
        covered: set[int] = set()
        for worker, (start, stop) in sorted(held.items(), key=lambda one: (one[1], one[0])):
            if not covered.issuperset(range(start, stop)):
                found.append(self._crew.source(worker))
                covered.update(range(start, stop))
        lost: list[Worker] = []
        for shard, pool in zip(before.shards, before.pools, strict=True):
            if covered.issuperset(range(*shard)):
                continue
            copy = self._copy(shard, committed, scales)
            if copy is None:
                lost += pool
            else:
                found.append(copy)
        if not lost:
            return self._crew.inventory(found)
        if committed < self._first_step:
            return self._crew.beginning
        raise machines_lost(self._crew.topology, lost)

    def _copy(self, shard: tuple[int, int], committed: int, scales: Mapping[int, float]) -> Source | None:
        """Return a copy of a shard, brought to the last committed step; None if nobody has one that can be."""
        for worker in sorted(self._crew.workers):
            if self._crew.ask(FLAG, [worker], "bring_to", shard, committed, scales)[worker]:
                return self._crew.source(worker, shard)
        return None
