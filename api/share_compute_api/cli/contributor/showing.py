"""Shows the state of a joined machine to its owner: as a table, as dated lines, or as JSON."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from share_compute_api.terminal.language import heading, translated
from share_compute_api.terminal.output import console, duration

if TYPE_CHECKING:
    from share_compute.lifecycle.work import WorkSums
    from share_compute_api.agent.agent import AgentStatus
    from share_compute_api.schemas.agents import ContributorWork, MachineLimits
    from share_compute_api.schemas.utilization import Utilization


class JsonLines:
    """Prints a JSON line for each change of a machine's state."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, view: AgentStatus) -> None:
        """Print the state of a machine if it differs from the last printed state."""
        work = view.work.model_dump(mode="json", exclude={"contributed"}) if view.work else None
        utilization = view.utilization.model_dump(mode="json") if view.utilization else None
        contributed = view.contributed.model_dump(mode="json") if view.contributed else None
        line = json.dumps(
            {
                "name": view.name,
                "contributor_id": view.contributor_id,
                "phase": view.phase,
                "work": work,
                "utilization": utilization,
                "contributed": contributed,
                "warnings": view.warnings,
            }
        )
        if line != self._last:
            print(line, flush=True)
        self._last = line


class ChangeLines:
    """Prints a line with date and time for each change of a machine's state, its work or its warnings."""

    def __init__(self) -> None:
        self._last: dict[str, str] = {}

    def __call__(self, view: AgentStatus) -> None:
        """Print the state of a machine if it differs from the last one."""
        work = view.work
        holds = f"; holds {work.shard} of {_holder(work)}" if work and work.shard else ""
        warnings = "".join(translated(f"; warning: {warning}") for warning in view.warnings)
        line = f"{view.name}  {_label(view.phase)}{translated(holds)}{warnings}"
        if self._last.get(view.name) != line:
            self._last[view.name] = line
            now = datetime.now().astimezone()
            if _has_left(view.phase) or (view.contributed and view.contributed.this_stay.seconds):
                line += "".join(f"; {label}: {text}" for label, text in _contributed(view))
            console.print(f"{now:%Y-%m-%d %H:%M:%S}  {line}", markup=False, soft_wrap=True)


def lent_text(lent: MachineLimits) -> str:
    """Return the lent resources in one line."""
    from share_compute.device_kinds import KINDS
    from share_compute.quantities import bytes_text, rate_text

    kind = KINDS[lent.device]
    parts = [
        f"{bytes_text(lent.memory_bytes)} of memory",
        f"{lent.cpu_threads} of {lent.host_threads} CPU threads",
        f"{lent.devices} {kind.label}{'s' if lent.devices > 1 else ''}" if kind.is_gpu else "",
        f"sends at most {rate_text(lent.upload_bytes_per_s)}" if lent.upload_bytes_per_s else "",
        f"receives at most {rate_text(lent.download_bytes_per_s)}" if lent.download_bytes_per_s else "",
    ]
    return "  ".join(translated(part) for part in parts if part)


def utilization_rows(used: Utilization | None) -> list[tuple[str, str]]:
    """Return the utilization by share-compute and by all programs of the machine, as labels and texts.

    Figures without a sensor are left out.
    """
    from share_compute.quantities import bytes_text, percent_text, rate_text

    if used is None:
        return []
    own = (("CPU", used.cpu_fraction, percent_text), ("memory", used.memory_bytes, bytes_text))
    whole = (
        ("CPU", used.host_cpu_fraction, percent_text),
        ("GPU", used.gpu_fraction, percent_text),
        ("GPU memory", used.gpu_memory_bytes, bytes_text),
        ("temperature", used.cpu_celsius, _celsius),
        ("GPU temperature", used.gpu_celsius, _celsius),
        ("sends", used.sent_bytes_per_s, rate_text),
        ("receives", used.received_bytes_per_s, rate_text),
    )
    rows = (("share-compute", own), ("all programs", whole))
    texts = [
        (label, [f"{_label(name)} {text(value)}" for name, value, text in parts if value is not None])
        for label, parts in rows
    ]
    return [(label, "  ".join(figures)) for label, figures in texts if figures]


