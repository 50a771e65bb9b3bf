"""``share-compute plan``: shows the plan that a job would get, and why, without running the job."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias, get_args

import typer
from pydantic import ValidationError
from rich.markup import escape

from share_compute.specification import Objective
from share_compute_api.terminal.completion import complete_strategy
from share_compute_api.terminal.options import Json
from share_compute_api.terminal.output import Terminal

if TYPE_CHECKING:
    from share_compute.errors import PlanInfeasible
    from share_compute.planning.report import PlanReport
    from share_compute.topology import Topology
    from share_compute_api.schemas.bodies import ServingRequest

_MOST_MACHINES = 10


_Purpose: TypeAlias = Literal["training", Objective]
"""Purpose of a plan: training, or one of the serving objectives."""
_SERVING = get_args(Objective)
_ABOUT = {
    "strategy": ("training",),
    "compare": ("training",),
    "prompt_tokens": _SERVING,
    "new_tokens": _SERVING,
    "concurrent": _SERVING,
    "first_token_limit": ("throughput",),
    "next_token_limit": ("throughput",),
}
"""Option -> purposes of a plan that allow the option. Every purpose allows the other options."""


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
    objective: Annotated[
        _Purpose,
        typer.Option(help="Train the model, or serve it: shortest answer, or most tokens a second."),
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
    as_json: Json = False,
) -> None:
    """Show the plan that a job would get, and why; nothing is queued."""
    from share_compute.errors import PlanInfeasible
    from share_compute_api.terminal.output import print_failure, print_json
    from share_compute_api.terminal.report import print_report

    _require_meaning(context, objective)
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
        report = _report(file, topology, strategy, compare, serving)
    except PlanInfeasible as failure:
        print_failure(failure, as_json=as_json)
        if not as_json:
            _print_missing(failure)
        raise typer.Exit(failure.exit_code) from failure
    if as_json:
        print_json(report)
    else:
        print_report(report)


def _require_meaning(context: typer.Context, objective: _Purpose) -> None:
    """Raise `UserError` if the user gave an option that has no effect for this objective."""
    from share_compute.errors import UserError

    for name, objectives in _ABOUT.items():
        source = context.get_parameter_source(name)
        # Compare the source by name: typer may bundle its own copy of click, whose enumeration class differs.
        if source is not None and source.name == "COMMANDLINE" and objective not in objectives:
            raise UserError(
                f"--{name.replace('_', '-')} means nothing for objective {objective}",
                hint=f"leave it out, or plan with --objective {' or '.join(objectives)}",
            )


def _serving(**options: object) -> ServingRequest:
    from share_compute.errors import UserError
    from share_compute.files.field_errors import field_errors
    from share_compute_api.schemas.bodies import ServingRequest

    try:
        return ServingRequest.model_validate(options)
    except ValidationError as failure:
        wrong = [
            f"--{item['field'].removesuffix('_s').replace('_', '-')}: {item['problem']}"
            for item in field_errors(failure)
        ]
        raise UserError("; ".join(wrong), hint="see share-compute plan --help") from failure


def _report(
    file: Path,
    topology_file: Path | None,
    strategy: str | None,
    compare: bool,
    serving: ServingRequest | None,
) -> PlanReport:
    from share_compute.planning.search.partitioning import load_strategy
    from share_compute_api.client.job_file import read_job

    spec = read_job(file)
    load_strategy(strategy or spec.parallelism.strategy)
    if topology_file is None:
        from share_compute_api.client.client import Client

        with Client() as client, _busy("the server plans"):
            return client.plan(spec, strategy=strategy, compare=compare, serving=serving)
    from share_compute.files.topology_file import read_topology
    from share_compute_api.client.job_file import read_text

    topology = read_topology(read_text(topology_file))
    _require_machines(topology, topology_file)
    with _busy("planning"):
        from share_compute_api.workers.planning import plan_on_paper

        workload = serving.workload() if serving is not None else None
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


def _print_missing(failure: PlanInfeasible) -> None:
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
