"""Job ids, deployments and strategies for shell completion."""

from __future__ import annotations

from share_compute.errors import ShareComputeError

_TIMEOUT_S = 2.0
"""Whoever presses the tab key does not wait longer."""


def complete_job(incomplete: str) -> list[tuple[str, str]]:
    """Return the newest jobs whose id begins like this, each with its name and state."""
    from share_compute_api.client import Client

    try:
        with Client(timeout_s=_TIMEOUT_S) as client:
            jobs = client.jobs(limit=100).jobs
    except ShareComputeError:  # no server, nothing to offer: the shell has no place for an error
        return []
    return [(job.id, f"{job.name} ({job.state.value})") for job in jobs if job.id.startswith(incomplete)]


def complete_deployment(incomplete: str) -> list[tuple[str, str]]:
    """Return the deployments that are up and whose name begins like this, each with its state."""
    from share_compute_api.client import Client

    try:
        with Client(timeout_s=_TIMEOUT_S) as client:
            found = client.deployments(limit=100).deployments
    except ShareComputeError:  # as above
        return []
    return [(one.name, one.state.value) for one in found if one.name.startswith(incomplete)]


def complete_device(incomplete: str) -> list[tuple[str, str]]:
    """Return the devices of this machine that begin like this, each with what it is."""
    from share_compute_actors.machine.preflight import find_gpus

    try:
        gpus = find_gpus()
    except ShareComputeError:  # as above
        gpus = ()
    known = [
        ("auto", "all GPUs, or the CPU"),
        ("cpu", "the CPU"),
        ("cpu:0", "a part of the CPU"),
        *([("cuda", "all GPUs")] if gpus else []),
        *((f"cuda:{index}", gpu.name) for index, gpu in enumerate(gpus)),
    ]
    return [(name, text) for name, text in known if name.startswith(incomplete)]


def complete_strategy(incomplete: str) -> list[str]:
    """Return the strategies that are installed and begin like this."""
    from share_compute.planning.partitioning import strategy_names

    return [name for name in strategy_names() if name.startswith(incomplete)]
