"""States of a deployment: exactly the transitions in its table are allowed."""

from __future__ import annotations

import pytest

from share_compute.errors import Conflict
from share_compute.lifecycle.deployment_states import LIVE, DeploymentState, check_change

ALLOWED = {
    ("pending", "loading"),
    ("loading", "ready"), ("loading", "degraded"), ("loading", "pending"),
    ("ready", "degraded"), ("ready", "loading"), ("ready", "pending"),
    ("degraded", "ready"), ("degraded", "loading"), ("degraded", "pending"),
}  # fmt: skip


@pytest.mark.parametrize("current", DeploymentState)
@pytest.mark.parametrize("wanted", DeploymentState)
def test_only_the_listed_changes_are_allowed(current: DeploymentState, wanted: DeploymentState) -> None:
    if (current.value, wanted.value) in ALLOWED or (current in LIVE and wanted.is_final):
        check_change("llama", current, wanted)
        return
    with pytest.raises(
        Conflict, match=f"llama is {current.value}; it cannot become {wanted.value}"
    ) as caught:
        check_change("llama", current, wanted)
    assert caught.value.hint
