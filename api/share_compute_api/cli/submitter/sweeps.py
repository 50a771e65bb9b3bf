"""Shows a sweep: its trials, and the job file of the best trial."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from share_compute.errors import Conflict
from share_compute_api.terminal.output import console, number, print_table, print_text, state_text

if TYPE_CHECKING:
    from share_compute.store.records import JobRecord
    from share_compute_api.client.client import Client
    from share_compute_api.schemas.sweeps import SweepView, TrialView


def print_best(client: Client, sweep: JobRecord) -> None:
    """Print the job file of the best trial of a sweep.

    Raises:
        Conflict: the job is not a sweep, or no trial has a value.
    """
    from share_compute_api.client.job_file import job_text

    view = client.trials(sweep.id)
    best = next((one for one in view.trials if one.number == view.best), None)
    if best is None or best.job_id is None:
        raise Conflict(
            f"no trial of sweep {sweep.id} has a value of {view.metric}",
            hint=f"wait for its first validation: share-compute show {sweep.id}",
            job=sweep.id,
        )
    spec = client.job(best.job_id).training
    print_text(job_text(spec.model_copy(update={"group": None}), client.uploads().uploads))


def print_trials(sweep: JobRecord, view: SweepView) -> None:
    """Print the trials of a sweep as a table, best first."""
    columns = ("trial", "job", "state", "steps", view.metric.replace("_", " "), *_short_names(view.fields))
    print_table(columns, (_cells(trial, view) for trial in view.trials), empty="No trials.")
    if view.best is not None:
        console.print(f"Job file of trial {view.best}: share-compute show {sweep.id} --best", style="dim")


def _cells(trial: TrialView, view: SweepView) -> list[str | None]:
    state = "stopped" if trial.is_stopped and trial.state == "cancelled" else trial.state
    return [
        f"{trial.number} *" if trial.number == view.best else str(trial.number),
        trial.job_id,
        None if state is None else state_text(state),
        f"{trial.step}/{trial.total_steps}" if trial.job_id else None,
        number(trial.value),
        *(_value(trial.settings.get(name)) for name in view.fields),
    ]


def _short_names(fields: Sequence[str]) -> list[str]:
    """Return the last part of each field's name, or the whole name where this part is not unique."""
    last = [field.rpartition(".")[2] for field in fields]
    return [short if last.count(short) == 1 else field for field, short in zip(fields, last, strict=True)]


def _value(value: Any) -> str:
    return escape(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
