"""Formats events, plans and progress as lines of text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.markup import escape

from share_compute.lifecycle.attempt_events import Measured, RoundMerged, TrafficMeasured
from share_compute.lifecycle.states import JobState
from share_compute.planning.plan import PINNED, Bounded, IdleMachine, Plan, StagePlan, layer_span
from share_compute.quantities import bytes_text, listed, percent_text, seconds_text
from share_compute.specification import TrainJob
from share_compute.specification.task import METRICS_BESIDE_LOSS
from share_compute.store.records import EventRecord, JobRecord, LinkRecord
from share_compute_api.terminal.language import translated
from share_compute_api.terminal.output import duration, number, part_text, rate, speed, state_text

_MOST_LINES = 40
"""Maximum number of lines that list machines or reasons."""
_MOST_STAGES = 8
"""Maximum number of stages shown in one line."""
_MOST_NAMES = 6
"""Maximum number of machine names shown in one line."""
LEAST_RATIO = 1.05
"""Smallest ratio of bytes that is shown, as on the page of the job."""


def event_line(event: EventRecord) -> str:
    """Return an event as one line of rich markup, with the time in the local time zone."""
    describe = _DESCRIPTIONS.get(event.kind)
    text = translated(describe(event.data)) if describe else escape(f"{event.kind}  {event.data}")
    return f"[dim]{event.at.astimezone():%H:%M:%S}[/dim]  {text}"


def _step(data: dict[str, Any]) -> str:
    return (
        f"step {data['step']}  loss {data['loss']:.4f}  "
        f"learning rate {number(data['learning_rate'], 3)}  {step_speed(data)}"
    )


def step_speed(data: dict[str, Any]) -> str | None:
    """Return the speed in a step event: tokens/s for text, else samples/s."""
    return speed(data["tokens_per_s"], of_tokens=data["tokens"] != data["samples"])


def _validated(data: dict[str, Any]) -> str:
    names = ("loss", *METRICS_BESIDE_LOSS)
    figures = [f"{name} {number(data[name])}" for name in names if data.get(name) is not None]
    figures += [f"{escape(name)} {number(value)}" for name, value in (data.get("tasks") or {}).items()]
    return f"{data['split']} at step {data['step']}  " + "  ".join(figures)


def _target_reached(data: dict[str, Any]) -> str:
    return (
        f"target reached at step {data['step']}  {data['metric']} {number(data['value'])} after "
        f"{seconds_text(data['seconds'])}, {bytes_text(data['sent_bytes'])} sent"
    )


def _sampled(data: dict[str, Any]) -> str:
    prompt, text = (escape(" ".join(data[part].split())) for part in ("prompt", "text"))
    return f"sample at step {data['step']}  [dim]{prompt}[/dim] {text}"


def _reformed(data: dict[str, Any]) -> str:
    again = data["recomputed"]
    cost = translated(f"no step for {seconds_text(data['seconds'])}")
    if again:
        cost += translated(f", {again} {'microbatch' if again == 1 else 'microbatches'} computed again")
    placed = placement(Plan.model_validate(data["plan"]))
    epoch = translated(f"epoch {data['epoch']}")
    return f"{epoch}  {escape(translated(data['sentence']))}; {cost}: {escape(placed)}"


def progress(job: JobRecord) -> str:
    """Return the progress of a job: training steps, trials, or rows of a batch; empty before the batch began."""
    if job.spec.kind == "sweep":
        return f"{job.step}/{job.total_steps} trials"
    if job.counts_steps:
        return f"{job.step}/{job.total_steps}"
    return f"{job.rows.done}/{job.rows.total} rows" if job.rows else ""


def done_fact(job: JobRecord) -> dict[str, str | None]:
    """Return {name of the unit: text} for the display of a job's progress."""
    done = part_text(job.step, job.total_steps)
    if job.spec.kind == "sweep":
        return {"trials": f"{done} are over"}
    return {"step": done} if job.counts_steps else {"rows": rows_text(job)}


def rows_text(job: JobRecord) -> str | None:
    """Return a batch job's number of finished rows, and the remaining time if known; None before the batch began."""
    if job.rows is None:
        return None
    rows = job.rows
    text = part_text(rows.done, rows.total)
    if rows.failed:
        text += translated(f", {rows.failed} with an error")
    if job.state == "running" and rows.rows_per_s:
        text += translated(f"; about {duration((rows.total - rows.done) / rows.rows_per_s)} left")
    return text


