"""Actor methods run on the threads that their source names, so a long call never delays a heartbeat."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import ray

from share_compute_actors.group.answering import answered, answers
from share_compute_actors.inference.member import ServingMember
from share_compute_actors.inference.server import DeploymentServer
from share_compute_actors.inference.weights import ServedWeights
from share_compute_actors.machine.contributor import ContributorActor
from share_compute_actors.training.coordinator.coordinator import Coordinator
from share_compute_actors.training.member.member import Member
from share_compute_actors.training.shard_store import ShardStore
from share_compute_actors.wire import COUNT

ACTORS = (ContributorActor, Coordinator, DeploymentServer, ShardStore, Member, ServedWeights, ServingMember)


@pytest.mark.parametrize("actor", ACTORS, ids=lambda actor: actor.__ray_metadata__.class_name)
def test_ray_knows_the_group_of_each_method(actor: Any) -> None:
    meta = actor.__ray_metadata__
    named = {
        name: method.__ray_concurrency_group__
        for name in dir(meta.modified_class)
        if hasattr(method := getattr(meta.modified_class, name), "__ray_concurrency_group__")
    }
    assert named
    assert meta.method_meta.concurrency_group_for_methods == named


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_an_order_does_not_keep_others_waiting() -> None:
    @ray.remote(num_cpus=0, concurrency_groups={"orders": 1, "control": 1})
    class Worker:
        def __init__(self) -> None:
            self._is_over = threading.Event()

        @ray.method(concurrency_group="orders")
        @answers(COUNT)
        def work(self) -> int:
            return int(self._is_over.wait(60.0))

        @ray.method(concurrency_group="control")
        @answers(COUNT)
        def end(self) -> int:
            self._is_over.set()
            return 1

    worker: Any = Worker.remote()  # type: ignore[attr-defined]
    work = worker.work.remote()
    assert answered(COUNT, worker.end.remote(), "worker") == 1
    assert answered(COUNT, work, "worker") == 1, "it waited for its end, which waited for it"
    ray.kill(worker)
