"""Branches with weights of their own, and the server: the same bits on both sides, and the identities of the papers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.platform.compression.codecs import SPECS
from torch import Tensor

from share_compute.models.storage.checksums import damage
from share_compute.models.storage.weights import WeightFolder
from share_compute.specification import TrainingSpec
from share_compute.synchronization.aggregator import Aggregator, InitialShard
from share_compute.synchronization.aggregators import EDGES, OwnWeightsAggregator, aggregator_of
from share_compute.synchronization.branch import BranchState
from share_compute.synchronization.records import (
    BranchRun,
    Contribution,
    MergeRecord,
    MergeTerm,
    coefficients,
)

SHAPES = {"embed": (9, 4), "layer.weight": (4, 4), "layer.bias": (4,)}
BRANCHES = 4
POLICIES: dict[str, dict[str, Any]] = {
    "elastic": {"kind": "elastic", "rate": 0.2},
    "ring": {"kind": "gossip", "graph": "ring"},
    "random_pairs": {"kind": "gossip", "graph": "random_pairs"},
    "measured": {"kind": "gossip", "graph": "measured"},
}


def drawn(seed: int, scale: float = 1.0) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(seed)
    return {name: scale * torch.randn(shape, generator=source) for name, shape in SHAPES.items()}


class Site:
    """The server's folder and the branches of a job with four rounds."""

    def __init__(self, folder: Path, policy: str, codec: str = "none", quorum: int | None = None) -> None:
        self.folder = folder
        document = {"branches": BRANCHES, "every": 5, "quorum": quorum, **POLICIES[policy]}
        self.training = TrainingSpec.model_validate(
            {"steps": 20, "synchronization": document, "compression": SPECS[codec]}
        )
        found = aggregator_of(folder / "server", self.training)
        assert isinstance(found, OwnWeightsAggregator)
        self.aggregator = found
        edges = [(0, 1), (1, 2), (2, 3)] if policy == "measured" else []
        frozen = {"positions": torch.arange(4)}
        self.aggregator.begin([InitialShard(drawn(0), frozen)], {"step": 0, EDGES: edges})
        self.weights = [drawn(0) for _ in range(BRANCHES)]
        self.states = [BranchState(self.training, weights, 0) for weights in self.weights]
        self.distance: float | None = None

    def contribute(self, branch: int, version: int) -> tuple[Contribution, Path]:
        """Train a branch, and write its contribution."""
        state = self.states[branch]
        for name, change in drawn(100 * version + branch, 0.1).items():
            self.weights[branch][name] += change
        state.forget_contribution()
        assert state.version is not None
        run = BranchRun(state.version + 1, branch)
        place = self.folder / f"{run.round}-{branch}"
        place.mkdir()
        save_file(state.contribution(), place / "model.safetensors")
        return Contribution(run, 1.0, self.aggregator.check(run, place)), place

    def merge(self, version: int, branches: list[int]) -> MergeRecord:
        """Let some branches train and merge; others stay as they are."""
        given = [self.contribute(branch, version) for branch in branches]
        contributions = [contribution for contribution, _ in given]
        assert self.training.rounds is not None
        factors = coefficients(self.training.rounds, contributions, version)
        terms = zip(contributions, factors, strict=True)
        record = MergeRecord(version, tuple(MergeTerm(*term) for term in terms))
        folders = {contribution.run: place for contribution, place in given}
        self.distance = self.aggregator.merge(record, folders, {"step": version})
        for contribution in contributions:
            run = contribution.run
            update = WeightFolder(self.aggregator.update_folder(version, run.branch))
            payloads = {name: update.read(name) for name in update.names()}
            state = self.states[run.branch]
            assert state.merge(version, run.round - 1, payloads, closes_round=True) == tuple(SHAPES)
            assert state.merge(version, run.round - 1, {}, closes_round=True) == ()
        return record

    def own(self, branch: int, version: int) -> WeightFolder:
        folder, _ = self.aggregator.beginning(version, branch)
        assert damage(folder) is None
        return WeightFolder(folder)

    def merged(self, version: int) -> dict[str, Tensor]:
        folder = WeightFolder(self.aggregator.version_folder(version))
        assert folder.names() == sorted([*SHAPES, "positions"])
        return {name: folder.read(name) for name in SHAPES}

    def mean(self) -> dict[str, Tensor]:
        return {name: torch.stack([each[name] for each in self.weights]).mean(0) for name in SHAPES}

    def spread(self) -> float:
        mean = self.mean()
        return sum(
            float((each[name] - mean[name]).square().sum()) for each in self.weights for name in SHAPES
        )


def require_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-6) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=tolerance)


@pytest.mark.parametrize("codec", list(SPECS))
@pytest.mark.parametrize("policy", POLICIES)
def test_the_server_has_the_bits_of_each_branch(tmp_path: Path, policy: str, codec: str) -> None:
    site = Site(tmp_path, policy, codec, quorum=2)
    for version, branches in ((1, [0, 1, 2, 3]), (2, [0, 2]), (3, [1, 2, 3]), (4, [0, 1, 2, 3])):
        site.merge(version, branches)
        for branch in range(BRANCHES):
            own = site.own(branch, version)
            for name, value in site.weights[branch].items():
                assert torch.equal(own.read(name), value), (version, branch, name)
    for weights in site.weights:  # the last merge gives the result to all branches, as it is
        require_close(weights, site.merged(4))
    assert site.distance == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("policy", ["ring", "random_pairs", "measured"])
