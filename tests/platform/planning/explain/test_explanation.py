"""Reasons for a plan, in sentences that name the right machine, link and cause."""

from __future__ import annotations

import pytest
from tests.platform.planning.models import GIB, PROFILE, job, lan, machine, make_plan

from share_compute.planning.explain.causes import causes
from share_compute.planning.plan import Bottleneck, Plan
from share_compute.planning.planner import solve
from share_compute.quantities import bytes_text, flops_text, listed, percent_text, rate_text, seconds_text
from share_compute.topology import Contributor, Link, Topology

ALONE = {"stages": 2, "members_per_stage": 1}


def bottleneck(plan: Plan) -> Bottleneck:
    assert plan.prediction is not None
    return plan.prediction.bottleneck


def reason(plan: Plan, name: str) -> str:
    return next(idle.reason for idle in plan.idle if idle.name == name)


class TestBottleneck:
    def test_arithmetic(self) -> None:
        plan = make_plan(job(strategy="uniform"), lan(machine("slow", 5), machine("fast", 50)), PROFILE)
        assert (bottleneck(plan).kind, bottleneck(plan).where) == ("compute", "slow")
        assert "5.0 GFLOP/s" in bottleneck(plan).sentence

    def test_memory_bandwidth(self) -> None:
        starved = machine("starved", 5000, memory_bytes_per_s=1e7)
        plan = make_plan(job(strategy="uniform"), lan(starved, machine("well", 5000)), PROFILE)
        assert (bottleneck(plan).kind, bottleneck(plan).where) == ("memory", "starved")

    def test_a_narrow_link(self) -> None:
        plan = make_plan(job(**ALONE), lan(machine("a", 500), machine("b", 500), bytes_per_s=3e5), PROFILE)
        assert bottleneck(plan).kind == "link"
        assert bottleneck(plan).where in ("a and b", "b and a")
        assert "300.0 kB/s" in bottleneck(plan).sentence or "300 kB/s" in bottleneck(plan).sentence

    def test_a_long_way(self) -> None:
        far = lan(machine("a", 5000), machine("b", 5000), latency_s=2.0, bytes_per_s=1e9)
        plan = make_plan(job(**ALONE), far, PROFILE)
        assert bottleneck(plan).kind == "latency"
        assert "2.00 s" in bottleneck(plan).sentence

    def test_the_sum_of_gradients(self) -> None:
        topology = lan(machine("a", 5000), machine("b", 5000), bytes_per_s=1e7)
        plan = make_plan(job(stages=1, members_per_stage=2), topology, PROFILE)
        assert bottleneck(plan).kind == "synchronisation"
        assert "sum their gradients" in bottleneck(plan).sentence

    def test_what_is_saved_is_never_less_than_nothing(self) -> None:
        solution = solve(job(**ALONE), lan(machine("a", 50), machine("b", 20)), PROFILE, 0, {})
        assert solution.timeline is not None
        found = causes(solution.cost, solution.layout, solution.timeline.step_s)
        assert found == sorted(found, key=lambda cause: -cause.saved_s)
        assert all(-1e-9 <= cause.saved_s <= solution.timeline.step_s for cause in found)


