"""Make contributors on one machine unequal: by control groups (processor time) and relays (slow, distant links)."""

from __future__ import annotations

import asyncio
import multiprocessing as mp
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

_PERIOD_US = 10_000
"""Period of the CPU quota in microseconds; short, so that a limited process runs slower rather than in bursts."""
_CHUNK_BYTES = 64 * 2**10


@contextmanager
def processor_share(name: str, cores: float) -> Iterator[Path]:
    """Make a control group (version 1 or 2) limited to ``cores`` of processor time; yield its ``cgroup.procs`` file.

    Raises:
        OSError: control groups cannot be made; that needs root and a writable /sys/fs/cgroup.
    """
    root = Path("/sys/fs/cgroup")
    first = root / "cpu"
    group = (first if first.is_dir() else root) / f"share-compute-{os.getpid()}-{name}"
    group.mkdir()
    try:
        quota = round(cores * _PERIOD_US)
        if first.is_dir():
            (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (group / "cpu.max").write_text(f"{quota} {_PERIOD_US}")
        yield group / "cgroup.procs"
    finally:
        for process in (group / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):  # the process ended meanwhile
                (_own_group(group.parent) / "cgroup.procs").write_text(process)
        group.rmdir()


@contextmanager
def inside(processes: Path) -> Iterator[None]:
    """Put this process into the control group for the block, so that processes started in it belong to the group."""
    before = _own_group(processes.parent.parent)
    processes.write_text(str(os.getpid()))
    try:
        yield
    finally:
        (before / "cgroup.procs").write_text(str(os.getpid()))


def _own_group(root: Path) -> Path:
    """Return the control group of this process in the hierarchy that begins at ``root``.

    If ``/proc`` gives its path as seen from outside of a container, return the root that the container sees.
    """
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if "cpu" in controllers.split(",") if root.name == "cpu" else number == "0":
            own = root / path.lstrip("/")
            return own if (own / "cgroup.procs").is_file() else root
    return root


class Road(NamedTuple):
    """Simulated one-directional link."""

    host: str
    port: int
    """Port of its end."""
    latency_s: float
    bytes_per_s: float


class Relays:
    """A process that relays connections with added latency and limited bandwidth."""

    def __init__(self, roads: list[Road]) -> None:
        here, there = mp.get_context("spawn").Pipe(duplex=False)
        self._process = mp.get_context("spawn").Process(target=_run, args=(roads, there), daemon=True)
        self._process.start()
        there.close()  # so that only the child holds its end, and the end of the child is noticed
        try:
            ports: list[int] = here.recv()
        except EOFError:
            self._process.join()
            raise RuntimeError(f"the relays ended with exit code {self._process.exitcode}") from None
        self.ports = ports
        """Ports on 127.0.0.1 at which the links begin."""

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.join()


def _run(roads: list[Road], there: object) -> None:
    asyncio.run(_serve(roads, there))


async def _serve(roads: list[Road], there: object) -> None:
    servers = [await asyncio.start_server(_Pass(road), "127.0.0.1", 0) for road in roads]
    there.send([server.sockets[0].getsockname()[1] for server in servers])  # type: ignore[attr-defined]
    await asyncio.gather(*(server.serve_forever() for server in servers))


class _Pass:
    """Relay of one connection, in both directions."""

    def __init__(self, road: Road) -> None:
        self._road = road

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(self._road.host, self._road.port)
        with suppress(ConnectionError):  # one end closed; the other end is closed, too
            await asyncio.gather(self._flow(reader, there_writer), self._flow(there_reader, writer))

    async def _flow(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        leaving = asyncio.create_task(_leave(queue, writer))
        clock = asyncio.get_running_loop().time
        free = clock()
        while chunk := await reader.read(_CHUNK_BYTES):
            free = max(free, clock()) + len(chunk) / self._road.bytes_per_s
            queue.put_nowait((free + self._road.latency_s, chunk))
        queue.put_nowait((clock(), b""))
        await leaving


async def _leave(queue: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
    clock = asyncio.get_running_loop().time
    while True:
        due, chunk = await queue.get()
        if not chunk:
            writer.close()
            return
        if (wait := due - clock()) > 0:
            await asyncio.sleep(wait)
        writer.write(chunk)
        await writer.drain()
