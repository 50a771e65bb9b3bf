"""A machine that others cannot reach reports it before its Ray node starts, and gives up after three tries."""

from __future__ import annotations

import pytest

from share_compute.errors import ContributorLost, UserError
from share_compute_actors.machine.ports import PortRange
from share_compute_actors.machine.reach import closed_ports
from share_compute_api.agent import reachability
from share_compute_api.agent.reachability import judge, require_reachable
from share_compute_api.schemas.agents import SERVER, ClosedPorts, DialReport, DialRequest

PORTS = (27501, 27502, 27503)


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachability, "PAUSE_S", 0.0)


def report(*rows: tuple[str, tuple[int, ...]]) -> DialReport:
    return DialReport(
        closed=tuple(ClosedPorts(source=source, ports=ports) for source, ports in rows), nodes=()
    )


def test_what_the_server_or_all_others_cannot_reach_is_a_problem_in_one_sentence() -> None:
    judged = judge(report((SERVER, PORTS), ("ada", ())), "192.0.2.7")
    assert judged.problem == (
        "TCP ports of this machine (192.0.2.7) cannot be reached: 27501-27503 from the server"
    )
    judged = judge(report((SERVER, ()), ("ada", (27501,)), ("bob", (27501, 27503))), "192.0.2.7")
    assert judged.problem is not None
    assert "27501 from ada" in judged.problem
    assert "27501, 27503 from bob" in judged.problem


def test_what_one_machine_cannot_reach_is_a_warning() -> None:
    judged = judge(report((SERVER, ()), ("ada", PORTS), ("bob", ())), "192.0.2.7")
    assert judged.problem is None
    (warning,) = judged.warnings
    assert "ada cannot reach TCP ports 27501-27503" in warning
    assert judge(report((SERVER, ())), "192.0.2.7") == reachability.Reachability(None)


def three_of(free_ports: PortRange) -> tuple[int, ...]:
    return (free_ports.first + 1, free_ports.first + 2, free_ports.first + 3)


def test_a_machine_that_is_reached_listens_while_it_is_asked_for(free_ports: PortRange) -> None:
    def dial(wanted: DialRequest) -> DialReport:
        found = closed_ports(str(wanted.address), wanted.ports, bytes.fromhex(wanted.handshake))
        return report((SERVER, found))

    assert require_reachable(dial, "127.0.0.1", three_of(free_ports), free_ports, pytest.fail) == ()


def test_it_gives_up_after_three_tries_and_says_what_to_open(free_ports: PortRange) -> None:
    said: list[str] = []
    requests: list[DialRequest] = []
    ports = three_of(free_ports)

    def dial(wanted: DialRequest) -> DialReport:
        requests.append(wanted)
        return report((SERVER, ports))

    with pytest.raises(UserError, match=f"{ports[0]}-{ports[2]} from the server") as refused:
        require_reachable(dial, "127.0.0.1", ports, free_ports, said.append)
    assert (len(requests), len(said)) == (3, 2)
    assert len({one.handshake for one in requests}) == 3
    assert str(free_ports) in (refused.value.hint or "")
    assert "--address" in (refused.value.hint or "")


def test_a_port_that_was_taken_meanwhile_is_no_reason_to_give_up(free_ports: PortRange) -> None:
    ports = three_of(free_ports)

    def dial(_: DialRequest) -> DialReport:
        with pytest.raises(ContributorLost, match="taken"):
            require_reachable(dial, "127.0.0.1", ports, free_ports, pytest.fail)
        return report((SERVER, ()))

    assert require_reachable(dial, "127.0.0.1", ports, free_ports, pytest.fail) == ()
