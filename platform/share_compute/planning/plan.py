"""A plan: the ordered pools of one job at one epoch, and `make_plan`, the seam where the full planner goes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from share_compute.errors import PlanInfeasible, UserError
from share_compute.planning.memory import member_bytes
from share_compute.planning.partitioning import Shard, load_strategy, map_partitions_to_shards
from share_compute.specification import TrainJob
from share_compute.strict import StrictModel
from share_compute.topology import Contributor, Device, Topology
from share_compute.training.schedule import blocks, one_forward_one_backward, peak_in_flight

if TYPE_CHECKING:
    # At run time it would bring torch into the control plane, which never computes.
    from share_compute.models.blueprint import Anatomy


class MemberPlan(StrictModel):
    """One contributor in a pool."""

    contributor_id: str
    name: str
    microbatches: tuple[int, ...]
    """Ids of the microbatches it computes in each step."""
    memory_bytes: int
    """Predicted need: weights, gradients, optimizer state and activations in flight."""
    reason: str
    """Why it holds what it holds, in one sentence."""


class PoolPlan(StrictModel):
    """One shard and the members that each hold all of it."""

    start: int
    """First layer."""
    stop: int
    """One past the last layer."""
    parameters: int
    members: tuple[MemberPlan, ...]


def layer_span(start: int, stop: int) -> str:
    """Return what people read for the layers [start, stop): ``layers 0-3``, counted from 0 as in the model's code."""
    return f"layer {start}" if stop == start + 1 else f"layers {start}-{stop - 1}"


class Plan(StrictModel):
    """The ordered pools of one job, at one epoch."""

    epoch: int
    model_id: str = "model"
    """Name of the model that is cut: the job's."""
    strategy: str
    num_layers: int
    parameters: int
    """Of the whole model; tied weights count once."""
    pools: tuple[PoolPlan, ...]
    idle: tuple[str, ...] = ()
    """Names of contributors that got nothing."""

    @property
    def pool_sizes(self) -> list[int]:
        """Members of each pool."""
        return [len(pool.members) for pool in self.pools]

    def shard(self, pool: int) -> Shard:
        """Return the shard of one pool."""
        return Shard(self.model_id, self.pools[pool].start, self.pools[pool].stop, self.num_layers)


def make_plan(spec: TrainJob, topology: Topology, anatomy: Anatomy, epoch: int = 0) -> Plan:
    """Lay a job over the machines by the strategy that it names.

    The fastest machines are taken; with several members a pool, machines of like speed share one.

    Raises:
        PlanInfeasible: too few machines, layers or microbatches, or too little memory; ``details`` says how
            much is missing.
    """
    num_layers = len(anatomy.layers)
    if anatomy.parameters == 0:
        raise UserError("the model has no parameters to train", mend="add a layer that has some, e.g. linear")
    pools = _form_pools(spec, topology, num_layers)
    partitions = load_strategy(spec.parallelism.strategy).partition(
        Topology(tuple(_as_one(index, members) for index, members in enumerate(pools)))
    )
    shards = map_partitions_to_shards(partitions, num_layers, spec.name)
    ordered = [pools[int(partition.contributor_id)] for partition in partitions]
    sizes = [len(members) for members in ordered]
    planned = []
    for index, (members, shard) in enumerate(zip(ordered, shards, strict=True)):
        shares = blocks(spec.training.microbatches, len(members))
        need = [
            member_bytes(
                spec,
                anatomy,
                shard,
                peak_in_flight(one_forward_one_backward(sizes, index, share, spec.training.microbatches)),
            )
            for share in shares
        ]
        planned.append(
            PoolPlan(
                start=shard.start,
                stop=shard.stop,
                parameters=anatomy.of(shard),
                members=tuple(
                    MemberPlan(
                        contributor_id=machine.id,
                        name=machine.name,
                        microbatches=share,
                        memory_bytes=bytes_needed,
                        reason=_reason(spec, machine, shard, len(members)),
                    )
                    for machine, share, bytes_needed in zip(members, shares, need, strict=True)
                ),
            )
        )
    used = {machine.id for members in ordered for machine in members}
    plan = Plan(
        epoch=epoch,
        model_id=spec.name,
        strategy=spec.parallelism.strategy,
        num_layers=num_layers,
        parameters=anatomy.parameters,
        pools=tuple(planned),
        idle=tuple(machine.name for machine in topology.contributors if machine.id not in used),
    )
    _check_memory(plan, topology)
    return plan


