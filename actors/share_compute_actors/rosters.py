"""From a plan to the roster of an epoch, and from one epoch to the next when members are lost."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence

from share_compute.errors import ContributorLost
from share_compute.planning import plan as plans
from share_compute.planning.cost import TrainingCost
from share_compute.protocol.coordinator import Plan
from share_compute.protocol.messages import Form, Report
from share_compute.protocol.recovery import recover
from share_compute.protocol.roster import Roster, Worker, fresh
from share_compute.topology import Topology
from share_compute.training.schedule import blocks


class Former:
    """Finds the roster of each epoch of one plan.

    Args:
        plan: who holds what at the beginning.
        cost: tables that say how fast members are.
        is_tied: whether the first and the last pool share a parameter.
        leaving: tells which members are to leave.
    """

    def __init__(
        self, plan: plans.Plan, cost: TrainingCost, *, is_tied: bool, leaving: Callable[[], Container[Worker]]
    ) -> None:
        self._plan = plan
        self._cost = cost
        self._is_tied = is_tied
        self._leaving = leaving
        self._roster: Roster | None = None
        self.recomputed = 0
        """Microbatches that the last epoch computes again, since who had computed them is lost."""

    def form(self, asked: Plan) -> Form:
        """Return the next epoch, for the members that reported.

        Raises:
            ContributorLost: some pool has nobody left.
        """
        if self._roster is None:
            form = first_form(self._plan, asked, is_tied=self._is_tied)
            if not asked.reports.keys() >= set(form.roster.workers):
                form = next_form(form.roster, asked, self._cost)
        else:
            form = next_form(self._roster, asked, self._cost, self._leaving())
            self.recomputed = _again(self._roster, form.roster, asked.reports.values())
        self._roster = form.roster
        return form


def first_form(plan: plans.Plan, asked: Plan, *, is_tied: bool) -> Form:
    """Return the first epoch of a plan: its open step is begun from nothing."""
    owners = [_owners(pool) for pool in plan.pools]
    roster = Roster(
        epoch=asked.epoch,
        shards=tuple((pool.start, pool.stop) for pool in plan.pools),
        pools=tuple(tuple(member.contributor_id for member in pool.members) for pool in plan.pools),
        owners=tuple(owners),
        step=asked.committed + 1,
        tasks=fresh(owners),
        is_tied=is_tied,
    )
    return Form(roster, keeps_step=False)


def _owners(pool: plans.PoolPlan) -> tuple[Worker, ...]:
    found = {
        microbatch: member.contributor_id for member in pool.members for microbatch in member.microbatches
    }
    return tuple(found[microbatch] for microbatch in sorted(found))


def next_form(roster: Roster, asked: Plan, cost: TrainingCost, leaving: Container[Worker] = ()) -> Form:
    """Return the epoch that follows when members are lost or leave: the same shards, with those that are left.

    Raises:
        ContributorLost: some pool has nobody left.
    """
    pools = tuple(
        tuple(worker for worker in pool if worker in asked.reports and worker not in leaving)
        for pool in roster.pools
    )
    if not all(pools):
        raise machines_lost(
            cost.topology,
            [worker for pool in roster.pools for worker in pool if worker not in sum(pools, ())],
        )
    owners = tuple(
        shared(pool, roster.shards[place], cost)
        if len(pool) < len(roster.pools[place])
        else roster.owners[place]
        for place, pool in enumerate(pools)
    )
    step = asked.committed + 1
    left = recover(pools, owners, asked.reports, step)
    return Form(
        Roster(
            epoch=asked.epoch,
            shards=roster.shards,
            pools=pools,
            owners=owners,
            step=step,
            tasks=left.tasks,
            resends=left.resends,
            reduced=left.reduced,
            forgets=left.forgets,
            is_tied=roster.is_tied,
        )
    )


def machines_lost(topology: Topology, workers: Iterable[Worker]) -> ContributorLost:
    """Return the error for machines that were lost together with what only they held."""
    names = listed(topology[worker].name for worker in workers)
    return ContributorLost(
        f"machines were lost: {names}",
        machine=names,
        mend="resume the job: it continues from its last checkpoint on the machines that are there",
    )


def listed(names: Iterable[str]) -> str:
    """Return names as people write them: ``ada, bob and eve``."""
    ordered = sorted(names)
    return " and ".join([", ".join(ordered[:-1]), ordered[-1]]) if len(ordered) > 1 else "".join(ordered)


def shared(pool: Sequence[Worker], shard: tuple[int, int], cost: TrainingCost) -> tuple[Worker, ...]:
    """Return who computes each microbatch of a pool, so that the last member is done soonest.

    Members get contiguous blocks. When there are fewer microbatches than members, the last members get none.
    """
    index = {machine.id: place for place, machine in enumerate(cost.topology.contributors)}
    count = cost.workload.microbatches
    shares: Sequence[int] | None = None
    if all(worker in index for worker in pool):
        shares = cost.shares([index[worker] for worker in pool], *shard)
    if shares is None:
        base, extra = divmod(count, len(pool))
        shares = [base + (place < extra) for place in range(len(pool))]
    return tuple(worker for worker, block in zip(pool, blocks(shares), strict=True) for _ in block)


def plan_of(roster: Roster, plan: plans.Plan) -> plans.Plan:
    """Return a plan as an epoch carries it out, for people: the members that are left, and what each computes."""
    pools = []
    for pool, workers, owners in zip(plan.pools, roster.pools, roster.owners, strict=True):
        known = {member.contributor_id: member for member in pool.members}
        members = tuple(
            known[worker].model_copy(
                update={
                    "microbatches": tuple(
                        microbatch for microbatch, owner in enumerate(owners) if owner == worker
                    )
                }
            )
            for worker in workers
        )
        pools.append(pool.model_copy(update={"members": members}))
    return plan.model_copy(update={"epoch": roster.epoch, "pools": tuple(pools), "prediction": None})


def _again(before: Roster, after: Roster, reports: Iterable[Report]) -> int:
    """Return how many microbatches of the open step are computed again; none if nobody had begun it."""
    if not any(report.step == after.step and (report.activations or report.summed) for report in reports):
        return 0
    left = set(after.workers)
    again = {
        microbatch
        for place, pool in enumerate(before.tasks_of(after.step))
        for microbatch, task in enumerate(pool)
        if (task.holder or task.worker) not in left and after.tasks[place][microbatch].forward
    }
    return len(again)
