"""Backend of Ray's collective API with one process group per stage and epoch, and a deadline for every operation.

With Ray's own backends, a process keeps its first set of members forever, and sums can be wrong after a loss. So
`join_group` registers this backend, and creates a group with a name that is unique to the job, epoch and stage. The
functions of ``ray.util.collective``, such as ``allreduce``, then work on the group. The group uses torch's gloo on CPUs
and NCCL on GPUs.

A group that lost a member is no longer usable. `EpochGroup.abort` ends the operations that wait in the group, and
the remaining members form the group of the next epoch.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from ray.util import collective
from ray.util.collective.backend_registry import register_collective_backend
from ray.util.collective.collective_group.base_collective_group import BaseGroup
from ray.util.collective.types import ReduceOp as RayReduceOp
from torch import Tensor

from share_compute.compression.sums import BucketCodec
from share_compute.errors import ContributorLost, ShareComputeError, first_line
from share_compute.models.devices import operations
from share_compute.protocol.collectives import (
    Algorithm,
    Part,
    Route,
    exchanges_directly,
    parts_of,
    routes,
    spread,
)
from share_compute.protocol.tree import Node, SummationTree
from share_compute_actors.transport.collective.algorithms import (
    GlooLinks,
    Operator,
    fold,
    packed,
    start_allgather,
    start_reduce_scatter,
    start_sharded,
    start_tree,
    start_turn,
)
from share_compute_actors.transport.collective.background import BackgroundTasks
from share_compute_actors.transport.collective.compressed import start_compressed
from share_compute_actors.transport.collective.expression import expression, is_one_addition
from share_compute_actors.transport.collective.routed import start_routed
from share_compute_actors.transport.collective.sockets import GroupSockets, listening_ports
from share_compute_actors.transport.rendezvous import Rendezvous
from share_compute_actors.transport.traffic import Traffic

dist: Any = torch.distributed
"""Untyped on purpose: most of the functions used here have no types or no public name."""
BACKEND = "SHARE_COMPUTE"
_SUCCESS = torch._C._distributed_c10d.ErrorType.SUCCESS  # noqa: SLF001 - torch has no public name for it
_TREE_BYTES = {2: 16 * 2**10}
_TREE_BYTES_OF_MANY = 256 * 2**10
"""Largest tensor size, in bytes, for which ``tree`` was faster than gloo's ring in measurements.

For small groups, `_TREE_BYTES` has other sizes, by number of members."""

_OPERATIONS = {
    RayReduceOp.SUM: dist.ReduceOp.SUM,
    RayReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
    RayReduceOp.MIN: dist.ReduceOp.MIN,
    RayReduceOp.MAX: dist.ReduceOp.MAX,
}
_OPERATORS: dict[Any, Operator] = {
    RayReduceOp.SUM: torch.add,
    RayReduceOp.PRODUCT: torch.mul,
    RayReduceOp.MIN: torch.minimum,
    RayReduceOp.MAX: torch.maximum,
}
_meetings: dict[str, tuple[Rendezvous, Any, torch.device, GroupSockets]] = {}
"""Arguments of `EpochGroup` that Ray does not pass to the constructor, by group name."""
_endings: dict[str, Callable[[], None]] = {}
"""Functions that end a group's waiting operations, by group name, for all groups of this process."""
_forming = threading.Lock()
"""Held while `form_gloo` determines the ports of a new group; no other group may open ports meanwhile."""
_POLL_S = 0.1
"""Time between two checks of the group's connections during an operation, in seconds."""
_LEAVE_S = 0.25
"""Time limit in `EpochGroup.destroy_group` for operations to return, in seconds."""


