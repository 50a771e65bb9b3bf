"""Formats the causes of a step's or a request's duration as text."""

from __future__ import annotations

from collections.abc import Sequence

from share_compute.planning.cost.tables import CostTables
from share_compute.planning.plan import CauseKind
from share_compute.quantities import flops_text, listed, rate_text, seconds_text


def worded(tables: CostTables, kind: CauseKind, machines: Sequence[int]) -> tuple[str, str]:
    """Return (names of the machines involved, the cause as a sentence).

    Args:
        tables: the machines and their links.
        kind: kind of the cause.
        machines: indices of the machine, of the two ends of the link, or of the machines that sum gradients.
    """
    where = listed([tables.topology.contributors[machine].name for machine in machines])
    match kind:
        case "compute":
            return where, f"{where} computes at {speed_text(tables, machines[0])}"
        case "memory":
            return where, f"{where} reads its weights from memory at {memory_text(tables, machines[0])}"
        case "link":
            rate = rate_text(tables.network.link(machines[0], machines[1])[1])
            return where, f"the link between {where} carries {rate}"
        case "latency":
            latency = seconds_text(tables.network.link(machines[0], machines[1])[0])
            return where, f"a message between {where} takes {latency}"
        case "synchronisation":
            return where, f"{where} sum their gradients in each step"


def blamed(tables: CostTables, kind: CauseKind, machines: Sequence[int], machine: int) -> str:
    """Return a cause as a clause about one machine ("it computes at ...").

    Args:
        tables: the machines and their links.
        kind: kind of the cause.
        machines: indices of all machines involved.
        machine: index of the machine that the clause is about.
    """
    others = [other for other in machines if other != machine]
    names = listed([tables.topology.contributors[other].name for other in others])
    match kind:
        case "compute":
            return f"it computes at {speed_text(tables, machine)}"
        case "memory":
            return f"it reads weights from memory at {memory_text(tables, machine)}"
        case "link":
            return f"its link to {names} carries {rate_text(tables.network.link(machine, others[0])[1])}"
        case "latency":
            return f"a message to {names} takes {seconds_text(tables.network.link(machine, others[0])[0])}"
        case "synchronisation":
            return f"it would have to sum gradients with {names} in each step"


def speed_text(tables: CostTables, machine: int) -> str:
    """Return the measured float32 speed of a machine as text, whatever the dtype of the job."""
    return flops_text(tables.topology.contributors[machine].flops_per_s())


def devices_text(tables: CostTables, machine: int) -> list[str]:
    """Return text about how many of the devices lent together a member uses; empty for one device."""
    contributor = tables.topology.contributors[machine]
    if len(contributor.group) < 2:
        return []
    return [f"on {len(contributor.used)} of its {len(contributor.group)} devices"]


def memory_text(tables: CostTables, machine: int) -> str:
    """Return the measured memory bandwidth of a machine as text."""
    return rate_text(tables.topology.contributors[machine].memory_bytes_per_s)
