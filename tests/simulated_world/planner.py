"""The world's answer to `PlanMembership`: the members of each stage, and the weights that members lack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from tests.simulated_world.host import Host
from tests.simulated_world.symbols import Weights
from tests.simulated_world.vault import Vault

from share_compute.protocol.coordinator import PlanMembership
from share_compute.protocol.member_events import Loaded
from share_compute.protocol.membership import Membership, ShardPart, Worker, fresh
from share_compute.protocol.messages import Form
from share_compute.protocol.recovery import recover
from share_compute.protocol.schedule import even_shares

if TYPE_CHECKING:
    from tests.simulated_world.world import World

Shard = tuple[int, int]
_FOLLOWED = 0.1
"""Probability that a stage gets catch-up replicas from other stages, beside backups."""


class Planner:
    """Makes memberships and moves weights.

    Args:
        world: world of the machines.
        stages: number of stages wanted at first.
        shares_optimizer: whether each member of a stage updates only a share of its layers.
    """

    def __init__(self, world: World, stages: int, *, shares_optimizer: bool = False) -> None:
        self._shares_optimizer = shares_optimizer
        self.stages = stages
        """Number of stages wanted from the next epoch on."""
        self._world = world

    def answer(self, plan: PlanMembership) -> Form | None:
        """Return the next epoch after giving its members all that they lack; None if that is impossible."""
        hosts = {
            worker: host
            for worker in plan.reports
            if (host := self._world.hosts[worker]).is_alive and host.machine.epoch == plan.epoch
        }
        out = self._world.leaving | self._world.banned | plan.without
        able = [worker for worker in hosts if worker not in out] or list(hosts)
        weights = self._weights(plan, hosts)
        if not able or weights is None:
            return None
        shards = shards_of(self._world.model.layers, min(self.stages, len(able)))
        current = {
            worker: hosts[worker].shard
            for worker in able
            if hosts[worker].machine.applied == plan.committed and hosts[worker].shard in shards
        }
        keeps_step = len(shards) == self._stages_now(plan, hosts)
        if not keeps_step:
            return self._anew(plan, hosts, able, shards, weights)
        members, moved = self._assign(able, shards, current)
        parts = self._parts(shards, members)
        moved += [
            worker for worker, part in parts.items() if hosts[worker].part != part and worker not in moved
        ]
        for worker in moved:
            shard = shards[next(place for place, stage in enumerate(members) if worker in stage)]
            own = {layer: weights[layer] for layer in range(*shard)}
            hosts[worker].load(Loaded(plan.epoch, plan.committed), parts[worker], own)
        return self._form(plan, hosts, shards, members, moved, weights)

    def _stages_now(self, plan: PlanMembership, hosts: Mapping[Worker, Host]) -> int:
        """Return the number of stages in the layout that most members come from.

        If no member has the committed step and a shard of such a layout, return the wanted number.
        """
        layouts = [
            count
            for host in hosts.values()
            if host.machine.applied == plan.committed
            for count in range(1, self._world.model.layers + 1)
            if host.shard in shards_of(self._world.model.layers, count)
        ]
        return max(layouts, key=layouts.count, default=min(self.stages, len(hosts)))

    def _weights(self, plan: PlanMembership, hosts: Mapping[Worker, Host]) -> Weights | None:
        """Return the weights of all layers, from any member or backup that has them; None if a layer is missing."""
        model = self._world.model
        if plan.committed == 0:
            return {layer: model.initial(layer) for layer in range(model.layers)}
        found: Weights = {}
        for host in hosts.values():
            if host.machine.applied == plan.committed:
                found.update(host.own)
        for host in hosts.values():
            scales = {**host.scales, plan.committed: plan.scale}
            for vault in host.vaults.values():
                if not vault.weights.keys() <= found.keys() and vault.reaches(plan.committed, scales):
                    found.update(vault.rebuilt(plan.committed, scales, model))
        return found if len(found) == model.layers else None

    def _parts(self, shards: Sequence[Shard], members: Sequence[Sequence[Worker]]) -> dict[Worker, ShardPart]:
        """Return the layers of each member, and its share of them."""
        return {
            worker: ShardPart(*shard, *((number, len(stage)) if self._shares_optimizer else ()))
            for shard, stage in zip(shards, members, strict=True)
            for number, worker in enumerate(stage)
        }

    def _assign(
        self, able: Sequence[Worker], shards: Sequence[Shard], current: Mapping[Worker, Shard]
    ) -> tuple[list[list[Worker]], list[Worker]]:
        """Return the members of each stage, and the members among them that lack its weights."""
        members = [[worker for worker in able if current.get(worker) == shard] for shard in shards]
        moved = [worker for worker in able if worker not in current]
        for worker in moved:
            min(members, key=len).append(worker)
        while not all(members):
            worker = max(members, key=len).pop()
            min(members, key=len).append(worker)
            moved.append(worker)
        return members, list(dict.fromkeys(moved))

    def _anew(
        self,
        plan: PlanMembership,
        hosts: Mapping[Worker, Host],
        able: Sequence[Worker],
        shards: Sequence[Shard],
        weights: Weights,
    ) -> Form:
        """Return another layout; members take over their new shards once the epoch begins."""
        members = [list(able[place :: len(shards)]) for place in range(len(shards))]
        parts = self._parts(shards, members)
        for shard, stage in zip(shards, members, strict=True):
            for worker in stage:
                own = {layer: weights[layer] for layer in range(*shard)}
                hosts[worker].next_layout = (plan.epoch, parts[worker], own)
                if hosts[worker].machine.applied != plan.committed:
                    hosts[worker].load(Loaded(plan.epoch, plan.committed), parts[worker], own)
        return self._form(plan, hosts, shards, members, None, weights)

    def _form(
        self,
        plan: PlanMembership,
        hosts: Mapping[Worker, Host],
        shards: Sequence[Shard],
        members: Sequence[Sequence[Worker]],
        moved: Sequence[Worker] | None,
        weights: Weights,
    ) -> Form:
        step, world = plan.committed + 1, self._world
        owners = tuple(tuple(self._owners(stage)) for stage in members)
        backups, followers = self._backups(members), self._followers(members)
        membership = Membership(
            epoch=plan.epoch,
            shards=tuple(shards),
            stages=tuple(tuple(stage) for stage in members),
            owners=owners,
            step=step,
            tasks=fresh(owners),
            backups=backups,
            followers=followers,
            is_tied=world.model.is_tied,
            shares_optimizer=self._shares_optimizer,
        )
        self._give_copies(membership, hosts, plan.committed, weights)
        if moved is None:
            return Form(membership, keeps_step=False)
        reports = {worker: report for worker, report in plan.reports.items() if worker not in moved}
        left = recover(members, owners, reports, step, shares_optimizer=self._shares_optimizer)
        membership = replace(
            membership, tasks=left.tasks, resends=left.resends, forgets=left.forgets, reduced=left.reduced
        )
        return Form(membership)

    def _owners(self, stage: Sequence[Worker]) -> list[Worker]:
        """Return the member that computes each microbatch. Shares and order are arbitrary."""
        count, random = self._world.model.tree.microbatches, self._world.random
        if random.random() < 0.5:
            shares = even_shares(count, len(stage))
            return [worker for worker, share in zip(stage, shares, strict=True) for _ in range(share)]
        return [random.choice(stage) for _ in range(count)]

    def _backups(self, members: Sequence[Sequence[Worker]]) -> dict[Worker, Worker]:
        """Choose a backup for each member that is alone in its stage, or has a share."""
        ring = {
            worker: stage[(number + 1) % len(stage)]
            for stage in (members if self._shares_optimizer else ())
            for number, worker in enumerate(stage)
            if len(stage) > 1
        }
        return ring | {
            stage[0]: self._world.random.choice(others)
            for stage, others in _with_others(members)
            if len(stage) == 1 and others
        }

    def _followers(self, members: Sequence[Sequence[Worker]]) -> dict[Worker, tuple[Worker, ...]]:
        """Choose members that shadow some of another stage, as they do before layers move."""
        random, found = self._world.random, {}
        if self._shares_optimizer:
            return {}
        for stage, others in _with_others(members):
            if others and random.random() < _FOLLOWED:
                found[random.choice(stage)] = tuple(random.sample(others, random.randint(1, len(others))))
        return found

    def _give_copies(
        self, membership: Membership, hosts: Mapping[Worker, Host], committed: int, weights: Weights
    ) -> None:
        """Give all members that hold copies the weights that they lack."""
        for owner in membership.workers:
            part = membership.part_of(owner)
            own = {layer: weights[layer] for layer in self._world.model.own_layers(part)}
            for holder in (hosts[holder] for holder in membership.copy_holders(owner)):
                if part not in holder.vaults or not holder.vaults[part].reaches(committed, holder.scales):
                    holder.vaults[part] = Vault(committed, dict(own))


def _with_others(members: Sequence[Sequence[Worker]]) -> list[tuple[Sequence[Worker], list[Worker]]]:
    """Return each stage with all members of the other stages."""
    everybody = [worker for stage in members for worker in stage]
    return [(stage, [worker for worker in everybody if worker not in stage]) for stage in members]


def shards_of(layers: int, stages: int) -> list[Shard]:
    """Return the layers of each stage, split as evenly as possible."""
    return list(pairwise([0, *accumulate(even_shares(layers, stages))]))
