"""Keys, invites and contributors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from tests.databases import Clock, reading, writing

from share_compute.errors import (
    Conflict,
    ContributorLost,
    InviteExpired,
    InviteRevoked,
    InviteUnknown,
    InviteUsed,
    NotAuthorized,
    NotFound,
    ShareComputeError,
    UserError,
)
from share_compute.lifecycle.attempt_events import Offended
from share_compute.lifecycle.states import ContributorState
from share_compute.scopes import Scope
from share_compute.store import ContributorRecord, Store, keys
from share_compute.store.contributors import note_offence
from share_compute.store.records import AT_START
from share_compute.topology import MOST_DEVICES, Device, Link

VERSIONS = {"python": "3.11.7"}
LIMITS = {"memory_bytes": 2**30, "cpu_threads": 3}


def join(store: Store, code: str, name: str = "ada") -> tuple[ContributorRecord, str]:
    return store.contributors.join(code, name=name, host="host", versions=VERSIONS, limits=LIMITS)


def joined(store: Store, name: str = "ada") -> tuple[ContributorRecord, str]:
    return join(store, store.invites.create()[1], name)


def sibling(store: Store, contributor_id: str, name: str) -> tuple[ContributorRecord, str]:
    return store.contributors.join_sibling(
        contributor_id, name=name, host="host", versions=VERSIONS, limits=LIMITS
    )


def lose(store: Store, contributor_id: str) -> None:
    store.contributors.set_state(
        store.contributors.get(contributor_id), ContributorState.lost, "its node died"
    )


def test_a_machine_that_is_lost_twice_is_shown_once(store: Store, clock: Clock) -> None:
    first, _ = joined(store)
    lose(store, first.id)
    clock.now += timedelta(seconds=1)
    second, _ = joined(store)

    def shown() -> list[list[str]]:
        lists = (
            store.contributors.page()[0],
            store.contributors.presences(first.joined_at),
            store.cluster.summaries(),
        )
        return [[one.id for one in each] for each in lists]

    assert shown() == [[second.id]] * 3
    lose(store, second.id)
    assert shown() == [[second.id]] * 3
    assert len(store.contributors.page(states=[ContributorState.lost])[0]) == 2
    store.contributors.rejoin(first.id)
    assert shown() == [[first.id]] * 3


def test_a_key_opens_until_it_is_revoked(store: Store) -> None:
    record, key = store.keys.create("first")
    assert store.keys.verify(key) == record
    assert store.keys.verify(key + "x") is None
    assert store.keys.verify(key) == record  # remembered
    store.keys.revoke(record.id)
    assert store.keys.verify(key) is None


def test_a_key_that_is_revoked_while_it_is_read_is_not_remembered(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.keys.create("admin", [Scope.admin])
    record, key = store.keys.create("other")
    compare = keys.matches

    def revoke_meanwhile(given: str, known: str) -> bool:
        monkeypatch.setattr(keys, "matches", compare)
        store.keys.revoke(record.id)
        return compare(given, known)

    monkeypatch.setattr(keys, "matches", revoke_meanwhile)
    store.keys.verify(key)  # read before it was revoked: either answer is right
    assert store.keys.verify(key) is None


def test_no_secret_is_in_the_database(store: Store) -> None:
    _, key = store.keys.create("first")
    _, code = store.invites.create("label")
    _, own_key = join(store, code)
    with reading(store) as session:
        connection = session.connection()
        rows = [
            str(tuple(row))
            for table in ("api_keys", "invites", "contributors", "events")
            for row in connection.exec_driver_sql(f"SELECT * FROM {table}")
        ]
    for secret in (key, code, code.replace("-", ""), own_key):
        assert not any(secret in row for row in rows)


def test_an_invite_works_once(store: Store) -> None:
    invite, code = store.invites.create("for Ada")
    contributor, key = join(store, f"  {code.upper().replace('-', ' ')} ")
    used = store.invites.list()[0]
    assert (used.id, used.used_by, used.label) == (invite.id, (contributor.id,), "for Ada")
    assert used.used_at == contributor.joined_at
    assert store.contributors.authorize(contributor.id, key).id == contributor.id
    with pytest.raises(InviteUsed):
        join(store, code, "grace")
    with pytest.raises(InviteUsed):
        store.invites.revoke(invite.id)


def test_each_way_that_an_invite_fails_is_distinguished(store: Store, clock: Any) -> None:
    with pytest.raises(InviteUnknown):
        store.invites.check("aaaa-bbbb-cccc-dddd")
    invite, code = store.invites.create(expires_in_s=60)
    assert store.invites.check(code).id == invite.id
    clock.pass_s(60)
    with pytest.raises(InviteExpired, match="2026-01-31 12:01:00 UTC"):
        store.invites.check(code)
    invite, code = store.invites.create()
    store.invites.revoke(invite.id)
    store.invites.revoke(invite.id)
    with pytest.raises(InviteRevoked):
        store.invites.check(code)
    with pytest.raises(NotFound):
        store.invites.revoke("inv-none")


@pytest.mark.parametrize("uses", [1, 10])
def test_as_many_machines_get_in_with_one_code_as_it_has_uses(
    open_store: Callable[[], Store], uses: int
) -> None:
    first = open_store()
    invite, code = first.invites.create(uses=uses)
    outcomes: list[str] = []
    start = threading.Barrier(4)

    def run(connection: int) -> None:
        store = open_store()
        start.wait()
        for index in range(50):
            try:
                join(store, code, f"machine-{connection}-{index}")
            except ShareComputeError as failure:
                outcomes.append(failure.code)
            else:
                outcomes.append("joined")

    threads = [threading.Thread(target=run, args=(connection,)) for connection in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["invite-used"] * (200 - uses) + ["joined"] * uses
    (found,) = (one for one in first.invites.list() if one.id == invite.id)
    assert found.used_by == tuple(one.id for one in first.contributors.list())


def test_an_invite_of_several_uses_ends_like_any_other(store: Store, clock: Any) -> None:
    invite, code = store.invites.create("class", uses=3, expires_in_s=60)
    ada, _ = join(store, code, "ada")
    clock.pass_s(1)
    grace, _ = join(store, code, "grace")
    (found,) = store.invites.list()
    assert (found.uses, found.used_by) == (3, (ada.id, grace.id))
    assert {one.owner for one in store.cluster.summaries()} == {"class"}
    store.invites.revoke(invite.id)
    with pytest.raises(InviteRevoked):
        join(store, code, "edsger")
    assert store.contributors.get(ada.id).state == "joining"  # those that joined stay
    _, code = store.invites.create(uses=3, expires_in_s=60)
    join(store, code, "barbara")
    clock.pass_s(60)
    with pytest.raises(InviteExpired):
        join(store, code, "edsger")


def test_an_invite_replaces_the_unused_ones_of_its_label(store: Store) -> None:
    used, code = store.invites.create("printed at start")
    join(store, code)
    other, _ = store.invites.create("for Ada")
    codes = [store.invites.create(AT_START, replaces=True)[1] for _ in range(3)]
    with pytest.raises(InviteUnknown):
        store.invites.check(codes[0])  # the list keeps no more than one that was revoked
    with pytest.raises(InviteRevoked):
        store.invites.check(codes[1])
    assert store.invites.check(codes[2]).uses == 1
    assert store.cluster.summaries()[0].owner is None  # a label of the server names nobody
    states = {one.id: one.used_by for one in store.invites.list()}
    assert states[used.id]
    assert other.id in states
    assert len(states) == 4


def test_an_invite_limits_the_memory_that_is_lent(store: Store) -> None:
    _, code = store.invites.create(memory_bytes=2**30)

    def lend(memory_bytes: int) -> ContributorRecord:
        limits = {"memory_bytes": memory_bytes}
        return store.contributors.join(code, name="ada", host="h", versions={}, limits=limits)[0]

    with pytest.raises(UserError, match=r"lends 2\.0 GiB of memory, and its invite allows 1\.0 GiB"):
        lend(2**31)
    ada = lend(2**30)  # the refused attempt did not use the invite up
    with pytest.raises(UserError):
        store.contributors.rejoin(ada.id, limits={"memory_bytes": 2**30 + 1})
    assert store.contributors.rejoin(ada.id).limits == {"memory_bytes": 2**30}


def test_a_device_that_comes_back_lends_no_more_than_the_invite_of_its_host_allows(store: Store) -> None:
    _, code = store.invites.create(memory_bytes=2**30)
    first, _ = join(store, code, "box.cuda0")
    second, _ = sibling(store, first.id, "box.cuda1")
    for device in (first, second):
        with pytest.raises(UserError, match="its invite allows"):
            store.contributors.rejoin(device.id, limits={**LIMITS, "memory_bytes": 2**30 + 1})
        assert store.contributors.rejoin(device.id, limits=LIMITS).limits == LIMITS


def test_a_name_is_taken_only_while_its_machine_is_here(store: Store) -> None:
    first, _ = joined(store)
    _, code = store.invites.create()
    with pytest.raises(Conflict, match="ada"):
        join(store, code)
    store.contributors.set_state(store.contributors.get(first.id), ContributorState.lost, "its node died")
    second, _ = join(store, code)  # the refused attempt did not use the invite up
    with pytest.raises(Conflict):
        store.contributors.rejoin(first.id)
    assert second.name == first.name


def test_a_contributor_goes_from_joining_to_ready_and_leaves(store: Store) -> None:
    record, _ = joined(store)
    assert store.contributors.online(record.id, node_id="ab", address="192.0.2.7").state == "probing"
    device = Device("cpu", "some cpu", 2**30, {"float32": 1e10}, 2e10)
    link = Link(record.id, "head", 0.001, 1e9)
    ready = store.contributors.ready(record.id, capacity=[device], links=[link])
    assert ready.machine().devices == (device,)
    assert (ready.machine().cpu_threads, ready.links) == (3, (link,))
    assert store.contributors.leave(record.id).state == "draining"
    draining = store.contributors.get(record.id)
    gone = store.contributors.set_state(draining, ContributorState.left, "drained")
    assert gone is not None
    assert gone.left_at is not None
    story = [event.data["state"] for event in store.events.after(0)]
    assert story == ["joining", "probing", "ready", "draining", "left"]
    with pytest.raises(Conflict):
        store.contributors.set_state(gone, ContributorState.ready, "no")
    assert store.contributors.counts()[ContributorState.left] == 1


def test_a_machine_without_a_node_is_gone_at_once(store: Store) -> None:
    record, _ = joined(store)
    assert store.contributors.leave(record.id).state == "left"


def test_a_removed_machine_cannot_come_back_without_an_invite(store: Store) -> None:
    lost, _ = joined(store, "lost")
    store.contributors.online(lost.id, node_id="ab", address="192.0.2.7")
    lose(store, lost.id)
    assert store.contributors.rejoin(lost.id).state == "joining"
    removed, _ = joined(store, "removed")
    store.contributors.remove(removed.id)
    with pytest.raises(NotAuthorized):
        store.contributors.rejoin(removed.id)


def test_the_invite_of_a_removed_machine_is_revoked(store: Store) -> None:
    for revokes in (True, False):
        _, code = store.invites.create("for three", uses=3)
        record, _ = join(store, code, f"box-{revokes}")
        store.contributors.remove(record.id, revokes_invite=revokes)
        if revokes:
            with pytest.raises(InviteRevoked):
                join(store, code, "other-name")
        else:
            join(store, code, "other-name")


def test_devices_of_one_host_join_by_the_key_of_the_first(store: Store) -> None:
    _, code = store.invites.create("ada's")
    first, _ = join(store, code, "box.cuda0")
    second, key = sibling(store, first.id, "box.cuda1")
    third, _ = sibling(store, second.id, "box.cuda2")
    assert (second.sibling_of, third.sibling_of) == (first.id, first.id)
    assert store.contributors.authorize(second.id, key).id == second.id
    with pytest.raises(NotAuthorized):
        store.contributors.authorize(first.id, key)
    assert [one.owner for one in store.cluster.summaries()] == ["ada's"] * 3
    assert [one.owner for one in store.cluster.summaries([third.id])] == ["ada's"]
    with pytest.raises(Conflict, match=r"box\.cuda1"):
        sibling(store, first.id, "box.cuda1")
    for number in range(3, MOST_DEVICES):
        sibling(store, first.id, f"box.cuda{number}")
    with pytest.raises(Conflict, match=f"joined with {MOST_DEVICES} devices"):
        sibling(store, third.id, "box.cuda99")


def test_a_removed_host_is_removed_with_all_its_devices(store: Store) -> None:
    first, _ = joined(store, "box.cuda0")
    second, _ = sibling(store, first.id, "box.cuda1")
    other, _ = joined(store, "other")
    store.contributors.remove(second.id)
    for device in (first, second):
        assert store.contributors.get(device.id).state == "left"
        with pytest.raises(NotAuthorized):
            store.contributors.rejoin(device.id)
        with pytest.raises(NotAuthorized, match="removed this host"):
            sibling(store, device.id, "box.cuda2")
    assert store.contributors.get(other.id).state == "joining"


def test_a_host_does_not_shed_a_quarantine_by_another_device(store: Store) -> None:
    first, _ = joined(store, "box.cuda0")
    second, _ = sibling(store, first.id, "box.cuda1")
    offence = Offended(machine=second.id, step=3, what="NaN", quarantined=True, sentence="it did")
    with writing(store) as session:
        note_offence(session, second.id, store.clock(), job_id="job-1", offence=offence)
    for device in (first, second):
        with pytest.raises(NotAuthorized, match=r"box\.cuda1 of this host is quarantined"):
            sibling(store, device.id, "box.cuda2")
    store.contributors.clear(second.id)
    assert sibling(store, first.id, "box.cuda2")[0].state == "joining"


def test_only_who_is_expected_comes_online(store: Store) -> None:
    record, _ = joined(store)

    def online() -> ContributorRecord:
        return store.contributors.online(record.id, node_id="ab", address="192.0.2.7")

    assert [online().state, online().state] == ["probing", "probing"]
    store.contributors.ready(record.id, capacity=[], links=[])
    assert online().state == "probing"  # its node was started again
    lose(store, record.id)
    with pytest.raises(ContributorLost, match="is lost: its node died"):
        online()
    store.contributors.rejoin(record.id)
    assert online().state == "probing"
    store.contributors.remove(record.id)
    assert store.contributors.leave(record.id).reason == "the operator removed it"  # also as its agent leaves
    with pytest.raises(Conflict, match="removed it") as caught:
        online()
    assert "new invite" in (caught.value.hint or "")


def test_a_decision_on_what_is_no_longer_so_changes_nothing(store: Store) -> None:
    record, _ = joined(store)
    seen = store.contributors.online(record.id, node_id="ab", address="192.0.2.7")
    store.contributors.online(record.id, node_id="cd", address="192.0.2.7")
    assert store.contributors.set_state(seen, ContributorState.lost, "its node is dead") is None
    assert store.contributors.get(record.id).state == "probing"
    store.contributors.ready(record.id, capacity=[], links=[])
    assert store.contributors.set_state(seen, ContributorState.lost, "its node is dead") is None


def test_pages_of_contributors_leave_out_the_long_gone(store: Store, clock: Any) -> None:
    names = [f"machine-{index}" for index in range(5)]
    ids = [joined(store, name)[0].id for name in names]
    lose(store, ids[0])
    clock.pass_s(23 * 3600)
    lose(store, ids[1])
    clock.pass_s(2 * 3600)
    seen: list[str] = []
    cursor = None
    while True:
        page, cursor = store.contributors.page(limit=2, cursor=cursor)
        seen += [one.id for one in page]
        if cursor is None:
            break
    assert sorted(seen) == sorted(ids[1:])
    lost, _ = store.contributors.page(states=[ContributorState.lost])
    assert {one.id for one in lost} == set(ids[:2])


def test_a_key_is_for_its_own_contributor(store: Store) -> None:
    first, key = joined(store, "first")
    second, _ = joined(store, "second")
    for contributor_id in (second.id, "con-none"):
        with pytest.raises(NotAuthorized):
            store.contributors.authorize(contributor_id, key)
    assert store.contributors.authorize(first.id, key).name == "first"
