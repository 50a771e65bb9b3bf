"""Runs ``ray start`` without Ray's dashboard and agents, and a head with a supervisor that restarts an ended GCS.

Run as ``python -m share_compute_actors.machine.ray_start [SCRIPT] start ...``; the supervisor is written to ``SCRIPT``.
Without the supervisor, Ray ends the whole head, with all coordinators, when the GCS ends. Nodes, drivers and actors
wait until a GCS with the same port and tables runs, and then continue: see "GCS fault tolerance" in Ray's
documentation.

share-compute does not use Ray's dashboard. ``ray start --head`` starts its process even with
``--include-dashboard=false``, and waits for it. Each raylet starts two agents and waits for them before it registers:
the dashboard's agent, and an agent that makes runtime environments, which share-compute's actors do not use. Each takes
more than half a second of processor time to start and about 90 MB of memory. `idle_agent` replaces both.

Where the package grpcio is installed, ``ray start --head`` also opens port 10001 for Ray Client, which lets others run
code on the head. share-compute does not use Ray Client, so it is not started.

Ray's command line also imports the commands of Ray Serve, of Ray Jobs and of the state API. With the optional packages
that Ray Serve uses (pandas, FastAPI, grpcio), these imports take two thirds of the processor time until the GCS starts.
share-compute does not use these commands, so they are not imported.

``ray start`` asks the GCS for the new node before the raylet has registered, and asks again after one second. With this
module, it first waits until the GCS lists the node, which takes some tenths of a second.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from ray import NodeID
from ray._private import ray_constants, services
from ray._raylet import GcsClient  # type: ignore[attr-defined]  # the stub of Ray leaves it out
from ray.exceptions import RayError

from share_compute.backoff import backoff_s
from share_compute.program import PROGRAM
from share_compute_actors.machine import idle_agent

_DASHBOARD_PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
"""Ports that the dashboard's agent reports. They are -1 in Ray's minimal installation, too."""
OTHER_COMMANDS = ("ray.dashboard.modules.job.cli", "ray.serve.scripts", "ray.util.state.state_cli")
"""Modules with commands of Ray that are not used here. Ray's command line works without them."""
SOUND_S = 5
"""Minimum time in seconds that a GCS must have run to be restarted when it ends.

A GCS that ends sooner has a lasting problem, such as damaged tables, so the supervisor and the head end, too."""
_REGISTERS_S = 30.0
"""Longest wait for a raylet to register, in seconds; after it, Ray reports the reason."""
_REGISTERED_POLLS_S = (0.02, 0.5)
"""Shortest and longest pause between two questions for all nodes. The pauses grow: many nodes may start at once."""
_SCRIPT = """\
#!/bin/sh
# Restarts Ray's GCS when it ends, unless this script received SIGTERM or SIGINT.
trap 'ended=1; kill -TERM "$gcs" 2>/dev/null' TERM INT
while :; do
  began=$(date +%s)
  {program} "$@" &
  gcs=$!
  wait "$gcs"; status=$?
  [ -n "$ended" ] && {{ wait "$gcs"; exit "$status"; }}
  [ $(($(date +%s) - began)) -lt {sound_s} ] && exit "$status"
done
"""


def main() -> None:
    """Run Ray's command line without dashboard, agents and Ray Client; supervise the GCS if a script is named."""
    if sys.argv[1] != "start":
        supervise_gcs(Path(sys.argv.pop(1)))
    leave_out_agents()
    wait_for_raylets()
    scripts = command_line()
    leave_out_ray_client(scripts)
    scripts.main()


def supervise_gcs(script: Path) -> None:
    """Write a script that restarts an ended GCS, and make this process start the script instead of the GCS."""
    program = shlex.quote(services.GCS_SERVER_EXECUTABLE)
    script.write_text(_SCRIPT.format(program=program, sound_s=SOUND_S))
    script.chmod(0o700)
    services.GCS_SERVER_EXECUTABLE = str(script)


