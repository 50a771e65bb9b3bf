"""Requests are shared over replicas by least outstanding work; a common prefix counts as no work."""

from __future__ import annotations

from collections import Counter

from tests.platform.inference.scheduler.hashed_stages import Row

from share_compute.inference.scheduler.events import Emitted, Finished
from share_compute.inference.scheduler.limits import SchedulerLimits
from share_compute.inference.scheduler.options import Generation, SamplingOptions
from share_compute.inference.scheduler.scheduler import Scheduler
from share_compute.inference.scheduler.sharing import Backlog, in_turn

LIMITS = SchedulerLimits(
    window_tokens=256, kv_tokens=1024, max_sequences=4, step_tokens=64, stages=1, max_queued=64
)


def test_who_has_least_to_do_for_its_speed_comes_first() -> None:
    assert in_turn([Backlog(3), Backlog(1), Backlog(2)]) == [1, 2, 0]
    assert in_turn([Backlog(1), Backlog(1)]) == [0, 1]
    assert in_turn([Backlog(0, 10.0), Backlog(4, 100.0)]) == [1, 0]
    assert in_turn([Backlog(0, 10.0), Backlog(9, 100.0)], new=1) == [0, 1]
    # A replica of unknown speed is taken to be as fast as the mean of the others.
    assert in_turn([Backlog(2, 10.0), Backlog(1), Backlog(0, 10.0)]) == [2, 1, 0]
    assert in_turn([]) == []


def test_a_fast_machine_gets_its_share_of_the_requests() -> None:
    speeds = (10.0, 30.0, 60.0)
    has = [0, 0, 0]
    for _ in range(100):
        first = in_turn([Backlog(*each) for each in zip(has, speeds, strict=True)])[0]
        has[first] += 1
    assert has == [10, 30, 60]


def generation(sequence: int, owner: str, prompt: tuple[int, ...]) -> Generation:
    options = SamplingOptions(seed=sequence, max_tokens=12)
    return Generation(sequence=sequence, owner=owner, prompt=prompt, options=options)


class Replicas:
    """Schedulers, each with a row of stages, which get requests as from an engine."""

    def __init__(self, number: int) -> None:
        self.schedulers = [Scheduler(LIMITS) for _ in range(number)]
        self.rows = [Row(LIMITS) for _ in range(number)]
        self.placed: dict[int, int] = {}
        self.ended: dict[int, int] = {}
        """Round in which each sequence ended."""
        self.emitted: Counter[int] = Counter()
        """Tokens of each replica."""

    def ask(self, *generations: Generation) -> int:
        has = Counter(self.placed[one] for one in self.placed.keys() - self.ended.keys())
        backlogs = [Backlog(has[index]) for index in range(len(self.schedulers))]
        chosen = in_turn(backlogs, len(generations))[0]
        self.schedulers[chosen].submit(*generations)
        self.placed.update((one.sequence, chosen) for one in generations)
        return chosen

    def step(self, now: int) -> None:
        for index, (scheduler, row) in enumerate(zip(self.schedulers, self.rows, strict=True)):
            for step in scheduler.next_steps():
                row.send(step)
                result = row.execute(0)
                assert result is not None
                while row.fed_back:
                    row.deliver_token()
                for event in scheduler.completed(result):
                    self.emitted[index] += isinstance(event, Emitted)
                    if isinstance(event, Finished):
                        self.ended[event.sequence] = now

    def run(self) -> None:
        for now in range(1000):
            self.step(now)
            if self.ended.keys() == self.placed.keys():
                return
        raise AssertionError("they did not end")


def test_two_replicas_do_twice_as_much() -> None:
    rounds = {}
    for number in (1, 2, 4):
        replicas = Replicas(number)
        for sequence in range(48):
            replicas.ask(generation(sequence, "ada", (sequence, 2, 3)))
        replicas.run()
        assert max(replicas.emitted.values()) == min(replicas.emitted.values())
        rounds[number] = max(replicas.ended.values()) + 1
    assert rounds[1] >= 1.8 * rounds[2] >= 3.2 * rounds[4]


def test_what_has_a_prefix_in_common_takes_nobodys_turn() -> None:
    prefix = tuple(range(100, 148))
    replicas = Replicas(2)
    many = [generation(one, "ada", (*prefix, one)) for one in range(30)]
    home = replicas.ask(*many)  # completions of one request: all on one replica, where they share the prefix
    assert {replicas.placed[one.sequence] for one in many} == {home}
    other = [generation(100 + one, "grace", (one, 7)) for one in range(6)]
    assert {replicas.ask(one) for one in other} == {1 - home}
    # Owners take turns by engine steps, so waiting sequences do not delay those of another owner.
    at_home = generation(200, "alan", (5, 6))
    replicas.schedulers[home].submit(at_home)
    replicas.placed[200] = home
    replicas.run()
    last = max(replicas.ended[one.sequence] for one in many)
    assert max(replicas.ended[one.sequence] for one in other) < last / 2
    assert replicas.ended[200] < last / 2
    hits = [scheduler.stats().totals.prefix_hits for scheduler in replicas.schedulers]
    assert hits[home] > 0
    assert hits[1 - home] == 0
