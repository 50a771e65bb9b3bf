"""``share-compute plan``: shows the plan that a job would get, and why, without running the job."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias, get_args

import typer
from pydantic import ValidationError
from rich.markup import escape

from share_compute.choices import Objective
from share_compute_api.cli.submitter.plan_operators import SearchChoice, show_operators
from share_compute_api.terminal.completion import complete_strategy
from share_compute_api.terminal.options import Json
from share_compute_api.terminal.output import Terminal

if TYPE_CHECKING:
    from share_compute.errors import PlanInfeasible
    from share_compute.planning.report import PlanReport
    from share_compute.specification import SparseJob, TrainJob
    from share_compute.topology import Topology
    from share_compute_api.schemas.bodies import ServingRequest

_MOST_MACHINES = 10


_Purpose: TypeAlias = Literal["training", Objective]
"""Purpose of a plan: training, or one of the serving objectives."""
_SERVING = get_args(Objective)
_ABOUT = {
    "strategy": ("training",),
    "compare": ("training",),
    "output": ("training",),
    "prompt_tokens": _SERVING,
    "new_tokens": _SERVING,
    "concurrent": _SERVING,
    "first_token_limit": ("throughput",),
    "next_token_limit": ("throughput",),
}
"""Option -> purposes of a plan that allow the option. Every purpose allows the other options."""
_OPERATORS_ONLY = ("devices", "search", "fixed", "fully_use_devices", "dot")
"""Options that need ``--operators``."""


def plan(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="Job file (YAML or JSON), or - for standard input.")],
    *,
    topology: Annotated[
        Path | None,
        typer.Option(
            help="Plan on the machines of this file, without a server. Default: the cluster's ready machines."
        ),
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(help="Strategy in place of the job's own.", autocompletion=complete_strategy),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Compare all strategies, and policies of synchronization.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(help="File to write the plan to, which parallelism.plan of a job file can pin."),
    ] = None,
    objective: Annotated[
        _Purpose,
        typer.Option(
            metavar="GOAL",
            help="training: train the model. latency, throughput: serve it, with the shortest answer or the most "
            "tokens a second.",
        ),
    ] = "training",
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Serving: length of a prompt.")] = 512,
    new_tokens: Annotated[int, typer.Option(min=1, help="Serving: length of an answer.")] = 128,
    concurrent: Annotated[int, typer.Option(min=1, help="Serving: most answers at one time.")] = 16,
    first_token_limit: Annotated[
        float | None, typer.Option(help="Serving, throughput: longest wait for the first token, in seconds.")
    ] = None,
    next_token_limit: Annotated[
        float | None, typer.Option(help="Serving, throughput: longest wait for each later token, in seconds.")
    ] = None,
    operators: Annotated[
        bool,
        typer.Option("--operators", help="Divide each layer's operators between the devices of one machine."),
    ] = False,
    devices: Annotated[
        int | None,
        typer.Option(
            min=1, help="Operators: number of devices; default: parallelism.tensor of the job, or 2."
        ),
    ] = None,
    search: Annotated[
        SearchChoice | None,
        typer.Option(
            metavar="METHOD",
            help="Operators: dynamic_programming, recursive_programming or sharding_propagation; default: as the job "
            "says.",
        ),
    ] = None,
    fixed: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OPERATOR=STRATEGY", help="Operators: strategy to keep, such as 'mlp.*_proj=column'."
        ),
    ] = None,
    fully_use_devices: Annotated[
        bool,
        typer.Option("--fully-use-devices", help="Operators: replicate only operators that cannot be cut."),
    ] = False,
    dot: Annotated[
        Path | None, typer.Option(help="Operators: file to write the graph to, in the language of Graphviz.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the plan that a job would get, and why; nothing is queued."""
    from share_compute.errors import PlanInfeasible
    from share_compute.specification import SparseJob, require_training
    from share_compute_api.client.job_file import read_any_job
    from share_compute_api.terminal.output import print_failure, print_json
    from share_compute_api.terminal.report import print_report

    _require_meaning(context, objective, operators=operators)
    job = read_any_job(file)
    if isinstance(job, SparseJob):
        _plan_sparse(context, job, topology, as_json=as_json)
        return
    spec = require_training(job)
    if operators:
        show_operators(
            spec,
            topology,
            devices=devices or max(2, spec.parallelism.tensor),
            search=search,
            fixed=fixed or (),
            fully_use_devices=fully_use_devices,
            dot=dot,
            as_json=as_json,
        )
        return
    serving = (
        _serving(
            objective=objective,
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            concurrent=concurrent,
            first_token_limit_s=first_token_limit,
            next_token_limit_s=next_token_limit,
        )
        if objective != "training"
        else None
    )
    try:
        report = _report(spec, topology, strategy, compare, serving)
    except PlanInfeasible as failure:
        print_failure(failure, as_json=as_json)
        if not as_json:
            print_missing(failure)
        raise typer.Exit(failure.exit_code) from failure
    if output is not None:
        _write(report, output)
    if as_json:
        print_json(report)
        return
    print_report(report)
    if output is not None:
        Terminal(soft_wrap=True).print(
            f"\nwritten to {escape(str(output))}; a job file pins it with parallelism.plan"
        )


def _write(report: PlanReport, output: Path) -> None:
    """Write the plan file of a report."""
    from share_compute.planning.plan_file import pinned_plan
    from share_compute.specification.placement.pinned_plan import write_plan
    from share_compute_api.client.job_file import write_text

    write_text(output, write_plan(pinned_plan(report.plan)))