def contribution_text(work: WorkSums) -> str:
    """Return sums of work in one line."""
    time = f"{duration(work.seconds)} of work"
    if work.steps == 0:
        return translated(time if work.seconds else "nothing yet")
    if work.steps == 1:
        return translated(f"1 step, {work.samples:,} samples, in {time}")
    return translated(f"{work.steps:,} steps, {work.samples:,} samples, in {time}")


def _contributed(view: AgentStatus) -> list[tuple[str, str]]:
    """Return the label and the text of a machine's work since it joined, and in all stays if it joined before."""
    done = view.contributed
    if done is None:
        return []
    rows = [(heading("contributed"), contribution_text(done.this_stay))]
    if done.in_all != done.this_stay:
        rows.append((translated("in all stays"), contribution_text(done.in_all)))
    return rows


def _celsius(degrees: float) -> str:
    return f"{degrees:.0f} °C"


def _holder(work: ContributorWork) -> str:
    """Return the name of the deployment, or the name and the id of the job, that a machine works for."""
    if work.job is None:
        return work.deployment or ""
    return f"{work.job_name} ({work.job})" if work.job_name else work.job


def _measured(work: ContributorWork | None) -> str:
    """Return the measured speed of a machine, and its link to the server."""
    from share_compute.quantities import flops_text, rate_text, seconds_text

    if work is None or not work.flops_per_s:
        return "-"
    link = ""
    if work.head_latency_s is not None and work.head_bytes_per_s is not None:
        link = f"; to the server {seconds_text(work.head_latency_s)}, {rate_text(work.head_bytes_per_s)}"
    return f"{flops_text(work.flops_per_s)}{link}"


def _about_keys(phase: str) -> str:
    """Return text about the effect of Ctrl-C in a phase of the agent."""
    if phase.startswith("draining"):
        return "Ctrl-C ends at once"
    return "" if _has_left(phase) else "Ctrl-C leaves"


def _label(name: str) -> str:
    """Return a label of one or several words, or a phase, in the language of the terminal."""
    return translated(name) if " " in name else heading(name)


def _has_left(phase: str) -> bool:
    return phase.startswith("left")


def agent_table(view: AgentStatus) -> Table:
    """Return the table that shows the state of an agent to the machine's owner."""
    minutes, seconds = divmod(int((datetime.now(UTC) - view.since).total_seconds()), 60)
    table = Table.grid(padding=(0, 2))
    for label, value in (
        ("machine", f"[bold]{escape(view.name)}[/] {escape(view.contributor_id or '')}"),
        ("server", escape(view.url)),
        ("state", escape(_label(view.phase))),
        *([] if view.lent is None else [("lends", lent_text(view.lent))]),
        # After the machine has left, the table is a summary.
        *([] if _has_left(view.phase) else _present_work(view)),
        *_contributed(view),
        ("running for", f"{minutes} min {seconds:02d} s"),
        *(("warning", f"[yellow]{escape(translated(warning))}[/]") for warning in view.warnings),
        ("", f"[dim]{translated(_about_keys(view.phase))}[/]"),
    ):
        table.add_row(f"[dim]{_label(label)}[/]", translated(value))
    return table


def _present_work(view: AgentStatus) -> list[tuple[str, str]]:
    """Return labels and texts about a machine's present work."""
    work = view.work
    speed = f"{work.tokens_per_s:,.0f} tokens/s" if work and work.tokens_per_s else "-"
    return [
        ("holds", escape(f"{work.shard} of {_holder(work)}") if work and work.shard else "-"),
        ("job's speed", speed),
        ("this machine", _measured(work)),
        *utilization_rows(view.utilization),
    ]
