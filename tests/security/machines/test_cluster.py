"""Neither the cluster's token nor a machine with changed software gives access to the server."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.ray_nodes import title

from share_compute.lifecycle.states import ContributorState
from share_compute_actors.machine import confine
from share_compute_actors.machine.confine import landlock_version
from share_compute_actors.machine.launch import RAY_SETTINGS
from share_compute_api.client.client import Client
from share_compute_api.connection.discovery import CREDENTIALS_FILE, SERVER_FILE

pytestmark = pytest.mark.slow

_ON_THE_HEAD = """
import json, os, subprocess, sys
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

folder, server = sys.argv[2], int(sys.argv[3])
jobs = os.path.join(folder, "jobs")

def attack():
    import os, pathlib, socket, subprocess
    tried = {}
    def attempt(name, work):
        try:
            tried[name] = repr(work())[:80]
        except Exception as failure:
            tried[name] = None
    for name in ("credentials.json", "share-compute.db", "ray-token", "server.json"):
        attempt("read " + name, lambda: open(os.path.join(folder, name), "rb").read(10))
    attempt("write", lambda: open(os.path.join(folder, "planted"), "w").write("x"))
    attempt("environment", lambda: open(f"/proc/{server}/environ", "rb").read(10))
    attempt("memory", lambda: open(f"/proc/{server}/mem", "rb"))
    for number in range(3, 30):
        attempt(f"file {number}", lambda: open(f"/proc/{server}/fd/{number}", "rb"))
    attempt("signal", lambda: os.kill(server, 0))
    attempt("shadow", lambda: open("/etc/shadow").read(4))
    attempt("home", lambda: os.listdir(os.path.expanduser("~root")))
    attempt("mount", lambda: subprocess.run(["mount", "-t", "tmpfs", "none", "/mnt"], check=True))
    attempt("jobs", lambda: os.listdir(jobs))
    return tried

def detach(program):
    subprocess.run([sys.executable, "-c", program, jobs], check=True)

class Detached:
    def hold(self):
        import fcntl
        self.held = open(os.path.join(jobs, "actor"), "w")
        fcntl.flock(self.held, fcntl.LOCK_EX)

def on_the_head(work, *arguments):
    return ray.get(ray.remote(work).options(num_cpus=0, scheduling_strategy=there).remote(*arguments), timeout=60)

try:
    here = sys.argv[1].split(":")[0]
    ray.init(address=sys.argv[1], log_to_driver=False, _temp_dir=sys.argv[4], _node_ip_address=here)
    nodes = [node for node in ray.nodes() if node["Alive"]]
    head = next(node["NodeID"] for node in nodes if "node:__internal_head__" in node["Resources"])
    there = NodeAffinitySchedulingStrategy(head, soft=False)
    match sys.argv[5]:
        case "attack":
            done = on_the_head(attack)
        case "detach":
            on_the_head(detach, sys.argv[6])
            # Not bound to the node, which has another id after a restart: the head is the only one.
            options = {"name": "detached", "lifetime": "detached", "max_restarts": -1, "num_cpus": 0}
            actor = ray.remote(Detached).options(**options).remote()
            done = {"actor": ray.get(actor.hold.remote(), timeout=60)}
        case "find":
            done = {"names": [found["name"] for found in ray.util.list_named_actors(all_namespaces=True)]}
    print(json.dumps(done))
except (ray.exceptions.RayError, ConnectionError) as failure:
    print(json.dumps({"refused": type(failure).__name__}))
"""


_DETACHES = """
import fcntl, os, signal, sys, time

held = open(os.path.join(sys.argv[1], "process"), "w")
fcntl.flock(held, fcntl.LOCK_EX)  # until all processes that inherit the open file have ended
if os.fork():
    sys.exit()
os.setsid()
if os.fork():
    os._exit(0)