def _is_given(context: typer.Context, name: str) -> bool:
    """Return whether the user gave an option."""
    source = context.get_parameter_source(name)
    # Compare the source by name: typer may bundle its own copy of click, whose enumeration class differs.
    return source is not None and source.name == "COMMANDLINE"


def _require_meaning(context: typer.Context, objective: _Purpose, *, operators: bool) -> None:
    """Raise `UserError` if the user gave an option that has no effect for this kind of plan."""
    from share_compute.errors import UserError

    for name in ("objective", *_ABOUT) if operators else _OPERATORS_ONLY:
        if _is_given(context, name):
            raise UserError(
                f"--{name.replace('_', '-')} means nothing {'with' if operators else 'without'} --operators",
                hint=f"leave {'one of them' if operators else 'it'} out",
            )
    for name, objectives in _ABOUT.items():
        if _is_given(context, name) and objective not in objectives:
            raise UserError(
                f"--{name.replace('_', '-')} means nothing for objective {objective}",
                hint=f"leave it out, or plan with --objective {' or '.join(objectives)}",
            )


def _plan_sparse(
    context: typer.Context, job: SparseJob, topology_file: Path | None, *, as_json: bool
) -> None:
    """Print the machines that a sparse model would use."""
    from share_compute.errors import PlanInfeasible, UserError
    from share_compute.lifecycle.attempt_events import RangesPlaced
    from share_compute.lifecycle.states import ContributorState
    from share_compute.planning.dry_run import selected
    from share_compute.sparse.jobs import chosen_machines, placement_sentence
    from share_compute.topology import Topology
    from share_compute_api.terminal.output import console, print_json

    for name in ("strategy", "compare", "objective", "operators", *_ABOUT):
        if _is_given(context, name):
            raise UserError(
                f"--{name.replace('_', '-')} means nothing for kind: sparse, which has no layers",
                hint="leave it out",
            )
    if topology_file is None:
        from share_compute_api.client.client import Client

        with Client() as client:
            ready = client.contributors(state=[ContributorState.ready])
            there = [record.machine() for record in ready]
    else:
        from share_compute_api.client.job_file import read_topology_file

        there = list(read_topology_file(topology_file).contributors)
    if not there:
        raise PlanInfeasible("no machine is ready", hint="let one join: share-compute invite")
    there = list(selected(job.parallelism, Topology(tuple(there)))[0].contributors)
    machines = chosen_machines(job, there)
    placed = RangesPlaced(
        machines=tuple(machine.id for machine in machines), sentence=placement_sentence(job, machines)
    )
    if as_json:
        print_json(placed)
        return
    console.print(f"{escape(job.name)}: {escape(placed.sentence)}", soft_wrap=True)
    left = len(there) - len(machines)
    if left:
        console.print(f"{left} more {'is' if left == 1 else 'are'} ready, and would stay free")


def _serving(**options: object) -> ServingRequest:
    from share_compute.errors import UserError
    from share_compute.files.field_errors import field_errors, fields_text
    from share_compute_api.schemas.bodies import ServingRequest

    try:
        return ServingRequest.model_validate(options)
    except ValidationError as failure:
        wrong = [
            {**item, "field": f"--{item['field'].removesuffix('_s').replace('_', '-')}"}
            for item in field_errors(failure)
        ]
        text = fields_text(wrong, len(wrong))
        raise UserError(text, hint="see share-compute plan --help", details={"fields": wrong}) from failure


def _report(
    spec: TrainJob,
    topology_file: Path | None,
    strategy: str | None,
    compare: bool,
    serving: ServingRequest | None,
) -> PlanReport:
    from share_compute.planning.search.partitioning import load_strategy

    load_strategy(strategy or spec.parallelism.strategy)
    if topology_file is None:
        from share_compute_api.client.client import Client

        with Client() as client, _busy("the server plans"):
            return client.plan(spec, strategy=strategy, compare=compare, serving=serving)
    from share_compute_api.client.job_file import read_topology_file

    topology = read_topology_file(topology_file)
    _require_machines(topology, topology_file)
    with _busy("planning"):
        from share_compute_api.workers.planning import plan_on_paper

        workload = serving.workload(spec.parallelism.tensor) if serving is not None else None
        return plan_on_paper(spec, topology, strategy=strategy, compare=compare, serving=workload)


def _require_machines(topology: Topology, file: Path) -> None:
    from share_compute.errors import PlanInfeasible

    if not topology.contributors:
        raise PlanInfeasible(
            f"{file} has no machine to plan on",
            hint="list at least one under contributors",
            details={"machines_ready": 0},
        )


@contextmanager
def _busy(what: str) -> Iterator[None]:
    """Show a status line while the block runs, if standard error is a terminal."""
    errors = Terminal(stderr=True)
    if errors.is_terminal:
        with errors.status(what):
            yield
    else:
        yield


def print_missing(failure: PlanInfeasible) -> None:
    """Print the machines that lack memory, and all remedies except the first."""
    from share_compute.quantities import exact_bytes_text

    errors = Terminal(stderr=True, soft_wrap=True)
    missing = failure.details.get("missing_by_machine") or {}
    for machine, size in list(missing.items())[:_MOST_MACHINES]:
        errors.print(f"       {escape(machine)} lacks {exact_bytes_text(size)}")
    if len(missing) > _MOST_MACHINES:
        errors.print(f"       and {len(missing) - _MOST_MACHINES} more machines lack memory")
    # The first remedy is the hint that `print_failure` printed.
    for remedy in (failure.details.get("would_fit") or [])[1:]:
        errors.print(f"       or: {escape(str(remedy))}", style="dim")
