"""Replicas start and end with demand: cold starts without an error, drains without lost requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.api.control.test_deployment_supervision import WINDOW, House, Replica, read, run, wanted
from tests.platform.inference.scheduler.hashed_stages import reference

from share_compute.errors import Busy, Unavailable
from share_compute.inference.scheduler.options import Generation
from share_compute.lifecycle.deployment_states import DeploymentState
from share_compute.specification import ReplicasSpec
from share_compute.store import Store
from share_compute_api.control.deployments.replica_set import ReplicaSet
from share_compute_api.openai import routing
from share_compute_api.openai.problems import problem_of

pytestmark = pytest.mark.exact

AT_ONCE = {"upscale_delay_s": 0, "downscale_delay_s": 0, "downscale_to_zero_delay_s": 0}


def reasons(house: House) -> list[str]:
    return [event.data["reason"] for event in house.store.events.after(0) if event.kind == "deployment"]


def scalings(house: House) -> list[tuple[int, int]]:
    changes = [event.data.get("replicas", {}) for event in house.store.events.after(0)]
    return [(one["wanted_before"], one["wanted"]) for one in changes if "wanted" in one]


async def served(house: House, *contributor_ids: str) -> Replica:
    replica = await house.replicas.get()
    replica.serve(*contributor_ids)
    replica.take_steps(1000)
    return replica


async def answered(house: House, generation: Generation) -> None:
    tokens: dict[int, list[int]] = {}
    stream = await house.engine().generate([generation])
    assert await read(stream, tokens) == {generation.sequence: "length"}
    assert tokens == {generation.sequence: reference(generation, WINDOW)[0]}


def test_a_request_at_zero_is_answered_after_a_cold_start(store: Store, tmp_path: Path) -> None:
    async def story(house: House) -> None:
        ada = house.cluster.contributor("ada")
        record = house.deploy(replicas={"min": 0, "max": 2, **AT_ONCE})
        first = await served(house, ada)
        await house.until(lambda: first.is_closed and not house.leased())
        at_zero = house.store.deployments.get(record.id)
        assert at_zero.state is DeploymentState.ready
        assert at_zero.reason == "no replica is up: no request for 0 s; the next request starts one"
        assert at_zero.plans == ()
        asking = asyncio.create_task(answered(house, wanted(1)))
        second = await house.replicas.get()
        await house.until(lambda: house.leased() == {ada})
        second.serve(ada)
        second.take_steps(1000)
        await asking
        await house.until(lambda: second.is_closed)
        assert scalings(house) == [(1, 0), (0, 1), (1, 0)]
        assert "1 sequence came while none was up" in reasons(house)

    run(store, tmp_path, story)


def test_at_zero_it_stays_with_the_next_server(store: Store, tmp_path: Path) -> None:
    async def story(house: House) -> None:
        ada = house.cluster.contributor("ada")
        record = house.deploy(replicas={"min": 0, "max": 1, **AT_ONCE})
        first = await served(house, ada)
        await house.until(lambda: first.is_closed)
        await house.until(lambda: "no replica is up" in house.store.deployments.get(record.id).reason)

    async def next_attempt(house: House) -> None:
        (record,) = house.store.deployments.list()
        await house.until(lambda: house.engines.find("llama") is not None)
        await house.until(lambda: "the server was restarted" in house.store.deployments.get(record.id).reason)
        assert house.replicas.empty()
        asking = asyncio.create_task(answered(house, wanted(1)))
        await served(house, "con-1")
        await asking
        assert DeploymentState.pending.value not in reasons(house)[-4:]

    run(store, tmp_path, story)
    run(store, tmp_path, next_attempt)


def test_a_request_that_waits_for_too_long_learns_when_to_come_again(store: Store, tmp_path: Path) -> None:
    async def story(house: House) -> None:
        house.deploy(replicas={"min": 0, "max": 1, "cold_start_timeout_s": 0.7})
        await house.replicas.get()  # it never gets ready
        await house.until(lambda: house.engines.find("llama") is not None)
        await house.until(lambda: house.engine().patience_s < 1)
        stream = await house.engine().generate([wanted(1)])
        with pytest.raises(
            Unavailable, match=r"llama did not answer for 0\.7 s: no machine is there"
        ) as caught:
            await read(stream, {})
        problem = problem_of(caught.value)
        assert (problem.status, problem.code) == (503, "model_not_ready")
        assert problem.headers == {"Retry-After": "10"}

    run(store, tmp_path, story)


def test_only_so_many_wait_for_a_cold_start(store: Store, tmp_path: Path) -> None:
    async def story(house: House) -> None:
        house.deploy(replicas="0..1")
        await house.until(lambda: house.engines.find("llama") is not None)
        stream = await house.engine().generate([wanted(one) for one in range(512)])
        with pytest.raises(Busy, match=r"llama does not answer now .*, and 512 sequences wait"):
            await house.engine().generate([wanted(600)])
        stream.complete(0)
        await house.engine().generate([wanted(601)])

    run(store, tmp_path, story)


def test_more_are_started_for_more_and_who_goes_ends_what_it_has(store: Store, tmp_path: Path) -> None:
    async def story(house: House) -> None:
        ada, grace = house.cluster.contributor("ada"), house.cluster.contributor("grace")
        never = {**AT_ONCE, "downscale_delay_s": 3600}
        record = house.deploy(replicas={"max": 2, "target_ongoing_requests": 2, **never})
        first = await house.replicas.get()
        await house.until(lambda: house.leased() == {ada, grace})
        first.serve(ada)
        await house.until(lambda: house.state(record) is DeploymentState.ready)
        three = [wanted(one) for one in range(3)]
        streams = [await house.engine().generate(three)]
        second = await house.replicas.get()
        # While it starts, it gets no requests, and the deployment's state does not change.
        early = wanted(3)
        streams.append(await house.engine().generate([early]))
        assert house.engine().ongoing(second) == 0
        assert house.state(record) is DeploymentState.ready
        second.serve(grace)
        await house.until(lambda: house.store.deployments.get(record.id).reason == "2 replicas answer")
        late = wanted(4)
        streams.append(await house.engine().generate([late]))
        assert (house.engine().ongoing(first), house.engine().ongoing(second)) == (4, 1)

        house.store.deployments.set_replicas("llama", ReplicasSpec(min=1, max=1))
        await house.until(lambda: "1 were asked for" in reasons(house))
        # The decision is reported before it is carried out; then the state of the deployment changes.
        await house.until(lambda: house.store.deployments.get(record.id).reason != "2 replicas answer")
        # The second replica has fewer sequences, so it is drained. New requests go to the first, although it has more.
        last = wanted(5)
        streams.append(await house.engine().generate([last]))
        assert (house.engine().ongoing(first), house.engine().ongoing(second)) == (5, 1)
        assert not second.is_closed
        tokens: dict[int, list[int]] = {}
        first.take_steps(1000)
        second.take_steps(1000)
        ends = await asyncio.gather(*(read(stream, tokens) for stream in streams))
        assert [list(one.values()) for one in ends] == [["length"] * 3, *[["length"]] * 3]
        everything = [*three, early, late, last]
        assert tokens == {one.sequence: reference(one, WINDOW)[0] for one in everything}
        await house.until(lambda: second.is_closed)
        await house.until(lambda: house.leased() == {ada})
        assert scalings(house) == [(1, 2), (2, 1)]
        text = house.metrics.exposition(()).decode()
        assert 'share_compute_generation_tokens_total{model_name="llama"} 180.0' in text
        assert 'share_compute_time_to_first_token_seconds_count{model_name="llama"} 6.0' in text
        assert 'share_compute_request_success_total{finished_reason="length",model_name="llama"} 6.0' in text

    run(store, tmp_path, story)


@pytest.mark.slow
@pytest.mark.parametrize("is_cancelled", [False, True])
def test_it_scales_to_zero_in_the_middle_of_a_prefill_only_when_that_is_over(
    store: Store, tmp_path: Path, *, is_cancelled: bool
) -> None:
    async def story(house: House) -> None:
        ada = house.cluster.contributor("ada")
        house.deploy(replicas={"min": 1, "max": 1})
        first = await house.replicas.get()
        first.serve(ada)
        await house.until(lambda: house.engines.find("llama") is not None)
        await house.until(lambda: house.engine().ongoing(first) == 0)
        long = wanted(1).model_copy(update={"prompt": tuple(range(1, 81))})  # two engine steps
        stream = await house.engine().generate([long])
        await house.until(lambda: first.num_taken == 1)  # it has no result before it executes steps
        limits = ReplicasSpec(min=0, max=1, cold_start_timeout_s=7, **AT_ONCE)
        house.store.deployments.set_replicas("llama", limits)
        await house.until(lambda: house.engine().patience_s == 7)
        polls = first.num_polls
        await house.until(lambda: first.num_polls > polls + 3)
        assert not first.is_closed
        if is_cancelled:
            stream.close()
        else:
            first.take_steps(1000)
            tokens: dict[int, list[int]] = {}
            assert await read(stream, tokens) == {1: "length"}
            assert tokens == {1: reference(long, WINDOW)[0]}
        await house.until(lambda: first.is_closed and not house.leased())
        asking = asyncio.create_task(answered(house, wanted(2)))
        await served(house, ada)
        await asking
        assert scalings(house)[:2] == [(1, 0), (0, 1)]

    run(store, tmp_path, story)


@pytest.mark.parametrize("happens", [Replica.give_up, Replica.stand_still])
def test_another_replica_goes_on_with_what_one_cannot(
    happens: Callable[[Replica], None], store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing, "MOVES_AFTER_S", 0.2)

    async def story(house: House) -> None:
        ada, grace = house.cluster.contributor("ada"), house.cluster.contributor("grace")
        house.deploy(replicas=2)
        first, second = await house.replicas.get(), await house.replicas.get()
        first.serve(ada)
        second.serve(grace)
        await house.until(lambda: "2 replicas answer" in reasons(house))
        requests = [wanted(one) for one in range(2)]
        streams = [await house.engine().generate([one]) for one in requests]
        assert (house.engine().ongoing(first), house.engine().ongoing(second)) == (1, 1)
        tokens: dict[int, list[int]] = {}
        reading = asyncio.gather(*(read(stream, tokens) for stream in streams))
        first.take_steps(6)
        await house.until(lambda: any(len(one) > 2 for one in tokens.values()))
        happens(first)
        second.take_steps(1000)
        assert await reading == [{one.sequence: "length"} for one in requests]
        assert tokens == {one.sequence: reference(one, WINDOW)[0] for one in requests}

    run(store, tmp_path, story)


@pytest.mark.parametrize(("is_complete", "reason"), [(True, "stop"), (False, "abort")])
def test_who_has_all_that_they_want_did_not_break_off(
    is_complete: bool, reason: str, store: Store, tmp_path: Path
) -> None:
    async def story(house: House) -> None:
        house.deploy()
        replica = await served(house, house.cluster.contributor("ada"))
        replica.take_steps(2)
        await house.until(lambda: house.engines.find("llama") is not None)
        stream = await house.engine().generate([wanted(1)])
        async for _ in stream:
            break
        if is_complete:
            stream.complete(1)
        stream.close()
        text = house.metrics.exposition(()).decode()
        assert f'request_success_total{{finished_reason="{reason}",model_name="llama"}} 1.0' in text

    run(store, tmp_path, story)


def test_the_first_request_at_zero_replicas_may_be_large(store: Store, tmp_path: Path) -> None:
    async def story(house: House) -> None:
        house.deploy(replicas="0..1")
        await house.until(lambda: house.engines.find("llama") is not None)
        await house.engine().generate([wanted(one) for one in range(600)])
        assert house.engine().demand.waiting == 600

    run(store, tmp_path, story)


def test_a_drain_has_a_bound_and_who_leaves_may_stay_again() -> None:
    async def story() -> None:
        replica_set = ReplicaSet(None, 120.0)
        replica_set.fit(3, 0.0, lambda _: 0)
        busy = {managed.number: Idle() for managed in replica_set.staying}
        for managed in replica_set:
            managed.replica = busy[managed.number]  # type: ignore[assignment]
        ongoing = {busy[0]: 5, busy[1]: 1, busy[2]: 9}.__getitem__
        (left,) = replica_set.fit(2, 10.0, ongoing)  # type: ignore[arg-type]
        assert left.number == 1
        assert replica_set.done(130.0, ongoing) == []  # type: ignore[arg-type]
        (back,) = replica_set.fit(3, 20.0, ongoing)  # type: ignore[arg-type]
        assert back is left
        assert back.stays
        replica_set.fit(2, 30.0, ongoing)  # type: ignore[arg-type]
        assert replica_set.done(150.0, ongoing) == []  # type: ignore[arg-type]
        assert replica_set.done(150.1, ongoing) == [left]  # type: ignore[arg-type]
        left.end()
        assert left.ending is not None
        replica_set.fit(3, 31.0, ongoing)  # type: ignore[arg-type]
        assert [managed.number for managed in replica_set.staying] == [0, 2, 3]
        await left.ending
        replica_set.forget_ended()
        assert left not in replica_set

    asyncio.run(story())


class Idle:
    """A replica that is only closed."""

    async def close(self) -> None:
        return
