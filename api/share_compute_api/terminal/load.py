"""Shows the load of a cluster: tables for a terminal, and one line for each change for a pipe."""

from __future__ import annotations

from collections import Counter

from rich.console import Console, Group
from rich.markup import escape
from rich.text import Text

from share_compute.planning.plan import layer_span
from share_compute.quantities import bytes_text, percent_text, rate_text
from share_compute_api.client.load import ClusterLoad, DeploymentLoad, JobLoad, MachineLoad
from share_compute_api.schemas.utilization import UtilizationSample
from share_compute_api.terminal.language import heading, translated
from share_compute_api.terminal.output import duration, machine_state, number, part_text, speed, state_text
from share_compute_api.terminal.picture import Ink
from share_compute_api.terminal.tables import WholeTable

_BAR_COLUMNS = 8


def load_tables(load: ClusterLoad, console: Console) -> Group:
    """Return the machines, jobs and deployments of a cluster as tables."""
    ink = Ink.of(console)
    parts: list[Text | WholeTable] = [_title(load)]
    if load.machines:
        columns = (
            "machine",
            "state",
            "busy",
            "memory",
            "temperature",
            "sent",
            "received",
            "work",
            "holds",
            "reason",
        )
        rows = (_machine(one, ink) for one in load.machines)
        parts += [Text(), WholeTable(columns, rows, right=("memory", "temperature", "sent", "received"))]
    if load.jobs:
        job_columns = ("job", "state", "done", "loss", "speed", "left", "name", "reason")
        parts += [
            Text(),
            WholeTable(job_columns, map(_job, load.jobs), right=("done", "loss", "speed", "left")),
        ]
    if load.deployments:
        names = ("deployment", "state", "replicas", "speed", "running", "queued", "KV cache", "reason")
        right = ("replicas", "speed", "running", "queued", "KV cache")
        parts += [Text(), WholeTable(names, map(_deployment, load.deployments), right=right)]
    return Group(*parts)


def _title(load: ClusterLoad) -> Text:
    states = Counter(_state(one) for one in load.machines)
    machines = ", ".join(f"{count} {translated(state)}" for state, count in states.items()) or heading("none")
    at = f"{load.at.astimezone():%Y-%m-%d %H:%M:%S}"
    return Text.assemble((load.url, "bold"), f"  {at}  {heading('machines')}: {machines}")


def _state(machine: MachineLoad) -> str:
    return machine_state(machine.state, is_leased=machine.work is not None)


def _machine(machine: MachineLoad, ink: Ink) -> tuple[str | None, ...]:
    busy = machine.busy_fraction
    full = 0 if busy is None else round(_BAR_COLUMNS * busy)
    bar = f"[cyan]{ink.block * full}[/][dim]{ink.idle * (_BAR_COLUMNS - full)}[/]"
    is_held = machine.start is not None and machine.stop is not None
    return (
        escape(machine.name),
        state_text(_state(machine)),
        None if busy is None else f"{bar} {percent_text(busy):>4}",
        part_text(_bytes(machine.memory_bytes), bytes_text(machine.lent_bytes)),
        _temperature(machine.utilization),
        None if machine.sent_bytes_per_s is None else rate_text(machine.sent_bytes_per_s),
        None if machine.received_bytes_per_s is None else rate_text(machine.received_bytes_per_s),
        None if machine.work is None else escape(machine.work),
        translated(layer_span(machine.start or 0, machine.stop or 0)) if is_held else None,
        None if machine.state == "ready" else escape(machine.reason),
    )


def _temperature(used: UtilizationSample | None) -> str | None:
    """Return the temperature of the hottest sensor; None without a sensor."""
    found = [] if used is None else [one for one in (used.cpu_celsius, used.gpu_celsius) if one is not None]
    return f"{max(found):.0f} °C" if found else None


def _bytes(size: int | None) -> str:
    return "-" if size is None else bytes_text(size)


def _job(job: JobLoad) -> tuple[str | None, ...]:
    done = f"{job.done}/{job.total}" + ("" if job.unit == "steps" else f" {heading(job.unit)}")
    return (
        job.id,
        state_text(job.state),
        done if job.total else None,
        number(job.loss),
        speed(job.per_s, of_tokens=job.is_tokens),
        None if job.left_s is None else duration(job.left_s),
        escape(job.name),
        escape(job.reason) if job.state != "running" else None,
    )


def _deployment(deployment: DeploymentLoad) -> tuple[str | None, ...]:
    used = deployment.kv_fraction
    return (
        escape(deployment.name),
        state_text(deployment.state),
        f"{deployment.ready}/{deployment.wanted}",
        speed(deployment.tokens_per_s, of_tokens=True),
        str(deployment.running),
        str(deployment.queued),
        None if used is None else percent_text(used),
        escape(deployment.reason) if deployment.state != "ready" else None,
    )


def changes(before: ClusterLoad | None, load: ClusterLoad) -> list[str]:
    """Return a line for each machine, job and deployment that is new, gone or changed, with date and time.

    Args:
        before: the previous load; None at the beginning.
        load: the present load.
    """
    old = {} if before is None else _lines(before)
    new = _lines(load)
    at = f"{load.at.astimezone():%Y-%m-%d %H:%M:%S}"
    gone = [f"{at}  {key}  {heading('gone')}" for key in old if key not in new]
    return gone + [f"{at}  {key}  {line}" for key, line in new.items() if old.get(key) != line]


def _lines(load: ClusterLoad) -> dict[str, str]:
    """Return {kind and name: facts} of the machines, jobs and deployments, as plain text."""
    ink = Ink("", "", "", "", "", "", "")
    machines = {
        f"{heading('machine')} {one.name}": _facts(
            ("", "busy", "memory", "", "sent", "received", "work", "", ""), _machine(one, ink)[1:]
        )
        for one in load.machines
    }
    jobs = {
        f"{heading('job')} {one.id}": _facts(("", "done", "loss", "speed", "left", "", ""), _job(one)[1:])
        for one in load.jobs
    }
    deployments = {
        f"{heading('deployment')} {one.name}": _facts(
            ("", "replicas", "speed", "running", "queued", "KV cache", ""), _deployment(one)[1:]
        )
        for one in load.deployments
    }
    return machines | jobs | deployments


def _facts(names: tuple[str, ...], cells: tuple[str | None, ...]) -> str:
    parts = [
        " ".join(filter(None, (name and heading(name), " ".join(Text.from_markup(cell).plain.split()))))
        for name, cell in zip(names, cells, strict=True)
        if cell is not None
    ]
    return "  ".join(parts)
