"""The coordinator of a sparse model: one actor on the head that runs one attempt at a job, and reports its progress.

The control plane imports this module. To keep this import fast, only `SparseCoordinator.run` imports numpy.
"""

from __future__ import annotations

import ray

from share_compute.lifecycle.attempt_events import AttemptEnded, SparseAssignment
from share_compute_actors.group.attempt_actor import AttemptActor
from share_compute_actors.machine.stalled import close_stalled_connections
from share_compute_actors.unpickling import refuse_pickles


@ray.remote(num_cpus=0, concurrency_groups={"run": 1, "control": 4, "data": 4})
class SparseCoordinator(AttemptActor):
    """Runs one attempt at one job with a sparse model.

    Args:
        assignment: a `SparseAssignment` as JSON.
    """

    def __init__(self, assignment: str) -> None:
        refuse_pickles()
        close_stalled_connections()
        self._assignment = SparseAssignment.model_validate_json(assignment)
        super().__init__(self._assignment.job_id, self._assignment.attempt)

    @ray.method(concurrency_group="run")
    def run(self) -> None:
        """Run the attempt, and report its progress as events; the last event reports how the attempt ended."""
        self._reports.conclude(self._attempt)

    def _attempt(self) -> AttemptEnded:
        from share_compute_actors.sparse.attempt import SparseAttempt  # noqa: PLC0415 - it loads scipy

        me = ray.get_runtime_context().current_actor
        return SparseAttempt(self._assignment, self._reports.put, self._requests, me).make()

    @ray.method(concurrency_group="data")
    def piece(self, file: str, offset: int) -> bytes:
        """Return a piece of a prepared file; see `PreparedFiles.piece`."""
        from share_compute_actors.sparse.source import PreparedFiles  # noqa: PLC0415 - it loads numpy

        return PreparedFiles(self._assignment.folder / "data").piece(file, offset)
