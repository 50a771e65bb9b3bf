"""Members that exchange tensors must be able to reach each other."""

from __future__ import annotations

from typing import Any

import pytest

from share_compute.protocol.membership import Membership, fresh
from share_compute.topology import Contributor, Topology
from share_compute_actors.machine.reach import Place
from share_compute_actors.training.membership.cuts import LinksCut, needed, require_links

PAIR = ("b", "c")


def membership(*stages: str, **more: Any) -> Membership:
    members = tuple(tuple(stage) for stage in stages)
    owners = tuple((stage[0],) for stage in members)
    shards = tuple((place, place + 1) for place in range(len(stages)))
    return Membership(
        epoch=1, shards=shards, stages=members, owners=owners, step=1, tasks=fresh(owners), **more
    )


class Handle:
    """A member that reports which members it cannot reach, and records the members it was asked about."""

    def __init__(self, *unresponsive: str) -> None:
        self.unreached = self
        self.unresponsive = unresponsive
        self.checked: dict[str, Place] = {}

    def remote(self, places: dict[str, Place]) -> tuple[str, ...]:
        self.checked = dict(places)
        return self.unresponsive


class Crew:
    """Members, each on a host of its own."""

    def __init__(self, **handles: Handle) -> None:
        self.handles = handles
        self.workers = frozenset(handles)
        self.was_cut = False
        self.topology = Topology(tuple(Contributor(name, name.upper(), (), node_id=name) for name in handles))

    def nodes(self) -> dict[str, Place]:
        return {name: (f"host-{name}", 1) for name in self.handles}

    def handle(self, worker: str) -> Handle:
        return self.handles[worker]

    def name(self, worker: str) -> str:
        return worker.upper()

    def gather(self, _schema: Any, calls: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        return calls


@pytest.mark.parametrize(
    ("formed", "pairs"),
    [
        (membership("a", "b", "c"), {("a", "b"), ("b", "c")}),
        (membership("ab", "c"), {("a", "b"), ("a", "c"), ("b", "c")}),
        (membership("a", "b", "c", is_tied=True), {("a", "b"), ("b", "c"), ("a", "c")}),
        (
            membership("a", "b", backups={"b": "d"}, followers={"a": ("e",)}),
            {("a", "b"), ("b", "d"), ("a", "e")},
        ),
        (membership("a"), set()),
        (membership("a", is_tied=True), set()),
    ],
)
def test_neighbours_and_holders_of_copies_need_each_other(
    formed: Membership, pairs: set[tuple[str, str]]
) -> None:
    assert needed(formed) == pairs


@pytest.mark.parametrize("unresponsive", [{"b": "c"}, {"c": "b"}, {"b": "c", "c": "b"}])
def test_a_cut_pair_is_named_whichever_of_them_finds_it(unresponsive: dict[str, str]) -> None:
    group: Any = Crew(**{name: Handle(*unresponsive.get(name, "")) for name in "abc"})
    with pytest.raises(LinksCut, match=r"do not reach each other any more: B - C$") as caught:
        require_links(group, membership("a", "b", "c"))
    assert caught.value.pairs == (PAIR,)
    assert group.handles["a"].checked == {"b": ("host-b", 1)}, "it needs nobody else"


def test_answers_from_a_cut_of_the_servers_network_do_not_count() -> None:
    group: Any = Crew(a=Handle("b"), b=Handle("a"), c=Handle())
    group.was_cut = True
    require_links(group, membership("a", "b", "c"))


def test_who_is_not_needed_may_be_cut_off() -> None:
    group: Any = Crew(a=Handle("c"), b=Handle(), c=Handle("a"))
    require_links(group, membership("a", "b", "c"))
