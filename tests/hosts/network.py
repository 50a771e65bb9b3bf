"""Hosts on one machine: network namespaces with addresses of their own, on one bridge.

Links between hosts can be cut, delayed and limited in rate. A host can have a firewall, be behind NAT, or have a second
address. The test's own thread is on the bridge, too, so it can watch a server whose links to the other hosts are cut.
This machine's own network never changes: browsers, which other tests use meanwhile, would interrupt their requests.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Literal, Self, TextIO, TypeVar

import psutil
from tests.programs import missing

Direction = Literal["both", "in", "out"]
_PROGRAMS = ("ip", "iptables")
_RESOLVERS = Path("/etc/netns")
_NOBODY = "192.0.2.53"
"""An address that no host has, from a range for documentation (RFC 5737)."""
_NOBODYS_DEVICE = "00:00:5e:00:53:53"
"""A MAC address that no device has, from a range for documentation (RFC 7042)."""
_NAMESPACES = Path("/run/netns")
_OWN = Path("/proc/thread-self/ns/net")
_CLONE_NEWNET = 0x40000000
"""From linux/sched.h."""
_SHIM = Path(__file__).with_name("shim.py")
_GRACE_S = 10.0
_networks = count()
Returned = TypeVar("Returned")


def has_title(word: str) -> Callable[[psutil.Process], bool]:
    """Return a predicate: whether a process has this name, or a title that starts with it."""
    return lambda process: process.name() == word or "".join(process.cmdline()[:1]).startswith(word)


def why_not() -> str | None:
    """Return why there can be no hosts here; None if there can."""
    if lacking := [program for program in _PROGRAMS if shutil.which(program) is None]:
        return missing(*lacking)
    if os.geteuid() != 0:
        return "only root makes network namespaces"
    tried = subprocess.run(
        ["unshare", "--net", "iptables", "-A", "INPUT", "-j", "DROP"], capture_output=True, check=False
    )
    return f"no network namespace: {tried.stderr.decode().strip()}" if tried.returncode else None


@dataclass
class Host:
    """A host with an address.

    Args:
        name: of its namespace.
        address: its own.
        public_address: source address of its packets on the bridge; that of its router if the host is behind NAT.
        second_address: another address of its own, which no other host reaches.
        bridge: namespace of the bridge.
        port: device of the bridge that the host, or its router, is connected to.
    """

    name: str
    address: str
    public_address: str
    second_address: str | None
    bridge: str
    port: str

    @property
    def inside(self) -> tuple[str, ...]:
        """Command prefix that runs a command on this host."""
        return ("ip", "netns", "exec", self.name)

    def processes(self) -> list[int]:
        """Return the ids of the processes on this host."""
        return _processes(self.name)

    def kill(self, is_victim: Callable[[psutil.Process], bool]) -> None:
        """Kill the processes on this host for which the predicate is true.

        Raises:
            RuntimeError: none does.
        """
        killed = 0
        for pid in self.processes():
            with suppress(psutil.NoSuchProcess):
                if is_victim(psutil.Process(pid)):
                    os.kill(pid, signal.SIGKILL)
                    killed += 1
        if not killed:
            raise RuntimeError(f"nothing to kill on {self.name}")

    def run(self, *command: str) -> None:
        """Run a command on this host; it must succeed."""
        _run(*self.inside, *command)

    def open_socket(self, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
        """Return a new IPv4 socket on this host, for any thread of this process."""
        return self.call(lambda: socket.socket(socket.AF_INET, kind))

    def call(self, function: Callable[[], Returned]) -> Returned:
        """Call a function on this host; its sockets stay there."""
        with _on(self.name):
            return function()

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
            for rule in (("INPUT", "-s", other.public_address), ("OUTPUT", "-d", other.public_address))
            if direction == "both" or rule[0] == {"in": "INPUT", "out": "OUTPUT"}[direction]
        ]
        for chain, *match in rules:
            self._iptables("-I", chain, *match, "-j", "DROP")
        try:
            yield
        finally:
            for chain, *match in rules:
                self._iptables("-D", chain, *match, "-j", "DROP")

    @contextmanager
    def losing(self, connection: socket.socket) -> Iterator[None]:
        """Drop all packets that this host sends on a TCP connection of its own inside the block."""
        ports = ("--sport", str(connection.getsockname()[1]), "--dport", str(connection.getpeername()[1]))
        rule = ("OUTPUT", "-p", "tcp", *ports, "-j", "DROP")
        self._iptables("-I", *rule)
        try:
            yield
        finally:
            self._iptables("-D", *rule)

    @contextmanager
    def firewall(self, open_ports: tuple[int, int]) -> Iterator[None]:
        """Drop new incoming TCP connections and UDP packets inside the block.

        Connections from this host, to itself, and from before the block go on. Blocks of one host cannot be nested.

        Args:
            open_ports: first and last port of the range that remains open, for TCP and UDP.
        """
        ports = f"{open_ports[0]}:{open_ports[1]}"
        rules = [
            ("-i", "lo", "-j", "ACCEPT"),
            ("-m", "conntrack", "--ctstate", "ESTABLISHED,RELATED", "-j", "ACCEPT"),
            ("-p", "tcp", "--dport", ports, "-j", "ACCEPT"),
            ("-p", "udp", "--dport", ports, "-j", "ACCEPT"),
            # conntrack may not know connections from before the block, so other TCP packets than the first pass.
            ("-p", "tcp", "--syn", "-j", "DROP"),
            ("-p", "udp", "-j", "DROP"),
        ]
        with ExitStack() as undo:
            self._iptables("-N", "firewall")
            undo.callback(self._iptables, "-X", "firewall")
            undo.callback(self._iptables, "-F", "firewall")
            for rule in rules:
                self._iptables("-A", "firewall", *rule)
            self._iptables("-A", "INPUT", "-j", "firewall")
            undo.callback(self._iptables, "-D", "INPUT", "-j", "firewall")
            yield

    @contextmanager
    def slow(self, delay_s: float = 0.0, bytes_per_s: float = float("inf")) -> Iterator[None]:
        """Delay all packets between this host and the bridge, and limit their rate, inside the block.

        Both values hold for each direction, and connections go on. Frames that are on the way when the block ends are
        lost. Blocks of one host cannot be nested, and must end before the network is closed.

        Args:
            delay_s: seconds that each packet is delayed.
            bytes_per_s: rate of the link; frames count with their headers.
        """
        near, far, between = f"{self.port}-near", f"{self.port}-far", f"{self.port}-slow"
        inside = ("ip", "netns", "exec", self.bridge)
        command = (*inside, sys.executable, str(_SHIM), near, far, str(delay_s), str(bytes_per_s))
        with ExitStack() as undo:
            shim = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            undo.callback(_end, shim)
            assert shim.stdout is not None
            if not shim.stdout.readline():
                raise RuntimeError(f"the shim of {self.name} did not start")
            _run(*inside, "ip", "link", "add", between, "type", "bridge")
            undo.callback(_run, *inside, "ip", "link", "delete", between)
            for device in (near, far, between):
                _run(*inside, "ip", "link", "set", device, "up")
            for device, master in ((near, between), (far, "lan"), (self.port, between)):
                _run(*inside, "ip", "link", "set", device, "master", master)
            undo.callback(_run, *inside, "ip", "link", "set", self.port, "master", "lan")
            yield
            if shim.poll() is not None:
                raise RuntimeError(f"the shim of {self.name} ended with {shim.returncode}")

    def _iptables(self, *rule: str) -> None:
        self.run("iptables", "-w", *rule)


@dataclass
class Network:
    """A bridge with hosts, and with the calling thread; `close` it in the same thread in the end.

    Threads and processes that this thread starts are on the bridge as well, if they are not started on a host.

    Args:
        hosts: on it.
        is_resolver_dead: whether the hosts ask a name server that never answers.
    """

    hosts: list[Host] = field(default_factory=list)
    is_resolver_dead: bool = False
    _id: str = field(init=False)
    _namespaces: list[str] = field(init=False, default_factory=list)
    _thread: ExitStack = field(init=False, default_factory=ExitStack)
    """Moves the calling thread to the bridge, and back."""

    def __post_init__(self) -> None:
        number = os.getpid() * 8 + next(_networks)
        self._id = f"sc{number:x}"
        self._prefix = f"10.{64 + number // 256 % 64}.{number % 256}"
        try:
            self._add_namespace(self._id)
            self._in_bridge("ip", "link", "add", "lan", "type", "bridge")
            self._in_bridge("ip", "address", "add", f"{self._prefix}.254/24", "dev", "lan")
            self._in_bridge("ip", "link", "set", "lan", "up")
            self._thread.enter_context(_on(self._id))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, *, behind_nat: bool = False, second_address: bool = False) -> Host:
        """Add a host.

        Args:
            behind_nat: whether a router stands between the host and the bridge. It lets the host reach the others under
                the router's address, and drops all packets from them that belong to no connection of the host.
            second_address: whether the host has a second interface, ``eth1``, with an address that the others do not
                reach. Its default route leads there, so that address is the one towards the internet.
        """
        number = len(self.hosts) + 1
        public = f"{self._prefix}.{number}"
        host = Host(
            name=f"{self._id}-{number}",
            address=f"192.168.{number}.2" if behind_nat else public,
            public_address=public,
            second_address=f"172.31.{number}.1" if second_address else None,
            bridge=self._id,
            port=f"port{number}",
        )
        self.hosts.append(host)
        self._add_namespace(host.name)
        if behind_nat:
            self._add_router(host, f"{host.name}-router", f"192.168.{number}.1")
        else:
            self._plug(host.port, host.name, public)
        if host.second_address is not None:
            second = f"second{number}"
            _connect(self._id, second, host.name, "eth1", host.second_address)
            self._in_bridge("ip", "link", "set", second, "up")
            host.run("ip", "route", "add", "default", "dev", "eth1")
        if self.is_resolver_dead:
            # `ip netns exec` puts this file in the place of /etc/resolv.conf.
            configuration = _RESOLVERS / host.name / "resolv.conf"
            configuration.parent.mkdir(parents=True)
            configuration.write_text(f"nameserver {_NOBODY}\n")
            # Look-ups must wait for their timeout: they would fail at once if iptables dropped the packets, and after
            # three seconds if no neighbour had the address.
            host.run("ip", "route", "add", _NOBODY, "dev", "eth0")
            host.run("ip", "neighbour", "add", _NOBODY, "lladdr", _NOBODYS_DEVICE, "dev", "eth0")
        return host

    def close(self) -> None:
        """Remove hosts and bridge. Processes on the bridge get SIGTERM; those on hosts go on without a network."""
        self._thread.close()
        if self._id in self._namespaces:
            for pid in _processes(self._id):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
        for name in reversed(self._namespaces):
            subprocess.run(["ip", "netns", "delete", name], check=False)
            shutil.rmtree(_RESOLVERS / name, ignore_errors=True)

    def _add_namespace(self, name: str) -> None:
        _run("ip", "netns", "add", name)
        self._namespaces.append(name)
        _run("ip", "netns", "exec", name, "ip", "link", "set", "lo", "up")

    def _add_router(self, host: Host, name: str, address: str) -> None:
        """Connect a host to the bridge through a router with NAT."""
        self._add_namespace(name)
        self._plug(host.port, name, host.public_address)
        _connect(name, "inner", host.name, "eth0", host.address)
        foreign = ("-i", "eth0", "-m", "conntrack", "!", "--ctstate", "ESTABLISHED,RELATED", "-j", "DROP")
        for command in (
            ("ip", "address", "add", f"{address}/24", "dev", "inner"),
            ("ip", "link", "set", "inner", "up"),
            ("sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"),
            ("iptables", "-w", "-t", "nat", "-A", "POSTROUTING", "-o", "eth0", "-j", "MASQUERADE"),
            ("iptables", "-w", "-A", "INPUT", *foreign),
            ("iptables", "-w", "-A", "FORWARD", *foreign),
        ):
            _run("ip", "netns", "exec", name, *command)
        host.run("ip", "route", "add", f"{self._prefix}.0/24", "via", address)

    def _plug(self, port: str, namespace: str, address: str) -> None:
        """Connect a namespace to the bridge."""
        _connect(self._id, port, namespace, "eth0", address)
        self._in_bridge("ip", "link", "set", port, "master", "lan", "up")

    def _in_bridge(self, *command: str) -> None:
        _run("ip", "netns", "exec", self._id, *command)


def _connect(namespace: str, device: str, other: str, other_device: str, address: str) -> None:
    """Make a pair of devices in two namespaces; the other one gets an address and is up.

    Args:
        namespace: that of the first device.
        device: the first device.
        other: the other namespace.
        other_device: the other device.
        address: its own, in a subnet of 24 bits.
    """
    pair = ("type", "veth", "peer", "name", other_device, "netns", other)
    _run("ip", "netns", "exec", namespace, "ip", "link", "add", device, *pair)
    inside = ("ip", "netns", "exec", other)
    _run(*inside, "ip", "address", "add", f"{address}/24", "dev", other_device)
    _run(*inside, "ip", "link", "set", other_device, "up")


def _processes(namespace: str) -> list[int]:
    found = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=True)
    return [int(each) for each in found.stdout.split()]


@contextmanager
def _on(namespace: str) -> Iterator[None]:
    """Move the calling thread into a network namespace inside the block; other threads stay where they are."""
    with _OWN.open() as before, (_NAMESPACES / namespace).open() as wanted:
        try:
            _enter(wanted)
            yield
        finally:
            _enter(before)


def _enter(namespace: TextIO) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace.fileno(), _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"setns to {namespace.name}")


def _end(shim: subprocess.Popen[bytes]) -> None:
    """End a shim, whose standard input is a pipe, and wait for it."""
    try:
        shim.communicate(timeout=_GRACE_S)
    except subprocess.TimeoutExpired:
        shim.kill()
        shim.communicate()


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
