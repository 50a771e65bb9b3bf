"""Prints one deployment, with the measured and predicted performance of each replica."""

from __future__ import annotations

from rich.markup import escape

from share_compute.lifecycle.deployment_status import LatencyStatus, ServingStatus
from share_compute.planning.plan import layer_span
from share_compute.quantities import bytes_text, percent_text, seconds_text
from share_compute_api.schemas.bodies import DeploymentStatus, DeploymentView
from share_compute_api.terminal.language import heading, translated
from share_compute_api.terminal.output import console, rate, since, state_text
from share_compute_api.terminal.tables import WholeTable


def replicas_text(view: DeploymentView) -> str:
    """Return the number of ready replicas and the requested number or range, such as ``1/2`` or ``1/0..4``."""
    ready = view.replicas.ready if view.replicas is not None else 0
    return f"{ready}/{view.spec.replicas}"


def print_card(view: DeploymentView, status: DeploymentStatus) -> None:
    """Print a deployment's state and, for each replica, its performance and stages."""
    console.print(f"[bold]{escape(view.name)}[/bold]  {view.id}  {state_text(view.state)}")
    console.print(escape(view.reason))
    console.print(
        f"[dim]deployed {since(view.created_at)}; window {_window(status)}; {view.spec.dtype}[/dim]"
    )
    if view.computation is not None:
        text = escape(translated(view.computation.sentence))
        console.print(f"{heading('computation')}  {text}", highlight=False)
    console.print(f"{heading('replicas')}  {replicas_text(view)}", highlight=False)
    if view.replicas is not None:
        more = [f"{view.replicas.wanted} wanted: {view.replicas.reason}"]
        more += ["1 keeps its machines and processes for the next request"] if view.replicas.standby else []
        more += [f"{view.replicas.draining} finish their requests and stop"] if view.replicas.draining else []
        more += [f"{view.replicas.waiting} requests wait for one"] if view.replicas.waiting else []
        console.print(f"[dim]{escape('; '.join(map(translated, more)))}[/dim]")
    for number, replica in enumerate(status.replicas, 1):
        console.print(
            f"\n[bold]{translated(f'replica {number}')}[/bold]  {state_text(replica.state)}  "
            f"{escape(translated(replica.reason))}",
        )
        console.print(_figures(replica), crop=False)
        if replica.stages:
            console.print(_stages(replica), crop=False)


def _window(status: DeploymentStatus) -> str:
    known = [one.window_tokens for one in status.replicas if one.window_tokens is not None]
    return translated(f"{known[0]} tokens" if known else "not known yet")


def _figures(replica: ServingStatus) -> WholeTable:
    queue = replica.queue
    batch = None if queue.batch_size is None else translated(f"{queue.batch_size:.1f} in a step")
    rows: list[tuple[str, str | None, str | None]] = [
        (translated("time to first token"), *_latency(replica.first_token)),
        (translated("inter-token latency"), *_latency(replica.next_token)),
        (heading("tokens/s"), rate(replica.tokens_per_s), rate(replica.predicted_tokens_per_s)),
        (heading("requests"), translated(f"{queue.running} running, {queue.queued} queued"), None),
        (translated("batch size"), batch, None),
    ]
    if queue.kv_tokens:
        used = percent_text(queue.kv_tokens_used / queue.kv_tokens)
        cached = percent_text(queue.kv_tokens_cached / queue.kv_tokens)
        text = translated(f"{used} of {queue.kv_tokens} tokens in use, {cached} kept")
        rows.append((heading("KV cache"), text, None))
    if replica.recoveries:
        text = str(replica.recoveries)
        if replica.last_gap_s is not None:
            text = translated(f"{replica.recoveries}, the last took {seconds_text(replica.last_gap_s)}")
        rows.append((heading("recoveries"), text, None))
    return WholeTable(("", "measured", "predicted"), rows)


def _latency(latency: LatencyStatus) -> tuple[str | None, str | None]:
    measured = None
    if latency.p50_s is not None and latency.p95_s is not None:
        measured = f"{seconds_text(latency.p50_s)} (95%: {seconds_text(latency.p95_s)})"
    return measured, None if latency.predicted_s is None else seconds_text(latency.predicted_s)


def _stages(replica: ServingStatus) -> WholeTable:
    rows = []
    for index, stage in enumerate(replica.stages, 1):
        name = escape(stage.name)
        if not stage.is_alive:
            name = translated(f"[red]{name} (unresponsive)[/red]")
        rows.append(
            (
                index,
                name,
                translated(layer_span(stage.start, stage.stop)),
                _share(stage.busy_fraction),
                _share(stage.predicted_busy_fraction),
                bytes_text(stage.resident_bytes) if stage.resident_bytes else None,
                bytes_text(stage.cache_bytes) if stage.resident_bytes else None,
            )
        )
    return WholeTable(("stage", "machine", "holds", "busy", "predicted", "memory", "of it caches"), rows)


def _share(fraction: float | None) -> str | None:
    return None if fraction is None else percent_text(fraction)
