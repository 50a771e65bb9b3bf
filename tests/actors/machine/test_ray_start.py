"""The command line of Ray, without the commands that a head or a node does not need."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from typing import Any

import pytest
import ray
from ray import NodeID
from ray.exceptions import RpcError

from share_compute_actors.machine import ray_start
from share_compute_actors.machine.ray_start import OTHER_COMMANDS, get_registered

NODE = "ab" * 28

PROGRAM = """
import importlib, json, sys
from share_compute_actors.machine.ray_start import OTHER_COMMANDS, command_line
scripts = command_line()
left_out = [name for name in ("ray.serve", "pandas", "fastapi", "grpc", *OTHER_COMMANDS) if name in sys.modules]
importlib.import_module("ray.util.state.state_cli")
print(json.dumps([sorted(scripts.cli.commands), left_out]))
"""


def test_a_head_starts_without_the_commands_of_ray_serve_and_without_pandas() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    commands, left_out = json.loads(done.stdout)
    assert left_out == []
    assert {"start", "stop"} <= set(commands)
    assert {"serve", "job", "list"}.isdisjoint(commands)


def test_the_modules_that_are_left_out_are_those_of_this_version_of_ray() -> None:
    """Another name would have no effect, and only this test would fail."""
    program = (
        "import sys; from ray.scripts import scripts;"
        f"print([name for name in {OTHER_COMMANDS!r} if name not in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    # Ray leaves out the commands of Ray Serve by itself if the optional packages of Ray Serve are missing.
    assert done.stdout.strip() in ("[]", "['ray.serve.scripts']")


@pytest.mark.parametrize("fails", [False, True])
def test_ray_is_asked_for_a_node_when_the_node_is_registered(
    monkeypatch: pytest.MonkeyPatch, *, fails: bool
) -> None:
    """If the GCS does not answer, Ray is asked at once, and reports that."""
    calls: list[str] = []

    class Gcs:
        def __init__(self, address: str) -> None:
            calls.append(address)

        def get_all_node_info(self, timeout: float) -> dict[NodeID, object]:
            assert timeout > 0
            calls.append("list")
            if fails:
                raise RpcError("no answer")
            return {} if len(calls) < 4 else {NodeID.from_hex(NODE): object()}

    def get(address: str, node_id: str) -> str:
        calls.append("get")
        return f"{node_id} at {address}"

    monkeypatch.setattr(ray_start, "GcsClient", Gcs)
    assert get_registered(get, "192.0.2.1:6379", NODE) == f"{NODE} at 192.0.2.1:6379"
    assert calls == ["192.0.2.1:6379", *["list"] * (1 if fails else 3), "get"]


@pytest.mark.slow
def test_workers_of_nodes_collect_garbage_rarely(nodes: list[Any]) -> None:
    assert nodes

    @ray.remote(num_cpus=0)
    def thresholds() -> tuple[int, int, int]:
        return gc.get_threshold()

    assert ray.get(thresholds.remote()) == (20_000, 10, 10)
