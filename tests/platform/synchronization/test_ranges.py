"""Ranges of the weights: disjoint and balanced, and with the bits of one aggregator."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.platform.compression.codecs import SPECS
from torch import Tensor

from share_compute.compression.factory import codec_of_round
from share_compute.errors import VerificationFailed
from share_compute.models.storage.weights import WeightFolder
from share_compute.specification import TrainingSpec
from share_compute.specification.synchronization import LocalSpec
from share_compute.synchronization.aggregator import Aggregator, InitialShard
from share_compute.synchronization.ranges import (
    FollowingAggregator,
    RangeAggregator,
    RangeLayout,
    divided,
)
from share_compute.synchronization.records import BranchRun, Contribution, MergeRecord, MergeTerm

SHAPES = {
    "embed": (9, 4),
    "layers.0.weight": (4, 4),
    "layers.0.bias": (4,),
    "layers.1.weight": (4, 4),
    "layers.1.bias": (4,),
}
GROUPS = (("embed",), ("layers.0.weight", "layers.0.bias"), ("layers.1.weight", "layers.1.bias"))


def drawn(seed: int, scale: float = 1.0) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(seed)
    return {name: scale * torch.randn(shape, generator=source) for name, shape in SHAPES.items()}


def training(codec: str = "none", outer: str = "nesterov", **options: Any) -> TrainingSpec:
    policy = {"kind": "local", "branches": 2, "every": 5, "outer": {"name": outer}, **options}
    return TrainingSpec.model_validate({"steps": 20, "synchronization": policy, "compression": SPECS[codec]})


def begin(aggregator: Aggregator, **facts: Any) -> None:
    weights = drawn(0)
    shards = [InitialShard({name: weights[name] for name in group}, {}) for group in GROUPS]
    aggregator.begin(shards, {"step": 0, **facts})


def payloads(spec: TrainingSpec, run: BranchRun) -> dict[str, Tensor]:
    codec, policy = codec_of_round(spec, run.round), spec.rounds
    assert policy is not None
    changes = drawn(100 * run.round + run.branch, 0.01)
    return {
        name: codec.encode(change, codec.begin(name, change.shape))[0]
        for name, change in changes.items()
        if policy.merges(name, run.round, policy.rounds(spec.steps))
    }


def record_of(version: int) -> MergeRecord:
    runs = [BranchRun(version, branch) for branch in range(2)]
    return MergeRecord(version, tuple(MergeTerm(Contribution(run, 1.0, "digest"), 0.5) for run in runs))


def key_of(run: BranchRun) -> str:
    return f"{run.round:08}-{run.branch:04}"


def load(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    for name, tensor in wanted.items():
        tensor.copy_(found[name])


def load_from(folder: Path, wanted: Mapping[str, Tensor]) -> None:
    if not wanted:
        return
    opened = WeightFolder(folder)
    load({name: opened.read(name) for name in wanted}, wanted)


def copied(aggregator: RangeAggregator, version: int, source: Aggregator) -> None:
    """Copy a version from another aggregator, with its outer optimizer's state."""
    outer = source.outer_folder(version)
    slots = WeightFolder(outer).shapes() if any(outer.glob("model*")) else {}
    own = {slot: shape for slot, shape in slots.items() if slot.partition("::")[0] in aggregator.names}
    weights = partial(load_from, source.version_folder(version))
    aggregator.copy(version, weights, own, partial(load_from, outer))


def merged(aggregator: RangeAggregator, spec: TrainingSpec, version: int) -> str:
    keys = {}
    for run in record_of(version).runs:
        keys[run] = key_of(run)
        aggregator.receive(keys[run], run, partial(load, payloads(spec, run)))
    return aggregator.merge_range(record_of(version), keys).weights


@pytest.mark.parametrize(
    ("codec", "outer"), [*((codec, "nesterov") for codec in SPECS), ("int4", "sgd"), ("none", "adam")]
)
def test_ranges_have_the_bits_of_one_aggregator(tmp_path: Path, codec: str, outer: str) -> None:
    """A backup takes over after the second of four merges, with files that it copied after the first one."""
    spec = training(codec, outer)
    policy = spec.rounds
    assert policy is not None
    alone, head = Aggregator(tmp_path / "alone", spec), FollowingAggregator(tmp_path / "head", spec)
    begin(alone)
    begin(head)
    layouts = divided(head.layout, policy, 4, 2)
    ranges = [
        RangeAggregator(tmp_path / f"range-{each}", spec, layout) for each, layout in enumerate(layouts)
    ]
    for each in ranges:
        copied(each, 0, head)
    for version in range(1, 5):
        folders = {}
        for run in record_of(version).runs:
            folders[run] = tmp_path / f"contribution-{key_of(run)}"
            folders[run].mkdir()
            save_file(payloads(spec, run), folders[run] / "model.safetensors")
        alone.merge(record_of(version), folders, {"step": 5 * version})
        digests = [merged(each, spec, version) for each in ranges]
        if version == 1:
            backup = RangeAggregator(tmp_path / "backup", spec, layouts[0])
            copied(backup, 1, ranges[0])
        elif version == 2:
            assert merged(backup, spec, version) == digests[0]
            ranges[0] = backup
        updates = {
            name: WeightFolder(each.update_folder(version, 0)).read(name)
            for each in ranges
            for name in each.names
        }
        checked = [(layout.names, found) for layout, found in zip(layouts, digests, strict=True)]
        head.follow(version, partial(load, updates), checked, {"step": 5 * version})
        for folder in ("version_folder", "update_folder"):
            arguments = (version, 0) if folder == "update_folder" else (version,)
            one, other = (WeightFolder(getattr(each, folder)(*arguments)) for each in (alone, head))
            assert one.digest() == other.digest()
    assert head.newest_whole(4) == 4
    head.keep_outer(4, [])
    again = RangeAggregator(tmp_path / "again", spec, layouts[1])
    again.copy(4, partial(load_from, head.version_folder(4)), None, partial(load, {}))
    assert again.has(4)


