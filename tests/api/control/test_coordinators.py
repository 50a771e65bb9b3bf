"""Attempts behind the gateway, with an actor that fails as Ray does, at inconvenient moments."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from share_compute.errors import ContributorLost, Unavailable, VerificationFailed
from share_compute.lifecycle.attempt_events import (
    ArtifactSaved,
    AttemptEnded,
    AttemptEvent,
    CheckpointSaved,
    Note,
    Offer,
    attempt_events,
)
from share_compute.topology import Contributor, Device, Link, Topology
from share_compute_api.cluster.calls import CallFailure
from share_compute_api.cluster.gateway import CallFailed
from share_compute_api.control.jobs.coordinators import RayAttempt

ENDED = AttemptEnded(outcome="succeeded", reason="done")
FOLDER = Path("/data/jobs/job-1")
DIED = CallFailed(CallFailure(kind="died", message="The actor died."))


class Actor:
    """Gives one scripted answer after the other; its run ends when the test says so."""

    def __init__(self, *answers: list[AttemptEvent] | Exception) -> None:
        self.answers = list(answers)
        self.end: asyncio.Future[None] = asyncio.Future()
        self.offers: list[Offer] = []
        self.drains: list[str] = []

    async def ended(self) -> None:
        await self.end

    async def call(self, method: str, *arguments: Any, **_limits: float) -> Any:
        if method == "events":
            await asyncio.sleep(0)
            answer = self.answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return attempt_events.dump_json(answer).decode()
        if method == "offer":
            self.offers.append(Offer.model_validate_json(arguments[0]))
        elif arguments == ("con-gone",):
            raise DIED
        else:
            self.drains.append(arguments[0])
        return None


async def ended(actor: Actor) -> RayAttempt:
    """Return an attempt that knows that its run has returned."""
    attempt = RayAttempt("job-1", FOLDER, actor)
    await attempt.events(0, 0.0)
    actor.end.set_result(None)
    for _ in range(3):
        await asyncio.sleep(0)
    return attempt


def test_what_was_reported_just_before_the_end_is_not_lost() -> None:
    async def story() -> None:
        attempt = await ended(Actor([Note(message="begun")], [], [ENDED]))
        assert await attempt.events(1, 0.0) == [ENDED]

    asyncio.run(story())


def test_an_end_without_a_word_is_one() -> None:
    async def story() -> None:
        attempt = await ended(Actor([], [], []))
        with pytest.raises(Unavailable, match="without a result"):
            await attempt.events(0, 0.0)

    asyncio.run(story())


def test_who_is_dead_is_lost() -> None:
    async def story() -> None:
        with pytest.raises(ContributorLost, match="coordinator died") as caught:
            await RayAttempt("job-1", FOLDER, Actor(DIED)).events(0, 0.0)
        assert caught.value.hint == "share-compute resume job-1"

    asyncio.run(story())


@pytest.mark.parametrize("path", ["/etc", "/data/jobs/job-2/x", "/data/jobs/job-1", "/data/jobs/job-1/../x"])
def test_a_coordinator_saves_files_in_its_own_folder_only(path: str) -> None:
    async def story() -> None:
        for event in (
            CheckpointSaved(step=1, path=Path(path), size_bytes=1),
            ArtifactSaved(name="model", path=Path(path), size_bytes=1),
        ):
            with pytest.raises(VerificationFailed, match="not below the job's own folder"):
                await RayAttempt("job-1", FOLDER, Actor([event])).events(0, 0.0)
        saved = CheckpointSaved(step=1, path=FOLDER / "checkpoints" / "1", size_bytes=1)
        assert await RayAttempt("job-1", FOLDER, Actor([saved])).events(0, 0.0) == [saved]

    asyncio.run(story())


def test_machines_are_offered_and_drained() -> None:
    device = Device("cpu", "c", 2**30, {"float32": 1e10}, 1e10)
    machine = Contributor("con-1", "ada", (device,), 4, "ab", "192.0.2.7")
    offer = Offer(topology=Topology((machine,), (Link("con-1", "head", 0.001, 1e9),)), answers=7)

    async def story() -> None:
        actor = Actor([Note(message="begun")])
        attempt = await ended(actor)
        await attempt.offer(offer)
        await attempt.drain("con-1")
        assert (actor.offers, actor.drains) == ([offer], ["con-1"])
        with pytest.raises(ContributorLost, match="coordinator died"):
            await attempt.drain("con-gone")

    asyncio.run(story())