class EpochGroup(BaseGroup):  # type: ignore[misc]
    """Communication group of one stage in one epoch.

    Every operation ends within the deadline of the group's `Rendezvous`. When a member is lost, operations in progress
    and all later ones raise `ContributorLost`. The content of their tensors is then undefined.
    """

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        meeting, store, device, self._sockets = _meetings.pop(group_name)
        facts = operations(device).facts
        self._uses_nccl = facts.collectives == "nccl"
        self._copies = facts.copies_sums
        self.device = torch.device("cpu") if self._copies else device
        """Device of tensors that are exchanged without a copy."""
        self._name = group_name
        self._algorithm = meeting.algorithm
        self._sites = meeting.sites or (0,) * world_size
        self._known: tuple[tuple[tuple[Node, ...], ...], SummationTree, tuple[Part, ...]] | None = None
        """Arguments and result of the last call of `_routed`."""
        self._spread: tuple[Route, ...] | None = None
        if self._uses_nccl:
            self._group: Any = _form_nccl(meeting, store, rank, world_size, device)
        else:
            self._group = form_gloo(meeting, store, rank, world_size, self._sockets)
        self._store = store
        """NCCL's threads call the store; torch does not keep an object of a Python class alive for them."""
        self._links = GlooLinks(self._group, rank, world_size)
        self._tasks = BackgroundTasks("sums")
        """Thread that runs the algorithms of `algorithms.py`, one at a time, while the caller computes."""
        self._works: list[Any] = []
        """Operations that gloo's own threads may still run."""

    @classmethod
    def backend(cls) -> str:
        """Return the name of this backend in Ray."""
        return BACKEND

    @classmethod
    def check_backend_availability(cls) -> bool:
        """Return whether torch.distributed, the only requirement, is available."""
        return bool(dist.is_available())

    @property
    def torch_group(self) -> Any:
        """The process group of ``torch.distributed`` that exchanges the tensors; None after `destroy_group`."""
        return self._group

    def count_in(self, traffic: Traffic) -> None:
        """From now on, count this member's sent and received bytes of sums in ``traffic``.

        Sums by gloo's or NCCL's own algorithms are counted as rings. Other operations are not counted.
        """
        self._links.traffic = traffic

    def start_allreduce(self, tensor: Tensor) -> Callable[[], None]:
        """Begin to sum ``tensor`` over all members in place; the returned function waits for the result."""
        return self._start_reduction(tensor, RayReduceOp.SUM)

    def start_tree_sum(
        self,
        parts: Sequence[Tensor],
        held: Sequence[Sequence[Node]],
        tree: SummationTree,
        out: Tensor | None = None,
    ) -> Callable[[], None]:
        """Begin to sum the parts of all members, with additions in the order of ``tree``.

        The result has the same bits as the sum in one process in the same order.

        Args:
            parts: this member's partial sums, one flat tensor for each node that ``held`` lists for it, in the same
                order and of equal length. They are overwritten.
            held: for each rank, the nodes of the tree whose sums that member has. Together the nodes cover the tree
                exactly once.
            tree: the order of additions.
            out: flat tensor that receives the whole sum. Default: the first of ``parts``.

        Returns:
            A function that waits until the sum is complete.

        Raises:
            ValueError: ``held`` does not cover the tree, or neither ``parts`` nor ``out`` is given.
            ContributorLost: a member of the group was lost.
        """
        combine = expression(tree, [node for nodes in held for node in nodes])
        if out is None:
            if not parts:
                raise ValueError("a member that holds no parts must pass the output tensor")
            out = parts[0]
        if self._copies and out.device != self.device:
            copies = [part.to(self.device, copy=True) for part in parts]
            found = torch.empty_like(out, device=self.device)
            return copied_back(self.start_tree_sum(copies, held, tree, found), found, out)
        if is_one_addition(tree, held):  # with two members, all algorithms send the same bytes
            if out is not parts[0]:
                out.copy_(parts[0])
            self._links.count_ring(out.nbytes)
            return self._start_native(lambda: self._open.allreduce([out], _reduction(RayReduceOp.SUM)))
        counts = [len(nodes) for nodes in held]
        if self._uses_nccl:
            self._links.count_ring(out.nbytes)
            self._guard(lambda: packed(self._open, parts, counts, combine, out))
            return _nothing
        algorithm = self._algorithm
        if algorithm == "auto" or exchanges_directly(algorithm, self._sites):
            return self._begin(start_sharded(self._links, parts, counts, combine, out))
        own = self._routed(algorithm, tuple(map(tuple, held)), tree)
        return self._begin(start_routed(self._links, parts, own, out))

    def _routed(
        self, algorithm: Algorithm, held: tuple[tuple[Node, ...], ...], tree: SummationTree
    ) -> tuple[Part, ...]:
        """Return this member's part of each route; the last result is kept, since steps differ seldom."""
        if self._known is None or self._known[:2] != (held, tree):
            found = (
                parts_of(route, held, tree)[self._links.rank]
                for route in routes(algorithm, held, tree, self._sites)
            )
            self._known = held, tree, tuple(found)
        return self._known[2]

    def start_compressed_sum(
        self,
        parts: Sequence[Tensor],
        held: Sequence[Sequence[Node]],
        tree: SummationTree,
        codec: BucketCodec,
        out: Tensor,
    ) -> Callable[[], None]:
        """Begin a sum of compressed runs; see `start_compressed`. The returned function waits for the sum.

        Raises:
            ContributorLost: a member of the group was lost.
        """
        if self._spread is None:
            algorithm = "sharded" if self._algorithm == "auto" else self._algorithm
            self._spread = spread(algorithm, self._sites)
        return self._begin(start_compressed(self._links, parts, held, tree, codec, out, self._spread))

    def start_reduce_scatter(
        self,
        parts: Sequence[Tensor],
        held: Sequence[Sequence[Node]],
        tree: SummationTree,
        shares: Sequence[slice],
        out: Tensor,
    ) -> Callable[[], None]:
        """Begin to sum the parts of all members in the order of ``tree``; each member gets the sum of its share.

        A share of the result has the same bits as this share of `start_tree_sum`.

        Args:
            parts: see `start_tree_sum`.
            held: see `start_tree_sum`.
            tree: see `start_tree_sum`.
            shares: range of elements whose sum each member gets, by rank.
            out: flat tensor whose own share receives the sum. The rest of it has no meaning afterwards.

        Returns:
            A function that waits until the sum is complete.

        Raises:
            ValueError: ``held`` does not cover the tree.
            ContributorLost: a member of the group was lost.
        """
        combine = expression(tree, [node for nodes in held for node in nodes])
        counts = [len(nodes) for nodes in held]
        return self._begin(start_reduce_scatter(self._links, parts, counts, shares, combine, out))

    def start_allgather(self, tensor: Tensor, shares: Sequence[slice]) -> Callable[[], None]:
        """Begin to send this member's share of a flat tensor to all others, and to receive theirs, in place.

        Args:
            tensor: flat tensor.
            shares: range of elements that each member has, by rank.

        Returns:
            A function that waits until all shares have arrived.

        Raises:
            ContributorLost: a member of the group was lost.
        """
        return self._begin(start_allgather(self._links, tensor, shares))

    def turn_ring(
        self, given: Mapping[int, Sequence[Tensor]], holders: Sequence[int]
    ) -> dict[int, list[Tensor]]:
        """Give the tensors of each place on a ring to the next place; return those that this member's places get.

        All members call this together, with tensors of equal shapes.

        Args:
            given: tensors of each of this member's places.
            holders: rank of the member that has each place.

        Raises:
            ContributorLost: a member of the group was lost.
        """
        run, found = start_turn(self._links, given, holders)
        self._begin(run)()
        return found

    def require_whole(self) -> None:
        """Check that this group was not aborted, and that no operation of NCCL has failed.

        Raises:
            ContributorLost: the group was aborted, or an operation failed.
        """
        is_nccl = self._uses_nccl and self._group is not None
        if self._sockets.is_shut or (is_nccl and self._group.get_error() != _SUCCESS):
            raise ContributorLost(
                f"a collective operation of {self._name} was ended",
                hint="form the group of the next epoch, without the member that was lost",
            )

    def abort(self) -> None:
        """End all waiting operations of this group at once, with `ContributorLost`. Thread-safe."""
        self._sockets.shut()
        if self._uses_nccl and self._group is not None:
            self._group.abort()

    # -- starting operations -----------------------------------------------------------------------------------------

    def _start_reduction(self, tensor: Tensor, operation: Any) -> Callable[[], None]:
        if self._copies and tensor.device != self.device:
            copy = tensor.to(self.device, copy=True)
            return copied_back(self._start_reduction(copy, operation), copy, tensor)
        algorithm = self._algorithm
        if algorithm == "auto":
            few = _TREE_BYTES.get(self._links.size, _TREE_BYTES_OF_MANY)
            algorithm = "tree" if tensor.nbytes <= few else "ring"
        if algorithm in ("ring", "hierarchical") or self._uses_nccl:
            self._links.count_ring(tensor.nbytes)
            return self._start_native(lambda: self._open.allreduce([tensor], _reduction(operation)))
        flat = tensor.view(-1)
        if algorithm == "tree":
            return self._begin(start_tree(self._links, flat, _OPERATORS[operation]))
        counts = [1] * self._links.size
        return self._begin(start_sharded(self._links, [flat], counts, fold(_OPERATORS[operation]), flat))

    def _begin(self, run: Callable[[], None]) -> Callable[[], None]:
        task = self._guard(lambda: self._tasks.submit(run))
        return lambda: self._guard(lambda: self._finish(task.result, task.done))

    def _start_native(self, start: Callable[[], Any]) -> Callable[[], None]:
        work = self._guard(start)
        if self._uses_nccl:
            return lambda: self._guard(work.wait)
        self._works = [each for each in self._works if not each.is_completed()] + [work]
        return lambda: self._guard(
            lambda: self._finish(lambda poll_s: work.wait(timedelta(seconds=poll_s)), work.is_completed)
        )

    def _finish(self, wait: Callable[[float], Any], is_done: Callable[[], bool]) -> None:
        """Wait until an operation is done; raise an error if it fails, or if a closed connection makes it hang."""
        is_over = False  # `_sockets` is checked only after the first wait, in which most operations finish
        while True:
            is_settled = is_done()
            try:
                wait(_POLL_S)
            except (RuntimeError, TimeoutError) as failure:
                if is_settled:
                    raise
                if is_over and not is_done():
                    raise RuntimeError("the connection to a member broke") from failure
                is_over = self._sockets.is_broken
            else:
                return

    @property
    def _open(self) -> Any:
        if self._group is None:
            raise RuntimeError("this member has left the group")
        return self._group

    def _guard(self, operation: Callable[[], Any]) -> Any:
        try:
            return operation()
        except (RuntimeError, dist.DistError, CancelledError) as failure:
            what = "was ended" if self._sockets.is_shut else f"failed: {first_line(failure)}"
            self.abort()  # otherwise other members could wait for this member until the deadline
            self._sockets.until_closed()
            raise ContributorLost(
                f"a collective operation of {self._name} {what}",
                hint="form the group of the next epoch, without the member that was lost",
            ) from failure

    # -- Ray's interface: blocking methods; each tensor is passed in a list of length 1 -------------------------------

    def allreduce(self, tensor: list[Tensor], allreduce_options: Any = None) -> None:
        """Reduce the tensors of all members, in place at every member."""
        self._start_reduction(tensor[0], _operation(allreduce_options))()

    def barrier(self, barrier_options: Any = None) -> None:  # noqa: ARG002 - Ray's interface
        """Wait for all members."""
        self._start_native(lambda: self._open.barrier(dist.BarrierOptions()))()

    def reduce(self, tensor: list[Tensor], reduce_options: Any = None) -> None:
        """Reduce the tensors of all members into the root's tensor."""
        options = dist.ReduceOptions()
        options.reduceOp = _OPERATIONS[_operation(reduce_options)]
        options.rootRank = reduce_options.root_rank
        self._start_native(lambda: self._open.reduce(tensor, options))()

    def broadcast(self, tensor: list[Tensor], broadcast_options: Any = None) -> None:
        """Copy the root's tensor to all members."""
        options = dist.BroadcastOptions()
        options.rootRank = broadcast_options.root_rank
        own = [each.to(self.device) for each in tensor] if self._copies else tensor
        wait = self._start_native(lambda: self._open.broadcast(own, options))
        (copied_back(wait, own[0], tensor[0]) if own[0] is not tensor[0] else wait)()

    def allgather(
        self,
        tensor_list: list[list[Tensor]],
        tensor: list[Tensor],
        allgather_options: Any = None,  # noqa: ARG002 - Ray's interface
    ) -> None:
        """Copy the tensors of all members into ``tensor_list[0]``, at every member."""
        self._start_native(lambda: self._open.allgather(tensor_list, tensor))()

    def reducescatter(
        self, tensor: list[Tensor], tensor_list: list[list[Tensor]], reducescatter_options: Any = None
    ) -> None:
        """Reduce the tensors of all members, and give each member its own part of the result."""
        options = dist.ReduceScatterOptions()
        options.reduceOp = _OPERATIONS[_operation(reducescatter_options)]
        self._start_native(lambda: self._open.reduce_scatter(tensor, tensor_list, options))()

    def send(self, tensor: list[Tensor], send_options: Any) -> None:
        """Send a tensor to one member."""
        self._begin(lambda: self._open.send(tensor, send_options.dst_rank, 0).wait())()

    def recv(self, tensor: list[Tensor], recv_options: Any) -> None:
        """Receive a tensor from one member."""
        self._begin(lambda: self._open.recv(tensor, recv_options.src_rank, 0).wait())()

    def destroy_group(self) -> None:
        """Leave the group; operations in which other members still wait for this member fail."""
        _endings.pop(self._name, None)
        self._sockets.shut()
        self._tasks.end()
        group, self._group = self._group, None
        if self._uses_nccl:
            group.abort()
        self._links.leave()
        works, self._works = self._works, []

        def is_idle() -> bool:
            return self._tasks.has_ended and all(work.is_completed() for work in works)

        until_s = time.monotonic() + _LEAVE_S
        while not is_idle() and time.monotonic() < until_s:
            time.sleep(0.001)
        if not is_idle():
            threading.Thread(target=_keep, args=(group, is_idle), name="keeps", daemon=True).start()


