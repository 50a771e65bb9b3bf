"""The scheduler of one replica decides which sequences run and what each engine step computes, and reports events.

It is a state machine without clock or randomness: the same calls in the same order give the same steps.

**Engine steps.** There are as many decode batches as stages, each with up to ``1 + run_ahead`` steps in flight. A step
has a budget of positions (`SchedulerLimits.step_tokens`). Each sequence that decodes takes one position. A quarter of
the budget is reserved for prompts while there are any; long prompts are split into chunks.

**Ends.** A stop token or a cancellation ends a sequence at once. Tokens of its steps in flight are dropped.

**KV capacity.** A KV slot has capacity for a prompt and a typical answer, and grows when it is full. If the slot cannot
grow, its sequence is preempted. The sequence later restarts from its prompt and the tokens emitted.

**Lengths.** Prompt and generated tokens together are limited by the window and by the KV capacity. A sequence that
reaches this limit ends with reason "length".

**Encoders.** A text is a sequence with a prompt and no answer. It is computed whole in one step.

**Membership changes** (`Scheduler.reform`). KV slots are lost, and results of steps in flight are dropped. Sequences
that ran restart before any new one, from their prompts and the tokens emitted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from share_compute.errors import (
    Busy,
    Conflict,
    StaleEpoch,
    TooLong,
    Unavailable,
    UserError,
    VerificationFailed,
)
from share_compute.inference.scheduler.admission import Admission
from share_compute.inference.scheduler.batches import Batches
from share_compute.inference.scheduler.engine_steps import (
    Chunk,
    EngineStep,
    Opening,
    Outcome,
    Pooled,
    SlotGrowth,
    StepResult,
)
from share_compute.inference.scheduler.events import (
    Embedded,
    Emitted,
    Failed,
    Finished,
    FinishReason,
    SequenceEvent,
    Stats,
    Totals,
)
from share_compute.inference.scheduler.fair_queue import FairQueue
from share_compute.inference.scheduler.limits import SchedulerLimits
from share_compute.inference.scheduler.live_sequence import LiveSequence
from share_compute.inference.scheduler.options import Generation
from share_compute.inference.scheduler.slot_ledger import SlotLedger
from share_compute.inference.scheduler.text_ledger import TextLedger

_RETRY_S = (1, 60)
"""Shortest and longest retry delay for clients, in seconds."""
_UNKNOWN_RETRY_S = 5
"""Retry delay in seconds while the token rate is unknown."""


class Scheduler:
    """Scheduler of the sequences of one replica; see the module docstring.

    Args:
        limits: limits of the current stages.
        epoch: epoch of these stages.
    """

    def __init__(self, limits: SchedulerLimits, epoch: int = 0) -> None:
        self.limits = limits
        self.epoch = epoch
        self._queue = FairQueue()
        self._live: dict[int, LiveSequence] = {}
        self._totals = Totals()
        self._num_arrived = 0
        self._num_steps = 0
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        limits = self.limits
        self._ledger = TextLedger() if limits.embeds else SlotLedger(limits.kv_tokens)
        self._admission = Admission(limits, self._queue, self._ledger, self._totals)
        self._batches = Batches(limits.stages, 1 + limits.run_ahead)
        self._in_flight: dict[int, EngineStep] = {}
        """Engine steps whose results are not processed yet, in the order in which they were sent."""
        self._results: dict[int, StepResult] = {}
        """Results that wait for the result of an earlier step, by step id."""
        self._closes_now = False

    # -- client requests ---------------------------------------------------------------------------------------------

    def submit(self, *generations: Generation, tokens_per_s: float = 0.0) -> list[SequenceEvent]:
        """Add the sequences of one request, all or none of them.

        Args:
            generations: sequences to generate.
            tokens_per_s: recent token rate of the replica, from which the retry delay is computed; 0 if unknown.

        Returns:
            `Finished` for sequences that have nothing left to generate; they never start.

        Raises:
            UserError: a prompt is empty, or there are more sequences than `SchedulerLimits.max_queued`.
            TooLong: a prompt leaves no space for a token, or a text to embed is too long.
            Conflict: a new sequence has the number of a live sequence or of another new one.
            Busy: too many sequences wait already; ``details`` has the retry delay.
        """
        sequences = [
            LiveSequence(one, self._num_arrived + place, self._new_tokens(one), self.limits.answer_tokens)
            for place, one in enumerate(generations)
        ]
        ids = {live.id for live in sequences}
        taken = sorted(ids & self._live.keys())
        if taken or len(ids) < len(sequences):
            raise Conflict(
                f"sequences with these numbers exist already: {taken or sorted(ids)}",
                hint="number each sequence once",
            )
        ended = {live.id: reason for live in sequences if (reason := _ended_before(live))}
        waiting = [live for live in sequences if live.id not in ended]
        self._refuse_what_cannot_wait(waiting, tokens_per_s)
        self._num_arrived += len(sequences)
        for live in waiting:
            self._ledger.forget(live.id)
            self._live[live.id] = live
            live.first_step = self._num_steps
            self._queue.add(live)
        return [_finished(live, ended[live.id]) for live in sequences if live.id in ended]

    def cancel(self, sequence: int) -> list[SequenceEvent]:
        """Cancel a sequence; return its `Finished` event, or [] if it has ended already."""
        live = self._live.get(sequence)
        return [self._end(live, "cancelled")] if live else []

    @property
    def live(self) -> tuple[int, ...]:
        """Ids of the sequences that have not ended."""
        return tuple(self._live)

    def _new_tokens(self, generation: Generation) -> int:
        """Return the maximum number of tokens that may be generated after a prompt; 1 for a text to embed."""
        length, longest = len(generation.prompt), self.limits.longest_tokens
        if not length:
            raise UserError("the prompt is empty", hint="give at least one token to go on from")
        if self.limits.embeds and length > longest:
            raise TooLong(
                f"the text has {length} tokens; it can have {longest}",
                hint=f"shorten it to at most {longest} tokens",
                details={"prompt_tokens": length, "longest_tokens": longest},
            )
        if self.limits.embeds:
            return 1
        if length >= longest:
            raise TooLong(
                f"the prompt has {length} tokens; prompt and answer together can have {longest}",
                hint=f"shorten the prompt to at most {longest - 1} tokens",
                details={"prompt_tokens": length, "longest_tokens": longest},
            )
        return min(generation.options.max_tokens, longest - length)

    def _refuse_what_cannot_wait(self, sequences: list[LiveSequence], tokens_per_s: float) -> None:
        most, waiting = self.limits.max_queued, self._queue.num_waiting
        if len(sequences) > most:
            raise UserError(
                f"{len(sequences)} sequences at once are too many; at most {most} can wait",
                hint="ask for fewer in one request",
            )
        # Reserve 1/8 of the queue for owners with nothing queued, so that no owner fills it alone.
        if any(self._queue.num_waiting_of(live.owner) for live in sequences):
            most -= most // 8
        if sequences and waiting + len(sequences) > most:
            retry_after_s = self._retry_after_s(tokens_per_s)
            raise Busy(
                f"{waiting} sequences wait already",
                hint=f"try again in {retry_after_s} s",
                details={"retry_after_s": retry_after_s},
            )

    def _retry_after_s(self, tokens_per_s: float) -> int:
        """Return the expected seconds until half of the queued work is done, clamped to `_RETRY_S`.

        Return `_UNKNOWN_RETRY_S` if the token rate is unknown.
        """
        shortest, longest = _RETRY_S
        if tokens_per_s <= 0:
            return _UNKNOWN_RETRY_S
        ahead_tokens = sum(live.work_tokens for live in self._queue.queued()) / 2
        return round(min(max(ahead_tokens / tokens_per_s, shortest), longest))

    # -- stages ------------------------------------------------------------------------------------------------------

    def next_steps(self) -> list[EngineStep]:
        """Build all engine steps that may be sent now, and return them.

        The steps are recorded as sent, so the caller must send all of them to every stage, in this order.
        """
        self._batches.balance()
        steps: list[EngineStep] = []
        while made := [step for batch in self._batches.free() if (step := self._step(batch))]:
            steps += made
        return steps

    def completed(self, result: StepResult) -> list[SequenceEvent]:
        """Process the result of an engine step, and return the resulting events.

        Results are processed in the order of their steps, so a result waits until all earlier steps have results.
        Results of other epochs, and results that were processed before, change nothing.

        Raises:
            VerificationFailed: the outcomes are not those that the step requests; the result is not processed.
        """
        step = self._in_flight.get(result.step)
        if step is None or result.epoch != self.epoch:
            return []
        _verify(step, result)
        self._results[step.id] = result
        events: list[SequenceEvent] = []
        while (first := next(iter(self._in_flight), -1)) in self._results:
            self._batches.passed(self._in_flight.pop(first).batch)
            for sampled in self._results.pop(first).sampled:
                events += self._sampled(sampled, first)
        return events

    def reform(self, epoch: int, limits: SchedulerLimits) -> list[SequenceEvent]:
        """Continue on new stages, which have no KV slots yet.

        If there is less KV capacity than before, sequences may be limited to fewer tokens.

        Args:
            epoch: new epoch; later than the current one.
            limits: limits of the new stages.

        Returns:
            `Failed` for sequences whose tokens so far leave no capacity for another token on the new stages.

        Raises:
            StaleEpoch: ``epoch`` is not later than the current one.
        """
        if epoch <= self.epoch:
            raise StaleEpoch(f"epoch {epoch} is not later than {self.epoch}")
        self.limits, self.epoch = limits, epoch
        interrupted = [live for live in self._live.values() if live.is_open]
        self._queue.interrupt(interrupted)
        for live in interrupted:
            live.close()
        for live in self._live.values():
            live.settle()
        self._begin_epoch()
        narrow = [live for live in self._live.values() if live.most_tokens > limits.capacity_tokens]
        return [self._fail(live) for live in narrow if not live.shorten(limits.longest_tokens)]

    def drop_cached(self) -> None:
        """Free all KV slots of ended sequences in the next engine step."""
        self._ledger.drop_cached()
        self._closes_now = self._ledger.has_closes

    def stats(self) -> Stats:
        """Return the current statistics."""
        return Stats(
            queued=self._queue.num_waiting,
            interrupted=self._queue.num_interrupted,
            running=self._admission.num_open,
            owners=self._queue.num_owners,
            steps_in_flight=len(self._in_flight),
            kv_tokens=self._ledger.kv_tokens,
            kv_tokens_used=self._ledger.used_tokens,
            kv_tokens_cached=self._ledger.cached_tokens,
            totals=replace(self._totals),
        )

    # -- one engine step ---------------------------------------------------------------------------------------------

    def _step(self, batch: int) -> EngineStep | None:
        """Build the next engine step of a batch, record it as sent and return it; None if there is nothing to do."""
        budget = self.limits.step_tokens
        grows: list[SlotGrowth] = []
        # Slots grow before others are opened: a slot that cannot grow is closed, so no new slot may copy from it.
        decoding = [live for live in self._batches.members(batch) if self._has_capacity(live, grows)]
        for_prompts = max(1, budget // 4) if self._admission.has_prompts else 0
        chunks = [self._decode(live) for live in decoding[: budget - for_prompts]]
        decoding, budget = decoding[len(chunks) :], budget - len(chunks)
        opens: list[Opening] = []
        for chunk in self._prompts(batch, budget, opens):
            chunks.append(chunk)
            budget -= chunk.count
        chunks += [self._decode(live) for live in decoding[:budget]]
        if not chunks and not self._closes_now:
            return None
        self._closes_now = False
        for chunk in chunks:
            self._ledger.write(chunk.sequence, chunk.start + chunk.count)
        step = EngineStep(
            self._num_steps,
            self.epoch,
            batch,
            () if self.limits.embeds else tuple(opens),
            self._ledger.take_closes(),
            tuple(chunks),
            tuple(grows),
        )
        self._num_steps += 1
        self._in_flight[step.id] = step
        self._batches.sent(batch)
        self._totals.computed_tokens += step.num_tokens
        return step

    def _has_capacity(self, live: LiveSequence, grows: list[SlotGrowth]) -> bool:
        """Return whether a sequence can decode; preempt it if its KV slot is full and cannot grow."""
        if not live.is_full:
            return True
        if self._ledger.grow(live.id, live.wanted_tokens):
            grows.append(live.grow())
            return True
        self._batches.leave(live)
        self._admission.preempted(live)
        live.close()
        return False

    def _decode(self, live: LiveSequence) -> Chunk:
        chunk = live.decode(self._num_steps)
        self._queue.charge(live)
        if live.is_sent_whole:
            self._batches.leave(live)
        return chunk

    def _prompts(self, batch: int, budget: int, opens: list[Opening]) -> Iterator[Chunk]:
        """Yield chunks of the prompts of sequences that have started, and of sequences that this call starts."""
        while budget and (live := self._admission.next(opens, budget)):
            chunk = live.prefill(budget)
            budget -= chunk.count
            self._queue.charge(live)
            if chunk.samples:
                self._queue.prefilled(live)
                if not live.is_sent_whole:
                    self._batches.join(live, batch)
            yield chunk

    # -- one sequence ------------------------------------------------------------------------------------------------

    def _sampled(self, sampled: Outcome, step: int) -> Iterator[SequenceEvent]:
        live = self._live.get(sampled.sequence)
        if live is None or step < live.first_step:
            self._totals.wasted_tokens += 1
            return
        if isinstance(sampled, Pooled):
            self._remove(live)
            yield Embedded(live.id, live.prompt_tokens, sampled.vector)
            return
        self._totals.emitted_tokens += 1
        index = live.num_emitted
        live.append(sampled.token)
        if live.is_open:
            self._ledger.extend(live.id)
        cached = 0 if index else live.cached_tokens or 0
        yield Emitted(live.id, index, sampled.token, sampled.logprob, sampled.top, cached)
        if sampled.finish or live.num_emitted == live.new_tokens:
            yield self._end(live, sampled.finish or "length")

    def _end(self, live: LiveSequence, reason: FinishReason) -> Finished:
        self._remove(live)
        return _finished(live, reason)

    def _fail(self, live: LiveSequence) -> Failed:
        self._remove(live)
        return Failed(
            live.id,
            Unavailable(
                f"a sequence of {len(live.tokens)} tokens does not fit any more: the machines that are left "
                f"can keep {self.limits.capacity_tokens}",
                hint="try again when more machines have joined, or ask for fewer tokens",
            ),
        )

    def _remove(self, live: LiveSequence) -> None:
        del self._live[live.id]
        self._queue.end(live)
        if live.is_open:
            self._batches.leave(live)
            self._admission.ended(live)


def _ended_before(live: LiveSequence) -> FinishReason | None:
    """Return the finish reason of a sequence that ends before it starts; None if tokens are left to generate."""
    emitted, options = live.generation.emitted, live.generation.options
    if emitted and emitted[-1] in options.stop_token_ids:
        return "stop"
    return "length" if len(emitted) >= live.new_tokens else None


def _finished(live: LiveSequence, reason: FinishReason) -> Finished:
    return Finished(live.id, reason, live.num_emitted)


def _verify(step: EngineStep, result: StepResult) -> None:
    requested = sorted((chunk.sequence, chunk.start + chunk.count) for chunk in step.chunks if chunk.samples)
    sampled_at = sorted((sampled.sequence, sampled.position) for sampled in result.sampled)
    if requested != sampled_at:
        raise VerificationFailed(
            f"the last stage did not sample the requested sequences in engine step {step.id}",
            hint="form the stages again",
            details={"requested": requested, "sampled": sampled_at},
        )