def leave_out_agents() -> None:
    """Let this process start Ray nodes without dashboard, and with idle agents."""
    services.start_api_server = _start_no_api_server
    services.start_ray_process = partial(_start_process, services.start_ray_process)


def command_line() -> Any:
    """Return the module of Ray's command line, imported without the commands in `OTHER_COMMANDS`."""
    # `import` raises ModuleNotFoundError for a module whose entry in this table is None. Ray then omits its commands.
    added = dict.fromkeys(name for name in OTHER_COMMANDS if name not in sys.modules)
    sys.modules.update(added)  # type: ignore[arg-type]  # the types of the table leave out None
    try:
        from ray.scripts import scripts  # noqa: PLC0415 - the commands must be left out first
    finally:
        for name in added:
            del sys.modules[name]
    return scripts


def wait_for_raylets() -> None:
    """Let this process wait for the registration of a raylet without Ray's pauses of one second."""
    services.get_node = partial(get_registered, services.get_node)


def get_registered(get: Callable[[str, str], Any], gcs_address: str, node_id: str) -> Any:
    """Wait until the GCS lists a node, then return Ray's facts about it; ``get`` is Ray's function for these facts."""
    wanted, deadline_s = NodeID.from_hex(node_id), time.monotonic() + _REGISTERS_S
    with suppress(RayError):  # `get` reports the problem
        gcs, polls = GcsClient(address=gcs_address), 0
        while wanted not in gcs.get_all_node_info(timeout=_REGISTERS_S) and time.monotonic() < deadline_s:
            first_s, longest_s = _REGISTERED_POLLS_S
            time.sleep(backoff_s(first_s, polls, longest_s))
            polls += 1
    return get(gcs_address, node_id)


def leave_out_ray_client(scripts: Any) -> None:
    """Let this process start a head that opens no port for Ray Client, even if grpcio is installed.

    Args:
        scripts: the module of Ray's command line.
    """
    scripts.get_ray_client_dependency_error = lambda: "Ray Client is not used"


def _start_no_api_server(*_: Any, **__: Any) -> tuple[None, None]:
    """Return Ray's answer for a dashboard that was not started: no URL and no process."""
    return None, None


def _start_process(start: Callable[..., Any], command: list[str], process_type: str, **options: Any) -> Any:
    """Start a process of Ray as ``start`` does; give the raylet idle agents and quick workers."""
    if process_type == ray_constants.PROCESS_TYPE_RAYLET:
        command = with_quick_workers(with_idle_agents(command))
    return start(command, process_type, **options)


def with_idle_agents(raylet: Sequence[str]) -> list[str]:
    """Return the command of a raylet, with `idle_agent` instead of the commands of its two agents."""
    given = dict(word[2:].split("=", 1) for word in raylet if word.startswith("--") and "=" in word)
    ports = {
        "--dashboard_agent_command": [f"{name}=-1" for name in _DASHBOARD_PORTS],
        "--runtime_env_agent_command": [f"runtime_env_agent_port={given['runtime_env_agent_port']}"],
    }
    program = [sys.executable, "-S", "-s", "-P", idle_agent.__file__, given["session_dir"], given["node_id"]]
    idle = {option: subprocess.list2cmdline([*program, *files]) for option, files in ports.items()}
    options = (word.partition("=")[0] for word in raylet)
    return [
        f"{option}={idle[option]}" if option in idle else word
        for option, word in zip(options, raylet, strict=True)
    ]


def with_quick_workers(raylet: Sequence[str]) -> list[str]:
    """Return the command of a raylet whose workers collect garbage rarely; see `share_compute.program`."""
    path = str(Path(services.RAY_PATH, "_private", "workers", "default_worker.py"))
    theirs, ours = (subprocess.list2cmdline(words) for words in ([path], [PROGRAM, path]))
    option = "--python_worker_command="
    (given,) = (word for word in raylet if word.startswith(option))
    if theirs not in given:
        raise ValueError(f"this version of Ray starts workers in another way: {given}")
    return [given.replace(theirs, ours, 1) if word is given else word for word in raylet]


if __name__ == "__main__":
    main()