def _keep(group: Any, is_idle: Callable[[], bool]) -> None:  # noqa: ARG001 - the reference keeps it alive
    """Keep a group alive until its operations end; before that, gloo's destructor would block all threads."""
    while not is_idle():
        time.sleep(1.0)


def copied_back(wait: Callable[[], None], found: Tensor, out: Tensor) -> Callable[[], None]:
    """Return a function that waits for a result in one tensor and then copies it to another, on another device."""

    def finish() -> None:
        wait()
        out.copy_(found)

    return finish


def _nothing() -> None:
    """Do nothing: the GPU executes later operations of the stream after the sum, so no wait is needed."""


def _reduction(operation: Any) -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = _OPERATIONS[operation]
    return options


def _operation(options: Any) -> Any:
    # Ray 2.60 passes the options class itself for allreduce, so its default may be read from the class.
    return getattr(options, "reduceOp", RayReduceOp.SUM)


def _form_nccl(meeting: Rendezvous, store: Any, rank: int, world_size: int, device: torch.device) -> Any:
    """Return an NCCL group that is connected to the other members.

    By default NCCL connects in the first operation. That would be too late: ``store`` may be used on this thread only,
    and operations may begin on a thread of autograd. NCCL waits without a deadline for members that never connect, so
    all members report through ``store`` first.
    """
    # Without this value (CleanUpOnly), torch ends the whole process when an operation fails or passes its deadline.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
    timeout = timedelta(seconds=meeting.timeout_s)
    store.set(f"present/{rank}", b"+")
    store.wait([f"present/{other}" for other in range(world_size) if other != rank], timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout  # noqa: SLF001 - torch has no public name for it
    group = dist.ProcessGroupNCCL(store, rank, world_size, options)
    group.eager_connect_single_device(operations(device).current())
    return group


def form_gloo(meeting: Rendezvous, store: Any, rank: int, world_size: int, sockets: GroupSockets) -> Any:
    """Return a gloo group that is connected to the other members, and add its TCP connections to ``sockets``."""
    options = dist.ProcessGroupGloo._Options()  # noqa: SLF001 - torch has no public name for it
    options._timeout = timedelta(seconds=meeting.timeout_s)  # noqa: SLF001
    options._threads = 2  # noqa: SLF001
    with _forming:
        before = listening_ports()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=meeting.address)]  # noqa: SLF001
        own = listening_ports() - before
    store.set(f"ports/{rank}", " ".join(map(str, own)))
    group = dist.ProcessGroupGloo(store, rank, world_size, options)
    others = {
        int(port)
        for other in range(world_size)
        if other != rank
        for port in store.get(f"ports/{other}").split()
    }
    sockets.adopt(own, others)
    return group


