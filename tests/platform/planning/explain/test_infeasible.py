"""Messages when no plan exists: the bytes that must be lent, and advice that makes a plan possible when followed."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any

import pytest
from tests.platform.planning.models import GIB, LAYER, PROFILE, job, lan, machine, make_plan

from share_compute.errors import PlanInfeasible
from share_compute.models.profiles.profile import ModelProfile, QuadraticGrowth
from share_compute.planning.cost.tables import MEMORY_SHARE
from share_compute.planning.dry_run import dry_run
from share_compute.planning.explain.remedies import to_lend
from share_compute.planning.plan import Plan
from share_compute.specification.workload import ServingWorkload
from share_compute.topology import Contributor, Link, Topology

_CACHED = LAYER.model_copy(update={"cache_numbers": QuadraticGrowth(linear=2048)})
CACHING = PROFILE.model_copy(update={"layers": (_CACHED,) * 12})
SERVED = ServingWorkload(prompt_tokens=64, new_tokens=16, concurrent=200)


def refusal(topology: Topology, profile: ModelProfile = PROFILE, **requested: Any) -> PlanInfeasible:
    with pytest.raises(PlanInfeasible) as caught:
        make_plan(job(**requested), topology, profile)
    return caught.value


def lending(contributor: Contributor, memory_bytes: int) -> Contributor:
    (device,) = contributor.devices
    return replace(contributor, devices=(replace(device, memory_bytes=memory_bytes),))


def number(pattern: str, advice: str) -> float:
    found = re.search(pattern, advice)
    assert found, advice
    return float(found[1])


def followed(advice: str, machines: list[Contributor], requested: dict[str, Any]) -> Plan:
    """Plan again after doing exactly what the advice says."""
    requested = {"training": {}, **requested}
    if advice.startswith("lend "):
        machines = lent_as_advised(advice, machines)
    elif advice.startswith("let "):
        machines = [*machines, *newcomers(advice, machines)]
    elif advice.startswith("cut the batch finer"):
        requested["microbatches"] = int(number(r"training.microbatches to (\d+)", advice))
    elif advice.startswith("use training.optimizer.name: sgd"):
        requested["training"] = requested["training"] | {"optimizer": {"name": "sgd"}}
    elif advice.startswith("set training.activation_checkpointing: true"):
        requested["training"] = requested["training"] | {"activation_checkpointing": True}
    elif advice.startswith("set parallelism.optimizer: sharded"):
        requested["optimizer"] = "sharded"
    else:
        assert advice.startswith("leave parallelism.stages")
        requested = {
            key: value for key, value in requested.items() if key not in ("stages", "members_per_stage")
        }
    return make_plan(job(**requested), lan(*machines), PROFILE)


def newcomers(advice: str, machines: list[Contributor]) -> list[Contributor]:
    name = advice.partition(" like ")[2].partition(" (")[0]
    model = next(one for one in machines if one.name == name)
    count = 1 if advice.startswith("let one ") else int(number(r"let (\d+) more", advice))
    return [replace(model, id=f"new {each}", name=f"new {each}") for each in range(count)]


def lent_as_advised(advice: str, machines: list[Contributor]) -> list[Contributor]:
    if " times " in advice:
        factor = number(r"lend ([\d.]+) times", advice)
        lent = [lending(one, int(one.memory_bytes * factor)) for one in machines]
        more = sum(one.memory_bytes for one in lent) - sum(one.memory_bytes for one in machines)
        assert more == number(r"\((\d+) bytes\) more in all", advice)
        return lent
    more, name = int(number(r"\((\d+) bytes\) more on", advice)), advice.rpartition(" more on ")[2]
    return [lending(one, one.memory_bytes + more) if one.name == name else one for one in machines]


@pytest.mark.parametrize("strategy", ["auto", "uniform", "recursive"])
def test_all_advice_helps_whoever_follows_it(strategy: str) -> None:
    kinds = set()
    for seed in range(12):
        draw = random.Random(seed)
        scale = draw.choice((0.05, 0.3, 0.6, 0.9))
        machines = [
            machine(f"m{index}", draw.uniform(20, 60), memory_bytes=int(scale * draw.uniform(1, 3) * GIB))
            for index in range(draw.randrange(1, 4))
        ]
        requested: dict[str, Any] = {"strategy": strategy, "microbatches": draw.choice((1, 4, 16))}
        if draw.random() < 0.3:
            requested |= {"stages": 1, "members_per_stage": 1}
        try:
            make_plan(job(**requested), lan(*machines), PROFILE)
        except PlanInfeasible as failure:
            for advice in failure.details["would_fit"]:
                kinds.add(advice.split()[0])
                assert followed(advice, machines, requested).stages
    assert {"lend", "let"} <= kinds


def test_one_machine_that_lends_what_is_missing_does_the_job() -> None:
    size = 2 * GIB
    failure = refusal(lan(machine("a", memory_bytes=size)))
    missing = failure.details["missing_bytes"]
    assert failure.details["lent_bytes"] == size
    assert f"({missing} bytes) are missing" in failure.message
    assert make_plan(job(), lan(machine("a", memory_bytes=size + missing)), PROFILE).stages
    refusal(lan(machine("a", memory_bytes=size + missing - 2)))


def test_slightly_too_little_memory_is_not_reported_as_enough() -> None:
    enough = to_lend(make_plan(job(), lan(machine("a")), PROFILE).stages[0].members[0].memory_bytes)
    failure = refusal(lan(machine("a", memory_bytes=enough - 1000)))
    assert any(advice.startswith("lend 1.01 times") for advice in failure.details["would_fit"])


def test_what_must_be_lent_is_enough_and_no_byte_more() -> None:
    draw = random.Random(1)
    for _ in range(2000):
        needed = draw.uniform(1, 10 ** draw.uniform(1, 15))
        lent = to_lend(needed)
        assert MEMORY_SHARE * lent >= needed
        assert MEMORY_SHARE * (lent - 2) < needed


def test_many_machines_get_advice_that_helps_too() -> None:
    machines = [machine(f"m{index}", 50, memory_bytes=GIB // 64) for index in range(70)]
    advice = refusal(lan_of_many(machines)).details["would_fit"]
    assert [one.split()[0] for one in advice] == ["lend", "lend"]
    for one in advice:
        assert make_plan(job(), lan_of_many(lent_as_advised(one, machines)), PROFILE).stages


def lan_of_many(machines: list[Contributor]) -> Topology:
    """All machines reach the head equally well: links between all pairs would be too many to list."""
    return Topology(tuple(machines), tuple(Link(one.id, "head", 5e-4, 1e8) for one in machines))


def test_auto_is_no_advice_where_it_finds_no_way_either() -> None:
    machines = machine("a", memory_bytes=2 * GIB), machine("b", memory_bytes=2 * GIB)
    topology = Topology(machines, (Link("a", "b", 1e-3, 0.0),))
    failure = refusal(topology, strategy="uniform", microbatches=16)
    assert "without a usable link: a to b" in failure.message
    assert failure.hint == "fix the link"


def test_each_dead_link_of_a_layout_is_named_once() -> None:
    machines = [machine(name) for name in "abcd"]
    links = [Link(one, other, 1e-3, 0.0) for one in "abcd" for other in "abcd" if one < other]
    failure = refusal(
        Topology(tuple(machines), tuple(links)), strategy="uniform", stages=2, members_per_stage=2
    )
    assert sorted(sorted(pair) for pair in failure.details["dead_links"]) == [
        sorted(pair) for pair in (("a", "b"), ("a", "c"), ("a", "d"), ("b", "c"), ("b", "d"), ("c", "d"))
    ]


@pytest.mark.parametrize("count", [2, 100])
def test_advice_for_serving_helps(count: int) -> None:
    machines = [machine(f"m{index}", memory_bytes=GIB // 2 // count) for index in range(count)]
    topology = lan_of_many(machines)
    with pytest.raises(PlanInfeasible, match="of lent memory") as caught:
        dry_run(job(), topology, CACHING, serving=SERVED)
    advice = caught.value.details["would_fit"]
    assert len(advice) >= 2
    for one in advice:
        served = SERVED
        if one.startswith("serve"):
            served = replace(SERVED, concurrent=int(number(r"at most (\d+)", one)))
            more = topology
        elif one.startswith("let"):
            more = lan_of_many([*machines, *newcomers(one, machines)])
        else:
            more = lan_of_many(lent_as_advised(one, machines))
        assert dry_run(job(), more, CACHING, serving=served).serving is not None
