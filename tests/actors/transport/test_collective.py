"""Our backend of Ray's collective API, used through Ray's own functions, in actors on several nodes."""

from __future__ import annotations

import hashlib
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from operator import le
from typing import Any

import psutil
import pytest
import ray
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from tests.conftest import wait_for

from share_compute.errors import ContributorLost, StaleEpoch
from share_compute.protocol.tree import Node, SummationTree
from share_compute_actors.transport.collective.algorithms import packed
from share_compute_actors.transport.collective.expression import expression
from share_compute_actors.transport.keys import Keys, Peer
from share_compute_actors.transport.rendezvous import Rendezvous

DEADLINE_S = 240.0
"""Deadline of groups, and of everything that only a hang exceeds."""
HANGS_S = 120.0
"""Less than the deadline of a group: a wait that ends sooner was aborted. Benchmarks measure how fast that is."""
LARGE = 3 * 2**20 + 1
"""Elements: several pieces, and not a multiple of anything."""


def values(seed: int, microbatch: int, length: int) -> torch.Tensor:
    """Return numbers whose sum depends on the order."""
    generator = torch.Generator().manual_seed(seed * 1000 + microbatch)
    return torch.randn(length, generator=generator) * 10.0 ** (microbatch % 7)


def by_expression(tree: SummationTree, node: Node, seed: int, length: int) -> torch.Tensor:
    """Return the result of one process that adds in the order of the tree."""
    children = tree.children(node)
    if children is None:
        return values(seed, node.start, length)
    left, right = (by_expression(tree, child, seed, length) for child in children)
    return left + right


def digest(*tensors: torch.Tensor) -> str:
    """Return a digest of the bits."""
    return hashlib.sha256(torch.cat(tensors).numpy().tobytes()).hexdigest()


