"""Our backend of Ray's collective API: one process group for each epoch, every operation with a deadline.

Ray's own named groups keep the process's first world for ever and can return a wrong sum after a loss, so
`join_group` registers this backend and makes a group whose name is unique for job, epoch and pool;
``ray.util.collective.allreduce`` and friends then work on it. Underneath is torch's gloo on CPUs and NCCL on GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from ray.util import collective
from ray.util.collective.backend_registry import register_collective_backend
from ray.util.collective.collective_group.base_collective_group import BaseGroup
from ray.util.collective.types import ReduceOp as RayReduceOp
from torch import Tensor

from share_compute.errors import ContributorLost
from share_compute_actors.messages import Rendezvous

dist: Any = torch.distributed
"""Untyped on purpose: most of what is used here has no types or no public name."""
BACKEND = "SHARE_COMPUTE"

_OPERATIONS = {
    RayReduceOp.SUM: dist.ReduceOp.SUM,
    RayReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
    RayReduceOp.MIN: dist.ReduceOp.MIN,
    RayReduceOp.MAX: dist.ReduceOp.MAX,
}
_meetings: dict[str, tuple[Rendezvous, torch.device]] = {}
"""Ray makes a group from its name, rank and size alone; where to meet is left here for it."""


class Meeting:
    """Held by the coordinator: the store at which the members of one epoch find each other."""

    def __init__(self, host: str, timeout_s: float) -> None:
        self.host = host
        self._store = dist.TCPStore(
            host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
        )

    @property
    def port(self) -> int:
        """TCP port of the store."""
        return int(self._store.port)


class EpochGroup(BaseGroup):  # type: ignore[misc]
    """The members of one pool in one epoch."""

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        meeting, device = _meetings.pop(group_name)
        self._name = group_name
        timeout = timedelta(seconds=meeting.timeout_s)
        store = dist.TCPStore(
            meeting.host, meeting.port, is_master=False, wait_for_workers=False, timeout=timeout
        )
        store = dist.PrefixStore(group_name, store)
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout  # noqa: SLF001 - torch has no public name for it
            self._group: Any = dist.ProcessGroupNCCL(store, rank, world_size, options)
        else:
            options = dist.ProcessGroupGloo._Options()  # noqa: SLF001
            options._timeout = timeout  # noqa: SLF001
            options._threads = 2  # noqa: SLF001
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=meeting.address)]  # noqa: SLF001
            self._group = dist.ProcessGroupGloo(store, rank, world_size, options)

    @classmethod
    def backend(cls) -> str:
        """Name under which Ray knows it."""
        return BACKEND

    @classmethod
    def check_backend_availability(cls) -> bool:
        """It needs torch.distributed only."""
        return bool(dist.is_available())

    def start_allreduce(self, tensor: Tensor) -> Callable[[], None]:
        """Begin to sum ``tensor`` over all members in place; the result is there when the returned call returns."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM
        work = self._guard(lambda: self._group.allreduce([tensor], options))
        return lambda: self._guard(work.wait)

    def _guard(self, operation: Callable[[], Any]) -> Any:
        try:
            return operation()
        except (RuntimeError, dist.DistError) as failure:
            raise ContributorLost(
                f"a collective operation of {self._name} failed: {str(failure).splitlines()[0]}",
                mend="resume the job from its last checkpoint",
            ) from failure

    def _run(self, start: Callable[[], Any]) -> None:
        self._guard(lambda: start().wait())

    # What follows is Ray's interface; each takes a list of one tensor and blocks.

    def allreduce(self, tensor: list[Tensor], allreduce_options: Any = None) -> None:
        """Reduce in place over all members."""
        options = dist.AllreduceOptions()
        options.reduceOp = _operation(allreduce_options)
        self._run(lambda: self._group.allreduce(tensor, options))

    def barrier(self, barrier_options: Any = None) -> None:  # noqa: ARG002 - Ray's interface
        """Wait for all members."""
        self._run(self._group.barrier)

    def reduce(self, tensor: list[Tensor], reduce_options: Any = None) -> None:
        """Reduce to the root."""
        options = dist.ReduceOptions()
        options.reduceOp = _operation(reduce_options)
        options.rootRank = reduce_options.root_rank
        self._run(lambda: self._group.reduce(tensor, options))

    def broadcast(self, tensor: list[Tensor], broadcast_options: Any = None) -> None:
        """Copy the root's tensor to all members."""
        options = dist.BroadcastOptions()
        options.rootRank = broadcast_options.root_rank
        self._run(lambda: self._group.broadcast(tensor, options))

    def allgather(
        self,
        tensor_list: list[list[Tensor]],
        tensor: list[Tensor],
        allgather_options: Any = None,  # noqa: ARG002 - Ray's interface
    ) -> None:
        """Gather everybody's tensor at everybody."""
        self._run(lambda: self._group.allgather(tensor_list, tensor))

    def reducescatter(
        self, tensor: list[Tensor], tensor_list: list[list[Tensor]], reducescatter_options: Any = None
    ) -> None:
        """Reduce, and leave each member its own part."""
        options = dist.ReduceScatterOptions()
        options.reduceOp = _operation(reducescatter_options)
        self._run(lambda: self._group.reduce_scatter(tensor, tensor_list, options))

    def send(self, tensor: list[Tensor], send_options: Any) -> None:
        """Send to one member."""
        self._run(lambda: self._group.send(tensor, send_options.dst_rank, 0))

    def recv(self, tensor: list[Tensor], recv_options: Any) -> None:
        """Receive from one member."""
        self._run(lambda: self._group.recv(tensor, recv_options.src_rank, 0))

    def destroy_group(self) -> None:
        """Leave; the sockets close with the last reference."""
        self._group = None


def _operation(options: Any) -> Any:
    # Ray 2.60 passes the options class itself for allreduce, so its default may be read from the class.
    return _OPERATIONS[getattr(options, "reduceOp", RayReduceOp.SUM)]


def join_group(meeting: Rendezvous, rank: int, world_size: int, device: torch.device) -> EpochGroup:
    """Form the group of one pool for one epoch; all its members must call this.

    Raises:
        ContributorLost: not everybody came in time.
    """
    with suppress(ValueError):  # this process registered it before
        register_collective_backend(BACKEND, EpochGroup)
    _meetings[meeting.group] = (meeting, device)
    try:
        collective.init_collective_group(world_size, rank, BACKEND, meeting.group)
    except (RuntimeError, dist.DistError) as failure:
        raise ContributorLost(
            f"group {meeting.group} could not form: {str(failure).splitlines()[0]}",
            mend="check that these machines reach each other, then resume the job",
        ) from failure
    group: EpochGroup = collective.get_group_handle(meeting.group)
    return group
