"""Merges from files: the same bits on both sides, repeatable, and damaged contributions are refused."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.platform.compression.codecs import SPECS
from torch import Tensor

from share_compute.compression.factory import codec_of_round, codec_of_update
from share_compute.errors import UserError, VerificationFailed
from share_compute.models.storage.checksums import damage
from share_compute.models.storage.weights import WeightFolder
from share_compute.specification import TrainingSpec
from share_compute.synchronization.aggregator import Aggregator, InitialShard, folder_bytes, payload_bytes
from share_compute.synchronization.records import BranchRun, Contribution, MergeRecord, MergeTerm

SHAPES = {"embed": (9, 4), "layer.weight": (4, 4), "layer.bias": (4,)}
CODECS = [name for name in SPECS if name != "powersgd"]


def drawn(seed: int, scale: float = 1.0) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(seed)
    return {name: scale * torch.randn(shape, generator=source) for name, shape in SHAPES.items()}


def training(codec: str = "none", outer: str = "nesterov", steps: int = 12, **options: Any) -> TrainingSpec:
    return TrainingSpec.model_validate(
        {
            "steps": steps,
            "synchronization": {"kind": "local", "branches": 2, "every": 5, "outer": {"name": outer}},
            "compression": {**SPECS[codec], **options},
        }
    )


def begun(folder: Path, spec: TrainingSpec) -> tuple[Aggregator, dict[str, Tensor]]:
    weights = drawn(0)
    aggregator = Aggregator(folder, spec)
    embed, rest = weights["embed"], {name: weights[name] for name in ("layer.weight", "layer.bias")}
    shards = [
        InitialShard({"embed": embed}, {"positions": torch.arange(4)}),
        InitialShard({**rest, "embed": embed}, {}),  # the last shard repeats a tied parameter
    ]
    aggregator.begin(shards, {"step": 0})
    return aggregator, weights


def contribution(folder: Path, spec: TrainingSpec, run: BranchRun) -> Path:
    """Write the contribution of a run, without the error of earlier rounds."""
    codec = codec_of_round(spec, run.round)
    place = folder / f"{run.round}-{run.branch}"
    place.mkdir(parents=True)
    changes = drawn(100 * run.round + run.branch, 0.01)
    payloads = {
        name: codec.encode(value, codec.begin(name, value.shape))[0] for name, value in changes.items()
    }
    save_file(payloads, place / "model.safetensors")
    return place


def record(version: int, branches: int = 2) -> MergeRecord:
    return MergeRecord(
        version,
        tuple(
            MergeTerm(Contribution(BranchRun(version, branch), 1.0, ""), 1 / branches)
            for branch in range(branches)
        ),
    )


def merged(aggregator: Aggregator, folder: Path, spec: TrainingSpec, version: int) -> int:
    """Merge a round, and return the size of the update."""
    runs = {run: contribution(folder, spec, run) for run in record(version).runs}
    aggregator.merge(record(version), runs, {"step": version})
    return payload_bytes(aggregator.update_folder(version, 0))


@pytest.mark.parametrize(
    ("codec", "outer"),
    [*((codec, "nesterov") for codec in CODECS), ("sparse_loco", "sgd"), ("sparse_loco", "adam")],
)
def test_members_that_add_the_updates_have_the_bits_of_each_version(
    tmp_path: Path, codec: str, outer: str
) -> None:
    spec = training(codec, outer)
    aggregator, weights = begun(tmp_path / "a", spec)
    for version in (1, 2, 3):
        merged(aggregator, tmp_path / "c", spec, version)
        update = WeightFolder(aggregator.update_folder(version, 0))
        decode = codec_of_update(spec, version).decode
        weights = {name: value + decode(update.read(name), value.shape) for name, value in weights.items()}
        stored = WeightFolder(aggregator.version_folder(version))
        assert stored.names() == sorted([*SHAPES, "positions"])
        for name, value in weights.items():
            assert torch.equal(stored.read(name), value), name
        assert damage(aggregator.version_folder(version)) is None


def test_without_compression_a_merge_is_the_outer_step(tmp_path: Path) -> None:
    spec = training("none", "sgd")
    aggregator, weights = begun(tmp_path / "a", spec)
    merged(aggregator, tmp_path / "c", spec, 1)
    mean = {name: (drawn(100, 0.01)[name] + drawn(101, 0.01)[name]) / 2 for name in SHAPES}
    stored = WeightFolder(aggregator.version_folder(1))
    for name, value in weights.items():
        torch.testing.assert_close(stored.read(name), value + mean[name], rtol=0, atol=1e-6)


def test_a_repeated_merge_writes_the_same_bits(tmp_path: Path) -> None:
    spec = training("sparse_loco")
    aggregator, _ = begun(tmp_path / "a", spec)
    merged(aggregator, tmp_path / "c", spec, 1)
    first = WeightFolder(aggregator.version_folder(1)).digest()
    runs = {run: tmp_path / "c" / f"1-{run.branch}" for run in record(1).runs}
    aggregator.merge(record(1), runs, {"step": 5})
    assert WeightFolder(aggregator.version_folder(1)).digest() == first
    assert aggregator.newest_whole(7) == 1


def test_a_damaged_version_is_not_used(tmp_path: Path) -> None:
    spec = training()
    aggregator, _ = begun(tmp_path / "a", spec)
    merged(aggregator, tmp_path / "c", spec, 1)
    file = aggregator.version_folder(1) / "model-00001-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert aggregator.newest_whole(1) == 0


def test_files_of_old_versions_are_removed(tmp_path: Path) -> None:
    spec = training("topk")
    aggregator, _ = begun(tmp_path / "a", spec)
    for version in (1, 2, 3):
        merged(aggregator, tmp_path / "c", spec, version)
        aggregator.prune(version, oldest_base=2)
    left = {str(folder.relative_to(tmp_path / "a")) for folder in (tmp_path / "a").glob("*/*")}
    assert left == {
        "versions/00000000",  # for the shapes
        "versions/00000002",
        "versions/00000003",
        "outer/00000002",
        "outer/00000003",
        "updates/00000003",
    }


def damaged(kind: str, place: Path) -> None:
    file = place / "model.safetensors"
    tensors = load_file(file)
    match kind:
        case "missing":
            del tensors["embed"]
        case "unknown":
            tensors["other"] = torch.zeros(3, dtype=torch.uint8)
        case "size":
            tensors["embed"] = tensors["embed"][:-1].clone()
        case "dtype":
            tensors["embed"] = tensors["embed"].float()
        case "nan":
            tensors["embed"] = torch.full((36,), torch.nan).view(torch.uint8)
        case "file":
            file.write_bytes(b"no tensors")
            return
        case "cut":
            file.write_bytes(file.read_bytes()[:-5])
            return
        case "nothing":
            file.unlink()
            return
    save_file(tensors, file)


@pytest.mark.parametrize("kind", ["missing", "unknown", "size", "dtype", "nan", "file", "cut", "nothing"])
def test_a_damaged_contribution_is_refused(tmp_path: Path, kind: str) -> None:
    spec = training()
    aggregator, _ = begun(tmp_path / "a", spec)
    run = BranchRun(1, 1)
    place = contribution(tmp_path / "c", spec, run)
    assert aggregator.check(run, place)
    damaged(kind, place)
    with pytest.raises(
        VerificationFailed, match="the contribution of branch 1 to round 1 is damaged"
    ) as failure:
        aggregator.check(run, place)
    assert failure.value.hint


def test_weights_that_are_not_finite_end_the_job_and_leave_no_version(tmp_path: Path) -> None:
    spec = training("none", "sgd")
    aggregator, _ = begun(tmp_path / "a", spec)
    runs = {}
    for run in record(1).runs:
        runs[run] = contribution(tmp_path / "c", spec, run)
        huge = {name: torch.full(shape, 3e38).reshape(-1).view(torch.uint8) for name, shape in SHAPES.items()}
        save_file(huge, runs[run] / "model.safetensors")
    doubled = MergeRecord(1, tuple(MergeTerm(term.contribution, 1.0) for term in record(1).terms))
    with pytest.raises(UserError):
        aggregator.merge(doubled, runs, {"step": 5})
    assert aggregator.newest_whole(1) == 0
    assert not list((tmp_path / "a").glob("*/.*"))


def test_contributions_before_the_first_compressed_step_are_sent_as_they_are(tmp_path: Path) -> None:
    spec = training("int8", from_step=10)
    aggregator, _ = begun(tmp_path / "a", spec)
    sizes = [merged(aggregator, tmp_path / "c", spec, version) for version in (1, 2)]
    assert sizes[0] > 4 * sum(value.numel() for value in drawn(0).values())
    assert sizes[1] < sizes[0]


def test_weights_that_members_load_are_kept(tmp_path: Path) -> None:
    spec = training("int8", steps=30)
    aggregator, _ = begun(tmp_path / "a", spec)
    for version in range(1, 6):
        merged(aggregator, tmp_path / "c", spec, version)
        aggregator.prune(version, oldest_base=version, loading=[1])
    assert WeightFolder(aggregator.version_folder(1)).names()
    assert not aggregator.version_folder(3).exists()
    aggregator.prune(5, oldest_base=5)
    assert not aggregator.version_folder(1).exists()


def test_a_fragment_changes_and_the_rest_stays_with_its_state(tmp_path: Path) -> None:
    policy = {"kind": "local", "branches": 2, "every": 5, "fragments": 2, "outer": {"name": "nesterov"}}
    spec = TrainingSpec.model_validate({"steps": 15, "synchronization": policy})
    weights = {f"layers.{number}.w": torch.randn(4, 3) for number in range(2)}
    aggregator = Aggregator(tmp_path / "a", spec)
    aggregator.begin([InitialShard({name: value}, {}) for name, value in weights.items()], {"step": 0})
    for version, names in ((1, ["layers.0.w"]), (2, ["layers.1.w"]), (3, sorted(weights))):
        runs = {}
        for run in record(version).runs:
            place = tmp_path / f"{run.round}-{run.branch}"
            place.mkdir()
            codec = codec_of_round(spec, version)
            save_file(
                {name: codec.encode(torch.ones(4, 3), {})[0] for name in names}, place / "model.safetensors"
            )
            aggregator.check(run, place)
            runs[run] = place
        aggregator.merge(record(version), runs, {"step": version})
        assert WeightFolder(aggregator.update_folder(version, 0)).names() == names
        stored = WeightFolder(aggregator.version_folder(version))
        for name, value in weights.items():
            assert torch.equal(stored.read(name), value) == (name not in names), (version, name)
        weights = {name: stored.read(name) for name in weights}
    whole = tmp_path / "whole"
    whole.mkdir()
    save_file({name: torch.zeros(48, dtype=torch.uint8) for name in weights}, whole / "model.safetensors")
    with pytest.raises(VerificationFailed, match=r"only one of it and the model has layers\.1\.w"):
        aggregator.check(BranchRun(1, 0), whole)


@pytest.mark.parametrize(("fragments", "is_right"), [(2, True), (3, False)])
def test_fragments_without_parameters_are_refused(tmp_path: Path, fragments: int, is_right: bool) -> None:
    policy = {"kind": "local", "branches": 2, "every": 5, "fragments": fragments}
    aggregator = Aggregator(tmp_path, TrainingSpec.model_validate({"steps": 20, "synchronization": policy}))
    weights = {f"layers.{number}.w": torch.zeros(4, 3) for number in range(2)}
    aggregator.begin([InitialShard(weights, {})], {"step": 0})
    with nullcontext() if is_right else pytest.raises(UserError, match=r"fragments: round 3 would merge no"):
        aggregator.require_fragments()


def test_the_size_of_a_folder_is_that_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_bytes(b"12345")
    (tmp_path / "config.json").write_bytes(b"123")
    assert folder_bytes(tmp_path) == 8
