"""A machine that made wrong numbers gets no work, wherever it goes, until the operator clears it."""

from __future__ import annotations

from pathlib import Path

import pytest

from share_compute.lifecycle.attempt_events import Offended
from share_compute.lifecycle.states import ContributorState
from share_compute.specification import parse_job
from share_compute.store import Store, upgrade
from share_compute.topology import Device
from share_compute_api.schemas.versions import local_versions
from share_compute_api.server.alerts import of_machines

SPEC = {
    "model": {"layers": [{"type": "linear", "options": {"in_features": 64, "out_features": 10}}]},
    "data": {"dataset": "digits"},
    "training": {"steps": 4},
}
DEVICE = Device("cpu", "cpu", memory_bytes=2**30, flops_per_s={"float32": 1e9})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    url = f"sqlite:///{tmp_path / 'base.sqlite3'}"
    upgrade(url)
    return Store(url)


def joined(store: Store, name: str) -> str:
    _, code = store.invites.create(name)
    record, _ = store.contributors.join(code, name=name, host="host", versions={}, limits={})
    return measured(store, record.id)


def measured(store: Store, machine: str) -> str:
    store.contributors.online(machine, node_id=f"node of {machine}", address="127.0.0.1")
    store.contributors.ready(machine, capacity=[DEVICE], links=[])
    return machine


def offend(store: Store, machine: str, *, quarantined: bool = False, accuser: str | None = None) -> None:
    """Let an attempt at a job of its own report an offence."""
    job = store.jobs.begin(store.jobs.create(parse_job(SPEC)).id, [])
    offence = Offended(
        machine=machine,
        step=3,
        what="its dtype is float64",
        quarantined=quarantined,
        accuser=accuser,
        sentence="ada did it",
    )
    store.progress.record(job.id, job.attempt, [offence])


def state(store: Store, machine: str) -> ContributorState:
    return store.contributors.get(machine).state


def test_the_second_offence_quarantines_in_whichever_job_it_is(store: Store) -> None:
    ada = joined(store, "ada")
    offend(store, ada)
    assert state(store, ada) is ContributorState.ready
    offend(store, ada)
    record = store.contributors.get(ada)
    assert record.state is ContributorState.quarantined
    assert "its dtype is float64" in record.reason
    kinds = [event.kind for event in store.events.after(0, contributor_id=ada)]
    assert kinds.count("offence") == 2
    assert store.leases.take("dep-1", [ada]) == []


def test_one_accuser_quarantines_nobody_in_however_many_jobs(store: Store) -> None:
    ada, ben, cal = (joined(store, name) for name in ("ada", "ben", "cal"))
    for _ in range(3):
        offend(store, ada, accuser=ben)
    assert (state(store, ada), store.contributors.get(ada).offences) == (ContributorState.ready, 3)
    offend(store, ada, accuser=cal)
    assert state(store, ada) is ContributorState.quarantined
    store.contributors.clear(ada)
    offend(store, ada, accuser=cal)
    assert state(store, ada) is ContributorState.ready  # cleared offences do not count any more


def test_a_quarantine_outlives_going_and_coming_back(store: Store) -> None:
    ada = joined(store, "ada")
    offend(store, ada, quarantined=True)
    store.contributors.rejoin(ada)
    assert state(store, measured(store, ada)) is ContributorState.quarantined
    cleared = store.contributors.clear(ada)
    assert (cleared.state, cleared.offences, cleared.quarantined_for) == (ContributorState.ready, 0, None)
    assert state(store, measured(store, ada)) is ContributorState.ready


def test_the_operator_is_notified(store: Store) -> None:
    ada = joined(store, "ada")
    offend(store, ada, quarantined=True)
    now = store.clock()
    alerts = list(of_machines(store.contributors.presences(now), local_versions(), now, now))
    alert = {alert.kind: alert for alert in alerts}["machine-quarantined"]
    assert alert.severity == "error"
    assert alert.hint.endswith("`share-compute clear ada`")
