"""Resharding: has members load their shards of the next epoch from members, backup copies or the shard store."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from share_compute.planning.plan import Plan
from share_compute.protocol.coordinator import PlanMembership
from share_compute.protocol.membership import Membership, ShardPart, Worker
from share_compute.shards import Shard
from share_compute_actors.messages import Source, Sources, Updates
from share_compute_actors.training.member.schemas import HOLDING
from share_compute_actors.training.membership.epochs import machines_lost, shares_of
from share_compute_actors.training.membership.joining import Heirs, overlap
from share_compute_actors.training.membership.training_group import TrainingGroup
from share_compute_actors.wire import FLAG


class Resharder:
    """Moves shards between halted members.

    Args:
        group: the members.
        first_step: first step after the checkpoint; 1 without a checkpoint. Until
            this step is committed, all shards can be loaded from the shard store or initialized from the seed.
        shares_optimizer: whether each member of a stage keeps a share of the optimizer's state.
    """

    def __init__(self, group: TrainingGroup, first_step: int, *, shares_optimizer: bool = False) -> None:
        self._group = group
        self._shares_optimizer = shares_optimizer
        self._first_step = first_step
        self.is_torn = False
        """Whether `adopt` failed. If so, members may hold other shards than the last membership says."""
        self._loaded: tuple[frozenset[Worker], PlanMembership] | None = None
        """The members that loaded shards, and the request for the epoch.

        None before `load`, and after `forget` or `adopt`."""

    def load(
        self,
        before: Membership,
        plan: Plan,
        request: PlanMembership,
        updates: Updates,
        heirs: Heirs | None = None,
        cut_off: Collection[tuple[Worker, Worker]] = (),
    ) -> frozenset[Worker]:
        """Have members load the shards that they lack for a plan; return the members that loaded a shard.

        A member lacks its shard if it holds other layers or another share of the optimizer's state, or if its weights
        are not those after the last committed step.

        Members switch to the loaded shards at `adopt`. The caller writes the new membership to the step log
        before it calls `adopt`. If the coordinator dies, its successor therefore finds each member's shard in
        use or loaded.

        Args:
            before: membership of the previous epoch.
            plan: the new plan.
            request: the request for the epoch, with the members' reports.
            updates: update factors and learning rates of committed steps.
            heirs: shards that members will back up. If a member already has a copy of some of these layers,
                this copy is brought to the committed step, so that the new copy can start from its data.
            cut_off: pairs of members with a dead link. A member loads over a dead link only layers that have no other
                source.

        Raises:
            ContributorLost: some part of the model is lost, because no remaining member holds it.
            StaleEpoch: a member died while others loaded from it.
            MembersLost: members died during the call.
            PlanInfeasible: a shard does not fit into its machine's memory, contrary to the plan's estimate.
            WrongTensor: a member sent tensors that do not fit the shard of their receiver.
        """
        held = self._held(request)
        wanted = {
            member.contributor_id: plan.shard(place)
            for place, stage in enumerate(plan.stages)
            for member in stage.members
        }
        shares = shares_of(plan, shares_optimizer=self._shares_optimizer)
        moved = {
            worker: shard
            for worker, shard in wanted.items()
            if held.get(worker) != (shard.start, shard.stop, *shares[worker])
        }
        if moved and self._shares_optimizer:
            found = self._shared_sources(before, held, request.committed, updates)
            self._group.load_shards(
                moved, shares, lambda worker: self._nearest(worker, found), request.committed
            )
        elif moved:
            own = self._own(before, moved, held, request.committed, updates)
            unreached = {
                worker: frozenset(other for pair in cut_off if worker in pair for other in pair) - {worker}
                for worker in moved.keys() - own.keys()
            }
            others = {
                avoided: self._sources(before, held, request.committed, updates, avoided)
                for avoided in set(unreached.values())
            }
            self._group.load_shards(
                moved,
                shares,
                lambda worker: own[worker] if worker in own else others[unreached[worker]],
                request.committed,
            )
        self._bring_to(before, heirs or {}, request.committed, updates)
        self._loaded = frozenset(moved), request
        return frozenset(moved)

    def _bring_to(self, before: Membership, heirs: Heirs, committed: int, updates: Updates) -> None:
        """Bring existing copies to the committed step if new backup copies will start from their data."""
        for shard, stage in zip(before.shards, before.stages, strict=True):
            holders = {
                holder for owner in stage for holder in before.copy_holders(owner)
            } & self._group.workers
            calls = {
                holder: self._group.handle(holder).bring_to.remote(ShardPart(*shard), committed, updates)
                for holder in holders
                if any(overlap(shard, wanted) for wanted in heirs.get(holder, ()))
            }
            self._group.gather(FLAG, calls)

    def forget(self) -> None:
        """Forget which members loaded shards, so that `adopt` does nothing."""
        self._loaded = None

    def adopt(self) -> None:
        """Have members switch to the shards that they loaded; do nothing if no member loaded a shard.

        Raises:
            MembersLost: members died during the call.
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
        held: Mapping[Worker, ShardPart],
        committed: int,
        updates: Updates,
    ) -> dict[Worker, Sources]:
        """Return the sources of members that can load their new shard from their own shard and backup copies.

        These members are their own sources, so no data is sent over the network.
        """
        found: dict[Worker, list[Source]] = {}
        lacking = {worker: set(range(shard.start, shard.stop)) for worker, shard in moved.items()}
        for worker in moved.keys() & held.keys():
            found[worker] = [self._group.source(worker)]
            lacking[worker].difference_update(range(*held[worker][:2]))
        for shard, stage in zip(before.shards, before.stages, strict=True):
            holders = {holder for owner in stage for holder in before.copy_holders(owner)}
            calls = {
                holder: self._group.handle(holder).bring_to.remote(ShardPart(*shard), committed, updates)
                for holder in holders & moved.keys()
                if not lacking[holder].isdisjoint(range(*shard))
            }
            for holder, has_it in self._group.gather(FLAG, calls).items():
                if has_it:
                    found.setdefault(holder, []).append(self._group.source(holder, ShardPart(*shard)))
                    lacking[holder].difference_update(range(*shard))
        return {
            worker: Sources(tuple(sources)) if len(sources) == 1 else self._group.inventory(sources)
            for worker, sources in found.items()
            if not lacking[worker]
        }

    def _held(self, request: PlanMembership) -> dict[Worker, ShardPart]:
        """Return the layers and the share that each member holds; omit members that lack the last committed step."""
        current = [
            worker for worker, report in request.reports.items() if report.applied == request.committed
        ]
        answers = self._group.ask(HOLDING, current, "holding") if current else {}
        return {worker: shard for worker, shard in answers.items() if shard is not None}

    def _shared_sources(
        self, before: Membership, held: Mapping[Worker, ShardPart], committed: int, updates: Updates
    ) -> list[Source] | None:
        """Return the sources of all parameters of a job whose members keep shares of the optimizer's state.

        The source of a share is a member that holds it, otherwise a member that keeps a backup copy. If a share has
        neither, and step `first_step` is not committed, return None: all shares then come from the job's initial state.

        Raises:
            ContributorLost: a share has no source, and step `first_step` is committed.
        """
        workers = self._group.workers
        found = {
            part: self._group.source(worker) for worker, part in sorted(held.items()) if worker in workers
        }
        for part in {before.part_of(worker) for worker in before.workers} - found.keys():
            copy = self._copy(part, committed, updates, workers)
            if copy is not None:
                found[part] = copy
        # After a failed `adopt`, members may hold shares of two divisions of the same layers. One complete division is
        # enough.
        divisions = {part._replace(number=0) for part in found}
        whole = [
            one for one in divisions if all(one._replace(number=each) in found for each in range(one.total))
        ]
        covered = {layer for one in whole for layer in range(one.start, one.stop)}
        lost = [
            worker for worker in before.workers if not covered.issuperset(range(*before.shard_of(worker)))
        ]
        if lost and committed >= self._first_step:
            raise machines_lost(self._group.topology, lost)
        return None if lost else list(found.values())

    def _nearest(self, worker: Worker, sources: list[Source] | None) -> Sources | None:
        """Return these sources with the member's own shard first, so that data in this shard is not sent."""
        if sources is None:
            return self._group.beginning
        return self._group.inventory(
            sorted(sources, key=lambda one: (one.worker, one.shard) != (worker, None))
        )

    def _sources(
        self,
        before: Membership,
        held: Mapping[Worker, ShardPart],
        committed: int,
        updates: Updates,
        avoided: frozenset[Worker],
    ) -> Sources | None:
        """Return the sources of all parameters, with their values after the last committed step.

        The source of a layer is a member that holds the layer, otherwise a member that keeps a backup copy. If a layer
        has neither, and step `first_step` is not committed, all layers come from the shard store. If the shard
        store has no weights, return None: all layers are initialized from the seed.

        Members in ``avoided`` are sources only of layers that have no other source.

        Raises:
            ContributorLost: a layer has no source, and step `first_step` is committed.
        """
        found: list[Source] = []
        covered: set[int] = set()
        for workers in (self._group.workers - avoided, self._group.workers & avoided):
            for worker, (start, stop, *_) in sorted(held.items(), key=lambda one: (one[1], one[0])):
                if worker in workers and not covered.issuperset(range(start, stop)):
                    found.append(self._group.source(worker))
                    covered.update(range(start, stop))
            for shard in before.shards:
                if not covered.issuperset(range(*shard)):
                    copy = self._copy(ShardPart(*shard), committed, updates, workers)
                    if copy is not None:
                        found.append(copy)
                        covered.update(range(*shard))
            lost = [
                worker
                for shard, stage in zip(before.shards, before.stages, strict=True)
                if not covered.issuperset(range(*shard))
                for worker in stage
            ]
            if not lost:
                return self._group.inventory(found)
            if committed < self._first_step:
                return self._group.beginning
        raise machines_lost(self._group.topology, lost)

    def _copy(
        self,
        shard: ShardPart,
        committed: int,
        updates: Updates,
        workers: frozenset[Worker],
    ) -> Source | None:
        """Bring a backup copy of a shard to the last committed step; return the copy as a source.

        Return None if none of the ``workers`` has such a copy.
        """
        for worker in sorted(workers):
            if self._group.ask(FLAG, [worker], "bring_to", shard, committed, updates)[worker]:
                return self._group.source(worker, shard)
        return None
