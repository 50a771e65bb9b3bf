"""Fast checks of a job with a sparse model before it is queued: its files, and their first rows."""

from __future__ import annotations

from share_compute.errors import UserError
from share_compute.files.field_errors import Problems, refused
from share_compute.specification import SparseJob
from share_compute.store import Store
from share_compute_api.submission.model_folders import checking, require_path
from share_compute_api.submission.placement import check_selection
from share_compute_api.workers.isolated.messages import CheckSparseRows
from share_compute_api.workers.isolated.pool import IsolatedProcesses


def check_sparse(spec: SparseJob, store: Store, processes: IsolatedProcesses) -> None:
    """Check the files of a job, the first rows of each, and its selection of machines.

    Args:
        spec: the job.
        store: the store of contributors.
        processes: isolated processes, which read the job's files.

    Raises:
        UserError: the job cannot run; the error names each invalid field.
    """
    problems = Problems()
    with problems.noted():
        check_selection(spec.parallelism, store)
    for field in ("data.files", "data.validation_files"):
        for file in getattr(spec.data, field.removeprefix("data.")):
            with problems.noted(), checking(field):
                require_path(file, field)
                if not file.is_file():
                    raise refused(field, f"{file} is not a file", "name each file of the data")
                if not file.stat().st_size:
                    raise refused(field, f"{file} is empty", "leave it out, or fill it")
    problems.require_none()
    question = CheckSparseRows(files=(*spec.data.files, *spec.data.validation_files), job=spec)
    try:
        processes.ask(question)
    except UserError as failure:
        raise refused("data", failure.message, failure.hint or "fix the files") from failure
