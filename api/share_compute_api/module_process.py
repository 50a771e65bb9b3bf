"""Runs a module of ours in a process of its own, for work that needs what the control plane is free of: torch."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import Mapping
from contextlib import suppress

from share_compute_actors.machine.confine import END_NOW, Policy, clean_environment, confined
from share_compute_actors.machine.processes import tied


async def run_module(
    module: str,
    *arguments: str,
    request: bytes,
    environment: Mapping[str, str] | None = None,
    policy: Policy | None = None,
) -> tuple[int, bytes, str]:
    """Return a module's exit status, its answer and what it complained about.

    It ends with whoever waits for it, and with this process.

    Args:
        module: what ``python -m`` runs.
        arguments: of its command line.
        request: for its standard input.
        policy: what it may reach; None: what this process may.
        environment: further variables.
    """
    # Nothing is looked up in the network: what a job names lies on this machine.
    # Models and tokenizers of submitters are read there, so it gets no credentials of ours.
    variables = {**clean_environment(os.environ), "HF_HUB_OFFLINE": "1", **(environment or {})}
    command = [sys.executable, "-P", "-m", module, *arguments]
    command = tied(command) if policy is None else confined(command, policy)
    process = await asyncio.create_subprocess_exec(
        *command, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=variables
    )
    try:
        answer, complaints = await process.communicate(request)
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.send_signal(END_NOW)
            await process.wait()
    assert process.returncode is not None
    return process.returncode, answer, complaints.decode(errors="replace").strip()
