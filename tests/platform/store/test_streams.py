"""Rows of resumable streams are bounded by key and in total, and expire."""

from __future__ import annotations

from datetime import timedelta

import pytest
from sqlalchemy import func, select
from tests.databases import Clock, reading

from share_compute.store import Store, StreamRecord
from share_compute.store.database.tables import StreamPartRow
from share_compute.store.streams import NewEvents, StreamLimits

LIMITS = StreamLimits(streams=4, streams_of_key=2, tokens=100, tokens_of_key=50)


def stream(name: str, owner: str = "key-1", tokens: int = 10) -> StreamRecord:
    return StreamRecord(
        id=name,
        owner=owner,
        deployment_id="dep-1",
        model="poet",
        kind="completion",
        request={"model": "poet", "seed": 2**63 - 1},
        prompts=((1, 2), (3,)),
        answer_id="cmpl-1",
        created=1_700_000_000,
        tokens=tokens,
    )


def num_parts(store: Store) -> int:
    with reading(store) as session:
        return session.scalar(select(func.count()).select_from(StreamPartRow)) or 0


def test_events_are_kept_in_order(store: Store) -> None:
    assert store.streams.create(stream("a"), LIMITS) == []
    assert store.streams.create(stream("b"), LIMITS) == []
    assert store.streams.get("a") == stream("a")
    assert store.streams.events("a") == []
    store.streams.append(
        {"a": NewEvents([[0, 5, -0.25, [[5, -0.25]], 0]]), "b": NewEvents([[0, 7, None, [], 0]])}
    )
    store.streams.append(
        {"a": NewEvents([[0, 6, None, [], 0], [0, "stop"]], tokens=7), "gone": NewEvents([[0, 1]])}
    )
    assert store.streams.events("a") == [[0, 5, -0.25, [[5, -0.25]], 0], [0, 6, None, [], 0], [0, "stop"]]
    found = store.streams.get("a")
    assert found is not None
    assert (found.is_over, found.tokens) == (True, 7)
    assert store.streams.get("gone") is None


@pytest.mark.parametrize(
    "kept",
    [
        [("a", "key-1", 10), ("b", "key-1", 10)],
        [("a", "key-1", 45)],
        [("a", "key-2", 50), ("b", "key-3", 45)],
        [("a", "key-2", 1), ("b", "key-2", 1), ("c", "key-3", 1), ("d", "key-3", 1)],
    ],
)
def test_a_full_store_refuses_and_streams_that_are_over_make_place(
    store: Store, clock: Clock, kept: list[tuple[str, str, int]]
) -> None:
    for one in kept:
        assert store.streams.create(stream(*one), LIMITS) == []
        clock.now += timedelta(seconds=1)
    assert store.streams.create(stream("new"), LIMITS) is None
    assert all(found is not None and found.expired_at is None for found in map(store.streams.get, "a"))
    assert store.streams.get("new") is None
    store.streams.append({"a": NewEvents([[0, "stop"]], tokens=kept[0][2])})
    assert store.streams.create(stream("new"), LIMITS) == ["a"]
    assert num_parts(store) == 0
    found = store.streams.get("a")
    assert found is not None
    assert (found.request, found.prompts, found.tokens) == (None, None, 0)
    assert found.expired_at == clock.now


def test_a_stream_larger_than_all_limits_expires_no_other(store: Store) -> None:
    assert store.streams.create(stream("a"), LIMITS) == []
    store.streams.append({"a": NewEvents([], tokens=3)})
    assert store.streams.create(stream("new", tokens=51), LIMITS) is None
    found = store.streams.get("a")
    assert found is not None
    assert found.expired_at is None


def test_unread_streams_expire_and_are_forgotten_later(store: Store, clock: Clock) -> None:
    for name in ("read", "live", "unread"):
        assert store.streams.create(stream(name, owner=name), LIMITS) == []
    clock.now += timedelta(seconds=200)
    store.streams.append({"read": NewEvents([[0, "stop"]])})
    clock.now += timedelta(seconds=200)
    store.streams.expire_unread(300, ["live"])

    def expired() -> dict[str, bool | None]:
        found = {name: store.streams.get(name) for name in ("read", "live", "unread")}
        return {name: one and one.expired_at is not None for name, one in found.items()}

    assert expired() == {"read": False, "live": False, "unread": True}
    store.streams.append({"unread": NewEvents([[0, "stop"]])})
    assert store.streams.events("unread") == []
    clock.now += timedelta(hours=2)
    store.streams.touch()
    store.streams.expire_unread(300, [])
    assert expired() == {"read": False, "live": False, "unread": None}
    store.streams.expire(["read"])
    assert expired() == {"read": True, "live": False, "unread": None}
