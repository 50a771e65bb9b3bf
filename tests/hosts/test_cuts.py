"""Links between hosts are cut while a job trains: no step is lost, and the result is that of an undisturbed job."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from itertools import pairwise

import pytest
from tests.conftest import wait_for
from tests.hosts.cluster import Cluster
from tests.hosts.network import Direction
from tests.hosts.training import Result, cut, train
from tests.thoroughly import thoroughly

from share_compute.store import JobRecord
from share_compute_api.client.client import Client

pytestmark = [pytest.mark.slow, pytest.mark.chaos]


@pytest.mark.parametrize(
    ("seconds", "direction"),
    thoroughly([(4, "both"), (4, "in"), (4, "out"), (30, "both"), (300, "both")], quick=1),
)
def test_a_server_that_is_cut_off_loses_nothing(
    cluster: Cluster, undisturbed: Result, seconds: float, direction: Direction
) -> None:
    cut_off = partial(cut, cluster, "server", seconds, direction)
    assert train(cluster, f"server-{direction}-{seconds}", cut_off, may_end=False) == undisturbed


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("seconds", "direction"),
    thoroughly([(5, "both"), (5, "in"), (5, "out"), (1, "both"), (30, "both"), (120, "both")], quick=1),
)
def test_a_machine_that_is_cut_off_loses_nothing(
    cluster: Cluster, undisturbed: Result, seconds: float, direction: Direction
) -> None:
    cut_off = partial(cut, cluster, "machine-1", seconds, direction)
    assert train(cluster, f"machine-{direction}-{seconds}", cut_off) == undisturbed


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("direction", "backups"),
    thoroughly([("both", True), ("in", True), ("out", True), ("both", False)], quick=1),
)
def test_two_machines_that_are_cut_from_each_other_lose_nothing(
    cluster: Cluster, undisturbed: Result, direction: Direction, backups: bool
) -> None:
    name = f"pair-{direction}-{backups}"

    def found(client: Client) -> JobRecord:
        (job,) = (job for job in client.jobs().jobs if job.name == name)
        return job

    with ExitStack() as stack, cluster.server.client() as client:

        def cut_pair() -> None:
            plan = found(client).plan
            assert plan is not None
            one, other = (cluster.machines[stage.members[0].name] for stage in plan.stages[:2])
            stack.enter_context(one.cut_from([other], direction))

        assert train(cluster, name, cut_pair, backups=backups) == undisturbed
        events = client.events(found(client).id, limit=1000).events
        (pair,) = (event.data["machines"] for event in events if event.kind == "link-cut")
        attempts = {event.attempt for event in events if event.kind == "step"}
        assert attempts == ({1} if backups else {1, 2})
        plan = found(client).plan
        assert plan is not None
        stages = [{member.contributor_id for member in stage.members} for stage in plan.stages]
        ends = set(pair)
        assert not any(ends <= one | other and ends & one and ends & other for one, other in pairwise(stages))
        assert backups or (len(stages) == 3 and not stages[1] & ends), "both others reach it"

    def is_known_to_be_over() -> bool:
        with cluster.server.client() as client:
            return all(link.bytes_per_s > 0 for link in client.topology().links)

    wait_for(is_known_to_be_over, "a new measurement of the link")