def join_group(
    meeting: Rendezvous, rank: int, world_size: int, device: torch.device, store: Any
) -> EpochGroup:
    """Form the group of one stage for one epoch, and return it; all its members must call this function.

    Args:
        meeting: name, members, deadline and algorithm of the group.
        rank: rank of this member.
        world_size: number of members.
        device: device of the tensors that the group sums.
        store: a ``torch.distributed.Store`` for this group alone, in which its members exchange addresses.

    Raises:
        ContributorLost: not all members joined in time, or `abort_group` was called.
        StaleEpoch: a later epoch has begun, or the store's channel lost a message.
    """
    with suppress(ValueError):  # this process has already registered the backend
        register_collective_backend(BACKEND, EpochGroup)
    sockets = GroupSockets()
    _endings[meeting.group] = sockets.shut
    _meetings[meeting.group] = (meeting, store, device, sockets)
    try:
        collective.init_collective_group(world_size, rank, BACKEND, meeting.group)
    except (RuntimeError, dist.DistError, ShareComputeError) as failure:
        _endings.pop(meeting.group, None)
        sockets.shut()
        if isinstance(failure, ShareComputeError):
            raise
        raise ContributorLost(
            f"group {meeting.group} could not form: {first_line(failure)}",
            hint="check that these machines reach each other, then resume the job",
        ) from failure
    group: EpochGroup = collective.get_group_handle(meeting.group)
    _endings[meeting.group] = group.abort
    return group


def leave_group(group: EpochGroup) -> None:
    """Leave a group, and remove it from Ray's registry."""
    collective.destroy_collective_group(group.group_name)


def abort_group(name: str) -> bool:
    """End the waiting operations of this process in a group; they raise `ContributorLost`. Thread-safe.

    If the group is still forming, `join_group` fails as soon as the group's store answers.

    Returns:
        Whether this process has a group with this name.
    """
    end = _endings.get(name)
    if end is None:
        return False
    end()
    return True
