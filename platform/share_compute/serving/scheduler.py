"""The scheduler of one deployment: which sequences run, what each turn computes, and what has become of them.

A state machine without clock or randomness: the same calls in the same order give the same turns. Its server calls
`Scheduler.submit` and `Scheduler.cancel` for clients and `Scheduler.completed` for what the last pool tells, then sends
what `Scheduler.next_turns` returns, in that order, to all pools (see `share_compute.serving.turns` for what pools do).

**Turns.** There are as many batches as pools, and each may have ``run_ahead`` turns in flight beside one: while one
pool computes for one batch, the others compute for the others, and the next turn waits at the first pool before the
tokens of the last are back. In a turn first its batch decodes, one token each; what is left of its budget goes to
prompts, in chunks: those of whoever was served least. Chunks of one prompt may be in turns of different batches, so a
long prompt keeps all pools busy. Where decodes would take the whole budget, prompts get a quarter, and decodes rotate.

**Ends.** The server knows ahead when the last token is due, and sends no turn beyond it. It does not know of a stop
token, nor of a cancellation, before it comes: turns in flight then compute one position each for nothing, at most
``1 + run_ahead`` of them, and their tokens are dropped. The sequence has ended at once all the same, and its room is
free at once: whatever turn closes its slab, or copies from it, comes after those in flight, at every pool.

**Room.** A slab has room for a prompt and a typical answer, and grows when that is full; where it cannot, its sequence
is preempted (see `share_compute.serving.admission`) and begun again from what was emitted, as after a change of pools.

**Lengths.** A sequence, prompt and generated tokens together, becomes at most as long as the window (or as what memory
holds of one sequence): it ends there with reason "length". So a prompt must be shorter than the window. One that asks
for no tokens ends at once with reason "length", and nothing is computed.

**Encoders.** A text is a sequence with a prompt and no answer. All of it must be computed at one time, since its tokens
all see each other: it goes into the first turn that has room for it, is never cut, and ends when its vector comes.

**A change of pools** (`Scheduler.reform`). All slabs and all turns in flight are forgotten. Every sequence that ran is
begun again, before any new one, from its prompt and the tokens emitted; results of turns of earlier epochs are dropped.
Since draws depend on seed and position only, the tokens are the same as if nothing had happened.
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
from share_compute.serving.admission import Admission
from share_compute.serving.batches import Batches
from share_compute.serving.events import (
    Embedded,
    Emitted,
    Failed,
    Finished,
    FinishReason,
    SequenceEvent,
    Stats,
    Totals,
)
from share_compute.serving.fair_queue import FairQueue
from share_compute.serving.limits import Limits
from share_compute.serving.live_sequence import LiveSequence
from share_compute.serving.options import Generation
from share_compute.serving.slab_ledger import SlabLedger
from share_compute.serving.text_ledger import TextLedger
from share_compute.serving.turns import Chunk, Growth, Opening, Outcome, Pooled, Turn, TurnResult

_RETRY_S = (1, 60)
"""Shortest and longest time after which a client is told to try again."""
_UNKNOWN_RETRY_S = 5


class Scheduler:
    """All sequences of one deployment.

    Args:
        limits: of the pools that are there.
        epoch: of these pools.
    """

    def __init__(self, limits: Limits, epoch: int = 0) -> None:
        self.limits = limits
        self.epoch = epoch
        self._queue = FairQueue()
        self._live: dict[int, LiveSequence] = {}
        self._totals = Totals()
        self._num_arrived = 0
        self._num_turns = 0
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        limits = self.limits
        self._ledger = TextLedger() if limits.embeds else SlabLedger(limits.kv_tokens)
        self._admission = Admission(limits, self._queue, self._ledger, self._totals)
        self._batches = Batches(limits.pools, 1 + limits.run_ahead)
        self._in_flight: dict[int, Turn] = {}
        """Turns whose results were not taken in yet, in the order that they were sent."""
        self._results: dict[int, TurnResult] = {}
        """Results that came before that of an earlier turn."""
        self._closes_now = False

    # -- what clients ask for ----------------------------------------------------------------------------------------

    def submit(self, *generations: Generation, tokens_per_s: float = 0.0) -> list[SequenceEvent]:
        """Take in sequences, all or none of them: those of one request come together.

        Args:
            generations: what is asked for.
            tokens_per_s: rate at which the deployment has computed lately, 0 when unknown: says when to try again.

        Returns:
            `Finished` for those that have nothing left to generate; they are never begun.

        Raises:
            UserError: a prompt is empty, or there are more sequences than may ever wait.
            TooLong: a prompt leaves no room for a token.
            Conflict: there is a sequence of this number.
            Busy: too many wait already; says when to try again.
        """
        lives = [
            LiveSequence(one, self._num_arrived + place, self._new_tokens(one), self.limits.answer_tokens)
            for place, one in enumerate(generations)
        ]
        ids = {live.id for live in lives}
        taken = sorted(ids & self._live.keys())
        if taken or len(ids) < len(lives):
            raise Conflict(
                f"sequences of these numbers are there: {taken or sorted(ids)}",
                mend="number each sequence once",
            )
        ended = {live.id: reason for live in lives if (reason := _ended_before(live))}
        waiting = [live for live in lives if live.id not in ended]
        self._refuse_what_cannot_wait(waiting, tokens_per_s)
        self._num_arrived += len(lives)
        for live in waiting:
            self._ledger.forget(live.id)
            self._live[live.id] = live
            live.first_turn = self._num_turns
            self._queue.add(live)
        return [_finished(live, ended[live.id]) for live in lives if live.id in ended]

    def cancel(self, sequence: int) -> list[SequenceEvent]:
        """End a sequence that nobody wants any more; [] where it has ended already."""
        live = self._live.get(sequence)
        return [self._end(live, "cancelled")] if live else []

    def _new_tokens(self, generation: Generation) -> int:
        """Return how many tokens a sequence may get, from its prompt on."""
        length, longest = len(generation.prompt), self.limits.longest_tokens
        if not length:
            raise UserError("the prompt is empty", mend="give at least one token to go on from")
        if self.limits.embeds and length > longest:
            raise TooLong(
                f"the text has {length} tokens; it can have {longest}",
                mend=f"shorten it to at most {longest} tokens",
                details={"prompt_tokens": length, "longest_tokens": longest},
            )
        if self.limits.embeds:
            return 1
        if length >= longest:
            raise TooLong(
                f"the prompt has {length} tokens; prompt and answer together can have {longest}",
                mend=f"shorten the prompt to at most {longest - 1} tokens",
                details={"prompt_tokens": length, "longest_tokens": longest},
            )
        return min(generation.options.max_tokens, longest - length)

    def _refuse_what_cannot_wait(self, lives: list[LiveSequence], tokens_per_s: float) -> None:
        most, waiting = self.limits.max_queued, self._queue.num_waiting
        if len(lives) > most:
            raise UserError(
                f"{len(lives)} sequences at once are too many; at most {most} can wait",
                mend="ask for fewer in one request",
            )
        # The last places are for owners who have none, so that nobody fills the queue before the others.
        if any(self._queue.num_waiting_of(live.owner) for live in lives):
            most -= most // 8
        if lives and waiting + len(lives) > most:
            retry_after_s = self._retry_after_s(tokens_per_s)
            raise Busy(
                f"{waiting} sequences wait already",
                mend=f"try again in {retry_after_s} s",
                details={"retry_after_s": retry_after_s},
            )

    def _retry_after_s(self, tokens_per_s: float) -> int:
        """Return the time until half of what waits is done."""
        shortest, longest = _RETRY_S
        if tokens_per_s <= 0:
            return _UNKNOWN_RETRY_S
        ahead_tokens = sum(live.work_tokens for live in self._queue.queued()) / 2
        return round(min(max(ahead_tokens / tokens_per_s, shortest), longest))

    # -- what pools do -----------------------------------------------------------------------------------------------

    def next_turns(self) -> list[Turn]:
        """Return all turns that may be sent now, to be sent in this order."""
        self._batches.balance()
        turns: list[Turn] = []
        while made := [turn for batch in self._batches.free() if (turn := self._turn(batch))]:
            turns += made
        return turns

    def completed(self, result: TurnResult) -> list[SequenceEvent]:
        """Take in what came of a turn; the results of earlier turns are told first, whenever they come.

        Results of earlier epochs, and those that were taken in before, change nothing.

        Raises:
            VerificationFailed: the result is not of what the turn samples; nothing of it is taken in.
        """
        turn = self._in_flight.get(result.turn)
        if turn is None or result.epoch != self.epoch:
            return []
        _verify(turn, result)
        self._results[turn.id] = result
        events: list[SequenceEvent] = []
        while (first := next(iter(self._in_flight), -1)) in self._results:
            self._batches.passed(self._in_flight.pop(first).batch)
            for sampled in self._results.pop(first).sampled:
                events += self._sampled(sampled, first)
        return events

    def reform(self, epoch: int, limits: Limits) -> list[SequenceEvent]:
        """Go on with other pools, that have no slabs. What has less room there ends earlier, at its length.

        Args:
            epoch: later than that of the pools before.
            limits: of these pools.

        Returns:
            `Failed` for sequences whose tokens so far are more than these pools can hold.

        Raises:
            StaleEpoch: this epoch, or a later one, was begun before.
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
        narrow = [live for live in self._live.values() if live.most_tokens > limits.room_tokens]
        return [self._fail(live) for live in narrow if not live.shorten(limits.longest_tokens)]

    def drop_cached(self) -> None:
        """Give back the memory of all slabs whose sequences have ended: the next turn closes them."""
        self._ledger.drop_cached()
        self._closes_now = self._ledger.has_closes

    def stats(self) -> Stats:
        """Return what is going on."""
        return Stats(
            queued=self._queue.num_waiting,
            interrupted=self._queue.num_interrupted,
            running=self._admission.num_open,
            owners=self._queue.num_owners,
            turns_in_flight=len(self._in_flight),
            kv_tokens=self._ledger.kv_tokens,
            kv_tokens_used=self._ledger.used_tokens,
            kv_tokens_cached=self._ledger.cached_tokens,
            totals=replace(self._totals),
        )

    # -- one turn ----------------------------------------------------------------------------------------------------

    def _turn(self, batch: int) -> Turn | None:
        """Return the next turn of a batch; None where it has nothing to do."""
        room = self.limits.turn_tokens
        grows: list[Growth] = []
        # First: what is begun in this turn may copy from these slabs.
        decoding = [live for live in self._batches.members(batch) if self._has_room(live, grows)]
        for_prompts = max(1, room // 4) if self._admission.has_prompts else 0
        chunks = [self._decode(live) for live in decoding[: room - for_prompts]]
        decoding, room = decoding[len(chunks) :], room - len(chunks)
        opens: list[Opening] = []
        for chunk in self._prompts(batch, room, opens):
            chunks.append(chunk)
            room -= chunk.count
        chunks += [self._decode(live) for live in decoding[:room]]
        if not chunks and not self._closes_now:
            return None
        self._closes_now = False
        for chunk in chunks:
            self._ledger.write(chunk.sequence, chunk.start + chunk.count)
        turn = Turn(
            self._num_turns,
            self.epoch,
            batch,
            () if self.limits.embeds else tuple(opens),
            self._ledger.take_closes(),
            tuple(chunks),
            tuple(grows),
        )
        self._num_turns += 1
        self._in_flight[turn.id] = turn
        self._batches.sent(batch)
        self._totals.computed_tokens += turn.num_tokens
        return turn

    def _has_room(self, live: LiveSequence, grows: list[Growth]) -> bool:
        """Return whether a sequence can decode; one whose slab is full and cannot grow gives it up."""
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
        chunk = live.decode(self._num_turns)
        self._queue.charge(live)
        if live.is_sent_whole:
            self._batches.leave(live)
        return chunk

    def _prompts(self, batch: int, room: int, opens: list[Opening]) -> Iterator[Chunk]:
        """Yield chunks of prompts, of sequences that are begun now or were begun before."""
        while room and (live := self._admission.next(opens, room)):
            chunk = live.prefill(room)
            room -= chunk.count
            self._queue.charge(live)
            if chunk.samples:
                self._queue.prefilled(live)
                if not live.is_sent_whole:
                    self._batches.join(live, batch)
            yield chunk

    # -- one sequence ------------------------------------------------------------------------------------------------

    def _sampled(self, sampled: Outcome, turn: int) -> Iterator[SequenceEvent]:
        live = self._live.get(sampled.sequence)
        if live is None or turn < live.first_turn:
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
                f"can keep {self.limits.room_tokens}",
                mend="try again when more machines are there, or ask for fewer tokens",
            ),
        )

    def _remove(self, live: LiveSequence) -> None:
        del self._live[live.id]
        self._queue.end(live)
        if live.is_open:
            self._batches.leave(live)
            self._admission.ended(live)


def _ended_before(live: LiveSequence) -> FinishReason | None:
    """Return why a sequence has nothing left to generate, from what was emitted before; None where it has."""
    emitted, options = live.generation.emitted, live.generation.options
    if emitted and emitted[-1] in options.stop_token_ids:
        return "stop"
    return "length" if len(emitted) >= live.new_tokens else None


def _finished(live: LiveSequence, reason: FinishReason) -> Finished:
    return Finished(live.id, reason, live.num_emitted)


def _verify(turn: Turn, result: TurnResult) -> None:
    asked = sorted((chunk.sequence, chunk.start + chunk.count) for chunk in turn.chunks if chunk.samples)
    told = sorted((sampled.sequence, sampled.position) for sampled in result.sampled)
    if asked != told:
        raise VerificationFailed(
            f"the last pool sampled other tokens in turn {turn.id} than it was asked for",
            mend="form the pools anew",
            details={"asked": asked, "told": told},
        )
