"""Ranks of a member divide the layers of its training stage.

Tensors go through a gloo group, parameters and gradients through shared memory.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from socket import send_fds
from struct import Struct
from typing import NamedTuple

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from share_compute.errors import ShareComputeError
from share_compute.files.strict import StrictModel
from share_compute.models.blueprint import Blueprint
from share_compute.models.factory import build_stage
from share_compute.models.stage import Stage
from share_compute.sharding.stage import SIZE, Command, DividedStage
from share_compute.shards import Shard
from share_compute.specification.placement.operators import NO_STRATEGIES, OperatorsSpec
from share_compute_actors.group.ranks.processes import (
    MOST_BYTES,
    READY,
    START_S,
    RankDevices,
    RankPlace,
    RankProcesses,
    follow_member,
    mapped,
    memory_file,
)
from share_compute_actors.machine.device import join_process_group

_HEAD = Struct("<BI")
"""Kind of a message, and the number of its stage or the size of its content."""
_STAGE, _COMMAND, _DROP = range(3)
_FLOAT_BYTES = 4
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
        lent_devices: number of parts of the CPU that are lent together; each rank has one, if there are several.
    """

    def __init__(
        self,
        count: int,
        threads: int,
        deadline_s: float,
        on_lost: Callable[[ShareComputeError], None] = lambda _: None,
        operators: OperatorsSpec = NO_STRATEGIES,
        lent_devices: int = 1,
    ) -> None:
        super().__init__(__name__, count, threads, deadline_s, on_lost, RankDevices.of("cpu", lent_devices))
        self._threads = threads if lent_devices == 1 else self.share
        self._operators = operators
        self._mesh: DeviceMesh | None = None
        self._stages = 0
        self._dropped: list[int] = []
        """Numbers of stages that are in use no more."""

    def divide(self, stage: Stage, blueprint: Blueprint, batch: int, length: int) -> DividedStage:
        """Divide the layers of a stage between the ranks; the stage then computes with all of them.

        Weights must be loaded afterwards.

        Args:
            stage: a new stage, on the CPU.
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
        with self.computing():
            self.tell(_HEAD.pack(_STAGE, len(content)) + content)
        divided = DividedStage(stage, blueprint, batch, length, mesh, self._operators)
        size = _FLOAT_BYTES * divided.numbers
        with memory_file(size) as file, self.computing():
            divided.place(mapped(file.fileno(), size).view(torch.float32))
            for connection in self.connections:
                send_fds(connection, [READY], [file.fileno()])
        self.wait(START_S)
        divided.lead(_StageFollowers(self, number))
        weakref.finalize(stage, self._dropped.append, number).atexit = False
        _log.info("%s", divided.words)
        return divided

    def send(self, number: int, command: Command) -> None:
        """Send a command for a stage to all other ranks."""
        with self.computing():
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
        if self._mesh is not None:
            return self._mesh
        folder = tempfile.mkdtemp(prefix="ranks-")
        try:
            for rank in range(1, self.count):
                self.launch(rank, [folder])
            self.wait(START_S)
            with self.computing():
                self._mesh = _join(0, self.count, folder, self.deadline_s)
            self.wait(START_S)  # the last rank may read the file after this rank has joined
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return self._mesh

    def close(self) -> None:
        """End the other ranks."""
        super().close()
        if self._mesh is not None:
            self._mesh = None
            distributed.destroy_process_group()


class _StageFollowers(NamedTuple):
    """The other ranks, for one stage."""

    ranks: Ranks
    number: int

    def send(self, command: Command) -> None:
        self.ranks.send(self.number, command)

    def wait(self) -> None:
        self.ranks.wait()

    def together(self) -> AbstractContextManager[None]:
        return self.ranks.together()


def _join(rank: int, count: int, folder: str, deadline_s: float) -> DeviceMesh:
    """Return the mesh of all ranks, which they form by meeting at a file."""
    join_process_group("cpu", rank, count, Path(folder), deadline_s)
    return init_device_mesh("cpu", (count,))


def _follow(place: RankPlace, folder: str) -> None:
    """Join the ranks that meet in a folder, and carry out the commands of the member until it ends."""
    mesh = _join(place.rank, place.ranks, folder, place.deadline_s)
    place.answer()
    stages: dict[int, DividedStage] = {}
    while True:
        kind, number = _HEAD.unpack(place.received(_HEAD.size))
        if kind == _DROP:
            stages.pop(number, None)
        elif kind == _COMMAND:
            if stages[number].follow(Command.unpack(bytes(place.received(SIZE)))):
                place.answer()
        else:
            told = RankStage.model_validate_json(bytes(place.received(min(number, MOST_BYTES))))
            stage = build_stage(told.blueprint, told.shard, torch.device("cpu"))
            divided = DividedStage(stage, told.blueprint, told.batch, told.length, mesh, told.operators)
            file = place.received_file()
            divided.place(mapped(file, _FLOAT_BYTES * divided.numbers).view(torch.float32))
            os.close(file)
            stages[told.number] = divided
            place.answer()


if __name__ == "__main__":
    follow_member(sys.argv[1:], _follow)
