"""Assigns the TCP ports of Ray nodes from one range, so that a firewall needs to open no other ports.

This module imports neither Ray nor torch.

A range is divided into units of 50 ports, and each node reserves whole units. The process that supervises the node
binds the first port of each reserved unit until `NodePorts.release` is called. So nodes of one host never use the same
ports.

Gloo is an exception: it listens on ports that the kernel picks (`docs/deployment.md`).
"""

from __future__ import annotations

import math
import os
import re
import socket
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import groupby
from typing import Self

from share_compute.errors import Conflict, UserError

_UNIT = 50
_OWN = 6
"""Number of ports for Ray's services on a node: raylet 2, dashboard agent 2, runtime environments 1, metrics 1."""
_CHANNELS = 20
"""Number of ports per node for channels. A member uses one port, or two during a membership change."""
_SPARE_WORKERS = 16
"""Number of ports for Ray workers beyond the one worker per thread that Ray starts in advance."""
_VARIABLE = "SHARE_COMPUTE_CHANNEL_PORTS"
"""Environment variable with a node's channel ports; the node's supervisor sets it for all processes of the node."""


@dataclass(frozen=True, slots=True)
class PortRange:
    """TCP ports from ``first`` to ``last``, both included."""

    first: int
    last: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a range such as ``24000-25999``.

        Raises:
            UserError: the text is not a range of at least 50 ports above 1023.
        """
        found = re.fullmatch(r"\s*(\d{1,5})\s*-\s*(\d{1,5})\s*", text)
        first, last = map(int, found.groups()) if found else (0, 0)
        if not 1024 <= first <= last <= 65535 or last - first + 1 < _UNIT:
            raise UserError(
                f"{text!r} is no range of at least {_UNIT} TCP ports from 1024 to 65535",
                hint="write its first and last port, e.g. 24000-25999",
            )
        return cls(first, last)

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"

    def units(self) -> Iterator[range]:
        """Yield the units of 50 ports that the range contains completely."""
        for first in range(self.first, self.last - _UNIT + 2, _UNIT):
            yield range(first, first + _UNIT)

    def free(self) -> int:
        """Return the number of ports in units whose ports are all free."""
        free = 0
        for unit in self.units():
            if (guard := _guard(unit)) is not None:
                guard.close()
                free += len(unit)
        return free


LEAST_FREE_PORTS = 5 * _UNIT
"""Number of free ports needed for a head and one small node on the same host."""
DEFAULT_RANGE = PortRange(24000, 25999)


@dataclass(slots=True)
class NodePorts:
    """The ports that one node holds until `release` is called."""

    own: tuple[int, ...]
    channels: tuple[int, ...]
    workers: tuple[int, ...]
    _guards: ExitStack = field(repr=False)

    @classmethod
    def take(cls, within: PortRange, threads: int) -> Self:
        """Reserve the first free units of a range for a node.

        Args:
            within: the range to take units from.
            threads: number of threads that the node lends; Ray starts one process for each thread in advance.

        Raises:
            Conflict: too few units of the range are free.
        """
        count = math.ceil((_OWN + _CHANNELS + _SPARE_WORKERS + threads) / (_UNIT - 1))
        with ExitStack() as stack:
            ports: list[int] = []
            taken = 0
            for unit in within.units():
                if (guard := _guard(unit)) is not None:
                    stack.enter_context(guard)
                    ports += unit[1:]
                    taken += 1
                if taken == count:
                    own, channels = ports[:_OWN], ports[_OWN : _OWN + _CHANNELS]
                    workers = ports[_OWN + _CHANNELS :]
                    return cls(tuple(own), tuple(channels), tuple(workers), stack.pop_all())
        raise Conflict(
            f"a Ray node with {threads} threads needs {count * _UNIT} free TCP ports in blocks of {_UNIT}, but "
            f"{taken * _UNIT} of {within} are free",
            hint="end the programs that use them, or give a larger range with --port-range",
        )

    @property
    def all(self) -> tuple[int, ...]:
        """All ports that processes of the node may listen on."""
        return (*self.own, *self.channels, *self.workers)

    def arguments(self, apart_from: int = 0) -> list[str]:
        """Return the arguments of ``ray start`` that bind a node to its ports.

        Args:
            apart_from: port that Ray workers must not use, because the head listens on it; 0 for none.
        """
        names = (
            "node-manager-port",
            "object-manager-port",
            "dashboard-agent-listen-port",
            "dashboard-agent-grpc-port",
            "runtime-env-agent-port",
            "metrics-export-port",
        )
        own = [f"--{name}={port}" for name, port in zip(names, self.own, strict=True)]
        workers = ",".join(str(port) for port in self.workers if port != apart_from)
        return [*own, f"--worker-port-list={workers}"]

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables from which the node's processes read their channel ports."""
        return {_VARIABLE: f"{self.channels[0]}-{self.channels[-1]}"}

    def release(self) -> None:
        """Release the ports for other nodes."""
        self._guards.close()


def channel_ports() -> PortRange | None:
    """Return the range of ports that channels of this process may use; None if they may use any port."""
    text = os.environ.get(_VARIABLE)
    return None if text is None else PortRange(*map(int, text.split("-")))


def ports_text(ports: Collection[int]) -> str:
    """Return ports as text for the user, with consecutive ports as a range: ``24001-24006, 24010``."""
    parts = []
    for _, run in groupby(enumerate(sorted(ports)), key=lambda pair: pair[1] - pair[0]):
        row = [port for _, port in run]
        parts.append(f"{row[0]}-{row[-1]}" if len(row) > 1 else str(row[0]))
    return ", ".join(parts)


def _guard(unit: range) -> socket.socket | None:
    """Return a socket that holds the first port of a unit; None if any port of the unit is taken."""
    guard = socket.socket()
    try:
        guard.bind(("", unit[0]))  # no other process can bind this port, because SO_REUSEADDR is not set
        for port in unit[1:]:
            socket.create_server(("", port)).close()
    except OSError:
        guard.close()
        return None
    return guard
