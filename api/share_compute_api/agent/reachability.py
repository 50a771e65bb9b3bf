"""Checks the connections between a machine, the server and other machines before the machine's Ray node starts."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address

from share_compute.errors import ContributorLost, UserError
from share_compute.quantities import listed
from share_compute_actors.machine.ports import PortRange, ports_text
from share_compute_actors.machine.reach import listening, unanswered
from share_compute_api.schemas.agents import DialReport, DialRequest

TRIES = 3
PAUSE_S = 1.0
"""Pause between two tries, in seconds."""


@dataclass(frozen=True, slots=True)
class Reachability:
    """The result of a reachability check, as sentences for the machine's owner."""

    problem: str | None
    """Reason why the machine cannot be used; None if it can."""
    warnings: tuple[str, ...] = ()


def judge(report: DialReport, address: str) -> Reachability:
    """Decide whether a machine can be used.

    It cannot be used if the server, or every other machine that tried, could not reach some of its ports.

    Args:
        report: the server's report about ports that the server and other machines could not reach.
        address: address of this machine, for the messages.
    """
    rows = [(row.source, row.ports) for row in report.closed if row.ports]
    server, *others = report.closed
    if rows and (server.ports or all(row.ports for row in others)):
        parts = [f"{ports_text(ports)} from {source}" for source, ports in rows]
        return Reachability(f"TCP ports of this machine ({address}) cannot be reached: {listed(parts)}")
    return Reachability(
        None,
        tuple(
            f"{source} cannot reach TCP ports {ports_text(ports)} of this machine ({address}); jobs are planned "
            "around that"
            for source, ports in rows
        ),
    )


def require_reachable(
    dial: Callable[[DialRequest], DialReport],
    address: str,
    ports: tuple[int, ...],
    port_range: PortRange,
    report: Callable[[str], None],
) -> tuple[str, ...]:
    """Check that the server and other machines can reach a node's ports, and that this machine can reach their nodes.

    Args:
        dial: sends the dial request to the server.
        address: IP address at which other machines reach this machine.
        ports: ports that the node will have.
        port_range: range of these ports, for the messages.
        report: called with the problem before each repeated try.

    Returns:
        Warnings for the owner.

    Raises:
        UserError: in each of `TRIES` tries, the server or all other machines could not reach some port.
        ContributorLost: another program took a port meanwhile.
    """
    problem = ""
    for attempt in range(1, TRIES + 1):
        handshake = secrets.token_bytes(16)
        try:
            with listening(address, ports, handshake):
                found = dial(DialRequest(address=ip_address(address), ports=ports, handshake=handshake.hex()))
        except OSError as failure:
            raise ContributorLost(
                f"a TCP port of this machine was taken: {failure}", hint="it tries other ports"
            ) from failure
        judged = judge(found, address)
        if judged.problem is None:
            return (*judged.warnings, *_unreached(found))
        problem = judged.problem
        if attempt < TRIES:
            report(f"{problem}; trying again")
            time.sleep(PAUSE_S)
    raise UserError(
        problem,
        hint=f"open TCP ports {port_range} of this machine to the server and the other machines; behind NAT, connect "
        "the machines by an overlay network (such as WireGuard), and give this one's address there with --address",
    )


def _unreached(report: DialReport) -> list[str]:
    unresponsive = unanswered({(node.address, node.port) for node in report.nodes})
    return [
        f"{node.name} ({node.address}, TCP port {node.port}) cannot be reached from here; jobs are planned around that"
        for node in report.nodes
        if (node.address, node.port) in unresponsive
    ]
