"""Tags and groups of jobs, on each database."""

from __future__ import annotations

import pytest
from tests.platform.store.test_jobs import spec

from share_compute.errors import NotFound, UserError
from share_compute.specification import TrainJob, parse_job
from share_compute.store import Store


def labelled(*tags: str, group: str | None = None) -> TrainJob:
    return parse_job({**spec().model_dump(mode="json"), "tags": list(tags), "group": group})


def test_jobs_are_found_by_tags_and_group(store: Store) -> None:
    first = store.jobs.create(labelled("a", "b_x", group="g"))
    second = store.jobs.create(labelled("b_x", "a b", group="h"))
    third = store.jobs.create(labelled())

    def found(*tags: str, group: str | None = None) -> set[str]:
        return {job.id for job in store.jobs.page(tags=tags, group=group)[0]}

    assert found() == {first.id, second.id, third.id}
    assert found("b_x") == {first.id, second.id}
    assert found("a") == {first.id}
    assert found("b_x", "a b") == {second.id}
    assert found("b-x") == found("a", "a b") == found("'") == set()
    assert found(group="g") == {first.id}
    assert (store.jobs.get(first.id).tags, third.tags, third.group) == (("a", "b_x"), (), None)
    store.jobs.label(third.id, tags=["a"], group="g")
    assert found("a", group="g") == {first.id, third.id}
    store.jobs.label(third.id, tags=[])
    assert store.jobs.get(third.id).group == "g"
    assert store.jobs.label(third.id, group=None).group is None
    assert store.jobs.label(third.id, note="slow\nbut steady").note == "slow\nbut steady"
    assert store.jobs.label(third.id, tags=[]).note == "slow\nbut steady"
    assert found("a") == {first.id}
    with pytest.raises(NotFound):
        store.jobs.label("job-none", tags=[])


@pytest.mark.parametrize(
    "tags",
    [
        [f"t{number}" for number in range(10_000)],
        ["a\tb"],
        ["a\n"],
        ["a\x1b[31m"],
        [""],
        ["a", "a"],
        ["a,b"],
        ["x" * 61],
    ],
    ids=["many", "tab", "line", "escape", "empty", "twice", "comma", "long"],
)
def test_wrong_tags_are_refused(tags: list[str]) -> None:
    with pytest.raises(UserError, match="tags") as refused:
        labelled(*tags)
    assert len(str(refused.value)) < 1000
