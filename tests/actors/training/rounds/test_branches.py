"""A branch on real Ray nodes: shard store, contributions, merges, copies and later members."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray.cluster_utils import Cluster
from tests.conftest import wait_for
from torch import Tensor

from share_compute.compression.factory import codec_of_round, codec_of_update
from share_compute.data import StepOrder, prepare
from share_compute.errors import UserError, VerificationFailed
from share_compute.lifecycle.attempt_events import Assignment, BranchAssignment
from share_compute.lifecycle.branch_ids import branch_id
from share_compute.models.blueprint import blueprint_of
from share_compute.models.cells import derive_seed
from share_compute.models.factory import build_stage, dissect
from share_compute.models.storage.checkpoints import STATE
from share_compute.models.storage.weights import FolderWriter, WeightFolder
from share_compute.planning.planner import solve
from share_compute.protocol.membership import ShardPart
from share_compute.shards import Shard
from share_compute.specification import TrainJob, parse_job
from share_compute.topology import Topology
from share_compute.training.shares import WHOLE
from share_compute_actors.group.answering import answered, ask_shard_store
from share_compute_actors.group.naming import end_members, machines_with_members, members_of
from share_compute_actors.messages import Extent, Followed, pack_extents
from share_compute_actors.testing.mailbox import Mailbox
from share_compute_actors.training.member.schemas import VERSION
from share_compute_actors.training.membership.training_group import TrainingGroup
from share_compute_actors.training.shard_store import (
    FACTS,
    SAVED,
    STATE_OF_TRAINING,
    ShardStore,
    ShardStoreFacts,
)
from share_compute_actors.transport.pieces import Pieces
from share_compute_actors.wire import FLAG, NAMES, NOTHING

pytestmark = pytest.mark.slow

JOB = "job-branches"
NUMBER = 1


def spec_of(**training: Any) -> TrainJob:
    return parse_job(
        {
            "model": {
                "layers": [
                    {"type": "linear", "options": {"in_features": 64, "out_features": 40}},
                    {"type": "relu"},
                    {"type": "linear", "options": {"in_features": 40, "out_features": 30}},
                    {"type": "linear", "options": {"in_features": 30, "out_features": 10}},
                ]
            },
            "data": {"dataset": "digits"},
            "training": {
                "steps": 8,
                "batch_size": 6,
                "microbatches": 2,
                "synchronization": {"kind": "local", "branches": 3, "every": 2},
                "compression": {"name": "int8"},
                **training,
            },
            "parallelism": {"stages": 2, "strategy": "uniform"},
        }
    )


def write(folder: Path, tensors: dict[str, Tensor], **facts: Any) -> Path:
    """Write a folder of a version or an update, as the server does."""
    writer, pieces = FolderWriter(folder), Pieces({"model": tensors}, 0)
    number = 0
    while (piece := pieces.give(number)) is not None:
        writer.write(piece.name, piece.content.tobytes())
        number += 1
    writer.write_json(STATE, facts)
    writer.finish()
    return folder


class OneBranch:
    """One attempt at a branch, without a coordinator."""

    def __init__(self, topology: Topology, place: Path, attempt: int, checkpoint: Path | None) -> None:
        self.place = place
        self.folder = place / "branches" / str(NUMBER)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.assignment = Assignment(
            job_id=branch_id(JOB, NUMBER),
            attempt=attempt,
            spec=spec_of(),
            topology=topology,
            folder=self.folder,
            checkpoint=checkpoint,
            branch=BranchAssignment(number=NUMBER, version=0, start=1, data=place / "data"),
        )
        self.shard_store = ShardStore.remote(self.assignment.model_dump_json())
        self.mailbox = Mailbox.remote()
        try:
            self._start()
        except BaseException:
            self.end_servers()
            raise

    def _start(self) -> None:
        topology = self.assignment.topology
        self.facts: ShardStoreFacts = ask_shard_store(FACTS, self.shard_store.prepare.remote())
        profile = dissect(self.facts.blueprint)
        self.plan = solve(self.assignment.spec, topology, profile, 0, {}).plan
        runs = (2,)
        ask_shard_store(NOTHING, self.shard_store.cut.remote(list(runs)))
        self.group = TrainingGroup(
            self.assignment,
            self.facts,
            self.shard_store,
            self.mailbox,
            threading.Event(),
            runs,
            profile.tied_name,
            print,
        )
        self.group.load(self.plan)
        self.workers = [stage.members[0].contributor_id for stage in self.plan.stages]

    def close(self) -> None:
        self.group.dismiss()
        self.end_servers()

    def end_servers(self) -> None:
        ray.kill(self.mailbox)
        ray.kill(self.shard_store)

    def versions(self) -> dict[str, int | None]:
        return self.group.ask(VERSION, self.group.workers, "version")

    def save(self, folder: str, kind: Any) -> Path:
        self.group.gather(
            FLAG,
            {
                worker: self.group.handle(worker).snapshot.remote(place, kind, copies=False)
                for place, worker in enumerate(self.workers)
            },
        )
        members = [self.group.handle(worker) for worker in self.workers]
        state = STATE_OF_TRAINING.pack(self.facts.state)
        saving = self.shard_store.save.remote(folder, kind, state, self.workers, *members)
        assert ask_shard_store(SAVED, saving).size_bytes
        return self.folder / folder

    def use(self, folder: Path) -> None:
        ask_shard_store(NOTHING, self.shard_store.use_update.remote(str(folder)))

    def merge(self, version: int) -> None:
        calls = {
            worker: self.group.handle(worker).merge.remote(version, version - 1, closes_round=True)
            for worker in self.group.workers
        }
        self.group.gather(NOTHING, calls)

    def state(self, worker: str, *shard: ShardPart) -> dict[str, Tensor]:
        """Return the weights and the other state of a member's shard, or of a copy that it keeps."""
        member = self.group.handle(worker)
        names = dict.fromkeys(answered(NAMES, member.inventory.remote(*shard), worker), "weights")
        names |= dict.fromkeys(ray.get(member.optimizer_shapes.remote(*shard)), "optimizer_state")
        found = {}
        for name, method in names.items():
            extents = pack_extents([Extent(name, 0, None)])
            (piece,) = ray.get(getattr(member, method).remote(extents, *shard))
            found[name] = torch.from_numpy(piece.content.copy()).view(torch.float32)
        return found


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def common(tmp_path: Path) -> dict[str, Tensor]:
    """Return the weights of version 0, whose folder is ``versions/0``."""
    spec = spec_of()
    stage = build_stage(blueprint_of(spec, None, {}), Shard("m", 0, 4, 4), torch.device("cpu"))
    stage.initialize(0)
    weights = {name: tensor.detach() for name, tensor in stage.persistent().items()}
    samples = prepare(spec, tmp_path / "data").samples.size("train")
    write(tmp_path / "versions" / "0", weights, step=0, train_samples=samples, version=0)
    return weights


