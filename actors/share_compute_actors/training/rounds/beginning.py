"""The initial state of the branches of a job: initial weights, the order of additions, and checkpoints."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import ray
import torch
from pydantic import ValidationError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from share_compute.errors import UserError, VerificationFailed
from share_compute.files.durable import sync, write_private
from share_compute.lifecycle.attempt_events import Assignment, AttemptEvent, Note
from share_compute.models.factory import build_stage, dissect
from share_compute.models.profiles.profile import ModelProfile
from share_compute.models.storage.checkpoints import STATE
from share_compute.models.storage.checksums import damage
from share_compute.models.storage.weights import WeightFolder, finished_folders
from share_compute.planning.branches import BranchPlace, island_topology, neighbours
from share_compute.planning.choice import choose_policy, with_choice
from share_compute.planning.plan import Plan
from share_compute.planning.planner import solve
from share_compute.planning.ranges import ranges_of, with_ranges
from share_compute.planning.report import PolicyChoice
from share_compute.quantities import listed
from share_compute.shards import Shard
from share_compute.specification import TrainJob
from share_compute.specification.synchronization import AutoSpec, GossipSpec, LocalSpec
from share_compute.synchronization.aggregator import Aggregator, InitialShard
from share_compute.synchronization.aggregators import EDGES
from share_compute.synchronization.branch import version_of
from share_compute.synchronization.ranges import FollowingAggregator, divided
from share_compute.topology import Topology
from share_compute_actors.group.control_requests import ControlRequests
from share_compute_actors.training.preparation import prepare
from share_compute_actors.training.rounds.aggregation import Aggregation, MergeListener, ServerAggregation
from share_compute_actors.training.rounds.messages import BranchMail
from share_compute_actors.training.rounds.range_group import RangeGroup
from share_compute_actors.training.shard_store import ShardStore, ShardStoreFacts
from share_compute_actors.training.step_log import FILE as STEP_LOG

if TYPE_CHECKING:
    from share_compute.models.huggingface.conversion import PretrainedWeights

_CHOICE = "synchronization.json"
"""File in a job's folder with the policy that its first attempt chose."""
_SERVERS = "servers"
"""Key of the number of ranges, in the training state of version 0."""


