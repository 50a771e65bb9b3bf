"""A cluster on several hosts: a server and some machines, each with a network of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.conftest import RunningServer, run_contributor, run_server
from tests.hosts.network import Host, Network, why_not


@dataclass(frozen=True)
class Cluster:
    """A server and the machines that joined it, each on a host of its own."""

    server: RunningServer
    host: Host
    """The server's host."""
    machines: dict[str, Host]
    """Hosts of the machines, by machine name."""
    network: Network
    """The network to add hosts to."""

    def others(self, host: Host) -> list[Host]:
        """Return all hosts but one."""
        return [each for each in (self.host, *self.machines.values()) if each is not host]


@contextmanager
def run_cluster(machines: int = 3, *, is_resolver_dead: bool = False) -> Iterator[Cluster]:
    """Run a server on one host and machines on others inside the block.

    Args:
        machines: how many.
        is_resolver_dead: whether the hosts ask a name server that never answers.
    """
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with ExitStack() as stack:
        network = stack.enter_context(Network(is_resolver_dead=is_resolver_dead))
        host, *others = (network.add() for _ in range(1 + machines))
        # Paths of Ray's sockets are limited to 107 bytes.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sc-hosts-", dir="/tmp")))
        listening = ("--host", host.address, "--insecure")
        server = stack.enter_context(run_server(folder / "data", *listening, inside=host.inside))
        named = {f"machine-{number}": machine for number, machine in enumerate(others)}

        def join(name: str) -> None:
            joining = ("--address", named[name].address, "--insecure")
            stack.enter_context(run_contributor(server, name, *joining, inside=named[name].inside))

        with ThreadPoolExecutor() as threads:
            list(threads.map(join, named))
        yield Cluster(server, host, named, network)