def test_gossip_keeps_the_mean_and_brings_branches_together(tmp_path: Path, policy: str) -> None:
    site = Site(tmp_path, policy)
    for version in (1, 2, 3):
        trained = [drawn(100 * version + branch, 0.1) for branch in range(BRANCHES)]
        before = site.mean()
        site.merge(version, [0, 1, 2, 3])
        change = {name: torch.stack([each[name] for each in trained]).mean(0) for name in SHAPES}
        require_close(site.mean(), {name: before[name] + change[name] for name in SHAPES})
        require_close(site.merged(version), site.mean())
        norm = sum(float(value.square().sum()) for value in site.mean().values())
        assert site.distance == pytest.approx((site.spread() / BRANCHES / norm) ** 0.5, rel=1e-4)
    site.merge(4, [0, 1, 2, 3])
    assert site.spread() < 1e-9


def test_elastic_averaging_moves_branches_and_centre_by_the_same_amounts(tmp_path: Path) -> None:
    site, centre, weights = Site(tmp_path, "elastic"), drawn(0), [drawn(0) for _ in range(BRANCHES)]
    for version in (1, 2, 3):
        for branch, own in enumerate(weights):
            for name, change in drawn(100 * version + branch, 0.1).items():
                own[name] = own[name] + change
        pulls = [{name: 0.2 * (own[name] - centre[name]) for name in SHAPES} for own in weights]
        weights = [
            {name: own[name] - pull[name] for name in SHAPES}
            for own, pull in zip(weights, pulls, strict=True)
        ]
        centre = {name: centre[name] + sum(pull[name] for pull in pulls) for name in SHAPES}
        site.merge(version, [0, 1, 2, 3])
        require_close(site.merged(version), centre)
        for found, expected in zip(site.weights, weights, strict=True):
            require_close(found, expected)


def test_a_repeated_merge_writes_the_same_bits(tmp_path: Path) -> None:
    """A coordinator may die after the files of a merge are written, and before its record is."""
    site = Site(tmp_path, "ring", "int4")
    site.merge(1, [0, 1, 2, 3])
    record = site.merge(2, [0, 1, 2, 3])
    folders = [site.aggregator.version_folder(2), *(site.own(branch, 2).folder for branch in range(BRANCHES))]
    folders += [site.aggregator.update_folder(2, branch) for branch in range(BRANCHES)]
    first = [WeightFolder(folder).digest() for folder in folders]
    runs = {run: tmp_path / f"{run.round}-{run.branch}" for run in record.runs}
    site.aggregator.merge(record, runs, {"step": 2})
    assert [WeightFolder(folder).digest() for folder in folders] == first


def test_damage_of_one_branch_goes_back_to_the_merge_before(tmp_path: Path) -> None:
    site = Site(tmp_path, "elastic")
    for version in (1, 2):
        site.merge(version, [0, 1, 2, 3])
        site.aggregator.prune(version, oldest_base=version - 1)
    assert site.aggregator.newest_whole(2) == 2
    (site.own(3, 2).folder / "model.safetensors").write_bytes(b"damaged")
    assert site.aggregator.newest_whole(2) == 1
    assert site.aggregator.beginning(1, 3)[1] == 1


def test_files_of_old_versions_are_removed_but_not_the_last_of_a_branch(tmp_path: Path) -> None:
    site = Site(tmp_path, "ring", quorum=2)
    for version, branches in ((1, [0, 1, 2, 3]), (2, [0, 1]), (3, [0, 1])):
        site.merge(version, branches)
        site.aggregator.prune(version, oldest_base=1)
    left = {str(path.relative_to(tmp_path / "server")) for path in (tmp_path / "server" / "own").glob("*/*")}
    assert left == {
        "own/0000/00000002", "own/0000/00000003", "own/0001/00000002", "own/0001/00000003",
        "own/0002/00000001", "own/0003/00000001",
    }  # fmt: skip
    assert site.aggregator.beginning(3, 2)[1] == 1


def test_files_of_a_merge_without_a_record_are_forgotten(tmp_path: Path) -> None:
    """The server died before it stored the record. The repeated merge has fewer branches."""
    site = Site(tmp_path, "ring", quorum=2)
    record = site.merge(1, [0, 1, 2, 3])
    site.aggregator.forget_after(0)
    assert site.aggregator.beginning(1, 3) == (site.aggregator.version_folder(0), 0)
    fewer = MergeRecord(1, record.terms[:2])
    runs = {run: tmp_path / f"{run.round}-{run.branch}" for run in fewer.runs}
    site.aggregator.merge(fewer, runs, {"step": 1})
    assert [site.aggregator.beginning(1, branch)[1] for branch in range(BRANCHES)] == [1, 1, 0, 0]


def test_common_weights_need_no_copies_of_branches(tmp_path: Path) -> None:
    training = TrainingSpec.model_validate({"synchronization": {"kind": "parameter_server", "branches": 2}})
    assert type(aggregator_of(tmp_path, training)) is Aggregator
