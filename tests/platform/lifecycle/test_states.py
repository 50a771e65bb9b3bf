"""States of a job: exactly the transitions in its table are allowed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from share_compute.errors import Conflict
from share_compute.lifecycle.states import JobState, check_transition

ALLOWED = {
    ("queued", "planning"), ("queued", "cancelled"), ("queued", "failed"),
    ("planning", "running"), ("planning", "queued"), ("planning", "failed"), ("planning", "cancelled"),
    ("running", "succeeded"), ("running", "queued"), ("running", "failed"), ("running", "cancelled"),
    ("failed", "queued"), ("cancelled", "queued"),
}  # fmt: skip


@pytest.mark.parametrize("current", JobState)
@pytest.mark.parametrize("wanted", JobState)
def test_only_the_listed_changes_are_allowed(current: JobState, wanted: JobState) -> None:
    if (current.value, wanted.value) in ALLOWED:
        check_transition("job-1", current, wanted)
        return
    with pytest.raises(
        Conflict, match=f"job-1 is {current.value}; it cannot become {wanted.value}"
    ) as caught:
        check_transition("job-1", current, wanted)
    assert caught.value.job == "job-1"
    assert caught.value.hint


@given(st.lists(st.sampled_from(JobState)))
def test_only_a_resume_leaves_a_final_state(wishes: list[JobState]) -> None:
    state = JobState.queued
    for wanted in wishes:
        try:
            check_transition("job-1", state, wanted)
        except Conflict:
            continue
        assert not state.is_final or wanted is JobState.queued
        state = wanted


def test_every_state_that_is_not_final_can_be_cancelled() -> None:
    for state in JobState:
        if not state.is_final:
            check_transition("job-1", state, JobState.cancelled)
