"""Prints the report of a plan: predictions, diagrams, and the reason for each machine's share."""

from __future__ import annotations

from rich.console import Group
from rich.markup import escape
from rich.text import Text

from share_compute.planning.plan import PINNED, IdleMachine, Plan, layer_span
from share_compute.planning.report import (
    Alternative,
    IslandProposal,
    PlanReport,
    PolicyFigures,
    RoundsPrediction,
    ServingPrediction,
)
from share_compute.quantities import bytes_text, seconds_text
from share_compute_api.terminal.describe import LEAST_RATIO, bound_text, idle_lines
from share_compute_api.terminal.language import heading, styled, translated
from share_compute_api.terminal.output import console, number, rate
from share_compute_api.terminal.picture import (
    colour_of,
    layers_over_machines,
    timeline,
)
from share_compute_api.terminal.tables import WholeTable

_MOST_MACHINES = 40
_MOST_NAMES = 5
_LINKS_ASSUMED = "No link was measured: each is assumed to be a LAN link of 1 Gbit/s."
_WIDE_COLUMNS = 60
"""Minimum width of the terminal, in characters, at which the table of machines has a column of reasons."""


def print_report(report: PlanReport) -> None:
    """Print the report of a dry run, for serving if `PlanReport.serving` is set, else for training."""
    serving = report.serving
    plan = report.plan if serving is None else serving.plan
    console.print(_size(plan), _training(plan) if serving is None else _serving(serving), sep="\n")
    if serving is None and report.choice is not None:
        console.print(report.choice.sentence)
    if serving is None and report.rounds is not None:
        _section("Rounds", _rounds(report.rounds))
    _section("Layers", layers_over_machines(plan, console))
    _section("Machines", _machines(plan))
    if plan.idle:
        _section("Left out", _idle(plan.idle))
    if serving is not None:
        return
    if any(stage.boundary_bytes is not None for stage in plan.stages):
        _section("Boundaries", _boundaries(plan))
    if any(stage.sums is not None for stage in plan.stages):
        _section("Gradient sums", _sums(plan))
    if report.timeline:
        _section("One step", timeline(plan, report.timeline, console))
    if report.alternatives:
        _section("Strategies", _comparison(plan, report.alternatives))
    if report.policies:
        _section("Policies", _policies(report.policies))
    if report.islands is not None:
        _section("Islands", _islands(report.islands))


def _section(title: str, content: Text | Group) -> None:
    console.print(f"\n[bold]{heading(title)}[/bold]")
    console.print(content, crop=False)


def _with_bottleneck(bound: str, bottleneck: str) -> str:
    """Return the sentences about a plan's bound and its bottleneck."""
    shown = translated(bound)
    return f"{f'{_capital(bound)}.' if shown == bound else shown}\n{translated(bottleneck)}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _size(plan: Plan) -> Text:
    layers = f"{plan.num_layers} {'layer' if plan.num_layers == 1 else 'layers'}"
    machines = f"{len(plan.machines)} {'machine' if len(plan.machines) == 1 else 'machines'}"
    if plan.branches:
        branches = f"{len(plan.branches)} {'branch' if len(plan.branches) == 1 else 'branches'}"
        return styled(
            f"[bold]{escape(plan.model_id)}[/bold]: {layers}, {plan.parameters:,} parameters; "
            f"on {machines} with {branches}, by strategy {plan.strategy}"
        )
    stages = f"{len(plan.stages)} {'stage' if len(plan.stages) == 1 else 'stages'}"
    return styled(
        f"[bold]{escape(plan.model_id)}[/bold]: {layers}, {plan.parameters:,} parameters; "
        f"on {machines} in {stages}, by strategy {plan.strategy}"
    )


