"""Pictures of jobs: the last of each split is stored, and none is in the event log."""

from __future__ import annotations

from tests.platform.store.test_jobs import spec

from share_compute.lifecycle.attempt_events import Pictured
from share_compute.store import Store


def test_the_last_picture_of_each_split_is_kept(store: Store) -> None:
    job = store.jobs.create(spec())
    store.jobs.begin(job.id, [])
    assert store.progress.pictures(job.id) == []
    first = Pictured(split="validation", step=1, samples=2, confusion=((1, 0), (1, 0)))
    last = Pictured(split="validation", step=2, samples=2, confusion=((1, 0), (0, 1)))
    test = Pictured(split="test", step=2, samples=1, points=((1.0, 2.0),))
    store.progress.record(job.id, 1, [first])
    store.progress.record(job.id, 1, [last, test])
    assert store.progress.pictures(job.id) == [last, test]
    assert [event.kind for event in store.events.after(0, job_id=job.id)] == ["state", "state"]