for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
time.sleep(600)
"""


def run_on_head(server: Any, token: str, *work: str) -> dict[str, Any]:
    """Run code on the head as a user of the server's machine who has only a token; return what the code could do."""
    pid = json.loads((server.data_folder / SERVER_FILE).read_text())["pid"]
    raylet = next(
        said
        for child in psutil.Process(pid).children(recursive=True)
        if "/raylet " in (said := title(child)) and " --head" in said
    )
    options = dict(part[2:].split("=", 1) for part in raylet.split() if part.startswith("--") and "=" in part)
    done = subprocess.run(
        [
            *(sys.executable, "-c", _ON_THE_HEAD, options["gcs-address"], str(server.data_folder), str(pid)),
            *(str(Path(options["temp_dir"])), *(work or ("attack",))),
        ],
        env={**os.environ, **RAY_SETTINGS, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.stderr
    found: dict[str, Any] = json.loads(lines[-1])
    return found


@pytest.mark.skipif(not landlock_version(), reason="this kernel has no Landlock")
def test_code_on_the_head_reaches_no_secret_of_the_server(server: Any) -> None:
    token = (server.data_folder / "ray-token").read_text()
    done = run_on_head(server, token)
    assert done.pop("jobs") is not None, "the attack did not run"
    assert {name for name, answer in done.items() if answer is not None} == set()
    assert not (server.data_folder / "planted").exists()


def test_the_control_plane_holds_no_ray(server: Any) -> None:
    pid = json.loads((server.data_folder / SERVER_FILE).read_text())["pid"]
    assert not any("_raylet" in file.path for file in psutil.Process(pid).memory_maps())


def test_the_gateway_inherits_no_secret(server: Any, wait_for: Callable[..., Any]) -> None:
    pid = json.loads((server.data_folder / SERVER_FILE).read_text())["pid"]
    key = json.loads((server.data_folder / CREDENTIALS_FILE).read_text())["api_key"]
    gateway = wait_for(lambda: gateway_of(pid), "a gateway")
    assert key not in repr(gateway.environ())
    assert not [name for name in gateway.environ() if name.startswith("SHARE_COMPUTE")]


def gateway_of(server: int) -> psutil.Process | None:
    """Return the process of a server that calls Ray, if it runs now."""
    for child in psutil.Process(server).children(recursive=True):
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            command = child.cmdline()
            if "share_compute_api.cluster.gateway_process" in command and confine.__name__ not in command:
                return child
    return None


def test_the_control_plane_survives_the_gateway(
    server: Any, contributor: Any, wait_for: Callable[..., Any]
) -> None:
    pid = json.loads((server.data_folder / SERVER_FILE).read_text())["pid"]
    before = wait_for(lambda: gateway_of(pid), "a gateway")
    before.kill()
    wait_for(lambda: psutil.pid_exists(pid) and _is_another(pid, before), "another gateway")
    with server.client() as client:
        wait_for(lambda: client.contributor(contributor.record.id).state is ContributorState.ready, "ready")


def _is_another(server: int, before: psutil.Process) -> bool:
    now = gateway_of(server)
    return now is not None and now.pid != before.pid


def test_the_token_of_a_removed_machine_opens_nothing(
    tmp_path: Path,
    run_server: Callable[..., Any],
    run_command: Callable[..., Any],
    wait_for: Callable[..., Any],
) -> None:
    def join(client: Client, name: str) -> Any:
        given = ("--memory", "600MiB", "--cpu-threads", "1", "--device", "cpu", "--json", "--name", name)
        return run_command(
            tmp_path, "join", client.status().url, *given, SHARE_COMPUTE_INVITE=client.create_invite().code
        )

    with (
        run_server(tmp_path / "data") as own,
        own.client() as client,
        join(client, "stays"),
        join(client, "goes"),
    ):
        wait_for(lambda: len(ready(client)) == 2, "two machines")
        token = (own.data_folder / "ray-token").read_text()
        assert "refused" not in run_on_head(own, token)
        gone = next(one for one in client.contributors() if one.name == "goes")
        client.remove_contributor(gone.id)
        client.rotate_token()  # answers when the change in progress is done
        wait_for(lambda: ready(client) == ["stays"], "the other machine is back")
        assert "refused" in run_on_head(own, token)
        assert "refused" not in run_on_head(own, (own.data_folder / "ray-token").read_text())


@pytest.mark.parametrize("end", ["rotation and stop", "kill"])
def test_nothing_that_was_detached_on_the_head_outlives_it(
    tmp_path: Path, run_server: Callable[..., Any], wait_for: Callable[..., Any], end: str
) -> None:
    with run_server(tmp_path / "data") as own, own.client() as client:
        files = [own.data_folder / "jobs" / name for name in ("process", "actor")]

        def detach() -> None:
            token = (own.data_folder / "ray-token").read_text()
            assert "refused" not in run_on_head(own, token, "detach", _DETACHES)
            assert all(is_held(file) for file in files)

        detach()
        if end == "kill":
            own.command.process.kill()
            wait_for(lambda: not any(is_held(file) for file in files), "the end of what was detached")
        else:
            client.rotate_token()
            assert not any(is_held(file) for file in files)
            renewed = (own.data_folder / "ray-token").read_text()
            assert "detached" not in run_on_head(own, renewed, "find")["names"]
            detach()
            own.command.stop()
            assert not any(is_held(file) for file in files)


def is_held(file: Path) -> bool:
    """Return whether a process holds the lock of a file."""
    with file.open() as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def ready(client: Client) -> list[str]:
    return [one.name for one in client.contributors() if one.state is ContributorState.ready]


_HOSTILE = """
import os, sys

class Bomb:
    def __reduce__(self):
        return (os.system, ("touch {marker}-$PPID",))

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != "ray._private.serialization":
            return None
        sys.meta_path.remove(self)
        import importlib.util
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        def exec_module(module):
            load(module)
            original = module.SerializationContext.serialize
            module.SerializationContext.serialize = lambda context, value: original(context, Bomb())
        spec.loader.exec_module = exec_module
        return spec

if "default_worker.py" in " ".join(sys.orig_argv):
    sys.meta_path.insert(0, Finder())
"""


def test_a_machine_whose_every_answer_is_hostile_runs_nothing_here(
    tmp_path: Path, server: Any, run_command: Callable[..., Any], wait_for: Callable[..., Any]
) -> None:
    marker = Path("/dev/shm") / f"hostile-{os.getpid()}"
    (tmp_path / "sitecustomize.py").write_text(_HOSTILE.replace("{marker}", str(marker)))
    given = ("--memory", "600MiB", "--cpu-threads", "1", "--device", "cpu", "--json", "--name", "hostile")
    with server.client() as client:
        code = client.create_invite().code
        variables = {
            "SHARE_COMPUTE_INVITE": code,
            "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}",
        }
        with run_command(tmp_path, "join", server.url, *given, **variables) as machine:

            def given_up() -> bool:
                assert machine.process.poll() is None, machine.text()
                found = [one for one in client.contributors() if one.name == "hostile"]
                return bool(found) and found[0].state is ContributorState.lost

            wait_for(given_up, "the hostile machine is given up")
            assert client.status().has_cluster
        assert list(marker.parent.glob(f"{marker.name}*")) == []
