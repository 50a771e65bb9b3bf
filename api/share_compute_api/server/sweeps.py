"""Lists the trials of a sweep, best first."""

from __future__ import annotations

from share_compute.lifecycle.states import JobState
from share_compute.specification import settings_of
from share_compute.specification.task import data_name
from share_compute.store import JobRecord, Store
from share_compute_api.schemas.sweeps import SweepView, TrialView

_WAITS = "it starts when other trials are over"
_NOT_STARTED = "it was not started"


def sweep_view(store: Store, sweep: JobRecord) -> SweepView:
    """Return the trials of a sweep, best first.

    Args:
        store: the store of jobs.
        sweep: the sweep.

    Raises:
        Conflict: the job is not a sweep.
    """
    spec = sweep.sweep
    jobs = {job.trial.number: job for job in store.sweeps.trials(sweep.id)}
    values = store.sweeps.last_values(sweep.id, data_name(spec.metric))
    missing = _NOT_STARTED if sweep.state.is_final else _WAITS
    trials: list[TrialView] = []
    for number in range(1, spec.trials + 1):
        job = jobs.get(number)
        if job is None:
            trials.append(_without_job(number, settings_of(spec, number), missing))
            continue
        step, value = values.get(job.id, (None, None))
        trials.append(
            TrialView(
                number=number,
                settings=job.trial.settings,
                job_id=job.id,
                state=job.state,
                reason=job.trial.stopped or job.reason,
                step=job.step,
                total_steps=job.total_steps,
                value=value,
                value_step=step,
                rungs=job.trial.rungs,
                is_stopped=job.trial.stopped is not None,
            )
        )
    trials.sort(key=lambda trial: _rank(trial, is_rising=spec.is_rising))
    best = trials[0] if trials[0].value is not None else None
    return SweepView(
        metric=spec.metric,
        goal="max" if spec.is_rising else "min",
        fields=list(spec.fields),
        trials=trials,
        best=None if best is None else best.number,
    )


def _without_job(number: int, settings: dict[str, object], reason: str) -> TrialView:
    return TrialView(
        number=number,
        settings=settings,
        job_id=None,
        state=None,
        reason=reason,
        step=0,
        total_steps=0,
        value=None,
        value_step=None,
        rungs=(),
        is_stopped=False,
    )


def _rank(trial: TrialView, *, is_rising: bool) -> tuple[int, float, int]:
    """Return the sort key of a trial.

    The value of a trial that was stopped early is from an earlier step, so the trial comes after completed trials.
    """
    if trial.value is None:
        return 2, 0.0, trial.number
    has_ended = trial.state is JobState.succeeded
    return 0 if has_ended else 1, -trial.value if is_rising else trial.value, trial.number
