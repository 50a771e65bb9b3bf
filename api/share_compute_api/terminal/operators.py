"""Prints plans of operators, and draws their graphs."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator

from rich.markup import escape
from rich.text import Text

from share_compute.planning.operators.plan import (
    LayerOperators,
    OperatorChoice,
    OperatorReport,
    Redistribution,
)
from share_compute.quantities import bytes_text, rate_text, seconds_text
from share_compute_api.terminal.language import styled, translated
from share_compute_api.terminal.output import console
from share_compute_api.terminal.tables import WholeTable

_SHOWN = {"matmul", "attention", "embedding"}
"""Kinds of operators that have a row of their own."""
_COLOURS = {
    "batch": "lightblue",
    "sequence": "lightcyan",
    "heads": "plum",
    "column": "palegreen",
    "row": "khaki",
}


def print_operators(report: OperatorReport) -> None:
    """Print the plan of the operators of each kind of layer."""
    console.print(
        styled(
            f"[bold]{escape(report.model)}[/bold]: operators on {report.devices} "
            f"{'device' if report.devices == 1 else 'devices'} of {escape(report.machine)}, by {report.search}"
        )
    )
    if report.devices > 1:
        speed, latency = rate_text(report.link_bytes_per_s), seconds_text(report.link_latency_s)
        if report.link_assumed:
            text = f"Links between the devices (not measured, assumed): {speed} and {latency}"
        else:
            text = f"Links between the devices (measured): {speed} and {latency}"
        console.print(text, style="yellow" if report.link_assumed else None)
    for layer in report.layers:
        console.print()
        console.print(_summary(layer, report))
        console.print(_table(layer), crop=False)


def _summary(layer: LayerOperators, report: OperatorReport) -> Text:
    samples = f"{report.samples} {'sample' if report.samples == 1 else 'samples'}"
    times = len(layer.layers)
    time = (
        f"[bold]{escape(layer.name)}[/bold], {times} {'layer' if times == 1 else 'layers'}: "
        f"[bold green]{seconds_text(layer.seconds)}[/bold green] for a microbatch of {samples}"
    )
    parts = (
        f"{seconds_text(layer.compute_s)} compute, {seconds_text(layer.communication_s)} communication; "
        f"one device takes {seconds_text(layer.one_device_s)}"
    )
    memory = (
        f"{bytes_text(layer.parameter_bytes)} of parameters on each device, of "
        f"{bytes_text(layer.one_device_parameter_bytes)}"
    )
    return Text("\n").join(map(styled, (time, parts, memory)))


def _table(layer: LayerOperators) -> WholeTable:
    """Return the operators in order. Rows between operators count the omitted operators, which only follow others."""
    arriving = _by_consumer(layer)
    rows, followers = list[tuple[str | None, ...]](), list[OperatorChoice]()

    def flush() -> None:
        if followers:
            strategies = ", ".join(dict.fromkeys(each.strategy for each in followers))
            time_s = sum(each.compute_s + each.communication_s for each in followers)
            more = translated(f"{len(followers)} more")
            rows.append((f"  [dim]({more})[/dim]", strategies, None, _time(time_s)))
            followers.clear()

    for operator in layer.operators:
        moves = arriving[operator.name]
        if moves:
            flush()
        rows += map(_move, moves)
        if operator.kind == "fork":
            continue
        if not (operator.kind in _SHOWN or operator.parameters or operator.fixed or operator.kind == "input"):
            followers.append(operator)
            continue
        flush()
        strategy = translated(f"{operator.strategy} (given)") if operator.fixed else operator.strategy
        time_s = operator.compute_s + operator.communication_s
        rows.append((escape(operator.name), strategy, escape(_parameters(operator)), _time(time_s)))
    flush()
    last = {each.name for each in layer.operators}
    for each in layer.redistributions:
        if each.consumer == "input" and each.producer in last and _moves(each):
            rows.append(_move(each))
    return WholeTable(
        ("operator", "strategy", "time", "parameters"), ((a, b, d, c) for a, b, c, d in rows), right=("time",)
    )


def _time(seconds: float) -> str | None:
    return seconds_text(seconds) if seconds else None


def _by_consumer(layer: LayerOperators) -> defaultdict[str, list[Redistribution]]:
    """Return the redistributions with a collective by consumer, without those of the layer's output."""
    found: defaultdict[str, list[Redistribution]] = defaultdict(list)
    for each in layer.redistributions:
        if _moves(each) and (each.consumer != "input" or not each.producer):
            found[each.consumer].append(each)
    return found


def _moves(each: Redistribution) -> bool:
    return each.collective is not None or each.gradient_collective is not None


def _move(each: Redistribution) -> tuple[str | None, ...]:
    back = translated(f"back: {each.gradient_collective or '-'}")
    return f"  [cyan]{each.collective or '-'}[/cyan]", None, back, seconds_text(each.seconds)


def _parameters(operator: OperatorChoice) -> str:
    parts = (f"{name.rpartition('.')[2]} {placement}" for name, placement in operator.parameters.items())
    return ", ".join(parts)


def dot_text(report: OperatorReport) -> str:
    """Return the graph of all operators in the language of Graphviz, coloured by strategy, with all collectives."""
    return "\n".join(["digraph operators {", "  node [shape=box, style=filled]", *_clusters(report), "}", ""])


def _clusters(report: OperatorReport) -> Iterator[str]:
    for place, layer in enumerate(report.layers):
        yield f"  subgraph cluster_{place} {{"
        yield f"    label={json.dumps(layer.name)}"
        labels = {
            (each.producer, each.consumer): f"{each.collective or '-'} / {each.gradient_collective or '-'}"
            for each in layer.redistributions
            if _moves(each)
        }
        for operator in layer.operators:
            name = json.dumps(f"{place}/{operator.name}")
            text = json.dumps(f"{operator.name}\n{operator.strategy}")
            yield f"    {name} [label={text}, fillcolor={_COLOURS.get(operator.strategy, 'white')}]"
            for source in operator.reads:
                label = labels.get((source, operator.name))
                shown = f" [label={json.dumps(label)}, color=blue]" if label else ""
                yield f"    {json.dumps(f'{place}/{source}')} -> {name}{shown}"
        yield "  }"
