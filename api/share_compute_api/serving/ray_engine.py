"""The engine of a deployment: sends requests to the replica with the least to do, and survives the loss of any replica.

The request of each sequence and its emitted tokens are kept here until the sequence ends. When the process that serves
a replica dies, its sequences go to another replica, or to the next one that is started, and continue after the emitted
tokens. The same happens when a replica gives a sequence up or is not ready for a while, and another replica answers.

While no replica answers, because none was wanted or none is ready yet, sequences wait here. Their number and their
waiting time are limited.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from share_compute.errors import Busy, Conflict, ContributorLost, ShareComputeError, TooLong, Unavailable
from share_compute.serving.autoscaler import Demand
from share_compute.serving.events import Emitted, Failed, SequenceEvent
from share_compute.serving.options import Generation
from share_compute.serving.sharing import Backlog, in_turn
from share_compute_api.serving.embedding import embedded
from share_compute_api.serving.engine import RETRY_AFTER_S, ModelFacts, Stream
from share_compute_api.serving.mailboxes import Mailbox, Mailboxes
from share_compute_api.serving.metering import Meter
from share_compute_api.serving.replica import Replica

_PULL_S = 10.0
"""Longest wait for the next events, in seconds."""
_RETRY_S = 0.5
"""Pause before a failed action is tried again, in seconds."""
_PATIENCE_S = 120.0
"""Default of the time that sequences wait for a replica, in seconds."""
_MOST_WAITING = 512
"""Most sequences that may wait for a replica."""
_MOVES_AFTER_S = 10.0
"""Seconds that a replica is not ready before others continue its sequences; most are ready again sooner."""
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Live:
    """A sequence that has not ended."""

    generation: Generation
    came_s: float
    emitted: list[int] = field(default_factory=list)
    told_s: float = 0.0
    """Time at which its last token was reported."""
    replica: Replica | None = None
    """Replica that computes it or is asked to take it; None while it waits for one."""
    is_placing: bool = False
    """Whether a replica is being asked to take it. Until that replica answers, no other is asked, and it is not
    cancelled."""
    waits_s: float = 0.0
    """Time since when it waits for a replica."""

    @property
    def waits(self) -> bool:
        """Whether it is waiting to be given to a replica."""
        return self.replica is None and not self.is_placing

    def rest(self) -> Generation:
        """Return the generation that remains, after the emitted tokens."""
        return self.generation.model_copy(update={"emitted": tuple(self.emitted)})


@dataclass(slots=True)
class _Server:
    """The engine's state of one replica."""

    listening: asyncio.Task[None]
    is_ready: bool = False
    unready_since_s: float | None = None
    is_leaving: bool = False
    """Whether it only finishes its sequences, and gets no new ones."""
    tokens_per_s: float | None = None

    @property
    def takes(self) -> bool:
        """Whether it gets new requests."""
        return self.is_ready and not self.is_leaving


