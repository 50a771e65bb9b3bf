"""Ranks of a member: child processes that compute its layers together with it (``parallelism.tensor``).

The member is rank 0. It sends commands through a socket to each other rank, which answers with one byte when it is
ready, or with its last words before it ends: a reason, or the memory that it had when memory was lacking.

Only `_lost_error` turns the end of a rank into an error. The thread that computes calls it when its own work fails.
Where a sum with a rank that ended blocks this thread, as on GPUs, threads that wait for the ends of ranks call it.
There, another thread notices a rank or a device that stops without an error.
"""

from __future__ import annotations

import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple, Self, cast

import psutil
import torch
from torch import Tensor

from share_compute.device_kinds import KINDS, DeviceKind
from share_compute.errors import ContributorLost, OutOfMemory, ShareComputeError, as_ours
from share_compute.models.devices import OPERATIONS, lacking
from share_compute.program import command_of
from share_compute_actors.group.allocator import is_out_of_memory, out_of_memory_kills
from share_compute_actors.machine.cores import on_cores, share_cores
from share_compute_actors.machine.device import join_process_group, leave_process_group
from share_compute_actors.machine.processes import tied

READY = b"."
"""Answer of a rank that has carried out a command."""
_FAILED = b"!"
_OUT_OF_MEMORY = b"#"
"""Last words of a rank that lacks memory; the bytes that it had follow, in digits."""
MOST_BYTES = 1 << 24
"""Maximum size of the description of a stage, in bytes."""
_MOST_WORDS = 2000
"""Maximum size of the reason of a rank that fails, in bytes."""
START_S = 600.0
"""Time limit for the start of the ranks, and for building a stage, in seconds."""
_END_S = 5.0
"""Time limit for the end of a rank whose connection broke, in seconds."""
_STANDSTILL = 0.9
"""Fraction of the ranks' deadline after which their work counts as stopped; NCCL ends the process at the deadline."""
_POLL_S = 0.02
"""Time between two looks at which ranks have ended, in seconds."""


class RankDevices(NamedTuple):
    """The devices that ranks compute on."""

    kind: DeviceKind
    lent: int
    """Number of devices that are lent together; 1 if all ranks share one."""
    has_own_memory: bool
    """Whether devices have memory of their own, so that a library for the kind (gloo or NCCL) exchanges tensors."""

    @classmethod
    def of(cls, kind: DeviceKind, lent: int) -> Self:
        """Return the devices for ranks, when ``lent`` devices of one kind are lent together."""
        return cls(kind, lent, not KINDS[kind].uses_main_memory)

    def cores(self, rank: int) -> Sequence[int]:
        """Return the processors of a rank's part of the CPU; empty if the rank may use all, or computes on a GPU."""
        return share_cores(self.lent)[rank] if self.lent > 1 and self.kind == "cpu" else ()


ONE_CPU = RankDevices.of("cpu", 1)
"""A CPU that all ranks share."""


class _Child(NamedTuple):
    process: subprocess.Popen[bytes]
    connection: socket.socket


