"""The folders in which a server keeps the files of its jobs."""

from __future__ import annotations

from pathlib import Path

from share_compute.specification.batch import BATCH_KINDS

TRAINING = "jobs"
"""Subfolder of the data folder for the checkpoints and results of training jobs, those of sparse models included."""
BATCHES = "batches"
"""Subfolder of the data folder for the answers of batch jobs."""

REPORTS = "reports"
"""Subfolder of the data folder for the curves of training jobs in formats of other programs."""


def job_folder(data_folder: Path, kind: str, job_id: str) -> Path:
    """Return the folder of one job."""
    return data_folder / (BATCHES if kind in BATCH_KINDS else TRAINING) / job_id