class RayEngine:
    """Answers for one deployment; all calls come from the event loop's thread.

    Args:
        facts: facts about the model.
        meter: records token latencies and ends of requests.
    """

    def __init__(self, facts: ModelFacts, meter: Meter) -> None:
        self.facts = facts
        self.patience_s = _PATIENCE_S
        """Seconds that sequences wait for a replica."""
        self.reason = "its server starts"
        """Reason why no replica answers, while none does."""
        self._meter = meter
        self._live: dict[int, _Live] = {}
        self._mail = Mailboxes(self._cancel)
        self._servers: dict[Replica, _Server] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._placings: set[asyncio.Task[None]] = set()
        self._closed: ShareComputeError | None = None
        self._idle_since_s = self._now_s()
        self._placing: asyncio.Task[None] | None = None
        """Task that gives waiting sequences to replicas."""
        self._alarm: asyncio.TimerHandle | None = None
        """Timer that gives up sequences that wait for too long."""

    # -- clients -----------------------------------------------------------------------------------------------------

    async def generate(self, generations: Sequence[Generation]) -> Sequence[Stream]:
        """Accept the sequences of one request; see `TextEngine.generate`."""
        return await self._begin(generations)

    async def embed(self, owner: str, prompts: Sequence[tuple[int, ...]]) -> list[list[float]]:
        """Turn texts into vectors; see `VectorEngine.embed`."""
        return await embedded(self._begin, owner, prompts)

    async def _begin(self, generations: Sequence[Generation]) -> list[Mailbox]:
        if self._closed is not None:
            raise self._closed
        self._refuse_too_many(len(generations))
        numbers = [generation.sequence for generation in generations]
        streams = self._mail.open(numbers)
        now_s = self._now_s()
        lives = [_Live(generation, now_s, waits_s=now_s, is_placing=True) for generation in generations]
        self._live.update(zip(numbers, lives, strict=True))
        placing = asyncio.create_task(self._place_new(lives))
        self._placings.add(placing)
        placing.add_done_callback(self._placings.discard)
        try:
            await asyncio.shield(placing)
        except BaseException:  # also when the client disconnects meanwhile
            self._mail.discard(numbers)
            for number in numbers:
                self._end(number)
            raise
        self._meter.came(sum(len(generation.prompt) for generation in generations))
        return streams

    def _refuse_too_many(self, number: int) -> None:
        if self._takers:
            return
        waiting = self.demand.waiting
        # The first request is accepted however large it is: else no replica would be started for it.
        if waiting and waiting + number > _MOST_WAITING:
            raise Busy(
                f"{self.facts.name} does not answer now ({self.reason}), and {waiting} sequences wait for it",
                hint=f"try again in {RETRY_AFTER_S} s",
                details={"retry_after_s": RETRY_AFTER_S},
            )

    def _cancel(self, sequence: int, is_complete: bool) -> None:
        live = self._end(sequence)
        if live is not None:
            self._meter.ended("stop" if is_complete else "abort", self._now_s() - live.came_s)

    def _end(self, sequence: int) -> _Live | None:
        live = self._forget(sequence)
        # A replica must not hear of an end before it has heard of the sequence: `_place` reports the end later.
        if live is not None and live.replica is not None and not live.is_placing:
            self._spawn(self._tell_cancelled(live.replica, [sequence]))
        return live

    async def _tell_cancelled(self, replica: Replica, sequences: Sequence[int]) -> None:
        try:
            await replica.cancel(sequences)
        except ShareComputeError as failure:
            _log.info("%s: %s", self.facts.name, failure.message)

    # -- replicas ----------------------------------------------------------------------------------------------------

    def add(self, replica: Replica) -> None:
        """Listen to a replica from now on; it gets requests once `see` reports it ready."""
        self._servers[replica] = _Server(asyncio.create_task(self._listen(replica)))

    def see(self, replica: Replica, tokens_per_s: float | None, *, is_ready: bool) -> None:
        """Record the status of a replica.

        Args:
            replica: the replica.
            tokens_per_s: its predicted throughput with all sequences in flight.
            is_ready: whether it answers.
        """
        server, now_s = self._servers.get(replica), self._now_s()
        if server is None:
            return
        if is_ready and not server.is_ready:
            self._idle_since_s = now_s  # it was started for requests, so its idle time starts now
        server.is_ready, server.tokens_per_s = is_ready, tokens_per_s
        if is_ready:
            server.unready_since_s = None
        elif server.unready_since_s is None:
            server.unready_since_s = now_s
        elif now_s - server.unready_since_s >= _MOVES_AFTER_S and self._takers:
            moved = [number for number in self._sequences_of(replica) if not self._live[number].is_placing]
            if moved:
                self._free(moved)
                self._spawn(self._tell_cancelled(replica, moved))
        self._spawn_placing()

    def retire(self, replica: Replica, *, is_leaving: bool = True) -> None:
        """Give a replica no new sequences while it ends the present ones; or let it take requests again."""
        server = self._servers.get(replica)
        if server is not None:
            server.is_leaving = is_leaving
            self._spawn_placing()

    def remove(self, replica: Replica) -> None:
        """Use a replica no more; its sequences continue elsewhere."""
        server = self._servers.pop(replica, None)
        if server is None:
            return
        if server.listening is not asyncio.current_task():
            server.listening.cancel()
        self._free(self._sequences_of(replica))
        self._spawn_placing()

    def _sequences_of(self, replica: Replica) -> list[int]:
        return [number for number, live in self._live.items() if live.replica is replica]

    def _free(self, sequences: Sequence[int]) -> None:
        """Let sequences wait for another replica."""
        now_s = self._now_s()
        for number in sequences:
            self._live[number].replica, self._live[number].waits_s = None, now_s
        self._watch_waiting()

    def ongoing(self, replica: Replica) -> int:
        """Return the number of sequences that a replica has, running and queued."""
        return len(self._sequences_of(replica))

    @property
    def demand(self) -> Demand:
        """Sequences of each replica, waiting sequences, and the idle time."""
        counts = dict.fromkeys(self._servers, 0)
        waiting = 0
        for live in self._live.values():
            if live.replica is None:  # also while a new one is asked about
                waiting += 1
            else:
                counts[live.replica] = counts.get(live.replica, 0) + 1
        is_idle = not self._live and any(server.is_ready for server in self._servers.values())
        idle_s = self._now_s() - self._idle_since_s if is_idle else None
        return Demand(tuple(counts.values()), waiting, idle_s)

    async def close(self, error: ShareComputeError) -> None:
        """Stop answering; waiting clients get this error."""
        self._closed = error
        if self._alarm is not None:
            self._alarm.cancel()
        self._live.clear()
        self._mail.fail(error)
        tasks = [*(server.listening for server in self._servers.values()), *self._tasks]
        self._servers.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- waiting -----------------------------------------------------------------------------------------------------

    def _watch_waiting(self) -> None:
        """Set the timer that gives up sequences which wait too long."""
        waits_s = [live.waits_s for live in self._live.values() if live.waits]
        if waits_s and self._alarm is None and self._closed is None:
            self._alarm = asyncio.get_running_loop().call_at(min(waits_s) + self.patience_s, self._give_up)

    def _give_up(self) -> None:
        self._alarm = None
        now_s = self._now_s()
        for number, live in list(self._live.items()):
            if not live.waits or now_s - live.waits_s < self.patience_s:
                continue
            if self._takers:  # replicas answer but are full: it waits on for its turn
                live.waits_s = now_s
                continue
            self._fail(number, self._not_ready(live))
        self._watch_waiting()

    def _fail(self, sequence: int, error: ShareComputeError) -> None:
        live = self._forget(sequence)
        if live is not None:
            self._meter.ended("error", self._now_s() - live.came_s)
            self._mail.fail(error, [sequence])

    def _not_ready(self, live: _Live) -> Unavailable:
        details: dict[str, Any] = {"retry_after_s": RETRY_AFTER_S, "waited_s": self.patience_s}
        if not live.emitted:
            details |= {"param": "model", "code": "model_not_ready"}
        return Unavailable(
            f"{self.facts.name} did not answer for {self.patience_s:g} s: {self.reason}",
            hint=f"try again in {RETRY_AFTER_S} s",
            details=details,
        )

    def _forget(self, sequence: int) -> _Live | None:
        live = self._live.pop(sequence, None)
        if live is not None and not self._live:
            self._idle_since_s = self._now_s()
        return live

    # -- placing -----------------------------------------------------------------------------------------------------

    @property
    def _takers(self) -> list[Replica]:
        return [replica for replica, server in self._servers.items() if server.takes]

    def _in_turn(self, new: int) -> list[Replica]:
        takers = self._takers
        backlogs = [Backlog(self.ongoing(one), self._servers[one].tokens_per_s) for one in takers]
        return [takers[index] for index in in_turn(backlogs, new)]

    async def _place_new(self, lives: Sequence[_Live]) -> None:
        """Place new sequences as `_place` does; forget them if that fails."""
        try:
            await self._place(lives)
        except BaseException:
            for live in lives:
                self._forget(live.generation.sequence)
            raise

    async def _place(self, lives: Sequence[_Live]) -> None:
        """Give sequences with ``is_placing`` set to one replica, all together; if there is none, they wait.

        Raises:
            ShareComputeError: the replicas refused them.
        """
        try:
            refusal = await self._offer(lives)
        finally:
            for live in lives:
                live.is_placing = False
        unwanted: dict[Replica, list[int]] = {}
        for live in lives:
            if live.replica is not None and not self._is_wanted(live):
                unwanted.setdefault(live.replica, []).append(live.generation.sequence)
        for replica, sequences in unwanted.items():
            self._spawn(self._tell_cancelled(replica, sequences))
        if refusal is not None:
            raise refusal
        if any(live.waits and self._is_wanted(live) for live in lives):
            self._watch_waiting()
            self._spawn_placing()

    async def _offer(self, lives: Sequence[_Live]) -> ShareComputeError | None:
        """Ask one replica after the other to take sequences; return the refusal if none did and one gave a reason."""
        refusal: ShareComputeError | None = None
        for replica in self._in_turn(len(lives)):
            lives = [live for live in lives if self._is_wanted(live)]
            if not lives:
                return None
            for live in lives:
                live.replica = replica
            try:
                await replica.submit([live.rest() for live in lives])
            except Conflict:
                return None  # an earlier try delivered them
            except ContributorLost:
                self.remove(replica)
            except (Busy, TooLong, Unavailable) as failure:  # another replica may have more space
                refusal = failure if not isinstance(refusal, Busy) else refusal
            except BaseException:
                for live in lives:
                    live.replica = None
                raise
            else:
                return None
            for live in lives:
                live.replica = None
        return refusal

    def _is_wanted(self, live: _Live) -> bool:
        return self._live.get(live.generation.sequence) is live

    def _spawn_placing(self) -> None:
        is_placing = self._placing is not None and not self._placing.done()
        if self._takers and not is_placing:
            self._placing = self._spawn(self._place_waiting())

    async def _place_waiting(self) -> None:
        """Give waiting sequences to replicas in the order they came; try again while the replicas are full."""
        while self._takers:
            waiting = [(number, live) for number, live in self._live.items() if live.waits]
            if not waiting:
                return
            for number, live in waiting:
                if self._live.get(number) is not live or not live.waits:
                    continue
                live.is_placing = True
                try:
                    await self._place([live])
                except Busy:
                    await asyncio.sleep(_RETRY_S)
                    break
                except ShareComputeError as failure:
                    self._fail(number, failure)

    # -- events of replicas ------------------------------------------------------------------------------------------

    async def _listen(self, replica: Replica) -> None:
        """Process a replica's events until the replica is lost."""
        received = 0
        while True:
            try:
                events = await replica.pull(received, _PULL_S)
            except ContributorLost as failure:
                _log.warning("%s: %s", self.facts.name, failure.message)
                self.remove(replica)
                return
            except ShareComputeError as failure:
                _log.warning("%s: %s", self.facts.name, failure.message)
                await asyncio.sleep(_RETRY_S)
            else:
                received += len(events)
                self._take(replica, events)

    def _take(self, replica: Replica, events: Sequence[SequenceEvent]) -> None:
        told: list[SequenceEvent] = []
        freed: list[int] = []
        now_s = self._now_s()
        for event in events:
            live = self._live.get(event.sequence)
            if live is None or live.replica is not replica:
                continue
            if isinstance(event, Emitted):
                if event.index != len(live.emitted):
                    continue
                self._note_token(live, event, now_s)
                live.emitted.append(event.token)
            elif self._may_go_on(replica, event):
                freed.append(event.sequence)
                continue
            else:
                self._forget(event.sequence)
                self._meter.finished(event, now_s - live.came_s)
            told.append(event)
        self._mail.deliver(told)
        if freed:
            self._free(freed)
            self._spawn_placing()

    def _may_go_on(self, replica: Replica, event: SequenceEvent) -> bool:
        """Return whether another replica may continue a sequence that this one gave up."""
        is_given_up = isinstance(event, Failed) and isinstance(event.error, Unavailable)
        return is_given_up and any(taker is not replica for taker in self._takers)

    def _note_token(self, live: _Live, event: Emitted, now_s: float) -> None:
        if live.emitted:
            self._meter.next_token(now_s - live.told_s)
        else:
            self._meter.first_token(now_s - live.came_s, event.cached_tokens)
        live.told_s = now_s

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()