class RankProcesses:
    """The other ranks of a member.

    Use this object on a single thread that lives as long as the member: the ranks end with that thread.

    Args:
        module: module that the ranks run; it calls `follow_member`.
        count: number of ranks, including the member itself.
        threads: CPU threads of the machine, which the ranks share.
        deadline_s: longest wait for another rank, in seconds.
        on_lost: called with ContributorLost before it is raised because a rank was lost; the others are ended by then.
            Also called by `watch`, with OutOfMemory if a rank lacked memory.
        devices: devices of the machine. If several are lent together, each rank has one of its own.
    """

    def __init__(
        self,
        module: str,
        count: int,
        threads: int,
        deadline_s: float,
        on_lost: Callable[[ShareComputeError], None] = lambda _: None,
        devices: RankDevices = ONE_CPU,
    ) -> None:
        self.count = count
        self.deadline_s = deadline_s
        self.devices = devices
        self.share = max(1, threads // count)
        """CPU threads of each rank while all of them compute."""
        self._module = module
        self._on_lost = on_lost
        self._children: list[_Child] = []
        self._is_awaited = False
        """Whether the calling thread waits for answers, or will as soon as its own part is done; see `watch`."""
        self._begun_s: float | None = None
        """Time when the calling thread began to compute with the other ranks, or when they last answered; None if it
        does not compute."""
        self._meeting: tempfile.TemporaryDirectory[str] | None = None
        """Folder in which the ranks joined torch's default process group; it stays until they end."""
        self._kills_before: int | None = None
        """The result of `out_of_memory_kills` when the first of these processes was started."""

    @property
    def process_ids(self) -> list[int]:
        """Ids of the processes of the other ranks."""
        return [child.process.pid for child in self._children]

    @property
    def resident_bytes(self) -> int:
        """Memory of the other ranks in bytes, without memory that they share. Callable on any thread."""
        found = 0
        for process_id in self.process_ids:
            with suppress(psutil.NoSuchProcess):
                found += _own_bytes(psutil.Process(process_id))
        return found

    @property
    def connections(self) -> list[socket.socket]:
        """Sockets to the other ranks, in their order."""
        return [child.connection for child in self._children]

    def launch(self, rank: int, arguments: Sequence[str], files: Sequence[int] = ()) -> None:
        """Start the process of a rank; its first answer shows that it runs.

        Args:
            rank: number of the rank, from 1, in order.
            arguments: texts for the rank's function in `follow_member`.
            files: descriptors that the rank inherits, under the same numbers.
        """
        self._is_awaited = True
        if not self._children:
            self._kills_before = out_of_memory_kills()
        here, there = socket.socketpair()
        with there:
            place = [there.fileno(), rank, self.count, self.share, self.deadline_s, self.devices.kind]
            command = command_of(self._module, *map(str, place), *arguments)
            process = subprocess.Popen(
                tied(on_cores(command, self.devices.cores(rank))),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdin=subprocess.DEVNULL,
                pass_fds=[there.fileno(), *files],
            )
        self._children.append(_Child(process, here))

    def tell(self, message: bytes, *, is_answered: bool = False) -> None:
        """Send bytes to all other ranks; call this in the context of `computing`.

        Args:
            message: the bytes.
            is_answered: whether the ranks answer; the caller then calls `wait` after its own part of the work.
        """
        if not self._children:
            raise ConnectionError("another rank was lost before")
        self._is_awaited = is_answered
        for child in self._children:
            child.connection.settimeout(self.deadline_s)
            child.connection.sendall(message)

    def wait(self, limit_s: float | None = None) -> None:
        """Wait until all other ranks have carried out the last command.

        Args:
            limit_s: longest wait in seconds; None for the common limit.
        """
        self._is_awaited = True
        with self.computing(limit_s, on_device=False):
            for child in self._children:
                child.connection.settimeout(limit_s or self.deadline_s)
                if child.connection.recv(1, socket.MSG_PEEK) != READY:
                    raise ConnectionError
                child.connection.recv(1)
        if self._begun_s is not None:  # before `_is_awaited`, which `_report_standstill` reads first
            self._begun_s = time.monotonic()
        self._is_awaited = False

    @contextmanager
    def computing(self, limit_s: float | None = None, *, on_device: bool = True) -> Iterator[None]:
        """Raise ContributorLost if the context fails while another rank has ended or is unresponsive.

        Raise OutOfMemory if any rank lacked memory. The member itself can then continue, as it could without ranks. The
        other ranks are also ended after any other error, because they may wait for a tensor.

        Args:
            limit_s: longest wait for another rank, in seconds; None for the common limit.
            on_device: whether to end the context only when the device has done the work, so that its errors show here.
        """
        before = self._begun_s
        self._begun_s = time.monotonic() if before is None else before
        try:
            yield
            if on_device:
                OPERATIONS[self.devices.kind].wait()
        except Exception as failure:
            lost = self._error_of(failure, limit_s or self.deadline_s)
            self._end()
            if isinstance(lost, ContributorLost):
                self._on_lost(lost)
            self.close()
            if lost is None:
                raise
            try:
                raise lost from failure
            finally:
                # Its traceback refers to this frame, which would keep all tensors of the failed step.
                del lost
        finally:
            self._begun_s = before

    def _error_of(self, failure: Exception, limit_s: float) -> ContributorLost | OutOfMemory | None:
        """Return the error of the ranks because of which this rank failed; None if the failure has another cause."""
        if isinstance(failure, OutOfMemory):
            return None  # a context inside this one raised it, and has closed the ranks
        if is_out_of_memory(failure):
            return _out_of_memory(0, self._taken_bytes(failure))
        if not isinstance(failure, (RuntimeError, OSError)):
            return None
        children = self._children
        found = self._lost_error(children)
        is_own = isinstance(failure, RuntimeError) and "timed out" not in str(failure).lower()
        if found is None and not is_own:
            what = f"a rank did not answer within {limit_s:g} s"
            found = self._loss(what if children else f"the ranks cannot be reached: {failure}")
        return found

    def _lost_error(self, children: Sequence[_Child]) -> ContributorLost | OutOfMemory | None:
        """Return the error for other ranks that ended, or are about to; None if all of them run on for `_END_S`.

        After a rank has lacked memory, the others fail, too. So its error is preferred to theirs.

        Args:
            children: the other ranks.
        """
        for rank, child in enumerate(children, start=1):
            kind, words = _last_words(child.connection)
            if kind == _OUT_OF_MEMORY and words.isdigit():
                return _out_of_memory(rank, self._bytes_of_all(int(words)))
        found = _first_ended(children) or _first_failed(children)
        if found is None:
            return None
        rank, status = found
        if status == -signal.SIGKILL and self._was_killed_for_memory():
            return _out_of_memory(rank, self._bytes_of_all(_own_bytes(psutil.Process())))
        return self._loss(_end_words(rank, status, children[rank - 1]))

    def _was_killed_for_memory(self) -> bool:
        """Return whether the kernel has killed a process to free memory since the first rank was started."""
        kills = out_of_memory_kills()
        return kills is not None and self._kills_before is not None and kills > self._kills_before

    def _taken_bytes(self, failure: Exception) -> int:
        """Return the memory of all ranks when this one lacked memory, in bytes."""
        on_gpu_bytes = _on_gpu_bytes(failure)
        if on_gpu_bytes is not None:
            return self._bytes_of_all(on_gpu_bytes)
        return psutil.Process().memory_info().rss + self.resident_bytes

    def _bytes_of_all(self, each_bytes: int) -> int:
        """Return the memory of all ranks if another rank had ``each_bytes``. Others may have ended by now."""
        if self.devices.has_own_memory:
            return self.count * each_bytes
        return psutil.Process().memory_info().rss + (self.count - 1) * each_bytes

    def _loss(self, what: str) -> ContributorLost:
        return ContributorLost(
            f"{what}: a member with parallelism.tensor {self.count} cannot compute without it",
            hint="no action needed: the work continues without this member",
            details={"ends_member": True},
        )

    def watch(self) -> None:
        """Call ``on_lost`` with the error when another rank ends, or work with the ranks stops; on own threads.

        This is needed where a sum with a rank that ended blocks until the deadline, as on GPUs. No thread calls it
        while the calling thread waits for answers, because that thread raises the error itself.
        """
        for child in self._children:
            threading.Thread(target=self._report_end, args=(child,), name="ranks", daemon=True).start()
        threading.Thread(
            target=self._report_standstill, args=(self._children,), name="ranks", daemon=True
        ).start()

    def _report_standstill(self, children: list[_Child]) -> None:
        limit_s = _STANDSTILL * self.deadline_s
        while children is self._children:
            time.sleep(min(1.0, limit_s / 10))
            begun_s = None if self._is_awaited else self._begun_s
            if begun_s is not None and time.monotonic() - begun_s > limit_s:
                self._on_lost(
                    self._loss(
                        f"the ranks have computed for {limit_s:g} s: a rank, or its device, has stopped"
                    )
                )
                return

    def _report_end(self, child: _Child) -> None:
        child.process.wait()
        children = self._children
        if child not in children or self._is_awaited:
            return
        error = self._lost_error(children)
        if error is not None and child in self._children:
            self._on_lost(error)

    def meet(self, *, spans_hosts: bool = False) -> None:
        """Start the other ranks, and join them in torch's default process group.

        The other ranks get the name of a folder as their argument, and call `RankPlace.meet`.

        Args:
            spans_hosts: as in `join_process_group`.
        """
        self._meeting = tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True)
        folder = self._meeting.name
        with self.computing():
            for rank in range(1, self.count):
                self.launch(rank, [folder])
            self.wait(START_S)
            if self.devices.has_own_memory:
                self.watch()  # from here, because joining blocks if a rank ends meanwhile
            join_process_group(
                self.devices.kind, 0, self.count, Path(folder), self.deadline_s, spans_hosts=spans_hosts
            )
            self.wait(START_S)

    def close(self) -> None:
        """End the other ranks, and leave their process group."""
        self._end()
        meeting, self._meeting = self._meeting, None
        if meeting is not None:
            leave_process_group()
            meeting.cleanup()

    def _end(self) -> None:
        children, self._children = self._children, []
        for child in children:
            child.connection.close()
            child.process.kill()
            child.process.wait()


