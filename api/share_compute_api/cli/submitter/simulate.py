"""``share-compute simulate``: runs a job on synthetic or given machines, on a simulated clock."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from share_compute.simulation.fleet_name import FleetName
from share_compute_api.terminal.language import heading, translated
from share_compute_api.terminal.options import UNITS_S, Json, duration_s
from share_compute_api.terminal.output import Terminal, console, duration, print_json, print_table, rate

if TYPE_CHECKING:
    from share_compute.simulation.report import RoundsReport, SimulationReport
    from share_compute.simulation.run import Scenario
    from share_compute.specification import TrainJob
    from share_compute.topology import Topology

_MACHINES = 100
_BACK_AFTER = "30m"
_BY_RULE = (
    "The cost of a failure follows rules (docs/simulation.md), not the protocol of a running job. Averages include "
    "times without any machine."
)
_ROUNDS_BY_RULE = (
    "The state machine of real jobs decides on merges. Failures cost what rules say (docs/simulation.md)."
)


def simulate(
    file: Annotated[Path, typer.Argument(help="Job file (YAML or JSON), or - for standard input.")],
    *,
    fleet: Annotated[
        FleetName | None,
        typer.Option(
            metavar="FLEET",
            help="Kind of machines and links: home, campus, datacentre or mixed; default: mixed.",
        ),
    ] = None,
    topology: Annotated[
        Path | None, typer.Option(help="File with machines to use instead of a fleet.")
    ] = None,
    machines: Annotated[
        int | None, typer.Option(min=1, max=10_000, help="Machines in the fleet; default: 100.")
    ] = None,
    mtbf: Annotated[
        str | None,
        typer.Option(help="Mean time between failures of a machine: 30m, 4h, 2d; default: they never fail."),
    ] = None,
    back_after: Annotated[
        str | None, typer.Option(help="Mean time until a failed machine returns; default: 30m.")
    ] = None,
    hours: Annotated[float, typer.Option(min=0.001, help="Hours to simulate.")] = 24.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the fleet and the failures.")] = 0,
    as_json: Json = False,
) -> None:
    """Simulate a job on synthetic or given machines: throughput, utilization, and the cost of failures.

    The simulation uses the planner of real jobs and its predicted step times. Failures are random. Without --topology,
    machines and links are random too. The cost of a failure follows rules (docs/simulation.md). A job with rounds is
    simulated with the state machine that decides on the merges of real jobs.
    """
    from share_compute.errors import UserError
    from share_compute.simulation.churn import Churn
    from share_compute.simulation.fleets import make_fleet
    from share_compute.simulation.run import Scenario
    from share_compute_api.client.job_file import read_job, read_topology_file

    if topology is not None and fleet is not None:
        raise UserError("--fleet and --topology exclude each other", hint="give one of them")
    if topology is not None and machines is not None:
        raise UserError(
            "--machines and --topology exclude each other", hint="the file says which machines there are"
        )
    if back_after is not None and mtbf is None:
        raise UserError(
            "--back-after without --mtbf: no machine ever fails", hint="add --mtbf, or leave it out"
        )
    spec = read_job(file).without_pinned_plan()  # the machines are others
    name = str(topology) if topology else (fleet or FleetName.mixed).value
    there = (
        read_topology_file(topology)
        if topology
        else make_fleet(fleet or FleetName.mixed, machines or _MACHINES, seed)
    )
    churn = (
        Churn(duration_s(mtbf, "--mtbf"), duration_s(back_after or _BACK_AFTER, "--back-after"))
        if mtbf
        else None
    )
    report = _run(spec, there, Scenario(hours * UNITS_S["h"], churn, seed), quiet=as_json)
    if as_json:
        print_json(report)
    else:
        _show(report, spec, name)


def _run(
    spec: TrainJob, there: Topology, scenario: Scenario, *, quiet: bool
) -> SimulationReport | RoundsReport:
    from share_compute.data.tokenization import expected_vocab_size
    from share_compute.models.blueprint import blueprint_of
    from share_compute.models.factory import dissect
    from share_compute.planning.choice import choose_policy, with_choice
    from share_compute.planning.dry_run import selected
    from share_compute.simulation.rounds import simulate_rounds
    from share_compute.simulation.run import simulate as simulate_job

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    errors = Terminal(stderr=True)
    with Progress(*columns, console=errors, transient=True, disable=quiet or not errors.is_terminal) as bar:
        task = bar.add_task("counting and planning", total=1.0)
        there, _ = selected(spec.parallelism, there)
        profile = dissect(blueprint_of(spec, expected_vocab_size(spec)))

        def show(share: float) -> None:
            bar.update(task, completed=share, description="simulating")

        choice = choose_policy(spec, there, profile)
        if choice is not None and not quiet:
            errors.print(choice.sentence)
        spec = with_choice(spec, choice)
        if spec.training.rounds is not None:
            return simulate_rounds(spec, there, profile, scenario, progress=show)
        return simulate_job(spec, there, profile, scenario, progress=show)


class _Shown(NamedTuple):
    """Printed parts of a report besides the figures that all reports have."""

    about: str
    """End of the first line."""
    facts: Sequence[tuple[str, str]]
    times: Sequence[tuple[str, float]]
    """Purposes and seconds."""
    total_s: float
    """Sum of ``times``."""
    time_of: str
    rules: str


def _show(report: SimulationReport | RoundsReport, spec: TrainJob, name: str) -> None:
    from share_compute.quantities import percent_text
    from share_compute.simulation.report import RoundsReport
    from share_compute_api.terminal.picture import Ink

    shown = _of_rounds(report) if isinstance(report, RoundsReport) else _of_steps(report)
    console.print(
        f"[bold]{escape(spec.name)}[/bold] on {report.machines:,} {'machine' if report.machines == 1 else 'machines'} "
        f"({escape(name)}), {duration(report.simulated_s)}: {shown.about}"
    )
    samples, tokens = rate(report.samples_per_s), rate(report.tokens_per_s)
    words = f" = {tokens} tokens/s" if report.tokens_per_s != report.samples_per_s else ""
    facts = (
        (heading("throughput"), f"{samples} samples/s{words}"),
        ("machines present, on average", average(report.mean_machines)),
        ("machines in the job, on average", average(report.mean_members)),
        ("use of all lent FLOP/s", percent_text(report.utilisation)),
        ("machines that died", f"{report.deaths:,}, {report.member_deaths:,} of them in the job"),
        *shown.facts,
        ("searches of the planner", f"{report.searches:,}"),
    )
    print_table(("what", "value"), ((what, translated(value)) for what, value in facts), empty="")
    console.print()
    print_table(
        (shown.time_of, "lasted", "share"),
        (
            (translated(what), duration(lasts_s), f"{lasts_s / max(shown.total_s, 1e-9):.2%}")
            for what, lasts_s in shown.times
        ),
        empty="",
    )
    if not isinstance(report, RoundsReport):
        most = max(report.curve_samples_per_s)
        console.print(f"\nsamples/s over time, 0 to {rate(most)}:")
        console.print(chart(report.curve_samples_per_s, Ink.of(console).bars), style="cyan")
        end = duration(report.simulated_s)
        console.print(f"[dim]0{end.rjust(len(report.curve_samples_per_s) - 1)}[/dim]")
    console.print(f"\n[dim]{translated(shown.rules)}[/dim]")


def _of_steps(report: SimulationReport) -> _Shown:
    from share_compute.quantities import seconds_text

    hours = report.hours
    layers = "1 layer" if report.layers == 1 else f"{report.layers} layers"
    return _Shown(
        about=f"{report.parameters:,} parameters in {layers}",
        facts=(
            ("step of the first plan", seconds_text(report.first_step_s)),
            ("steps committed", f"{report.committed_steps:,}"),
            ("steps computed again in part", f"{report.lost_steps:,}"),
            ("use of the job's machines", f"{report.member_utilisation:.1%}"),
            (heading("epochs"), f"{report.epochs:,}"),
            ("replaced by a spare", f"{report.replacements:,}"),
        ),
        times=(
            (heading("computing"), hours.computing_s),
            ("doing again", hours.redoing_s),
            ("noticing deaths", hours.noticing_s),
            (heading("planning"), hours.planning_s),
            ("moving state", hours.moving_s),
            ("waiting for machines", hours.waiting_s),
        ),
        total_s=hours.total_s,
        time_of="time",
        rules=_BY_RULE,
    )


def _of_rounds(report: RoundsReport) -> _Shown:
    from share_compute.quantities import bytes_text, seconds_text

    hours = report.hours
    branches = "1 branch" if report.branches == 1 else f"{report.branches:,} branches"
    islands = "1 island" if report.islands == 1 else f"{report.islands:,} islands"
    each = report.sent_bytes / max(1, report.merged_contributions)
    mean_s = report.simulated_s / max(1, report.rounds)
    return _Shown(
        about=f"{branches} on {islands}, {report.policy}, rounds of {report.every:,} steps",
        facts=(
            ("round of the first placement", seconds_text(report.first_round_s)),
            (heading("merges"), f"{report.rounds:,}, one in {seconds_text(mean_s)} on average"),
            ("contributions merged", f"{report.merged_contributions:,}"),
            ("contributions that were missing", f"{report.missing_contributions:,}"),
            (
                "contributions that were late",
                f"{report.late_contributions:,}; {report.ignored_contributions:,} not used",
            ),
            ("bytes sent by branches", f"{bytes_text(report.sent_bytes)}, {bytes_text(each)} each"),
            ("bytes received by branches", bytes_text(report.received_bytes)),
            ("time in which branches compute", f"{report.computing_share:.1%}"),
            ("islands with other machines", f"{report.replacements:,}, moved back {report.returns:,} times"),
            ("rounds begun again", f"{report.restarts:,}"),
            ("islands without machines", f"{report.stranded:,}"),
        ),
        times=(
            (heading("computing"), hours.computing_s),
            ("rounds begun again", hours.redone_s),
            ("sending contributions", hours.sending_s),
            ("waiting for other branches", hours.waiting_s),
            ("receiving updates", hours.receiving_s),
            ("waiting for machines", hours.idle_s),
        ),
        total_s=hours.total_s,
        time_of="time of all branches",
        rules=_ROUNDS_BY_RULE,
    )


def average(count: float) -> str:
    """Return an average as text: with one decimal if it is 0 or at least 1, else with two significant digits."""
    return f"{count:,.1f}" if count >= 1 or count == 0 else f"{count:.2g}"


def chart(values: Sequence[float], bars: str) -> str:
    """Draw values as one line of bar characters, scaled to the largest value; values of 0 or less are spaces.

    Args:
        values: values from left to right.
        bars: characters from low to high.
    """
    most = max(values, default=0.0)
    return "".join(
        " " if value <= 0 else bars[min(len(bars) - 1, int(value / most * len(bars)))] for value in values
    )
