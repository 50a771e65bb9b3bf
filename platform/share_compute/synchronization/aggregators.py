"""The aggregator of policies whose branches keep their own weights, and the choice of an aggregator."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from share_compute.models.storage.checkpoints import STATE
from share_compute.models.storage.weights import WeightFolder
from share_compute.specification import TrainingSpec
from share_compute.specification.synchronization import ElasticSpec, GossipSpec
from share_compute.synchronization.aggregator import CODEC, VERSIONS_KEPT, Aggregator
from share_compute.synchronization.graphs import Mixing, edges_of, metropolis_weights
from share_compute.synchronization.merge_files import read_slots
from share_compute.synchronization.merging import (
    Tensors,
    apply_merge,
    difference,
    elastic_pull,
    mean,
    mix,
)
from share_compute.synchronization.ranges import FollowingAggregator
from share_compute.synchronization.records import Branch, BranchRun, MergeRecord

EDGES = "edges"
"""Key of the edges between branches that follow from measured links, in the training state of version 0."""


def aggregator_of(folder: Path, training: TrainingSpec) -> Aggregator:
    """Return the aggregator on the server for the policy of a job with branches.

    Args:
        folder: folder of the aggregator.
        training: training settings of the job; ``synchronization.servers`` is a number.
    """
    policy = training.rounds
    if policy is not None and policy.ranges != 0:
        return FollowingAggregator(folder, training)
    is_own = policy is not None and policy.keeps_own_weights
    return OwnWeightsAggregator(folder, training) if is_own else Aggregator(folder, training)


class OwnWeightsAggregator(Aggregator):
    """The weights of a job whose branches keep their own weights: elastic averaging and gossip.

    ``own/BRANCH/VERSION`` is a checkpoint with the weights of a branch. A merge first adds the decoded contribution x -
    y to a branch's last weights y. Then it moves x towards the centre or the neighbours, and sends the branch the
    encoded difference. The branch does the same additions, so branch and aggregator have the same bits. A lost branch
    continues with its own weights.

    ``versions/VERSION`` is the centre of elastic averaging, or the mean of all branches in gossip. It is the result of
    the job: the last merge gives it to all branches.

    Args:
        folder: folder of the aggregator.
        training: training settings of the job.
    """

    def __init__(self, folder: Path, training: TrainingSpec) -> None:
        super().__init__(folder, training)
        self._squares = [0.0, 0.0]
        """Sums of squares: of the distances of all branches from the merged weights, and of the merged weights."""

    def _needed(self, version: int) -> Iterable[Path]:
        """Return the folders from which the job can continue after a merge."""
        yield from super()._needed(version)
        for branch in range(self._policy.branches):
            yield self.beginning(version, branch)[0]

    def forget_after(self, version: int) -> None:
        """Remove the files of merges after a version: their records are missing, so their next merge may differ."""
        super().forget_after(version)
        for branch in range(self._policy.branches):
            self._remove(self._own_folder(0, branch).parent, lambda each: each > version)

    def prune(self, version: int, oldest_base: int, loading: Iterable[int] = ()) -> None:
        """Remove files that are no longer needed; see `Aggregator.prune`."""
        loading = tuple(loading)
        super().prune(version, oldest_base, loading)
        for branch in range(self._policy.branches):
            for old in set(self._own_versions(branch)[:-VERSIONS_KEPT]).difference(loading):
                shutil.rmtree(self._own_folder(old, branch), ignore_errors=True)

    def _outputs(self, record: MergeRecord) -> tuple[list[Path], list[Path]]:
        """Return the checkpoints that a merge writes, the version last, and the other folders that it writes."""
        version = record.version
        updates = [self.update_folder(version, run.branch) for run in record.runs]
        own = [self._own_folder(version, run.branch) for run in record.runs]
        return [*own, self.version_folder(version)], [*updates, self.outer_folder(version)]

    def _group_merger(
        self, record: MergeRecord, found: Mapping[BranchRun, WeightFolder]
    ) -> Callable[[Sequence[str]], dict[Path, Tensors]]:
        """Return a function that merges some parameters, and returns the tensors for each folder of `_outputs`."""
        version = record.version
        before = WeightFolder(self.version_folder(version - 1))
        slots = read_slots(self.outer_folder(version - 1))
        all_branches = range(self._policy.branches)
        own = {branch: WeightFolder(self.beginning(version - 1, branch)[0]) for branch in all_branches}
        runs = {run.branch: run for run in found}
        is_elastic = isinstance(self._policy, ElasticSpec)
        move = self._elastic if is_elastic else partial(self._gossip, self._mixing(version))
        self._squares = [0.0, 0.0]

        def merge_group(names: Sequence[str]) -> dict[Path, Tensors]:
            outputs: dict[Path, Tensors] = {}
            arrived: dict[Branch, Tensors] = {}
            for branch in all_branches:
                arrived[branch] = {name: own[branch].read(name) for name in names}
                if branch in runs:
                    changes = self._changes(found[runs[branch]], arrived[branch], runs[branch])
                    arrived[branch] = {name: value + changes[name] for name, value in arrived[branch].items()}
            old = {name: before.read(name) for name in names}
            merged, wanted = move(record, old, arrived)
            state = {slot: tensor for name in names for slot, tensor in slots(name).items()}
            errors = dict(state)
            for branch in runs:
                slot = f"{CODEC}{branch}."
                new, payloads, following = self._encoded(
                    version, arrived[branch], wanted[branch], state, slot
                )
                errors |= following
                arrived[branch] = outputs[self._own_folder(version, branch)] = new
                outputs[self.update_folder(version, branch)] = payloads
            if not is_elastic:
                merged = mean(list(arrived.values()))
            self._measure(merged, arrived.values())
            return outputs | {self.version_folder(version): merged, self.outer_folder(version): errors}

        return merge_group

    def _elastic(
        self, record: MergeRecord, centre: Tensors, arrived: Mapping[Branch, Tensors]
    ) -> tuple[Tensors, dict[Branch, Tensors]]:
        """Return the next centre, and the weights that each branch in the record should get."""
        changes = {run: difference(arrived[run.branch], centre) for run in record.runs}
        merged, _ = apply_merge(record, changes, self._outer, centre, {})
        if self._is_last(record.version):
            return merged, {run.branch: merged for run in record.runs}
        wanted: dict[Branch, Tensors] = {
            term.contribution.run.branch: elastic_pull(
                arrived[term.contribution.run.branch], centre, term.coefficient
            )
            for term in record.terms
        }
        return merged, wanted

    def _gossip(
        self, rows: Mixing, record: MergeRecord, last: Tensors, arrived: Mapping[Branch, Tensors]
    ) -> tuple[Tensors, dict[Branch, Tensors]]:
        """Return the weights that each branch in the record should get; their mean is known only after encoding."""
        present = sorted(run.branch for run in record.runs)
        if self._is_last(record.version):
            everybody = mean(list(arrived.values()))
            return last, dict.fromkeys(present, everybody)
        wanted: dict[Branch, Tensors] = {}
        for branch in present:
            weights = {other: weight for other, weight in rows[branch].items() if other in present}
            wanted[branch] = mix(
                arrived[branch], [arrived[other] for other in weights], list(weights.values())
            )
        return last, wanted

    def _mixing(self, version: int) -> Mixing:
        policy = self._policy
        assert isinstance(policy, GossipSpec)
        facts = json.loads((self.version_folder(0) / STATE).read_text())
        measured = [(one, other) for one, other in facts.get(EDGES, ())]
        edges = edges_of(policy.graph, policy.branches, self._training.seed, version, measured)
        return metropolis_weights(edges, policy.branches)

    def _is_last(self, version: int) -> bool:
        return version >= self._policy.rounds(self._training.steps)

    def _measure(self, merged: Tensors, branches: Iterable[Tensors]) -> None:
        for weights in branches:
            self._squares[0] += sum(_square(value) for value in difference(weights, merged).values())
        self._squares[1] += sum(map(_square, merged.values()))

    @property
    def _distance(self) -> float | None:
        """Consensus distance after the last merge; None if all branches have the same weights."""
        apart, whole = self._squares
        return math.sqrt(apart / self._policy.branches / whole) if whole else 0.0


def _square(value: Tensor) -> float:
    return float(torch.linalg.vector_norm(value.double())) ** 2