@ray.remote(num_cpus=0, max_concurrency=4)
class Worker:
    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.group: Any = None
        self.channel: Any = None
        self.sums = 0
        self.progress = threading.Condition()
        self.waiting: set[str] = set()
        """Groups in which this member waited for others."""

    def count(self) -> None:
        with self.progress:
            self.sums += 1
            self.progress.notify_all()

    def until(self, sums: int) -> None:
        """Return when this many sums are complete."""
        with self.progress:
            assert self.progress.wait_for(lambda: self.sums >= sums, DEADLINE_S)

    def until_joining(self, group: str) -> None:
        """Return when this member waits for the others of a group."""
        with self.progress:
            assert self.progress.wait_for(lambda: group in self.waiting, DEADLINE_S)

    def process_id(self) -> int:
        return os.getpid()

    def listen(self, name: str, epoch: int, keys: Keys, admitted: Mapping[bytes, str]) -> Peer:
        """Open this member's end of an epoch's channel."""
        from share_compute_actors.transport.channel import Channel

        if self.channel is not None:
            self.channel.close()
        self.name, self.channel = name, Channel(name, "job", epoch, "127.0.0.1", keys, admitted)
        return Peer(name, name, self.channel.endpoint, keys.public)

    def join(self, meeting: Rendezvous, peers: Sequence[Peer]) -> None:
        from share_compute_actors.transport.collective.backend import join_group
        from share_compute_actors.transport.rendezvous import ChannelStore

        for peer in peers:
            if peer.worker != self.name:
                self.channel.connect(peer)
        self.rank, self.world = meeting.members.index(self.name), len(meeting.members)
        worker = self

        class AnnouncingStore(ChannelStore):
            """A store that tells when it waits for the other members."""

            def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
                with worker.progress:
                    worker.waiting.add(meeting.group)
                    worker.progress.notify_all()
                super().wait(keys, timeout)

        store = AnnouncingStore(self.channel, self.name, meeting)
        self.group = join_group(meeting, self.rank, self.world, torch.device("cpu"), store)

    def exercise(self, group: str, length: int = 4) -> dict[str, Any]:
        from ray.util import collective

        own = torch.full((length,), float(self.rank + 1))
        summed, largest, received, multiplied = own.clone(), own.clone(), own.clone(), own.clone()
        collective.allreduce(summed, group)
        collective.allreduce(largest, group, op=collective.types.ReduceOp.MAX)
        collective.allreduce(multiplied, group, op=collective.types.ReduceOp.PRODUCT)
        collective.broadcast(received, src_rank=1, group_name=group)
        gathered = [torch.zeros(length) for _ in range(self.world)]
        collective.allgather(gathered, own, group)
        part = torch.zeros(2)
        collective.reducescatter(part, [torch.full((2,), float(rank)) for rank in range(self.world)], group)
        collective.barrier(group)
        return {
            "sum": summed.unique().tolist(),
            "max": largest.unique().tolist(),
            "product": multiplied.unique().tolist(),
            "broadcast": received.unique().tolist(),
            "gathered": [tensor[0].item() for tensor in gathered],
            "scattered": part.tolist(),
        }

    def add_packed(
        self, runs: Sequence[int], holdings: Sequence[Sequence[int]], length: int, seed: int
    ) -> str:
        """Sum as GPUs do."""
        tree = SummationTree(tuple(runs))
        held = [tree.cover(ids) for ids in holdings]
        parts = [by_expression(tree, node, seed, length) for node in held[self.rank]]
        out = torch.full((length,), torch.nan)
        combine = expression(tree, [node for nodes in held for node in nodes])
        packed(self.group.torch_group, parts, [len(nodes) for nodes in held], combine, out)
        return digest(out)

    def add(self, runs: Sequence[int], holdings: Sequence[Sequence[int]], length: int, seed: int) -> str:
        """Sum two buckets at once; return a digest of both."""
        tree = SummationTree(tuple(runs))
        held = [tree.cover(ids) for ids in holdings]
        waiting, sums = [], []
        for bucket in (seed, seed + 1):
            parts = [by_expression(tree, node, bucket, length) for node in held[self.rank]]
            out = torch.full((length,), torch.nan)
            waiting.append(
                self.group.start_tree_sum(parts, held, tree, out if not parts or bucket % 2 else None)
            )
            sums.append(out if not parts or bucket % 2 else parts[0])
        for wait in waiting:
            wait()
        return digest(*sums)

    def allreduce(self, length: int) -> list[float]:
        tensor = torch.full((length,), float(self.rank + 1))
        self.group.start_allreduce(tensor)()
        return tensor.unique().tolist()  # type: ignore[no-any-return]

    def sum_for_ever(self, length: int, *, by_tree: bool) -> None:
        """Sum until an operation fails; return the seconds since `abort`, or since the last sum."""
        tree = SummationTree((1,) * self.world)
        held = [(Node(rank, rank + 1),) for rank in range(self.world)]
        tensor = torch.ones(length)

        def work() -> None:
            wait = (
                self.group.start_tree_sum([tensor], held, tree)
                if by_tree
                else self.group.start_allreduce(tensor)
            )
            wait()

        self._for_ever(work)

    def pass_on_for_ever(self, length: int, *, to_all: bool) -> None:
        """Do the same with the tensor of the last rank: one message, from it to the first or to all members."""
        from ray.util import collective

        tensor, last, name = torch.ones(length), self.world - 1, self.group.group_name
        if to_all:
            self._for_ever(lambda: collective.broadcast(tensor, last, name))
        elif self.rank == last:
            self._for_ever(lambda: collective.send(tensor, 0, name))
        else:
            self._for_ever(lambda: collective.recv(tensor, last, name))

    def _for_ever(self, work: Callable[[], None]) -> None:
        with suppress(ContributorLost):
            while True:
                work()
                self.count()

    def abort(self, name: str) -> bool:
        from share_compute_actors.transport.collective.backend import abort_group

        is_known = abort_group(name)  # first, because an interrupted `join` forgets the group
        self.channel.interrupt()
        return is_known

    def leave(self, name: str) -> None:
        """Leave the group."""
        from ray.util import collective

        collective.destroy_collective_group(name)
        self.group = None
        self.channel.close()
        self.channel = None

    def descriptors(self) -> int:
        """Return how many descriptors are open."""
        return psutil.Process().num_fds()


