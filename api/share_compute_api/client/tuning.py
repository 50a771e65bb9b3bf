"""Finds the fastest settings of a training job by short runs on the machines of the cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from share_compute.choices import Compiling
from share_compute.errors import UserError
from share_compute.lifecycle.states import JobState
from share_compute.specification import Precision, TrainJob, parse_job
from share_compute.specification.layers import BATCH_NORMS, every_module

if TYPE_CHECKING:
    from share_compute.store.records import JobRecord
    from share_compute_api.client.client import Client

Tuned: TypeAlias = Literal["microbatches", "threads", "precision", "compile"]
TUNED: tuple[Tuned, ...] = ("microbatches", "threads", "precision", "compile")
FIELDS: dict[Tuned, str] = {
    "microbatches": "training.microbatches",
    "threads": "parallelism.threads",
    "precision": "training.precision",
    "compile": "training.compile",
}
NUMERICS: dict[Tuned, str] = {
    "microbatches": "sums are rounded in another order, so the last bits of results differ; layers that draw random "
    "numbers, such as dropout, draw other ones, so losses differ",
    "threads": "sums are rounded in another order: the last bits of results differ",
    "precision": "layers compute with fewer digits: losses differ, and may be worse",
    "compile": "compiled and eager code round differently: the last bits of results differ",
}
"""Effect of another value of each setting on the results."""
WARM_UP = 3
"""Number of first steps of a run that are not measured."""
_LEAST_GAIN = 0.03
"""Gain below which a setting is not changed, as a fraction of the step time; shorter differences are noise."""
_TAG = "tuning"


@dataclass(frozen=True, slots=True)
class TunedSettings:
    """Settings of one run; None leaves the value to the planner, or to the machines."""

    microbatches: int | None
    threads: int | None
    precision: Precision
    compile: Compiling = "off"

    def document(self, source: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of a job file with these settings; settings that are None stay unchanged."""
        found = {**source}
        for name in TUNED:
            value = getattr(self, name)
            part, field = FIELDS[name].split(".")
            if value is not None:
                found[part] = {**(found.get(part) or {}), field: value}
        return found


@dataclass(frozen=True, slots=True)
class TuningRun:
    """A measured run."""

    settings: TunedSettings
    step_s: float | None
    """Median time of a step, in seconds; None if the run failed."""
    problem: str = ""
    """Reason of the failure."""
    microbatches: int | None = None
    """Number of microbatches that the plan had."""
    threads: int | None = None
    """Number of threads of the machine with the most threads."""
    computation: str | None = None
    """Whether the run computed with compiled or eager code, and why; None for a job with ``training.compile: off``."""
    is_compiled: bool = False

    @property
    def fell_back(self) -> bool:
        """Whether the run should have used compiled code, but computed eagerly."""
        return self.settings.compile == "on" and not self.is_compiled


Measure: TypeAlias = Callable[[TunedSettings], TuningRun]


def present_settings(job: TrainJob) -> TunedSettings:
    """Return the settings that a job has."""
    training = job.training
    return TunedSettings(training.microbatches, job.parallelism.threads, training.precision, training.compile)


def fixed_settings(job: TrainJob) -> dict[Tuned, str]:
    """Return {setting: reason} of the settings that tune does not change."""
    found: dict[Tuned, str] = {}
    norms = [layer.type for layer in every_module(job.model.layers or ()) if layer.type in BATCH_NORMS]
    if norms:
        found["microbatches"] = f"{norms[0]} has the statistics of each microbatch"
    elif job.resolved_task == "embedding":
        found["microbatches"] = "each pair is compared with the others of its microbatch"
    if job.parallelism.sequence > 1:
        found["precision"] = "slices of sequences compute in float32"
        found["compile"] = "slices of sequences are computed eagerly"
    elif job.parallelism.tensor > 1:
        found["compile"] = "the processes of a machine compute eagerly"
    elif job.training.compile == "auto":
        found["compile"] = "auto measures compiled code whenever a job starts"
    return found


def tune(job: TrainJob, measure: Measure, names: Sequence[Tuned] = TUNED) -> Iterator[TuningRun]:
    """Measure settings one after another, each with the best values of the other settings so far; yield all runs.

    The numbers of microbatches and of threads are doubled and halved as long as steps get faster (hill climbing).

    Args:
        job: the job.
        measure: measures a run of some steps.
        names: settings to change.

    Raises:
        UserError: the job does not run with its present settings.
    """
    first = measure(present_settings(job))
    yield first
    if first.step_s is None:
        raise UserError(f"the job does not run: {first.problem}", hint="share-compute plan shows its plan")
    best = first
    for name in (name for name in TUNED if name in names and name not in fixed_settings(job)):
        if name in ("precision", "compile"):
            run = measure(_with_other(best.settings, name))
            yield run
            best = faster(best, run)
            continue
        for up in (True, False):
            before = best
            while (value := _next(name, best, job, up=up)) is not None:
                run = measure(_with(best.settings, name, value))
                yield run
                if faster(best, run) is best:
                    break
                best = run
            if best is not before:
                break  # the other direction is slower


