"""The guarantees of the scheduler, one by one."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from tests.platform.inference.scheduler.hashed_stages import reference
from tests.platform.inference.scheduler.world import World, generation

from share_compute.errors import (
    Busy,
    Conflict,
    StaleEpoch,
    TooLong,
    Unavailable,
    UserError,
    VerificationFailed,
)
from share_compute.inference.scheduler.engine_steps import EngineStep, SampledToken, StepResult
from share_compute.inference.scheduler.events import Emitted, Failed, Finished
from share_compute.inference.scheduler.limits import SchedulerLimits
from share_compute.inference.scheduler.scheduler import Scheduler

LIMITS = SchedulerLimits(
    window_tokens=200, kv_tokens=1000, max_sequences=16, step_tokens=32, stages=2, max_queued=100, run_ahead=1
)
LONG = tuple(range(100, 180))
"""A prompt of five blocks."""


def world(**changes: int) -> World:
    return World(replace(LIMITS, **changes))


def served(one: World, *sequences: int) -> list[tuple[int, ...]]:
    """Return the chunks of some sequences, as (step, batch, start, count)."""
    return [
        (step.id, step.batch, chunk.start, chunk.count)
        for step in one.steps
        for chunk in step.chunks
        if chunk.sequence in sequences
    ]


# -- requests that are refused, or end at once ---------------------------------------------------------------------


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(UserError, match="the prompt is empty"):
        world().scheduler.submit(generation(0, ()))


@pytest.mark.parametrize("changes", [{"window_tokens": 50}, {"kv_tokens": 50}])
def test_a_prompt_must_leave_capacity_for_a_token(changes: dict[str, int]) -> None:
    one = world(**changes)
    with pytest.raises(TooLong, match="50 tokens; prompt and answer together can have 50") as refused:
        one.submit(generation(0, LONG[:50]))
    assert refused.value.status == 400
    one.submit(generation(0, LONG[:49]))
    one.finish()
    assert one.ends[0] == Finished(0, "length", 1)


def test_a_sequence_ends_at_the_window() -> None:
    one = world(window_tokens=50)
    one.submit(generation(0, LONG[:40], max_tokens=1000))
    one.finish()
    assert one.ends[0] == Finished(0, "length", 10)


def test_a_request_for_no_tokens_ends_at_once() -> None:
    one = world()
    assert one.scheduler.submit(generation(0, max_tokens=0)) == [Finished(0, "length", 0)]
    assert one.scheduler.next_steps() == []


@pytest.mark.parametrize(("stops", "max_tokens", "reason"), [((9,), 5, "stop"), ((), 2, "length")])
def test_what_had_ended_before_a_takeover_ends_at_once(
    stops: tuple[int, ...], max_tokens: int, reason: str
) -> None:
    one = world()
    ended = generation(0, max_tokens=max_tokens, emitted=(8, 9), stops=stops)
    (finished,) = one.scheduler.submit(ended)
    assert isinstance(finished, Finished)
    assert (finished.reason, finished.new_tokens) == (reason, 2)
    assert one.scheduler.next_steps() == []


def test_a_number_is_given_once() -> None:
    one = world()
    with pytest.raises(Conflict):
        one.scheduler.submit(generation(7), generation(7))
    one.submit(generation(7))
    with pytest.raises(Conflict, match=r"\[7\]"):
        one.scheduler.submit(generation(7))


def test_a_full_queue_refuses_whole_requests_and_says_when_to_come_back() -> None:
    one = world(max_queued=4)
    one.submit(*(generation(sequence, max_tokens=97) for sequence in range(3)))
    with pytest.raises(Busy) as refused:
        one.scheduler.submit(generation(3), generation(4), tokens_per_s=10)
    assert refused.value.status == 429
    assert refused.value.retry_after_s == 15  # half of the time of three sequences of 100 tokens
    assert one.scheduler.stats().queued == 3
    one.submit(generation(3))
    with pytest.raises(Busy) as refused:
        one.scheduler.submit(generation(4), tokens_per_s=1e-3)
    assert refused.value.retry_after_s == 60
    with pytest.raises(UserError, match="at most 4 can wait"):
        one.scheduler.submit(*map(generation, range(5, 10)))
    one.finish()


def test_one_owner_cannot_fill_the_queue_before_the_others() -> None:
    one = world(max_queued=16)
    taken = [one.submit(generation(sequence, owner="ann")) for sequence in range(20)]
    assert taken.count(True) == 14
    assert one.submit(generation(30, owner="bob"))
    assert one.submit(generation(31, owner="cid"))
    assert not one.submit(generation(32, owner="dot"))
    one.finish()


@pytest.mark.parametrize("name", ["window_tokens", "step_tokens", "stages", "max_queued", "run_ahead"])
def test_limits_that_nothing_can_keep_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=name):
        world(**{name: -1})


# -- steps ---------------------------------------------------------------------------------------------------------


def test_a_prompt_goes_in_chunks_through_all_batches_at_once() -> None:
    one = world()
    one.submit(generation(0, LONG, max_tokens=3))
    first = one.send()
    assert served(one, 0) == [(0, 0, 0, 32), (1, 1, 32, 32), (2, 0, 64, 16)]
    assert [chunk.samples for step in first for chunk in step.chunks] == [False, False, True]
    one.receive(one.scheduler.completed(StepResult(0, 0, ())))
    (decode,) = one.send()[0].chunks
    assert (decode.start, decode.count, decode.tokens, decode.samples) == (80, 1, None, True)


def test_as_many_batches_as_stages_are_in_flight_and_each_runs_ahead() -> None:
    one = world(stages=3)
    for sequence in range(6):
        one.submit(generation(sequence, (sequence, 1, 2), max_tokens=100))
    for _ in range(400):
        one.go_on()
    steady = [step for step in one.steps if len(step.chunks) == 2][-6:]
    assert [step.batch for step in steady] in [[0, 1, 2] * 2, [1, 2, 0] * 2, [2, 0, 1] * 2]
    assert one.scheduler.stats().steps_in_flight == 6 or one.send()
    one.finish()


def test_decodes_go_on_beside_a_long_prompt() -> None:
    one = world(stages=1, step_tokens=8)
    one.submit(generation(0, max_tokens=100))
    one.send()
    one.submit(generation(1, LONG, max_tokens=1))
    while 1 not in one.ends:
        one.go_on()
    beside = [step for step in one.steps if any(chunk.sequence == 1 for chunk in step.chunks)]
    assert len(beside) == 12  # 80 tokens, seven in each step
    assert all(step.num_tokens == 8 for step in beside[:-1])
    one.finish()


def test_when_not_all_fit_decodes_rotate_and_prompts_get_a_quarter() -> None:
    one = world(stages=1, step_tokens=8)
    for sequence in range(12):
        one.submit(generation(sequence, max_tokens=60))
    while one.scheduler.stats().totals.emitted_tokens < 100:
        one.go_on()
    one.submit(generation(12, LONG, max_tokens=1))
    while 12 not in one.ends:
        one.go_on()
    assert {chunk[3] for chunk in served(one, 12)} == {2}
    beside = [step for step in one.steps if any(chunk.sequence == 12 for chunk in step.chunks)]
    decodes = Counter(chunk.sequence for step in beside for chunk in step.chunks if chunk.sequence != 12)
    assert len(decodes) == 12
    assert max(decodes.values()) - min(decodes.values()) <= 1
    one.finish()


def test_sequences_that_begin_together_are_spread_at_once() -> None:
    one = world(stages=2)
    one.submit(*(generation(sequence, (sequence, 1), max_tokens=30) for sequence in range(8)))
    assert [len(step.chunks) for step in one.send()] == [8, 4]
    one.finish()


def test_a_batch_follows_the_others_not_itself() -> None:
    scheduler = Scheduler(replace(LIMITS, stages=3, run_ahead=0))
    scheduler.submit(*(generation(sequence, (sequence, 1), max_tokens=30) for sequence in range(3)))

    def complete(step: EngineStep) -> None:
        sampled = [SampledToken(chunk.sequence, chunk.start + chunk.count, 9) for chunk in step.chunks]
        scheduler.completed(StepResult(step.id, 0, tuple(sampled)))

    complete(scheduler.next_steps()[0])
    first, second, third = scheduler.next_steps()
    assert (first.batch, second.batch, third.batch) == (1, 2, 0)
    complete(first)
    (fourth,) = scheduler.next_steps()
    for step in (second, third, fourth):
        complete(step)
    assert [step.batch for step in scheduler.next_steps()] == [2, 0, 1]


def test_decodes_get_what_prompts_leave() -> None:
    one = world(stages=1, step_tokens=8, kv_tokens=8 * 42)
    for sequence in range(9):
        one.submit(generation(sequence, max_tokens=40))
    while one.scheduler.stats().totals.emitted_tokens < 60:
        one.go_on()
    assert one.scheduler.stats().queued == 1
    assert len(one.steps[-1].chunks) == 8
    one.finish()


@pytest.mark.parametrize("run_ahead", [0, 1, 3])
def test_nothing_is_wasted_when_ends_are_known(run_ahead: int) -> None:
    one = world(run_ahead=run_ahead, stages=3)
    for sequence in range(10):
        one.submit(generation(sequence, (sequence, 1, 2), max_tokens=sequence + 1))
    one.finish()
    totals = one.scheduler.stats().totals
    assert totals.wasted_tokens == 0
    # The last token of each sequence is not an input.
    assert totals.computed_tokens == sum(3 + sequence for sequence in range(10))


@pytest.mark.parametrize("run_ahead", [0, 2])
def test_a_stop_token_wastes_at_most_what_ran_ahead(run_ahead: int) -> None:
    one = world(run_ahead=run_ahead)
    tokens, _ = reference(generation(0, max_tokens=30), 200)
    one.submit(generation(0, max_tokens=30, stops=(tokens[9],)))
    one.finish()
    emitted = tokens.index(tokens[9]) + 1
    assert one.ends[0] == Finished(0, "stop", emitted)
    assert one.scheduler.stats().totals.wasted_tokens <= run_ahead


def test_a_cancelled_sequence_ends_at_once_and_its_capacity_is_free() -> None:
    one = world(kv_tokens=100)
    one.submit(generation(0, LONG, max_tokens=20))
    one.send()
    one.submit(generation(1, (5,), max_tokens=90), generation(2))
    assert one.send() == []
    one.cancel(0)
    one.cancel(2)
    assert one.ends[0] == Finished(0, "cancelled", 0)
    # Both batches have the maximum number of steps in flight; the next step closes and opens.
    one.go_on()
    while not (steps := one.send()):
        one.go_on()
    assert steps[0].closes == (0,)
    assert [opening.sequence for opening in steps[0].opens] == [1]
    one.finish()
    assert one.scheduler.cancel(0) == []


def test_batches_stay_even() -> None:
    one = world(stages=2)
    for sequence in range(8):
        one.submit(generation(sequence, (sequence, 1, 2), max_tokens=40))
    while one.scheduler.stats().totals.emitted_tokens < 60:
        one.go_on()
    stay = {chunk.sequence for chunk in one.steps[-1].chunks}
    for sequence in set(range(8)) - stay:
        one.cancel(sequence)
    first = len(one.steps)
    while one.running:
        one.go_on()
    sizes = Counter(len(step.chunks) for step in one.steps[first + 6 :])
    assert sizes.most_common(1)[0][0] == 2
    one.finish()


# -- results -------------------------------------------------------------------------------------------------------


def test_results_are_emitted_in_the_order_of_their_steps() -> None:
    one = world(stages=1)
    one.submit(generation(0))
    one.send()
    first = one.row.execute(0)
    one.row.deliver_token()
    second = one.row.execute(0)
    assert first is not None
    assert second is not None
    assert one.scheduler.completed(second) == []
    events = one.scheduler.completed(first)
    assert [event.index for event in events if isinstance(event, Emitted)] == [0, 1]
    assert one.scheduler.completed(first) == []


def test_a_result_of_something_else_is_refused_and_changes_nothing() -> None:
    one = world(stages=1)
    one.submit(generation(0))
    one.send()
    result = one.row.execute(0)
    assert result is not None
    with pytest.raises(VerificationFailed):
        one.scheduler.completed(StepResult(0, 0, ()))
    wrong = replace(result, sampled=(replace(result.sampled[0], position=9),))
    with pytest.raises(VerificationFailed):
        one.scheduler.completed(wrong)
    assert len(one.scheduler.completed(result)) == 1


# -- common prefixes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step_tokens", [40, 100])
def test_completions_of_one_prompt_compute_it_once(step_tokens: int) -> None:
    one = world(step_tokens=step_tokens)
    for sequence in range(8):
        one.submit(
            generation(sequence, LONG, max_tokens=4, seed=sequence, owner="ann" if sequence else "bob")
        )
    one.finish()
    totals = one.scheduler.stats().totals
    assert (totals.prefix_hits, totals.prefix_tokens) == (7, 7 * 79)
    assert totals.computed_tokens == 80 + 7 * 1 + 8 * 3
    assert sorted(one.cached.values()) == [0] + [79] * 7


def test_the_next_message_of_a_chat_goes_on_from_the_last() -> None:
    one = world()
    one.submit(generation(0, LONG, max_tokens=20))
    while one.running:
        one.go_on()
    next_prompt = (*LONG, *one.text[0], 7, 7)
    one.submit(generation(1, next_prompt, max_tokens=5))
    one.finish()
    assert one.ends[1] == Finished(1, "length", 5)
    assert one.cached[1] == 99


def test_the_least_recently_used_slot_is_evicted() -> None:
    one = world(kv_tokens=200)
    prompts = [tuple(range(start, start + 50)) for start in (0, 100, 200)]
    for sequence, prompt in enumerate([*prompts, prompts[0], tuple(range(300, 350)), prompts[0], prompts[1]]):
        one.submit(generation(sequence, prompt, max_tokens=1))
        while one.running:
            one.go_on()
    assert list(one.cached.values()) == [0, 0, 0, 49, 0, 49, 0]
    one.finish()


def test_without_capacity_for_both_the_copy_is_left() -> None:
    one = world(kv_tokens=100)
    one.submit(generation(0, LONG, max_tokens=4))
    while one.running:
        one.go_on()
    one.submit(generation(1, (*LONG, 1), max_tokens=4))
    one.finish()
    assert one.ends[1] == Finished(1, "length", 4)
    assert one.cached[1] == 0


# -- KV capacity for answers ---------------------------------------------------------------------------------------


def test_a_sequence_with_a_high_limit_reserves_the_capacity_of_a_typical_answer() -> None:
    one = world(kv_tokens=400, answer_tokens=20)
    one.submit(
        *(generation(sequence, (sequence, 1), max_tokens=1000, stops=(9, 3)) for sequence in range(16))
    )
    one.send()
    assert one.scheduler.stats().running == 16
    one.finish()
    assert {end.reason for end in one.ends.values() if isinstance(end, Finished)} >= {"stop"}


def test_a_slot_grows_with_the_answer_and_without_a_pause() -> None:
    one = world(answer_tokens=10)
    one.submit(generation(0, max_tokens=100))
    one.finish()
    grown = [growth.capacity_tokens for step in one.steps for growth in step.grows]
    assert grown == [22, 42, 82, 102]
    assert len(served(one, 0)) == 100
    assert one.scheduler.stats().totals.preempted == 0


def test_a_sequence_without_more_capacity_continues_before_new_ones() -> None:
    one = world(kv_tokens=150, answer_tokens=10)
    one.submit(*(generation(sequence, (sequence, 1), max_tokens=100) for sequence in range(4)))
    while not one.preempted:
        one.go_on()
    sent, waiting = len(one.steps), one.preempted
    one.submit(generation(4, (4, 1), max_tokens=100, owner="bob"))
    one.finish()
    begun = [opening.sequence for step in one.steps[sent:] for opening in step.opens]
    assert all(begun.index(live) < begun.index(4) for live in waiting)
    totals = one.scheduler.stats().totals
    assert 0 < totals.preempted <= 5 * 4, "whoever was preempted comes back with twice the room"
    assert totals.emitted_tokens == 500


@pytest.mark.parametrize(("kv_tokens", "prompt", "answer"), [(1100, 60, 20), (2000, 150, 8), (600, 40, 16)])
def test_little_is_computed_twice_where_memory_is_short(kv_tokens: int, prompt: int, answer: int) -> None:
    one = world(kv_tokens=kv_tokens, answer_tokens=answer, window_tokens=4096, step_tokens=64)
    one.submit(*(generation(sequence, (sequence, *range(prompt)), max_tokens=120) for sequence in range(24)))
    one.finish()
    totals = one.scheduler.stats().totals
    assert totals.computed_tokens + totals.prefix_tokens < 2 * 24 * (prompt + 120)
    assert totals.preempted < 24


def test_a_number_may_be_given_again_while_its_old_tokens_are_on_their_way() -> None:
    one = world(kv_tokens=170, window_tokens=300, answer_tokens=8, run_ahead=2)
    requests = [generation(sequence, (sequence, *range(30)), max_tokens=100) for sequence in range(4)]
    one.submit(*requests)

    def sampled(sequence: int) -> int:
        """Return the number of tokens that the stages sample, or have sampled."""
        return sum(chunk.samples for step in one.steps for chunk in step.chunks if chunk.sequence == sequence)

    while not (flying := [each for each in one.preempted if sampled(each) > len(one.text[each])]):
        assert one.go_on()
    number = flying[0]
    one.cancel(number)
    del one.ends[number]
    one.submit(requests[number].model_copy(update={"emitted": tuple(one.text[number])}))
    one.finish()
    assert isinstance(one.ends[number], Finished)


def test_a_number_may_be_given_again_while_its_slot_is_kept() -> None:
    one = world()
    one.submit(generation(0, LONG, max_tokens=20))
    while one.running:
        one.go_on()
    del one.ends[0]
    one.submit(generation(0, LONG, max_tokens=20))
    one.finish()
    assert isinstance(one.ends[0], Finished)


def test_a_preempted_sequence_may_be_cancelled() -> None:
    one = world(kv_tokens=150, answer_tokens=10)
    one.submit(*(generation(sequence, (sequence, 1), max_tokens=100) for sequence in range(4)))
    while not one.preempted:
        one.go_on()
    one.cancel(one.preempted[0])
    one.finish()


# -- a change of stages ---------------------------------------------------------------------------------------------


def test_after_a_change_of_stages_streams_go_on_before_new_ones() -> None:
    one = world(max_sequences=2)
    one.submit(*(generation(sequence, (sequence, 1), max_tokens=30) for sequence in (0, 1)))
    one.send()
    one.submit(*(generation(sequence, (sequence, 1), owner="bob") for sequence in (2, 3)))
    while one.scheduler.stats().totals.emitted_tokens < 10:
        one.go_on()
    late = one.row.execute(one.row.ready()[0])
    one.reform(replace(LIMITS, stages=3, max_sequences=2))
    assert late is None or one.scheduler.completed(late) == []
    first = one.send()[0]
    assert [opening.sequence for opening in first.opens] == [0, 1]
    assert [opening.history[2:] for opening in first.opens] == [tuple(one.text[0]), tuple(one.text[1])]
    assert first.epoch == 1
    one.finish()


def test_after_another_change_they_keep_their_order() -> None:
    one = world()
    one.submit(*(generation(sequence, (sequence, 1), max_tokens=30) for sequence in range(4)))
    one.send()
    one.reform(replace(LIMITS, max_sequences=2))
    assert [opening.sequence for opening in one.send()[0].opens] == [0, 1]
    assert one.scheduler.stats().interrupted == 2
    one.reform(LIMITS)
    assert [opening.sequence for opening in one.send()[0].opens] == [0, 1, 2, 3]
    one.finish()


def test_results_of_another_epoch_are_dropped_though_their_step_is_known() -> None:
    scheduler = Scheduler(LIMITS, epoch=5)
    scheduler.submit(generation(0))
    step = scheduler.next_steps()[0]
    sampled = (SampledToken(0, 3, 9),)
    assert scheduler.completed(StepResult(step.id, 4, sampled)) == []
    assert scheduler.completed(StepResult(step.id, 5, sampled)) == [Emitted(0, 0, 9, None, ())]


def test_a_sequence_with_a_high_limit_continues_where_there_is_less_capacity() -> None:
    one = world()
    one.submit(generation(0, LONG, max_tokens=100), generation(1))
    while len(one.text[0]) < 3:
        one.go_on()
    one.reform(replace(LIMITS, kv_tokens=100))
    one.finish()
    end = one.ends[0]
    assert isinstance(end, Finished)
    assert (end.reason, len(one.text[0])) == ("length", 20)


def test_what_does_not_fit_any_more_fails_with_its_text_kept() -> None:
    one = world()
    one.submit(generation(0, LONG, max_tokens=30), generation(1))
    while len(one.text[0]) < 3:
        one.go_on()
    one.reform(replace(LIMITS, kv_tokens=82))
    failed = one.ends[0]
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, Unavailable)
    one.finish()
    assert isinstance(one.ends[1], Finished)


def test_an_epoch_begins_once() -> None:
    one = world()
    one.reform(LIMITS)
    with pytest.raises(StaleEpoch):
        one.scheduler.reform(1, LIMITS)


def test_what_is_computed_again_does_not_count_for_its_owner() -> None:
    one = world(max_sequences=1)
    one.submit(generation(0, LONG, max_tokens=10, owner="ann"))
    while len(one.text[0]) < 5:
        one.go_on()
    one.submit(*(generation(sequence, LONG[::-1], max_tokens=10, owner="bob") for sequence in (1, 2, 3)))
    for _ in range(3):
        one.reform(replace(LIMITS, max_sequences=1))
        one.send()
    one.submit(generation(4, LONG[::-1], max_tokens=10, owner="ann"))
    one.finish()
    assert list(one.ends) == [0, 1, 4, 2, 3]


def test_what_is_copied_does_not_count_for_its_owner() -> None:
    one = world(max_sequences=1)
    one.submit(*(generation(sequence, LONG, max_tokens=10, owner="ann") for sequence in range(3)))
    for sequence in (3, 4, 5):
        one.submit(generation(sequence, (sequence,) * 60, max_tokens=10, owner="bob"))
    one.finish()
    # 89 positions for ann, 69 and 69 for bob, then twice 10 for ann.
    assert list(one.ends) == [0, 3, 4, 1, 2, 5]