class TestMachines:
    def test_what_a_member_holds_and_how_much_it_has_to_do(self) -> None:
        plan = make_plan(job(), lan(machine("a", 60)), PROFILE)
        sentence = plan.stages[0].members[0].reason
        assert sentence.startswith("holds layers 0-11: 60.0 GFLOP/s")
        assert "busy" in sentence
        assert "of 8.0 GiB used" in sentence

    def test_members_know_whom_they_share_with(self) -> None:
        topology = lan(machine("a", 60), machine("b", 50))
        plan = make_plan(job(stages=1, members_per_stage=2), topology, PROFILE)
        reasons = {member.name: member.reason for member in plan.stages[0].members}
        assert "the fastest machine here" in reasons["a"]
        assert "2 of 4 microbatches, the rest with b" in reasons["a"]
        assert "2nd fastest here" in reasons["b"]

    def test_a_slow_machine_is_explained_by_the_step_time_with_it(self) -> None:
        topology = lan(machine("a", 60), machine("b", 60), machine("snail", 1))
        plan = make_plan(job(), topology, PROFILE)
        assert "with it a step would take" in reason(plan, "snail")
        assert "because it computes at 1.0 GFLOP/s" in reason(plan, "snail")

    def test_a_far_machine_is_explained_by_the_link_at_fault(self) -> None:
        near = [machine("a", 60), machine("b", 60)]
        links = (
            Link("a", "b", 1e-4, 1e9),
            Link("a", "far", 1e-3, 3e4),
            Link("b", "far", 1e-3, 3e4),
        )
        plan = make_plan(job(), Topology((*near, machine("far", 60)), links), PROFILE)
        assert "because its link to" in reason(plan, "far")
        assert "30.0 kB/s" in reason(plan, "far")

    def test_a_machine_that_nobody_reaches(self) -> None:
        links = (Link("a", "b", 1e-4, 1e9), Link("a", "island", 1e-3, 0.0), Link("b", "island", 1e-3, 0.0))
        machines = (machine("a", 60), machine("b", 60), machine("island", 60))
        plan = make_plan(job(), Topology(machines, links), PROFILE)
        assert reason(plan, "island") == "no usable link joins it to the machines of the plan"

    def test_a_machine_without_memory_for_one_layer(self) -> None:
        tiny = machine("tiny", 60, memory_bytes=GIB // 64)
        plan = make_plan(job(), lan(machine("a", 60), tiny), PROFILE)
        assert "do not hold a single layer" in reason(plan, "tiny")

    def test_many_idle_machines_all_have_a_reason(self) -> None:
        crowd = [machine(f"m{index}", 0.5) for index in range(20)]
        plan = make_plan(job(), lan(machine("a", 60), *crowd), PROFILE)
        assert len(plan.idle) == 20
        assert all(idle.reason for idle in plan.idle)

    def test_all_idle_when_nothing_was_measured(self) -> None:
        plan = make_plan(job(stages=1, members_per_stage=1), lan(machine("a", 0), machine("b", 0)), PROFILE)
        assert "no machine's speed was measured" in plan.stages[0].members[0].reason
        assert reason(plan, "b") == "no machine's speed was measured, and the plan has work for 1 of them"

    def test_a_machine_whose_memory_bandwidth_is_at_fault(self) -> None:
        starved = machine("starved", 60, memory_bytes_per_s=2e7)
        plan = make_plan(job(), lan(machine("a", 60), machine("b", 60), starved), PROFILE)
        assert "because it reads weights from memory at 20.0 MB/s" in reason(plan, "starved")


class TestEqualMachines:
    """Differences of up to 5% are noise: no machine is called slower because of them, or ranked by them."""

    def test_nobody_is_first_among_equals(self) -> None:
        topology = lan(machine("a", 60), machine("b", 58), machine("c", 30))
        plan = make_plan(job(stages=1, members_per_stage=3), topology, PROFILE)
        standing = {member.name: member.standing for member in plan.stages[0].members}
        assert standing["a"].startswith("as fast as any here (60.0 GFLOP/s)")
        assert standing["b"].startswith("as fast as any here (58.0 GFLOP/s)")
        assert standing["c"].startswith("30.0 GFLOP/s, 3rd fastest here")

    @pytest.mark.parametrize("strategy", ["auto", "uniform", "compute_weighted", "recursive"])
    @pytest.mark.parametrize("requested", [{"stages": 1, "members_per_stage": 1}, {"stages": 2}, {}])
    def test_no_equal_is_called_faster(self, strategy: str, requested: dict[str, int]) -> None:
        crowd = [machine(f"m{index}", 50 + index % 3) for index in range(14)]
        plan = make_plan(job(strategy=strategy, **requested), lan(*crowd, bytes_per_s=3e6), PROFILE)
        assert plan.idle
        for idle in plan.idle:
            assert "faster" not in idle.reason.replace("no faster", "")
            assert "slower" not in idle.reason
            assert "because it computes" not in idle.reason

    def test_a_slow_one_is_called_slow(self) -> None:
        topology = lan(machine("a", 50), machine("b", 50), machine("slow", 40))
        requested = {"stages": 2, "members_per_stage": 1}
        simple = make_plan(job(strategy="uniform", **requested), topology, PROFILE)
        assert reason(simple, "slow") == "the job asks for 2 stages of 1 machine, and the others are faster"
        searched = make_plan(job(**requested), topology, PROFILE)
        assert reason(searched, "slow") == (
            "the job asks for 2 stages of 1 machine, and 2 machines make the shortest step that was found, "
            "and it is slower than each of them"
        )


class TestMachinesThatWereNotTried:
    """With many idle machines, a step is simulated with the fastest ones only; the others get reasons, too."""

    def plan(self, *others: Contributor, links: tuple[Link, ...] = ()) -> Plan:
        names = [*"abcdefghijklmnop", *(one.name for one in others)]
        given = {frozenset((link.source, link.target)) for link in links}
        near = tuple(
            Link(one, other, 5e-4, 1e8)
            for place, one in enumerate(names)
            for other in names[place + 1 :]
            if frozenset((one, other)) not in given
        )
        machines = (*(machine(name, 50) for name in "abcdefghijklmnop"), *others)
        return make_plan(job(stages=2, members_per_stage=1), Topology(machines, (*near, *links)), PROFILE)

    def test_slower(self) -> None:
        plan = self.plan(machine("slow", 20))
        assert reason(plan, "slow").endswith("and it is slower than each of them")
        idle = [one for one in plan.idle if one.name != "slow"]
        assert not any("slower" in one.reason or "faster" in one.reason for one in idle)

    def test_links(self) -> None:
        far = tuple(Link(name, "far", 0.2, 1e5) for name in "abcdefghijklmnop")
        assert reason(self.plan(machine("far", 49), links=far), "far").endswith(
            "and its links to them are slower than theirs"
        )

    def test_no_link(self) -> None:
        dead = tuple(Link(name, "island", 0.2, 0.0) for name in "abcdefghijklmnop")
        assert reason(self.plan(machine("island", 49), links=dead), "island") == (
            "no usable link joins it to the machines of the plan"
        )

    def test_memory(self) -> None:
        plan = self.plan(
            machine("tiny", 49, memory_bytes=GIB // 64), machine("small", 49, memory_bytes=2 * GIB)
        )
        assert reason(plan, "tiny") == "the memory that it lends does not hold a single layer"
        assert reason(plan, "small").endswith("and it lends less memory than each of them")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (bytes_text(512), "512 bytes"),
        (bytes_text(3.1 * GIB), "3.1 GiB"),
        (rate_text(3e6), "3.0 MB/s"),
        (flops_text(5.2e10), "52.0 GFLOP/s"),
        (seconds_text(1.314), "1.31 s"),
        (seconds_text(0.0124), "12.4 ms"),
        (seconds_text(190), "3.2 min"),
        (seconds_text(4.63e-6), "4.6 us"),
        (seconds_text(0.00046), "460 us"),
        (seconds_text(18_000), "5.0 h"),
        (seconds_text(1e6), "11.6 days"),
        (seconds_text(287834112.0 * 60), "547.3 years"),
        (percent_text(0.931), "93%"),
        (percent_text(0.0001), "under 1%"),
        (percent_text(0.9999), "99%"),
        (listed(["a"]), "a"),
        (listed(["a", "b", "c"]), "a, b and c"),
        (listed(list("abcdefghij")), "a, b, c and 7 more"),
    ],
)
def test_quantities_read_well(text: str, expected: str) -> None:
    assert text == expected
