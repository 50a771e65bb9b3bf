"""Exports one checkpoint to a folder, in this process, which loads torch.

``python -m share_compute_api.workers.exporting`` reads an `ExportRequest` as JSON from standard input and writes
``{"size_bytes": ...}`` or ``{"problem": ...}``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from share_compute.errors import ShareComputeError
from share_compute.files.strict import StrictModel
from share_compute.specification import TrainJob


class ExportRequest(StrictModel):
    """Request to export one checkpoint to a folder."""

    checkpoint: Path
    spec: TrainJob
    """Specification of the job that wrote the checkpoint."""
    target: Path
    """Folder to create and write to."""


def main() -> None:
    """Answer one request from standard input."""
    from share_compute.models.export import export_checkpoint

    # Libraries may print to standard output, which must contain nothing but the answer.
    answer, sys.stdout = sys.stdout, sys.stderr
    request = ExportRequest.model_validate_json(sys.stdin.read())
    try:
        size_bytes = export_checkpoint(request.checkpoint, request.spec, request.target)
    except ShareComputeError as failure:
        problem = {"code": failure.code, "detail": failure.message, **failure.facts()}
        json.dump({"problem": problem}, answer, default=str)
    else:
        json.dump({"size_bytes": size_bytes}, answer)


if __name__ == "__main__":
    main()
