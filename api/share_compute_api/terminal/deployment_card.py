"""Prints one deployment, with the measured and predicted performance of each replica."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from share_compute.lifecycle.deployment_status import LatencyStatus, ServingStatus
from share_compute.quantities import bytes_text, percent_text, seconds_text
from share_compute_api.schemas.bodies import DeploymentStatus, DeploymentView
from share_compute_api.terminal.output import console, rate, since, state_text

_NOTHING = "[dim]-[/dim]"


def replicas_text(view: DeploymentView) -> str:
    """Return the number of ready replicas and the requested number or range, such as ``1/2`` or ``1/0..4``."""
    ready = view.replicas.ready if view.replicas is not None else 0
    return f"{ready}/{view.spec.replicas}"


def print_card(view: DeploymentView, status: DeploymentStatus) -> None:
    """Print a deployment's state and, for each replica, its performance and stages."""
    console.print(f"[bold]{escape(view.name)}[/bold]  {view.id}  {state_text(view.state)}")
    console.print(escape(view.reason), soft_wrap=True)
    console.print(
        f"[dim]deployed {since(view.created_at)}; window {_window(status)}; {view.spec.dtype}[/dim]"
    )
    console.print(f"replicas  {replicas_text(view)}", highlight=False)
    if view.replicas is not None:
        more = [f"{view.replicas.wanted} wanted: {view.replicas.reason}"]
        more += ["1 keeps its machines and processes for the next request"] if view.replicas.standby else []
        more += [f"{view.replicas.leaving} finish their requests and stop"] if view.replicas.leaving else []
        more += [f"{view.replicas.waiting} requests wait for one"] if view.replicas.waiting else []
        console.print(f"[dim]{escape('; '.join(more))}[/dim]", soft_wrap=True)
    for number, replica in enumerate(status.replicas, 1):
        console.print(
            f"\n[bold]replica {number}[/bold]  {state_text(replica.state)}  {escape(replica.reason)}",
            soft_wrap=True,
        )
        console.print(_figures(replica))
        if replica.stages:
            console.print(_stages(replica))


def _window(status: DeploymentStatus) -> str:
    known = [one.window_tokens for one in status.replicas if one.window_tokens is not None]
    return f"{known[0]} tokens" if known else "not known yet"


def _figures(replica: ServingStatus) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("", "measured", "predicted"):
        table.add_column(column, no_wrap=True)
    queue = replica.queue
    table.add_row("time to first token", *_latency(replica.first_token))
    table.add_row("inter-token latency", *_latency(replica.next_token))
    table.add_row("tokens/s", rate(replica.tokens_per_s), rate(replica.predicted_tokens_per_s) or _NOTHING)
    table.add_row("requests", f"{queue.running} running, {queue.queued} queued", _NOTHING)
    batch = _NOTHING if queue.batch_size is None else f"{queue.batch_size:.1f} in a step"
    table.add_row("batch size", batch, _NOTHING)
    if queue.kv_tokens:
        used = f"{percent_text(queue.kv_tokens_used / queue.kv_tokens)} of {queue.kv_tokens} tokens"
        cached = percent_text(queue.kv_tokens_cached / queue.kv_tokens)
        table.add_row("KV cache", f"{used} in use, {cached} kept", _NOTHING)
    if replica.recoveries:
        gap = "" if replica.last_gap_s is None else f", the last took {seconds_text(replica.last_gap_s)}"
        table.add_row("recoveries", f"{replica.recoveries}{gap}", _NOTHING)
    return table


def _latency(latency: LatencyStatus) -> tuple[str, str]:
    measured = _NOTHING
    if latency.p50_s is not None and latency.p95_s is not None:
        measured = f"{seconds_text(latency.p50_s)} (95%: {seconds_text(latency.p95_s)})"
    return measured, _NOTHING if latency.predicted_s is None else seconds_text(latency.predicted_s)


def _stages(replica: ServingStatus) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("stage", "machine", "layers", "busy", "predicted", "memory", "of it caches"):
        table.add_column(column, no_wrap=True)
    for index, stage in enumerate(replica.stages):
        name = escape(stage.name) if stage.is_alive else f"[red]{escape(stage.name)} (unresponsive)[/red]"
        table.add_row(
            str(index),
            name,
            f"{stage.start}-{stage.stop - 1}",
            _share(stage.busy_fraction),
            _share(stage.predicted_busy_fraction),
            bytes_text(stage.resident_bytes) if stage.resident_bytes else _NOTHING,
            bytes_text(stage.cache_bytes) if stage.resident_bytes else _NOTHING,
        )
    return table


def _share(fraction: float | None) -> str:
    return _NOTHING if fraction is None else percent_text(fraction)