class Crew:
    """Workers on several nodes, with a new channel for each group."""

    def __init__(self, nodes: list[Any], size: int) -> None:
        self.epoch = 0
        self.workers = [
            Worker.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(nodes[place].node_id, soft=False)
            ).remote()
            for place in range(size)
        ]
        self.process_ids = ray.get([worker.process_id.remote() for worker in self.workers])

    def join(
        self, name: str, size: int | None = None, timeout_s: float = DEADLINE_S, algorithm: Any = "auto"
    ) -> None:
        """Let the first ``size`` form a group."""
        joining = self.start_joining(name, size, self.workers[:size], timeout_s, algorithm)
        ray.get(joining, timeout=DEADLINE_S)

    def start_joining(
        self,
        name: str,
        size: int | None,
        come: Sequence[Any],
        timeout_s: float = DEADLINE_S,
        algorithm: Any = "auto",
    ) -> list[Any]:
        """Let the workers that take part join a group of the first ``size`` ranks."""
        self.epoch += 1
        members = {f"member-{rank}": worker for rank, worker in enumerate(self.workers[:size])}
        keys = {member: Keys.issue() for member in members}
        admitted = {pair.public: worker for worker, pair in keys.items()}
        peers = ray.get(
            [
                worker.listen.remote(member, self.epoch, keys[member], admitted)
                for member, worker in members.items()
            ]
        )
        sites = tuple(place // 2 for place in range(len(members)))
        meeting = Rendezvous(name, tuple(members), timeout_s, "127.0.0.1", algorithm, sites)
        return [worker.join.remote(meeting, peers) for worker in come]

    def dismiss(self) -> None:
        for worker in self.workers:
            ray.kill(worker)


@pytest.fixture(scope="module")
def crew(nodes: list[Any]) -> Iterator[Crew]:
    made = Crew(nodes, 4)
    yield made
    made.dismiss()


@pytest.fixture
def mortals(nodes: list[Any]) -> Iterator[Crew]:
    """Three workers that the test may kill."""
    made = Crew(nodes, 3)
    yield made
    for process_id in made.process_ids:
        if psutil.pid_exists(process_id):
            os.kill(process_id, signal.SIGCONT)
    made.dismiss()


@pytest.mark.parametrize("algorithm", ["auto", "ring", "tree", "sharded"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_rays_own_functions_work_on_it(crew: Crew, size: int, algorithm: str) -> None:
    name = f"ray/{size}/{algorithm}"
    crew.join(name, size, algorithm=algorithm)
    ranks = range(1, size + 1)
    for length in (4, LARGE):
        received = ray.get([worker.exercise.remote(name, length) for worker in crew.workers[:size]])
        for rank, one in enumerate(received):
            assert one == {
                "sum": [float(sum(ranks))],
                "max": [float(size)],
                "product": [float(math.factorial(size))],
                "broadcast": [2.0],
                "gathered": [float(place) for place in ranks],
                "scattered": [float(rank * size)] * 2,
            }
    ray.get([worker.leave.remote(name) for worker in crew.workers[:size]])


@st.composite
def holdings(draw: st.DrawFn, size: int) -> tuple[list[int], list[list[int]], int]:
    """Return runs of a tree, which ids each rank computed, and the length of a bucket."""
    runs = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    owners = draw(st.lists(st.integers(0, size - 1), min_size=sum(runs), max_size=sum(runs)))
    held = [[each for each, owner in enumerate(owners) if owner == rank] for rank in range(size)]
    return runs, held, draw(st.sampled_from([1, 2, 5, 1000, LARGE // 3]))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_sums_by_the_tree_have_the_bits_of_one_process(crew: Crew, size: int) -> None:
    name = f"tree/{size}"
    crew.join(name, size)

    @settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(holdings(size), st.integers(0, 100))
    def check(case: tuple[list[int], list[list[int]], int], seed: int) -> None:
        runs, held, length = case
        tree = SummationTree(tuple(runs))
        wanted = digest(*(by_expression(tree, tree.root, bucket, length) for bucket in (seed, seed + 1)))
        for received in ray.get(
            [worker.add.remote(runs, held, length, seed) for worker in crew.workers[:size]]
        ):
            assert received == wanted
        wanted = digest(by_expression(tree, tree.root, seed, length))
        packing = [worker.add_packed.remote(runs, held, length, seed) for worker in crew.workers[:size]]
        assert set(ray.get(packing)) == {wanted}

    check()
    ray.get([worker.leave.remote(name) for worker in crew.workers[:size]])


def test_large_sums_by_the_tree_go_in_pieces(crew: Crew) -> None:
    crew.join("pieces", 3)
    runs, held, length = [2, 1, 3], [[0, 3, 4, 5], [], [1, 2]], 2 * LARGE
    tree = SummationTree(tuple(runs))
    wanted = digest(*(by_expression(tree, tree.root, bucket, length) for bucket in (0, 1)))
    for received in ray.get([worker.add.remote(runs, held, length, 0) for worker in crew.workers[:3]]):
        assert received == wanted
    ray.get([worker.leave.remote("pieces") for worker in crew.workers[:3]])


def test_what_is_not_the_whole_sum_is_refused() -> None:
    tree = SummationTree((2, 2))
    with pytest.raises(ValueError, match="not the sum"):
        expression(tree, [Node(0, 2), Node(2, 3)])
    with pytest.raises(ValueError, match="twice"):
        expression(tree, [Node(0, 2), Node(0, 2), Node(2, 4)])
    with pytest.raises(ValueError, match="not the sum"):
        expression(tree, [Node(0, 4), Node(2, 3)])


def test_groups_leave_nothing_behind(crew: Crew) -> None:
    members = crew.workers[:2]

    def left_open() -> list[int]:
        return ray.get([worker.descriptors.remote() for worker in members])  # type: ignore[no-any-return]

    before: list[int] = []
    for turn in range(6):
        crew.join(f"turn/{turn}", 2)
        assert ray.get([worker.allreduce.remote(1000) for worker in members]) == [[3.0]] * 2
        ray.get([worker.leave.remote(f"turn/{turn}") for worker in members])
        if turn == 1:
            before = left_open()
    # On a busy machine gloo closes its connections a while after a member has left.
    wait_for(lambda: all(map(le, left_open(), before)), "closed connections")


@pytest.mark.chaos
@pytest.mark.parametrize(("algorithm", "by_tree"), [("auto", False), ("auto", True), ("hierarchical", True)])
def test_survivors_of_a_death_form_the_next_group_in_the_same_processes(
    mortals: Crew, algorithm: str, *, by_tree: bool
) -> None:
    mortals.join("job/1/0/0", algorithm=algorithm)
    running = [worker.sum_for_ever.remote(2**24, by_tree=by_tree) for worker in mortals.workers]
    ray.get(mortals.workers[0].until.remote(1))
    os.kill(mortals.process_ids[2], signal.SIGKILL)
    ray.get(running[:2], timeout=HANGS_S)
    mortals.join("job/1/1/0", 2)
    assert ray.get([worker.allreduce.remote(LARGE) for worker in mortals.workers[:2]]) == [[3.0]] * 2


@pytest.mark.chaos
@pytest.mark.parametrize(("algorithm", "by_tree"), [("auto", False), ("auto", True), ("ring", True)])
def test_waiting_for_an_unresponsive_member_can_be_ended(
    mortals: Crew, algorithm: str, *, by_tree: bool
) -> None:
    mortals.join("job/1/0/0", algorithm=algorithm)
    running = [worker.sum_for_ever.remote(2**22, by_tree=by_tree) for worker in mortals.workers]
    ray.get(mortals.workers[0].until.remote(1))
    os.kill(mortals.process_ids[2], signal.SIGSTOP)
    assert ray.get([worker.abort.remote("job/1/0/0") for worker in mortals.workers[:2]]) == [True, True]
    ray.get(running[:2], timeout=HANGS_S)
    mortals.join("job/1/1/0", 2)
    assert ray.get([worker.allreduce.remote(LARGE) for worker in mortals.workers[:2]]) == [[3.0]] * 2


@pytest.mark.chaos
@pytest.mark.parametrize("to_all", [False, True])
@pytest.mark.parametrize("dies", [False, True])
def test_a_message_that_is_half_through_keeps_nobody(mortals: Crew, *, dies: bool, to_all: bool) -> None:
    """Gloo cannot end a wait for a message of which a part arrived, so its connection is closed from outside."""
    mortals.join("job/1/0/0", 2)
    running = [worker.pass_on_for_ever.remote(2**26, to_all=to_all) for worker in mortals.workers[:2]]
    ray.get(mortals.workers[0].until.remote(1))
    os.kill(mortals.process_ids[1], signal.SIGKILL if dies else signal.SIGSTOP)
    if not dies:
        assert ray.get(mortals.workers[0].abort.remote("job/1/0/0"))
    ray.get(running[0], timeout=HANGS_S)
    ray.get(mortals.workers[0].leave.remote("job/1/0/0"), timeout=HANGS_S)


@pytest.mark.chaos
def test_an_unresponsive_member_is_given_up_at_the_deadline(mortals: Crew) -> None:
    mortals.join("job/1/0/0")  # what members import takes no part of the short deadline
    mortals.join("job/1/1/0", timeout_s=10.0)
    running = [worker.sum_for_ever.remote(2**22, by_tree=False) for worker in mortals.workers]
    ray.get(mortals.workers[0].until.remote(1))
    os.kill(mortals.process_ids[2], signal.SIGSTOP)
    ray.get(running[:2], timeout=HANGS_S)


@pytest.mark.chaos
@pytest.mark.parametrize("waits", [False, True])
def test_a_group_that_waits_for_a_member_to_join_can_be_ended(mortals: Crew, *, waits: bool) -> None:
    """This holds for a group that waits already, and for members that are notified before they begin to wait."""
    joining = mortals.start_joining("job/1/0/0", 3, mortals.workers[:2])
    if waits:
        ray.get([worker.until_joining.remote("job/1/0/0") for worker in mortals.workers[:2]])
    known = ray.get([worker.abort.remote("job/1/0/0") for worker in mortals.workers[:2]])
    assert not waits or known == [True, True]
    for one in joining:
        with pytest.raises(ray.exceptions.RayTaskError) as caught:
            ray.get(one, timeout=HANGS_S)
        assert isinstance(caught.value.cause, StaleEpoch)
    mortals.join("job/1/1/0", 2)
