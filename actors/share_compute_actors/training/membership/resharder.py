"""Resharding: loads the shards of the next epoch into members, from the members or copies that have the data."""

from __future__ import annotations

from collections.abc import Mapping

from share_compute.planning.plan import Plan
from share_compute.protocol.coordinator import PlanMembership
from share_compute.protocol.membership import Membership, Worker
from share_compute.shard import Shard
from share_compute_actors.messages import Source, Sources
from share_compute_actors.training.member.schemas import HOLDING
from share_compute_actors.training.membership.epochs import machines_lost
from share_compute_actors.training.membership.joining import Heirs, overlap
from share_compute_actors.training.membership.training_group import TrainingGroup
from share_compute_actors.wire import FLAG


class Resharder:
    """Moves shards between members that are halted.

    Args:
        group: the members.
        first_step: step after the checkpoint, or after the start of the job (`ShardStoreFacts.first_step`). Until this
            step is committed, all shards can be loaded from the shard store or initialized from the seed.
    """

    def __init__(self, group: TrainingGroup, first_step: int) -> None:
        self._group = group
        self._first_step = first_step
        self.is_torn = False
        """Whether `adopt` failed midway, so that members may hold other shards than the last membership says."""
        self._loaded: tuple[frozenset[Worker], PlanMembership] | None = None
        """Members that loaded a shard and have not switched to it yet, and the request; None if nothing was loaded."""

    def load(
        self,
        before: Membership,
        plan: Plan,
        request: PlanMembership,
        scales: Mapping[int, float],
        heirs: Heirs | None = None,
    ) -> frozenset[Worker]:
        """Have each member that lacks its shard of a plan load it; return the members that loaded one.

        A member lacks its shard if it holds other layers, or if its state is not that after the last committed step.

        Members switch to the loaded shard at `adopt`. Between the two calls, the new membership is written to the step
        log. If the coordinator dies, its successor therefore finds each member's shard either in use or loaded.

        Args:
            before: membership of the epoch before.
            plan: the plan that is carried out from now on.
            request: the request for the epoch, with the members' reports.
            scales: update factor of each committed step, by step.
            heirs: backup copies that members will keep. Existing copies that overlap with them are brought to the
                committed step, too.

        Raises:
            ContributorLost: some part of the model is on no remaining member.
            StaleEpoch: a member that others load from died meanwhile.
            MembersLost: members died meanwhile.
            PlanInfeasible: a shard does not fit into its machine's memory, contrary to the plan's estimate.
        """
        held = self._held(request)
        wanted = {
            member.contributor_id: plan.shard(place)
            for place, stage in enumerate(plan.stages)
            for member in stage.members
        }
        moved = {
            worker: shard for worker, shard in wanted.items() if held.get(worker) != (shard.start, shard.stop)
        }
        if moved:
            own = self._own(before, moved, held, request.committed, scales)
            others = None
            if own.keys() != moved.keys():
                others = self._sources(before, held, request.committed, scales)
            self._group.load_shards(moved, lambda worker: own.get(worker, others), request.committed)
        self._bring_to(before, heirs or {}, request.committed, scales)
        self._loaded = frozenset(moved), request
        return frozenset(moved)

    def _bring_to(
        self, before: Membership, heirs: Heirs, committed: int, scales: Mapping[int, float]
    ) -> None:
        """Bring a copy to the committed step, if its machine will make another backup copy from the copy's data."""
        for shard, stage in zip(before.shards, before.stages, strict=True):
            holders = {
                holder for owner in stage for holder in before.copy_holders(owner)
            } & self._group.workers
            calls = {
                holder: self._group.handle(holder).bring_to.remote(shard, committed, scales)
                for holder in holders
                if any(overlap(shard, wanted) for wanted in heirs.get(holder, ()))
            }
            self._group.gather(FLAG, calls)

    def forget(self) -> None:
        """Forget the shards that were loaded and not adopted."""
        self._loaded = None

    def adopt(self) -> None:
        """Have members switch to the shards that they loaded, if there are any.

        Raises:
            MembersLost: members died meanwhile.
        """
        if self._loaded is None:
            return
        (moved, request), self._loaded = self._loaded, None
        if moved:
            self.is_torn = True
            self._group.adopt(moved, request.epoch, request.committed)
        self.is_torn = False

    def _own(
        self,
        before: Membership,
        moved: Mapping[Worker, Shard],
        held: Mapping[Worker, tuple[int, int]],
        committed: int,
        scales: Mapping[int, float],
    ) -> dict[Worker, Sources]:
        """Return the sources of members whose old shard and backup copies already have all layers of the new shard."""
        found: dict[Worker, list[Source]] = {}
        lacking = {worker: set(range(shard.start, shard.stop)) for worker, shard in moved.items()}
        for worker in moved.keys() & held.keys():
            found[worker] = [self._group.source(worker)]
            lacking[worker].difference_update(range(*held[worker]))
        for shard, stage in zip(before.shards, before.stages, strict=True):
            holders = {holder for owner in stage for holder in before.copy_holders(owner)}
            calls = {
                holder: self._group.handle(holder).bring_to.remote(shard, committed, scales)
                for holder in holders & moved.keys()
                if not lacking[holder].isdisjoint(range(*shard))
            }
            for holder, has_it in self._group.gather(FLAG, calls).items():
                if has_it:
                    found.setdefault(holder, []).append(self._group.source(holder, shard))
                    lacking[holder].difference_update(range(*shard))
        return {
            worker: Sources(tuple(sources)) if len(sources) == 1 else self._group.inventory(sources)
            for worker, sources in found.items()
            if not lacking[worker]
        }

    def _held(self, request: PlanMembership) -> dict[Worker, tuple[int, int]]:
        """Return the layers [start, stop) of each member whose shard is in the state after the last committed step."""
        current = [
            worker for worker, report in request.reports.items() if report.applied == request.committed
        ]
        answers = self._group.ask(HOLDING, current, "holding") if current else {}
        return {worker: shard for worker, shard in answers.items() if shard is not None}

    def _sources(
        self,
        before: Membership,
        held: Mapping[Worker, tuple[int, int]],
        committed: int,
        scales: Mapping[int, float],
    ) -> Sources | None:
        """Return the source of each parameter in the state after the last committed step.

        The source of a layer is a living member that holds it, otherwise a member that keeps a copy of it. If a layer
        has neither, and the first step is not committed, all layers come from the shard store; None means that they are
        initialized from the seed.

        Raises:
            ContributorLost: a layer has no source.
        """
        found: list[Source] = []
        covered: set[int] = set()
        for worker, (start, stop) in sorted(held.items(), key=lambda one: (one[1], one[0])):
            if not covered.issuperset(range(start, stop)):
                found.append(self._group.source(worker))
                covered.update(range(start, stop))
        lost: list[Worker] = []
        for shard, stage in zip(before.shards, before.stages, strict=True):
            if covered.issuperset(range(*shard)):
                continue
            copy = self._copy(shard, committed, scales)
            if copy is None:
                lost += stage
            else:
                found.append(copy)
        if not lost:
            return self._group.inventory(found)
        if committed < self._first_step:
            return self._group.beginning
        raise machines_lost(self._group.topology, lost)

    def _copy(self, shard: tuple[int, int], committed: int, scales: Mapping[int, float]) -> Source | None:
        """Return a copy of a shard, brought to the last committed step; None if no member has such a copy."""
        for worker in sorted(self._group.workers):
            if self._group.ask(FLAG, [worker], "bring_to", shard, committed, scales)[worker]:
                return self._group.source(worker, shard)
        return None
