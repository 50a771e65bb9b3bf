"""Number of replicas that a deployment should have, on a simulated clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from share_compute.errors import UserError
from share_compute.inference.autoscaler import Autoscaler, Demand
from share_compute.specification import ReplicasSpec

TICK_S = 0.5
LIMITS = ReplicasSpec(
    min=0,
    max=4,
    target_ongoing_requests=8,
    upscale_delay_s=2,
    downscale_delay_s=60,
    downscale_to_zero_delay_s=300,
)


@dataclass
class Clock:
    """Calls an autoscaler at regular times; replicas are up as soon as they are wanted."""

    autoscaler: Autoscaler
    now_s: float = 0.0
    idle_since_s: float = 0.0
    changes: list[tuple[float, int, str]] = field(default_factory=list)

    def tick(self, sequences: int) -> None:
        if sequences:
            self.idle_since_s = self.now_s
        up = self.autoscaler.wanted
        shares = tuple(sequences // up + (index < sequences % up) for index in range(up))
        demand = Demand(shares, 0 if up else sequences, self.now_s - self.idle_since_s)
        assert demand.sequences == sequences
        decision = self.autoscaler.decide(demand, self.now_s)
        if decision is not None:
            assert decision.wanted == self.autoscaler.wanted
            self.changes.append((self.now_s, decision.wanted, decision.reason))
        self.now_s += TICK_S

    def during(self, seconds: float, load: Callable[[float], int]) -> list[int]:
        """Return the wanted numbers, one after the other."""
        before = len(self.changes)
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.tick(load(self.now_s))
        return [wanted for _, wanted, _ in self.changes[before:]]


def clock(limits: ReplicasSpec = LIMITS, wanted: int = 1) -> Clock:
    return Clock(Autoscaler(limits, concurrent=16, wanted=wanted))


def test_it_goes_up_in_seconds_and_by_as_many_as_are_needed() -> None:
    time = clock()
    assert time.during(10, lambda _: 8) == []
    began_s = time.now_s
    assert time.during(30, lambda _: 25) == [4]
    at_s, _, reason = time.changes[0]
    assert at_s - began_s == LIMITS.upscale_delay_s
    assert "25 sequences" in reason
    assert "each replica is to have 8" in reason
    # The number stays within the range, however many sequences wait.
    assert time.during(30, lambda _: 1000) == []


def test_a_short_peak_starts_nothing_and_a_short_lull_ends_nothing() -> None:
    time = clock(wanted=2)
    peak = lambda now_s: 30 if now_s % 100 < 1.5 else 12  # noqa: E731
    assert time.during(1000, peak) == []
    lull = lambda now_s: 0 if now_s % 100 < 55 else 12  # noqa: E731
    assert time.during(1000, lull) == []


def test_it_goes_down_slowly_by_the_most_that_was_needed_meanwhile() -> None:
    time = clock(wanted=4)
    began_s = time.now_s
    assert time.during(61, lambda now_s: 9 if now_s == 30 else 3) == [2]
    assert time.changes[0][0] - began_s == LIMITS.downscale_delay_s
    assert "for 60 s 2 sufficed" in time.changes[0][2]
    assert time.during(62, lambda _: 3) == [1]
    assert time.during(1000, lambda _: 1) == []


def test_it_scales_to_zero_only_after_a_long_time_without_requests_and_at_once_from_it() -> None:
    time = clock()
    assert time.during(299, lambda _: 0) == []
    time.tick(1)
    last_request_s = time.idle_since_s
    assert time.during(400, lambda _: 0) == [0]
    at_s, _, reason = time.changes[0]
    assert at_s - last_request_s == LIMITS.downscale_to_zero_delay_s
    assert reason == "no request for 300 s"
    assert time.during(1000, lambda _: 0) == []
    began_s = time.now_s
    assert time.during(1, lambda _: 20) == [3]
    assert time.changes[1][0] == began_s
    # If the minimum is one replica, it stays.
    other = clock(LIMITS.model_copy(update={"min": 1}))
    assert other.during(1000, lambda _: 0) == []


def test_a_request_between_two_ticks_counts() -> None:
    time = clock()
    time.during(200, lambda _: 0)
    time.idle_since_s = time.now_s - 0.25  # the request came and ended between two ticks
    assert time.during(250, lambda _: 0) == []


@pytest.mark.parametrize("period_s", [3, 100, 1000])
@pytest.mark.parametrize("around", [8, 16, 24])
def test_a_load_that_wavers_about_a_border_does_not_make_it_waver(period_s: float, around: int) -> None:
    time = clock(wanted=1)
    wavering = lambda now_s: around + (1 if now_s % period_s < period_s / 2 else -1)  # noqa: E731
    time.during(2500, wavering)
    wanted = [wanted for _, wanted, _ in time.changes]
    assert wanted == sorted(set(wanted))  # the number only rises, and then stays


@given(
    loads=st.lists(st.tuples(st.integers(0, 80), st.floats(0.5, 200)), max_size=8),
    least=st.integers(0, 2),
    more=st.integers(1, 5),
    wanted=st.integers(0, 9),
)
def test_whatever_comes_it_keeps_to_its_range_and_to_its_delays(
    loads: list[tuple[int, float]], least: int, more: int, wanted: int
) -> None:
    limits = LIMITS.model_copy(update={"min": least, "max": least + more})
    time = clock(limits, wanted)
    before = time.autoscaler.wanted
    for sequences, seconds in loads:
        time.during(seconds, lambda _, load=sequences: load)  # type: ignore[misc]
    last_s = 0.0
    for at_s, now, reason in time.changes:
        assert limits.min <= now <= limits.max
        assert reason
        if now < before:
            assert at_s - last_s >= limits.downscale_delay_s
        elif before:
            assert at_s - last_s >= limits.upscale_delay_s
        before, last_s = now, at_s


def test_another_range_is_kept_to_at_once() -> None:
    autoscaler = Autoscaler(LIMITS, 16, wanted=1)
    up = autoscaler.limit(LIMITS.model_copy(update={"min": 3}))
    assert up is not None
    assert (up.wanted, up.reason) == (3, "3..4 were asked for")
    down = autoscaler.limit(ReplicasSpec(min=1, max=1))
    assert down is not None
    assert (down.wanted, down.reason) == (1, "1 were asked for")
    assert autoscaler.limit(LIMITS) is None


def test_without_a_target_another_one_comes_when_one_is_full() -> None:
    time = clock(ReplicasSpec(min=1, max=4))
    assert time.during(100, lambda _: 16) == []
    assert time.during(100, lambda _: 17) == [2]


def test_ranges_are_changed_by_what_was_given() -> None:
    changed = LIMITS.changed_by(ReplicasSpec.model_validate({"max": 6}))
    assert (changed.min, changed.max, changed.target_ongoing_requests) == (0, 6, 8)
    with pytest.raises(UserError, match=r"replicas: max \(1\) must not be less than min \(2\)"):
        ReplicasSpec(min=2, max=3).changed_by(ReplicasSpec.model_validate({"max": 1}))
