"""Links of an island, and of the server, are cut during a round: the weights have the bits of an undisturbed job."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from tests.hosts.cluster import Cluster
from tests.hosts.training import JOB, cut, digest, finished

pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.thorough]
STEPS, EVERY = 1200, 30


def rounds(*, keeps_state: bool = True) -> dict[str, Any]:
    """Return a job with three branches on three machines, which may keep state from round to round."""
    policy = {"kind": "local", "branches": 3, "preset": "diloco", "every": EVERY}
    compression: dict[str, Any] = {"name": "int8"}
    if not keeps_state:
        policy["inner_state"] = "reset"
        compression["error_feedback"] = None
    return {
        **JOB,
        "training": {
            "steps": STEPS,
            "batch_size": 32,
            "synchronization": policy,
            "compression": compression,
        },
        "parallelism": {"stages": 1, "members_per_stage": 1},
    }


def test_a_short_cut_changes_no_bit(cluster: Cluster) -> None:
    with cluster.server.client() as client:
        undisturbed = finished(cluster, client, rounds())
        events = client.events(undisturbed.id, limit=1000, without=["step"]).events
        merged = [event for event in events if event.kind == "round"]
        assert len(merged) == STEPS // EVERY
        assert len({tuple(branch["machines"]) for branch in merged[0].data["branches"]}) == 3
        for end in ("machine-1", "server"):
            job = finished(cluster, client, rounds(), partial(cut, cluster, end, 5))
            assert digest(client, job) == digest(client, undisturbed), end


def test_a_branch_whose_machine_is_lost_runs_its_round_again_with_the_same_bits(cluster: Cluster) -> None:
    with cluster.server.client() as client:
        undisturbed = finished(cluster, client, rounds(keeps_state=False))
        job = finished(cluster, client, rounds(keeps_state=False), partial(cut, cluster, "machine-1", 40))
        events = client.events(job.id, limit=1000, without=["step"]).events
        assert any("is started again" in event.data.get("message", "") for event in events)
        assert digest(client, job) == digest(client, undisturbed)
