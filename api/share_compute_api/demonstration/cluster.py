"""A server and machines that join it, all as child processes on this machine."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from share_compute.errors import ShareComputeError, Unavailable
from share_compute.lifecycle.states import ContributorState
from share_compute.store.records import ContributorRecord
from share_compute_actors.machine.processes import Child, ChildProcesses
from share_compute_api.client.client import Client
from share_compute_api.connection.data_folder import written_api_key
from share_compute_api.terminal.children import own_command

_POLL_S = 0.2
_UP_DEADLINE_S = 90.0
_READY_DEADLINE_S = 150.0
_JOIN_GRACE_S = 20.0
_UP_GRACE_S = 30.0
# Override settings that the user may have exported for another server.
_OWN_SETTINGS = {
    "SHARE_COMPUTE_RAY_PORT": "0",
    "SHARE_COMPUTE_ADVERTISE_ADDRESS": "",
    # Fault injection is safe, because only the user's own computer is in the cluster.
    "SHARE_COMPUTE_ALLOW_FAILURES": "1",
}


class LocalCluster:
    """A server on a free port, and machines that join it. `close` ends all of them.

    Args:
        children: runs the server and the machines as child processes.
        data_folder: the server's data folder.
        data_roots: folders in which jobs may name files; the data folder must not be in one of them.
    """

    def __init__(self, children: ChildProcesses, data_folder: Path, data_roots: Sequence[Path]) -> None:
        self._children = children
        self._data_roots = tuple(data_roots)
        self.data_folder = data_folder
        self._server: Child | None = None
        self._machines: dict[str, Child] = {}
        self.url = ""

    def start(self) -> Client:
        """Start the server and wait until it answers; return a client for it.

        Raises:
            Unavailable: the server ended, or did not answer within `_UP_DEADLINE_S` seconds.
        """
        command = own_command(
            *("up", "--json", "--host", "127.0.0.1", "--port", "0"),
            *("--data-folder", str(self.data_folder)),
            *(word for root in self._data_roots for word in ("--data-root", str(root))),
            *("--database-url", f"sqlite:///{self.data_folder / 'share-compute.db'}"),
        )
        self._server = self._children.start("server", command, environment=_OWN_SETTINGS)
        facts = self._server.watch(_first_json, _UP_DEADLINE_S)
        if facts is None:
            raise _not_started(self._server)
        self.url = str(facts["url"])
        return self._client()

    def sign_in_link(self) -> str:
        """Return a new one-time link that signs a browser in to the dashboard."""
        with self._client() as client:
            return client.sign_in_code().url

    def _client(self) -> Client:
        # Pass the key, because the user may have exported the key of another server.
        return Client(self.url, written_api_key(self.data_folder), data_folder=self.data_folder)

    def join(self, client: Client, name: str, *, memory: str, cpu_threads: int = 1) -> None:
        """Start a machine that joins the server; do not wait until it has joined."""
        code = client.create_invite(label=name).code
        command = own_command(
            *("join", self.url, "--name", name, "--json", "--device", "cpu"),
            *("--memory", memory, "--cpu-threads", str(cpu_threads)),
            # All machines end together, so none of them can take over the state of another.
            *("--leave-within", "0"),
        )
        # Other users of the machine can read command arguments, but not the environment.
        environment = {
            "SHARE_COMPUTE_INVITE": code,
            # Store the machine's key in the server's data folder, so that both are deleted together.
            "SHARE_COMPUTE_DATA_FOLDER": str(self.data_folder),
        }
        self._machines[name] = self._children.start(name, command, environment=environment)

    def wait_until_ready(
        self, client: Client, progress: Callable[[list[ContributorRecord]], None]
    ) -> list[ContributorRecord]:
        """Wait until all machines are measured and ready; return them.

        Args:
            client: client of the server.
            progress: called with the machines that have joined, at each poll.

        Raises:
            Unavailable: a machine ended, or the machines were not ready in time.
        """
        deadline = time.monotonic() + _READY_DEADLINE_S
        while True:
            here = [machine for machine in client.contributors() if machine.name in self._machines]
            progress(here)
            ready = [machine for machine in here if machine.state is ContributorState.ready]
            if len(ready) == len(self._machines):
                return ready
            for name, child in self._machines.items():
                if child.exit_code is not None:
                    raise _ended(child, f"machine {name}")
            if time.monotonic() > deadline:
                count = f"{len(ready)} of {len(self._machines)}"
                raise Unavailable(
                    f"{count} machines are ready after {_READY_DEADLINE_S:.0f} s",
                    hint="try again when this machine has less to do",
                )
            time.sleep(_POLL_S)

    def close(self) -> None:
        """End all machines at the same time, then the server."""
        for child in self._machines.values():
            child.interrupt()
        for child in self._machines.values():
            self._children.stop(child, _JOIN_GRACE_S)
        if self._server is not None:
            self._children.stop(self._server, _UP_GRACE_S)


def _first_json(printed: str) -> dict[str, str] | None:
    for line in printed.splitlines(keepends=True):
        if line.startswith('{"url"') and line.endswith("\n"):
            facts: dict[str, str] = json.loads(line)
            return facts
    return None


def _not_started(server: Child) -> ShareComputeError:
    if server.exit_code is not None:
        return _ended(server, "the server")
    return Unavailable(
        f"the server did not start within {_UP_DEADLINE_S:.0f} s",
        hint="try again when this machine has less to do",
        details={"log": server.log_tail()},
    )


def _ended(child: Child, what: str) -> ShareComputeError:
    lines = [line for line in child.log_tail().splitlines() if line.strip()] or ["it printed nothing"]
    return Unavailable(
        f"{what} ended with status {child.exit_code}: {lines[-1][:300]}",
        hint="run share-compute doctor to find the cause",
        details={"log": child.log_tail()},
    )
