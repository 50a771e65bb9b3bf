"""Fixtures with real processes: one running server for the whole session, and machines that join it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

import psutil
import pytest
from httpx._config import DEFAULT_TIMEOUT_CONFIG
from tests.programs import pytest_runtest_makereport, pytest_terminal_summary
from tests.quarantine import QUARANTINE, why_never_repeated
from tests.ray_nodes import attempt, nodes, ray_cluster, topology

from share_compute.lifecycle.deployment_states import DeploymentState
from share_compute.lifecycle.states import ContributorState
from share_compute.program import collect_rarely
from share_compute.store.records import ContributorRecord
from share_compute_actors.machine.ports import PortRange
from share_compute_api.client.client import Client
from share_compute_api.schemas.bodies import DeploymentView
from share_compute_api.terminal.children import own_command
from share_compute_api.workers.isolated import pool
from share_compute_api.workers.isolated.pool import PoolLimits

__all__ = [
    "attempt",
    "nodes",
    "pytest_runtest_makereport",
    "pytest_terminal_summary",
    "ray_cluster",
    "topology",
]  # hooks, and fixtures that all folders share: the session has one Ray cluster

DEADLINE_S = 240.0
GRACE_S = 100.0
SHORTEST_POLL_S, LONGEST_POLL_S = 0.05, 0.25
"""Each poll takes processor time in the process that answers it, which the awaited event needs as well."""
WITH_MACHINES = ("tests/chaos/", "tests/containers/", "tests/hosts/")
WITH_BROWSERS = "tests/e2e/"
ACTORS, PURE = "tests/actors/", ("tests/platform/", "tests/web/")
SECOND_CLUSTER = "tests/actors/sparse/"
"""Tests here use a second Ray cluster, with those of ranks: one group for all would outlast the other workers."""
MACHINES = {"server", "run_server", "run_command"}
Found = TypeVar("Found")

# The collection of eight thousand tests creates no garbage.
collect_rarely()
# Threads of tensor operations that wait for each other in a loop take the cores from the processes of other tests.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Commands print in the language of the locale.
os.environ["LC_ALL"] = "C.UTF-8"
# httpx's default of five seconds would fail on a busy machine.
for _part in ("connect", "read", "write", "pool"):
    setattr(DEFAULT_TIMEOUT_CONFIG, _part, DEADLINE_S)
# Generated jobs name models of the Hugging Face Hub. No test may contact the Hub; nothing listens at this address.
os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell lets what it runs in the background ignore Ctrl-C, and so would every process of the tests.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option for the number of schedules that the thorough tests of rounds draw."""
    parser.addoption(
        "--schedules", type=int, help="drawn schedules for each policy of rounds; thorough tests only"
    )


def pytest_itemcollected(item: pytest.Item) -> None:
    """Assign a test to its worker, and to `make test` or `make test-more`.

    - Three groups of tests run one after the other within the group: those in the Ray cluster of the session, those
      with machines that join the server of the session, and those that start servers of their own. Tests in front of
      a browser stay together by file.
    - Tests that start machines or browsers, and slow ones outside of the pure rooms, are ``more``, except the real
      paths.
    """
    file = item.path.relative_to(item.config.rootpath).as_posix()
    fixtures, is_slow = set(getattr(item, "fixturenames", ())), item.get_closest_marker("slow")
    if "ray_cluster" in fixtures:
        item.add_marker(pytest.mark.xdist_group("cluster"))
        if file.startswith(SECOND_CLUSTER):
            item.add_marker(pytest.mark.xdist_group("ranks"))
    elif file.startswith(WITH_BROWSERS) and not fixtures & MACHINES:
        item.add_marker(pytest.mark.xdist_group(file))
    elif file.startswith(WITH_MACHINES) or fixtures & MACHINES or (is_slow and file.startswith(ACTORS)):
        item.add_marker(pytest.mark.xdist_group("machines" if "server" in fixtures else "servers"))
    elif not is_slow or file.startswith(PURE):
        return
    if file.startswith(PURE):
        raise pytest.UsageError(
            f"{item.nodeid} starts machines or a browser, and `make test-more` ignores its folder"
        )
    if not item.get_closest_marker("real_path"):
        item.add_marker(pytest.mark.more)


