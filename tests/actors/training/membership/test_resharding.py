"""Members load their shards from members that they can reach, as long as there are any; without Ray."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from share_compute.errors import ContributorLost
from share_compute.protocol.coordinator import PlanMembership
from share_compute.protocol.membership import Membership, ShardPart, fresh
from share_compute.protocol.messages import Report
from share_compute.shards import Shard
from share_compute.topology import Topology
from share_compute.training.shares import WHOLE, OptimizerShare
from share_compute_actors.messages import Source, Sources, server_source
from share_compute_actors.training.membership.resharder import Resharder

COMMITTED = 3
LAYERS = 6
Range = tuple[int, int]


class Crew:
    """Members with their shards and complete backup copies; records from where each member loads each layer."""

    def __init__(self, held: Mapping[str, Range], copies: Mapping[str, Range], joining: str) -> None:
        self.held = held
        self.copies = copies
        self.workers = frozenset({*held, *copies, *joining})
        self.topology = Topology(())
        self.beginning = Sources((server_source(None),))
        self.loaded: dict[str, list[str]] = {}

    def handle(self, worker: str) -> Any:
        return SimpleNamespace(
            bring_to=SimpleNamespace(remote=lambda part, *_: self.copies.get(worker) == part[:2])
        )

    def gather(self, _schema: Any, calls: dict[str, Any]) -> dict[str, Any]:
        return calls

    def ask(self, _schema: Any, workers: Sequence[str], method: str, *arguments: Any) -> dict[str, Any]:
        if method == "holding":
            return {worker: ShardPart(*self.held[worker]) for worker in workers if worker in self.held}
        return {worker: getattr(self.handle(worker), method).remote(*arguments) for worker in workers}

    def source(self, worker: str, copy: Range | None = None) -> Source:
        return Source(None, worker, worker, None if copy is None else ShardPart(*copy))

    def inventory(self, holders: Sequence[Source]) -> Sources:
        places: dict[str, int] = {}
        for place, holder in enumerate(holders):
            for layer in range(*(holder.shard or self.held[holder.name])[:2]):
                places.setdefault(str(layer), place)
        return Sources(tuple(holders), places)

    def load_shards(
        self,
        shards: Mapping[str, Shard],
        shares: Mapping[str, OptimizerShare],
        sources: Callable[[str], Sources | None],
        applied: int,
    ) -> None:
        assert applied == COMMITTED
        assert set(shares.values()) == {WHOLE}
        for worker, shard in shards.items():
            known = sources(worker)
            assert known is not None
            self.loaded[worker] = [
                f"{source.name}'s copy" if source.shard else source.name
                for source in (known.all[known.place(str(layer))] for layer in range(shard.start, shard.stop))
            ]


def load(crew: Any, receivers: str, cut_off: Sequence[str], first_step: int = 1) -> dict[str, list[str]]:
    """Have the receivers load all layers of a model of two stages; return the names of each layer's sources."""
    stages = (("a", "b"), ("c",))
    owners = tuple((stage[0],) * 4 for stage in stages)
    before = Membership(1, ((0, 4), (4, LAYERS)), stages, owners, COMMITTED + 1, fresh(owners))
    reports = {worker: Report(1, worker, COMMITTED) for worker in crew.workers}
    members = [SimpleNamespace(contributor_id=worker) for worker in receivers]
    plan: Any = SimpleNamespace(
        stages=[SimpleNamespace(members=members)], shard=lambda _: Shard("m", 0, LAYERS, LAYERS)
    )
    request = PlanMembership(2, COMMITTED, 1.0, reports)
    pairs = [(pair[0], pair[1]) for pair in cut_off]
    assert Resharder(crew, first_step).load(before, plan, request, {}, cut_off=pairs) == set(receivers)
    found: dict[str, list[str]] = crew.loaded
    return found


HELD = {"a": (0, 4), "b": (0, 4), "c": (4, 6)}


def test_a_member_loads_from_another_holder_if_its_link_to_the_first_is_dead() -> None:
    near = [*["a"] * 4, "c", "c"]
    assert load(Crew(HELD, {}, "de"), "de", []) == {"d": near, "e": near}
    assert load(Crew(HELD, {}, "de"), "de", ["ad"]) == {"d": [*["b"] * 4, "c", "c"], "e": near}
    assert load(Crew(HELD, {}, "de"), "de", ["ab", "bd"]) == {"d": near, "e": near}


def test_a_reachable_copy_comes_before_an_unreachable_holder() -> None:
    crew = Crew(HELD, {"d": (4, 6), "f": (4, 6)}, "e")
    found = load(crew, "eg", ["ce", "de", "bg"])
    assert found == {"e": [*["a"] * 4, *["f's copy"] * 2], "g": [*["a"] * 4, "c", "c"]}


