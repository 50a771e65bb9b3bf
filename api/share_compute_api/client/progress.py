"""Shows the progress of a job as a bar, in a terminal or a notebook."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from share_compute.store.records import EventRecord, JobRecord


class JobProgress:
    """Bar with the steps or trials of a job, its state and its loss.

    Args:
        job: the job.
        is_shown: whether the bar is shown; if not, all methods do nothing.
    """

    def __init__(self, job: JobRecord, *, is_shown: bool) -> None:
        columns = (
            TextColumn("{task.fields[name]}  {task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, disable=not is_shown)
        self._task = self._bar.add_task(
            job.state.value, name=job.name, total=job.total_steps or None, completed=job.step
        )

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        failure: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def take(self, event: EventRecord) -> None:
        """Show an event of the job, if the bar shows events of its kind."""
        data = event.data
        match event.kind:
            case "state":
                self._bar.update(self._task, description=str(data["state"]))
            case "step":
                text = f"loss {data['loss']:.4f}"
                self._bar.update(self._task, description=text, completed=data["step"])
            case "trials":
                self._bar.update(self._task, completed=data["done"], total=data["total"])
            case "rows":
                self._bar.update(self._task, completed=data["done"], total=data["total"])
