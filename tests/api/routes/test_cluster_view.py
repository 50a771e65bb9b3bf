"""The overview of the cluster over REST: islands, rows, and the work of single machines."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest

from share_compute.lifecycle.states import ContributorState
from share_compute.simulation.fleet_name import FleetName
from share_compute.simulation.fleets import make_fleet
from share_compute.store import Store
from share_compute.topology import HEAD, Device, Link
from share_compute_api.control.machines.islands import islands_of


def ready(store: Store, name: str, links: list[tuple[str, float, float]]) -> str:
    """Let a machine join with these measured links, as (other end, latency in s, bytes/s)."""
    code = store.invites.create(label=f"owner of {name}")[1]
    machine = store.contributors.join(code, name=name, host="h", versions={}, limits={})[0].id
    store.contributors.online(machine, node_id="ab", address=f"192.0.2.{name}")
    found = [Link(machine, other, latency_s, rate) for other, latency_s, rate in links]
    store.contributors.ready(machine, capacity=[Device("cpu", "", 2**30, {"float32": 1e10})], links=found)
    return machine


def two_islands(store: Store) -> list[str]:
    """Four machines join: two and two, far from one another."""
    found: list[str] = []
    for place in range(4):
        far = place >= 2
        links = [(HEAD, 0.03, 4e6) if far else (HEAD, 0.0002, 1.2e9)]
        links += [
            (other, 0.0006, 1e9) if (index >= 2) == far else (other, 0.03, 4e6)
            for index, other in enumerate(found)
        ]
        found.append(ready(store, str(place + 1), links))
    return found


def test_the_cluster_shows_islands_and_what_is_between_them(plane: Any, http: httpx.Client) -> None:
    one, two, three, four = two_islands(plane.store)
    view = http.get("/cluster").json()
    assert [machine["id"] for machine in view["machines"]] == [one, two, three, four]
    assert view["machines"][0]["owner"] == "owner of 1"
    islands = view["islands"]
    assert [island["machines"] for island in islands["islands"]] == [[one, two], [three, four]]
    assert islands["islands"][0]["bytes_per_s"] == 1e9
    assert islands["links"] == [{"one": one, "other": three, "latency_s": 0.03, "bytes_per_s": 4e6}]
    assert (islands["is_current"], islands["is_assumed"]) == (True, False)
    some = http.get("/cluster", params={"machine": [three]}).json()
    assert [machine["id"] for machine in some["machines"]] == [three]
    assert some["islands"] == islands
    plane.store.contributors.remove(one)
    plane.store.contributors.set_state(
        plane.store.contributors.get(one), ContributorState.left, "it handed over"
    )
    after = http.get("/cluster").json()["islands"]["islands"]
    assert [island["machines"] for island in after] == [[two], [three, four]]


def test_an_empty_cluster_has_no_islands(http: httpx.Client) -> None:
    view = http.get("/cluster").json()
    assert (view["machines"], view["islands"]["islands"], view["islands"]["is_current"]) == ([], [], True)


@pytest.mark.slow
def test_islands_of_many_machines_are_worked_out_beside_the_answers(plane: Any, http: httpx.Client) -> None:
    for place in range(160):
        ready(plane.store, str(place), [(HEAD, 0.001, 1e8)])
    assert http.get("/cluster").json()["islands"]["is_current"] is True
    ready(plane.store, "one-more", [(HEAD, 0.001, 1e8)])
    assert http.get("/cluster").json()["islands"]["is_current"] is False
    deadline = time.monotonic() + 60
    while not (islands := http.get("/cluster").json()["islands"])["is_current"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert sum(len(island["machines"]) for island in islands["islands"]) == 161


@pytest.mark.parametrize("fleet", [FleetName.mixed, FleetName.home])
def test_every_machine_is_in_one_island_and_links_join_all(store: Store, fleet: FleetName) -> None:
    made = make_fleet(fleet, 40)
    ids = {HEAD: HEAD}
    for place, machine in enumerate(made.contributors):
        own = [link for link in made.links if machine.id in (link.source, link.target)]
        ends = [(link.target if link.source == machine.id else link.source, link) for link in own]
        known = [(ids[end], link.latency_s, link.bytes_per_s) for end, link in ends if end in ids]
        ids[machine.id] = ready(store, str(place), known)
    found = islands_of(store.contributors.list())
    placed = [machine for island in found.islands for machine in island.machines]
    assert sorted(placed) == sorted(machine for machine in ids.values() if machine != HEAD)
    reached = {found.islands[0].id}
    for _ in found.islands:
        reached |= {
            end for link in found.links if {link.one, link.other} & reached for end in (link.one, link.other)
        }
    assert reached == {island.id for island in found.islands}


def test_the_history_and_the_work_of_a_machine_are_returned(plane: Any, http: httpx.Client) -> None:
    machine = ready(plane.store, "1", [])
    page = http.get(f"/contributors/{machine}/events", params={"limit": 2}).json()
    assert [event["data"]["state"] for event in page["events"]] == ["joining", "probing"]
    rest = http.get(f"/contributors/{machine}/events", params={"after": page["next_after"]}).json()
    assert [event["data"]["state"] for event in rest["events"]] == ["ready"]
    shown = http.get(f"/contributors/{machine}").json()
    assert (shown["owner"], shown["held"], shown["state"]) == ("owner of 1", None, "ready")
    assert http.get(f"/contributors/{machine}/work").json()["periods"] == []
    assert http.get(f"/contributors/{machine}/busy").json() == {"measured": []}
    for path in ("events", "work", "busy"):
        assert http.get(f"/contributors/con-none/{path}").status_code == 404
