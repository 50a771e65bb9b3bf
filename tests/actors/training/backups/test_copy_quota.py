"""Copies of other members' shards stay within the free space, on a disk or in memory that an owner lends."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from tests.actors.training.backups.test_copies import directly
from tests.actors.training.backups.test_followers import CPU, WHOLE, Trainer, same
from tests.conftest import wait_for

from share_compute.errors import NoCopy, ShareComputeError, Unavailable
from share_compute_actors.group.allocator import peak_resident_bytes
from share_compute_actors.machine.temporary import is_memory, temporary_folder
from share_compute_actors.messages import Followed
from share_compute_actors.training.backups.copies import Copies
from share_compute_actors.training.backups.copy_quota import CopyQuota, reserve_bytes
from share_compute_actors.training.backups.followers import Follower
from share_compute_actors.training.backups.logs import gradient_messages
from share_compute_actors.training.backups.tensor_file import TensorFile
from share_compute_actors.transport.envelope import WireLabel

SHARED = Path("/dev/shm")
in_memory = pytest.mark.skipif(
    not SHARED.is_dir() or not is_memory(SHARED), reason="no file system in memory"
)
MIB = 2**20


class Narrow(CopyQuota):
    """A quota with a small disk."""

    def __init__(self, size: int, folder: Path) -> None:
        super().__init__(folder=folder)
        self.size = size

    def left_bytes(self) -> int:
        return self.size - self.taken_bytes


def test_some_of_a_disk_stays_free(tmp_path: Path) -> None:
    assert reserve_bytes(10**9) == 50_000_000
    assert reserve_bytes(10**12) == 2**30
    quota = CopyQuota(lent_bytes=1, folder=tmp_path)
    assert not is_memory(tmp_path)
    quota.take(MIB)  # on a disk, the lent memory does not matter
    with pytest.raises(Unavailable, match=f"more in {tmp_path}, and .* are left"):
        quota.take(2**60)


@in_memory
def test_what_lies_in_memory_counts_as_lent_memory() -> None:
    quota = CopyQuota(lent_bytes=peak_resident_bytes() + 512 * MIB, folder=SHARED)
    quota.take(300 * MIB)
    with pytest.raises(Unavailable, match="300 MiB more in /dev/shm, which is memory") as refused:
        quota.take(300 * MIB)
    assert "TMPDIR" in refused.value.hint
    quota.give_back(300 * MIB)
    quota.take(300 * MIB)


@in_memory
def test_copies_lie_on_a_disk_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(SHARED))
    for name in ("TMPDIR", "TEMP", "TMP"):
        monkeypatch.delenv(name, raising=False)
    lasting = Path("/var/tmp")
    assert temporary_folder() == (SHARED if is_memory(lasting) else lasting)
    monkeypatch.setenv("TMPDIR", str(SHARED))
    assert temporary_folder() == SHARED


def test_a_file_counts_what_it_takes_and_gives_it_back(tmp_path: Path) -> None:
    quota = Narrow(100, tmp_path)
    file = TensorFile(quota)
    for _ in range(3):
        file.put("one", torch.ones(20))
    with pytest.raises(Unavailable):
        file.put("other", torch.ones(6))
    assert file.names == ["one"]
    file.put("other", torch.ones(5))
    file.close()
    file.close()
    quota.take(100)


def copies_in(quota: CopyQuota, trainer: Trainer) -> tuple[Copies, Follower, list[ShareComputeError]]:
    """Return the copies of a backup with this quota, its copy of the trainer's shard, and its reports."""
    reported: list[ShareComputeError] = []
    copies = Copies("bob", trainer.training, CPU, reported.append, quota, reach=directly)
    copies.keep(1, trainer.step, {0: Followed("ann", trainer.copier, WHOLE)})
    copy = copies.of(WHOLE)
    assert copy is not None
    wait_for(lambda: copy.is_whole or reported, "the copy, or the reason why there is none")
    return copies, copy, reported


def take_step(copies: Copies, trainer: Trainer) -> None:
    """Let the trainer take a step. It needs the acknowledgement of its backup, whether that has a copy or not."""
    trainer.prepare()
    number, runner = trainer.step + 1, trainer.runner
    thanked = [
        copies.take(WireLabel("train", number, "log", place, 0), tensor.clone())
        for place, tensor in gradient_messages(
            runner.gradients, runner.loss_scale, *runner.update_of(trainer.step)
        )
    ]
    assert thanked[-1] is not None
    assert thanked[-1].owner == "ann"
    trainer.step = number
    runner.apply(number, 1.0)


def test_a_copy_for_which_there_is_no_space_is_not_begun(tmp_path: Path) -> None:
    trainer = Trainer()
    snapshot = 3 * sum(tensor.nbytes for tensor in trainer.runner.stage.persistent().values())
    copies, copy, reported = copies_in(Narrow(snapshot, tmp_path), trainer)
    (said,) = reported
    assert isinstance(said, NoCopy)
    assert said.lacks_space
    assert f"more in {tmp_path}" in said.message
    assert not copy.is_whole
    assert copies.catch_up(), "nobody is to wait for it"
    take_step(copies, trainer)
    assert len(reported) == 1
    copies.keep(1, 1, {})


def test_a_copy_whose_gradients_find_no_space_is_given_up_and_gives_its_quota_back(tmp_path: Path) -> None:
    trainer = Trainer()
    trainer.take_step()  # from now on Adam has state, twice as large as the weights
    gradient = sum(tensor.nbytes for tensor in trainer.runner.stage.persistent().values())
    quota = Narrow(5 * gradient, tmp_path)
    copies, copy, reported = copies_in(quota, trainer)
    assert copy.is_whole
    quota.size = int(4.5 * gradient)  # another process takes some of the space
    take_step(copies, trainer)
    assert not reported
    take_step(copies, trainer)
    (said,) = reported
    assert isinstance(said, NoCopy)
    assert said.lacks_space
    assert not copy.bring_to(2, {2: 1.0})
    take_step(copies, trainer)
    copies.keep(1, trainer.step, {})
    assert len(reported) == 1
    wait_for(lambda: quota.taken_bytes == 0, "the space of the copy")


def test_a_folder_that_is_gone_costs_the_copy_alone(tmp_path: Path) -> None:
    trainer, folder = Trainer(), tmp_path / "temporary"
    folder.mkdir()
    quota = CopyQuota(folder=folder)
    folder.rmdir()
    copies, copy, reported = copies_in(quota, trainer)
    assert not copy.is_whole
    take_step(copies, trainer)
    assert {type(said) for said in reported} == {NoCopy}
    copies.keep(1, 1, {})


def test_a_copy_that_is_there_needs_no_more_space_to_be_brought_forward(tmp_path: Path) -> None:
    trainer = Trainer()
    trainer.take_step()
    quota = Narrow(MIB, tmp_path)
    copies, copy, reported = copies_in(quota, trainer)
    take_step(copies, trainer)
    quota.size = 0  # another process takes all of the space
    assert copy.bring_to(2, {2: 1.0})
    assert same(copy, trainer)
    assert not reported
    copies.keep(1, 2, {})


def test_a_copy_without_space_to_be_brought_forward_is_given_up(tmp_path: Path) -> None:
    trainer = Trainer()  # without the state of Adam, which exists after the first step
    quota = Narrow(MIB, tmp_path)
    copies, copy, reported = copies_in(quota, trainer)
    take_step(copies, trainer)
    quota.size = 0
    assert not copy.bring_to(1, {1: 1.0})
    (said,) = reported
    assert isinstance(said, NoCopy)
    assert said.lacks_space
    copies.keep(1, 1, {})
