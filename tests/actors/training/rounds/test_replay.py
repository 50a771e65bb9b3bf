"""The step log of an asynchronous job replays to the same bits: pushes of a dense model, in the order of the log."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from share_compute.data.order import StepOrder
from share_compute.models.storage.weights import WeightFolder
from share_compute.specification import TrainingSpec
from share_compute.synchronization.aggregator import Aggregator, InitialShard
from share_compute.synchronization.branch import BranchState
from share_compute.synchronization.records import BranchRun, Contribution, MergeRecord
from share_compute.synchronization.rounds import Contributed, MergeRecorded, RecordMerge, RoundsMachine
from share_compute_actors.training.step_log import StepLog

BRANCHES, EVERY, STEPS, SAMPLES = 3, 2, 8, 60


def training(**compression: Any) -> TrainingSpec:
    policy = {"kind": "parameter_server", "branches": BRANCHES, "every": EVERY, "staleness": "unbounded"}
    return TrainingSpec.model_validate(
        {"steps": STEPS, "batch_size": 4, "synchronization": policy, "compression": compression}
    )


def initial() -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(3)
    shapes = {"0.weight": (16, 8), "0.bias": (16,), "2.weight": (4, 16), "2.bias": (4,)}
    return {name: 0.3 * torch.randn(shape, generator=source) for name, shape in shapes.items()}


class Trainee:
    """A branch: a dense model, the state of its Adam, and what it keeps between merges."""

    def __init__(self, spec: TrainingSpec, number: int) -> None:
        self.number, self.base, self.steps = number, 0, 0
        self._model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        self._model.load_state_dict(initial())
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=0.02)
        self._state = BranchState(spec, dict(self._model.named_parameters()), 0)
        self._order = StepOrder(spec.seed, SAMPLES, spec.batch_size, branches=BRANCHES, branch=number)

    def train(self) -> None:
        source = torch.Generator().manual_seed(5)
        inputs, classes = torch.randn(SAMPLES, 8, generator=source), torch.arange(SAMPLES) % 4
        for _ in range(EVERY):
            self.steps += 1
            batch = torch.from_numpy(self._order.indices(self.steps))
            self._optimizer.zero_grad()
            nn.functional.cross_entropy(self._model(inputs[batch]), classes[batch]).backward()
            self._optimizer.step()
        self._state.forget_contribution()

    def contribute(self, folder: Path) -> tuple[BranchRun, Path]:
        run = BranchRun(self.base + 1, self.number)
        place = folder / f"{run.branch}-{run.round}"
        place.mkdir(parents=True)
        save_file(self._state.contribution(), place / "model.safetensors")
        return run, place

    def follow(self, aggregator: Aggregator, version: int) -> None:
        """Continue with the weights of a version."""
        for each in range(self.base + 1, version + 1):
            update = WeightFolder(aggregator.update_folder(each, 0))
            payloads = {name: update.read(name) for name in update.names()}
            self._state.merge(each, each - 1, payloads, closes_round=each == self.base + 1)
        self.base = version


def begun(folder: Path, spec: TrainingSpec) -> Aggregator:
    aggregator = Aggregator(folder / "rounds", spec)
    aggregator.begin([InitialShard(initial(), {})], {"step": 0})
    return aggregator


def digests(aggregator: Aggregator, versions: int) -> list[str]:
    return [WeightFolder(aggregator.version_folder(each)).digest() for each in range(versions + 1)]


def trained(folder: Path, spec: TrainingSpec, seed: int) -> list[str]:
    """Train asynchronously: branches finish their rounds in a drawn order; return the digest of each version."""
    aggregator, machine = begun(folder, spec), RoundsMachine(spec.rounds, STEPS // EVERY)
    branches, drawn = [Trainee(spec, number) for number in range(BRANCHES)], Random(seed)
    with closing(StepLog(folder, 1)) as log:
        log.claim()
        while not machine.is_over:
            branch = drawn.choice([each for each in branches if not machine.is_done(each.number)])
            branch.train()
            run, place = branch.contribute(folder / "contributions")
            pushed = Contribution(run, float(EVERY * spec.batch_size), aggregator.check(run, place))
            (effect,) = machine.handle(Contributed(pushed))
            assert isinstance(effect, RecordMerge)
            aggregator.merge(effect.record, {run: place}, {"step": 0})
            log.merge(effect.record)
            machine.handle(MergeRecorded(effect.record))
            branch.follow(aggregator, machine.version)
    return digests(aggregator, machine.version)


def replayed(folder: Path, spec: TrainingSpec, records: list[MergeRecord]) -> list[str]:
    """Train what the records say, in their order, and return the digest of each version."""
    aggregator, branches = begun(folder, spec), [Trainee(spec, number) for number in range(BRANCHES)]
    for record in records:
        (term,) = record.terms
        known = term.contribution
        branch = branches[known.run.branch]
        branch.follow(aggregator, known.run.round - 1)
        branch.train()
        run, place = branch.contribute(folder / "contributions")
        assert run == known.run
        assert aggregator.check(run, place) == known.digest
        aggregator.merge(record, {run: place}, {"step": 0})
    return digests(aggregator, len(records))


def test_the_log_of_an_asynchronous_job_replays_to_the_same_bits(tmp_path: Path) -> None:
    spec = training(name="int8")
    found = trained(tmp_path / "first", spec, seed=0)
    with closing(StepLog(tmp_path / "first", 2)) as log:
        records = log.merges()
    assert len(records) == BRANCHES * STEPS // EVERY
    assert any(record.version - record.runs[0].round > 1 for record in records)  # pushes to older weights
    assert replayed(tmp_path / "second", spec, records) == found
    assert trained(tmp_path / "other", spec, seed=1)[-1] != found[-1]
