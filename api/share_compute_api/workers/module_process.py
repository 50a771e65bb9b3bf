"""Runs one of the project's modules as a process, for work that needs torch, which the control plane must not load."""

from __future__ import annotations

import asyncio
import os
from asyncio.subprocess import PIPE
from collections.abc import Mapping
from contextlib import suppress

from share_compute.program import command_of
from share_compute_actors.machine.confine import END_NOW, Policy, clean_environment, confined
from share_compute_actors.machine.processes import tied


async def run_module(
    module: str,
    *arguments: str,
    request: bytes,
    environment: Mapping[str, str] | None = None,
    policy: Policy | None = None,
) -> tuple[int, bytes, str]:
    """Run a module as a process, and return its exit status, its standard output and its standard error.

    The process is killed when the caller is cancelled, and when this process ends.

    Args:
        module: module for ``python -m``.
        arguments: command-line arguments of the module.
        request: standard input of the process.
        policy: access rights of the process; None for the rights of this process.
        environment: further environment variables.
    """
    # The files of jobs are on this machine, so the process downloads nothing. It reads submitters' models and
    # tokenizers, so it gets none of the server's credentials.
    variables = {**clean_environment(os.environ), "HF_HUB_OFFLINE": "1", **(environment or {})}
    command = command_of(module, *arguments)
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
