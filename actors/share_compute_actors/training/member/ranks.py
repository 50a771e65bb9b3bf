"""Ranks of a member divide the layers of its training stage.

Tensors, parameters and gradients go through a process group of torch: gloo on parts of a CPU, and NCCL on GPUs.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from struct import Struct
from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from share_compute.device_kinds import DeviceKind
from share_compute.errors import ShareComputeError
from share_compute.files.strict import StrictModel
from share_compute.models.blueprint import Blueprint
from share_compute.models.devices import OPERATIONS
from share_compute.models.factory import build_stage
from share_compute.models.stage import Stage
from share_compute.sharding.outdated import Outdated
from share_compute.sharding.stage import SIZE, Command, DividedStage
from share_compute.shards import Shard
from share_compute.specification.placement.operators import NO_STRATEGIES, OperatorsSpec
from share_compute_actors.group.ranks.processes import (
    MOST_BYTES,
    ONE_CPU,
    START_S,
    RankDevices,
    RankPlace,
    RankProcesses,
    follow_member,
)

_HEAD = Struct("<BI")
"""Kind of a message, and the number of its stage or the size of its content."""
_STAGE, _COMMAND, _DROP = range(3)
_log = logging.getLogger(__name__)


class RankStage(StrictModel):
    """A stage that ranks are to divide."""

    number: int
    """Number of the stage among those of the member."""
    blueprint: Blueprint
    shard: Shard
    batch: int
    length: int
    operators: OperatorsSpec


class Ranks(RankProcesses):
    """The other ranks of a training member, started at the first use.

    Args:
        count: as in `RankProcesses`.
        threads: as in `RankProcesses`. The member uses all threads while the others wait, or only those of its own
            device if there are several.
        deadline_s: as in `RankProcesses`.
        on_lost: as in `RankProcesses`.
        operators: how the ranks divide the operators of a layer.
        devices: as in `RankProcesses`.
    """

    def __init__(
        self,
        count: int,
        threads: int,
        deadline_s: float,
        on_lost: Callable[[ShareComputeError], None] = lambda _: None,
        operators: OperatorsSpec = NO_STRATEGIES,
        devices: RankDevices = ONE_CPU,
    ) -> None:
        super().__init__(__name__, count, threads, deadline_s, on_lost, devices)
        self._threads = threads if devices.lent == 1 else self.share
        self._operators = operators
        self._mesh: DeviceMesh | None = None
        self._stages = 0
        self._dropped: list[int] = []
        """Numbers of stages that are in use no more."""
        self._divided: weakref.WeakSet[DividedStage] = weakref.WeakSet()

    def divide(self, stage: Stage, blueprint: Blueprint, batch: int, length: int) -> DividedStage:
        """Divide the layers of a stage between the ranks; the stage then computes with all of them.

        Weights must be loaded afterwards. Call `outdate` after each update of them.

        Args:
            stage: a new stage, on the device of the first rank.
            blueprint: blueprint of the whole model.
            batch: samples in a microbatch.
            length: tokens of a sample, for texts.

        Raises:
            ContributorLost: a rank ended, or was unresponsive for too long.
            UserError: no layer of the stage can be divided.
        """
        mesh = self._started()
        self._stages += 1
        number = self._stages
        told = RankStage(
            number=number,
            blueprint=blueprint,
            shard=stage.shard,
            batch=batch,
            length=length,
            operators=self._operators,
        )
        content = told.model_dump_json().encode()
        with self.computing(on_device=False):
            self.tell(_HEAD.pack(_STAGE, len(content)) + content, is_answered=True)
        divided = DividedStage(stage, blueprint, batch, length, mesh, self._operators)
        self.wait(START_S)
        with self.computing():
            divided.keep_parts()
        divided.lead(_StageFollowers(self, number))
        self._divided.add(divided)
        weakref.finalize(stage, self._dropped.append, number).atexit = False
        _log.info("%s", divided.words)
        return divided

    def outdate(self, what: Outdated) -> None:
        """Note that the member may have changed parameters of its stages; ranks get them again before the next cell."""
        for divided in self._divided:
            divided.outdate(what)

    def send(self, number: int, command: Command) -> None:
        """Send a command for a stage to all other ranks."""
        with self.computing(on_device=False):
            while self._dropped:
                self.tell(_HEAD.pack(_DROP, self._dropped.pop()))
            self.tell(_HEAD.pack(_COMMAND, number) + command.pack())

    @contextmanager
    def together(self) -> Iterator[None]:
        """Compute with this rank's share of the threads in the context, and translate errors as `computing` does."""
        torch.set_num_threads(self.share)
        try:
            with self.computing():
                yield
        finally:
            torch.set_num_threads(self._threads)

    def _started(self) -> DeviceMesh:
        """Start the other ranks, if they are not started yet, and return all ranks."""
        if self._mesh is None:
            self.meet(spans_hosts=True)  # the member may join the group of a stage later
            self._mesh = _mesh(self.devices.kind, self.count)
        return self._mesh

    def close(self) -> None:
        """End the other ranks."""
        self._mesh = None
        super().close()


class _StageFollowers(NamedTuple):
    """The other ranks, for one stage."""

    ranks: Ranks
    number: int

    def send(self, command: Command) -> None:
        self.ranks.send(self.number, command)

    def together(self) -> AbstractContextManager[None]:
        return self.ranks.together()


def _mesh(kind: DeviceKind, count: int) -> DeviceMesh:
    """Return the mesh of all ranks, which have joined torch's default process group."""
    return init_device_mesh(OPERATIONS[kind].device.type, (count,))


def _follow(place: RankPlace, folder: str) -> None:
    """Join the ranks that meet in a folder, and carry out the commands of the member until it ends."""
    OPERATIONS[place.kind].compute_deterministically()
    place.meet(folder, spans_hosts=True)
    mesh = _mesh(place.kind, place.ranks)
    stages: dict[int, DividedStage] = {}
    while True:
        kind, number = _HEAD.unpack(place.received(_HEAD.size))
        if kind == _DROP:
            stages.pop(number, None)
        elif kind == _COMMAND:
            stages[number].follow(Command.unpack(bytes(place.received(SIZE))))
        else:
            told = RankStage.model_validate_json(bytes(place.received(min(number, MOST_BYTES))))
            stages[told.number] = _divided(place, told, mesh)


def _divided(place: RankPlace, told: RankStage, mesh: DeviceMesh) -> DividedStage:
    """Return a stage as the member divides it.

    The whole stage is built in main memory, where parameters that are never written take no space. A GPU gets this
    rank's parts.
    """
    stage = build_stage(told.blueprint, told.shard, torch.device("cpu"))
    divided = DividedStage(stage, told.blueprint, told.batch, told.length, mesh, told.operators)
    place.answer()
    divided.keep_parts()
    return divided


if __name__ == "__main__":
    follow_member(sys.argv[1:], _follow)
