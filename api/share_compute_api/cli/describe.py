"""Events as lines that people read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.markup import escape

from share_compute.planning.plan import layer_span
from share_compute.store.records import EventRecord
from share_compute_actors.sizes import format_bytes
from share_compute_api.cli.output import number, rate, state_text


def event_line(event: EventRecord) -> str:
    """Return one line of rich markup for an event, with its local time."""
    describe = _DESCRIPTIONS.get(event.kind)
    text = describe(event.data) if describe else escape(f"{event.kind}  {event.data}")
    return f"[dim]{event.at.astimezone():%H:%M:%S}[/dim]  {text}"


def _step(data: dict[str, Any]) -> str:
    return (
        f"step {data['step']}  loss {data['loss']:.4f}  "
        f"learning rate {number(data['learning_rate'], 3)}  {rate(data['tokens_per_s'])} tokens/s"
    )


def _validated(data: dict[str, Any]) -> str:
    names = ("loss", "accuracy", "perplexity")
    figures = [f"{name} {data[name]:.4g}" for name in names if data.get(name) is not None]
    return f"{data['split']} at step {data['step']}  " + "  ".join(figures)


def _note(data: dict[str, Any]) -> str:
    style = {"warning": "yellow", "error": "red"}.get(data["level"], "default")
    return f"[{style}]{escape(data['message'])}[/]"


_DESCRIPTIONS: dict[str, Callable[[dict[str, Any]], str]] = {
    "state": lambda data: f"{state_text(data['state'])}  {escape(data['reason'])}",
    "planned": lambda data: "planned  " + escape(placement(data["plan"])),
    "started": lambda data: f"started  steps {data['first_step']} to {data['total_steps']}",
    "step": _step,
    "validated": _validated,
    "checkpoint": lambda data: f"checkpoint at step {data['step']}  {format_bytes(data['size_bytes'])}",
    "artifact": lambda data: f"artifact {escape(data['name'])}  {format_bytes(data['size_bytes'])}",
    "note": _note,
    "ended": lambda data: f"the attempt {data['outcome']}: {escape(data['reason'])}",
    "cancel-requested": lambda _: "cancelling",
}


def placement(plan: dict[str, Any]) -> str:
    """Return which layers are on which machines, in one line."""
    pools = []
    for pool in plan["pools"]:
        names = " + ".join(member["name"] for member in pool["members"])
        pools.append(f"{layer_span(pool['start'], pool['stop'])}: {names}")
    idle = f"; idle: {', '.join(plan['idle'])}" if plan.get("idle") else ""
    return "; ".join(pools) + idle
