"""Hosts on one machine: network namespaces with addresses of their own, on one bridge, whose links can be cut.

The test's own process is on the bridge, too, so it can watch a server whose links to the other hosts are cut.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Literal, Self

Direction = Literal["both", "in", "out"]
_PROGRAMS = ("ip", "iptables")
_RESOLVERS = Path("/etc/netns")
_NOBODY = "192.0.2.53"
"""An address for documentation (RFC 5737)."""
_networks = count()


def why_not() -> str | None:
    """Return why there can be no hosts here; None if there can."""
    missing = [program for program in _PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"{' and '.join(missing)} are not installed"
    if os.geteuid() != 0:
        return "only root makes network namespaces"
    tried = subprocess.run(
        ["unshare", "--net", "iptables", "-A", "INPUT", "-j", "DROP"], capture_output=True, check=False
    )
    return f"no network namespace: {tried.stderr.decode().strip()}" if tried.returncode else None


@dataclass
class Host:
    """A host with one address.

    Args:
        name: of its namespace.
        address: its own.
    """

    name: str
    address: str

    @property
    def inside(self) -> tuple[str, ...]:
        """What a command begins with that is to run on this host."""
        return ("ip", "netns", "exec", self.name)

    def processes(self) -> list[int]:
        """Return the ids of the processes on this host."""
        found = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=True)
        return [int(each) for each in found.stdout.split()]

    def run(self, *command: str) -> None:
        """Run a command on this host; it must succeed."""
        _run(*self.inside, *command)

    @contextmanager
    def cut_from(self, others: Sequence[Host], direction: Direction = "both") -> Iterator[None]:
        """Drop all packets between this host and others inside the block.

        Args:
            others: the other hosts.
            direction: which packets, as this host sees them.
        """
        rules = [
            rule
            for other in others
            for rule in (("INPUT", "-s", other.address), ("OUTPUT", "-d", other.address))
            if direction == "both" or rule[0] == {"in": "INPUT", "out": "OUTPUT"}[direction]
        ]
        for chain, *match in rules:
            self.run("iptables", "-w", "-I", chain, *match, "-j", "DROP")
        try:
            yield
        finally:
            for chain, *match in rules:
                self.run("iptables", "-w", "-D", chain, *match, "-j", "DROP")


@dataclass
class Network:
    """A bridge with hosts; `close` it in the end.

    Args:
        hosts: on it.
        is_resolver_dead: whether the hosts ask a name server that never answers.
    """

    hosts: list[Host] = field(default_factory=list)
    is_resolver_dead: bool = False
    _id: str = field(init=False)

    def __post_init__(self) -> None:
        number = os.getpid() * 8 + next(_networks)
        self._id = f"sc{number:x}"
        self._prefix = f"10.{64 + number // 256 % 64}.{number % 256}"
        _run("ip", "netns", "add", self._id)
        try:
            self._in_bridge("ip", "link", "add", "lan", "type", "bridge")
            self._in_bridge("ip", "link", "set", "lan", "up")
            self._plug(None, f"{self._prefix}.254")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self) -> Host:
        """Add a host."""
        number = len(self.hosts) + 1
        host = Host(f"{self._id}-{number}", f"{self._prefix}.{number}")
        _run("ip", "netns", "add", host.name)
        self.hosts.append(host)
        host.run("ip", "link", "set", "lo", "up")
        self._plug(host, host.address)
        if self.is_resolver_dead:
            # `ip netns exec` puts this file in the place of /etc/resolv.conf.
            configuration = _RESOLVERS / host.name / "resolv.conf"
            configuration.parent.mkdir(parents=True)
            configuration.write_text(f"nameserver {_NOBODY}\n")
            host.run("ip", "route", "add", _NOBODY, "dev", "eth0")
            host.run("iptables", "-w", "-A", "OUTPUT", "-d", _NOBODY, "-j", "DROP")
        return host

    def close(self) -> None:
        """Remove hosts and bridge; what still runs there has no network any more."""
        for name in (*(host.name for host in self.hosts), self._id):
            subprocess.run(["ip", "netns", "delete", name], check=False)
            shutil.rmtree(_RESOLVERS / name, ignore_errors=True)
        subprocess.run(["ip", "link", "delete", self._id], capture_output=True, check=False)

    def _plug(self, host: Host | None, address: str) -> None:
        """Connect a host, or the test's own process, to the bridge."""
        end = "eth0" if host is not None else self._id
        port = f"port{len(self.hosts)}"
        place = ["netns", host.name] if host is not None else ["netns", str(os.getpid())]
        self._in_bridge("ip", "link", "add", port, "type", "veth", "peer", "name", end, *place)
        self._in_bridge("ip", "link", "set", port, "master", "lan", "up")
        inside = host.inside if host is not None else ()
        _run(*inside, "ip", "address", "add", f"{address}/24", "dev", end)
        _run(*inside, "ip", "link", "set", end, "up")

    def _in_bridge(self, *command: str) -> None:
        _run("ip", "netns", "exec", self._id, *command)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