def protection_text(job: JobRecord) -> str | None:
    """Return text about whether a running training job can lose any one machine without losing a step.

    Return None for any other job.
    """
    if not isinstance(job.spec, TrainJob) or job.state != "running":
        return None
    if job.is_protected:
        return "yes: every layer is on two machines"
    if job.plan is not None and len(job.plan.machines) == 1:
        return "no: one machine holds all of it; after its loss the job continues from its last checkpoint"
    if not job.spec.parallelism.backups:
        return "no: parallelism.backups is false"
    return "not yet: copies are being made"


def results_text(results: Mapping[str, float], split: str) -> str | None:
    """Return the last metrics of a split, such as ``loss 0.24, accuracy 0.97``; None without metrics."""
    start = f"{split}_"
    found = {name.removeprefix(start): value for name, value in results.items() if name.startswith(start)}
    return ", ".join(f"{escape(name)} {number(value)}" for name, value in found.items()) or None


def next_steps(job: JobRecord) -> str | None:
    """Return what a user can do next with a job, in a line for each command; None for a queued job."""
    steps = []
    if job.state in (JobState.planning, JobState.running):
        steps = [f"follow it: share-compute logs -f {job.id}"]
    elif job.state is JobState.succeeded and job.spec.kind == "sweep":
        steps = [f"get the best job file: share-compute show {job.id} --best"]
    elif job.state is JobState.succeeded:
        steps = [f"get the result: share-compute artifacts get {job.id}"]
        if isinstance(job.spec, TrainJob) and job.spec.makes_served_model:
            steps.append(f"serve the model: share-compute serve {job.id}")
    elif job.state is JobState.failed:
        hint = (job.error or {}).get("hint")
        steps = [escape(str(hint))] if hint else []
        steps.append(f"try again: share-compute resume {job.id}")
    elif job.state is JobState.cancelled:
        steps = [f"continue it: share-compute resume {job.id}"]
    return "\n".join(map(translated, steps)) or None


def link_text(link: LinkRecord) -> str:
    """Return the state of a link of a job, with the reason and, after a failure, the hint."""
    style = {"failed": "red", "started": "green"}.get(link.state, "default")
    text = f"[{style}]{translated(link.state)}[/]: {escape(translated(link.reason))}"
    hint = (link.error or {}).get("hint")
    return f"{text} ({escape(translated(str(hint)))})" if hint else text


def _link(data: dict[str, Any]) -> str:
    link = LinkRecord(name=data["link"], **{name: data[name] for name in data if name != "link"})
    return f"then.{link.name} {link_text(link)}"


def _trial(data: dict[str, Any]) -> str:
    values = ", ".join(f"{name} = {value}" for name, value in data["settings"].items())
    text = f"trial {data['number']} {data['what']}: {data['job']}, {values}"
    return escape(text + (f"; {data['reason']}" if data["reason"] else ""))


def _rows(data: dict[str, Any]) -> str:
    text = f"rows {data['done']} of {data['total']}"
    if data["failed"]:
        text += f"  [yellow]{data['failed']} with an error[/yellow]"
    return f"{text}  {rows_speed(data)}".rstrip()


def rows_speed(data: dict[str, Any]) -> str:
    """Return the speed in a rows event; empty if the event has none."""
    if data["rows_per_s"] is None:
        return ""
    return f"{rate(data['rows_per_s'])} rows/s  {speed(data['tokens_per_s'], of_tokens=True)}"


def _note(data: dict[str, Any]) -> str:
    style = {"warning": "yellow", "error": "red"}.get(data["level"], "default")
    return f"[{style}]{escape(translated(data['message']))}[/]"


def _measured(data: dict[str, Any]) -> str:
    return translated(f"measured at step {data['step']}  ") + step_times(Measured.model_validate(data))


def _layers_timed(data: dict[str, Any]) -> str:
    machines = len(data["machines"])
    return (
        f"layers timed up to step {data['step']} on {machines} {'machine' if machines == 1 else 'machines'}"
    )


def _proposed(data: dict[str, Any]) -> str:
    placed = placement(Plan.model_validate(data["plan"]))
    return f"[yellow]a better plan[/yellow]  {escape(data['sentence'])}: {escape(placed)}"


