"""Exports checkpoints in separate processes: merging adapters needs torch, which the control plane must not load."""

from __future__ import annotations

import asyncio
import json
import logging

from share_compute.errors import ShareComputeError, Unavailable, error_of
from share_compute_actors.machine.confine import Policy
from share_compute_api.workers.exporting import ExportRequest
from share_compute_api.workers.module_process import run_module

_SHOWN_CHARACTERS = 4000
_log = logging.getLogger(__name__)


class ExportProcesses:
    """Exports checkpoints, one at a time."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        """Lock that the caller of `export` must hold."""

    async def export(self, request: ExportRequest, policy: Policy) -> int:
        """Export a checkpoint to a folder and return its size in bytes; the caller must hold `turn`.

        Args:
            request: the checkpoint and the target folder.
            policy: access rights of the process, which is confined because untrusted code wrote the checkpoint. The
                process uses the first folder of ``policy.write`` as its temporary folder.

        Raises:
            ShareComputeError: the error that `export_checkpoint` raised, or the process failed.
            Unavailable: the process was killed by a signal.
        """
        status, answer, complaints = await run_module(
            "share_compute_api.workers.exporting",
            request=request.model_dump_json().encode(),
            environment={"TMPDIR": policy.write[0]},  # torch needs a writable temporary folder at import
            policy=policy,
        )
        if status != 0:
            _log.error("an export failed with status %d: %s", status, complaints[-_SHOWN_CHARACTERS:])
            if status < 0:
                raise Unavailable(
                    f"the export was ended by signal {-status}; the server may have run out of memory",
                    hint="try again when the server has more memory to spare",
                )
            raise ShareComputeError(
                "the export failed with an internal error", hint="look into the server's log, and report it"
            )
        document = json.loads(answer)
        if (problem := document.get("problem")) is not None:
            raise error_of(problem["code"], problem["detail"], problem)
        size_bytes: int = document["size_bytes"]
        return size_bytes