@pytest.mark.parametrize("copies", [{}, {"f": (4, 6)}])
def test_layers_without_a_reachable_source_come_over_a_dead_link(copies: dict[str, Range]) -> None:
    found = load(Crew(HELD, copies, "e"), "e", ["ae", "be", "ce", "ef"])
    assert found == {"e": [*["a"] * 4, "c", "c"]}
    held = {worker: HELD[worker] for worker in "ab"}
    if copies:
        found = load(Crew(held, copies, "e"), "e", ["ae", "ef"])
        assert found == {"e": [*["b"] * 4, *["f's copy"] * 2]}
    else:
        with pytest.raises(ContributorLost, match="machines were lost: c"):
            load(Crew(held, copies, "e"), "e", ["ae"])


def test_the_shard_store_comes_before_a_dead_link() -> None:
    found = load(Crew(HELD, {}, "de"), "de", ["ce"], first_step=COMMITTED + 1)
    assert found == {"d": [*["a"] * 4, "c", "c"], "e": ["the server"] * LAYERS}


class SharedCrew(Crew):
    """Members of one stage with shares; records the names of the sources that each member loads from."""

    def __init__(self, held: Mapping[str, ShardPart], copies: Mapping[str, ShardPart]) -> None:
        super().__init__({}, {}, "")
        self.parts, self.kept = held, copies
        self.workers = frozenset(held)
        self.sources: dict[str, list[str]] = {}

    def handle(self, worker: str) -> Any:
        return SimpleNamespace(
            bring_to=SimpleNamespace(remote=lambda part, *_: self.kept.get(worker) == part)
        )

    def ask(self, schema: Any, workers: Sequence[str], method: str, *arguments: Any) -> dict[str, Any]:
        if method == "holding":
            return {worker: self.parts[worker] for worker in workers}
        return super().ask(schema, workers, method, *arguments)

    def inventory(self, holders: Sequence[Source]) -> Sources:
        return Sources(tuple(holders))

    def load_shards(
        self,
        shards: Mapping[str, Shard],
        shares: Mapping[str, OptimizerShare],
        sources: Callable[[str], Sources | None],
        applied: int,
    ) -> None:
        assert applied == COMMITTED
        assert shares == {worker: OptimizerShare(number, len(shards)) for number, worker in enumerate(shards)}
        for worker in shards:
            known = sources(worker)
            assert known is not None
            self.sources[worker] = [
                f"{one.name}'s copy of {one.shard.number}" if one.shard else one.name for one in known.all
            ]


def reshare(crew: Any, before: str, after: str, first_step: int = 1) -> dict[str, list[str]]:
    """Have the members of a stage load new shares; return the names of each member's sources."""
    membership = Membership(
        1, ((0, 4),), (tuple(before),), ((before[0],) * 4,), COMMITTED + 1, fresh(((before[0],) * 4,)),
        shares_optimizer=True,
    )  # fmt: skip
    members = [SimpleNamespace(contributor_id=worker) for worker in after]
    plan: Any = SimpleNamespace(
        stages=[SimpleNamespace(members=members)], shard=lambda _: Shard("m", 0, 4, 4)
    )
    request = PlanMembership(
        2, COMMITTED, 1.0, {worker: Report(1, worker, COMMITTED) for worker in crew.workers}
    )
    moved = Resharder(crew, first_step, shares_optimizer=True).load(membership, plan, request, {})
    assert moved == crew.sources.keys()
    sources: dict[str, list[str]] = crew.sources
    return sources


def test_a_lost_share_comes_from_its_backup() -> None:
    held = {"a": ShardPart(0, 4, 0, 3), "b": ShardPart(0, 4, 1, 3)}
    crew = SharedCrew(held, {"a": ShardPart(0, 4, 2, 3)})
    assert reshare(crew, "abc", "ab") == {"a": ["a", "b", "a's copy of 2"], "b": ["b", "a", "a's copy of 2"]}


def test_members_with_the_right_shares_load_nothing() -> None:
    held = {"a": ShardPart(0, 4, 0, 2), "b": ShardPart(0, 4, 1, 2)}
    assert reshare(SharedCrew(held, {}), "ab", "ab") == {}


def test_a_share_without_backup_is_lost_with_its_member() -> None:
    held = {"a": ShardPart(0, 4, 0, 3), "b": ShardPart(0, 4, 1, 3)}
    with pytest.raises(ContributorLost):
        reshare(SharedCrew(held, {}), "abc", "ab")
    crew = SharedCrew(held, {})
    assert reshare(crew, "abc", "ab", COMMITTED + 1) == {"a": ["the server"], "b": ["the server"]}


def test_one_whole_division_is_enough_if_only_some_members_switched_to_another() -> None:
    held = {"a": ShardPart(0, 4, 0, 2), "b": ShardPart(0, 4, 1, 3)}
    crew = SharedCrew(held, {"a": ShardPart(0, 4, 1, 2)})
    found = reshare(crew, "ab", "ba")
    assert found["a"] == ["a", "b", "a's copy of 1"]