def _protection(data: dict[str, Any]) -> str:
    if data["is_protected"]:
        return "protected  every layer is on two machines: losing any one of them costs no step"
    return "[yellow]not protected[/yellow]  a copy of what one machine alone holds was lost"


def _round(data: dict[str, Any]) -> str:
    merged = RoundMerged.model_validate(data)
    losses = [branch.loss for branch in merged.branches if branch.loss is not None]
    sent = max((branch.sent_bytes for branch in merged.branches), default=0)
    parts = [f"round {merged.round} merged after step {merged.step}"]
    if losses:
        branches = "1 branch" if len(merged.branches) == 1 else f"{len(merged.branches)} branches"
        parts.append(f"loss {sum(losses) / len(losses):.4f} of {branches}")
    parts.append(
        f"sent {bytes_text(sent)}, received {bytes_text(merged.update_bytes)} "
        f"of {bytes_text(merged.weight_bytes)}"
    )
    if merged.compression_ratio is not None and merged.compression_ratio >= LEAST_RATIO:
        parts.append(f"{merged.compression_ratio:.3g} times less than float32")
    computing_s = sum(branch.seconds for branch in merged.branches)
    waited_s = sum(branch.waited_s for branch in merged.branches)
    if waited_s:
        parts.append(f"computing {computing_s / (computing_s + waited_s):.0%} of the time until the merge")
    ages = [merged.round - branch.round for branch in merged.branches]
    if any(ages):
        parts.append(f"contributions up to {max(ages)} {'round' if max(ages) == 1 else 'rounds'} old")
    if merged.consensus_distance is not None:
        parts.append(f"consensus distance {merged.consensus_distance:.3g}")
    if merged.missing:
        missing = listed([str(number) for number in merged.missing], _MOST_NAMES)
        parts.append(f"[yellow]without branch {missing}[/yellow]")
    return "  ".join(map(translated, parts))


def _traffic(data: dict[str, Any]) -> str:
    machines = TrafficMeasured.model_validate(data).machines
    sent = sum(link.sent_bytes for link in machines.values())
    received = sum(link.received_bytes for link in machines.values())
    count = "1 machine" if len(machines) == 1 else f"{len(machines)} machines"
    return f"{count} sent {bytes_text(sent)} and received {bytes_text(received)} up to step {data['step']}"


_DESCRIPTIONS: dict[str, Callable[[dict[str, Any]], str]] = {
    "state": lambda data: f"{state_text(data['state'])}  {escape(translated(data['reason']))}",
    "planned": lambda data: translated("planned  ") + escape(placement(Plan.model_validate(data["plan"]))),
    "ranges-placed": lambda data: f"placed  {escape(data['sentence'])}",
    "reformed": _reformed,
    "started": lambda data: f"started  steps {data['first_step']} to {data['total_steps']}",
    "computation": lambda data: escape(data["sentence"]),
    "step": _step,
    "rows": _rows,
    "validated": _validated,
    "target-reached": _target_reached,
    "sampled": _sampled,
    "measured": _measured,
    "layers-timed": _layers_timed,
    "replan-proposed": _proposed,
    "replan-abandoned": lambda data: (
        f"[yellow]the better plan is given up[/yellow]  {escape(data['reason'])}"
    ),
    "offended": lambda data: f"[red]wrong numbers[/red]  {escape(data['sentence'])}",
    "link-cut": lambda data: f"[red]cut off[/red]  {escape(data['sentence'])}",
    "protection": _protection,
    "round": _round,
    "traffic": _traffic,
    "checkpoint": lambda data: f"checkpoint at step {data['step']}  {bytes_text(data['size_bytes'])}",
    "artifact": lambda data: f"artifact {escape(data['name'])}  {bytes_text(data['size_bytes'])}",
    "note": _note,
    "link": _link,
    "trial": _trial,
    "trials": lambda data: f"{data['done']} of {data['total']} trials are over",
    "labelled": lambda data: (
        f"tags: {escape(', '.join(data['tags'])) or 'none'}  group: {escape(data['group'] or 'none')}"
        f"{'  note: ' + escape(data['note']) if data.get('note') else ''}"
    ),
    "ended": lambda data: f"the attempt {data['outcome']}: {escape(data['reason'])}",
    "cancel-requested": lambda _: "cancelling",
}


