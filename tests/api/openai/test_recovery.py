"""The streams of requests, the choice of replicas, and the table of live sequences, without processes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest
from prometheus_client import CollectorRegistry

from share_compute.errors import ContributorLost, Unavailable
from share_compute.inference.scheduler.events import Emitted, Failed, Finished, SequenceEvent
from share_compute.inference.scheduler.options import Generation, SamplingOptions
from share_compute.lifecycle.deployment_states import DeploymentState
from share_compute.lifecycle.deployment_status import ServingStatus
from share_compute.topology import Topology
from share_compute_api.openai.engine import StreamEvent
from share_compute_api.openai.metering import ServingMetrics
from share_compute_api.openai.recovery import RequestStream, Resumable, SequenceRecovery
from share_compute_api.openai.routing import Router


class Replica:
    """A replica that reports given batches of events, and then dies."""

    def __init__(self, *batches: list[SequenceEvent]) -> None:
        self._batches = list(batches)
        self.afters: list[int] = []

    async def submit(self, generations: Sequence[Generation]) -> None:
        raise AssertionError(generations)

    async def cancel(self, sequences: Sequence[int]) -> None:
        raise AssertionError(sequences)

    async def pull(self, after: int, timeout_s: float) -> list[SequenceEvent]:
        del timeout_s
        self.afters.append(after)
        if not self._batches:
            raise ContributorLost("it died", hint="wait")
        return self._batches.pop(0)

    async def status(self) -> ServingStatus:
        return ServingStatus(state=DeploymentState.ready, reason="serves")

    async def offer(self, topology: Topology) -> None:
        del topology

    async def set_standby(self, *, is_on: bool) -> None:
        del is_on

    async def close(self) -> None:
        return

    def abandon(self) -> None:
        return


def token(sequence: int, index: int) -> Emitted:
    return Emitted(sequence, index, 100 + index, None, ())


def ready(router: Router, replica: Replica, tokens_per_s: float = 1.0, now_s: float = 0.0) -> None:
    router.add(replica)
    assert router.see(replica, tokens_per_s, is_ready=True, now_s=now_s)


def run(story: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(240):
            await story()

    asyncio.run(main())


# -- the stream of a request -----------------------------------------------------------------------------------------


def test_a_stream_returns_all_that_arrived_and_ends_with_the_last_sequence() -> None:
    async def story() -> None:
        stream = RequestStream([1, 2], lambda *_: pytest.fail("nothing was cancelled"))
        for event in (token(1, 0), token(2, 0), Finished(1, "length", 1), token(3, 0)):
            stream.put(event)
        read: list[Sequence[StreamEvent]] = [await anext(stream)]
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        assert not waiting.done()
        stream.put(Finished(2, "stop", 1))
        stream.put(token(2, 1))  # after its end
        read.append(await waiting)
        assert read == [[token(1, 0), token(2, 0), Finished(1, "length", 1)], [Finished(2, "stop", 1)]]
        assert [events async for events in stream] == []

    run(story)


def test_a_failure_comes_after_the_events_before_it() -> None:
    async def story() -> None:
        stream = RequestStream([1, 2], lambda *_: None)
        for event in (token(1, 0), Failed(1, Unavailable("over", hint="wait")), token(2, 0)):
            stream.put(event)
        assert await anext(stream) == [token(1, 0)]
        with pytest.raises(Unavailable, match="over"):
            await anext(stream)
        assert await anext(stream) == [token(2, 0)]

    run(story)


def test_a_wait_that_is_broken_off_loses_no_event() -> None:
    async def story() -> None:
        stream = RequestStream([1], lambda *_: None)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await anext(stream)
        stream.put(token(1, 0))
        assert await anext(stream) == [token(1, 0)]

    run(story)


def test_each_sequence_that_has_not_ended_is_cancelled_once() -> None:
    async def story() -> None:
        cancelled: list[tuple[int, bool]] = []
        stream = RequestStream([1, 2, 3], lambda *one: cancelled.append(one))
        stream.put(Finished(1, "stop", 1))
        stream.complete(1)
        stream.complete(2)
        stream.close()
        stream.close()
        assert cancelled == [(2, True), (3, False)]

    run(story)


# -- routing ---------------------------------------------------------------------------------------------------------


def test_only_ready_replicas_that_stay_are_called_and_the_quickest_first() -> None:
    slow, quick, leaving, starting = (Replica() for _ in range(4))
    router = Router()
    ready(router, slow, 1.0)
    ready(router, quick, 10.0)
    ready(router, leaving, 100.0)
    router.retire(leaving, is_draining=True)
    router.add(starting)
    ongoing: dict[object, int] = {slow: 1, quick: 1, leaving: 0}
    assert router.in_turn(1, ongoing.__getitem__) == [quick, slow]
    ongoing |= {slow: 0, quick: 99}
    assert router.in_turn(1, ongoing.__getitem__) == [slow, quick]
    assert not router.see(quick, None, is_ready=False, now_s=1.0)
    router.retire(leaving, is_draining=False)
    assert router.takers == [slow, leaving]


def test_a_replica_that_is_not_ready_for_long_is_overdue_if_another_takes_its_sequences() -> None:
    first, second = Replica(), Replica()
    router = Router()
    ready(router, first)
    router.see(first, None, is_ready=False, now_s=5.0)
    assert not router.is_overdue(first, 100.0)
    ready(router, second)
    assert not router.is_overdue(first, 14.9)
    assert router.is_overdue(first, 15.0)
    router.see(first, None, is_ready=True, now_s=16.0)
    assert not router.is_overdue(first, 100.0)


# -- recovery --------------------------------------------------------------------------------------------------------


def begin(
    router: Router, freed: list[None], emitted: tuple[int, ...] = ()
) -> tuple[SequenceRecovery, RequestStream, Resumable]:
    meter = ServingMetrics(CollectorRegistry()).of("poet")
    recovery = SequenceRecovery("poet", router, meter, lambda: freed.append(None))
    stream = RequestStream([1], lambda *_: None)
    options = SamplingOptions(seed=0, max_tokens=5)
    generation = Generation(sequence=1, owner="key", prompt=(1, 2), options=options, emitted=emitted)
    (live,) = recovery.add([generation], stream)
    live.is_placing = False
    return recovery, stream, live


def test_a_sequence_continues_after_the_tokens_that_its_request_named() -> None:
    async def story() -> None:
        router, freed = Router(), list[None]()
        replica = Replica([token(1, 1), token(1, 2)], [token(1, 3)])
        ready(router, replica)
        recovery, stream, live = begin(router, freed, emitted=(100, 101))
        assert live.rest().emitted == (100, 101)
        live.replica = replica
        await recovery.listen(replica)
        assert await anext(stream) == [token(1, 2), token(1, 3)]
        assert live.rest().emitted == (100, 101, 102, 103)

    run(story)


def test_a_token_counts_once_whatever_replicas_repeat() -> None:
    async def story() -> None:
        router, freed = Router(), list[None]()
        first = Replica([token(1, 0), token(1, 0)], [token(1, 1)])
        second = Replica([token(1, 1), token(1, 2)], [Finished(1, "length", 3)])
        ready(router, first)
        ready(router, second)
        recovery, stream, live = begin(router, freed)
        live.replica = first
        await recovery.listen(first)
        assert first.afters == [0, 2, 3]
        assert live.rest().emitted == (100, 101)
        recovery.free(recovery.of(first))
        assert recovery.waiting == [live]
        assert len(freed) == 1
        live.replica = second
        await recovery.listen(Replica([token(1, 2)]))  # this replica does not have the sequence any more
        await recovery.listen(second)
        events = [event async for batch in stream for event in batch]
        assert events == [token(1, 0), token(1, 1), token(1, 2), Finished(1, "length", 3)]
        assert recovery.is_empty

    run(story)


@pytest.mark.parametrize("has_another", [True, False])
def test_a_sequence_that_is_given_up_fails_only_if_no_other_replica_takes_it(*, has_another: bool) -> None:
    async def story() -> None:
        router, freed = Router(), list[None]()
        first = Replica([token(1, 0), Failed(1, Unavailable("lacks machines", hint="wait"))])
        ready(router, first)
        if has_another:
            ready(router, Replica())
        recovery, stream, live = begin(router, freed)
        live.replica = first
        await recovery.listen(first)
        assert await anext(stream) == [token(1, 0)]
        if has_another:
            assert recovery.waiting == [live]
            return
        assert recovery.is_empty
        with pytest.raises(Unavailable, match="lacks machines"):
            await anext(stream)

    run(story)
