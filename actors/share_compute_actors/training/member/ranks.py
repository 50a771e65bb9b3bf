"""Ranks of a member: child processes that compute parts of its layers (``parallelism.tensor``).

The member is rank 0. It sends commands through a socket to each other rank, which answers with one byte when it is
ready, or with a reason before it ends. Tensors go through a gloo group, parameters and gradients through shared memory.
"""

from __future__ import annotations

import logging
import mmap
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from struct import Struct
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from share_compute.errors import ContributorLost, as_ours
from share_compute.files.strict import StrictModel
from share_compute.models.blueprint import Blueprint
from share_compute.models.factory import build_stage
from share_compute.models.stage import Stage
from share_compute.sharding.stage import SIZE, Command, DividedStage
from share_compute.shards import Shard
from share_compute.specification.placement.operators import NO_STRATEGIES, OperatorsSpec
from share_compute_actors.group.allocator import is_out_of_memory
from share_compute_actors.machine.processes import tied

_HEAD = Struct("<BI")
"""Kind of a message, and the number of its stage or the size of its content."""
_STAGE, _COMMAND, _DROP = range(3)
_READY, _FAILED = b".", b"!"
_MOST_BYTES = 1 << 24
"""Maximum size of a message's content."""
_MOST_WORDS = 2000
"""Maximum size of the reason of a rank that fails, in bytes."""
_START_S = 600.0
"""Time limit for the start of the ranks, and for building a stage, in seconds."""
_END_S = 5.0
"""Time limit for the end of a rank whose connection broke, in seconds."""
_POLL_S = 0.02
"""Time between two looks at which ranks have ended, in seconds."""
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


class _Child(NamedTuple):
    process: subprocess.Popen[bytes]
    connection: socket.socket