def test_weights_that_a_machine_did_not_compute_are_refused(tmp_path: Path) -> None:
    spec = training()
    policy = spec.rounds
    assert policy is not None
    head = FollowingAggregator(tmp_path / "head", spec)
    begin(head)
    layouts = divided(head.layout, policy, 4, 2)
    ranges = [
        RangeAggregator(tmp_path / f"range-{each}", spec, layout) for each, layout in enumerate(layouts)
    ]
    for each in ranges:
        copied(each, 0, head)
    digests = [merged(each, spec, 1) for each in ranges]
    found = {
        name: WeightFolder(each.update_folder(1, 0)).read(name)
        for each, layout in zip(ranges, layouts, strict=True)
        for name in layout.names
    }
    found[layouts[1].names[0]] = torch.zeros_like(found[layouts[1].names[0]])
    checked = [(layout.names, digest) for layout, digest in zip(layouts, digests, strict=True)]
    with pytest.raises(VerificationFailed) as caught:
        head.follow(1, partial(load, found), checked, {})
    assert caught.value.details["range"] == 1


def test_a_part_that_is_cut_in_the_middle_leaves_no_contribution(tmp_path: Path) -> None:
    spec = training("int8")
    one = RangeAggregator(tmp_path / "one", spec, RangeLayout(GROUPS, SHAPES))
    run = BranchRun(1, 0)
    whole = payloads(spec, run)

    def cut(wanted: Mapping[str, Tensor]) -> None:
        first = next(iter(wanted))
        wanted[first].copy_(whole[first])
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        one.receive(key_of(run), run, cut)
    assert not one.contribution_folder(key_of(run)).exists()
    one.receive(key_of(run), run, partial(load, whole))
    assert one.contribution_folder(key_of(run)).exists()


def test_damaged_parts_are_refused(tmp_path: Path) -> None:
    spec = training()
    layout = RangeLayout(GROUPS, SHAPES)
    one = RangeAggregator(tmp_path / "one", spec, layout)
    run = BranchRun(1, 0)
    wrong = payloads(spec, run)
    wrong["embed"] = torch.full_like(wrong["embed"], 255)  # NaN
    with pytest.raises(VerificationFailed, match="a value is not finite"):
        one.receive(key_of(run), run, partial(load, wrong))
    assert not one.contribution_folder(key_of(run)).exists()
    begin(whole := FollowingAggregator(tmp_path / "head", spec))
    weights = partial(load_from, whole.version_folder(0))
    for slots in ({}, {"embed::momentum": (3,)}, {"embed::other": (9, 4)}):
        with pytest.raises(VerificationFailed, match="is missing, unknown, or has a wrong shape"):
            one.copy(0, weights, slots, partial(load, {}))


@pytest.mark.parametrize("fragments", [1, 2, 3])
def test_ranges_are_disjoint_and_balanced(fragments: int) -> None:
    """LPT: no range has more than the mean and the largest parameter, in any round."""
    draw = random.Random(fragments)
    for _ in range(200):
        layers = draw.randint(fragments, 12)
        shapes = {
            f"layers.{layer}.{name}": (draw.randint(1, 40), draw.randint(1, 40))
            for layer in range(layers)
            for name in "abcd"
        }
        groups = tuple(tuple(f"layers.{layer}.{name}" for name in "abcd") for layer in range(layers))
        whole = RangeLayout(groups, shapes)
        policy = LocalSpec(branches=2, fragments=fragments)
        count = draw.randint(1, 6)
        ranges = divided(whole, policy, 20, count)
        assert ranges == divided(whole, policy, 20, count)
        assert 1 <= len(ranges) <= count
        names = [name for each in ranges for name in each.names]
        assert sorted(names) == sorted(shapes)
        for each in ranges:
            assert each.shapes == {name: shapes[name] for name in each.names}
            assert [set(group) <= set(whole) for group, whole in zip(each.groups, groups, strict=True)]
        for number in range(1, fragments + 1):
            sizes = [
                sum(math.prod(shapes[name]) for name in each.names if policy.merges(name, number, 20))
                for each in ranges
            ]
            largest = max(
                math.prod(shape) for name, shape in shapes.items() if policy.merges(name, number, 20)
            )
            assert max(sizes) <= sum(sizes) / len(ranges) + largest