def _training(plan: Plan) -> Text:
    prediction = plan.prediction
    if prediction is None:
        return Text(
            translated("Nothing is predicted: the speed of a machine was not measured."), style="yellow"
        )
    step = seconds_text(prediction.step_s)
    microbatches = f"{plan.microbatches} {'microbatch' if plan.microbatches == 1 else 'microbatches'}"
    sentence = f"[bold green]{step} a step[/bold green] of {microbatches}"
    if plan.branches:
        sentence = f"[bold green]{step} a step[/bold green] of branch 0, of {microbatches}"
    parts = [styled(sentence), _samples(prediction.samples_per_s)]
    if prediction.tokens_per_s != prediction.samples_per_s:  # the samples are texts
        parts.append(Text(translated(f"{_per_s(prediction.tokens_per_s)} tokens/s")))
    bound = bound_text(prediction, is_pinned=plan.strategy == PINNED)
    lines = [Text("   ").join(parts), Text(_with_bottleneck(bound, prediction.bottleneck.sentence))]
    if prediction.links_assumed:
        lines.append(_warning(_LINKS_ASSUMED))
    return Text("\n").join(lines)


def _samples(per_s: float | None) -> Text:
    return Text(translated(f"{_per_s(per_s)} samples/s"))


def _warning(text: str) -> Text:
    return Text(translated(text), style="yellow")


def _serving(found: ServingPrediction) -> Text:
    what = "request takes" if found.objective == "latency" else "token follows the one before it in"
    times = styled(
        f"[bold green]{seconds_text(found.first_token_s)} to the first token, "
        f"{seconds_text(found.next_token_s)} to each later token[/bold green]"
    )
    total = (
        f"{_per_s(found.tokens_per_s)} tokens/s in all, planned for "
        f"{'latency' if found.objective == 'latency' else 'throughput'}"
    )
    lines = [
        Text.assemble(times, "   ", translated(total)),
        Text(_with_bottleneck(bound_text(found, what), found.bottleneck.sentence)),
    ]
    if not found.within_limits:
        lines.append(_warning("No placement was found within the limits; this one comes closest."))
    if found.speeds_assumed:
        lines.append(_warning("No machine's speed was measured: each is assumed to compute at 1 GFLOP/s."))
    if found.links_assumed:
        lines.append(_warning(_LINKS_ASSUMED))
    return Text("\n").join(lines)


def _machines(plan: Plan) -> Group:
    """Return a table of machines with the reasons for their shares; in a narrow terminal, reasons follow the table."""
    is_wide = console.width >= _WIDE_COLUMNS
    members = [(index, stage, member) for index, stage in enumerate(plan.stages) for member in stage.members]
    rows, reasons = list[tuple[str | None, ...]](), Text()
    for index, stage, member in members[:_MOST_MACHINES]:
        why = translated(member.standing or member.reason)
        if not is_wide:
            reasons.append(member.name, style=colour_of(index)).append(f": {why}\n")
        used = f" {_percent(member.memory_bytes / member.lent_bytes):>4}" if member.lent_bytes else ""
        rows.append(
            (
                f"[{colour_of(index)}]{escape(member.name)}[/]",
                f"{stage.start}" if stage.stop == stage.start + 1 else f"{stage.start}-{stage.stop - 1}",
                f"{bytes_text(member.memory_bytes)}{used}",
                None if member.busy_fraction is None else _percent(member.busy_fraction),
                *([escape(why)] if is_wide else []),
            )
        )
    columns = ("machine", "layers", "memory", "busy", *(["why"] if is_wide else []))
    table = WholeTable(columns, rows, right=("memory", "busy"))
    if len(members) > _MOST_MACHINES:
        reasons.append_text(_more(len(members)))
    reasons.rstrip()
    return Group(table, reasons) if reasons else Group(table)


def _more(count: int) -> Text:
    """Return the line that says how many of ``count`` rows are not shown."""
    return Text(translated(f"and {count - _MOST_MACHINES} more; --json has them all") + "\n", style="dim")


def _boundaries(plan: Plan) -> Text:
    """Return the codec of each boundary between stages, and the bytes that cross it."""
    text = Text()
    between = [stage for stage in plan.stages if stage.boundary_bytes is not None]
    for stage in between[:_MOST_MACHINES]:
        codec = "not compressed" if stage.boundary_codec == "none" else stage.boundary_codec
        size = bytes_text(stage.boundary_bytes or 0)
        text.append_text(
            styled(f"[bold]before layer {stage.stop}[/bold]: {size} a microbatch each way, {codec}")
        ).append("\n")
    if len(between) > _MOST_MACHINES:
        text.append_text(_more(len(between)))
    text.rstrip()
    return text


