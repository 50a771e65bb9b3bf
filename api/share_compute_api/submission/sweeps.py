"""Fast checks of a sweep before it is queued, and of each trial before it starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from share_compute.errors import MissingScope, UserError
from share_compute.files.field_errors import refused
from share_compute.scopes import Scope
from share_compute.specification import SweepJob, TrainJob, trial_job
from share_compute.specification.paths import named_paths
from share_compute.store import JobRecord, Store
from share_compute_api.submission.data_roots import DataRoots
from share_compute_api.submission.jobs import check_job
from share_compute_api.submission.model_folders import below
from share_compute_api.workers.isolated.remembered import Asks, RememberedAnswers

_CHECKED = ("task", "tasks", "model", "data", "tokenizer", "parallelism", "report")
"""Fields that `check_job` reads. Trials that differ only in other fields are checked once."""


_MOST_S = 60.0
"""Time limit for the checks of a sweep, in seconds."""


def check_sweep(spec: SweepJob, processes: Asks, most_s: float = _MOST_S) -> None:
    """Check the job of a sweep and all its trials, without regard to the cluster's machines.

    Args:
        spec: the sweep.
        processes: isolated processes, which read the job's files, configuration and tokenizer. A check that several
            trials share runs once.
        most_s: time limit for the checks, in seconds.

    Raises:
        UserError: a trial could not run, or the checks take too long; the error names the field.
    """

    def out_of_time() -> UserError:
        return refused(
            "fields",
            f"the checks of the {spec.trials} trials take longer than {most_s:g} s",
            "search fewer values of the model, the data and the tokenizer, or try again when the server is less busy",
        )

    answers = RememberedAnswers(processes, most_s, out_of_time)
    with below("job"):
        check_job(spec.job, answers)
    seen = {_checked_parts(spec.job)}
    for number in range(1, spec.trials + 1):
        answers.require_time()
        job = trial_of(spec, number)
        parts = _checked_parts(job)
        if parts in seen:
            continue
        seen.add(parts)
        try:
            check_job(job, answers, checks_layers=False)
        except UserError as failure:
            raise refused(
                "fields", f"trial {number}: {failure.message}", failure.hint or "give other values"
            ) from failure


def trial_of(spec: SweepJob, number: int, sweep_id: str | None = None) -> TrainJob:
    """Return the job of a trial, which names the same files as the job of the sweep.

    Raises:
        UserError: the trial is not a valid job, or the sweep would change the files. Only the files of the sweep's own
            job are checked against the server's data roots.
    """
    job = trial_job(spec, number, sweep_id)
    if _files(job) != _files(spec.job):
        raise refused(
            "fields",
            f"trial {number} would change the files of the job",
            "submit a sweep for each set of files, with one group",
        )
    return job


def _files(job: TrainJob) -> tuple[list[Path], str | None, str | None]:
    return named_paths(job), job.model.hub, job.model.revision


def _checked_parts(job: TrainJob) -> str:
    document: dict[str, Any] = job.model_dump(mode="json", include=set(_CHECKED))
    return json.dumps(document, sort_keys=True)


class TrialStarter:
    """Starts the trials of sweeps, with the rights of the key that submitted the sweep.

    Args:
        store: the store of jobs.
        roots: folders in which jobs may name files.
    """

    def __init__(self, store: Store, roots: DataRoots) -> None:
        self._store = store
        self._roots = roots

    def start(self, sweep: JobRecord, number: int) -> JobRecord:
        """Start a trial; return its job.

        Raises:
            UserError: the key may no longer submit jobs, or a file of the job has become a link.
            Conflict: the sweep starts no trials now.
        """
        self._require_submitter(sweep)
        spec = sweep.sweep
        self._roots.recheck(spec)
        return self._store.sweeps.start(sweep.id, number, trial_of(spec, number, sweep.id))

    def resume(self, sweep: JobRecord, job_id: str) -> JobRecord:
        """Resume a trial that was cancelled with its sweep; return its job.

        Raises:
            UserError: the key may no longer submit jobs.
            Conflict: the sweep starts no trials now.
        """
        self._require_submitter(sweep)
        return self._store.sweeps.resume(sweep.id, job_id)

    def _require_submitter(self, sweep: JobRecord) -> None:
        if sweep.owner is None:
            return
        key = self._store.keys.valid(sweep.owner)
        if key is None or not key.may(Scope.submit):
            problem = "was revoked" if key is None else "lost the scope submit"
            raise MissingScope(
                f"the API key that submitted the sweep {problem}",
                hint="submit it with another key",
                job=sweep.id,
            )
