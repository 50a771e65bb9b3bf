"""Divisions of a batch on real Ray nodes: images in tiles, and machines that read the full batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from PIL import Image
from sklearn.datasets import load_digits, load_sample_image
from tests.actors.training.jobs.outcomes import (
    losses_of,
    require_no_change_by_a_kill,
    require_same_weights,
    runs_in_layouts,
    succeeded,
    validated,
    weights_of,
)
from tests.ray_nodes import Attempt

from share_compute.protocol.membership import Membership, fresh
from share_compute.shards import Shard
from share_compute_actors.training.member.samples import Rows, ShardSamples

RELU = {"type": "relu"}
TILES = [1, 1, 2, 2]


@ray.remote(num_cpus=0)
class Requests:
    """A shard store that records the requests, and returns rows of the microbatch's id."""

    def __init__(self) -> None:
        self._requests = list[tuple[int, list[int], str]]()

    def train_rows(self, step: int, microbatches: list[int], part: str) -> dict[int, Any]:
        """Record a request."""
        self._requests.append((step, list(microbatches), part))
        return {microbatch: np.full((2, 1), microbatch, dtype=np.float32) for microbatch in microbatches}

    def requests(self) -> list[tuple[int, list[int], str]]:
        """Return all requests."""
        return self._requests


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write scikit-learn's digits as PNG images, with one folder for each class, and return the folder."""
    folder, digits = tmp_path_factory.mktemp("pictures"), load_digits()
    for number, (pixels, digit) in enumerate(zip(digits.images[:600], digits.target, strict=False)):
        place = folder / str(digit)
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels * 15).astype(np.uint8)).save(place / f"{number}.png")
    return folder


def convolution(inputs: int, outputs: int, **options: Any) -> dict[str, Any]:
    given = {"in_channels": inputs, "out_channels": outputs, "kernel_size": 3, "padding": 1, **options}
    return {"type": "conv2d", "options": given}


def job(pictures: Path, slicing: Any, steps: int = 8) -> dict[str, Any]:
    block = [
        convolution(1, 8),
        RELU,
        {"type": "residual", "layers": [convolution(8, 8), RELU, convolution(8, 8)]},
        {"type": "max_pool2d", "options": {"kernel_size": 2}},
    ]
    return {
        "model": {
            "layers": [
                {"type": "sequential", "layers": block},
                {"type": "batch_norm2d", "options": {"num_features": 8}},
                convolution(8, 16, stride=2),
                RELU,
                {"type": "flatten"},
                {"type": "linear", "options": {"in_features": 64, "out_features": 10}},
            ]
        },
        "data": {
            "files": [str(pictures)],
            "images": {"height": 8, "width": 8, "channels": 1},
            "validation_fraction": 0.2,
            "test_fraction": 0.2,
            "slicing": slicing,
        },
        "training": {
            "steps": steps,
            "batch_size": 32,
            "microbatches": 2,  # with more threads, the order of sums follows from the first plan
            "schedule": {"name": "constant"},
            "optimizer": {"name": "sgd", "learning_rate": 0.05},
        },
        "parallelism": {"stages": 1, "members_per_stage": 1},
    }


LAYOUTS: list[dict[str, Any]] = [{}, {"stages": 2}, {"members_per_stage": 2}]