def _form_pools(spec: TrainJob, topology: Topology, num_layers: int) -> list[list[Contributor]]:
    size = spec.parallelism.members_per_pool
    if size > spec.training.microbatches:
        raise PlanInfeasible(
            f"{size} members share each pool, but a step has only {spec.training.microbatches} microbatches",
            mend=f"set training.microbatches to {size} or more",
            details={"members_per_pool": size, "microbatches": spec.training.microbatches},
        )
    available = len(topology.contributors)
    count = spec.parallelism.pools or max(1, min(available // size, num_layers))
    if count > num_layers:
        raise PlanInfeasible(
            f"{count} pools cannot share {num_layers} layers: each needs at least one",
            mend=f"ask for at most {num_layers} pools",
            details={"pools": count, "layers": num_layers},
        )
    if available < count * size:
        raise PlanInfeasible(
            f"{count} pools of {size} need {count * size} machines; {available} are ready",
            mend="let more machines join, or ask for fewer pools or members",
            details={"machines_needed": count * size, "machines_ready": available},
        )
    if size == 1 and available == count:
        return [[machine] for machine in topology.contributors]
    by_speed = sorted(topology.contributors, key=lambda machine: (-machine.flops_per_s(), machine.id))
    # The members of a pool sum their gradients, which takes devices of one kind.
    fastest = sorted(by_speed[: count * size], key=lambda machine: machine.device.kind)
    groups = [fastest[start : start + size] for start in range(0, len(fastest), size)]
    if any(len({machine.device.kind for machine in group}) > 1 for group in groups):
        raise PlanInfeasible(
            "a pool would mix machines with and without GPU",
            mend="let machines join with --device cpu, or set parallelism.members_per_pool: 1",
        )
    return groups


def _as_one(index: int, members: list[Contributor]) -> Contributor:
    """Return what a pool looks like to a strategy: the speed of all members, the memory of the smallest."""
    device = Device(
        kind="cpu",
        name=f"pool {index}",
        memory_bytes=min(machine.memory_bytes for machine in members),
        flops_per_s={"float32": sum(machine.flops_per_s() for machine in members)},
    )
    return Contributor(id=str(index), name=device.name, devices=(device,))


def _reason(spec: TrainJob, machine: Contributor, shard: Shard, members: int) -> str:
    why = {
        "uniform": "every machine gets the same share",
        "memory_weighted": f"it lends {machine.memory_bytes / 2**30:.1f} GiB",
        "compute_weighted": f"it measured {machine.flops_per_s() / 1e9:.0f} GFLOP/s",
    }.get(spec.parallelism.strategy, f"strategy {spec.parallelism.strategy} gave it this share")
    shared = f", shared with {members - 1} more" if members > 1 else ""
    return f"{len(shard)} of {shard.num_layers} layers{shared}: {why}"


def _check_memory(plan: Plan, topology: Topology) -> None:
    missing = {
        member.name: member.memory_bytes - topology[member.contributor_id].memory_bytes
        for pool in plan.pools
        for member in pool.members
        if member.memory_bytes > topology[member.contributor_id].memory_bytes
    }
    if not missing:
        return
    need = sum(member.memory_bytes for pool in plan.pools for member in pool.members)
    lent = sum(topology[member.contributor_id].memory_bytes for pool in plan.pools for member in pool.members)
    details = {
        "needed_bytes": need,
        "lent_bytes": lent,
        "missing_bytes": max(need - lent, 0),
        "missing_by_machine": missing,
    }
    if need > lent:
        raise PlanInfeasible(
            f"the job needs {need} bytes and these machines lend {lent}: {need - lent} bytes are missing",
            mend="let more machines join, or use a smaller model, batch or optimizer state (sgd keeps none)",
            details=details,
        )
    worst = max(missing, key=missing.__getitem__)
    raise PlanInfeasible(
        f"with strategy {plan.strategy!r}, {worst} lacks {missing[worst]} bytes for its shard",
        machine=worst,
        mend="use parallelism.strategy: memory_weighted, or more pools",
        details=details,
    )
