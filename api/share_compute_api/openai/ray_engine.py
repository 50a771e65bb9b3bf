"""The engine of one deployment: accepts requests, and submits their sequences to replicas.

`routing` sorts the replicas by expected delay. `recovery` tracks the live sequences. A sequence continues on another
replica when its replica is lost, gives the sequence up, or is not ready for some time.

While no replica is ready, for example because the deployment is scaled to zero, sequences wait in the engine. The
number of waiting sequences and their waiting time are limited.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any

from share_compute.errors import Busy, Conflict, ContributorLost, ShareComputeError, TooLong, Unavailable
from share_compute.inference.autoscaler import Demand
from share_compute.inference.scheduler.options import Generation
from share_compute_api.openai.embedding import embedded
from share_compute_api.openai.engine import RETRY_AFTER_S, ModelFacts
from share_compute_api.openai.metering import Meter
from share_compute_api.openai.recovery import RETRY_S, RequestStream, Resumable, SequenceRecovery, now_s
from share_compute_api.openai.replica import Replica
from share_compute_api.openai.routing import Router

_PATIENCE_S = 120.0
"""Default of `RayEngine.patience_s`, in seconds."""
_MOST_WAITING = 512
"""Maximum number of sequences that wait while no replica is ready. A request may exceed it if no sequence waits yet."""
_log = logging.getLogger(__name__)


class RayEngine:
    """Answers the requests to one deployment; all methods must be called in the event loop's thread.

    Args:
        facts: facts about the model.
        meter: records token latencies and ends of requests.
    """

    def __init__(self, facts: ModelFacts, meter: Meter) -> None:
        self.facts = facts
        self.patience_s = _PATIENCE_S
        """Seconds after which a waiting sequence fails if no replica is ready."""
        self.reason = "its server starts"
        """Reason why no replica answers; shown to clients while no replica answers."""
        self._meter = meter
        self._router = Router()
        self._recovery = SequenceRecovery(facts.name, self._router, meter, self._place_freed)
        self._listening: dict[Replica, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._new: set[asyncio.Task[None]] = set()
        """Tasks that submit the sequences of new requests."""
        self._closed: ShareComputeError | None = None
        self._placing: asyncio.Task[None] | None = None
        """Task that submits waiting sequences to replicas."""
        self._alarm: asyncio.TimerHandle | None = None
        """Timer that fails sequences which have waited too long."""

    # -- clients -----------------------------------------------------------------------------------------------------

    async def generate(self, generations: Sequence[Generation]) -> RequestStream:
        """Accept the sequences of one request; see `TextEngine.generate`."""
        if self._closed is not None:
            raise self._closed
        self._refuse_too_many(len(generations))
        numbers = [generation.sequence for generation in generations]
        stream = RequestStream(numbers, self._cancel)
        sequences = self._recovery.add(generations, stream)
        placing = asyncio.create_task(self._place_new(sequences))
        self._new.add(placing)
        placing.add_done_callback(self._new.discard)
        try:
            await asyncio.shield(placing)
        # the sequence ends even if the client disconnects before the replica has answered
        except BaseException:
            for number in numbers:
                self._end(self._recovery.forget(number))
            raise
        self._meter.came(sum(len(generation.prompt) for generation in generations))
        return stream

    async def embed(self, owner: str, prompts: Sequence[tuple[int, ...]]) -> list[list[float]]:
        """Compute the vectors of texts; see `VectorEngine.embed`."""
        return await embedded(self.generate, owner, prompts)

    def _refuse_too_many(self, number: int) -> None:
        if self._router.takers:
            return
        waiting = self.demand.waiting
        # If no sequence waits, any size is accepted. Otherwise a large request could never start a replica.
        if waiting and waiting + number > _MOST_WAITING:
            raise Busy(
                f"{self.facts.name} does not answer now ({self.reason}), and {waiting} sequences wait for it",
                hint=f"try again in {RETRY_AFTER_S} s",
                details={"retry_after_s": RETRY_AFTER_S},
            )

    def _cancel(self, sequence: int, is_complete: bool) -> None:
        self._end(self._recovery.cancelled(sequence, is_complete=is_complete))

    def _end(self, live: Resumable | None) -> None:
        """At its replica, cancel a sequence that was removed from the table; do nothing for None."""
        # A replica must receive the sequence before its cancellation, so `_place` cancels a sequence that is still
        # being submitted.
        if live is not None and live.replica is not None and not live.is_placing:
            self._spawn_cancelling(live.replica, [live])

    def _spawn_cancelling(self, replica: Replica, sequences: Sequence[Resumable]) -> None:
        self._spawn(self._send_cancelled(replica, [live.generation.sequence for live in sequences]))

    async def _send_cancelled(self, replica: Replica, sequences: Sequence[int]) -> None:
        try:
            await replica.cancel(sequences)
        except ShareComputeError as failure:
            _log.info("%s: %s", self.facts.name, failure.message)

    # -- replicas ----------------------------------------------------------------------------------------------------

    def add(self, replica: Replica) -> None:
        """Start to read a replica's events; the replica gets requests when `see` reports it as ready."""
        self._router.add(replica)
        self._listening[replica] = asyncio.create_task(self._listen(replica))

    async def _listen(self, replica: Replica) -> None:
        await self._recovery.listen(replica)
        self.remove(replica)

    def see(self, replica: Replica, tokens_per_s: float | None, *, is_ready: bool) -> None:
        """Record the status of a replica, and submit waiting sequences.

        If the replica is overdue (`Router.is_overdue`), its sequences move to other replicas.

        Args:
            replica: the replica.
            tokens_per_s: the replica's predicted tokens per second at full load; None if unknown.
            is_ready: whether the replica is ready.
        """
        if replica not in self._router:
            return
        time_s = now_s()
        if self._router.see(replica, tokens_per_s, is_ready=is_ready, now_s=time_s):
            # The start-up time of the replica does not count as idle time.
            self._recovery.idle_since_s = time_s
        if self._router.is_overdue(replica, time_s):
            moved = [live for live in self._recovery.of(replica) if not live.is_placing]
            if moved:
                self._recovery.free(moved)
                self._spawn_cancelling(replica, moved)
        self._spawn_placing()

    def retire(self, replica: Replica, *, is_draining: bool = True) -> None:
        """Give a replica no new sequences while it finishes its current ones; with ``is_draining=False``, resume."""
        if replica in self._router:
            self._router.retire(replica, is_draining=is_draining)
            self._spawn_placing()

    def remove(self, replica: Replica) -> None:
        """Remove a replica; its sequences wait for other replicas."""
        if replica not in self._router:
            return
        self._router.remove(replica)
        listening = self._listening.pop(replica)
        if listening is not asyncio.current_task():
            listening.cancel()
        self._recovery.free(self._recovery.of(replica))
        self._spawn_placing()

    def ongoing(self, replica: Replica) -> int:
        """Return the number of sequences on a replica, running and queued."""
        return len(self._recovery.of(replica))

    @property
    def demand(self) -> Demand:
        """Number of sequences on each replica, number of waiting sequences, and the idle time in seconds.

        The idle time is None while a sequence is live or no replica is ready.
        """
        counts, waiting = self._recovery.counts()
        is_idle = self._recovery.is_empty and self._router.is_any_ready
        idle_s = now_s() - self._recovery.idle_since_s if is_idle else None
        return Demand(tuple(counts), waiting, idle_s)

    async def close(self, error: ShareComputeError) -> None:
        """Stop the engine; all unfinished sequences end with ``error``."""
        self._closed = error
        if self._alarm is not None:
            self._alarm.cancel()
        self._recovery.close(error)
        tasks = [*self._listening.values(), *self._tasks]
        for replica in tuple(self._router):
            self._router.remove(replica)
        self._listening.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- waiting -----------------------------------------------------------------------------------------------------

    def _place_freed(self) -> None:
        """Start a task that submits waiting sequences to replicas, and limit their waiting time."""
        self._watch_waiting()
        self._spawn_placing()

    def _watch_waiting(self) -> None:
        """Set the timer that fails sequences which wait too long."""
        waiting_since_s = [live.waiting_since_s for live in self._recovery.waiting]
        if waiting_since_s and self._alarm is None and self._closed is None:
            self._alarm = asyncio.get_running_loop().call_at(
                min(waiting_since_s) + self.patience_s, self._give_up
            )

    def _give_up(self) -> None:
        self._alarm = None
        time_s = now_s()
        for live in self._recovery.waiting:
            if time_s - live.waiting_since_s < self.patience_s:
                continue
            if self._router.takers:  # replicas are ready, so the sequence may wait longer
                live.waiting_since_s = time_s
                continue
            self._recovery.fail(live, self._not_ready(live))
        self._watch_waiting()

    def _not_ready(self, live: Resumable) -> Unavailable:
        details: dict[str, Any] = {"retry_after_s": RETRY_AFTER_S, "waited_s": self.patience_s}
        if not live.emitted:
            details |= {"param": "model", "code": "model_not_ready"}
        return Unavailable(
            f"{self.facts.name} did not answer for {self.patience_s:g} s: {self.reason}",
            hint=f"try again in {RETRY_AFTER_S} s",
            details=details,
        )

    # -- placing -----------------------------------------------------------------------------------------------------

    async def _place_new(self, sequences: Sequence[Resumable]) -> None:
        """Submit new sequences with `_place`; remove them from the table if that fails."""
        try:
            await self._place(sequences)
        except BaseException:
            for live in sequences:
                self._recovery.forget(live.generation.sequence)
            raise

    async def _place(self, sequences: Sequence[Resumable]) -> None:
        """Submit sequences together to one replica; if no replica is available, let the sequences wait.

        ``is_placing`` must be set for each sequence.

        Raises:
            ShareComputeError: replicas rejected the sequences, and none accepted them.
        """
        try:
            refusal = await self._offer(sequences)
        finally:
            for live in sequences:
                live.is_placing = False
        unwanted: dict[Replica, list[Resumable]] = {}
        for live in sequences:
            if live.replica is not None and not self._recovery.has(live):
                unwanted.setdefault(live.replica, []).append(live)
        for replica, ended in unwanted.items():
            self._spawn_cancelling(replica, ended)
        if refusal is not None:
            raise refusal
        if any(live.waits and self._recovery.has(live) for live in sequences):
            self._watch_waiting()
            self._spawn_placing()

    async def _offer(self, sequences: Sequence[Resumable]) -> ShareComputeError | None:
        """Submit sequences to the first replica that accepts them.

        Return an error if replicas rejected the sequences and none accepted them; else return None.
        """
        refusal: ShareComputeError | None = None
        for replica in self._router.in_turn(len(sequences), self.ongoing):
            sequences = [live for live in sequences if self._recovery.has(live)]
            if not sequences:
                return None
            for live in sequences:
                live.replica = replica
            try:
                await replica.submit([live.rest() for live in sequences])
            except Conflict:
                return None  # an earlier call of `submit` has delivered the sequences
            except ContributorLost:
                self.remove(replica)
            except (Busy, TooLong, Unavailable) as failure:  # another replica may have more KV capacity
                refusal = failure if not isinstance(refusal, Busy) else refusal
            except BaseException:
                for live in sequences:
                    live.replica = None
                raise
            else:
                return None
            for live in sequences:
                live.replica = None
        return refusal

    def _spawn_placing(self) -> None:
        is_placing = self._placing is not None and not self._placing.done()
        if self._router.takers and not is_placing:
            self._placing = self._spawn(self._place_waiting())

    async def _place_waiting(self) -> None:
        """Submit waiting sequences to replicas in order of arrival; retry while the replicas are full."""
        while self._router.takers:
            waiting = self._recovery.waiting
            if not waiting:
                return
            for live in waiting:
                if not live.waits or not self._recovery.has(live):
                    continue
                live.is_placing = True
                try:
                    await self._place([live])
                except Busy:
                    await asyncio.sleep(RETRY_S)
                    break
                except ShareComputeError as failure:
                    self._recovery.fail(live, failure)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