@pytest.mark.slow
@pytest.mark.exact
def test_tiles_have_the_same_bits_in_all_layouts_and_the_losses_of_whole_images(
    attempt: Attempt, tmp_path: Path, pictures: Path
) -> None:
    runs = runs_in_layouts(attempt, job(pictures, TILES), tmp_path, LAYOUTS)
    whole = succeeded(attempt(job(pictures, "data_parallel"), folder=tmp_path / "whole"))
    assert losses_of(runs[0]) == pytest.approx(losses_of(whole), abs=1e-5)
    expected, found = weights_of(tmp_path / "whole"), weights_of(tmp_path / "0")
    assert expected.keys() == found.keys()
    assert all(torch.allclose(found[name], value, atol=1e-5) for name, value in expected.items())


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.parametrize(
    ("slicing", "layout"),
    [
        pytest.param(TILES, {"members_per_stage": 2}, marks=pytest.mark.thorough),
        (TILES, {"stages": 2}),
        pytest.param("full_batch", {"members_per_stage": 2}, marks=pytest.mark.thorough),
    ],
    ids=["tiles-members", "tiles-stages", "full-batch-members"],
)
def test_a_kill_changes_no_bit(
    attempt: Attempt, tmp_path: Path, nodes: list[Any], pictures: Path, slicing: Any, layout: dict[str, int]
) -> None:
    document = job(pictures, slicing, steps=200)
    document["parallelism"] = {**document["parallelism"], **layout}
    document["training"]["validate_every"] = 50
    require_no_change_by_a_kill(attempt, document, tmp_path, nodes[1])


@pytest.mark.slow
@pytest.mark.exact
def test_a_full_batch_has_the_bits_of_data_parallelism(
    attempt: Attempt, tmp_path: Path, pictures: Path
) -> None:
    for slicing in ("data_parallel", "full_batch"):
        document = job(pictures, slicing)
        document["parallelism"]["members_per_stage"] = 2
        succeeded(attempt(document, folder=tmp_path / slicing))
    require_same_weights(tmp_path / "data_parallel", tmp_path / "full_batch")


@pytest.mark.slow
@pytest.mark.parametrize("reads_full_batch", [False, True])
def test_members_request_their_own_samples_or_all(nodes: list[Any], reads_full_batch: bool) -> None:
    del nodes
    owners = (("a", "b", "a", "b"), ("c", "c", "c", "c"))
    membership = Membership(1, ((0, 1), (1, 2)), (("a", "b"), ("c",)), owners, 3, fresh(owners))
    for worker, part, own in (("a", "inputs", [0, 2]), ("c", "targets", [0, 1, 2, 3])):
        store = Requests.remote()  # type: ignore[attr-defined]
        start, stop = membership.shard_of(worker)
        rows = (Rows(store, "inputs"), Rows(store, "targets"))
        samples = ShardSamples(Shard("m", start, stop, 2), *rows, reads_full_batch=reads_full_batch)
        samples.expect(membership, worker, 3)
        wanted = [0, 1, 2, 3] if reads_full_batch else own
        taken = samples.input(3, wanted[-1]) if part == "inputs" else samples.target(3, wanted[-1])
        assert taken is not None
        assert torch.equal(taken, torch.full((2, 1), float(wanted[-1])))
        assert ray.get(store.requests.remote()) == [(3, wanted, part), (4, wanted, part)]


def test_tiles_of_photographs_are_told_apart(attempt: Attempt, tmp_path: Path) -> None:
    """Patches of scikit-learn's two photographs, of a temple in China and a flower, are computed in 2 x 2 tiles."""
    for name in ("china", "flower"):
        place, pixels = tmp_path / "patches" / name, load_sample_image(f"{name}.jpg")
        place.mkdir(parents=True)
        for number in range(80):
            top, left = 40 * (number // 10), 60 * (number % 10)
            Image.fromarray(pixels[top : top + 32, left : left + 32]).save(place / f"{number}.png")
    block = [convolution(3, 8, stride=2), RELU, {"type": "max_pool2d", "options": {"kernel_size": 2}}]
    document = job(tmp_path / "patches", TILES, 40)
    document["model"]["layers"] = [
        {"type": "sequential", "layers": block},
        {"type": "flatten"},
        {"type": "linear", "options": {"in_features": 512, "out_features": 2}},
    ]
    document["data"]["images"] = {"height": 32, "width": 32}
    document["training"]["optimizer"] = {"learning_rate": 0.01}
    events = succeeded(attempt(document, folder=tmp_path / "tiles"))
    assert validated(events, "test").accuracy >= 0.9
