"""Pictures of jobs: the last of each split is stored, and none is in the event log."""

from __future__ import annotations

import pytest
from pydantic import ValidationError
from tests.platform.store.test_jobs import spec

from share_compute.lifecycle.attempt_events import Pictured
from share_compute.quantities import clipped
from share_compute.store import Store
from share_compute.training.pictures import MOST_CLASSES, MOST_POINTS


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


def test_pictures_are_as_large_as_members_make_them_and_no_larger() -> None:
    names, points = [clipped("x" * 999)] * MOST_CLASSES, [(1.0, 2.0)] * MOST_POINTS
    fields = {"split": "test", "step": 1, "samples": 2}
    row = [1] * MOST_CLASSES
    Pictured.model_validate({**fields, "confusion": [row] * MOST_CLASSES, "classes": names})
    Pictured.model_validate({**fields, "points": points})
    for wrong in (
        {"classes": [*names, "a"]},
        {"classes": ["x" * 81]},
        {"confusion": [row] * (MOST_CLASSES + 1)},
        {"confusion": [[*row, 1]]},
        {"points": [*points, (1.0, 2.0)]},
    ):
        with pytest.raises(ValidationError):
            Pictured.model_validate({**fields, **wrong})
