"""Shares that follow measured speed; without Ray."""

from __future__ import annotations

from collections.abc import Mapping

from share_compute.protocol.membership import Membership, fresh
from share_compute_actors.messages import StepFigures
from share_compute_actors.training.membership.balancing import Balancer
from share_compute_actors.training.membership.epochs import Shares, dealt


class Watched:
    """Members whose speed a test sets."""

    def __init__(self, *shares: tuple[int, ...]) -> None:
        self.balancer = Balancer()
        stages = tuple(
            tuple(f"{'abc'[place]}{member}" for member in range(len(own))) for place, own in enumerate(shares)
        )
        owners = tuple(dealt(stage, own) for stage, own in zip(stages, shares, strict=True))
        self.membership = Membership(
            epoch=1,
            shards=tuple((place, place + 1) for place in range(len(stages))),
            stages=stages,
            owners=owners,
            step=1,
            tasks=fresh(owners),
        )
        self.balancer.reform(self.membership)
        self.step = 0

    def steps(
        self, count: int, cell_s: Mapping[str, float], usual_s: float = 1.0, left: int = 100
    ) -> Shares | None:
        found = None
        for _ in range(count):
            self.step += 1
            figures = {}
            for stage, owners in zip(self.membership.stages, self.membership.owners, strict=True):
                for worker in stage:
                    busy_s = owners.count(worker) * cell_s.get(worker, usual_s)
                    figures[worker] = StepFigures(targets=1, seconds=busy_s + 5.0, waited_s=5.0)
            found = self.balancer.observe(self.step, figures, left)
        return found


def test_a_machine_half_as_fast_gets_half_within_three_steps() -> None:
    watched = Watched((6, 6))
    assert watched.steps(1, {}) is None  # the first step is a warm-up
    assert watched.steps(2, {"a1": 2.0}) is None
    assert watched.steps(1, {"a1": 2.0}) == {0: (8, 4)}


def test_alike_machines_keep_their_shares_whatever_noise_says() -> None:
    watched = Watched((4, 4), (3, 3, 2))
    for factor in (1.1, 0.9, 1.05, 0.95, 1.12, 1.0, 0.97):
        assert watched.steps(1, {"a0": factor, "b2": 2 - factor}) is None


def test_one_slow_step_is_no_straggler() -> None:
    watched = Watched((4, 4))
    watched.steps(4, {})
    assert watched.steps(1, {"a1": 9.0}) is None
    assert watched.steps(5, {}) is None


def test_only_a_stage_that_holds_the_others_up_is_worth_an_epoch() -> None:
    watched = Watched((4, 4), (4, 4))
    slow = {"a0": 10.0, "a1": 10.0, "b1": 3.0}
    assert watched.steps(6, slow) is None


def test_nothing_changes_for_a_few_short_steps() -> None:
    watched = Watched((4, 4))
    assert watched.steps(6, {"a1": 0.002}, usual_s=0.001, left=50) is None


def test_a_member_keeps_at_least_one_microbatch() -> None:
    watched = Watched((4, 4))
    assert watched.steps(4, {"a1": 100.0}) == {0: (7, 1)}
