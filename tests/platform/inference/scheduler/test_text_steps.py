"""The scheduler with an encoder: whole texts, divided evenly among owners, once each, whatever stages fail."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from random import Random

import pytest
from tests.platform.inference.runtime.encoders import encoder_config

from share_compute.errors import Busy, Conflict, ShareComputeError, TooLong, UserError
from share_compute.inference.placement import limits_before, limits_of, place
from share_compute.inference.scheduler.engine_steps import EngineStep, Pooled, StepResult
from share_compute.inference.scheduler.events import Embedded, Failed, Finished, SequenceEvent
from share_compute.inference.scheduler.limits import SchedulerLimits
from share_compute.inference.scheduler.options import Generation, SamplingOptions
from share_compute.inference.scheduler.scheduler import Scheduler
from share_compute.models.huggingface.encoder import profile_encoder
from share_compute.specification import ServeJob
from share_compute.topology import Contributor, Device, Topology

LIMITS = SchedulerLimits(
    window_tokens=40, kv_tokens=40, max_sequences=100, step_tokens=40, stages=2, max_queued=64, embeds=True
)
OPTIONS = SamplingOptions(seed=0, max_tokens=0)


def text(number: int, length: int, owner: str = "ann") -> Generation:
    return Generation(sequence=number, owner=owner, prompt=(number,) * length, options=OPTIONS)


def vector(tokens: Iterable[int]) -> bytes:
    return repr(tuple(tokens)).encode()


class Encoder:
    """Stages that make a vector of all tokens of a text that they received.

    Args:
        limits: of the scheduler.
    """

    def __init__(self, limits: SchedulerLimits = LIMITS) -> None:
        self.scheduler = Scheduler(limits)
        self.steps: list[EngineStep] = []
        self.on_their_way: deque[EngineStep] = deque()
        self.reported: dict[int, SequenceEvent] = {}

    def submit(self, *texts: Generation) -> None:
        assert self.scheduler.submit(*texts) == []

    def send(self) -> list[EngineStep]:
        made = self.scheduler.next_steps()
        for step in made:
            assert 0 < step.num_tokens <= self.scheduler.limits.step_tokens
            assert step.opens == step.closes == ()
            assert all((chunk.start, chunk.samples) == (0, True) for chunk in step.chunks)
        self.steps += made
        self.on_their_way += made
        return made

    def result(self, step: EngineStep) -> StepResult:
        made = (Pooled(chunk.sequence, chunk.count, vector(chunk.tokens or ())) for chunk in step.chunks)
        return StepResult(step.id, step.epoch, tuple(made))

    def complete(self) -> None:
        self.receive(self.scheduler.completed(self.result(self.on_their_way.popleft())))

    def receive(self, events: Iterable[SequenceEvent]) -> None:
        for event in events:
            assert event.sequence not in self.reported, "reported twice"
            self.reported[event.sequence] = event

    def finish(self) -> None:
        while self.send() or self.on_their_way:
            self.complete()
        stats = self.scheduler.stats()
        assert (stats.queued, stats.running, stats.kv_tokens_used, stats.owners) == (0, 0, 0, 0)


def test_texts_are_computed_whole_and_each_is_reported_once() -> None:
    draw, encoder = Random(1), Encoder()
    texts = [text(number, draw.randint(1, 40), draw.choice("abc")) for number in range(60)]
    encoder.submit(*texts)
    encoder.finish()
    for one in texts:
        assert encoder.reported[one.sequence] == Embedded(one.sequence, len(one.prompt), vector(one.prompt))
    # Engine steps are as full as possible with whole texts: two consecutive ones would not fit into one.
    sizes = [step.num_tokens for step in encoder.steps]
    firsts = [step.chunks[0].count for step in encoder.steps]
    assert all(size + first > 40 for size, first in zip(sizes, firsts[1:], strict=False))


def test_as_many_steps_are_on_their_way_as_stages_take() -> None:
    encoder = Encoder()
    encoder.submit(*(text(number, 40) for number in range(9)))
    assert len(encoder.send()) == 4  # two stages, each with one step in advance
    encoder.complete()
    assert len(encoder.send()) == 1


def test_owners_share_by_tokens() -> None:
    encoder = Encoder()
    encoder.submit(*(text(number, 20, "ann") for number in range(40)))
    encoder.submit(*(text(100 + number, 5, "bob") for number in range(20)))
    while len(encoder.steps) < 8:
        encoder.send()
        encoder.complete()
    sent = [chunk for step in encoder.steps for chunk in step.chunks]
    bob = sum(chunk.count for chunk in sent if chunk.sequence >= 100)
    assert bob == 100  # all of bob's texts, which are much less than half of all computed ones
    assert sum(chunk.count for chunk in sent) - bob >= 100


def test_a_text_as_long_as_the_window_is_taken_and_a_longer_one_is_not() -> None:
    encoder = Encoder()
    encoder.submit(text(1, 40))
    with pytest.raises(TooLong) as caught:
        encoder.scheduler.submit(text(2, 3), text(3, 41))
    assert caught.value.details == {"prompt_tokens": 41, "longest_tokens": 40}
    with pytest.raises(UserError, match="empty"):
        encoder.scheduler.submit(text(4, 0))
    with pytest.raises(Conflict):
        encoder.scheduler.submit(text(1, 3))
    encoder.finish()
    assert encoder.reported.keys() == {1}


def test_more_than_may_wait_are_refused() -> None:
    encoder = Encoder()
    with pytest.raises(UserError, match="at most 64 can wait"):
        encoder.scheduler.submit(*(text(number, 1) for number in range(65)))
    encoder.submit(*(text(number, 1) for number in range(64)))
    with pytest.raises(Busy):
        encoder.scheduler.submit(text(70, 1, "bob"))
    encoder.finish()


def test_cancelled_texts_are_not_reported() -> None:
    encoder = Encoder()
    encoder.submit(*(text(number, 30) for number in range(8)))
    encoder.send()
    cancelled = [*encoder.scheduler.cancel(0), *encoder.scheduler.cancel(7)]  # one is in flight, one waits
    assert [type(event) for event in cancelled] == [Finished, Finished]
    assert encoder.scheduler.cancel(0) == []
    encoder.finish()
    assert sorted(encoder.reported) == [1, 2, 3, 4, 5, 6]
    assert encoder.scheduler.stats().totals.wasted_tokens == 1


def test_texts_are_computed_again_by_other_stages() -> None:
    draw, encoder = Random(2), Encoder()
    texts = [text(number, draw.randint(1, 40), draw.choice("ab")) for number in range(40)]
    encoder.submit(*texts)
    encoder.send()
    encoder.complete()
    lost = list(encoder.on_their_way)
    encoder.on_their_way.clear()
    encoder.receive(encoder.scheduler.reform(1, replace(LIMITS, stages=3)))
    assert [event for step in lost for event in encoder.scheduler.completed(encoder.result(step))] == []
    first = encoder.send()[0]
    assert first.epoch == 1
    assert {chunk.sequence for chunk in first.chunks} <= {
        chunk.sequence for step in lost for chunk in step.chunks
    }
    encoder.finish()
    assert encoder.reported.keys() == {one.sequence for one in texts}
    assert all(isinstance(event, Embedded) for event in encoder.reported.values())


def test_a_text_that_fits_no_step_any_more_fails() -> None:
    encoder = Encoder()
    encoder.submit(text(1, 40), text(2, 20))
    encoder.send()
    encoder.on_their_way.clear()
    encoder.receive(encoder.scheduler.reform(1, replace(LIMITS, step_tokens=30)))
    failed = encoder.reported[1]
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, ShareComputeError)
    encoder.finish()
    assert isinstance(encoder.reported[2], Embedded)


@pytest.mark.parametrize(("window", "step"), [(128, 512), (2000, 2000)])
def test_a_step_holds_the_longest_text_and_smaller_ones_where_memory_did_not_suffice(
    window: int, step: int
) -> None:
    spec = ServeJob.model_validate({"name": "bert", "model": {"path": "/bert"}, "max_concurrent": 1})
    device = Device("cpu", "cpu", memory_bytes=2**31, flops_per_s={"float32": 1e10})
    machines = tuple(
        Contributor(id=f"c{index}", name=f"machine-{index}", devices=(device,), node_id="n", address="a")
        for index in range(2)
    )
    profile = profile_encoder(encoder_config("bert"))
    placement = place(spec, Topology(machines), profile, window_tokens=window, epoch=1, stages=2, embeds=True)
    before = limits_before(spec, window, embeds=True)
    limits = limits_of(spec, placement, {}, window, {}, embeds=True)
    assert (before.step_tokens, before.longest_tokens, before.embeds) == (step, window, True)
    assert limits == replace(before, stages=2)
    shrunk = limits_of(spec, placement, {}, window, {"c0": 0.8, "c1": 0.5}, embeds=True)
    assert (shrunk.step_tokens, shrunk.longest_tokens) == (step // 2, min(window, step // 2))
