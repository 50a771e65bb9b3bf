"""Choice of the replica for a request while several events happen at the same moment."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from share_compute.errors import Busy, ContributorLost
from share_compute.inference.scheduler.events import SequenceEvent
from share_compute.inference.scheduler.options import Generation, SamplingOptions
from share_compute.lifecycle.deployment_states import DeploymentState
from share_compute.lifecycle.deployment_status import ServingStatus
from share_compute.topology import Topology
from share_compute_api.openai.engine import ModelFacts
from share_compute_api.openai.metering import ServingMetrics
from share_compute_api.openai.ray_engine import RayEngine

pytestmark = pytest.mark.exact


@dataclass(eq=False)
class Replica:
    """Records calls, and answers when the test opens its doors."""

    engine: RayEngine
    log: list[tuple[str, list[int]]] = field(default_factory=list)
    has: set[int] = field(default_factory=set)
    failures: list[Exception] = field(default_factory=list)
    """Raised by the next submissions, one each."""
    doors: asyncio.Event = field(default_factory=asyncio.Event)
    was_called: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.doors.set()
        self.engine.add(self)

    def report_ready(self) -> None:
        """Report that this replica is ready."""
        self.engine.see(self, 1.0, is_ready=True)

    async def submit(self, generations: Sequence[Generation]) -> None:
        self.was_called.set()
        # An actor call keeps running after its caller is cancelled.
        await asyncio.shield(asyncio.create_task(self._admit([one.sequence for one in generations])))

    async def _admit(self, sequences: list[int]) -> None:
        await self.doors.wait()
        if self.failures:
            self.report_ready()  # in the same iteration of the loop as the refusal
            raise self.failures.pop(0)
        assert self.has.isdisjoint(sequences)
        self.log.append(("submit", sequences))
        self.has.update(sequences)

    async def cancel(self, sequences: Sequence[int]) -> None:
        self.log.append(("cancel", list(sequences)))
        self.has.difference_update(sequences)

    async def pull(self, after: int, timeout_s: float) -> list[SequenceEvent]:
        del after, timeout_s
        await asyncio.Event().wait()
        return []

    async def status(self) -> ServingStatus:
        return ServingStatus(state=DeploymentState.ready, reason="serves")

    async def offer(self, topology: Topology) -> None:
        del topology

    async def set_standby(self, *, is_on: bool) -> None:
        del is_on

    async def close(self) -> None:
        pass

    def abandon(self) -> None:
        pass


def wanted(*sequences: int) -> list[Generation]:
    options = SamplingOptions(seed=0, max_tokens=5)
    return [Generation(sequence=one, owner="key", prompt=(1, 2), options=options) for one in sequences]


async def settled() -> None:
    """Let all events happen that can happen now."""
    for _ in range(50):
        await asyncio.sleep(0)


def run(tmp_path: Path, story: Callable[[RayEngine], Awaitable[None]]) -> None:
    async def main() -> None:
        facts = ModelFacts("poet", "generate", 0, 128, tmp_path)
        engine = RayEngine(facts, ServingMetrics(CollectorRegistry()).of("poet"))
        async with asyncio.timeout(240):
            await story(engine)
        await engine.close(ContributorLost("over"))

    asyncio.run(main())


def test_the_sequences_of_a_request_stay_together_whichever_replica_reports_ready_meanwhile(
    tmp_path: Path,
) -> None:
    async def story(engine: RayEngine) -> None:
        replicas = [Replica(engine), Replica(engine)]
        for replica in replicas:
            replica.report_ready()
        await settled()
        asyncio.get_running_loop().call_soon(replicas[0].report_ready)
        await engine.generate(wanted(1, 2, 3))
        await settled()
        assert sorted(map(len, (replica.has for replica in replicas))) == [0, 3]

    run(tmp_path, story)


def test_who_was_refused_is_not_computed_afterwards(tmp_path: Path) -> None:
    async def story(engine: RayEngine) -> None:
        replica = Replica(engine, failures=[Busy("full", hint="wait")])
        replica.report_ready()
        with pytest.raises(Busy):
            await engine.generate(wanted(1))
        await settled()
        assert replica.log == []
        assert engine.demand.waiting == 0

    run(tmp_path, story)


def test_who_leaves_while_it_is_given_away_is_ended_there_afterwards(tmp_path: Path) -> None:
    async def story(engine: RayEngine) -> None:
        replica = Replica(engine)
        replica.doors.clear()
        stream = await engine.generate(wanted(1))  # the request waits: no replica is known to be ready
        replica.report_ready()
        await replica.was_called.wait()
        stream.close()
        await settled()
        replica.doors.set()
        await settled()
        assert replica.log == [("submit", [1]), ("cancel", [1])]

    run(tmp_path, story)


def test_who_leaves_while_one_refuses_is_not_given_to_the_next(tmp_path: Path) -> None:
    async def story(engine: RayEngine) -> None:
        full, free = Replica(engine, failures=[Busy("full", hint="wait")]), Replica(engine)
        full.doors.clear()
        stream = await engine.generate(wanted(1))
        full.report_ready()
        await full.was_called.wait()
        free.report_ready()
        stream.close()
        full.doors.set()
        await settled()
        assert full.log == free.log == []

    run(tmp_path, story)


def test_a_replica_lost_during_a_call_is_followed_by_the_next(tmp_path: Path) -> None:
    async def story(engine: RayEngine) -> None:
        first, second = Replica(engine, failures=[ContributorLost("it died")]), Replica(engine)
        first.report_ready()
        second.report_ready()
        await engine.generate(wanted(1, 2))
        await settled()
        assert (first.has, second.has) == (set(), {1, 2})

    run(tmp_path, story)
