"""The state with which the branches of a job begin: initial weights, the order of additions, and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from share_compute.errors import UserError
from share_compute.lifecycle.attempt_events import Assignment
from share_compute.models.factory import build_stage, dissect
from share_compute.models.storage.checksums import damage
from share_compute.models.storage.weights import WeightFolder, finished_folders
from share_compute.planning.plan import Plan
from share_compute.quantities import listed
from share_compute.shard import Shard
from share_compute.specification import TrainJob
from share_compute.specification.synchronization import LocalSpec
from share_compute.synchronization.aggregator import InitialShard
from share_compute.synchronization.branch import version_of
from share_compute_actors.training.shard_store import ShardStoreFacts

if TYPE_CHECKING:
    from share_compute.models.huggingface.conversion import PretrainedWeights


def initial_shards(spec: TrainJob, facts: ShardStoreFacts) -> Iterator[InitialShard]:
    """Yield the weights with which training begins, layer by layer if the model can be cut.

    Pretrained weights come from the model's folder; other weights follow from the seed.
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
                    if name not in stage.added:
                        tensor.copy_(source.read(name))
        trained = {name for name, value in stage.parameters().items() if value.requires_grad}
        yield InitialShard(
            {name: value.detach() for name, value in tensors.items() if name in trained},
            {name: value.detach() for name, value in tensors.items() if name not in trained},
        )


def beginning_facts(spec: TrainJob, facts: ShardStoreFacts, plan: Plan) -> dict[str, Any]:
    """Return what a checkpoint says about training besides weights, before the first step.

    All branches add gradients in the order that follows from one plan, and compress its boundaries between stages.

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
    """Return what a branch lacks that begins with new members, for the user."""
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
    from share_compute.models.huggingface.conversion import PretrainedWeights  # noqa: PLC0415 - slow to import

    return PretrainedWeights(WeightFolder(folder), facts.blueprint.config or {})