def _sums(plan: Plan) -> Text:
    """Return, for each stage, the algorithm that sums its gradients, its traffic, and the times of all algorithms."""
    text = Text()
    summed = [(stage, stage.sums) for stage in plan.stages if stage.sums is not None]
    for stage, sums in summed[:_MOST_MACHINES]:
        codec = "not compressed" if stage.sum_codec == "none" else stage.sum_codec
        text.append_text(
            styled(
                f"[bold]{translated(layer_span(stage.start, stage.stop))}[/bold]: {sums.algorithm}; "
                f"each of {len(stage.members)} members receives at most {bytes_text(sums.received_bytes)} a step, "
                f"{codec}"
            )
        ).append("\n")
        if sums.crossing_bytes:
            sites, size = len(set(sums.sites)), bytes_text(sums.crossing_bytes)
            text.append("  " + translated(f"each of {sites} sites sends at most {size} to others") + "\n")
        times = sorted(sums.seconds.items(), key=lambda item: (item[1] is None, item[1], item[0]))
        shown = (f"{name} {'-' if value is None else seconds_text(value)}" for name, value in times)
        text.append(f"  {heading('predicted')}: {', '.join(shown)}\n", style="dim")
    if len(summed) > _MOST_MACHINES:
        text.append_text(_more(len(summed)))
    text.rstrip()
    return text


def _idle(idle: tuple[IdleMachine, ...]) -> Text:
    """Return the machines that are left out, grouped by reason."""
    text = Text()
    for names, reason in idle_lines(idle):
        if names:
            text.append(f"{names}: ", style="bold").append(f"{translated(reason)}\n")
        else:
            text.append_text(styled(f"[bold]and [/bold]{reason}")).append("\n")
    text.rstrip()
    return text


def _comparison(plan: Plan, alternatives: tuple[Alternative, ...]) -> Group:
    rows = list(alternatives)
    if plan.prediction is not None and all(row.strategy != plan.strategy for row in rows):
        rows.append(
            Alternative(
                strategy=plan.strategy,
                step_s=plan.prediction.step_s,
                samples_per_s=plan.prediction.samples_per_s,
                stages=len(plan.stages),
                machines=sum(plan.stage_sizes),
            )
        )
    made = sorted(
        (row for row in rows if row.step_s is not None), key=lambda row: (row.step_s or 0.0, row.strategy)
    )
    best_s = made[0].step_s if made else None
    table = WholeTable(
        ("strategy", "a step", "x best", "samples/s", "stages", "machines", ""),
        (
            (
                _marked(row.strategy, row.strategy == plan.strategy),
                seconds_text(row.step_s or 0.0),
                f"{(row.step_s or 0.0) / best_s:.2f}" if best_s else None,
                _per_s(row.samples_per_s),
                row.stages,
                row.machines,
                translated("this plan") if row.strategy == plan.strategy else "",
            )
            for row in made
        ),
        right=("a step", "x best", "samples/s", "stages", "machines"),
    )
    problems = [
        styled(
            f"[bold]{escape(row.strategy)}[/bold] finds no plan: {escape(row.problem or 'reason unknown')}"
        )
        for row in rows
        if row.step_s is None
    ]
    return Group(table, *problems)


def _policies(policies: tuple[PolicyFigures, ...]) -> Group:
    """Return a table of policies of synchronization, and a sentence about the drawbacks of each."""
    rows = list[tuple[str | None, ...]]()
    about = translated(
        "Steps are those of a round. Bytes are means per step: of the busiest machine in lockstep, and of each branch "
        "in rounds."
    )
    sentences = Text(f"{about}\n", style="dim")
    for row in policies:
        sizes = (row.sent_bytes_per_step, row.received_bytes_per_step)
        if row.problem is None:
            rows.append(
                (
                    _marked(row.policy, row.is_own),
                    None if row.every is None else str(row.every),
                    row.compression,
                    None if row.sample_s is None else seconds_text(row.sample_s),
                    *(None if size is None else bytes_text(size) for size in sizes),
                    None if row.utilisation is None else _percent(row.utilisation),
                    heading("own") if row.is_own else "",
                )
            )
        name = row.policy if row.compression == "none" else f"{row.policy}, {row.compression}"
        if row.problem is None:
            sentences.append(name, style="bold").append(f": {translated(row.gives_up)}\n")
        else:
            problem = f"[bold]{escape(name)}[/bold] finds no plan: {escape(row.problem)}"
            sentences.append_text(styled(problem)).append("\n")
    sentences.rstrip()
    columns = ("policy", "steps", "codec", "a sample", "sent", "received", "busy", "")
    right = ("steps", "a sample", "sent", "received", "busy")
    return Group(WholeTable(columns, rows, right=right), sentences)


