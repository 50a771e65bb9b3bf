"""Jobs and deployments that name the machines that they use or avoid: they wait for these, and take no others."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.api.control.test_allotting import offered, reformed, training
from tests.api.control.test_deployment_supervision import House
from tests.api.control.test_deployment_supervision import run as run_house
from tests.api.playing import Cluster, laid, planned, run

from share_compute.errors import UserError
from share_compute.lifecycle.states import JobState
from share_compute.specification import ServeJob, parse_job
from share_compute.store import Store
from share_compute_api.submission.placement import check_placement, check_selection


def test_a_job_waits_for_a_machine_with_its_label_and_says_so(store: Store, tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        ada = cluster.contributor("ada", gpu="no")
        cluster.join("eve", gpu="no")  # it is coming, but not for this job
        job_id = cluster.submit(only=["gpu=yes"])
        reason = "waiting for contributors: needs 1, none is ready; waits for a machine with gpu=yes"
        await cluster.until(job_id, lambda job: job.reason == reason)
        other = cluster.submit("other", only=["ada"])
        attempt = await cluster.attempts.get()
        assert attempt.assignment.job_id == other
        assert [one.id for one in attempt.assignment.topology.contributors] == [ada]
        grace = cluster.contributor("grace", gpu="yes")
        attempt = await cluster.attempts.get()
        assert attempt.assignment.job_id == job_id
        (machine,) = attempt.assignment.topology.contributors
        assert (machine.id, machine.labels) == (grace, {"gpu": "yes"})
        await attempt.report(planned(grace))
        await cluster.until(job_id, lambda job: job.state is JobState.running)
        assert store.contributors.get(ada).job_id == other

    run(store, tmp_path, story)


def test_a_machine_that_joins_is_offered_only_to_a_job_that_may_use_it(store: Store, tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        ada = cluster.contributor("ada")
        first = cluster.submit("first", avoid=["site=rome", "edsger"])
        attempt = await training(cluster, first, ada)
        cluster.contributor("bob", site="rome")
        cluster.contributor("edsger")
        grace = cluster.contributor("grace", site="oslo")
        while await offered(attempt) != {ada, grace}:
            pass
        await attempt.report(reformed(ada))
        other = cluster.submit("other", only=["bob", "edsger"])
        second = await cluster.attempts.get()
        assert second.assignment.job_id == other
        assert {one.name for one in second.assignment.topology.contributors} == {"bob", "edsger"}

    run(store, tmp_path, story)


def test_after_a_loss_no_avoided_machine_is_taken(store: Store, tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        ada = cluster.contributor("ada")
        job_id = cluster.submit(only=["ada", "grace"])
        attempt = await training(cluster, job_id, ada)
        bob = cluster.contributor("bob")
        cluster.lose(ada, "nothing was heard from it")
        grace = cluster.contributor("grace")
        while await offered(attempt) != {grace}:
            pass
        assert store.contributors.get(bob).job_id is None

    run(store, tmp_path, story)


def relabel(store: Store, cluster: Cluster, contributor_id: str, **labels: str) -> None:
    """Let the agent of a machine join again, with other labels."""
    store.contributors.rejoin(contributor_id, versions={}, limits={"cpu_threads": 2, "labels": labels})
    cluster.arrive(contributor_id)


def test_a_machine_that_comes_back_with_labels_that_a_job_avoids_is_released(
    store: Store, tmp_path: Path
) -> None:
    async def story(cluster: Cluster) -> None:
        ada, grace = cluster.contributor("ada", site="oslo"), cluster.contributor("grace")
        job_id = cluster.submit(avoid=["site=rome"])
        attempt = await training(cluster, job_id, ada, grace)
        relabel(store, cluster, ada, site="rome")
        assert await attempt.drains.get() == ada
        while await offered(attempt) != {grace}:
            pass

    run(store, tmp_path, story)


def test_a_deployment_releases_a_machine_whose_labels_changed(store: Store, tmp_path: Path) -> None:
    async def story(house: House) -> None:
        ada = house.cluster.contributor("ada", gpu="yes")
        house.deploy(parallelism={"only": ["gpu=yes"]})
        replica = await house.replicas.get()
        await house.until(lambda: house.leased() == {ada})
        replica.serve(ada)
        relabel(store, house.cluster, ada, gpu="no")
        await house.until(lambda: not replica.topologies[-1].contributors)

    run_house(store, tmp_path, story)


def test_a_deployment_takes_only_machines_that_it_may_use(store: Store, tmp_path: Path) -> None:
    async def story(house: House) -> None:
        bob = house.cluster.contributor("bob", gpu="no")
        record = house.deploy(parallelism={"only": ["gpu=yes"]})
        replica = await house.replicas.get()
        await house.until(
            lambda: store.deployments.get(record.id).reason == "waits for a machine with gpu=yes"
        )
        ada = house.cluster.contributor("ada", gpu="yes")
        await house.until(lambda: house.leased() == {ada})
        await house.until(lambda: [one.id for one in replica.topologies[-1].contributors] == [ada])
        replica.serve(ada)
        await house.until(lambda: store.deployments.get(record.id).plans == (laid(ada),))
        assert store.contributors.get(bob).deployment_id is None

    run_house(store, tmp_path, story)


def test_a_machine_that_is_named_in_two_ways_is_refused(store: Store, tmp_path: Path) -> None:
    cluster = Cluster(store, tmp_path, None)  # type: ignore[arg-type]
    ada = cluster.contributor("ada", gpu="no")
    wanted = {"only": ["ada"], "avoid": [ada]}
    serve = ServeJob.model_validate({"name": "x", "model": {"path": "/x"}, "parallelism": wanted})
    with pytest.raises(UserError, match="machine ada is named by only, too") as caught:
        check_selection(serve.parallelism, store)
    assert caught.value.details["fields"][0]["field"] == "parallelism.avoid"
    job = {"model": {"layers": [{"type": "relu"}]}, "data": {"dataset": "digits"}}
    plan = {
        "kind": "plan",
        "version": 1,
        "model": {"layers": 1, "digest": "0" * 32},
        "microbatches": 1,
        "stages": [{"first_layer": 0, "last_layer": 0, "machines": [{"name": "ada", "microbatches": 1}]}],
    }
    with pytest.raises(
        UserError, match=r"it uses ada, which is avoided by the job: parallelism\.avoid names gpu=no"
    ):
        check_placement(parse_job({**job, "parallelism": {"plan": plan, "avoid": ["gpu=no"]}}), store)  # type: ignore[arg-type]
    # A selector that matches no machine now is a reason to wait, and no error.
    check_placement(parse_job({**job, "parallelism": {"only": ["nobody", "gpu=yes"]}}), store)  # type: ignore[arg-type]