def _first_ended(children: Sequence[_Child]) -> tuple[int, int] | None:
    """Return a rank that ended, and its exit status; None if all others run on for `_END_S`.

    After the end of one rank, the others fail, too. So one that a signal ended is preferred, and then the first.
    """
    first, until = None, time.monotonic() + _END_S
    while True:
        states = [(rank, child.process.poll()) for rank, child in enumerate(children, start=1)]
        ended = [(rank, status) for rank, status in states if status is not None]
        first = next(
            ((rank, status) for rank, status in ended if status < 0), first or next(iter(ended), None)
        )
        is_clear = first is not None and first[1] < 0
        if is_clear or len(ended) == len(states) or time.monotonic() > until:
            return first
        time.sleep(_POLL_S)


def _first_failed(children: Sequence[_Child]) -> tuple[int, int] | None:
    """Return a rank that sent its last words and still ends, and 1; None if there is none."""
    for rank, child in enumerate(children, start=1):
        if _last_words(child.connection)[0] == _FAILED:
            return rank, 1
    return None


def _end_words(rank: int, status: int, child: _Child) -> str:
    """Return a text about the end of a rank with this exit status."""
    if status < 0:
        return f"rank {rank} was ended by signal {-status}"
    kind, words = _last_words(child.connection)
    return f"rank {rank} failed: {words or (f'it sent {kind!r}' if kind else 'it sent no reason')}"