class Ranks:
    """The other ranks of a member, started at the first use.

    Use it on one thread only, which must live as long as the member: the ranks end with it.

    Args:
        count: number of ranks, with the member itself.
        threads: CPU threads of the machine, which the ranks share. The member has all of them while the others wait.
        deadline_s: longest wait for another rank, in seconds.
        on_lost: called before an error is raised because a rank was lost. The others are ended by then.
        operators: how the ranks divide the operators of a layer.
    """

    def __init__(
        self,
        count: int,
        threads: int,
        deadline_s: float,
        on_lost: Callable[[ContributorLost], None] = lambda _: None,
        operators: OperatorsSpec = NO_STRATEGIES,
    ) -> None:
        self.count = count
        self._threads = threads
        self._share = max(1, threads // count)
        self._deadline_s = deadline_s
        self._on_lost = on_lost
        self._operators = operators
        self._children: list[_Child] = []
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
            self._tell(_HEAD.pack(_STAGE, len(content)) + content)
        divided = DividedStage(stage, blueprint, batch, length, mesh, self._operators)
        with _memory_file() as file, self.computing():
            file.truncate(_FLOAT_BYTES * divided.numbers)
            divided.place(_mapped(file.fileno(), divided.numbers))
            for child in self._children:
                socket.send_fds(child.connection, [_READY], [file.fileno()])
        self.wait(_START_S)
        divided.lead(_StageFollowers(self, number))
        weakref.finalize(stage, self._dropped.append, number).atexit = False
        _log.info("%s", divided.words)
        return divided

    def send(self, number: int, command: Command) -> None:
        """Send a command for a stage to all other ranks."""
        with self.computing():
            while self._dropped:
                self._tell(_HEAD.pack(_DROP, self._dropped.pop()))
            self._tell(_HEAD.pack(_COMMAND, number) + command.pack())

    def _tell(self, message: bytes) -> None:
        if not self._children:
            raise ConnectionError("another rank was lost before")
        for child in self._children:
            child.connection.sendall(message)

    def wait(self, limit_s: float | None = None) -> None:
        """Wait until all other ranks have carried out the last command.

        Args:
            limit_s: longest wait in seconds; None for that of all waits.
        """
        with self.computing():
            for child in self._children:
                child.connection.settimeout(limit_s or self._deadline_s)
                if child.connection.recv(1) != _READY:
                    raise ConnectionError

    @contextmanager
    def together(self) -> Iterator[None]:
        """Compute with this rank's share of the threads in the context, and translate errors as `computing` does."""
        torch.set_num_threads(self._share)
        try:
            with self.computing():
                yield
        finally:
            torch.set_num_threads(self._threads)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Raise ContributorLost if the context fails while another rank has ended or is unresponsive.

        After any other error, too, the other ranks are ended, because they may wait for a tensor.
        """
        try:
            yield
        except Exception as failure:
            lost = self._lost(failure)
            self.close()
            if lost is None:
                raise
            self._on_lost(lost)
            raise lost from failure

    def _lost(self, failure: Exception) -> ContributorLost | None:
        """Return the error for a lost rank; None if the failure has another cause."""
        if is_out_of_memory(failure) or not isinstance(failure, (RuntimeError, OSError)):
            return None
        found = self._first_ended()
        if found is not None:
            rank, status = found
            what = f"rank {rank} was ended by signal {-status}"
            if status >= 0:
                what = f"rank {rank} failed: {_last_words(self._children[rank - 1].connection)}"
        elif isinstance(failure, RuntimeError) and "timed out" not in str(failure).lower():
            return None  # all ranks run, and this one has failed
        elif self._children:
            what = f"a rank did not answer within {self._deadline_s:g} s"
        else:
            what = f"the ranks cannot be reached: {failure}"
        return ContributorLost(
            f"{what}: a member with parallelism.tensor {self.count} cannot compute without it",
            hint="no action needed: the job continues without this member",
            details={"rank": True},
        )

    def _first_ended(self) -> tuple[int, int] | None:
        """Return a rank that ended, and its exit status; None if all others run on for `_END_S`.

        After the end of one rank, the others fail, too. So one that a signal ended is preferred, and then the first.
        """
        first, until = None, time.monotonic() + _END_S
        while True:
            states = [(rank, child.process.poll()) for rank, child in enumerate(self._children, start=1)]
            ended = [(rank, status) for rank, status in states if status is not None]
            first = next(
                ((rank, status) for rank, status in ended if status < 0), first or next(iter(ended), None)
            )
            is_clear = first is not None and first[1] < 0
            if is_clear or len(ended) == len(states) or time.monotonic() > until:
                return first
            time.sleep(_POLL_S)

    def _started(self) -> DeviceMesh:
        """Start the other ranks, if they are not started yet, and return all ranks."""
        if self._mesh is not None:
            return self._mesh
        folder = tempfile.mkdtemp(prefix="ranks-")
        try:
            for rank in range(1, self.count):
                self._children.append(self._start(rank, folder))
            self.wait(_START_S)
            with self.computing():
                self._mesh = _join(0, self.count, folder, self._deadline_s)
            self.wait(_START_S)  # the last rank reads the file after this one has joined
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return self._mesh

    def _start(self, rank: int, folder: str) -> _Child:
        here, there = socket.socketpair()
        with there:
            place = [there.fileno(), rank, self.count, self._share, self._deadline_s]
            process = subprocess.Popen(
                tied([sys.executable, "-m", __name__, folder, *map(str, place)]),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdin=subprocess.DEVNULL,
                pass_fds=[there.fileno()],
            )
        return _Child(process, here)

    def close(self) -> None:
        """End the other ranks."""
        for child in self._children:
            child.connection.close()
            child.process.kill()
            child.process.wait()
        self._children.clear()
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


def _memory_file() -> BinaryIO:
    """Return a file without a name, in main memory where the system has such files."""
    if sys.platform == "linux":
        return os.fdopen(os.memfd_create("ranks"), "w+b")
    return tempfile.TemporaryFile()


def _mapped(file: int, numbers: int) -> Tensor:
    """Return a file as a tensor of float32 numbers that all processes share."""
    if not numbers:
        return torch.empty(0)
    return torch.frombuffer(mmap.mmap(file, _FLOAT_BYTES * numbers), dtype=torch.float32)


def _join(rank: int, count: int, folder: str, deadline_s: float) -> DeviceMesh:
    """Return the mesh of all ranks, which meet at a file."""
    # The group listens at the loopback device only.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    try:
        distributed.init_process_group(
            "gloo",
            init_method=f"file://{folder}/meeting",
            rank=rank,
            world_size=count,
            timeout=timedelta(seconds=deadline_s),
        )
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]
    return init_device_mesh("cpu", (count,))


def _last_words(connection: socket.socket) -> str:
    """Return the reason that a rank sent before it ended."""
    with suppress(OSError):
        connection.settimeout(0)
        kind, _, words = connection.recv(_MOST_WORDS).partition(_FAILED)
        return words.decode(errors="replace") or f"it sent {kind!r}"
    return "it sent no reason"


def _received(connection: socket.socket, size: int) -> bytes:
    """Return the next bytes.

    Raises:
        EOFError: the member ended.
    """
    found = bytearray()
    while len(found) < size:
        piece = connection.recv(size - len(found))
        if not piece:
            raise EOFError
        found += piece
    return bytes(found)


def _follow(connection: socket.socket, mesh: DeviceMesh) -> None:
    """Carry out the commands of the member, until it ends."""
    stages: dict[int, DividedStage] = {}
    while True:
        kind, number = _HEAD.unpack(_received(connection, _HEAD.size))
        if kind == _DROP:
            stages.pop(number, None)
        elif kind == _COMMAND:
            if stages[number].follow(Command.unpack(_received(connection, SIZE))):
                connection.sendall(_READY)
        else:
            told = RankStage.model_validate_json(_received(connection, min(number, _MOST_BYTES)))
            stage = build_stage(told.blueprint, told.shard, torch.device("cpu"))
            divided = DividedStage(stage, told.blueprint, told.batch, told.length, mesh, told.operators)
            _, (file,), _, _ = socket.recv_fds(connection, 1, 1)
            divided.place(_mapped(file, divided.numbers))
            os.close(file)
            stages[told.number] = divided
            connection.sendall(_READY)


def main(folder: str, file: str, rank: str, count: str, threads: str, deadline_s: str) -> None:
    """Run a rank until the member ends.

    Args:
        folder: folder of the file at which the ranks meet.
        file: descriptor of the socket to the member.
        rank: number of this rank, from 1.
        count: number of ranks.
        threads: number of CPU threads.
        deadline_s: longest wait for another rank, in seconds.
    """
    connection = socket.socket(fileno=int(file))
    torch.set_num_threads(int(threads))
    try:
        connection.sendall(_READY)
        mesh = _join(int(rank), int(count), folder, float(deadline_s))
        connection.sendall(_READY)
        _follow(connection, mesh)
    except EOFError:
        return
    except Exception as failure:
        with suppress(OSError):
            connection.sendall(_FAILED + as_ours(failure).message.encode()[:_MOST_WORDS])
        raise


if __name__ == "__main__":
    main(*sys.argv[1:])
