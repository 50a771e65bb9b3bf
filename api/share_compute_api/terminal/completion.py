"""Shell completion of job ids, deployments, devices and strategies."""

from __future__ import annotations

from share_compute.errors import ShareComputeError

_TIMEOUT_S = 2.0
"""Time limit of the request for completions, in seconds. It is short, because the user is waiting."""


def complete_job(incomplete: str) -> list[tuple[str, str]]:
    """Return job ids that begin with ``incomplete``, from the 100 newest jobs, each with the job's name and state."""
    from share_compute_api.client.client import Client

    try:
        with Client(timeout_s=_TIMEOUT_S) as client:
            jobs = client.jobs(trials=True, limit=100).jobs
    except ShareComputeError:  # shell completion cannot show an error
        return []
    return [(job.id, f"{job.name} ({job.state.value})") for job in jobs if job.id.startswith(incomplete)]


def complete_deployment(incomplete: str) -> list[tuple[str, str]]:
    """Return the names of active deployments that begin with ``incomplete``, each with the deployment's state."""
    from share_compute_api.client.client import Client

    try:
        with Client(timeout_s=_TIMEOUT_S) as client:
            found = client.deployments(limit=100).deployments
    except ShareComputeError:  # shell completion cannot show an error
        return []
    return [(one.name, one.state.value) for one in found if one.name.startswith(incomplete)]


def complete_device(incomplete: str) -> list[tuple[str, str]]:
    """Return the devices of this machine whose name begins with ``incomplete``, each with a description."""
    from share_compute_actors.machine.preflight import find_apple_gpu, find_gpus

    try:
        gpus = find_gpus()
    except ShareComputeError:  # shell completion cannot show an error
        gpus = ()
    known = [
        ("auto", "all GPUs, or the CPU"),
        ("cpu", "the CPU"),
        ("cpu:0", "a part of the CPU"),
        *([("cuda", "all GPUs")] if gpus else []),
        *((f"cuda:{index}", gpu.name) for index, gpu in enumerate(gpus)),
        *([("mps", apple)] if (apple := find_apple_gpu()) else []),
    ]
    return [(name, text) for name, text in known if name.startswith(incomplete)]


def complete_strategy(incomplete: str) -> list[str]:
    """Return the installed strategies whose name begins with ``incomplete``."""
    from share_compute.planning.search.partitioning import strategy_names

    return [name for name in strategy_names() if name.startswith(incomplete)]
