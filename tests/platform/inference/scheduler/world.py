"""A server, its stages and its clients in one process; the order of events is drawn at random."""

from __future__ import annotations

from collections import Counter
from random import Random

from tests.platform.inference.scheduler.hashed_stages import VOCABULARY, Row, reference

from share_compute.errors import Busy
from share_compute.inference.scheduler.engine_steps import EngineStep, StepResult
from share_compute.inference.scheduler.events import Emitted, Failed, Finished, SequenceEvent
from share_compute.inference.scheduler.limits import SchedulerLimits
from share_compute.inference.scheduler.options import Generation, SamplingOptions
from share_compute.inference.scheduler.scheduler import Scheduler

MOST_STEPS = 50_000


class World:
    """Runs a scheduler on stages, and checks every event against the reference.

    Args:
        limits: of the first epoch.
        seed: draws everything.
    """

    def __init__(self, limits: SchedulerLimits, seed: int = 0) -> None:
        self.draw = Random(seed)
        self.scheduler = Scheduler(limits)
        self.row = Row(limits)
        self.results: list[StepResult] = []
        """Results that the server has not received; they may arrive in any order."""
        self.requested: dict[int, Generation] = {}
        self.longest: dict[int, int] = {}
        """Maximum length of each sequence: the limit when it was submitted, or a later, smaller one."""
        self.text: dict[int, list[int]] = {}
        self.ends: dict[int, Finished | Failed] = {}
        self.cached: dict[int, int] = {}
        """Number of cached prompt tokens, as reported with the first token."""
        self.steps: list[EngineStep] = []
        self.batch: dict[int, int] = {}
        """Batch of the last step of each sequence."""
        self.num_busy = self.num_steps = 0
        self.computed: Counter[str] = Counter()
        """Computed positions, by owner."""

    # -- clients -----------------------------------------------------------------------------------------------------

    def submit(self, *generations: Generation) -> bool:
        """Submit generations; return whether they were accepted."""
        queued = self.scheduler.stats().queued
        try:
            events = self.scheduler.submit(*generations)
        except Busy:
            self.num_busy += 1
            return False
        assert self.scheduler.stats().queued <= max(queued, self.scheduler.limits.max_queued)
        for generation in generations:
            self.requested[generation.sequence] = generation
            self.longest[generation.sequence] = self.scheduler.limits.longest_tokens
            self.text[generation.sequence] = list(generation.emitted)
        self.receive(events)
        return True

    @property
    def running(self) -> list[int]:
        """Sequences that have not ended."""
        return [sequence for sequence in self.requested if sequence not in self.ends]

    @property
    def preempted(self) -> list[int]:
        """Sequences that have not ended, whose KV slots were closed and not opened again."""
        closed: dict[int, bool] = {}
        for step in self.steps:
            closed |= dict.fromkeys(step.closes, True)
            closed |= {opening.sequence: False for opening in step.opens}
        return [sequence for sequence in self.running if closed.get(sequence)]

    def cancel(self, sequence: int) -> None:
        had_ended = sequence in self.ends
        events = self.scheduler.cancel(sequence)
        assert len(events) == (not had_ended)
        self.receive(events)

    def receive(self, events: list[SequenceEvent]) -> None:
        for event in events:
            assert event.sequence not in self.ends
            text = self.text[event.sequence]
            if isinstance(event, Emitted):
                assert event.index == len(text)
                text.append(event.token)
                if event.index == 0:
                    self.cached[event.sequence] = event.cached_tokens
            else:
                self.ends[event.sequence] = event

    # -- server and stages --------------------------------------------------------------------------------------------

    def send(self) -> list[EngineStep]:
        steps = self.scheduler.next_steps()
        for step in steps:
            assert step.epoch == self.scheduler.epoch
            self.row.send(step)
            for chunk in step.chunks:
                generation = self.requested[chunk.sequence]
                self.computed[generation.owner] += chunk.count
                if chunk.tokens is None and self.batch[chunk.sequence] != step.batch:
                    # The token's batch was in the step just before, so its result must not be waited for.
                    assert len(generation.prompt) + len(self.text[chunk.sequence]) > chunk.start
                self.batch[chunk.sequence] = step.batch
        self.steps += steps
        stats = self.scheduler.stats()
        limits = self.scheduler.limits
        assert stats.running <= limits.max_sequences
        assert stats.kv_tokens_used + stats.kv_tokens_cached <= stats.kv_tokens
        assert stats.steps_in_flight <= limits.stages * (1 + limits.run_ahead)
        return steps

    def go_on(self) -> bool:
        """Execute one of the events that are possible now; return whether there was one."""
        self.num_steps += 1
        assert self.num_steps < MOST_STEPS, "it does not end"
        row = self.row
        can: list[object] = list(row.ready())
        can += ["token"] if row.fed_back else []
        can += ["result"] if self.results else []
        if not can:
            return bool(self.send())
        chosen = self.draw.choice(can)
        if chosen == "token":
            row.deliver_token()
        elif chosen == "result":
            result = self.results.pop(self.draw.randrange(len(self.results)))
            self.receive(self.scheduler.completed(result))
            if self.draw.random() < 0.05:
                assert self.scheduler.completed(result) == []  # duplicated
        else:
            assert isinstance(chosen, int)
            result_or_none = row.execute(chosen)
            self.results += [result_or_none] if result_or_none else []
        if self.draw.random() < (0.7 if chosen == "result" else 0.05):
            self.send()
        return True

    def reform(self, limits: SchedulerLimits) -> None:
        """Lose some machines: messages that are on their way are lost, or arrive too late."""
        for sequence in self.running:
            generation = self.requested[sequence]
            new = min(generation.options.max_tokens, self.longest[sequence] - len(generation.prompt))
            fits = limits.longest_tokens - len(generation.prompt) > len(self.text[sequence])
            if fits and len(generation.prompt) + new - 1 > limits.capacity_tokens:
                self.longest[sequence] = limits.longest_tokens
        self.receive(self.scheduler.reform(self.scheduler.epoch + 1, limits))
        self.row = Row(limits)

    def finish(self) -> None:
        """Execute all remaining events, then check that nothing is left over."""
        while self.go_on():
            pass
        assert self.running == []
        self.scheduler.drop_cached()
        self.send()
        while self.go_on():
            pass
        stats = self.scheduler.stats()
        assert (stats.queued, stats.interrupted, stats.running, stats.owners) == (0, 0, 0, 0)
        assert stats.steps_in_flight == 0
        assert (stats.kv_tokens_used, stats.kv_tokens_cached) == (0, 0)
        assert all(not stage.slots and not stage.inbox for stage in self.row.stages)
        self.check()

    def check(self) -> None:
        """Compare all received events with the reference."""
        for sequence, end in self.ends.items():
            expected, reason = reference(self.requested[sequence], self.longest[sequence])
            text = self.text[sequence]
            if isinstance(end, Finished) and end.reason != "cancelled":
                assert (text, end.reason) == (expected, reason)
                assert end.new_tokens == len(text)
            else:
                assert text == expected[: len(text)]


