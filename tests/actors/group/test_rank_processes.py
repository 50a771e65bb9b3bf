"""A member reports a rank that lacks memory as a lack of memory, and any other rank that ends as lost."""

from __future__ import annotations

import gc
import queue
import weakref
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor

from share_compute.errors import ContributorLost, OutOfMemory, ShareComputeError
from share_compute_actors.group.allocator import as_reported, out_of_memory_kills
from share_compute_actors.group.ranks.processes import RankProcesses

HUNGRY = "tests.actors.group.hungry_rank"


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize(
    ("fault", "expected", "message"),
    [
        ("torch", OutOfMemory, "out of memory during a step, in rank 1 of parallelism.tensor"),
        ("python", OutOfMemory, "out of memory during a step, in rank 1 of parallelism.tensor"),
        ("other", ContributorLost, "rank 1 failed: ValueError: the numbers are odd: a member with"),
    ],
)
def test_the_error_of_a_rank_is_that_of_its_member(
    fault: str, expected: type[Exception], message: str
) -> None:
    lost: list[ShareComputeError] = []
    with closing(RankProcesses(HUNGRY, 2, 2, 60, lost.append)) as ranks:
        ranks.launch(1, [fault])
        ranks.wait()
        ranks.tell(b"?")
        with pytest.raises(expected, match=message) as raised:
            ranks.wait()
        assert not ranks.process_ids
        # A member continues after a lack of memory, and ends after the loss of a rank.
        assert len(lost) == (expected is ContributorLost)
        reported = as_reported(raised.value)
        assert reported is raised.value
        if isinstance(reported, OutOfMemory):
            assert reported.taken_bytes > psutil.Process().memory_info().rss  # with that of the rank
            assert reported.hint


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize(("fault", "expected"), [("torch", OutOfMemory), ("other", ContributorLost)])
def test_the_error_of_a_rank_is_reported_while_its_member_cannot_raise_it(
    fault: str, expected: type[Exception]
) -> None:
    """A sum on GPUs with a rank that ended blocks the member."""
    lost: queue.SimpleQueue[ShareComputeError] = queue.SimpleQueue()
    with closing(RankProcesses(HUNGRY, 2, 2, 60, lost.put)) as ranks:
        ranks.launch(1, [fault])
        ranks.wait()
        ranks.watch()
        ranks.tell(b"?")
        assert type(lost.get(timeout=60)) is expected


@pytest.mark.xdist_group("ranks")
def test_a_lack_of_memory_is_not_reported_while_the_member_waits_for_an_answer() -> None:
    lost: list[ShareComputeError] = []
    with closing(RankProcesses(HUNGRY, 2, 2, 60, lost.append)) as ranks:
        ranks.launch(1, ["torch"])
        ranks.wait()
        ranks.watch()
        (rank,) = ranks.process_ids
        ranks.tell(b"?", is_answered=True)
        psutil.wait_procs([psutil.Process(rank)], timeout=60)
        with pytest.raises(OutOfMemory, match="in rank 1"):
            ranks.wait()
        assert not lost


@pytest.mark.xdist_group("ranks")
def test_a_rank_that_stops_without_an_error_is_reported_before_the_deadline() -> None:
    """On GPUs, NCCL would end the member's process at the deadline, without a report."""
    lost: queue.SimpleQueue[ShareComputeError] = queue.SimpleQueue()
    with closing(RankProcesses(HUNGRY, 2, 2, 1, lost.put)) as ranks:
        ranks.launch(1, ["none"])
        ranks.wait(60)
        ranks.watch()
        with ranks.computing():
            ranks.tell(b"?")
            found = lost.get(timeout=60)
    assert isinstance(found, ContributorLost)
    assert found.message.startswith("the ranks have computed for 0.9 s: a rank, or its device, has stopped")


@pytest.mark.parametrize(
    "take", [lambda: torch.empty(1 << 60, dtype=torch.uint8), lambda: bytearray(1 << 60)]
)
def test_a_lack_of_memory_in_the_first_rank_counts_all_ranks(take: Callable[[], object]) -> None:
    ranks = RankProcesses(HUNGRY, 2, 2, 60)
    with pytest.raises(OutOfMemory, match="in rank 0") as raised, ranks.computing(), ranks.computing():
        take()
    assert raised.value.taken_bytes > 0


def test_kills_of_the_kernel_are_counted(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    (proc / "self").mkdir(parents=True)
    assert out_of_memory_kills(proc, groups) is None
    (proc / "vmstat").write_text("pgfault 7\noom_kill 9\n")
    assert out_of_memory_kills(proc, groups) == 9
    (proc / "self" / "cgroup").write_text("4:cpu,memory:/one\n0::/two\n")
    assert out_of_memory_kills(proc, groups) == 9  # the groups do not count
    old, new = groups / "memory" / "one" / "memory.oom_control", groups / "two" / "memory.events"
    old.parent.mkdir(parents=True)
    old.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    assert out_of_memory_kills(proc, groups) == 2
    new.parent.mkdir(parents=True)
    new.write_text("low 0\noom 4\noom_kill 3\n")
    assert out_of_memory_kills(proc, groups) == 3


def test_a_step_that_lacked_memory_leaves_no_tensor() -> None:
    """An error whose traceback refers to its own frame would keep the tensors of the step until a collection."""
    left: list[weakref.ref[Tensor]] = []

    def step(ranks: RankProcesses) -> None:
        hidden = torch.ones(4)
        left.append(weakref.ref(hidden))
        with ranks.computing():
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    gc.disable()
    try:
        with suppress(OutOfMemory):
            step(RankProcesses(HUNGRY, 1, 1, 60))
        assert left[0]() is None
    finally:
        gc.enable()