def placement(plan: Plan) -> str:
    """Return the layers and machines of each stage, and the idle machines, in one line; long lists are cut."""
    if plan.branches:
        parts = [
            translated(f"branch {branch.number} on ") + _stages(branch.stages)
            for branch in plan.branches[:_MOST_STAGES]
        ]
        if len(plan.branches) > _MOST_STAGES:
            parts.append(f"... and {len(plan.branches) - _MOST_STAGES} more branches")
        placed = "; ".join(parts)
    else:
        placed = _stages(plan.stages)
    idle = f"; idle: {listed([machine.name for machine in plan.idle], _MOST_NAMES)}" if plan.idle else ""
    return placed + translated(idle)


def _stages(all_stages: Sequence[StagePlan]) -> str:
    stages = []
    for stage in all_stages[:_MOST_STAGES]:
        names = [member.name for member in stage.members[:_MOST_NAMES]]
        if len(stage.members) > _MOST_NAMES:
            names.append(translated(f"{len(stage.members) - _MOST_NAMES} more"))
        stages.append(f"{translated(layer_span(stage.start, stage.stop))}: {' + '.join(names)}")
    if len(all_stages) > _MOST_STAGES:
        stages.append(f"... and {len(all_stages) - _MOST_STAGES} more stages")
    return "; ".join(stages)


def step_times(measured: Measured) -> str:
    """Return the measured and predicted step time, and for each stage the fraction of the step spent computing."""
    if measured.predicted_step_s is None:
        return f"step {seconds_text(measured.measured_step_s)}, nothing was predicted"
    drift = measured.measured_step_s / measured.predicted_step_s - 1
    step_s, predicted_s = measured.measured_step_s, measured.predicted_step_s
    busy = ", ".join(
        f"{percent_text(stage.measured_busy_s / step_s)} "
        f"(predicted {percent_text((stage.predicted_busy_s or 0.0) / predicted_s)})"
        for stage in measured.stages
    )
    return (
        f"step {seconds_text(step_s)}, predicted {seconds_text(predicted_s)} ({drift:+.0%}); "
        f"stages busy {busy} of it"
    )


def plan_lines(plan: Plan) -> list[tuple[str, str]]:
    """Return the facts about a plan other than its placement, as (name, value) pairs."""
    lines = []
    if plan.prediction is not None:
        bound = bound_text(plan.prediction, is_pinned=plan.strategy == PINNED)
        step = translated(f"{seconds_text(plan.prediction.step_s)} in a step")
        lines.append(("predicted", f"{step}; {translated(bound)}"))
        lines.append(("bottleneck", plan.prediction.bottleneck.sentence))
    members = [member for stage in plan.stages for member in stage.members]
    lines += [(member.name, member.reason) for member in members[:_MOST_LINES]]
    if len(members) > _MOST_LINES:
        lines.append(("...", f"and {len(members) - _MOST_LINES} more machines; --json has them all"))
    return lines + [(names or "...", f"idle: {reason}") for names, reason in idle_lines(plan.idle)]


def bound_text(prediction: Bounded, what: str = "plan takes", *, is_pinned: bool = False) -> str:
    """Return a sentence with the lower bound, the plan's gap to the bound, and whether the plan is proven optimal.

    Args:
        prediction: prediction of the plan.
        what: subject and verb for the sentence "no {what} less than {lower bound}".
        is_pinned: whether the plan was given instead of found by a search.
    """
    proof = "given by the job file" if is_pinned else "the best that was found"
    if prediction.exact:
        proof = "proven best by the formula"
    if prediction.gap is None:
        return proof
    least = seconds_text(prediction.lower_bound_s)
    if prediction.gap <= 0.0005:
        return f"no {what} less than {least}, and this one reaches that"
    return f"no {what} less than {least}; this one is {prediction.gap:.1%} above, {proof}"


def idle_lines(idle: Sequence[IdleMachine]) -> list[tuple[str, str]]:
    """Return pairs (names of idle machines, reason), one for each reason.

    After `_MOST_LINES` pairs, a last pair without names gives the number of further reasons.
    """
    by_reason: dict[str, list[str]] = {}
    for machine in idle:
        by_reason.setdefault(machine.reason, []).append(machine.name)
    lines = [
        (translated(f"{listed(names, _MOST_NAMES)}, each of them") if len(names) > 1 else names[0], reason)
        for reason, names in by_reason.items()
    ]
    more = [("", f"{len(lines) - _MOST_LINES} more reasons; --json has them all")]
    return lines[:_MOST_LINES] + (more if len(lines) > _MOST_LINES else [])