def generation(
    sequence: int,
    prompt: tuple[int, ...] = (1, 2, 3),
    max_tokens: int = 8,
    owner: str = "ann",
    emitted: tuple[int, ...] = (),
    stops: tuple[int, ...] = (),
    seed: int = 0,
) -> Generation:
    options = SamplingOptions(seed=seed, max_tokens=max_tokens, stop_token_ids=stops)
    return Generation(sequence=sequence, owner=owner, prompt=prompt, options=options, emitted=emitted)


def drawn_limits(draw: Random) -> SchedulerLimits:
    return SchedulerLimits(
        window_tokens=draw.choice([24, 60, 120]),
        kv_tokens=draw.choice([40, 130, 200, 600]),
        max_sequences=draw.choice([1, 3, 8, 16]),
        step_tokens=draw.choice([2, 5, 16, 64]),
        stages=draw.randint(1, 4),
        max_queued=draw.choice([2, 8, 30]),
        run_ahead=draw.randint(0, 2),
        answer_tokens=draw.choice([1, 4, 16, 200]),
    )


def drawn_generations(draw: Random, first: int, limits: SchedulerLimits) -> list[Generation]:
    """Return the sequences of one request; some share a prefix with other requests."""
    beginnings = [tuple(Random(kind).choices(range(VOCABULARY), k=90)) for kind in range(3)]
    longest = limits.longest_tokens
    common = draw.choice(beginnings)[: draw.choice([0, 5, 16, 20, 40, 90])]
    own = tuple(draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 12)))
    prompt = (common + own)[-(longest - 1) :]
    stops = tuple(draw.sample(range(VOCABULARY), draw.choice([0, 0, 1, 4])))
    made = []
    for sequence in range(first, first + min(draw.choice([1, 1, 1, 4]), limits.max_queued)):
        one = generation(
            sequence,
            prompt,
            draw.choice([0, 1, 2, 6, 20, 60]),
            draw.choice("abc"),
            (),
            stops,
            draw.randrange(99),
        )
        if draw.random() < 0.1:
            known = reference(one, longest)[0]
            one = one.model_copy(update={"emitted": tuple(known[: draw.randint(0, len(known))])})
        made.append(one)
    return made