def _marked(name: str, is_marked: bool) -> str:
    return f"[bold]{escape(name)}[/bold]" if is_marked else escape(name)


def _rounds(rounds: RoundsPrediction) -> Text:
    text = Text()
    if rounds.round_s is not None:
        steps = f"{rounds.every} {'step' if rounds.every == 1 else 'steps'}"
        time = seconds_text(rounds.round_s)
        sentence = f"[bold green]{time} a round[/bold green] of {steps}"
        if rounds.exchange_s is not None:
            exchange = seconds_text(rounds.exchange_s)
            sentence = f"[bold green]{time} a round[/bold green] of {steps} ({exchange} to exchange)"
        text.append_text(Text("   ").join([styled(sentence), _samples(rounds.samples_per_s)])).append("\n")
    sent, received = bytes_text(rounds.contribution_bytes), bytes_text(rounds.update_bytes)
    traffic = f"Each branch sends {sent} a round, and receives {received}."
    if rounds.ratio >= LEAST_RATIO:
        less = f"{rounds.ratio:.3g} times less than float32"
        traffic = f"Each branch sends {sent} a round, and receives {received} ({less})."
    sentences = [traffic]
    if rounds.range_machines:
        count = len(rounds.range_machines)
        ranges = f"{count} {'range' if count == 1 else 'ranges'}"
        sentences.append(f"The weights are merged in {ranges} on {_names(rounds.range_machines)}.")
    text.append("".join(f"{translated(sentence)}\n" for sentence in (*sentences, *rounds.comparison)))
    for island in rounds.islands[:_MOST_MACHINES]:
        first, last = island.branches[0], island.branches[-1]
        branches = f"branches {first}-{last}" if last != first else f"branch {first}"
        line = f"[bold]{escape(translated(_names(island.machines)))}[/bold]: {translated(branches)}"
        if island.step_s is not None:
            line += translated(f", {seconds_text(island.step_s)} a step")
        text.append_text(Text.from_markup(line, emoji=False)).append("\n")
    if len(rounds.islands) > _MOST_MACHINES:
        text.append_text(_more(len(rounds.islands)))
    text.rstrip()
    return text


def _names(machines: tuple[str, ...]) -> str:
    more = f" and {len(machines) - _MOST_NAMES} more" if len(machines) > _MOST_NAMES else ""
    return ", ".join(machines[:_MOST_NAMES]) + more


def _islands(proposal: IslandProposal) -> Text:
    count = len(proposal.islands)
    islands = f"{count} {'island' if count == 1 else 'islands'}"
    sentence = translated(
        f"{islands} that synchronise every {proposal.interval_steps} steps "
        f"({seconds_text(proposal.synchronisation_s)} each time) would bring "
        f"{_per_s(proposal.samples_per_s)} samples/s:"
    )
    text = Text(f"{sentence}\n")
    for island in proposal.islands[:_MOST_MACHINES]:
        text.append(translated(_names(island.machines)), style="bold")
        speeds = f"{seconds_text(island.step_s)} a step, {_per_s(island.samples_per_s)} samples/s"
        text.append(f": {translated(speeds)}\n")
    text.rstrip()
    return text


def _per_s(value: float | None) -> str:
    """Return a rate with three significant digits, or without decimals from 100 upwards; a dash for None."""
    return "-" if value is None else str(rate(value) if value >= 100 else number(value, 3))


def _percent(share: float) -> str:
    return "<1%" if 0 < share < 0.01 else f"{share:.0%}"