def _own_bytes(process: psutil.Process) -> int:
    """Return the resident memory of a process without memory that it shares, in bytes."""
    used = process.memory_info()
    return int(used.rss - getattr(used, "shared", 0))


def _on_gpu_bytes(failure: Exception) -> int | None:
    """Return the peak memory of this process on its GPU, in bytes; None if the failure is no lack of GPU memory."""
    kind = lacking(failure)
    return None if kind is None else kind.peak_bytes()


def _out_of_memory(rank: int, taken_bytes: int) -> OutOfMemory:
    """Return the error for a rank that lacked memory.

    Args:
        rank: number of the rank.
        taken_bytes: memory of all ranks together, in bytes.
    """
    return OutOfMemory(
        f"out of memory during a step, in rank {rank} of parallelism.tensor",
        hint="lend more memory there, use more stages, or smaller microbatches",
        details={"taken_bytes": taken_bytes},
    )


def _last_words(connection: socket.socket) -> tuple[bytes, str]:
    """Return the kind and the content of the last words that a rank sent before it ended; they stay readable."""
    with suppress(OSError):
        connection.settimeout(0)
        sent = connection.recv(_MOST_WORDS, socket.MSG_PEEK).lstrip(READY)
        return sent[:1], sent[1:].decode(errors="replace")
    return b"", ""


class RankPlace(NamedTuple):
    """A rank, seen from its own process."""

    connection: socket.socket
    """Socket to the member."""
    rank: int
    """Number of this rank, from 1."""
    ranks: int
    """Number of ranks, with the member."""
    deadline_s: float
    """Longest wait for another rank, in seconds."""
    kind: DeviceKind
    """Kind of the devices that ranks compute on."""

    def received(self, size: int) -> memoryview:
        """Return the next bytes from the member.

        Raises:
            EOFError: the member ended.
        """
        found = rest = memoryview(bytearray(size))
        while rest:
            count = self.connection.recv_into(rest)
            if not count:
                raise EOFError
            rest = rest[count:]
        return found

    def received_file(self) -> int:
        """Return the descriptor that the member sends with one byte."""
        _, (file,), _, _ = socket.recv_fds(self.connection, 1, 1)
        return file

    def answer(self) -> None:
        """Tell the member that this rank is ready."""
        self.connection.sendall(READY)

    def meet(self, folder: str, *, spans_hosts: bool = False) -> None:
        """Join the ranks that meet in a folder, and tell the member; see `RankProcesses.meet`."""
        join_process_group(
            self.kind, self.rank, self.ranks, Path(folder), self.deadline_s, spans_hosts=spans_hosts
        )
        self.answer()


def follow_member(arguments: Sequence[str], follow: Callable[..., None]) -> None:
    """Run a rank until the member ends. If it fails, the member gets the reason, and this process exits.

    Args:
        arguments: command line of the process.
        follow: function that carries out the commands of the member, given the `RankPlace` and the arguments of
            `launch`.
    """
    file, rank, count, threads, deadline_s, kind, *rest = arguments
    place = RankPlace(
        *(socket.socket(fileno=int(file)), int(rank), int(count), float(deadline_s)),
        cast("DeviceKind", kind),
    )
    torch.set_num_threads(int(threads))
    try:
        OPERATIONS[place.kind].choose(place.rank)
        place.answer()
        follow(place, *rest)
    except EOFError:
        return
    except Exception as failure:  # noqa: BLE001 - the member gets the reason
        words = _FAILED + as_ours(failure).message.encode()
        if is_out_of_memory(failure):
            on_gpu_bytes = _on_gpu_bytes(failure)
            own_bytes = _own_bytes(psutil.Process()) if on_gpu_bytes is None else on_gpu_bytes
            words = _OUT_OF_MEMORY + str(own_bytes).encode()
        with suppress(OSError):
            place.connection.sendall(words[:_MOST_WORDS])
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # at once, because leaving a group of GPUs may wait for other ranks


def memory_file(size: int) -> BinaryIO:
    """Return an unnamed file of ``size`` bytes, in main memory if the system supports it."""
    if sys.platform == "linux":
        file: BinaryIO = os.fdopen(os.memfd_create("ranks"), "w+b")
    else:
        file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    file.truncate(size)
    return file


def mapped(file: int, size: int) -> Tensor:
    """Map a file that all processes share, ``[size]``, uint8; it stays mapped as long as the tensor is used."""
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
