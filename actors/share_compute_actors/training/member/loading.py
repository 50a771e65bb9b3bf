"""Builds a shard, and loads its weights and optimizer state from the actors that have them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from share_compute.compression.boundaries import round_inside
from share_compute.device_kinds import KINDS
from share_compute.errors import UserError
from share_compute.models.boundary import Boundaries
from share_compute.models.devices import operations
from share_compute.models.factory import build_stage
from share_compute.models.stage import Stage
from share_compute.models.storage.slots import parameter_of
from share_compute.protocol.tree import SummationTree
from share_compute.shards import Shard
from share_compute.synchronization.branch import is_branch_slot
from share_compute.training.optimizers import restore_optimizer
from share_compute.training.shares import WHOLE, OptimizerShare
from share_compute_actors.group.allocator import passing_through
from share_compute_actors.group.fetching import SourceClient, fill, fits, wrong
from share_compute_actors.machine.device import measured_device
from share_compute_actors.messages import MemberSetup, Source
from share_compute_actors.training.member.runner import Runner
from share_compute_actors.training.member.slice_runner import SliceRunner
from share_compute_actors.wire import NAMES, Undeclared, unpack_answer

if TYPE_CHECKING:
    from share_compute_actors.training.member.ranks import Ranks


def build_runner(
    setup: MemberSetup,
    tree: SummationTree,
    shard: Shard,
    ranks: Ranks | None = None,
    share: OptimizerShare = WHOLE,
) -> Runner:
    """Return a runner whose weights are not loaded yet; call this on the thread that will compute.

    Args:
        setup: parameters of the member.
        tree: the order in which gradients are added.
        shard: layers of the model.
        ranks: other processes that compute the layers together with this one; None without.
        share: the share of the optimizer's state that the member keeps.

    Raises:
        ContributorLost: this process sees no GPU, or a different GPU than the measured one; or a rank was lost.
        PlanInfeasible: the shard does not fit into this machine's memory.
        UserError: boundaries are compressed, and the size of their tensors does not follow from the model; or the
            member computes on a GPU, and gradient sums are compressed or the optimizer's state is shared; or the ranks
            can divide no layer.
    """
    torch.set_num_threads(setup.own_threads)
    if setup.training.compresses_sums and KINDS[setup.device].is_gpu:
        raise UserError(
            f"training.compression: {setup.name} computes on a GPU, and only CPUs compress the sums of gradients",
            hint="set training.compression: {name: none}",
        )
    if share.total > 1 and KINDS[setup.device].is_gpu:
        raise UserError(
            f"parallelism.optimizer: {setup.name} computes on a GPU, and only CPUs share the optimizer's state",
            hint="set parallelism.optimizer to replicated, or parallelism.avoid to the machines with GPUs",
        )
    if setup.slices > 1 and KINDS[setup.device].is_gpu:
        raise UserError(
            f"parallelism.sequence: {setup.name} computes on a GPU, and only CPUs exchange slices of sequences",
            hint="set parallelism.sequence to 1, or parallelism.avoid to the machines with GPUs",
        )
    device = measured_device(setup.device, setup.gpus, setup.lent_devices)
    operations(device).compute_deterministically()
    with fits(shard, setup.name):
        stage = build_stage(setup.blueprint, shard, device)
        training = setup.training
        if ranks is not None:
            ranks.divide(stage, setup.blueprint, training.microbatch_size, training.sequence_length)
        boundaries = Boundaries.of(
            stage,
            setup.blueprint,
            training.microbatch_size,
            training.sequence_length // setup.slices,
            gradients_are_finite=training.precision != "float16",
            compression=training.boundary_compression,
        )
        round_inside(stage, training.boundary_compression)
        if setup.slices == 1:
            return Runner(stage, training, tree, setup.tied, boundaries, share)
        stage.cut_sequences()
        return SliceRunner(stage, training, tree, setup.tied, boundaries, share)


def fill_runner(runner: Runner, setup: MemberSetup, client: SourceClient | None) -> None:
    """Load weights, loss scale and optimizer state from their sources into a runner.

    Args:
        runner: newly built runner.
        setup: parameters of the member.
        client: calls the actors that have the weights. If None, weights are initialized from the seed.

    Raises:
        ContributorLost: data from a machine arrived damaged in every attempt.
        PlanInfeasible: the shard does not fit into this machine's memory.
        ShardStoreLost: the shard store died while data was loaded from it.
        StaleEpoch: a member died while data was loaded from it.
        UserError: the shard store's weights do not fit the model's configuration, or lack tensors of a branch.
        WrongTensor: a source returned data that does not fit the shard.
    """
    stage = runner.stage
    with fits(stage.shard, setup.name), passing_through():
        if client is None:
            assert setup.version is None, "a branch begins with common weights"
            stage.initialize(setup.training.seed)
            return
        stored = _stored(stage, client, setup.training.seed)
        if setup.version is not None and stored.keys() != stage.persistent().keys():
            raise UserError(
                "the weights with which the branch begins lack the tensors that the job adds to the model",
                hint="report this together with the job's log",
            )
        fill(stored, client, "weights", numbers=runner.parameters.keys())
        runner.loss_scale = client.ask(client.sources.all[0], "loss_scale")
        if setup.version is not None:
            runner.begin_branch(setup.version)
        if runner.optimizer is not None:
            _restore(runner, client)


def _stored(stage: Stage, client: SourceClient, seed: int) -> dict[str, Tensor]:
    """Return the tensors to load from sources.

    Tensors that the job adds to the model (LoRA adapters) are initialized here from the seed. They are left
    out of the result if no source has them.
    """
    tensors = stage.persistent()
    if not stage.added:
        return tensors
    stage.initialize_added(seed)
    known = {name for source in client.sources.all for name in _inventory(client, source)}
    return {name: tensor for name, tensor in tensors.items() if name in known or name not in stage.added}


def _inventory(client: SourceClient, source: Source) -> tuple[str, ...]:
    """Return the names of the tensors that a source has."""
    answer = client.ask(source, "inventory")
    try:
        return unpack_answer(NAMES, answer, source.name)
    except Undeclared as failure:
        if source.worker is None:
            raise
        raise wrong(source, failure.message) from failure


def _restore(runner: Runner, client: SourceClient) -> None:
    """Load the optimizer's state and the branch's state from their sources."""
    assert runner.optimizer is not None
    shapes: dict[str, tuple[int, ...]] = {}
    slots = {name: tuple(each.shape) for name, each in _branch_tensors(runner).items()}
    for place, source in enumerate(client.sources.all):
        for name, shape in client.ask(source, "optimizer_shapes").items():
            parameter = parameter_of(name)
            if parameter not in runner.gradients.own_names or client.sources.place(parameter) != place:
                continue
            if is_branch_slot(name):
                is_possible = slots.get(name) == tuple(shape)
            else:
                is_possible = math.prod(shape) <= runner.parameters[parameter].numel()
            if not is_possible:
                raise wrong(source, f"the state tensor {name} has shape {list(shape)}")
            shapes[name] = shape
    state = {name: torch.empty(shape) for name, shape in shapes.items()}
    fill(state, client, "optimizer_state", numbers=state.keys())
    restore_optimizer(runner.optimizer, runner.parameters, state)
    if runner.branch is not None:
        runner.branch.restore({name: tensor for name, tensor in state.items() if is_branch_slot(name)})


def _branch_tensors(runner: Runner) -> dict[str, Tensor]:
    return {} if runner.branch is None else runner.branch.tensors()