@pytest.fixture(autouse=True)
def nobody_is_left(ray_cluster: Cluster) -> Iterator[None]:
    assert ray_cluster  # else Ray would start a cluster by itself, for the call below
    yield
    end_members(JOB)


@pytest.fixture
def branch(topology: Topology, tmp_path: Path, common: dict[str, Tensor]) -> Iterator[OneBranch]:
    """Return a branch of version 0 with two stages, of one member each."""
    assert common
    started = OneBranch(topology, tmp_path, 1, tmp_path / "versions" / "0")
    yield started
    started.close()


def update_to(version: int, branch: OneBranch, common: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the payloads of an update."""
    codec = codec_of_update(branch.assignment.spec.training, version)
    source = torch.Generator().manual_seed(version)
    changes = {name: torch.randn(tensor.shape, generator=source) for name, tensor in common.items()}
    return {
        name: codec.encode(change, codec.begin(name, change.shape))[0] for name, change in changes.items()
    }


def test_a_contribution_is_a_folder_of_payloads(branch: OneBranch, common: dict[str, Tensor]) -> None:
    place = branch.save("rounds/1/contribution", "contribution")
    described = {file.name for file in place.iterdir() if file.suffix == ".json"}
    assert described == {"checksums.json", "model.safetensors.index.json", STATE}
    given, codec = WeightFolder(place), codec_of_round(branch.assignment.spec.training, 1)
    assert set(given.names()) == common.keys()
    for name, tensor in common.items():
        assert not codec.decode(given.read(name), tensor.shape).any(), "nothing was trained"


def test_members_merge_an_update_once(branch: OneBranch, tmp_path: Path, common: dict[str, Tensor]) -> None:
    update, codec = update_to(1, branch, common), codec_of_update(branch.assignment.spec.training, 1)
    assert branch.facts.version == 0
    damaged = {name: payload[:-1] for name, payload in update.items()}
    branch.use(write(tmp_path / "updates" / "damaged", damaged))
    with pytest.raises(VerificationFailed, match=r"update to version 1 has \d+ bytes for"):
        branch.merge(1)
    assert set(branch.versions().values()) == {0}
    folder = write(tmp_path / "updates" / "1", update)
    branch.use(folder)
    with pytest.raises(VerificationFailed, match="update from version 1 to 2 cannot be applied"):
        branch.merge(2)
    for _ in range(2):
        branch.merge(1)
        assert set(branch.versions().values()) == {1}
        for worker in branch.workers:
            for name, tensor in branch.state(worker).items():
                parameter = name.partition("::")[0]
                change = codec.decode(update[parameter], common[parameter].shape)
                if name in (parameter, f"{parameter}::branch.base"):
                    assert torch.equal(tensor, (common[parameter] + change).view(-1))
    file = next(folder.glob("model*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    with pytest.raises(VerificationFailed, match="the update of a merge cannot be used"):
        branch.use(folder)


def test_copies_and_members_that_join_have_the_state_of_the_branch(
    branch: OneBranch, topology: Topology, tmp_path: Path, common: dict[str, Tensor]
) -> None:
    first, second = branch.workers
    shards = [ShardPart(stage.start, stage.stop) for stage in branch.plan.stages]
    members = {worker: branch.group.handle(worker) for worker in branch.workers}
    for worker, other, number in ((first, second, 1), (second, first, 0)):
        followed = {number: Followed(other, members[other], shards[number])}
        answered(NOTHING, members[worker].keep_copies.remote(1, 0, followed, (other,)), worker)
    wait_for(lambda: branch.group.have_whole_copies(branch.workers), "whole copies")
    branch.use(write(tmp_path / "updates" / "1", update_to(1, branch, common)))
    branch.merge(1)
    assert not same(branch.state(first, shards[1]), branch.state(second))
    for worker in branch.workers:
        answered(NOTHING, members[worker].restart_copies.remote(), worker)
    wait_for(lambda: branch.group.have_whole_copies(branch.workers), "whole copies")
    assert same(branch.state(first, shards[1]), branch.state(second))
    assert same(branch.state(second, shards[0]), branch.state(first))

    joins = next(machine.id for machine in topology.contributors if machine.id not in branch.workers)
    shard = branch.plan.shard(0)

    def is_admitted() -> bool:
        branch.group.invite({joins: shard}, topology)
        return joins in branch.group.workers

    wait_for(is_admitted, "the member that joins")
    branch.group.load_shards(
        {joins: shard}, {joins: WHOLE}, lambda _: branch.group.inventory([branch.group.source(first)]), 0
    )
    branch.group.adopt([joins], 0, 0)
    branch.merge(1)
    assert same(branch.state(joins), branch.state(first))


def samples_of_step(branch: OneBranch, step: int) -> Any:
    """Return the inputs of the branch's samples in a step; the samples of a step are divided among three branches."""
    spec = branch.assignment.spec
    samples = prepare(spec, branch.place / "data").samples
    order = StepOrder(spec.training.seed, samples.size("train"), 3 * spec.training.batch_size)
    return samples.take("train", order.indices(step)[6 * NUMBER : 6 * NUMBER + 6])[0]


def test_the_next_attempt_continues_from_a_checkpoint_of_the_branch(
    branch: OneBranch, topology: Topology, tmp_path: Path, common: dict[str, Tensor]
) -> None:
    branch.use(write(tmp_path / "updates" / "1", update_to(1, branch, common)))
    branch.merge(1)
    before = [branch.state(worker) for worker in branch.workers]
    place = branch.save("checkpoints/step-00000000", "checkpoint")
    branch.group.dismiss()
    again = OneBranch(topology, tmp_path, 2, place)
    try:
        rows = ray.get(again.shard_store.train_rows.remote(2, [0, 1], "inputs"))
        assert np.array_equal(np.concatenate([rows[0], rows[1]]), samples_of_step(again, 2))
        assert set(again.versions().values()) == {1}
        assert all(
            same(again.state(worker), state) for worker, state in zip(again.workers, before, strict=True)
        )
    finally:
        again.close()


def test_members_of_a_branch_are_ended_with_its_job(branch: OneBranch) -> None:
    mine = branch_id(JOB, NUMBER)
    assert len(members_of(mine)) == 2
    assert members_of(JOB) == []
    assert machines_with_members()[branch.workers[0]] == {mine}
    assert end_members(JOB[:-1]) == 0
    assert end_members(JOB) == 2
    wait_for(lambda: members_of(mine) == [], "the end of the members")


def test_a_branch_needs_weights_to_begin_with(topology: Topology, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no weights with which branch 1 can begin"):
        OneBranch(topology, tmp_path, 1, None)


def test_members_of_branches_draw_different_dropout() -> None:
    seeds = {derive_seed("branch", 0, number) for number in range(100)}
    assert len(seeds) == 100
    for seed in seeds:
        spec_of(seed=seed)
