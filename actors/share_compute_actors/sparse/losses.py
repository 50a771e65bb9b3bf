"""Limits the losses of a process that is restarted repeatedly, for example because it lacks memory."""

from __future__ import annotations

from share_compute.backoff import backoff_s
from share_compute.errors import UserError

MOST_LOSSES = 5
"""Number of losses in sequence that end the attempt."""
FIRST_DELAY_S = 1.0
"""Delay of the start after the second loss in sequence; it is doubled after each further one."""


class ProcessLosses:
    """Counts the consecutive losses of each process. Progress of the process between two losses resets its count.

    The caller leaves out losses of machines.
    """

    def __init__(self) -> None:
        self._counts: dict[int, tuple[int, int]] = {}
        """Number of losses in sequence, and the progress at the last one, by process."""

    def count(self, process: int, progress: int) -> int:
        """Count a loss; return the number of consecutive losses."""
        before, last = self._counts.get(process, (0, progress))
        found = 1 if progress > last else before + 1
        self._counts[process] = (found, progress)
        return found

    def restart_delay_s(self, worker: int, progress: int, cause: Exception) -> float:
        """Count the loss of a worker; return the time to wait before it is started again.

        Args:
            worker: number of the worker.
            progress: number of steps that it has finished.
            cause: how its call failed.

        Raises:
            UserError: it was lost too often in sequence.
        """
        count = self.count(worker, progress)
        if count >= MOST_LOSSES:
            raise UserError(
                f"the process of worker {worker} ended {count} times in sequence, each time after step {progress}: "
                + str(cause).partition("\n")[0],
                hint="look into the machine's log; if memory was lacking, lend more memory or use more workers",
            )
        return 0.0 if count == 1 else backoff_s(FIRST_DELAY_S, count - 2)
