"""A job on real machines with labels: it waits for the machine that it wants, and never takes the other one."""

from __future__ import annotations

from typing import Any

import pytest
from tests.conftest import run_contributor

from share_compute.lifecycle.states import JobState

pytestmark = pytest.mark.slow


@pytest.mark.thorough
def test_a_job_waits_for_a_machine_with_its_label(server: Any, wait_for: Any) -> None:
    job = {
        "name": "picky",
        "model": {"layers": [{"type": "linear", "options": {"in_features": 64, "out_features": 10}}]},
        "data": {"dataset": "digits"},
        "training": {"steps": 3, "batch_size": 8, "microbatches": 2},
        "parallelism": {"only": ["site=north pole"], "avoid": ["role=spare"]},
    }
    with (
        server.client() as client,
        run_contributor(server, None, "--label", "site=north pole", "--label", "role=spare") as spare,
    ):
        assert spare.record.labels == {"site": "north pole", "role": "spare"}
        job_id = client.submit(job).id
        words = "waits for a machine with site=north pole without role=spare"
        wait_for(lambda: words in client.job(job_id).reason, "the reason")
        with run_contributor(server, None, "--label", "site=north pole") as wanted:
            over = wait_for(
                lambda: found if (found := client.job(job_id)).state.is_final else None, "the end"
            )
            assert over.state is JobState.succeeded, over.reason
            assert over.plan.machines == {wanted.record.id}
            assert [
                machine.labels for machine in client.topology().contributors if machine.id == wanted.record.id
            ] == [{"site": "north pole"}]