def pytest_xdist_auto_num_workers() -> int:
    """Return the number of workers: one more than cores, since tests with machines mostly wait."""
    return len(os.sched_getaffinity(0)) + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let tests in quarantine have a second try; refuse those that must not have one."""
    for item in items:
        test_id = item.nodeid.partition("[")[0].partition("@")[0]
        if test_id not in QUARANTINE:
            continue
        if reason := why_never_repeated(test_id, (mark.name for mark in item.iter_markers())):
            raise pytest.UsageError(f"tests/quarantine.py: {reason}")
        item.add_marker(pytest.mark.flaky(reruns=1))


@pytest.fixture
def free_ports(worker_id: str) -> PortRange:
    """Return a range of two units of free ports. No other test takes ports from it at the same time."""
    number = 0 if worker_id == "master" else int(worker_id.removeprefix("gw"))
    ranges = (PortRange(first, first + 99) for first in range(26000 + number % 16 * 100, 32700, 1600))
    return next(within for within in ranges if within.free() == 100)


@pytest.fixture(scope="session", autouse=True)
def _patient_checks() -> Iterator[None]:
    """Give questions about submitted models and files more time: their libraries load slowly on a busy machine."""
    patient = partial(PoolLimits, time_s=DEADLINE_S, load_s=DEADLINE_S)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "PoolLimits", patient)
        yield


def wait_for(check: Callable[[], Found | None], what: str, deadline_s: float = DEADLINE_S) -> Found:
    """Return the first result of ``check`` that is not empty; fail if that takes too long.

    The interval between polls grows with the time waited, from `SHORTEST_POLL_S` to `LONGEST_POLL_S`.
    """
    began = time.monotonic()
    while (waited_s := time.monotonic() - began) < deadline_s:
        found = check()
        if found:
            return found
        time.sleep(min(max(SHORTEST_POLL_S, waited_s / 10), LONGEST_POLL_S))
    pytest.fail(f"{what}: not within {deadline_s:.0f} s")


@dataclass(frozen=True)
class RunningCommand:
    """A running command of share-compute, and its output."""

    process: subprocess.Popen[bytes]
    log: Path

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def json_lines(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.text().splitlines() if line.startswith("{")]

    def first_json(self) -> dict[str, str]:
        def check() -> dict[str, object] | None:
            assert self.process.poll() is None, self.text()
            return next(iter(self.json_lines()), None)

        return {key: str(value) for key, value in wait_for(check, "the first line of JSON").items()}

    def stop(self) -> int:
        """Ask it to end, as Ctrl-C does through SIGTERM; returns its exit status."""
        self.process.terminate()
        return self.process.wait(GRACE_S)


def harmless_environment() -> dict[str, str]:
    """Return the variables of this process without those that change what a command of share-compute does."""
    return {
        name: value for name, value in os.environ.items() if not name.startswith(("SHARE_COMPUTE_", "RAY_"))
    }


@contextmanager
def run_command(
    folder: Path, *arguments: str, inside: Sequence[str] = (), **environment: str
) -> Iterator[RunningCommand]:
    """Run a command of share-compute inside the block, with these variables set.

    Args:
        folder: what it prints goes there.
        arguments: of the command.
        inside: words before it, which run it on another host.
        environment: variables.
    """
    log = folder / f"{arguments[0]}-{uuid4().hex[:6]}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*inside, *own_command(*arguments)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**harmless_environment(), **environment},
            start_new_session=True,
        )
    command = RunningCommand(process, log)
    try:
        yield command
    finally:
        if process.poll() is not None:
            print(f"{arguments[0]} ended by itself, with {process.returncode}:\n{command.text()}")  # noqa: T201 - beside the failure
        else:
            process.terminate()
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@dataclass(frozen=True)
class RunningServer:
    """A running server."""

    url: str
    api_key: str
    data_folder: Path
    command: RunningCommand

    def client(self) -> Client:
        return Client(self.url, self.api_key, timeout_s=DEADLINE_S)


@contextmanager
def run_server(
    data_folder: Path,
    *arguments: str,
    port: int = 0,
    data_root: Path | None = None,
    inside: Sequence[str] = (),
) -> Iterator[RunningServer]:
    """Run a server inside the block; jobs may name files below ``data_root``, which must not hold its data folder."""
    data_folder.mkdir(parents=True, exist_ok=True)
    root = data_root or data_folder.with_name(f"{data_folder.name}-files")
    root.mkdir(parents=True, exist_ok=True)
    places = ("--data-folder", str(data_folder), "--data-root", str(root))
    given = ("--json", "--port", str(port), *places, *arguments)
    with run_command(data_folder, "up", *given, inside=inside) as command:
        url = command.first_json()["url"]
        key = json.loads((data_folder / "credentials.json").read_text())["api_key"]
        yield RunningServer(url, key, data_folder, command)


def descendants(name: str, of: int | None = None) -> list[psutil.Process]:
    """Return the processes below a process, by default this one, whose names begin with ``name``.

    Processes that end meanwhile are left out.
    """
    found = []
    for process in psutil.Process(of).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.name().startswith(name):
                found.append(process)
    return found


@dataclass(frozen=True)
class RunningContributor:
    """A machine that is ready."""

    record: ContributorRecord
    command: RunningCommand


@contextmanager
def run_contributor(
    server: RunningServer, name: str | None = None, *arguments: str, inside: Sequence[str] = ()
) -> Iterator[RunningContributor]:
    """Join a machine inside the block."""
    name = name or f"machine-{uuid4().hex[:6]}"
    with server.client() as client:
        code = client.create_invite(label=name).code
        given = ("--memory", "600MiB", "--cpu-threads", "1", "--device", "cpu", "--json", *arguments)
        joining = ("join", server.url, "--invite", code, "--name", name, *given)
        folder = str(server.data_folder / "contributors")
        with run_command(
            server.data_folder, *joining, inside=inside, SHARE_COMPUTE_DATA_FOLDER=folder
        ) as command:
            yield RunningContributor(wait_for(lambda: ready(client, name), f"{name} ready"), command)


def ready(client: Client, name: str) -> ContributorRecord | None:
    """Return the contributor of this name if it is ready."""
    ready_ones = (one for one in client.contributors() if one.state is ContributorState.ready)
    return next((one for one in ready_ones if one.name == name), None)


def served(client: Client, name: str, stages: int) -> DeploymentView | None:
    """Return the deployment if it is ready with this number of stages; with fewer machines it has fewer stages."""
    found = client.deployment(name)
    is_whole = [len(plan.stages) for plan in found.plans] == [stages]
    return found if is_whole and found.state is DeploymentState.ready else None


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One server that all tests share."""
    files = tmp_path_factory.getbasetemp()
    with (
        # When another pytest ends, it removes folders named pytest-... here that have no lock of pytest's own.
        tempfile.TemporaryDirectory(prefix=f"server-{files.name}-", dir=files.parent) as folder,
        run_server(Path(folder), data_root=files) as running,
    ):
        yield running


ContributorFactory = Callable[[], RunningContributor]


@pytest.fixture
def contributors(server: RunningServer) -> Iterator[ContributorFactory]:
    """Return a function that joins one more machine to the shared server until the end of the test."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(run_contributor(server))


@pytest.fixture(scope="module")
def contributor(server: RunningServer) -> Iterator[RunningContributor]:
    """One machine that joined the shared server, for all tests of a file that do not change it."""
    with run_contributor(server) as running:
        yield running


@pytest.fixture(name="wait_for")
def wait_for_fixture() -> Callable[..., object]:
    """Return `wait_for`: tests are not importable from each other."""
    return wait_for


@pytest.fixture(name="run_server")
def run_server_fixture() -> Callable[..., object]:
    """Return `run_server`."""
    return run_server


@pytest.fixture(name="run_command")
def run_command_fixture() -> Callable[..., object]:
    """Return `run_command`."""
    return run_command