def prepare_data(
    assignment: Assignment, requests: ControlRequests, note: Callable[[str], None]
) -> ShardStoreFacts:
    """Prepare the data that all branches of a job share, with a separate shard store; see `preparation.prepare`."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    shard_store = ShardStore.options(scheduling_strategy=here).remote(  # type: ignore[attr-defined]
        assignment.model_copy(update={"checkpoint": None}).model_dump_json()
    )
    try:
        return prepare(shard_store, requests, note)
    finally:
        ray.kill(shard_store)


def with_policy(
    assignment: Assignment, requests: ControlRequests, report: Callable[[AttemptEvent], None]
) -> TrainJob:
    """Return the job with a policy instead of ``synchronization: {kind: auto}``.

    The first attempt chooses the policy, and all later attempts keep it, because lockstep and rounds give different
    weights.

    Args:
        assignment: the job.
        requests: requests of the control plane, for cancellation.
        report: receives events.

    Raises:
        Cancelled: the submitter cancelled the job.
        UserError: the data or the model cannot be used.
        PlanInfeasible: the machines cannot train the model.
        VerificationFailed: the stored choice is damaged or missing.
    """
    spec, file = assignment.spec, assignment.folder / _CHOICE
    if not isinstance(spec.training.synchronization, AutoSpec):
        return spec
    if not file.is_file():
        if any((assignment.folder / name).exists() for name in (STEP_LOG, "rounds")):
            raise _lost(file, "missing")
        facts = prepare_data(assignment, requests, lambda _: None)  # the attempt notes it again
        choice = choose_policy(spec, assignment.topology, dissect(facts.blueprint))
        assert choice is not None
        _store_first(file, choice.model_dump_json(), assignment.attempt)
        report(Note(message=choice.sentence))
    try:
        return with_choice(spec, PolicyChoice.model_validate_json(file.read_bytes()))
    except ValidationError as failure:
        raise _lost(file, "damaged") from failure


def _store_first(file: Path, text: str, attempt: int) -> None:
    """Write a file unless another attempt has written it."""
    own = file.with_name(f"{file.name}.{attempt}")
    write_private(own, text)
    with suppress(FileExistsError):
        os.link(own, file)
    own.unlink()
    sync(file.parent)


def _lost(file: Path, what: str) -> VerificationFailed:
    return VerificationFailed(
        f"the choice between lockstep and rounds is {what}",
        hint=f"restore {file} from a backup, or submit the job again",
    )


def with_servers(assignment: Assignment, topology: Topology, profile: ModelProfile) -> TrainJob:
    """Return the job with a number as ``training.synchronization.servers``.

    All attempts keep the number of the first attempt, because jobs with ranges have different files.
    """
    spec, policy = assignment.spec, assignment.spec.training.rounds
    assert policy is not None
    state = assignment.folder / "rounds" / "versions" / f"{0:08}" / STATE
    if policy.ranges != "auto" or not state.is_file():
        return with_ranges(spec, ranges_of(spec, topology, profile))
    return with_ranges(spec, int(json.loads(state.read_text())[_SERVERS]))


def recover(
    assignment: Assignment,
    aggregator: Aggregator,
    recorded: int,
    facts: ShardStoreFacts,
    places: Sequence[BranchPlace],
) -> int:
    """Return the version from which a job continues; write version 0 if no merge is recorded.

    Args:
        assignment: the job.
        aggregator: the weights.
        recorded: number of merges in the step log.
        facts: the facts that the shard store returned.
        places: machines of the branches.

    Raises:
        VerificationFailed: merges are recorded, and all stored weights are damaged.
    """
    version = aggregator.newest_whole(recorded)
    if version is None and recorded:
        raise VerificationFailed(
            f"all weights that are stored after {recorded} merges are damaged or missing",
            hint=f"restore {assignment.folder / 'rounds'} from a backup, or submit the job again",
        )
    if version is None:
        aggregator.begin(initial_shards(assignment.spec, facts), _beginning_of_all(assignment, facts, places))
        version = 0
    aggregator.forget_after(version)
    aggregator.require_fragments()
    return version


def _beginning_of_all(
    assignment: Assignment, facts: ShardStoreFacts, places: Sequence[BranchPlace]
) -> dict[str, Any]:
    """Return the training state of version 0, including everything that the first branch's plan fixes for all."""
    spec, policy = assignment.spec, assignment.spec.training.rounds
    profile = dissect(facts.blueprint)
    solution = solve(spec, island_topology(assignment.topology, places[0]), profile, 0, {})
    assert policy is not None
    found = {**beginning_facts(spec, facts, solution.plan), _SERVERS: policy.ranges}
    is_measured = isinstance(policy, GossipSpec) and policy.graph == "measured"
    return found | {EDGES: neighbours(assignment.topology, places)} if is_measured else found


def aggregation_of(
    assignment: Assignment,
    aggregator: Aggregator,
    version: int,
    listener: MergeListener,
    mail: BranchMail,
    note: Callable[[str, Literal["info", "warning"]], None],
    cancelled: threading.Event,
) -> Aggregation:
    """Return the object that merges a job's contributions: on the server, or in ranges on machines of the job.

    Args:
        assignment: the job; ``training.synchronization.servers`` is a number.
        aggregator: the weights on the server.
        version: number of merges that are recorded.
        listener: receives the results.
        mail: sends the branches the addresses of the ranges' servers.
        note: called with each line for the job's log, and its level.
        cancelled: event that is set when the job is cancelled.
    """
    training = assignment.spec.training
    policy = training.rounds
    assert policy is not None
    if not isinstance(aggregator, FollowingAggregator):
        return ServerAggregation(aggregator, listener)
    assert isinstance(policy.ranges, int)
    layouts = divided(aggregator.layout, policy, policy.rounds(training.steps), policy.ranges)
    group = RangeGroup(assignment, aggregator, layouts, listener, mail, note, cancelled)
    group.begin(version)
    return group