def _next(name: Tuned, best: TuningRun, job: TrainJob, *, up: bool) -> int | None:
    """Return the next value of a setting in one direction; None if there is none."""
    if name == "threads":
        # The owner's limit equals the number of threads in the first run.
        return None if up or best.threads is None or best.threads < 2 else best.threads // 2
    if best.microbatches is None:
        return None
    members = job.parallelism.members_per_stage or 1
    value = best.microbatches * 2 if up else best.microbatches // 2
    fits = members <= value <= job.training.batch_size and job.training.batch_size % max(1, value) == 0
    return value if value and fits and value != best.microbatches else None


def _with_other(settings: TunedSettings, name: Tuned) -> TunedSettings:
    """Return settings in which a setting with two values has the other value."""
    if name == "precision":
        return replace(settings, precision="bfloat16" if settings.precision == "float32" else "float32")
    return replace(settings, compile="on" if settings.compile == "off" else "off")


def _with(settings: TunedSettings, name: Tuned, value: int) -> TunedSettings:
    return (
        replace(settings, microbatches=value) if name == "microbatches" else replace(settings, threads=value)
    )


def faster(best: TuningRun, run: TuningRun) -> TuningRun:
    """Return the faster of two runs; ``best`` if the difference is noise, or if only ``run`` fell back."""
    if run.fell_back and not best.fell_back:
        return best
    if run.step_s is None or best.step_s is None:
        return best if run.step_s is None else run
    return run if run.step_s < best.step_s * (1 - _LEAST_GAIN) else best


def best_of(runs: Sequence[TuningRun]) -> TuningRun:
    """Return the best of these runs, which are in the order of measurement."""
    best = runs[0]
    for run in runs[1:]:
        best = faster(best, run)
    return best


class TuningJobs:
    """Measures settings by jobs of few steps, which are deleted afterwards.

    Args:
        client: client of the control plane.
        job: the job, with paths on the server.
        steps: number of measured steps of a run.
        note: called with a line about each run that begins.
        send: sends the request that submits a run, for example again while the server fetches the job's model.
    """

    def __init__(
        self,
        client: Client,
        job: TrainJob,
        steps: int,
        note: Callable[[str], None],
        send: Callable[[Callable[[], JobRecord]], JobRecord],
    ) -> None:
        if job.training.rounds is not None:
            raise UserError(
                f"training.synchronization {job.training.synchronization.kind} has rounds, and tune measures steps",
                hint="tune it with training.synchronization {kind: allreduce}",
            )
        if job.parallelism.plan is not None:
            raise UserError(
                "parallelism.plan fixes the microbatches and the machines, and tune changes them",
                hint="leave out parallelism.plan while you tune, and write a plan of the tuned job",
            )
        self._client = client
        self._steps = steps
        self._note = note
        self._send = send
        self._source = short_job(job, steps + WARM_UP)

    def measure(self, settings: TunedSettings) -> TuningRun:
        """Run the job with these settings, and return its step time."""
        self._note(settings_text(settings))
        try:
            spec = parse_job(settings.document(self._source))
            job = self._send(lambda: self._client.submit(spec))
        except UserError as failure:
            return TuningRun(settings, None, failure.message)
        try:
            is_compiled = False
            for event in self._client.follow(job.id):
                if event.kind == "computation":
                    is_compiled = event.data["is_compiled"]
            return replace(
                self._measured(settings, job.id, spec.parallelism.sequence), is_compiled=is_compiled
            )
        finally:
            # This also runs after Ctrl-C.
            self._client.delete_job(job.id, cancel=True)

    def _measured(self, settings: TunedSettings, job_id: str, slices: int) -> TuningRun:
        job = self._client.job(job_id)
        if job.state is not JobState.succeeded:
            return TuningRun(settings, None, job.reason)
        steps = [one for one in self._client.metrics(job_id) if one.split == "train" and one.step > WARM_UP]
        seconds = [float(one.data["seconds"]) for one in steps]
        plan = job.plan
        threads = None
        if plan is not None:
            machines = {machine.id: machine for machine in self._client.contributors()}
            used = [machines[one] for one in plan.machines if one in machines]
            lent = max((machine.threads or machine.lent_threads for machine in used), default=1)
            threads = min(lent, settings.threads or lent)
        return TuningRun(
            settings,
            median(seconds) if seconds else None,
            "" if seconds else "no step was measured",
            microbatches=None if plan is None else plan.microbatches // slices,
            threads=threads,
            computation=job.computation,
        )


def short_job(job: TrainJob, steps: int) -> dict[str, Any]:
    """Return the job file of a run of ``steps`` steps that saves and validates as little as possible."""
    source = job.without_links().model_dump(mode="json")
    off = dict.fromkeys(("validate_every", "checkpoint_every", "early_stopping", "target", "samples"))
    source["training"] |= {**off, "steps": steps, "schedule": {"name": "constant"}}
    return source | {"name": f"tune {job.name}"[:80], "tags": [_TAG], "group": None}


def settings_text(settings: TunedSettings) -> str:
    """Return the progress line of a run with these settings."""
    microbatches = "as planned" if settings.microbatches is None else settings.microbatches
    threads = "as lent" if settings.threads is None else settings.threads
    return (
        f"the job is measured with microbatches {microbatches}, threads {threads}, {settings.precision}, "
        f"compile {settings.compile}"
    )