def initial_shards(spec: TrainJob, facts: ShardStoreFacts) -> Iterator[InitialShard]:
    """Yield the initial weights, layer by layer if the model can be cut.

    Pretrained weights come from the model's folder; other weights are drawn from the seed.
    """
    profile = dissect(facts.blueprint)
    layers = len(profile.layers)
    cuts = [(0, layers)] if profile.no_cut_reason else [(layer, layer + 1) for layer in range(layers)]
    source = _pretrained(spec.model.path, facts)
    for start, stop in cuts:
        stage = build_stage(facts.blueprint, Shard(spec.name, start, stop, layers), torch.device("cpu"))
        tensors = stage.persistent()
        if source is None:
            stage.initialize(spec.training.seed)
        else:
            stage.initialize_added(spec.training.seed)
            with torch.no_grad():
                for name, tensor in tensors.items():
                    if name not in stage.added or name in source.names():
                        tensor.copy_(source.read(name))
        trained = {name for name, value in stage.parameters().items() if value.requires_grad}
        yield InitialShard(
            {name: value.detach() for name, value in tensors.items() if name in trained},
            {name: value.detach() for name, value in tensors.items() if name not in trained},
        )


def beginning_facts(spec: TrainJob, facts: ShardStoreFacts, plan: Plan) -> dict[str, Any]:
    """Return the training state of a checkpoint, without weights, before the first step.

    All branches add gradients in the order of this plan, and compress the plan's boundaries between stages.

    Args:
        spec: the job.
        facts: the facts that the shard store returned.
        plan: plan of the first branch.

    Raises:
        UserError: there are more branches than training samples.
    """
    samples, policy = facts.sizes["train"], spec.training.rounds
    assert policy is not None
    if policy.branches > samples:
        raise UserError(
            f"training.synchronization.branches {policy.branches} is more than the {samples} training samples: "
            "branches would train on the same samples",
            hint=f"give more data, or at most {samples} branches",
        )
    runs = max(plan.shares, key=len)
    return {
        **asdict(facts.state),
        "step": 0,
        "version": 0,
        "seed": spec.training.seed,
        "batch_size": spec.training.batch_size,
        "train_samples": samples,
        "data": facts.data,
        "microbatches": sum(runs),
        "runs": runs,
        "boundaries": plan.boundaries.model_dump(mode="json"),
    }


def spec_of_branch(spec: TrainJob, number: int) -> TrainJob:
    """Return the job of a branch; only the first branch evaluates, because all branches have the same model."""
    if number == 0:
        return spec
    training = spec.training.model_copy(
        update={"validate_every": None, "early_stopping": None, "target": None, "samples": None}
    )
    return spec.model_copy(update={"training": training})


def own_checkpoint(folder: Path) -> tuple[Path, int] | None:
    """Return the newest undamaged checkpoint of a branch with its optimizer's state, and the version of its weights.

    Args:
        folder: folder of the branch.
    """
    for checkpoint in reversed(finished_folders(folder / "checkpoints")):
        if damage(checkpoint) is None:
            has_optimizer = any(checkpoint.glob("optimizer*.safetensors"))
            version = version_of(WeightFolder(checkpoint, "optimizer")) if has_optimizer else None
            return None if version is None else (checkpoint, version)
    return None


def lost_state(assignment: Assignment) -> str:
    """Return text about the state that a branch loses when it begins with new members."""
    training, branch = assignment.spec.training, assignment.branch
    policy, codec = training.rounds, training.compression
    assert branch is not None
    assert policy is not None
    lost = []
    if policy.inner_state == "keep":
        lost.append("the state of its optimizer")
    if codec.name == "powersgd" or (codec.name != "none" and codec.error_feedback is not None):
        lost.append("the state of its codec")
    if policy.overlapping:
        lost.append("the steps that it took while the round was merged")
    if isinstance(policy, LocalSpec) and policy.fragments > 1:
        lost.append("its changes to the parts of the model that were not merged")
    if branch.step is None or branch.version == 0 or not lost:
        return "it begins the round as before"
    whose = "its own" if policy.keeps_own_weights else "the merged"
    return f"it begins with {whose} weights after merge {branch.version}, but without {listed(lost)}"


def _pretrained(folder: Path | None, facts: ShardStoreFacts) -> PretrainedWeights | None:
    if folder is None:
        return None
    from share_compute.models.huggingface.conversion import pretrained_weights  # noqa: PLC0415 - slow to import

    return pretrained_weights(folder, facts.blueprint)
